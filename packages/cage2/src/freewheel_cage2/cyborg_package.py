"""Load the real simulator CybORG without torch. If no package of it is installed, ImportError says how to install one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from freewheel_cage2.scenario import RED_AGENTS

INSTALL = (
    "pip install csle-cyborg==0.0.3, then pip install --no-deps gym-csle-cyborg==0.10.1; or install the folder CybORG of "
    "the repository cage-challenge/cage-challenge-2"
)
NAMESAKE = "; the package CybORG on PyPI is a web scraper with the same name, not the simulator"


@dataclass(frozen=True)
class CyborgPackage:
    """An installed package of the simulator."""

    name: str
    start: Callable[[type[Any]], Any]  # takes the class of red and returns a simulator of Scenario 2
    wrap: Callable[[Any], Any]  # adds the challenge's wrapper for blue
    reds: Mapping[str, type[Any]]


def find() -> CyborgPackage:
    """Load the fork from PyPI or the official repository. Both play the same game."""
    for module, load in (("csle_cyborg", _fork), ("CybORG", _official)):
        if find_spec(module) is not None:
            return _load(module, load)
    namesake = NAMESAKE if find_spec("cyborg") is not None else ""
    raise ModuleNotFoundError(f"the simulator CybORG is not installed: {INSTALL}{namesake}")


def _load(module: str, load: Callable[[], CyborgPackage]) -> CyborgPackage:
    """Load a package and hide the warnings and the deprecation notice of old gym."""
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()), _without_learner():
            return load()
    except Exception as error:  # turns every failure into ImportError, which a preloading forkserver ignores
        raise ImportError(f"the simulator '{module}' cannot be loaded ({error}): {INSTALL}") from error


@contextmanager
def _without_learner() -> Iterator[None]:
    """Replace stable_baselines3 by an empty module. The simulator imports it, and so torch, for an example that we do not use."""
    name = "stable_baselines3"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = empty = ModuleType(name)
    vars(empty)["PPO"] = None
    try:
        yield
    finally:
        del sys.modules[name]


def _fork() -> CyborgPackage:
    main = import_module("csle_cyborg.main").Main
    agents = import_module("csle_cyborg.agents")
    wrapper = import_module("csle_cyborg.agents.wrappers.challenge_wrapper").ChallengeWrapper
    scenario = import_module("gym_csle_cyborg.constants.constants").CYBORG.CYBORG_SCENARIO_2_DICT
    return _package("csle-cyborg", lambda red: main(deepcopy(scenario), "sim", agents={"Red": red}), wrapper, agents)


def _official() -> CyborgPackage:
    package = import_module("CybORG")
    agents = import_module("CybORG.Agents")
    wrapper = import_module("CybORG.Agents.Wrappers").ChallengeWrapper
    scenario = Path(str(package.__file__)).parent / "Shared" / "Scenarios" / "Scenario2.yaml"
    return _package("CybORG", lambda red: package.CybORG(str(scenario), "sim", agents={"Red": red}), wrapper, agents)


def _package(
    name: str, start: Callable[[type[Any]], Any], wrapper: Callable[..., Any], agents: ModuleType
) -> CyborgPackage:
    reds = {red: getattr(agents, red) for red in RED_AGENTS}
    return CyborgPackage(name, start, lambda simulator: wrapper(env=simulator, agent_name="Blue"), reds)


PACKAGE = find()
