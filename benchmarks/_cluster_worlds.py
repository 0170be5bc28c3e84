"""The environments that a cluster is simulated for; and, as a program, what their policies and learners cost here: JSON rows.

Each comes with the network that `freewheel train` would give it, and PPO as it is by default, from 64 steps of each env.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from freewheel.config.resolve import from_options
from freewheel.run.advice.policy_times import measure_policy
from freewheel.run.planning import plan

STEPS = 64  # of each env in an update


@dataclass(frozen=True)
class Env:
    """What is measured; `workers`: the updates are those of so many workers."""

    about: str
    env: str
    args: Mapping[str, Any]
    step: float  # seconds
    spread: float  # their deviation
    workers: tuple[int, ...] = (2, 16, 128, 1_000)


def lognormal_spread(mean: float, sigma: float) -> float:
    return mean * math.sqrt(math.expm1(sigma**2))


WORLDS: Mapping[str, Env] = {
    "sleeper": Env(
        "sleeps 10 ms, 52 numbers",
        "freewheel/Straggler-v0",
        {"law": "lognormal", "mean": 0.010, "kind": "sleep", "length": 100},
        0.010,
        lognormal_spread(0.010, 0.7),
    ),
    "computing": Env(
        "computes 1 ms, 52 numbers",
        "freewheel/Straggler-v0",
        {"law": "lognormal", "mean": 0.001, "kind": "burn", "length": 100},
        0.001,
        lognormal_spread(0.001, 0.7),
    ),
    "pictures": Env(
        "computes 1 ms, 84 × 84 × 4 bytes",
        "benchmarks._simulators:Pixels",
        {"mean_ms": 1.0, "length": 100},
        0.001,
        lognormal_spread(0.001, 0.3),
        (2, 8),
    ),
}


def measure(names: Iterable[str], device: str) -> Iterable[dict[str, Any]]:
    for name in names:
        world = WORLDS[name]
        for workers in world.workers:
            options = {"mode": "continuous", "workers": workers, "envs_per_worker": 1, "num_steps_per_env": STEPS}
            options |= {"env_args": dict(world.args), "evals": 0, "minutes": 1.0, "device": device}
            planned = plan(from_options(world.env, options))
            times = measure_policy(planned)
            assert times is not None, "PPO has no executor"
            assert planned.cost is not None, "it is no simulator of all lanes"
            yield {
                "kind": "policy",
                "world": name,
                "device": device,
                "workers": workers,
                "rows": planned.batch.rows,
                "act_s": times.act,
                "learn_s": times.learn,
                "env_cpu_s": planned.cost.cpu,
            }


def main() -> None:
    order = json.loads(sys.argv[1])
    for row in measure(order.get("worlds", WORLDS), order.get("device", "cpu")):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
