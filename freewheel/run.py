"""The composition root: a Config in, a finished run directory out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from freewheel import checkpoint
from freewheel.config import Config
from freewheel.core import Collector, Env, EnvSpec, Learner, Rows, Sink, Tick
from freewheel.errors import FreewheelError, SetupError
from freewheel.evaluate import Score, evaluate
from freewheel.learn.settings import Assignment
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.meter import Meter
from freewheel.policies.build import make_actor
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.recipe import Recipe
from freewheel.sinks.console import ConsoleSink
from freewheel.sinks.jsonl import JsonlSink

EVAL_LANES = 8

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Result:
    """A finished run."""

    path: Path
    summary: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return int(self.summary["exit_code"])


class Interrupted(BaseException):
    """A signal asked for the end."""


class _Stop:
    """The signal that asked for the end. It cuts the calls of envs short, where no row is half counted; all else is finished."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.over = False  # how it went is being written down, which is not for cutting
        self._in_env = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The handler: the first signal ends the run in order, the second at once."""
        first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if not self.over and (self._in_env or not first):
            raise Interrupted

    def check(self) -> None:
        if self.signal is not None:
            raise Interrupted

    def guard(self, call: Callable[[In], Out]) -> Callable[[In], Out]:
        def guarded(argument: In) -> Out:
            self._in_env = True
            try:
                self.check()
                return call(argument)
            finally:
                self._in_env = False

        return guarded

    @contextmanager
    def listening(self) -> Iterator[None]:
        try:
            before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: whoever is there decides about signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Interruptible:
    """An Env whose calls a signal may cut short."""

    def __init__(self, env: Env, stop: _Stop) -> None:
        self.reset, self.step = stop.guard(env.reset), stop.guard(env.step)
        self.render, self.close = env.render, env.close
        self.spec = env.spec


@dataclass(frozen=True)
class Plan:
    """What a Config means on this machine for this world; nothing is started yet."""

    config: Config
    spec: EnvSpec
    policy: PolicySpec
    path: Path
    device: str

    @property
    def rows(self) -> int:
        """S: rows an on-policy update consumes."""
        return self.config.run.num_steps_per_env * self.config.collector.num_envs

    @property
    def assignment(self) -> Assignment:
        return Assignment(
            policy=self.policy,
            rows=self.rows,
            lanes=self.config.collector.num_envs,
            seed=self.config.run.seed,
            total_steps=self.config.run.budget.steps,
            device=self.device,
        )

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.config.env.make, make_actor(self.policy), self.config.run.seed)

    def lines(self) -> list[str]:
        """The plan for a person."""
        config, spec = self.config, self.spec
        action = "actions to choose from" if spec.action.kind == "discrete" else "action columns"
        world = f"{spec.obs_size} observation columns ({', '.join(part.name for part in spec.slices)})"
        network = self.policy.module or f"MLP {' - '.join(map(str, self.policy.hidden))} {self.policy.activation}"
        batch = f"{config.collector.num_envs} envs x {config.run.num_steps_per_env} steps = {self.rows} rows an update"
        passes = f"{config.learner.epochs} epochs of minibatches of {min(config.learner.minibatch, self.rows)}"
        budget = config.run.budget
        limits = [f"{value:,} {name}" for name, value in vars(budget).items() if value is not None]
        lines = [
            f"world    {spec.name}: {world}, {spec.action.size} {action}",
            f"policy   {network}, {self.policy.head} head",
            f"collect  {config.mode}: {batch}",
            f"learn    {config.algo} on {self.device}, {passes}",
            f"budget   {' or '.join(limits)}",
            f"run      {self.path}",
        ]
        if budget.steps:
            lines.insert(5, f"updates  {-(-budget.steps // self.rows):,}")
        return lines


def plan(config: Config) -> Plan:
    """Look before starting: every mistake that can be known now is reported now."""
    path = _run_path(config)
    env = config.collector.place(config.env.make, range(1))
    spec = replace(env.spec, lanes=config.collector.num_envs)
    env.close()
    return Plan(config, spec, config.policy.resolve(spec), path, _device(config.run.device))


def run(config: Config, *, quiet: bool = False) -> Result:
    """Train. Whatever the end, the run directory is complete and nothing is left running; failures are raised after that."""
    planned = plan(config)
    with _torch_threads(config.run.threads):
        learner = config.learner.build(planned.assignment)
        _create(planned.path)
        _write_json(planned.path / "config.json", config.to_json())
        sinks: list[Sink] = [JsonlSink(planned.path / "metrics.jsonl")]
        if not quiet:
            sinks.append(ConsoleSink(f"{config.env.id}  {config.algo}  {config.mode}", config.run.budget))
        return _Trainer(planned, learner, sinks).train()


class _Trainer:
    """What stands beside the loop: logging, evaluating, saving, stopping."""

    def __init__(self, planned: Plan, learner: Learner, sinks: Sequence[Sink]) -> None:
        self._plan, self._learner, self._sinks = planned, learner, sinks
        self._options, self._budget = planned.config.run, planned.config.run.budget
        self._meter = Meter(workers=1)
        self._collector: Collector | None = None
        self._stop = _Stop()
        self._recipe = replace(planned.recipe, make=self._make)
        self._next_log = self._options.log_every
        self._evaluations = 0
        self._best: Score | None = None
        self._final: Score | None = None
        self._actor = self._recipe.actor()

    def train(self) -> Result:
        failure: BaseException | None = None
        with self._stop.listening():
            try:
                ended = self._run()
            except Interrupted:
                ended = "interrupted"
            except BaseException as error:  # noqa: BLE001 - raised again when all is written down
                ended, failure = "failed", error
            self._stop.over = True
            summary = self._finish(ended, failure)
        if failure is not None:
            raise failure
        return Result(self._plan.path, summary)

    def _make(self, lanes: range, *, processes: bool = False) -> Env:
        return _Interruptible(self._plan.config.env.make(lanes, processes=processes), self._stop)

    def _run(self) -> str:
        """Train until the budget is spent; why it ended."""
        collect = self._plan.config.collector
        with collect.build(self._recipe, self._options.num_steps_per_env) as collector, ExitStack() as stack:
            self._collector = collector
            eval_env = self._evaluation_env(stack)
            for tick in loop(collector, self._learner, self._meter):
                self._meter.take(tick)
                ended = self._ended(tick)
                if eval_env is not None:
                    self._evaluate_if_due(eval_env, tick, last=bool(ended))
                if self._meter.wall_s >= self._next_log or ended:
                    self._log(collector)
                if ended:
                    return ended
        raise AssertionError("the loop never ends by itself")

    def _ended(self, tick: Tick) -> str:
        self._stop.check()
        spent = {"steps": tick.env_steps, "minutes": self._meter.wall_s / 60, "episodes": self._meter.episodes}
        limits = vars(self._budget)
        return next((name for name, used in spent.items() if limits[name] is not None and used >= limits[name]), "")

    def _log(self, collector: Collector) -> None:
        rows = balance(collector.rows(), self._learner.rows())
        row = self._meter.row(rows, collector.stats(), self._learner.rows().queued / self._plan.rows)
        for sink in self._sinks:
            sink.write(row)
        self._next_log = self._meter.wall_s + self._options.log_every

    def _evaluation_env(self, stack: ExitStack) -> Env | None:
        if not self._options.evals:
            return None
        lanes = range(min(self._options.eval_episodes, EVAL_LANES))
        env = self._plan.config.collector.place(self._make, lanes)
        stack.callback(env.close)
        return env

    def _evaluate_if_due(self, env: Env, tick: Tick, *, last: bool) -> None:
        progress = self._budget.progress(tick.env_steps, self._meter.wall_s, self._meter.episodes)
        due = self._options.evals if last else int(progress * self._options.evals)
        if due <= self._evaluations or (due == self._options.evals and not last):
            return
        self._evaluations = due
        with self._meter.span("eval"):
            self._actor.load(self._learner.snapshot())
            options = self._options
            score = evaluate(env, self._actor, options.eval_episodes, options.eval_seed, options.eval_max_steps)
        self._meter.eval_result(score.mean)
        if score.cut:
            for sink in self._sinks:
                sink.note(
                    f"{score.cut} evaluation episodes were cut at {options.eval_max_steps} steps (--eval-max-steps)"
                )
        self._final = score
        if self._best is None or score.mean > self._best.mean:
            self._best = score
            self._save(tick.env_steps, best=True)

    def _save(self, step: int, *, best: bool = False) -> str:
        """The weights as they are now; their fingerprint."""
        with self._meter.span("save"):
            params = {name: np.asarray(value) for name, value in self._learner.snapshot().params.items()}
            about = {"policy": self._plan.policy.to_json(), "version": self._learner.version}
            checkpoint.save(self._plan.path / "checkpoints", step, params, about, tag="best" if best else None)
        return checkpoint.fingerprint(params)

    def _finish(self, ended: str, failure: BaseException | None) -> dict[str, Any]:
        """Save, settle the accounts and write down how it went."""
        totals = self._meter.totals()
        sha256 = self._save(totals["env_steps"])
        rows = self._settled()
        exit_code, stopped_by = 0, self._stop.signal
        if failure is not None:
            exit_code = failure.exit_code if isinstance(failure, FreewheelError) else 1
        elif stopped_by is not None:
            exit_code = 128 + stopped_by
        summary = {
            "run": self._plan.path.name,
            "ended": ended if stopped_by is None else f"{ended} ({stopped_by.name})",
            "exit_code": exit_code,
            "error": None if failure is None else str(failure) or repr(failure),
            **totals,
            "final_eval": None if self._final is None else self._final.mean,
            **dataclasses.asdict(rows),
            "shares": self._meter.shares(),
            "worker_restarts": 0,
            "weights_sha256": sha256,
            "path": str(self._plan.path),
        }
        _write_json(self._plan.path / "summary.json", summary)
        for sink in self._sinks:
            sink.close(summary)
        return summary

    def _settled(self) -> Rows:
        """The final account: what was still open or queued will never be used."""
        if self._collector is None:
            return Rows()
        rows = balance(self._collector.rows(), self._learner.rows())
        unused = rows.queued + rows.open
        dropped = {**rows.dropped, "shutdown": unused} if unused else rows.dropped
        return replace(rows, queued=0, open=0, dropped=dropped)


def _run_path(config: Config) -> Path:
    """Where the run will live; refused if it exists or could not be written."""
    folder = Path(config.run.runs_dir)
    parent = next((place for place in (folder, *folder.absolute().parents) if place.exists()), folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise SetupError(
            f"cannot write runs under {folder}: {parent} is not a writable directory; choose another --runs-dir"
        )
    if config.run.run:
        if (folder / config.run.run).exists():
            raise SetupError(f"run '{config.run.run}' exists in {folder}; choose another --run or remove it")
        return folder / config.run.run
    base = re.sub(r"[^\w.-]+", "_", f"{config.env.id}-{config.algo}-{config.mode}")
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(folder / name for name in names if not (folder / name).exists())


def _create(path: Path) -> None:
    try:
        checkpoint.make_private(path.parent)
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise SetupError(f"run '{path.name}' was just created by someone else; choose another --run") from None
    except OSError as error:
        raise SetupError(f"cannot create {path}: {error.strerror}; choose another --runs-dir") from None


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Whole or absent."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(part, path)


def _device(wanted: str) -> str:
    if wanted == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise SetupError("--device cuda: torch sees no GPU here; use --device cpu")
    return "cpu"


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
