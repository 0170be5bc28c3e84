"""Hooks: when they are called and with what, what they can change, and how a run ends that they stop or break."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel import Hook, Run
from freewheel.cli.main import main
from freewheel.core import Episode, Metrics, NDArray, to_numpy
from freewheel.errors import UsageError
from freewheel.run.checkpoints import checkpoint
from freewheel.run.evaluation.episodes import Score
from freewheel.run.hooks import EVENTS, find_hooks
from freewheel.run.naming import Result
from tests.support.runs import Kept, assert_balanced, python, rows_of, train

CONDITIONED = "tests.support.worlds:Conditioned"
TABLE = [[1.0, 0.0], [2.0, 3.0], [-4.0, 1.0]]


class Diary(Hook):
    """Everything that happens, with the counters at that time."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.counts: list[tuple[int, int, int, int]] = []
        self.threads: set[int] = set()
        self.runs: list[Run] = []

    def note(self, run: Run, event: str, detail: Any = None) -> None:
        self.entries.append((event, detail))
        self.counts.append((run.env_steps, run.episodes, run.updates, run.version))
        self.threads.add(threading.get_ident())
        self.runs.append(run)

    def on_start(self, run: Run) -> None:
        self.note(run, "start", (run.progress, run.config.mode, run.learning_rate))

    def on_episode(self, run: Run, episode: Episode) -> None:
        self.note(run, "episode", (episode.lane, episode.number))

    def on_update(self, run: Run, metrics: Metrics) -> None:
        self.note(run, "update", metrics["loss/policy"])

    def on_eval(self, run: Run, step: int, score: Score) -> None:
        self.note(run, "eval", (step, score.mean))

    def on_checkpoint(self, run: Run, path: Path) -> None:
        assert path.parent == run.path / "checkpoints"
        self.note(run, "checkpoint", checkpoint.load(path.parent, path.name).step)

    def on_stop(self, run: Run, ended: str) -> None:
        assert not (run.path / "summary.json").exists()
        self.note(run, "stop", (ended, run.progress, repr(run)))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Diary, Result]:
    diary = Diary()
    return diary, train(tmp_path_factory.mktemp("story"), hooks=[diary], evals=2, run="one")


def test_everything_is_told_in_order(story: tuple[Diary, Result]) -> None:
    diary, _ = story
    turn = ["episode"] * 4 + ["update"]
    told = [event for event, _ in diary.entries]
    assert told[:1] + told[-2:] == ["start", "checkpoint", "stop"]
    evals = [number for number, event in enumerate(told) if event == "eval"]
    before = [event for event in told[: evals[0]] if event != "checkpoint"]
    assert before == ["start"] + turn * 5, "the evaluation is due after half of the steps"
    assert [event for event in told[1:-2] if event not in ("eval", "checkpoint")] == turn * 10
    assert told[evals[0] + 1] == "checkpoint", "the first evaluation is the best so far"
    assert diary.counts[0] == (0, 0, 0, 0)
    assert diary.counts[-1] == (640, 40, 10, 10)
    assert diary.threads == {threading.get_ident()}
    assert len(set(map(id, diary.runs))) == 1


def test_each_event_has_its_facts(story: tuple[Diary, Result]) -> None:
    diary, result = story
    facts: dict[str, list[Any]] = {}
    for event, detail in diary.entries:
        facts.setdefault(event, []).append(detail)
    assert facts["start"] == [(0.0, "lockstep", 3e-4)]
    assert sorted(facts["episode"]) == [(lane, number) for lane in range(4) for number in range(10)]
    assert facts["update"] == [row["loss/policy"] for row in rows_of(result)]
    assert [step for step, _ in facts["eval"]] == [320, 640]
    assert facts["eval"][-1][1] == result.summary["final_eval"]
    assert facts["checkpoint"][0] == 64, "as soon as something was learned"
    assert 320 in facts["checkpoint"]
    assert facts["checkpoint"][-1] == 640
    assert facts["stop"] == [("steps", 1.0, f"<Run {result.path} at step 640, version 10>")]


