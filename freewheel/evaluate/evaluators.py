"""Whoever evaluates a run: here in turn with training, in a process of its own, or on reserved lanes of the one simulation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from freewheel.core import Actor, Env, Episode, Snapshot
from freewheel.errors import FreewheelError
from freewheel.evaluate.episodes import EvalSpec, Score, evaluate
from freewheel.metrics.meter import Meter
from freewheel.run.stopping import Stop
from freewheel.transport.executors import ProcessExecutor

Result: TypeAlias = tuple[
    int, Snapshot, Score | FreewheelError
]  # at which step, which weights, and what they are worth


class Evaluator(Protocol):
    """Takes weights, and says sooner or later what they are worth."""

    def ask(self, step: int, snapshot: Snapshot) -> None: ...
    def results(self, wait: bool) -> Iterator[Result]: ...


class Here:
    """In this process, in turn with training."""

    def __init__(self, env: Env, actor: Actor, eval_spec: EvalSpec, meter: Meter) -> None:
        self._env, self._actor, self._exam, self._meter = env, actor, eval_spec, meter
        self._done: list[Result] = []

    def ask(self, step: int, snapshot: Snapshot) -> None:
        with self._meter.span("eval"):
            self._actor.load(snapshot)
            eval_spec = self._exam
            score = evaluate(
                self._env, self._actor, eval_spec.episodes, eval_spec.seed, eval_spec.limit, snapshot.context
            )
        self._done.append((step, snapshot, score))

    def results(self, wait: bool) -> Iterator[Result]:
        done, self._done = self._done, []
        yield from done


class There:
    """In a process of its own, while training goes on."""

    def __init__(self, executor: ProcessExecutor[Snapshot, Score], stop: Stop) -> None:
        self._executor, self._stop = executor, stop
        self._asked: list[tuple[int, Snapshot]] = []

    def ask(self, step: int, snapshot: Snapshot) -> None:
        self._asked.append((step, snapshot))
        self._executor.submit(snapshot)

    def results(self, wait: bool) -> Iterator[Result]:
        while self._asked:
            self._stop.check()
            answer = self._executor.result(0.1 if wait else 0.0)
            if answer is not None:
                yield *self._asked.pop(0), answer
            elif not wait:
                return


class Reserved:
    """On lanes of the training's own simulation that act greedily: the latest episodes there, by weights a little older."""

    def __init__(self, eval_episodes: Callable[[], Sequence[Episode]], episodes: int, measures: Sequence[str]) -> None:
        self._graded, self._measures = eval_episodes, measures
        self._latest: deque[Episode] = deque(maxlen=episodes)
        self._asked: list[tuple[int, Snapshot]] = []

    def ask(self, step: int, snapshot: Snapshot) -> None:
        self._asked.append((step, snapshot))

    def results(self, wait: bool) -> Iterator[Result]:
        self._latest.extend(self._graded())
        if self._latest:
            asked, self._asked = self._asked, []
            for step, snapshot in asked:
                yield step, snapshot, self._score()

    def _score(self) -> Score:
        means = np.mean([episode.measures for episode in self._latest], axis=0).tolist()
        returns, lengths = (tuple(getattr(one, name) for one in self._latest) for name in ("ret", "length"))
        return Score(returns, lengths, 0, dict(zip(self._measures, means, strict=True)))
