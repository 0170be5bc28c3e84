"""Replays a worker process step by step, with the same environment, policy, seeds and versions."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freewheel.core import TRANSITION_FIELDS, Episode, Failure, NDArray, SeedStream, Snapshot, Transitions
from freewheel.errors import FreewheelError
from freewheel.pacing.episode_queue import EpisodeOrder, Tickets, TicketStream
from freewheel.pacing.pacing import NO_TICKET
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.runner import Author, empty_transitions
from freewheel.rollout.single_env_runner import make_runner
from freewheel.run.schedule.log import Act, Checksums, checksums
from freewheel.seeding import training_episodes

MOST_NAMED = 4  # lanes named in a message


@dataclass(frozen=True)
class WorkerBeginning:
    """The worker process to replay, and its initial state."""

    worker: int
    incarnation: int
    lanes: range
    first: Sequence[int]  # numbers of the lanes' first episodes
    context: NDArray  # [K, C] the table of contexts at that time
    order: EpisodeOrder | None  # of episodes issued as tickets; None: every lane plays its own episodes


@dataclass(frozen=True)
class FragmentRequest:
    """A request for the next fragment."""

    act: Act
    snapshot: Snapshot | None  # None: keep the loaded weights


@dataclass(frozen=True)
class Performed:
    """A replayed fragment."""

    data: Transitions
    state: NDArray  # [B, H] the actor's memory before row 0
    episodes: tuple[Episode, ...]
    rows: int  # valid ones
    lost: Counter[str]  # rows lost to failures of the environment, by cause
    difference: str = ""  # how it differs from the recorded fragment; empty: it does not


def joined(parts: Sequence[Performed]) -> Transitions:
    """Return the rows of all fragments, in order."""
    if len(parts) == 1:
        return parts[0].data
    return Transitions(*(np.concatenate([getattr(one.data, name) for one in parts]) for name in TRANSITION_FIELDS))


class _Issued:
    """Issues tickets as recorded. Implements pacing.episode_queue.TicketSource."""

    def __init__(self, order: EpisodeOrder, side_by_side: int) -> None:
        self.order, self.side_by_side = order, side_by_side
        self.waiting: deque[int] = deque()

    def held(self, worker: int) -> int:
        return NO_TICKET

    def issue(self, worker: int) -> int:
        if not self.waiting:
            raise FreewheelError("its environment began more episodes than when it was recorded")
        return self.waiting.popleft()


class ReplayedWorker:
    """Replays one worker process. It does what transport/shm/worker.py does, with requests in place of grants."""

    def __init__(self, factory: RunnerFactory, part: WorkerBeginning) -> None:
        self._part, lanes = part, part.lanes
        self._issued = None if part.order is None else _Issued(part.order, len(lanes))
        self._streams = self._episodes(factory.seed)
        author = Author(factory.seed, lanes, worker=part.worker, incarnation=part.incarnation, streams=self._streams)
        env = factory.env(lanes, fault_tolerant=True)
        self._runner = make_runner(factory, lanes, env, author)
        self._begun = False

    def _episodes(self, seed: int) -> Sequence[SeedStream]:
        part = self._part
        if self._issued is None:
            return [
                training_episodes(seed, lane, start=start) for lane, start in zip(part.lanes, part.first, strict=True)
            ]
        tickets = Tickets(self._issued, part.worker, lambda decide, *words: decide(*words))
        return [TicketStream(tickets, place) for place in range(len(part.lanes))]

    def __call__(self, order: FragmentRequest) -> Performed:
        runner, act = self._runner, order.act
        if self._issued is not None:
            self._issued.waiting.extend(act.tickets)
        if not self._begun:
            self._begun = True
            runner.set_context(self._part.context)
            runner.begin()
        self._reset_if_over()
        if order.snapshot is not None:
            runner.load(order.snapshot)
        places, state, data = runner.places(), runner.state, empty_transitions(act.steps, runner.env.spec)
        episodes, lost, rows = list[Episode](), Counter[str](), 0
        for t in range(act.steps):
            self._reset_if_over()
            episodes += runner.step(data, t)
            rows += runner.rows
            lost.update(_lost(runner.failures))
        difference = self._difference(act, checksums(data), places)
        return Performed(data, state, tuple(episodes), rows, lost, difference)

    def close(self) -> None:
        self._runner.close()

    def _reset_if_over(self) -> None:
        if self._runner.over:
            self._runner.autoreset()
            self._runner.over = False

    def _difference(self, act: Act, found: Checksums, places: Sequence[tuple[int, int]]) -> str:
        if act.sums is None or found == act.sums:
            return ""
        if found.choices == act.sums.choices:
            what = "its environment answered the same actions in another way"
        elif found.answers == act.sums.answers:
            what = "its policy decided differently"
        else:
            what = "its environment or its weights differ from the recorded ones"
        lanes = [
            f"lane {lane}: episode {stream.number(k)}, seed {stream.seed(k)}, from step {steps + 1}"
            for lane, stream, (k, steps) in zip(self._part.lanes, self._streams, places, strict=True)
        ]
        named = "; ".join(lanes[:MOST_NAMED]) + (" ..." if len(lanes) > MOST_NAMED else "")
        return f"{what} within these {act.steps} steps of version {act.version} ({named})"


def _lost(failures: Sequence[Failure]) -> list[str]:
    """Return the cause of every row that was lost in a step."""
    by_lane = {one.lane: one.cause for one in failures if not one.in_reset and one.cause != "quarantine"}
    return list(by_lane.values())
