"""Environments of this process whose calls are watched: timed by the watchdog and interrupted by signals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from freewheel.core import Env, EpisodePrefix, NDArray, SeedStream
from freewheel.registry import changed, with_defaults
from freewheel.rollout.call_state import CALL, CONSTRUCT, ELSEWHERE, PHASE, RESET, SINCE, cells
from freewheel.rollout.factory import MakeEnv
from freewheel.run.stopping.stop import Stop, Wrap

Replay: TypeAlias = Callable[
    [Sequence[SeedStream], Sequence[EpisodePrefix | None], Callable[[str], None]], tuple[NDArray, list[str]] | None
]


def wrapped(env: Env[Any], step: Wrap, reset: Wrap, stop: Stop) -> Env[Any]:
    """Return the Env with its steps, resets and close wrapped."""
    env = with_defaults(env, Env)
    found: Env[Any] = changed(
        env,
        Env,
        step=step(env.step),
        reset=reset(env.reset),
        autoreset=reset(env.autoreset),
        replay=_watched_replay(reset(env.replay)),
        close=partial(stop.close, env.close),
    )
    return found


def _watched_replay(again: Replay) -> Replay:
    """Restart the watchdog's clock at each call of the environment during a replay."""

    def replay(
        seeds: Sequence[SeedStream], played: Sequence[EpisodePrefix | None], calling: Callable[[str], None]
    ) -> tuple[NDArray, list[str]] | None:
        def called(what: str) -> None:
            calling(what)
            cells[SINCE] = time.monotonic_ns()
            if cells[PHASE] != ELSEWHERE:
                cells[PHASE] = RESET if what == "reset" else CALL

        return again(seeds, played, called)

    return replay


def watched(make: MakeEnv, stop: Stop) -> MakeEnv:
    """Return a factory of environments that run in this process and are watched."""

    def make_watched(lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env[Any]:
        construct, reset, step = (stop.guard(ELSEWHERE if processes else phase) for phase in (CONSTRUCT, RESET, CALL))
        return wrapped(construct(make)(lanes, processes=processes, fault_tolerant=fault_tolerant), step, reset, stop)

    return make_watched
