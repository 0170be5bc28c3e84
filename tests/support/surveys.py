"""Runs without the wait for a survey: the environment of a test is measured once, by the real one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from freewheel.config.resolve import Config
from freewheel.rollout.factory import MakeEnv, WorkerSpec
from freewheel.rollout.probe import EnvCost
from freewheel.run import planning
from freewheel.transport.survey import Survey
from tests.support.worlds import Identity

REAL = planning.survey_env
#: By environment and what is asked of it; the factory is kept so that its id stays its own.
KNOWN: dict[tuple[Any, ...], tuple[EnvCost, Any]] = {}


@functools.cache
def measured() -> Any:
    from freewheel.config.resolve import from_options

    return REAL(from_options(Identity, {}))


def survey_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs of tests.support.worlds:Identity and envs with the same spaces."""
    monkeypatch.setattr(planning, "survey_env", lambda *_, **__: measured())


def survey_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs of any environments: what one of them costs is measured the first time that it is trained."""

    def once(config: Config, meanwhile: Callable[[], None] = lambda: None, **asked: Any) -> EnvCost:
        env, factory = config.env, getattr(config.env, "factory", None)
        key = (repr(env), id(factory), type(config.collector), config.collector.needs_step_time, repr(asked))
        if env.on_device or key not in KNOWN:
            KNOWN[key] = REAL(config, meanwhile, **asked), factory
        else:
            meanwhile()
        return KNOWN[key][0]

    monkeypatch.setattr(planning, "survey_env", once)


def survey(make: MakeEnv, name: str, workers: WorkerSpec, **options: Any) -> EnvCost:
    """Measure an environment in a process of its own; see Survey."""
    with Survey(make, name, workers, **options) as running:
        return running.result()
