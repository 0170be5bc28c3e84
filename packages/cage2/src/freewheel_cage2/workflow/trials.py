"""Run the trials of workflows and store a search on disk. A trial is one training run with the order as its context."""

from __future__ import annotations

import csv
import io
import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from freewheel.config.resolve import Config, from_options
from freewheel.core import Episode, Metrics, NDArray
from freewheel.errors import SetupError
from freewheel.files import disk
from freewheel.run.checkpoints.checkpoint import make_private
from freewheel.run.hooks import Hook, Run
from freewheel.run.trainer import run
from freewheel.seeding import tree
from freewheel.sinks.classic import ClassicLines, ClassicSink
from freewheel.sinks.sink import Sink
from freewheel_cage2.workflow.envs import MEASURES, Order, encode, parse, spelt
from freewheel_cage2.workflow.search import Proposal, TrialOutcome, WorkflowSearch, WorkflowTrial

BETTER = 0.02  # smallest relative improvement of a return that counts


@dataclass(frozen=True)
class StopRules:
    """The rules that stop the training of a workflow."""

    threshold: float  # mean compliance at which the workflow counts as learned
    window: int  # number of episodes in every mean
    patience: int  # stop after this many windows without a better return; 0: never


class EpisodeScores(NamedTuple):
    """The scores of an episode, or means over episodes: reward, its two parts, compliance and fixes (see envs.MEASURES)."""

    total_reward: float
    env_return: float
    alignment: float
    compliance: (
        float | None
    )  # NaN for an episode without a fix; means leave such episodes out, and are None if all are such
    fixes: float


def means(played: Sequence[EpisodeScores]) -> EpisodeScores:
    columns: NDArray = np.array(played).T  # [5, N]
    compliance = columns[EpisodeScores._fields.index("compliance")]
    applicable = compliance[~np.isnan(compliance)]
    every = EpisodeScores(*columns.mean(axis=1).tolist())
    return every._replace(compliance=float(applicable.mean()) if applicable.size else None)


class TrialEpisodes:
    """The episodes of one trial, to which the stop rules apply."""

    def __init__(self, stops: StopRules, *, fixed: bool = False) -> None:
        self._stops = stops
        self._fixed = fixed
        self.played: list[EpisodeScores] = []
        self._windows = 0  # full windows
        self._since = 0  # windows after the best one
        self._best: float | None = None

    def take(self, episodes: Sequence[Episode]) -> str:
        """Add episodes and return why the trial should end, or an empty text."""
        self.played += [EpisodeScores(episode.ret, *episode.measures) for episode in episodes]
        self._look_at_windows()
        if self._fixed or not self._windows:
            return ""
        compliance = self.last.compliance
        if compliance is not None and compliance >= self._stops.threshold:
            return "threshold"
        return "plateau" if 0 < self._stops.patience <= self._since else ""

    @property
    def last(self) -> EpisodeScores:
        """The means over the last window."""
        return means(self.played[-self._stops.window :])

    def _look_at_windows(self) -> None:
        """Count windows since the best one. A better window has a return that is clearly above the best."""
        size = self._stops.window
        while (self._windows + 1) * size <= len(self.played):
            value = means(self.played[self._windows * size : (self._windows + 1) * size]).env_return
            self._windows += 1
            self._since += 1
            if self._best is None or value > self._best + BETTER * abs(self._best):
                self._best = value
                self._since = 0


STATE = "search.json"
TRAINING = "training_log.csv"
SAMPLING = "gp_sampling_log.csv"
FORMAT = 1
NO_WORKFLOW = "none"
#: One row per update, with means over the episodes that ended since the last row.
TRAINING_COLUMNS = (
    "trial", "workflow", "update", "episodes", "total_episodes", "env_return", "alignment", "total_reward", "compliance",
    "fixes", "seconds",
)  # fmt: skip
#: One row per trial, with the prediction for the chosen order and the outcome.
SAMPLING_COLUMNS = (
    "trial", "strategy", "chosen", "init", "mean", "std", "ucb", "feasibility", "env_return", "alignment", "total_reward",
    "compliance", "episodes", "total_episodes", "ended", "failed",
)  # fmt: skip


