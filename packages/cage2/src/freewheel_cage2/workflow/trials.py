"""A trial of a workflow: one training run with the order as its context, its stop rules, and the records of a search on disk."""

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
from freewheel.core import Episode, Metrics, NDArray, Sink
from freewheel.errors import SetupError
from freewheel.files import disk
from freewheel.run.checkpoints.checkpoint import make_private
from freewheel.run.hooks import Hook, Run
from freewheel.run.trainer import run
from freewheel.seeding import tree
from freewheel.sinks.classic import ClassicLines, ClassicSink
from freewheel_cage2.workflow.envs import MEASURES, Order, encode, parse, spelt
from freewheel_cage2.workflow.search import Proposal, TrialOutcome, WorkflowSearch, WorkflowTrial

BETTER = 0.02  # the relative improvement of a return that counts


@dataclass(frozen=True)
class StopRules:
    """When to stop training a workflow."""

    threshold: float  # of mean compliance, at which it counts as learned
    window: int  # episodes in every mean
    patience: int  # stop after so many windows without a better return; 0: never


class EpisodeScores(NamedTuple):
    """Of an episode, or means over episodes: the reward, the two parts of it, compliance and fixes (see envs.MEASURES)."""

    total_reward: float
    env_return: float
    alignment: float
    compliance: float | None  # NaN if an episode has no fix; a mean over the others, None if there are none
    fixes: float


def means(played: Sequence[EpisodeScores]) -> EpisodeScores:
    columns: NDArray = np.array(played).T  # [5, N]
    compliance = columns[EpisodeScores._fields.index("compliance")]
    applicable = compliance[~np.isnan(compliance)]
    every = EpisodeScores(*columns.mean(axis=1).tolist())
    return every._replace(compliance=float(applicable.mean()) if applicable.size else None)


class TrialEpisodes:
    """The episodes of one trial."""

    def __init__(self, stops: StopRules, *, fixed: bool = False) -> None:
        self._stops, self._fixed = stops, fixed
        self.played: list[EpisodeScores] = []
        self._windows, self._since = 0, 0  # full windows; windows after the best one
        self._best: float | None = None

    def take(self, episodes: Sequence[Episode]) -> str:
        """Add episodes; returns why the trial should end, or nothing."""
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
        """Over the last window."""
        return means(self.played[-self._stops.window :])

    def _look_at_windows(self) -> None:
        """A window is better if its return is clearly above the best one."""
        size = self._stops.window
        while (self._windows + 1) * size <= len(self.played):
            value = means(self.played[self._windows * size : (self._windows + 1) * size]).env_return
            self._windows += 1
            self._since += 1
            if self._best is None or value > self._best + BETTER * abs(self._best):
                self._best, self._since = value, 0


STATE, TRAINING, SAMPLING = "search.json", "training_log.csv", "gp_sampling_log.csv"
FORMAT = 1
NO_WORKFLOW = "none"
#: One row per update: means over the episodes that ended since the last row.
TRAINING_COLUMNS = (
    "trial", "workflow", "update", "episodes", "total_episodes", "env_return", "alignment", "total_reward", "compliance",
    "fixes", "seconds",
)  # fmt: skip
#: One row per trial: the prediction for the chosen order, and the outcome.
SAMPLING_COLUMNS = (
    "trial", "strategy", "chosen", "init", "mean", "std", "ucb", "feasibility", "env_return", "alignment", "total_reward",
    "compliance", "episodes", "total_episodes", "ended", "failed",
)  # fmt: skip


class SearchFiles:
    """The files of one search; search.json is complete at every moment, even if the process is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        return (self.folder / STATE).is_file()

    def read(self) -> tuple[dict[str, Any], list[WorkflowTrial]]:
        """The options, and the finished trials."""
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
        """Keep only the rows of finished trials in the training log; an interrupted trial is repeated."""
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
    """The name of a workflow in tables."""
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


TRIALS = "trials"  # the folder with their runs
SIGNALLED = 128  # larger exit codes mean that a signal ended the run

Write: TypeAlias = Callable[[Mapping[str, Any]], None]  # a row of the training log


class InterruptedSearch(BaseException):
    """A signal ended a trial."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class TrialRunner:
    """Makes trials: training(proposal) -> outcome. `options` are those of `freewheel.train`, including the environment."""

    def __init__(
        self, options: Mapping[str, Any], folder: Path, stops: StopRules, write: Write, *, length: int, before: int = 0
    ) -> None:
        self._options, self._folder, self._stops, self._write = options, folder, stops, write
        self._length, self._episodes = length, before  # steps of an episode; episodes of all trials so far

    def __call__(self, proposal: Proposal, shown: Sink | None = None) -> TrialOutcome:
        """Train; `shown` gets its metrics, unless the classic lines are asked for."""
        resolved = self.config(proposal)
        name = resolved.run.output.name
        with suppress(OSError):
            disk.remove(self._folder / TRIALS / name)  # of a trial that was interrupted
        watch = _TrialHook(TrialEpisodes(self._stops, fixed=proposal.fixed), proposal, self._write, self._episodes)
        classic = resolved.run.output.console == "classic"
        sink = ClassicSink(ClassicLines(episodes=proposal.episodes)) if classic else shown
        try:
            result = run(resolved, quiet=True, hooks=[watch], sinks=[sink] if sink is not None else [])
        except (KeyboardInterrupt, SystemExit) as early:  # a signal that came before the run had begun
            code = early.code if isinstance(early, SystemExit) else None
            raise InterruptedSearch(code if isinstance(code, int) else SIGNALLED + signal.SIGINT) from None
        if result.exit_code > SIGNALLED:
            raise InterruptedSearch(result.exit_code)
        watch.write()
        last, count = watch.progress.last, len(watch.progress.played)
        self._episodes += count
        ended = str(result.summary["ended"]).replace("steps", "episodes")  # the budget in steps is equivalent
        return TrialOutcome(last.env_return, last.alignment, last.compliance, count, ended, name)

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


class _TrialHook(Hook):
    """Watches a trial: writes the training log and applies the stop rules."""

    def __init__(self, progress: TrialEpisodes, proposal: Proposal, write: Write, before: int) -> None:
        self.progress, self._proposal, self._write, self._before = progress, proposal, write, before
        self._written, self._update, self._begun = 0, 0, time.monotonic()
        self._fresh: list[Episode] = []  # since the last update

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
        fresh, self._fresh = self._fresh, []
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
