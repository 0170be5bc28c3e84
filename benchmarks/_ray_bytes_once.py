"""What --mode ray really sends: a short run whose answers and weights are pickled once more and counted; one JSON object."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from dataclasses import replace
from statistics import median
from typing import Any
from unittest import mock

from benchmarks._cluster_worlds import STEPS, WORLDS, Env
from freewheel.config.resolve import from_options
from freewheel.core import Snapshot
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.rollout.runner import empty_transitions
from freewheel.run.planning import plan

FRAGMENTS = 12
# What Ray returns has no types.
Reply: Any = importlib.import_module("freewheel_ray.actors.actor").Reply
Driver: Any = importlib.import_module("freewheel_ray.actors.driver").Driver


def measure(world: Env) -> dict[str, Any]:
    options = {
        "mode": "ray",
        "workers": 2,
        "envs_per_worker": 1,
        "num_steps_per_env": STEPS,
        "minutes": 10.0,
        "evals": 0,
    }
    planned = plan(from_options(world.env, {**options, "env_args": dict(world.args)}))
    learner = planned.config.learner.build(planned.learner_spec)
    answers, stored, versions = list[tuple[int, int]](), list[int](), list[int]()
    get, put = Driver.get, Driver.put

    def counted_get(self: Any, ref: Any) -> Any:
        answer = get(self, ref)
        if isinstance(answer, Reply) and answer.fragment is not None:
            answers.append((answer.fragment.rows, len(pickle.dumps(answer._replace(stored=None)))))
            stored.append(answer.stored is not None)
        return answer

    def counted_put(self: Any, value: Any) -> Any:
        if isinstance(value, Snapshot):
            versions.append(len(pickle.dumps(value)))
        return put(self, value)

    with mock.patch.multiple(Driver, get=counted_get, put=counted_put):
        spec = planned.collect_spec(learner.snapshot(), lambda: None)
        with planned.config.collector.build(planned.runner_factory, spec) as collector:
            for _ in loop(collector, learner, Meter(workers=planned.workers), max_lag=planned.max_lag):
                if len(answers) >= FRAGMENTS:
                    break
    rows, sizes = (float(median(counts)) for counts in zip(*answers, strict=True))
    lane = empty_transitions(1, replace(planned.spec, lanes=1))
    row = sum(getattr(lane, column).nbytes for column in lane.__dataclass_fields__)
    around = sizes - (0 if any(stored) else rows * row)
    found = {"rows": rows, "row_bytes": row, "answer_bytes": sizes, "around_bytes": around}
    return {**found, "stored": any(stored), "version_bytes": median(versions)}


def main() -> None:
    name = json.loads(sys.argv[1])["world"]
    print(json.dumps({"kind": "bytes", "world": name, **measure(WORLDS[name])}))


if __name__ == "__main__":
    main()
