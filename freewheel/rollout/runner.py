"""Runner: drives one Env of B lanes with a private policy and writes chunks, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns

import numpy as np

from freewheel.core import (
    NO_CONTEXT,
    WORKER_TIME,
    Actor,
    Array,
    Chunk,
    Decision,
    Env,
    EnvSpec,
    Episode,
    Failure,
    NDArray,
    Origin,
    SeedStream,
    Snapshot,
    Step,
    Transitions,
)
from freewheel.errors import EnvError
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.kernel import outside
from freewheel.rollout.recording import EpisodeRecording
from freewheel.rollout.restoring import Boundary, DrawsInBlocks, LaneStates, bring_back
from freewheel.seeding import (
    Position,
    drawn,
    generator,
    generator_state,
    restore_generator,
    training_episodes,
    words_at,
)

SLACK = 1e-5  # tolerance for rounding, relative to a bound, or to 1 for smaller bounds
KEPT = "such rows are kept and used; out_of_space in the summary counts them"
STEP, RESET, INFER, WRITE, LOAD, OTHER = (
    WORKER_TIME.index(kind) for kind in ("step", "reset", "infer", "write", "load", "other")
)


def empty_transitions(steps: int, spec: EnvSpec) -> Transitions:
    """Uninitialised arrays for [T, B] rows."""
    rows = (steps, spec.lanes)
    return Transitions(
        obs=np.empty((*rows, spec.obs_size), spec.obs_dtype),
        action=np.empty((*rows, *spec.action.shape), spec.action.dtype),
        log_prob=np.empty(rows, np.float32),
        reward=np.empty(rows, np.float32),
        terminated=np.empty(rows, np.bool_),
        truncated=np.empty(rows, np.bool_),
        next_obs=np.empty((*rows, spec.obs_size), spec.obs_dtype),
        valid=np.empty(rows, np.bool_),
    )


def _ended(step: Step) -> list[int]:
    """The lanes whose episode is over."""
    lanes: list[int] = (step.terminated | step.truncated).nonzero()[0].tolist()
    return lanes


class Author:
    """The identity of a runner: its worker number, its generator, and the episodes of its lanes."""

    def __init__(
        self,
        seed: int,
        lanes: range,
        *,
        worker: int = 0,
        incarnation: int = 0,
        streams: Sequence[SeedStream] = (),
        first_worker: int = 0,
    ) -> None:
        """`first_worker`: the number that worker 0 has in the whole run, see RunnerFactory."""
        self.worker, number = worker, first_worker + worker
        self.streams = streams or [training_episodes(seed, lane) for lane in lanes]
        self._path = (seed, "actor", number, incarnation) if incarnation else (seed, "actor", number)

    def rng(self) -> np.random.Generator:
        return generator(*self._path)


class Runner:
    """One author of experience: a worker that drives these global lanes. Weights change only between chunks."""

    def __init__(
        self,
        factory: RunnerFactory,
        lanes: range,
        *,
        env: Env | None = None,
        author: Author | None = None,
        actor: Actor | None = None,
    ) -> None:
        streams = [factory.episodes(lane) for lane in lanes]
        author = author or Author(factory.seed, lanes, streams=streams, first_worker=factory.first_worker)
        self.env = factory.env(lanes) if env is None else env
        self.produced = 0  # rows whose step returned
        self.open = 0  # of these, in a chunk that is still being written
        self.rows = 0  # valid rows of the last step
        self.version = 0
        self.failures: tuple[Failure, ...] = ()  # of the last step
        self.over = False  # the last step ended an episode: call `autoreset` next
        self._actor = factory.actor() if actor is None else actor
        self._in_blocks = self._actor.position if isinstance(self._actor, DrawsInBlocks) else None
        self._episodes, self._rng = factory.episodes, author.rng()
        self._worker, self._lanes, self._sequence = author.worker, lanes, 0
        self._time = [0] * len(WORKER_TIME)
        self._streams = author.streams
        self._played = [0] * len(lanes)
        self._return = np.zeros(len(lanes), np.float64)
        self._length = np.zeros(len(lanes), np.int64)
        self._carried = self._length  # lengths at the start of the chunk
        self._began = [0] * len(lanes)
        self._context = NO_CONTEXT
        self._contexts = [NO_CONTEXT] * len(lanes)  # the table of contexts when each lane's episode began
        self._obs: NDArray | None = None
        self.calling: Callable[[str], None] = lambda _: None  # called before each "reset" and "step" of a replay
        self.stepped: Callable[[], None] | None = None  # called after every step of `unroll`
        self._recording = EpisodeRecording(len(lanes))
        self._returning: LaneStates | None = None  # the state that `begin` restores the lanes to
        self._boundary: Boundary | None = None  # where an unfinished chunk began
        self._notes: list[str] = []
        self._failed: list[Failure] = []
        self._space = SpaceCheck(self.env.spec, lanes)
        self._state = np.zeros((len(lanes), self._actor.state_size), np.float32)  # the actor's memory

    def load(self, snapshot: Snapshot) -> None:
        began = perf_counter_ns()
        self._actor.load(snapshot)
        self.set_context(snapshot.context)
        self.version = snapshot.version
        self._time[LOAD] += perf_counter_ns() - began

    def set_context(self, context: NDArray) -> None:
        """Use this table [K, C] for episodes that begin from now on."""
        if context.size or self._context.size:
            self._context = context
            self.env.set_context(context)

    @property
    def has_memory(self) -> bool:
        return self._state.size > 0

    @property
    def state(self) -> NDArray:
        """[B, H] the actor's memory before the next step, as a copy."""
        return self._state.copy()

    def places(self) -> list[tuple[int, int]]:
        """Return for each lane the index of its current episode in its stream, and the steps made in that episode."""
        return list(zip(self._played, self._length.tolist(), strict=True))

    @property
    def position(self) -> Position:
        """The actor's position in the numbers of its generator."""
        where = self._in_blocks
        return Position(self._rng.bit_generator.state) if where is None else where(self._rng)

    def spend(self, kind: int, ns: int) -> None:
        """Add time that passed outside the Runner (waits) to the next chunk."""
        self._time[kind] += ns

    @property
    def counted(self) -> list[int]:
        """[len(WORKER_TIME)] ns since the last call of `spent`; do not modify it."""
        return self._time

    def spent(self) -> list[int]:
        """Return the [len(WORKER_TIME)] ns since the last call."""
        time, self._time = self._time, [0] * len(WORKER_TIME)
        return time

    def unroll(self, steps: int) -> Chunk:
        """Return the next `steps` rows of every lane."""
        began = perf_counter_ns()
        if self._obs is None:
            self.begin()
        data = empty_transitions(steps, self.env.spec)
        self._carried, state = self._length.copy(), self.state
        self._boundary = Boundary(self.position, state, self._played.copy(), self._contexts.copy())
        episodes: list[Episode] = []
        for t in range(steps):
            episodes += self.step(data, t)
            self._failed += self.failures
            if self.over:
                self.autoreset()
            if self.stepped is not None:
                self.stepped()
        self._check(data)
        self.review(data, steps)
        rows, self.open = self.open, 0
        whole = rows == data.valid.size
        self._recording.add(data, ends=bool(episodes) or not whole, whole=whole)
        self._boundary = None
        elapsed = perf_counter_ns() - began
        time = self.spent()
        time[OTHER] += max(0, elapsed - sum(time[kind] for kind in (STEP, RESET, INFER, WRITE)))
        origin = Origin(self._worker, 0, self._sequence, self._lanes.start)
        self._sequence += 1
        return Chunk(data, self.version, origin, tuple(episodes), state, np.array(time), rows)

    def review(self, data: Transitions, steps: int) -> None:
        """Check whether the observations of the first `steps` steps are in their space."""
        if note := self._space.look(data, steps):
            self._notes.append(note)

    @property
    def out_of_space(self) -> int:
        """Rows with an observation outside its space."""
        return self._space.rows

    def take_failures(self) -> list[Failure]:
        """Failures of the chunks since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def messages(self) -> Sequence[str]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def take_eval_episodes(self) -> list[Episode]:
        return []

    @property
    def numbers(self) -> list[int]:
        """The number of each lane's episode under way, or of the episode that the lane begins next."""
        return [stream.number(k) for stream, k in zip(self._streams, self._played, strict=True)]

    def state_dict(self) -> dict[str, Array]:
        """Return the state as of the last finished chunk; a resumed run plays later steps again."""
        counts, returning = np.array([self.produced - self.open, self._sequence], np.int64), self._returning
        if returning is not None:
            return returning.to_arrays() | {"counts": counts, "rng": generator_state(self._rng)}
        at = self._boundary or Boundary(self.position, self.state, self._played, self._contexts)
        now = perf_counter_ns()
        lanes = LaneStates(
            numbers=[stream.number(k) for stream, k in zip(self._streams, at.played, strict=True)],
            memory=at.memory,
            contexts=at.contexts,
            recording=self._recording.state(),
            seconds=[(now - began) * 1e-9 if began else 0.0 for began in self._began],
        )
        return lanes.to_arrays() | {"counts": counts, "rng": words_at(at.rng.packed())}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore a state. Call it before the first step, and only if every lane plays its own episodes."""
        if "counts" in state:
            self.produced, self._sequence = (int(count) for count in np.asarray(state["counts"]))
        if "rng" in state:
            restore_generator(self._rng, np.asarray(state["rng"]))
        self._returning = LaneStates.from_arrays(state)
        lanes = zip(self._lanes, self._returning.numbers, strict=True)
        self._streams = [self._episodes(lane, start=number) for lane, number in lanes]
        self._recording.restore(self._returning.recording)

    def close(self) -> None:
        self.env.close()

    def begin(self) -> None:
        """Start the first episode of every lane, or restore the episodes of the run that this one continues."""
        began = perf_counter_ns()
        self._began, self._contexts = [began] * len(self._lanes), [self._context] * len(self._lanes)
        self._obs = self.env.reset(self._streams) if self._returning is None else self._bring_back(self._returning)
        self._time[RESET] += perf_counter_ns() - began

    def _bring_back(self, states: LaneStates) -> NDArray:
        obs, played, reasons = bring_back(self.env, self._streams, states, self._recording, self.calling)
        self._state = np.array(states.memory)
        for lane, (own, reason) in enumerate(zip(played, reasons, strict=True)):
            if reason:
                self._played[lane] += 1
                self._state[lane] = 0
                self._recording.restart(lane, 0)
            elif own is not None:
                self._return[lane], self._length[lane] = own.ret, len(own.action)
                self._began[lane] = perf_counter_ns() - int(1e9 * states.seconds[lane])
                self._contexts[lane] = own.context
        self._note_lost([reason for reason in reasons if reason])
        self._returning = None
        return obs

    def _note_lost(self, reasons: Sequence[str]) -> None:
        if reasons:
            count = "an episode" if len(reasons) == 1 else f"{len(reasons)} episodes"
            what = f"{count} of {self.env.spec.name} could not be restored, the next ones begin"
            self._notes.append(f"{what}: {' / '.join(dict.fromkeys(reasons))}")

    def step(self, data: Transitions, t: int) -> Sequence[Episode]:
        """Act once in every lane and write row t; returns ended episodes. Call `autoreset` next if `over` is set."""
        obs, time = self._obs, self._time
        assert obs is not None, "call begin() first"
        clock0 = perf_counter_ns()
        data.obs[t] = obs
        decision = self._actor.act(obs, self._rng, state=self._state)
        clock1 = perf_counter_ns()
        step = self.env.step(decision.action)
        time[INFER] += clock1 - clock0
        return self._record(data, t, decision, step, clock1)

    def _record(self, data: Transitions, t: int, decision: Decision, step: Step, clock1: int) -> Sequence[Episode]:
        """Write the result of a step that began at clock1 and has just returned; returns the ended episodes."""
        time, clock2 = self._time, perf_counter_ns()
        self._state = decision.state
        data.action[t] = decision.action
        data.log_prob[t] = decision.log_prob
        data.reward[t] = step.reward
        data.terminated[t] = step.terminated
        data.truncated[t] = step.truncated
        data.next_obs[t] = self._obs = step.next_obs
        data.valid[t] = step.valid
        self.rows = step.valid.tobytes().count(1)  # several times faster than a numpy reduction
        self.produced += self.rows
        self.open += self.rows
        if self.rows == len(self._lanes):
            self._return += step.reward
            self._length += 1
        else:
            np.add(self._return, step.reward, out=self._return, where=step.valid)
            self._length += step.valid
        self.over = 1 in step.terminated.tobytes() or 1 in step.truncated.tobytes()
        self.failures = step.failures
        for failure in step.failures:
            if failure.in_reset:  # the next episode replaced it
                self._played[failure.lane] += 1
            elif failure.cause != "quarantine":
                self.over = True
                self._start_next(failure.lane, clock2)
        episodes = [self._finish(i, step.measures[i], clock2) for i in _ended(step)] if self.over else ()
        time[STEP] += clock2 - clock1 - step.reset_ns
        time[RESET] += step.reset_ns
        time[WRITE] += perf_counter_ns() - clock2
        return episodes

    def autoreset(self) -> None:
        """Begin the next episodes of the lanes that the last step ended."""
        began = perf_counter_ns()
        self._obs = self.env.autoreset()
        self._time[RESET] += perf_counter_ns() - began

    def _start_next(self, i: int, now: int) -> None:
        """Begin the next episode of lane i."""
        self._played[i] += 1
        self._return[i], self._length[i], self._began[i] = 0.0, 0, now
        if self._state.size:
            self._state = self._state.copy()  # the actor may still hold the array that it returned
            self._state[i] = 0
        self._contexts[i] = self._context

    def _finish(self, i: int, measures: NDArray, now: int) -> Episode:
        stream, k, context = self._streams[i], self._played[i], self._contexts[i]
        seed = stream.seed(k)
        episode = Episode(
            lane=self._lanes[i],
            number=stream.number(k),
            seed=seed,
            context=tuple(drawn(context, seed).tolist()) if context.size else (),
            ret=float(self._return[i]),
            length=int(self._length[i]),
            seconds=(now - self._began[i]) * 1e-9,
            measures=tuple(float(value) for value in measures),
        )
        self._start_next(i, now)
        return episode

    def _check(self, data: Transitions) -> None:
        """EnvError if any row holds a number that is not finite."""
        fields = (("reward", data.reward), ("observation", data.next_obs), ("observation", data.obs))
        with np.errstate(invalid="ignore"):
            for name, values in fields:
                # One sum over the chunk is much faster than a test of every value, and is finite unless a value is not.
                if values.dtype != np.uint8 and not np.isfinite(values.sum(dtype=np.float64)):
                    self._raise_if_not_finite(name, values, data)

    def _raise_if_not_finite(self, name: str, values: NDArray, data: Transitions) -> None:
        bad = data.valid & ~np.isfinite(values).reshape(*data.valid.shape, -1).all(axis=-1)
        if not bad.any():  # the values are only in rows that are not valid
            return
        t, i = (int(axis[0]) for axis in bad.nonzero())
        raise EnvError(
            f"lane {self._lanes[i]} of {self.env.spec.name} returned a {name} that is not finite "
            f"({values[t, i]}) at row {t} of chunk {self._sequence} ({self._position(data, t, i)}, "
            f"last action {data.action[t, i]}); check the env for NaN and inf"
        )

    def _position(self, data: Transitions, t: int, i: int) -> str:
        """The episode, seed and step of row t of the chunk just written."""
        over = data.terminated[:, i] | data.truncated[:, i]
        k = self._played[i] - int(np.count_nonzero(over[t:]))
        ends = np.flatnonzero(over[:t])
        begun, carried = (int(ends[-1]) + 1, 0) if len(ends) else (0, self._carried[i])
        steps = carried + np.count_nonzero(data.valid[begun : t + 1, i])
        return f"episode {self._streams[i].number(k)}, seed {self._streams[i].seed(k)}, step {steps}"


class SpaceCheck:
    """Counts rows whose observations exceed the bounds of their space. Such rows are common, so they are kept."""

    def __init__(self, spec: EnvSpec, lanes: range) -> None:
        self._spec, self._lanes = spec, lanes
        self.rows = 0  # rows that have an observation outside its space
        self._bounds = None if spec.bounds is None else _widened(spec.bounds)

    def look(self, data: Transitions, steps: int) -> str:
        """Count such rows in the first `steps` steps; returns a message for the user about the first one."""
        if self._bounds is None:
            return ""
        found = outside(data.obs, data.next_obs, data.valid, self._bounds, steps)
        self.rows += found
        return self._describe(data, steps) if found and self.rows == found else ""

    def _describe(self, data: Transitions, steps: int) -> str:
        """Describe the first value outside. The last line never varies, and reports that share it are shown once."""
        declared = self._spec.bounds
        assert declared is not None, "something is outside of them"
        low, high = _widened(declared)
        both = np.stack([data.obs[:steps], data.next_obs[:steps]], axis=2)  # [T, B, 2, D]
        beyond = ((both < low) | (both > high)) & data.valid[:steps, :, None, None]
        t, lane, which, column = np.argwhere(beyond)[0]
        part = next(part for part in self._spec.slices if part.start <= column < part.stop)
        low, high = declared
        return (
            f"lane {self._lanes[lane]} of {self._spec.name} gave an observation outside its space: "
            f"column {column - part.start} of '{part.name}' is {both[t, lane, which, column]:.7g}, "
            f"and its bounds are {low[column]:.7g} and {high[column]:.7g}\n  {KEPT}"
        )


def _widened(bounds: NDArray) -> NDArray:
    slack = SLACK * np.maximum(1.0, np.abs(bounds)) * [[-1.0], [1.0]]
    return np.ascontiguousarray(bounds + slack, np.float32)