class SearchFiles:
    """The files of one search. search.json is complete at any time, even if the process is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        return (self.folder / STATE).is_file()

    def read(self) -> tuple[dict[str, Any], list[WorkflowTrial]]:
        """Return the options and the finished trials."""
        path = self.folder / STATE
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}")
            return data["asked"], [_trial(entry) for entry in data["trials"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{path} is missing or damaged ({error}); restore it from a copy") from None

    def save(self, asked: Mapping[str, Any], search: WorkflowSearch) -> None:
        """Write the state and the table of trials."""
        make_private(self.folder)
        trials = [{"proposal": asdict(trial.proposal), "outcome": asdict(trial.outcome)} for trial in search.trials]
        best = None if search.best is None else {"workflow": workflow(search.best.order), **asdict(search.best.outcome)}
        state = {"format": FORMAT, "asked": dict(asked), "best": best, "trials": trials}
        disk.replace(self.folder / STATE, (json.dumps(state, indent=1, allow_nan=False) + "\n").encode())
        disk.replace(self.folder / SAMPLING, _text(SAMPLING_COLUMNS, _decisions(search)).encode())

    def begin_training(self, finished: int) -> None:
        """Keep only the rows of finished trials in the training log, because an interrupted trial is repeated."""
        path = self.folder / TRAINING
        kept: list[dict[str, Any]] = []
        if path.is_file():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if None not in row and None not in row.values()]
            kept = [row for row in rows if int(row["trial"]) < finished]
        disk.replace(path, _text(TRAINING_COLUMNS, kept).encode())

    def train(self, row: Mapping[str, Any]) -> None:
        """Append a row to the training log."""
        with disk.open_end(self.folder / TRAINING) as file:
            disk.append(file, _text(TRAINING_COLUMNS, [row], header=False).encode())


def workflow(order: Order | None) -> str:
    """Return the name of a workflow in tables."""
    return NO_WORKFLOW if order is None else spelt(order)


def _trial(entry: Mapping[str, Any]) -> WorkflowTrial:
    order = entry["proposal"]["order"]
    proposal = {**entry["proposal"], "order": None if order is None else parse("-".join(order))}
    return WorkflowTrial(Proposal(**proposal), TrialOutcome(**entry["outcome"]))


def _decisions(search: WorkflowSearch) -> Iterable[dict[str, Any]]:
    total = 0
    for number, (proposal, outcome) in enumerate((trial.proposal, trial.outcome) for trial in search.trials):
        total += outcome.episodes
        yield {
            "trial": number,
            "strategy": search.rules.strategy,
            "chosen": workflow(proposal.order),
            "init": proposal.init,
            **{name: getattr(proposal, name) for name in ("mean", "std", "ucb", "feasibility")},
            **{name: getattr(outcome, name) for name in ("env_return", "alignment", "compliance", "episodes", "ended")},
            "total_reward": outcome.env_return + outcome.alignment,
            "total_episodes": total,
            "failed": search.failure(search.trials[number]),
        }


def _text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, header: bool = True) -> str:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, columns)
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


TRIALS = "trials"  # the folder with the runs of the trials
SIGNALLED = 128  # larger exit codes mean that a signal ended the run

Write: TypeAlias = Callable[[Mapping[str, Any]], None]  # writes a row of the training log


class InterruptedSearch(BaseException):
    """Raised when a signal ends a trial."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class TrialRunner:
    """A callable that runs the trial of a proposal. `options` are options of `freewheel.train`, including the environment."""

    def __init__(
        self, options: Mapping[str, Any], folder: Path, stops: StopRules, write: Write, *, length: int, before: int = 0
    ) -> None:
        self._options = options
        self._folder = folder
        self._stops = stops
        self._write = write
        self._length = length  # steps of an episode
        self._episodes = before  # episodes of all trials so far

    def __call__(self, proposal: Proposal, shown: Sink | None = None) -> TrialOutcome:
        """Train and return the outcome. `shown` gets the metrics unless the classic console is chosen."""
        resolved = self.config(proposal)
        name = resolved.run.output.name
        with suppress(OSError):
            disk.remove(self._folder / TRIALS / name)  # left over from an interrupted trial
        watch = _TrialHook(TrialEpisodes(self._stops, fixed=proposal.fixed), proposal, self._write, self._episodes)
        classic = resolved.run.output.console == "classic"
        sink = ClassicSink(ClassicLines(episodes=proposal.episodes)) if classic else shown
        try:
            result = run(resolved, quiet=True, hooks=[watch], sinks=[sink] if sink is not None else [])
        except (KeyboardInterrupt, SystemExit) as early:  # a signal before the run had begun
            code = early.code if isinstance(early, SystemExit) else None
            raise InterruptedSearch(code if isinstance(code, int) else SIGNALLED + signal.SIGINT) from None
        if result.exit_code > SIGNALLED:
            raise InterruptedSearch(result.exit_code)
        watch.write()
        last, count = watch.progress.last, len(watch.progress.played)
        self._episodes += count
        ended = str(result.summary["ended"]).replace(
            "steps", "episodes"
        )  # the budgets in steps and in episodes are equivalent
        return TrialOutcome(last.env_return, last.alignment, last.compliance, count, ended, name)

    def config(self, proposal: Proposal) -> Config:
        """Return the configuration of the run for a proposal."""
        options: dict[str, Any] = {
            **self._options,
            "episodes": proposal.episodes,
            "steps": proposal.episodes * self._length,  # the schedules need steps
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


class _TrialHook(Hook):
    """A hook that writes the training log of a trial and applies the stop rules."""

    def __init__(self, progress: TrialEpisodes, proposal: Proposal, write: Write, before: int) -> None:
        self.progress = progress
        self._proposal = proposal
        self._write = write
        self._before = before
        self._written = 0
        self._update = 0
        self._begun = time.monotonic()
        self._fresh: list[Episode] = []  # episodes since the last update

    def on_episode(self, run: Run, episode: Episode) -> None:
        self._fresh.append(episode)

    def on_update(self, run: Run, metrics: Metrics) -> None:
        self._update = run.version
        if ended := self._take():
            run.stop(ended)
        self.write()

    def on_stop(self, run: Run, ended: str) -> None:
        self._take()

    def _take(self) -> str:
        fresh = self._fresh
        self._fresh = []
        return self.progress.take(fresh)

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
