"""The state of an author's lanes as arrays, and how a resumed run restores it: by replaying the seeds, contexts and
actions of the episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from freewheel.core import Array, Env, EpisodePrefix, NDArray, SeedStream
from freewheel.errors import EnvError
from freewheel.rollout.recording import UNKNOWN, EpisodeRecording
from freewheel.seeding import Position

RECORDING = "recording."
LIMIT = 60.0  # seconds that replaying the episodes of one Env may take
OTHERWISE = "the environment did something else with the same seed and actions"

Calling = Callable[[str], None]


@runtime_checkable
class DrawsInBlocks(Protocol):
    """An Actor that draws more random numbers at a time than it needs at once."""

    def position(self, rng: np.random.Generator) -> Position: ...


class Boundary(NamedTuple):
    """An author between two chunks."""

    rng: Position
    memory: NDArray  # [B, H] of the actor
    played: Sequence[int]  # [B] episodes of each lane's stream that have ended
    contexts: Sequence[NDArray]  # [B] the table of contexts when each lane's episode began


@dataclass(frozen=True)
class LaneStates:
    """The state of one author's lanes."""

    numbers: Sequence[int]  # [B] of the episode under way, or of the one that begins next
    memory: NDArray  # [B, H] of the actor
    contexts: Sequence[NDArray]  # [B] the table of contexts when the episode began
    recording: Mapping[str, Array] = field(default_factory=dict)  # the part of the episodes played so far
    seconds: Sequence[float] = ()  # [B] that the episodes have lasted, if known

    def to_arrays(self) -> dict[str, Array]:
        by_id = {id(table): table for table in self.contexts}
        different = {(table.shape, table.tobytes()): table for table in by_id.values()}
        tables, where = list(different.values()), {key: place for place, key in enumerate(different)}
        place = {number: where[table.shape, table.tobytes()] for number, table in by_id.items()}
        return {
            "numbers": np.array(self.numbers, np.int64),
            "memory": np.array(self.memory),
            "seconds": np.array(self.seconds or [0.0] * len(self.numbers)),
            "context.of": np.array([place[id(table)] for table in self.contexts], np.int64),
            "context.rows": np.array([table.shape for table in tables], np.int64).reshape(-1, 2),
            "context.tables": np.concatenate([np.asarray(table, np.float32).reshape(-1) for table in tables]),
            **{f"{RECORDING}{name}": value for name, value in self.recording.items()},
        }

    @classmethod
    def from_arrays(cls, state: Mapping[str, Array]) -> LaneStates:
        arrays = {name: np.asarray(value) for name, value in state.items()}
        tables, at = [], 0
        for rows, columns in arrays["context.rows"].tolist():
            tables.append(arrays["context.tables"][at : at + rows * columns].reshape(rows, columns))
            at += rows * columns
        recorded = {name.removeprefix(RECORDING): value for name, value in arrays.items() if name.startswith(RECORDING)}
        return cls(
            numbers=arrays["numbers"].tolist(),
            memory=arrays["memory"],
            contexts=[tables[place] for place in arrays["context.of"].tolist()],
            recording=recorded,
            seconds=arrays["seconds"].tolist(),
        )


class RestoredLanes(NamedTuple):
    """Lanes after a restore."""

    obs: NDArray  # [B, D] observations to act on
    played: Sequence[EpisodePrefix | None]  # the replayed episodes
    reasons: Sequence[str]  # [B] why a lane has begun its next episode instead; empty: it has not


