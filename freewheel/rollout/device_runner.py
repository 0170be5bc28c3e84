"""DeviceRunner: drives a batched simulator on its device and fills preallocated tensors; a step can be a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from freewheel.core import (
    TRANSITION_FIELDS,
    WORKER_TIME,
    Array,
    Chunk,
    Compile,
    Decision,
    Env,
    EnvSpec,
    Episode,
    Failure,
    NDArray,
    Origin,
    Snapshot,
    Step,
    Transitions,
)
from freewheel.errors import EnvError
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.graphs import Program, current
from freewheel.seeding import generator

STEP, RESET, LOAD, OTHER = (WORKER_TIME.index(kind) for kind in ("step", "reset", "load", "other"))


class DeviceActor(Protocol):
    """An Actor on tensors whose generators can be captured in a CUDA graph."""

    @property
    def generators(self) -> list[torch.Generator]: ...
    @property
    def state_size(self) -> int: ...
    def act(
        self, obs: Tensor, rng: np.random.Generator, *, state: Tensor | None = None, greedy: bool = False
    ) -> Decision[Tensor]: ...
    def load(self, snapshot: Snapshot) -> None: ...


@dataclass(frozen=True)
class Endings:
    """Totals of each row's episode [T, B], reserved lanes included; final where the episode is over."""

    over: Tensor
    ret: Tensor
    length: Tensor
    measures: Tensor  # [T, B, M]


ENDINGS_FIELDS = tuple(field.name for field in fields(Endings))


