"""Shared by modes whose workers play whole episodes: issuing episodes, and joining fragments to episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from freewheel.core import TRANSITION_FIELDS, Transitions
from freewheel.errors import SetupError
from freewheel.pacing.episode_queue import EpisodeOrder, EpisodeQueue
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.transport.wire import Fragment, Wire

STEPS = 128  # default length of a fragment
SLOTS = 4  # fragments of a worker that may wait; the learner's side joins them to episodes


def episode_queue(
    factory: RunnerFactory,
    spec: CollectSpec,
    *,
    workers: int,
    steps: int,
    episodes: int | None,
    max_lag: int | None,
    wave: bool = False,
) -> EpisodeQueue:
    """steps: most per fragment; episodes: number per update, None: an update takes S rows; wave: see EpisodesConfig."""
    side_by_side = spec.env.lanes // workers
    return EpisodeQueue(
        order=EpisodeOrder(factory.seed, spec.env.lanes, factory.first_lane),
        side_by_side=side_by_side,
        workers=workers,
        steps=steps,
        batch_rows=spec.batch.rows,
        whole=spec.whole,
        batch_episodes=episodes,
        max_lag=max_lag,
        wave=-(-(episodes or spec.env.lanes) // side_by_side) if wave else 0,
        turns=spec.workers.turns,
    )


class WholeEpisodes:
    """Joins fragments to episodes; a worker's envs stay side by side. Implements Assembly."""

    takes_parts, gathers, only_waited_for = False, True, False
    oldest = None  # the worker itself announces its episode's version until the end of the episode is here

    def __init__(self, queue: EpisodeQueue, spec: CollectSpec) -> None:
        self._queue, self._env, self._longest = queue, spec.env.name, spec.longest
        self._parts: list[list[Fragment]] = [[] for _ in range(queue.workers)]  # of each worker's current episode
        self._ready: list[Fragment] = []
        self.hurried = bool(queue.wave)

    def put(self, fragment: Fragment, *, late: bool) -> Iterable[tuple[Fragment, str]]:
        parts = self._parts[fragment.worker]
        if parts and parts[0].incarnation != fragment.incarnation:
            yield from self._drop(parts, "worker_death")
        parts.append(fragment)
        if fragment.lost:
            self._queue.cut += 1
            yield from self._drop(parts, next(iter(fragment.lost)))
        elif fragment.episodes and late:
            self._queue.cut += 1
            yield from self._drop(parts, "stale")
        elif fragment.episodes:
            if len(fragment.episodes) != self._queue.side_by_side:
                remedy = "use --envs-per-worker 1, or --mode continuous"
                raise SetupError(
                    f"episodes of {self._env} do not all end together, as those side by side must; {remedy}"
                )
            whole = self._joined(parts)
            parts.clear()
            self._queue.finished += 1
            self._queue.finished_rows += whole.rows
            self._ready.append(whole)
        elif self._longest and sum(part.rows for part in parts) > self._longest * self._queue.side_by_side:
            remedy = "add --max-episode-steps, or use --mode continuous, which learns from parts of episodes"
            raise SetupError(f"an episode of {self._env} has not ended after {self._longest:,} steps; {remedy}")

    @staticmethod
    def _drop(parts: list[Fragment], cause: str) -> Iterator[tuple[Fragment, str]]:
        dropped = parts[:]
        parts.clear()
        yield from ((part, cause) for part in dropped)

    def _joined(self, parts: Sequence[Fragment]) -> Fragment:
        order, ended = self._queue.order, parts[-1].episodes
        episodes = [(episode, *order.episode(episode.number)) for episode in ended]
        data = parts[0].data if len(parts) == 1 else Transitions(
            *(np.concatenate([getattr(part.data, name) for part in parts]) for name in TRANSITION_FIELDS)
        )  # fmt: skip
        return parts[0]._replace(
            data=data,
            episodes=tuple(replace(episode, lane=lane, number=number) for episode, lane, number in episodes),
            rows=sum(part.rows for part in parts),
            time=np.sum([part.time for part in parts], axis=0),
        )

    def ready(self) -> Iterable[Fragment]:
        ready, self._ready = self._ready, []
        return ready

    @property
    def rows(self) -> int:
        return sum(part.rows for parts in self._parts for part in parts)

    def wait(self, wire: Wire) -> None:
        """Begin the next wave when the last one is over and the learner has taken all of it."""
        permits, queue = wire.permits, self._queue
        if queue.wave and permits.locked(queue.wave_is_over) and not wire.queued_versions():
            permits.wake(permits.locked(queue.release))
