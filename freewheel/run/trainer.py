"""The composition root: a Config in, a finished run directory out."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from freewheel.collect.serial import SerialConfig
from freewheel.config.resolve import Config
from freewheel.core import Collector, Env, Episode, Learner, MakeExecutor, RowCounts, Sink, Snapshot, Tick, to_numpy
from freewheel.errors import FreewheelError, SetupError
from freewheel.evaluate.episodes import EvalSpec, Score, evaluator, playable
from freewheel.evaluate.evaluators import Evaluator, Here, Reserved, There
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.meter import Meter
from freewheel.policies.build import make_actor
from freewheel.rollout.probe import usable_cores
from freewheel.run import checkpoint
from freewheel.run.plan import Plan, plan
from freewheel.run.stopping import Interrupted, Interruptible, Stop
from freewheel.sinks.console import ClassicSink, ConsoleSink
from freewheel.sinks.jsonl import JsonlSink
from freewheel.transport.executors import Executors, ProcessExecutor, SerialExecutor
from freewheel.transport.workers import WorkersConfig

FREE_RUNNING = ("continuous", "episodes")  # modes in which nobody waits for anybody
DEGRADED = 3  # exit code: finished, but workers were lost for good
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
NICE = 5  # how far the learner stands back where workers want the same cores


@dataclass(frozen=True)
class Result:
    """A finished run."""

    path: Path
    summary: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return int(self.summary["exit_code"])


#: Called after every turn of the loop with the episodes that ended in it; what it says, if anything, is why the run ends.
Until: TypeAlias = Callable[[Sequence[Episode], Tick], str]


def run(config: Config, *, quiet: bool = False, until: Until | None = None) -> Result:
    """Train. Whatever the end, the run directory is complete and nothing is left running; failures are raised after that."""
    planned = plan(config)
    config = planned.config
    stop = Stop()
    _keep_freed_memory()
    with _torch_threads(config.run.machine.threads), _standing_back(planned), _executors(planned) as executors:
        learner = config.learner.build(replace(planned.learner_spec, executors=executors, waiting=stop.check))
        _create(planned.path)
        _write_json(planned.path / "config.json", config.to_json())
        sinks: list[Sink] = [JsonlSink(planned.path / "metrics.jsonl")]
        if not quiet:
            sinks.append(_console(config))
            if planned.worker_config is not None:
                sinks[-1].note(planned.worker_config.plan_line())
        return _Trainer(planned, learner, sinks, stop, until).train()


def _console(config: Config) -> Sink:
    title, budget = f"{config.env.name}  {config.algo}  {config.mode}", config.run.budget
    if config.run.output.console == "live":
        return ConsoleSink(title, budget)
    return ClassicSink(("Async" if config.mode in FREE_RUNNING else "") + config.algo.upper(), title, budget)


class _Trainer:
    """What stands beside the loop: logging, evaluating, saving, stopping."""

    def __init__(
        self, planned: Plan, learner: Learner, sinks: Sequence[Sink], stop: Stop, until: Until | None = None
    ) -> None:
        self._plan, self._learner, self._sinks, self._stop, self._until = planned, learner, sinks, stop, until
        self._options, self._budget = planned.config.run, planned.config.run.budget
        self.meter = Meter(planned.workers, planned.spec.measures)
        self._collector: Collector | None = None
        in_turn = not planned.in_processes and not planned.spec.batched_on_device
        self.recipe = replace(planned.runner_factory, make=self._make) if in_turn else planned.runner_factory
        self._next_log = self._options.output.log_every
        self._fallback = ""  # why updates are not replayed from graphs
        self._evaluations = 0
        self._best: Score | None = None
        self._final: Score | None = None

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

    def _make(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env:
        return Interruptible(
            self._plan.config.env.make(lanes, processes=processes, fault_tolerant=fault_tolerant), self._stop
        )

    def _run(self) -> str:
        """Train until the budget is spent; why it ended."""
        if self._plan.init is not None:
            self._tell(*self._plan.init.warnings)
        return self._on_device(self._train)

    def _on_device(self, work: Callable[[], str]) -> str:
        """On a GPU the learner has a stream of its own."""
        if self._plan.device == "cpu":
            return work()
        import torch

        with torch.cuda.stream(torch.cuda.Stream()):
            return work()

    def _train(self) -> str:
        job = self._plan.collect_spec(self._learner.snapshot(), self._stop.check)
        with ExitStack() as stack:
            evaluator = self._examiner(stack)
            collector = stack.enter_context(self._plan.config.collector.build(self.recipe, job))
            self._collector = collector
            if job.simulation.main_thread and hasattr(collector, "serve"):
                return self._beside(collector, evaluator)
            return self._loop(collector, evaluator)

    def _beside(self, simulation: Any, evaluator: Evaluator | None) -> str:
        """The loop in a thread, for the simulator needs the main one."""
        with ThreadPoolExecutor(1, "freewheel-loop") as pool:
            ended = pool.submit(self._on_device, partial(self._loop, simulation, evaluator))
            ended.add_done_callback(lambda _: simulation.stop())
            simulation.serve()
            return ended.result()

    def _loop(self, collector: Collector, evaluator: Evaluator | None) -> str:
        max_lag, context = self._plan.max_lag, self._options.contexts
        for tick in loop(collector, self._learner, self.meter, max_lag=max_lag, context=context):
            self.meter.take(tick)
            ended = self._ended(tick)
            if evaluator is not None:
                self._evaluate_if_due(evaluator, tick, last=bool(ended))
            if self.meter.wall_s >= self._next_log or ended:
                self._log(collector)
            if ended:
                return ended
        raise AssertionError("the loop never ends by itself")

    def _ended(self, tick: Tick) -> str:
        self._stop.check()
        spent = {"steps": self._learner.rows().done, "minutes": self.meter.wall_s / 60, "episodes": self.meter.episodes}
        limits = vars(self._budget)
        said = self._until([one for chunk in tick.chunks for one in chunk.episodes], tick) if self._until else ""
        return said or next((name for name, used in spent.items() if limits[name] and used >= limits[name]), "")

    def _log(self, collector: Collector) -> None:
        rows = balance(collector.rows(), self._learner.rows())
        row = self.meter.row(rows, collector.stats(), self._learner.rows().queued / self._plan.batch.rows)
        self._tell(*collector.messages())
        self._tell_fallback()
        for sink in self._sinks:
            sink.write(row)
        self._next_log = self.meter.wall_s + self._options.output.log_every

    def _tell_fallback(self) -> None:
        """Once, if the learner could not have the graphs it was meant to have."""
        reason = getattr(self._learner, "fallback", "") if self._plan.device != "cpu" else ""
        if reason and not self._fallback:
            self._fallback = reason
            self._tell(f"no CUDA graph for the updates, they are launched one by one: {reason}")

    def _tell(self, *texts: str) -> None:
        for sink in self._sinks:
            for text in texts:
                sink.note(text)

    def _examiner(self, stack: ExitStack) -> Evaluator | None:
        options = self._options.evaluation
        if not options.evals:
            return None
        eval_spec = EvalSpec(options.eval_episodes, options.eval_seed, options.eval_max_steps)
        collect, limits = self._plan.config.collector, self._plan.config.env.timeouts
        if self._plan.spec.one_per_process:
            return Reserved(self._graded, eval_spec.episodes, self._plan.spec.measures)
        if self._plan.spec.batched_on_device:
            env = playable(self._plan.config.env.make(range(eval_spec.episodes)))
            stack.callback(env.close)
            return Here(env, make_actor(self._plan.policy)(), eval_spec, self.meter)
        if isinstance(collect, WorkersConfig):
            lanes = self._side_by_side(eval_spec, 1)
            eval_spec = replace(eval_spec, lanes=lanes, patience=(limits.reset, limits.step))
            return There(
                stack.enter_context(ProcessExecutor(partial(evaluator, self.recipe, eval_spec), "evaluation")),
                self._stop,
            )
        assert isinstance(collect, SerialConfig), "no other mode is left"
        env = collect.place(self._make, range(self._side_by_side(eval_spec, eval_spec.lanes)))
        stack.callback(env.close)
        return Here(env, make_actor(self._plan.policy)(), eval_spec, self.meter)

    def _side_by_side(self, eval_spec: EvalSpec, usual: int) -> int:
        """How many episodes are played at once: all of them where that costs little more than one."""
        env = self._plan.config.env
        return eval_spec.episodes if env.batched else min(eval_spec.episodes, usual)

    def _graded(self) -> Sequence[Episode]:
        """What reserved lanes have played."""
        return getattr(self._collector, "eval_episodes", list[Episode])()

    def _evaluate_if_due(self, evaluator: Evaluator, tick: Tick, *, last: bool) -> None:
        progress = self._budget.progress(tick.env_steps, self.meter.wall_s, self.meter.episodes)
        due = self._options.evaluation.evals if last else int(progress * self._options.evaluation.evals)
        if due > self._evaluations and (last or due < self._options.evaluation.evals):
            self._evaluations = due
            evaluator.ask(tick.env_steps, replace(self._learner.snapshot(), context=self._options.contexts))
        with self.meter.span("eval"):
            for step, snapshot, score in evaluator.results(wait=last):
                if isinstance(score, FreewheelError):
                    self._tell(f"no evaluation at step {step}: {score}")
                else:
                    self._scored(step, snapshot, score)

    def _scored(self, step: int, snapshot: Snapshot, score: Score) -> None:
        self.meter.eval_result(score.mean, score.measures)
        if score.cut:
            limit = self._options.evaluation.eval_max_steps
            self._tell(f"{score.cut} evaluation episodes were cut at {limit} steps (--eval-max-steps)")
        self._final = score
        if self._best is None or score.mean > self._best.mean:
            self._best = score
            self._save(step, snapshot, best=True)

    def _save(self, step: int, snapshot: Snapshot, *, best: bool = False) -> str:
        """These weights; their fingerprint."""
        with self.meter.span("save"):
            params = {name: to_numpy(value) for name, value in snapshot.params.items()}
            about = {"policy": self._plan.policy.to_json(), "version": snapshot.version}
            checkpoint.save(self._plan.path / "checkpoints", step, params, about, tag="best" if best else None)
        return checkpoint.fingerprint(params)

    def _finish(self, ended: str, failure: BaseException | None) -> dict[str, Any]:
        """Save, settle the accounts and write down how it went."""
        totals = self.meter.totals()
        sha256 = self._save(totals["env_steps"], self._learner.snapshot())
        rows, report = self._settled(), {} if self._collector is None else self._collector.summary()
        exit_code, stopped_by = DEGRADED if report.get("workers_lost") else 0, self._stop.signal
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
            "shares": self.meter.shares(),
            "worker_restarts": 0,
            "graphs_fallback": self._fallback or None,
            **report,
            "weights_sha256": sha256,
            "path": str(self._plan.path),
        }
        _write_json(self._plan.path / "summary.json", summary)
        if self._collector is not None:
            self._tell(*self._collector.messages())
        for sink in self._sinks:
            sink.close(summary)
        return summary

    def _settled(self) -> RowCounts:
        """The final account: what was still open or queued will never be used."""
        if self._collector is None:
            return RowCounts()
        rows = balance(self._collector.rows(), self._learner.rows())
        unused = rows.queued + rows.open
        dropped = {**rows.dropped, "shutdown": unused} if unused else rows.dropped
        return replace(rows, queued=0, open=0, dropped=dropped)


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


def _keep_freed_memory() -> None:
    """Let the allocator keep what is freed: an update frees and takes the same megabytes again and again, and fresh pages are
    dear. Where there is no such allocator, nothing happens."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(option, 1 << 30)


@contextmanager
def _executors(planned: Plan) -> Iterator[MakeExecutor]:
    """Where parts of the learner run: in turn, or beside it on a GPU's streams or the CPU's cores."""
    if not planned.overlaps:
        yield SerialExecutor
        return
    with Executors("process" if planned.device == "cpu" else "thread", planned.device) as room:
        yield room


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _standing_back(planned: Plan) -> Iterator[None]:
    """The learner yields to a crowd of workers, which is how sleeping ones wake in time; to a few that never sleep it would
    yield for ever. Taken back at the end, where the system lets us."""
    if not planned.in_processes or planned.workers <= usable_cores():
        yield
        return
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(19, before + NICE))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, thread, before)