@pytest.mark.parametrize("mode", ["lockstep", "batch", "continuous", "episodes"])
def test_a_hook_ends_the_run_in_good_order(tmp_path: Path, mode: str) -> None:
    seen: list[tuple[int, int]] = []
    ended: list[str] = []

    class Enough:  # any object will do
        def on_episode(self, run: Run, episode: Episode) -> None:
            seen.append((episode.lane, episode.number))
            if len(seen) >= 20:
                run.stop("good enough")
                run.stop("too late")

        def on_stop(self, run: Run, why: str) -> None:
            ended.append(why)

    workers: dict[str, Any] = {} if mode == "lockstep" else {"workers": 2}
    result = train(tmp_path, mode=mode, hooks=[Enough()], steps=100_000, evals=1, num_envs=2, **workers)
    summary = result.summary
    assert (summary["ended"], result.exit_code, ended) == ("good enough", 0, ["good enough"])
    assert summary["episodes"] == len(seen) == len(set(seen))
    assert summary["final_eval"] is not None
    assert_balanced(summary)
    saved = checkpoint.load(result.path / "checkpoints")
    assert (saved.step, checkpoint.fingerprint(saved.params)) == (summary["env_steps"], summary["weights_sha256"])


def test_a_reason_comes_before_the_budget_and_an_evaluation_may_give_it(tmp_path: Path) -> None:
    class Mine(Hook):
        def on_update(self, run: Run, metrics: Metrics) -> None:
            run.stop("mine")

    class Good(Hook):
        def on_eval(self, run: Run, step: int, score: Score) -> None:
            run.stop("good")

    assert train(tmp_path, steps=64, hooks=[Mine()]).summary["ended"] == "mine"
    summary = train(tmp_path, hooks=[Good()], evals=2).summary
    assert (summary["ended"], summary["env_steps"]) == ("good", 320)


@pytest.mark.parametrize("event", EVENTS)
def test_what_a_hook_raises_is_raised_after_the_run_directory_is_complete(tmp_path: Path, event: str) -> None:
    diary = Diary()

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("of yours")

    broken = type("Broken", (), {event: staticmethod(fail)})()
    with pytest.raises(ZeroDivisionError, match="of yours") as caught:
        train(tmp_path, hooks=[broken, diary], run="one", steps=128)
    assert caught.traceback[-1].name == "fail"
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert (summary["ended"], summary["exit_code"], summary["error"]) == ("failed", 1, "of yours")
    assert (tmp_path / "one" / "checkpoints" / "latest").exists()
    assert diary.entries[-1][0] == "stop"


class Misspelt(Hook):
    def on_udpate(self, run: Run, metrics: Metrics) -> None: ...


class Short:
    def on_update(self, run: Run) -> None: ...


WRONG: Mapping[str, tuple[Any, str]] = {
    "misspelt": ([Misspelt()], "Misspelt.on_udpate would never be called; did you mean 'on_update'?"),
    "too few arguments": ([Short()], "Short.on_update must take (run, metrics)"),
    "a class": ([Diary], "the hook Diary is a class; pass an object: hooks=[Diary()]"),
    "not a list": (Diary(), "hooks takes a list: hooks=[Diary()]"),
    "a name alone": ("a:B", "hooks takes a list: hooks=['a:B']"),
    "no hook": (
        [3],
        "3 is not a hook: it has none of on_start, on_episode, on_publish, on_update, on_eval, on_checkpoint, on_stop",
    ),
}


