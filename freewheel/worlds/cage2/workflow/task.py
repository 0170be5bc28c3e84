"""A search on its way: begun and settled once, or taken up from disk."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.errors import SetupError, UsageError
from freewheel.run.plan import Plan, plan
from freewheel.worlds.cage2.workflow.logs import Book, workflow
from freewheel.worlds.cage2.workflow.options import SearchOptions
from freewheel.worlds.cage2.workflow.search import Search
from freewheel.worlds.cage2.workflow.train import Training

#: What may be another one when a search is taken up.
FREE = ("run", "runs_dir", "resume", "dry_run", "total_episodes")


@dataclass(frozen=True)
class Task:
    """What was asked for, where it is kept, and how far it has come."""

    options: SearchOptions
    training: Mapping[str, Any]  # options of `freewheel.train`
    book: Book
    search: Search

    def save(self) -> None:
        asked = {"options": dataclasses.asdict(self.options), "training": dict(self.training)}
        self.book.save(asked, self.search)

    def trainer(self) -> Training:
        options, book = self.options, self.book
        lengths = {"length": options.max_episode_steps, "before": self.search.spent}
        return Training(self.training, book.folder, options.stops, book.train, **lengths)

    def lines(self) -> list[str]:
        """The plan for a person."""
        options, searched = self.options, self.search
        if (proposal := searched.propose()) is None:
            return ["search   over: there is nothing left to try"]
        budget = f"{options.total_episodes:,} episodes, {searched.spent:,} of them played"
        workflows = f"at most {options.max_episodes_per_workflow:,} a workflow"
        return [
            f"search   {options.strategy}: {budget}, {workflows}, to compliance {options.compliance_threshold:g}",
            f"next     {workflow(proposal.order)}, from {proposal.init or 'new weights'}",
            *plan(self.trainer().config(proposal)).lines(),
        ]


def begin(options: SearchOptions, passed: Mapping[str, Any]) -> Task:
    """A new search. How many workers and envs it has is settled here, once for all its trials."""
    folder = _folder(options)
    if folder.exists():
        raise SetupError(
            f"'{folder.name}' exists in {options.runs_dir}; add --resume to go on, or choose another --run"
        )
    task = Task(options, options.training(passed), Book(folder), Search(options.rules))
    first = task.search.propose()
    assert first is not None, "a new search has something to try"
    settled = _settled(plan(task.trainer().config(first)), options)
    return dataclasses.replace(task, training={**task.training, **settled})


def take_up(options: SearchOptions, given: Sequence[str]) -> Task:
    """A search that was ended before it was over."""
    book = Book(_folder(options))
    if not book.exists:
        raise UsageError(f"no search '{options.run}' in {options.runs_dir} to go on with; leave out --resume")
    for name in given:
        if name not in FREE:
            raise UsageError(f"--{name.replace('_', '-')} is settled in a search that goes on; leave it out")
    asked, trials = book.read()
    said = {name: getattr(options, name) for name in FREE if name in given}
    try:
        known = SearchOptions(**{**asked["options"], **said})
    except TypeError as error:
        raise SetupError(f"{book.folder} holds a search of another version ({error}); begin a new one") from None
    return Task(known, asked["training"], book, Search(known.rules, trials))


def _folder(options: SearchOptions) -> Path:
    place, base = Path(options.runs_dir), f"workflow-{options.strategy}"
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return place / (options.run or next(name for name in names if not (place / name).exists()))


def _settled(planned: Plan, options: SearchOptions) -> dict[str, Any]:
    collector = planned.config.collector
    counts = ("workers", "envs_per_worker", "num_envs")
    settled = {name: getattr(collector, name) for name in counts if hasattr(collector, name)}
    if options.episodes_per_update is not None and planned.config.mode != "episodes":
        rows = options.episodes_per_update * options.max_episode_steps
        settled["num_steps_per_env"] = math.ceil(rows / planned.spec.lanes)
    return settled