def bring_back(
    env: Env,
    streams: Sequence[SeedStream],
    states: LaneStates,
    recording: EpisodeRecording,
    calling: Callable[[str], None],
) -> RestoredLanes:
    """Begin the episodes of these streams, and replay the ones that were under way."""
    steps, played = recording.steps.tolist(), recording.played(list(states.contexts))
    lost = {lane: "it was too long" for lane, count in enumerate(steps) if count == UNKNOWN}
    if any(own is not None for own in played):
        if (answer := env.replay(_after(lost, streams), played, calling)) is not None:
            return RestoredLanes(answer[0], played, [lost.get(lane) or reason for lane, reason in enumerate(answer[1])])
        lost |= {lane: "its environment cannot be restored" for lane, own in enumerate(played) if own is not None}
    calling("reset")
    nothing: list[EpisodePrefix | None] = [None] * len(steps)
    return RestoredLanes(env.reset(_after(lost, streams)), nothing, [lost.get(lane, "") for lane in range(len(steps))])


def _after(lost: Mapping[int, str], streams: Sequence[SeedStream]) -> list[SeedStream]:
    """Return these streams; a lane whose episode is lost starts with its next episode."""
    return [NextEpisodes(stream) if lane in lost else stream for lane, stream in enumerate(streams)]


@dataclass(frozen=True, slots=True)
class NextEpisodes:
    """The episodes of a stream after its first. Implements core.SeedStream."""

    stream: SeedStream

    def number(self, k: int) -> int:
        return self.stream.number(int(k) + 1)

    def seed(self, k: int) -> int:
        return self.stream.seed(int(k) + 1)


class RestorableEnv(Protocol):
    """One environment that plays the episodes of a stream."""

    def set_context(self, context: NDArray) -> None: ...  # for episodes that begin from now on
    def reset(self) -> object: ...  # begin the next episode
    def step(self, action: object) -> tuple[float, bool, bool]: ...  # reward, terminated, truncated


class ReplayDeadline:
    """Predicts whether the rest of a replay fits into its time limit."""

    def __init__(self, seconds: float = LIMIT) -> None:
        self._began = monotonic()
        self._until = self._began + seconds
        self._seconds, self._done = seconds, 0

    def too_slow(self, left: int) -> str:
        """Return why to give up the episode, or an empty text. Call it after each step."""
        self._done += 1
        now = monotonic()
        if now + (now - self._began) / self._done * left <= self._until:
            return ""
        return f"playing its actions again would take more than {self._seconds:g} s"


def play_again(
    lane: RestorableEnv,
    played: EpisodePrefix,
    actions: Sequence[object],
    successor: NDArray,
    clock: ReplayDeadline,
    calling: Calling,
) -> str:
    """Begin the lane's next episode and replay it; returns why that failed, if it did. successor: the lane's buffer."""
    total = 0.0
    try:
        calling("reset")
        lane.set_context(played.context)
        lane.reset()
        for count, action in enumerate(actions, start=1):
            calling("step")
            reward, terminated, truncated = lane.step(action)
            total += float(np.float32(reward))
            if terminated or truncated:
                return OTHERWISE
            if count < len(actions) and (reason := clock.too_slow(len(actions) - count)):
                return reason
    except EnvError as error:
        return f"it failed: {error.report.splitlines()[0]}"
    return differs(played, successor, total)


def differs(played: EpisodePrefix, obs: NDArray, total: float) -> str:
    """Return why this state is not bit for bit the recorded one; an empty text if it is."""
    return "" if total == played.ret and obs.tobytes() == played.obs.tobytes() else OTHERWISE


class HeldStream:
    """The episodes of a lane that waits for its turn; until then, every reset begins the first. A core.SeedStream."""

    def __init__(self, stream: SeedStream) -> None:
        self._stream = stream
        self.resets = self.waited = 0  # resets of this lane; resets before its turn

    def number(self, k: int) -> int:
        return self._stream.number(max(0, int(k) - self.waited))

    def seed(self, k: int) -> int:
        return self._stream.seed(max(0, int(k) - self.waited))


def after_what_was_played(seeds: Iterable[SeedStream], played: Iterable[EpisodePrefix | None]) -> list[SeedStream]:
    """Return the streams from the episodes on that follow the ones under way."""
    return [stream if own is None else NextEpisodes(stream) for stream, own in zip(seeds, played, strict=True)]
