"""What tests of learners with a replay buffer share: a box to act in, and a model with known predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from freewheel.core import BatchSpec, Chunk, Executor, MakeExecutor, NDArray, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.mbpo.dynamics import Ensemble, ModelSpec
from freewheel.learn.mbpo.fitting import Fit
from freewheel.learn.mbpo.learner import MBPO
from freewheel.learn.replay.rows import Columns
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.spec import LearnerSpec, Services
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import PolicyConfig, PolicySpec
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.runner import Runner
from freewheel.transport.executors import SerialExecutor

BOX_LANES, BOX_STEPS = 3, 8
CHUNK = BOX_LANES * BOX_STEPS  # rows
NOTHING: Mapping[str, Any] = MappingProxyType({})


def box_world(
    world: str = "tests.support.worlds:IdentityBox", args: Mapping[str, Any] = NOTHING, **policy: Any
) -> tuple[Callable[[Snapshot], Chunk], PolicySpec]:
    """A function that acts in IdentityBox or another world, CHUNK rows at a time, and the policy for it."""
    config = GymConfig(id=world, args=args)
    lanes = range(BOX_LANES)
    env = config.make(lanes)
    env.close()
    head = SACConfig().usual(env.spec, None)["policy.head"]
    spec = PolicyConfig(hidden=(8,), head=head, **policy).resolve(env.spec)
    runner = Runner(RunnerFactory(config.make, make_actor(spec), seed=5), lanes)

    def collect(snapshot: Snapshot) -> Chunk:
        runner.load(snapshot)
        return runner.unroll(BOX_STEPS)

    return collect, spec


SPEC = PolicySpec(3, "float32", ((0, 3),), ((0, 3),), (), None, "squashed", 2, (8,), "tanh", 0.0, "")
MODEL = ModelSpec(Columns(3, 2), 3, (16,), "delta", True, False)
S = 4  # rows a publication: two steps of two lanes
STARTS, EVERY = 16, 12
DELTA = torch.tensor([0.5, -0.25, 2.0])  # change of observations that a planted model predicts
SMALL = MBPOConfig(
    batch=8, buffer=400, learning_starts=STARTS, updates_per_row=0.5, members=3, elites=2, model_hidden=(16,), model_batch=16,
    model_every=EVERY, max_epochs=2, rollouts_per_row=0.5, rollout_schedule=(0, 0, 1, 1), keep_models=2, real_ratio=0.5,
    termination="never",
)  # fmt: skip


@dataclass
class Planted:
    """An executor whose k-th model predicts reward k and DELTA; slow: there is a result only for a call that waits."""

    slow: bool = False
    asked: list[NDArray] = field(default_factory=list)
    answers: deque[Fit] = field(default_factory=deque)

    def __call__(self, build: Callable[[], Callable[[Any], Any]], what: str) -> Executor:
        return self

    @property
    def busy(self) -> bool:
        return bool(self.answers)

    def submit(self, rows: NDArray) -> None:
        self.asked.append(np.array(rows))
        version, model = len(self.asked), Ensemble(MODEL, "cpu")
        model.statistics["out_scale"].zero_()
        model.statistics["out_mean"].copy_(torch.cat([torch.tensor([float(version)]), DELTA]))
        metrics = {"model/steps": 10.0 * version, "model/holdout": 0.125}
        self.answers.append(Fit(model.state(), torch.tensor([2, 0]), metrics))

    def result(self, wait: float = 0.0) -> Fit | None:
        return self.answers.popleft() if self.answers and (wait > 0 or not self.slow) else None


def mbpo_for(config: MBPOConfig = SMALL, *, executors: MakeExecutor = SerialExecutor, **spec: Any) -> MBPO:
    offered = {name: spec.pop(name) for name in ("while_waiting", "between_steps", "span", "peers") if name in spec}
    services = Services(executors=executors, **offered)
    given: dict[str, Any] = {"policy": SPEC, "batch": BatchSpec(S // 2, 2), "seed": 0} | spec
    return MBPO(config, LearnerSpec(**given, services=services))