@pytest.mark.parametrize(("hooks", "answer"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_hook_is_answered_before_anything_is_started(hooks: Any, answer: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        train(tmp_path, hooks=hooks)
    assert str(caught.value) == answer
    assert not any(tmp_path.iterdir())


def test_a_hook_is_found_by_its_name_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_own_hooks.py"
    file.write_text("class Mine:\n    def on_start(self, run): ...\nthe_one = Mine()\n")
    monkeypatch.setattr("sys.path", list(sys.path))
    by_class, by_object = find_hooks([f"{file}:Mine", f"{file}:the_one"])
    assert type(by_class) is type(by_object)
    assert type(by_class).__name__ == "Mine"
    wrong = {"": "--hooks takes package.module:Name or path/"}
    wrong["Mime"] = f"'{file}' has no hook 'Mime'; did you mean 'Mine'?"
    for name, answer in wrong.items():
        with pytest.raises(UsageError) as caught:
            find_hooks([f"{file}:{name}"])
        assert str(caught.value).startswith(answer)
    monkeypatch.delitem(sys.modules, "my_own_hooks")


def test_hooks_of_the_command_line_are_kept_in_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "class Stop:\n    def on_update(self, run, metrics):\n        run.stop('by flag')\n"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    words = ["train", "CartPole-v1", "--hooks", "./mine.py:Stop", "--steps", "9000", "--evals", "0", "--run", "one"]
    assert main(words) == 0
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    run = tmp_path / "runs" / "one"
    summary, config = (json.loads((run / f"{name}.json").read_text()) for name in ("summary", "config"))
    assert (summary["ended"], config["hooks"]) == ("by flag", ["./mine.py:Stop"])


def test_own_metrics_are_means_over_a_row_and_their_newest_values_are_in_the_summary(tmp_path: Path) -> None:
    class Logging(Hook):
        def on_episode(self, run: Run, episode: Episode) -> None:
            run.log("my/number", episode.number)
            run.log("my/nan", float("nan"))

        def on_eval(self, run: Run, step: int, score: Score) -> None:
            run.log("my/eval", np.float32(step))

        def on_stop(self, run: Run, ended: str) -> None:
            run.log("my/end", 7)

    kept = Kept()
    result = train(tmp_path, hooks=[Logging()], sinks=[kept])
    rows = rows_of(result)
    assert [row["my/number"] for row in rows] == list(range(10))
    assert [row.get("my/eval") for row in rows] == [None] * 4 + [320.0] + [None] * 4 + [640.0]
    assert all("my/eval" not in row for row in rows[:4])
    assert kept.rows == rows
    assert result.summary["logged"] == {"my/number": 9.0, "my/nan": None, "my/eval": 640.0, "my/end": 7.0}


#: What a hook may not do, and words of the answer.
REFUSED: list[tuple[Callable[[Run], object], str]] = [
    (lambda run: run.log("return_mean", 1), "'return_mean' is reserved: log your metric as 'my/return_mean'"),
    (lambda run: run.log("measure/mine", 1), "'measure/mine' is reserved"),
    (lambda run: run.log("", 1), "not ''"),
    (lambda run: run.log("mine", "many"), "could not convert string to float: 'many'"),  # type: ignore[arg-type]
    (lambda run: setattr(run, "learning_rate", -1), "run.learning_rate must be a positive number, not -1"),
    (lambda run: setattr(run, "learning_rate", float("nan")), "run.learning_rate must be a positive number, not nan"),
    (lambda run: setattr(run, "contexts", [[1.0]]), "run.contexts: a run without contexts has none to change"),
    (lambda run: run.stop(""), "run.stop(reason) takes a text"),
]


def test_what_a_run_refuses(tmp_path: Path) -> None:
    class Wrong(Hook):
        def on_update(self, run: Run, metrics: Metrics) -> None:
            for call, words in REFUSED:
                with pytest.raises(ValueError, match=re.escape(words)):
                    call(run)

    assert train(tmp_path, hooks=[Wrong()], steps=64, evals=0).summary["updates"] == 1


TINY = 1e-30  # moves no float32 weight
BOX = "tests.support.worlds:IdentityBox"
REPLAY = {"learning_starts": 32, "batch": 16}
MODEL = {"members": 2, "elites": 1, "model_hidden": [8], "max_epochs": 1, "rollouts_per_row": 1, "model_every": 64}
RAW = {"hidden": [8], "normalize_obs": False}  # statistics of observations would move the weights as well
LEARNERS: Mapping[str, dict[str, Any]] = {
    "ppo, numpy": {},
    "ppo, numpy, schedule": {"ppo": {"lr_schedule": "linear"}},
    "ppo, torch": {"ppo": {"gradient": "autograd"}},
    "sac": {"env": BOX, "algo": "sac", "sac": REPLAY, "policy": RAW},
    "mbpo": {"env": BOX, "algo": "mbpo", "mbpo": {**REPLAY, **MODEL, "updates_per_row": 1.0}, "policy": RAW},
}


@pytest.mark.parametrize("options", LEARNERS.values(), ids=LEARNERS.keys())
def test_the_next_update_uses_the_new_learning_rate(tmp_path: Path, options: dict[str, Any]) -> None:
    """With a step size of nearly nothing the weights stay; with the old one again, they move."""
    weights: list[dict[str, NDArray]] = []
    rates: list[float] = []

    class Change(Hook):
        def on_update(self, run: Run, metrics: Metrics) -> None:
            if len(weights) == run.version:
                return
            weights.append({name: to_numpy(value).copy() for name, value in run._learner.snapshot().params.items()})
            rates.append(run.learning_rate)
            if run.version in (2, 4):
                run.learning_rate = TINY if run.version == 2 else 1e-3

    train(tmp_path, hooks=[Change()], **{"steps": 64 * 8, "evals": 0, **options})
    moved = [any((a[name] != b[name]).any() for name in a) for a, b in itertools.pairwise(weights)]
    assert moved[:5] == [True, False, False, True, True]
    assert rates[2:6] == [TINY, TINY, 1e-3, 1e-3]


def test_an_algorithm_without_a_learning_rate_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from freewheel.learn.ppo.learner import PPO

    monkeypatch.delattr(PPO, "learning_rate")

    class Change(Hook):
        def on_start(self, run: Run) -> None:
            run.learning_rate = 1e-3

    with pytest.raises(ValueError, match="ppo has no learning rate that can be changed: give its Learner a property"):
        train(tmp_path, hooks=[Change()])


MODES: Mapping[str, dict[str, Any]] = {
    "sequential": {"mode": "sequential", "num_envs": 2},
    "processes": {"mode": "lockstep", "num_envs": 2, "placement": "processes"},
    "batch": {"mode": "batch", "workers": 2, "num_envs": 2},
    "one env a worker": {"mode": "continuous", "workers": 1, "num_envs": 1},
    "episodes": {"mode": "episodes", "workers": 2, "num_envs": 2},
}


class Curriculum(Hook):
    """First one context, then two others."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self.changed = 0
        self.contexts: tuple[Any, ...] = ()

    def on_start(self, run: Run) -> None:
        run.contexts = TABLE[:1]

    def on_episode(self, run: Run, episode: Episode) -> None:
        self.episodes.append(episode)

    def on_update(self, run: Run, metrics: Metrics) -> None:
        if not self.changed and len(self.episodes) >= 10:
            assert run.contexts.tolist() == TABLE[:1]
            run.contexts = TABLE[1:]
            self.changed = len(self.episodes)

    def on_eval(self, run: Run, step: int, score: Score) -> None:
        self.contexts = score.contexts


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_contexts_change_while_it_runs(tmp_path: Path, options: dict[str, Any]) -> None:
    hook = Curriculum()
    small: dict[str, Any] = {"num_steps_per_env": 6, "evals": 1, "eval_episodes": 12, "ppo.epochs": 1, "episodes": 60}
    train(tmp_path, CONDITIONED, hooks=[hook], steps=None, context=TABLE, **small | options)
    before, after = hook.episodes[: hook.changed], hook.episodes[-10:]
    assert {episode.context for episode in before} == {tuple(TABLE[0])}
    assert {episode.context for episode in after} == set(map(tuple, TABLE[1:]))
    assert set(hook.contexts) == set(map(tuple, TABLE)), "evaluations keep the table of the run"


@pytest.mark.parametrize("table", [[], [[1.0]], [1.0, 2.0], [[1.0, float("nan")]], np.zeros((4097, 2))], ids=repr)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, table: Any) -> None:
    class Change(Hook):
        def on_start(self, run: Run) -> None:
            run.contexts = table

    with pytest.raises(ValueError, match=r"run\.contexts must have 1 to 4096 rows of 2 finite numbers, not the shape"):
        train(tmp_path, CONDITIONED, hooks=[Change()], context=TABLE)


def test_training_works_in_a_thread_and_under_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook: signals belong to the main thread, and an event loop runs there."""
    with ThreadPoolExecutor(1) as pool:
        threaded = pool.submit(train, tmp_path, steps=64, run="thread").result(30)

    async def cell() -> list[Result]:
        beside = asyncio.to_thread(train, tmp_path, steps=64, run="beside")
        return [train(tmp_path, steps=64, run="cell"), await beside]

    for result in (threaded, *asyncio.run(cell())):
        assert result.summary["ended"] == "steps"


THREADS = """
import numpy, sys
from threadpoolctl import ThreadpoolController
import freewheel

blas = ThreadpoolController().select(user_api="blas")
counts = lambda: [library["num_threads"] for library in blas.info()]
seen = []

class Look:
    def on_update(self, run, metrics):
        seen.append(counts())

with blas.limit(limits=3):
    for threads in (1, 2):
        small = {"steps": 64, "num_envs": 1, "evals": 0, "runs_dir": sys.argv[1]}
        freewheel.train("CartPole-v1", quiet=True, threads=threads, hooks=[Look()], **small)
    assert counts() == [3], counts()
assert seen == [[1], [2]], seen
"""


@pytest.mark.system
def test_a_script_that_imported_numpy_first_gets_the_threads_it_asks_for_and_its_own_back(tmp_path: Path) -> None:
    """BLAS reads its environment variables when numpy is imported, and never again."""
    told = python("-c", THREADS, str(tmp_path), OPENBLAS_NUM_THREADS="4")
    assert told.stdout == told.stderr == "", "a quiet run prints nothing"


class Doubling(Hook):
    """Replaces what was learned before it is published."""

    def __init__(self) -> None:
        self.assigned: list[dict[str, NDArray]] = []
        self.rows: list[int] = []

    def on_publish(self, run: Run) -> None:
        run.check()
        run.learned = {name: 2 * value for name, value in run.learned.items()}
        self.assigned.append(run.learned)
        self.rows.append(run.rows.trained)


def test_what_a_hook_assigns_before_a_publication_is_what_acts_next(tmp_path: Path) -> None:
    hook, seen = Doubling(), list[tuple[int, dict[str, NDArray]]]()

    class Looking(Hook):
        def on_update(self, run: Run, metrics: Metrics) -> None:
            seen.append((run.version, run.learned))

    result = train(tmp_path, hooks=[hook, Looking()], evals=0)
    assert [version for version, _ in seen] == list(range(1, len(seen) + 1)), "the version moves on as ever"
    assert len(seen) == len(hook.assigned) == result.summary["updates"]
    for (_, acting), assigned in zip(seen, hook.assigned, strict=True):
        assert all(np.array_equal(acting[name], assigned[name]) for name in assigned)
    assert hook.rows[-1] == result.summary["trained"]
    saved = checkpoint.load(result.path / "checkpoints").params
    assert all(np.array_equal(saved[name], hook.assigned[-1][f"policy.{name}"]) for name in saved)


@pytest.mark.parametrize(("change", "said"), [("missing", "missing"), ("shape", "should be"), ("nan", "not finite")])
def test_what_does_not_fit_is_refused(tmp_path: Path, change: str, said: str) -> None:
    class Broken(Hook):
        def on_publish(self, run: Run) -> None:
            learned = run.learned
            first = next(iter(learned))
            if change == "missing":
                del learned[first]
            else:
                learned[first] = learned[first][None] if change == "shape" else np.full_like(learned[first], np.nan)
            run.learned = learned

    with pytest.raises(ValueError, match=said):
        train(tmp_path, hooks=[Broken()], evals=0)
