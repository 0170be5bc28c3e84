"""CAGE Challenge 2 as a world family: the fast environment and the real simulator CybORG."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freewheel.envs import gym
from freewheel.envs.family import EnvConfig, EvalProtocol, FamilyEvaluation, FamilyFlags, WorldFamily
from freewheel.errors import UsageError, nearest
from freewheel_cage2.scenario import RED_AGENTS, REDS, STEPS, find_red

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from freewheel.core import Actor
    from freewheel.envs.family import EvaluatedRun

PREFIX = "cyborg:"
REAL, FAST = "cyborg:Scenario2", "freewheel/Cage2-v0"
#: The modules that a worker imports for the real simulator; the second one loads it.
MODULES = ("freewheel_cage2.cyborg", "freewheel_cage2.cyborg_package")


def serves(name: str) -> bool:
    """Return whether this name is CAGE Challenge 2."""
    return name.startswith(PREFIX) or name == FAST


def build(name: str, args: Mapping[str, Any], options: Any, device: str) -> EnvConfig:
    """Return the environment's configuration. On the real simulator an episode has 100 steps unless the options say otherwise."""
    args = {**args, "red_agent": find_red(args["red_agent"])} if "red_agent" in args else args
    if name == FAST:
        return gym.build(name, args, options, device)
    if name != REAL:
        raise UsageError(f"unknown scenario '{name}'{nearest(name, [REAL])}")
    limit = options.max_episode_steps or STEPS
    return real(gym.GymConfig(name, args, **{**vars(options), "max_episode_steps": limit}))


def real(config: gym.GymConfig) -> gym.GymConfig:
    """Return the same environment on the real simulator."""
    from freewheel_cage2.cyborg import UNLIMITED

    return replace(config, id=REAL, factory=UNLIMITED, preload=MODULES)


def _official(run: EvaluatedRun, actor: Actor, episodes: int, seed: int) -> tuple[Mapping[str, Any], RenderableType]:
    from freewheel_cage2 import official

    return official.report(run, actor, episodes, seed)


def _compare(run: EvaluatedRun, mean: float, console: Console) -> None:
    """For the fast environment, print the score in a table of simple and published defenders."""
    if run.config.env.id == FAST:
        from freewheel_cage2 import official

        console.print(official.comparison_table(run.config, mean))


ENVS, ABOUT = "freewheel_cage2.env", "the protocol of CAGE Challenge 2, on the real simulator"
OFFICIAL = EvalProtocol(name="official", help=ABOUT, episodes=100, seed=153, run=_official)
FAMILY = WorldFamily(
    name="cage2",
    serves=serves,
    options=gym.GymOptions,
    build=build,
    names_code=lambda _: False,  # both names belong to this package
    ids={
        FAST: {"entry_point": f"{ENVS}:Cage2", "vector_entry_point": f"{ENVS}:Cage2Vector", "max_episode_steps": STEPS}
    },
    flags=FamilyFlags(
        defaults={"red_agent": RED_AGENTS[0]},
        aliases={"red_agent": "env.red_agent"},
        presets="freewheel_cage2",
        env_help=f"{FAST} or {REAL} for CAGE Challenge 2",
        help=f"--red-agent NAME chooses the attacker in CAGE Challenge 2 ({', '.join(REDS)}; "
        "short names such as bline and meander do).",
    ),
    evaluation=FamilyEvaluation(protocols=[OFFICIAL], compare=_compare),
    packages={
        "csle_cyborg": f"CybORG, the real simulator of CAGE Challenge 2 ({REAL}): make cyborg",
        "sklearn": "`freewheel workflow search`: pip install 'freewheel-cage2[workflow]' (scikit-learn)",
    },
)
