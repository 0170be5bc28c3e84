"""A trial of a workflow: one training run with the order as its context, watched by stop rules."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from freewheel.config.resolve import Config, from_options
from freewheel.core import Episode, Tick
from freewheel.run.trainer import run
from freewheel.seeding import tree
from freewheel.worlds.cage2.workflow.envs import MEASURES
from freewheel.worlds.cage2.workflow.orders import encode
from freewheel.worlds.cage2.workflow.records import Progress, Stops, means, workflow
from freewheel.worlds.cage2.workflow.search import Outcome, Proposal

TRIALS = "trials"  # the folder with their runs
SIGNALLED = 128  # larger exit codes mean that a signal ended the run

Write: TypeAlias = Callable[[Mapping[str, Any]], None]  # a row of the training log


class InterruptedSearch(BaseException):
    """A signal ended a trial."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Training:
    """Makes trials: training(proposal) -> outcome. `options` are those of `freewheel.train`, the environment among them."""

    def __init__(
        self,
        options: Mapping[str, Any],
        folder: Path,
        stops: Stops,
        write: Write,
        *,
        length: int = 100,
        before: int = 0,
    ) -> None:
        self._options, self._folder, self._stops, self._write = options, folder, stops, write
        self._length, self._episodes = length, before  # steps of an episode; episodes of all trials so far

    def __call__(self, proposal: Proposal) -> Outcome:
        resolved = self.config(proposal)
        shutil.rmtree(
            self._folder / TRIALS / resolved.run.output.name, ignore_errors=True
        )  # of a trial that was interrupted
        watch = _Watch(Progress(self._stops, fixed=proposal.fixed), proposal, self._write, self._episodes)
        result = run(resolved, quiet=True, until=watch)
        if result.exit_code > SIGNALLED:
            raise InterruptedSearch(result.exit_code)
        watch.write()
        last, count = watch.progress.last, len(watch.progress.played)
        self._episodes += count
        ended = str(result.summary["ended"]).replace("steps", "episodes")  # the budget in steps is equivalent
        return Outcome(last.env_return, last.alignment, last.compliance, count, ended, resolved.run.output.name)

    def config(self, proposal: Proposal) -> Config:
        """The config of the run for a proposal."""
        options: dict[str, Any] = {
            **self._options,
            "episodes": proposal.episodes,
            "steps": proposal.episodes * self._length,  # for the schedules
            "measures": MEASURES,
            "seed": tree(self._options["seed"], "workflow", proposal.number),
            "run": f"{proposal.number:03d}-{workflow(proposal.order)}",
            "runs_dir": str(self._folder / TRIALS),
        }
        if proposal.order is not None:
            options["context"] = [encode(proposal.order).tolist()]
        if proposal.init is not None:
            options["init"] = f"{proposal.init}@latest"
        return from_options(options.pop("env"), options)


class _Watch:
    """Watches a trial: writes the training log and applies the stop rules. Implements trainer.Until."""

    def __init__(self, progress: Progress, proposal: Proposal, write: Write, before: int) -> None:
        self.progress, self._proposal, self._write, self._before = progress, proposal, write, before
        self._written, self._update, self._begun = 0, 0, time.monotonic()

    def __call__(self, episodes: Sequence[Episode], tick: Tick) -> str:
        ended = self.progress.take(episodes)
        self._update = tick.version
        if tick.metrics is not None:
            self.write()
        return ended

    def write(self) -> None:
        """Write a row about the episodes since the last row."""
        fresh, count = self.progress.played[self._written :], len(self.progress.played)
        if not fresh:
            return
        self._written = count
        self._write(
            {
                "trial": self._proposal.number,
                "workflow": workflow(self._proposal.order),
                "update": self._update,
                "episodes": count,
                "total_episodes": self._before + count,
                **means(fresh)._asdict(),
                "seconds": round(time.monotonic() - self._begun, 3),
            }
        )
