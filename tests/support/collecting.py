"""A collector without a learner: what a mode makes of a world, in a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from freewheel.config.resolve import from_options
from freewheel.core import Chunk, Collector, EnvSpec
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan
from tests.support.costs import cost


@dataclass
class Collection:
    """What has come so far."""

    collector: Collector
    chunks: list[Chunk] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def until(self, done: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "the time limit is over"
            self.chunks += self.collector.collect(wait=True)
            self.messages += self.collector.messages()

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)


@contextmanager
def collecting(env: str, spec: EnvSpec, **options: Any) -> Iterator[Collection]:
    """A collector of this world, which has this spec, with the first weights. It is closed at the end, and its last messages
    are there."""
    small = {"evals": 0, "num_steps_per_env": 16, "policy": {"hidden": [8]}}
    config = from_options(env, {**small, **options})
    chosen = config.collector.planned(cost())
    spec = replace(spec, name=config.env.label, lanes=chosen.lanes)
    planned = Plan(
        replace(config, collector=chosen), spec, config.policy.resolve(spec), RunName(Path("never"), "made"), "cpu"
    )
    learner = planned.config.learner.build(planned.learner_spec)
    collector = chosen.build(planned.runner_factory, planned.collect_spec(learner.snapshot(), lambda: None))
    found = Collection(collector)
    with collector:
        collector.publish(learner.snapshot(), 0)
        yield found
    found.messages += collector.messages()


def shown(messages: Sequence[str]) -> str:
    return "\n".join(messages)
