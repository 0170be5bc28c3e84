"""Runs that are stopped and continued by fresh objects, all state carried through files' bytes, and what they are compared by."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import safetensors.numpy

from freewheel.collect.batch import BatchConfig
from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.mode import ModeConfig
from freewheel.collect.sequential import SequentialConfig
from freewheel.core import NO_CONTEXT, Array, BatchSpec, Collector, Decision, Episode, Learner, NDArray
from freewheel.envs.gym import GymConfig
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.spec import AlgorithmConfig, LearnerSpec, Services
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.policies.numpy_actor import NumpyActor, make_actor
from freewheel.policies.spec import PolicyConfig, PolicySpec, actor_layout
from freewheel.rollout.factory import CollectSpec, MakeActor, RunnerFactory
from freewheel.transport.executors import SerialExecutor

LANES, STEPS = 2, 7
S = LANES * STEPS
WORLD = GymConfig(id="tests.support.worlds:Wandering", args={"n": 2})
REPLAY = {"batch": 8, "learning_starts": 3 * S - 4, "updates_per_row": 0.5, "buffer": 200}
PPO = PPOConfig(epochs=2, minibatch=7, reward_scale="returns")
SAC = SACConfig(**REPLAY)  # type: ignore[arg-type]
MBPO = MBPOConfig(
    **REPLAY,  # type: ignore[arg-type]
    members=2, elites=1, model_hidden=(8,), model_every=2 * S, max_epochs=2, model_batch=16, rollouts_per_row=0.5,
    keep_models=2, termination="never", clock="serial",
)  # fmt: skip
ALGORITHMS: dict[str, AlgorithmConfig] = {"ppo": PPO, "sac": SAC, "mbpo": MBPO}
MODES: dict[str, ModeConfig] = {
    "sequential": SequentialConfig(LANES),
    "lockstep": LockstepConfig(LANES, "inline"),
    "processes": LockstepConfig(LANES, "processes"),
    "batch": BatchConfig(workers=2, envs_per_worker=1, num_envs=LANES),
    "batch of fragments": BatchConfig(workers=1, envs_per_worker=2, num_envs=LANES, collection_batch_size=3),
}
# Where a run was and what it used differs from run to run.
MEASURED = ("wall_s", "_per_s", "time/", "memory/", "_util", "_busy", "queue/")


@dataclass(frozen=True)
class Story:
    """A run in a world."""

    algorithm: AlgorithmConfig
    mode: ModeConfig
    world: GymConfig = WORLD
    normalize_obs: bool = True
    contexts: NDArray = field(default_factory=lambda: NO_CONTEXT)
    actor: Callable[[PolicySpec], MakeActor] = make_actor

    def parts(self) -> tuple[Learner, Collector]:
        env = self.world.make(range(1))
        env.close()
        options: dict[str, Any] = {"head": "squashed"} if isinstance(self.algorithm, SACConfig) else {}
        policy = PolicyConfig(hidden=(8,), normalize_obs=self.normalize_obs, **options).resolve(env.spec)
        batch = BatchSpec(STEPS, LANES)
        services = Services(executors=SerialExecutor)
        learner = self.algorithm.build(LearnerSpec(policy=policy, batch=batch, seed=1, services=services))
        spec = CollectSpec(
            env=replace(env.spec, lanes=LANES), batch=batch, weights=actor_layout(policy), context=self.contexts,
            on_policy=self.algorithm.on_policy,
        )  # fmt: skip
        return learner, self.mode.build(RunnerFactory(self.world.make, self.actor(policy), seed=3), spec)


class Remembering(NumpyActor):
    """Acts by what it has seen before in the episode, which is in its memory."""

    state_size = 2

    def act(self, obs: NDArray, rng: np.random.Generator, *, state: Any = None, greedy: bool = False) -> Decision:
        assert state is not None, "a Runner keeps it"
        chosen = super().act((obs + state).astype(np.float32), rng, greedy=greedy)
        return replace(chosen, state=(0.5 * state + obs).astype(np.float32))


def remembering(policy: PolicySpec) -> MakeActor:
    return partial(Remembering, policy)


@dataclass(frozen=True)
class Saved:
    """A run between two turns of its loop, as bytes."""

    learner: bytes
    collector: bytes
    meter: str
    buffers: Mapping[str, tuple[int, bytes]]


class Session:
    """Turns of one run; `with` starts and ends its workers."""

    def __init__(self, story: Story, saved: Saved | None = None) -> None:
        self.story = story
        self.learner, self.collector = story.parts()
        self.meter = Meter(1)
        self.episodes: list[Episode] = []
        self.versions: list[int] = []
        self.lags: list[float] = []  # the greatest of each update of PPO
        self.turns = 0
        self._open = ExitStack()
        if saved is not None:
            self._load(saved)
        self.ticks = loop(self.collector, self.learner, self.meter, contexts=lambda: story.contexts)

    def __enter__(self) -> Self:
        self._open.enter_context(self.collector)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def turn(self, count: int = 1) -> None:
        for tick in itertools.islice(self.ticks, count):
            self.meter.take(tick)
            self.turns += 1
            assert tick.env_steps == self.meter.done["env_steps"]
            for chunk in tick.chunks:
                self.episodes += chunk.episodes
                self.versions.append(chunk.version)
            if tick.metrics is not None:
                self.lags.append(tick.metrics.get("lag_max", 0.0))
            balance(self.collector.rows(), self.learner.rows())

    def save(self) -> Saved:
        buffers: Mapping[str, Any] = getattr(self.learner, "buffers", dict)()
        rows = {
            name: (one.added - one.count, safetensors.numpy.save({"rows": one.read(one.added - one.count, one.added)}))
            for name, one in buffers.items()
        }
        return Saved(
            _bytes(self.learner.state_dict()),
            _bytes(self.collector.state_dict()),
            json.dumps(self.meter.state(), allow_nan=False),
            rows,
        )

    def _load(self, saved: Saved) -> None:
        self.learner.load_state_dict(_arrays(saved.learner))
        for name, one in getattr(self.learner, "buffers", dict)().items():
            first, rows = saved.buffers[name]
            one.write(first, _arrays(rows)["rows"])
        self.collector.load_state_dict(_arrays(saved.collector))
        self.meter.restore(json.loads(saved.meter))

    def fingerprint(self) -> dict[str, str]:
        """A hash of everything that has to be the same: weights, optimiser, rows, generators, lanes, metrics."""
        saved = self.save()
        found = {f"learner.{name}": _hash(value) for name, value in _arrays(saved.learner).items()}
        found |= {f"collector.{name}": value for name, value in lanes(saved).items()}
        found |= {f"buffer.{name}": hashlib.sha256(rows).hexdigest() for name, (_, rows) in saved.buffers.items()}
        row = self.meter.row(balance(self.collector.rows(), self.learner.rows()), {}, self.learner.buffer_util)
        told = {name: value for name, value in row.items() if not any(part in name for part in MEASURED)}
        undelivered = ("produced", "queued", "open")  # by workers, which are ahead by chance
        return found | {f"metrics.{name}": repr(value) for name, value in told.items() if name not in undelivered}


def lanes(saved: Saved) -> dict[str, str]:
    """Hashes of the collector's state, without what differs from process to process."""
    state = _arrays(saved.collector)
    return {name: _hash(value) for name, value in state.items() if not name.endswith(("seconds", "incarnation"))}


def _bytes(state: Mapping[str, Array]) -> bytes:
    return safetensors.numpy.save({name: np.asarray(value, order="C") for name, value in state.items()})


def _arrays(data: bytes) -> dict[str, NDArray]:
    return dict(safetensors.numpy.load(data))


def _hash(value: NDArray) -> str:
    return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()


def played(*parts: Session) -> list[tuple[int, int, int, float, int]]:
    return [(e.lane, e.number, e.seed, e.ret, e.length) for part in parts for e in part.episodes]


def stop_at(story: Story, stops: Callable[[int], bool], turns: int) -> tuple[Session, dict[int, tuple[Saved, int]]]:
    """A straight run, and what it would have saved at some of its turns, with the episodes that had ended by then."""
    found: dict[int, tuple[Saved, int]] = {}
    with Session(story) as run:
        for turn in range(turns):
            if stops(turn):
                found[turn] = run.save(), len(run.episodes)
            run.turn()
    return run, found