@dataclass(frozen=True)
class LaunchedRows:
    """Rows whose computation has been launched. On a GPU they are complete when the event `done` is; rows copied to
    another device, when the event `arrived` is."""

    data: Transitions[Tensor]
    endings: Endings
    state: Tensor  # [B, H] the actor's memory before row 0
    version: int
    sequence: int
    begun: torch.cuda.Event | None
    done: torch.cuda.Event | None
    wall: int  # ns that launching took
    arrived: torch.cuda.Event | None = None

    @property
    def finished(self) -> bool:
        last = self.arrived or self.done
        return last is None or last.query()

    def step_ns(self) -> int:
        """Return the time of the simulation after waiting until the rows are complete."""
        last = self.arrived or self.done
        if last is not None:
            last.synchronize()
        if self.begun is None or self.done is None:
            return self.wall
        return int(self.begun.elapsed_time(self.done) * 1e6)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of these rows."""
        parts = ((self.data, fields(Transitions)), (self.endings, fields(Endings)))
        return [self.state, *(getattr(part, field.name) for part, names in parts for field in names)]

    def copied(self, device: str, *, non_blocking: bool) -> LaunchedRows:
        """Return a copy on another device, made by the current streams of both. With `non_blocking`, rows for the CPU
        are complete only when the copying stream has finished."""

        def copy(part: Any) -> Any:
            values = {field.name: getattr(part, field.name) for field in fields(part)}
            return type(part)(**{name: move(value) for name, value in values.items()})

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking, copy=True)

        return replace(self, data=copy(self.data), endings=copy(self.endings), state=move(self.state))


class DeviceRunner:
    """One author for all lanes of a simulation. Weights change only between chunks.

    Reserved lanes come after the others and act greedily: their rows are not delivered; their episodes are evaluations.
    """

    def __init__(
        self,
        factory: RunnerFactory,
        lanes: range,
        steps: int,
        compile: Compile = "off",  # noqa: A002 - the name of the option
        reserved: int = 0,
        deliver_to: str | None = None,
    ) -> None:
        """deliver_to: the device of the chunks that `unroll` returns; None: the simulator's."""
        self.env: Any = factory.make(range(len(lanes) + reserved))
        spec: EnvSpec = self.env.spec
        self._elsewhere = None if deliver_to in (None, spec.device) else deliver_to
        self.spec = replace(spec, lanes=len(lanes))
        self._eval_episodes: list[Episode] = []
        self.produced = self.open = self.version = 0
        self._actor: DeviceActor = factory.actor()  # type: ignore[assignment]
        self._rng = generator(factory.seed, "actor", 0)  # unused: actors on tensors have their own generators
        self._streams = [factory.episodes(lane) for lane in range(spec.lanes)]
        self._played = np.zeros(spec.lanes, np.int64)
        self._compile, self._steps, self._sequence = compile, steps, 0
        self._slab = _empty(steps, self.spec)
        shape, device = (steps, spec.lanes), spec.device
        self._endings = Endings(
            torch.zeros(shape, dtype=torch.bool, device=device), torch.zeros(shape, device=device),
            torch.zeros(shape, device=device),
            torch.zeros((*shape, len(spec.measures)), device=device),
        )  # fmt: skip
        self._return, self._length = (torch.zeros(spec.lanes, device=device) for _ in range(2))
        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._obs = torch.zeros(spec.lanes, spec.obs_size, device=device)
        self._action = torch.zeros(
            (spec.lanes, *spec.action.shape), dtype=getattr(torch, spec.action.dtype), device=device
        )
        self._log_prob = torch.zeros(spec.lanes, device=device)
        self._state = torch.zeros(spec.lanes, self._actor.state_size, device=device)  # the actor's memory
        self._programs: list[Program] = []
        self._fallback_shown = False
        self._time = [0] * len(WORKER_TIME)

    @property
    def fallbacks(self) -> list[str]:
        """The reasons why there are no CUDA graphs although they were requested."""
        return [program.fallback for program in self._programs if program.fallback]

    def take_failures(self) -> list[Failure]:
        """Return no failures: a simulator that fails ends the run."""
        return []

    def take_eval_episodes(self) -> list[Episode]:
        """Episodes of reserved lanes since the last call."""
        episodes, self._eval_episodes = self._eval_episodes, []
        return episodes

    @property
    def out_of_space(self) -> int:
        """Always 0: a simulator's observations are not checked against bounds."""
        return 0

    def messages(self) -> list[str]:
        """Report once why there are no CUDA graphs on a GPU."""
        if self._fallback_shown or not self._programs or not self._obs.is_cuda:
            return []
        self._fallback_shown = True
        return [
            f"no CUDA graph for the simulation, its kernels are launched one by one: {why}" for why in self.fallbacks
        ]

    def load(self, snapshot: Snapshot) -> None:
        began = perf_counter_ns()
        self._actor.load(snapshot)
        self.env.set_context(snapshot.context)
        self.version = snapshot.version
        self._time[LOAD] += perf_counter_ns() - began

    def spend(self, kind: int, ns: int) -> None:
        self._time[kind] += ns

    @property
    def counted(self) -> list[int]:
        """[len(WORKER_TIME)] ns since the last chunk; do not modify it."""
        return self._time

    def launch(self, steps: int) -> LaunchedRows:
        """Launch the next rows of every lane, at most for the steps that __init__ was given; the result is a copy."""
        if not self._programs:
            self.begin()
        with current(self.spec.device):
            return self._launch(steps)

    def _launch(self, steps: int) -> LaunchedRows:
        began, events = perf_counter_ns(), self._events()
        if events is not None:
            events[0].record()
        self._row.zero_()
        state = self._state[: self.spec.lanes].clone()
        for _ in range(steps):
            for program in self._programs:
                program()
        data = Transitions(*(getattr(self._slab, name)[:steps].clone() for name in TRANSITION_FIELDS))
        endings = Endings(*(getattr(self._endings, name)[:steps].clone() for name in ENDINGS_FIELDS))
        if events is not None:
            events[1].record()
        self.produced += steps * self.spec.lanes
        self.open += steps * self.spec.lanes
        begun, done = events or (None, None)
        written = LaunchedRows(
            data, endings, state, self.version, self._sequence, begun, done, perf_counter_ns() - began
        )
        self._sequence += 1
        return written

    def sign(self, written: LaunchedRows) -> Chunk[Tensor]:
        """Return the rows as a chunk, with the episodes that ended in them; waits until the rows are done."""
        time = self._time
        time[STEP] += written.step_ns()
        self._time = [0] * len(WORKER_TIME)
        self._check(written.data)
        self.open -= written.data.reward.numel()
        episodes = self._finished(written)
        rows = written.data.reward.numel()
        origin = Origin(0, 0, written.sequence, 0)
        return Chunk(written.data, written.version, origin, episodes, written.state, np.array(time), rows)

    def unroll(self, steps: int) -> Chunk[Tensor]:
        """Return the next `steps` rows of every lane, complete and on the device that the chunks are delivered to."""
        written = self.launch(steps)
        if self._elsewhere is not None:
            written = written.copied(self._elsewhere, non_blocking=self._elsewhere != "cpu")
        return self.sign(written)

    def begin(self) -> None:
        """Start the first episodes, and capture the CUDA graphs."""
        with current(self.spec.device):
            self._begin()

    def _begin(self) -> None:
        began = perf_counter_ns()
        self._obs.copy_(self.env.reset(self._streams))
        self._time[RESET] += perf_counter_ns() - began
        own = [self._obs, self._action, self._log_prob, self._row, self._return, self._length, self._state]
        generators = self._actor.generators
        if getattr(self.env, "capturable", False):
            state, generators = [*own, *self.env.state_tensors()], [*generators, *self.env.generators]
            self._programs = [Program(self._whole_step, self._compile, state=state, generators=generators)]
            return
        acting = Program(self._act, self._compile, state=own, generators=generators)
        stepping = Program(self._simulate, "off", state=())
        storing = Program(self._store, self._compile, state=own)
        self._programs = [acting, stepping, storing]

    def state_dict(self) -> dict[str, Array]:
        """Return only the counts: a simulation is seeded once, and a resumed run starts it afresh."""
        return {"counts": np.array([self.produced, self._sequence], np.int64)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.produced, self._sequence = (int(count) for count in np.asarray(state["counts"]))

    def close(self) -> None:
        self.env.close()

    def _whole_step(self) -> None:
        self._act()
        self._simulate()
        self._store()

    def _act(self) -> None:
        decision = self._actor.act(self._obs, self._rng, state=self._state)
        self._action.copy_(decision.action)
        self._log_prob.copy_(decision.log_prob)
        self._state.copy_(decision.state)
        reserved = self._obs[self.spec.lanes :]
        if len(reserved):
            self._action[self.spec.lanes :] = self._actor.act(
                reserved, self._rng, state=self._state[self.spec.lanes :], greedy=True
            ).action

    def _simulate(self) -> None:
        self._step: Step[Tensor] = self.env.step(self._action)

    def _store(self) -> None:
        """Write row number `_row`, which is kept on the device so that one graph serves all rows."""
        step, slab, ends, row = self._step, self._slab, self._endings, self._row
        over = step.terminated | step.truncated
        self._return += step.reward
        self._length += 1
        for column, value in (
            (slab.obs, self._obs), (slab.action, self._action), (slab.log_prob, self._log_prob), (slab.reward, step.reward),
            (slab.terminated, step.terminated), (slab.truncated, step.truncated), (slab.next_obs, step.next_obs),
            (ends.over, over), (ends.ret, self._return), (ends.length, self._length), (ends.measures, step.measures),
        ):  # fmt: skip
            if value.numel():
                column.index_copy_(0, row, value[: column.shape[1]].unsqueeze(0))
        going_on = (~over).float()
        self._return *= going_on
        self._length *= going_on
        self._state *= going_on[:, None]
        self._obs.copy_(self.env.autoreset())
        row.add_(1).remainder_(self._steps)

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if not self._obs.is_cuda:
            return None
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def _finished(self, written: LaunchedRows) -> tuple[Episode, ...]:
        ends = written.endings
        over = ends.over.nonzero()  # [E, 2] step, lane: in order of time
        if not len(over):
            return ()
        at = (over[:, 0], over[:, 1])
        summary = torch.cat([ends.ret[at][:, None], ends.length[at][:, None], ends.measures[at]], dim=1).cpu().tolist()
        episodes = [self._episode(lane, row) for lane, row in zip(over[:, 1].tolist(), summary, strict=True)]
        self._eval_episodes += [episode for episode in episodes if episode.lane >= self.spec.lanes]
        return tuple(episode for episode in episodes if episode.lane < self.spec.lanes)

    def _check(self, data: Transitions[Tensor]) -> None:
        """EnvError if any row holds a number that is not finite."""
        if bool(torch.isfinite(data.reward.sum() + data.next_obs.sum())):  # one sum is far cheaper than a test of each
            return
        bad = ~(data.reward.isfinite() & data.next_obs.isfinite().all(-1))
        if bool(bad.any()):
            t, lane = bad.nonzero()[0].tolist()
            where = f"lane {lane} of {self.spec.name}, row {t} of chunk {self._sequence - 1}"
            raise EnvError(
                f"{where}: an observation or a reward is not finite; check the simulator for NaN and inf", "nan"
            )

    def _episode(self, lane: int, summary: Sequence[float]) -> Episode:
        stream, k = self._streams[lane], int(self._played[lane])
        self._played[lane] += 1
        ret, length, *measures = summary
        return Episode(lane, stream.number(k), 0, (), ret, int(length), 0.0, tuple(measures))


def _empty(steps: int, spec: EnvSpec) -> Transitions[Tensor]:
    rows, device = (steps, spec.lanes), spec.device

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((*rows, *shape), dtype=dtype, device=device)

    return Transitions(
        obs=zeros(spec.obs_size),
        action=zeros(*spec.action.shape, dtype=getattr(torch, spec.action.dtype)),
        log_prob=zeros(),
        reward=zeros(),
        terminated=zeros(dtype=torch.bool),
        truncated=zeros(dtype=torch.bool),
        next_obs=zeros(spec.obs_size),
        valid=torch.ones(rows, dtype=torch.bool, device=device),
    )


def as_numpy(env: Env[Tensor]) -> Env:
    """Wrap a device environment as a numpy environment, to play a few of its episodes."""
    return _AsNumpy(env)


class _AsNumpy(Env):
    """An Env over an Env[Tensor]."""

    def __init__(self, env: Env[Tensor]) -> None:
        self._env = env

    @property
    def spec(self) -> EnvSpec:
        return self._env.spec

    def set_context(self, context: NDArray) -> None:
        self._env.set_context(context)

    def reset(self, seeds: Sequence[Any]) -> Any:
        with current(self.spec.device):
            return self._env.reset(seeds).cpu().numpy().copy()

    def step(self, action: Any) -> Step:
        with current(self.spec.device):
            step = self._env.step(torch.from_numpy(np.asarray(action)).to(self.spec.device))
        names = ("reward", "terminated", "truncated", "next_obs", "valid", "measures")
        return Step(**{name: getattr(step, name).cpu().numpy().copy() for name in names})

    def autoreset(self) -> Any:
        with current(self.spec.device):
            return self._env.autoreset().cpu().numpy().copy()

    def render(self) -> NDArray | str | None:
        return self._env.render()

    def close(self) -> None:
        self._env.close()
