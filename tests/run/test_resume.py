"""A run goes on where it was saved: all algorithms and modes, more budget, damage, locks, what stays and what is cut."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freewheel
from freewheel.errors import CheckpointError, SetupError, UsageError
from freewheel.files.lock import FileLock
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import LEARNER, MANIFEST, PROGRESS
from freewheel.run.hooks import Run
from freewheel.run.naming import Result
from freewheel.seeding import closing_seed, tree
from tests.support.places import ROOT
from tests.support.runs import MODES, Kept, assert_balanced, rows_of, train
from tests.support.worlds import IdentityBox

BOX = "tests.support.worlds:IdentityBox"
REPLAYING = {"learning_starts": 32, "batch": 8, "updates_per_row": 0.5, "buffer": 100}
ALGORITHMS: Mapping[str, dict[str, Any]] = {
    "ppo": {"epochs": 1, "minibatch": 16},
    "sac": REPLAYING,
    "mbpo": REPLAYING
    | {"members": 2, "elites": 1, "model_hidden": [8], "model_every": 32, "model_batch": 16, "max_epochs": 2}
    | {"rollouts_per_row": 1.0, "keep_models": 2, "termination": "never", "clock": "serial"},
}


def small(tmp_path: Path, algo: str = "ppo", mode: str = "lockstep", env: str = BOX, **options: Any) -> Result:
    usual: dict[str, Any] = {"seed": 3, "steps": 160, "evals": 0, "policy": {"hidden": [8]}, "run": "it"}
    return train(tmp_path, env, **usual | MODES[mode] | {"algo": algo, "mode": mode, algo: ALGORITHMS[algo]} | options)


class StopAt:
    """A hook that ends the run after so many steps: by its own call, or as Ctrl-C does."""

    def __init__(self, steps: int, *, by_signal: bool = False) -> None:
        self.steps, self.by_signal = steps, by_signal

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.env_steps >= self.steps and self.by_signal:
            os.kill(os.getpid(), signal.SIGINT)
        elif run.env_steps >= self.steps:
            run.stop("enough")


#: Every algorithm and every mode; tests/collect has all pairs of what can be resumed exactly.
PAIRS = [("mbpo", "sequential"), ("sac", "lockstep"), ("ppo", "batch"), ("ppo", "continuous"), ("sac", "episodes")]
OTHERS = [("sac", "continuous"), ("mbpo", "continuous"), ("ppo", "episodes"), ("mbpo", "episodes"), ("mbpo", "batch")]


@pytest.mark.parametrize(("algo", "mode"), [*PAIRS, *(pytest.param(*one, marks=pytest.mark.system) for one in OTHERS)])
def test_every_algorithm_goes_on_in_every_mode(tmp_path: Path, algo: str, mode: str) -> None:
    first = small(tmp_path, algo, mode, hooks=[StopAt(64)])
    assert first.summary["ended"] == "enough"
    again = freewheel.resume(first, quiet=True)
    assert (again.path, again.summary["ended"], again.exit_code) == (first.path, "steps", 0)
    rows = rows_of(again)
    for row in (*rows, again.summary):
        assert_balanced(row)
    for name in ("wall_s", "env_steps", "updates", "episodes", "produced", "trained"):
        counts = [row[name] for row in rows]
        assert counts == sorted(counts)
        ahead = (
            name == "produced"
        )  # rows that the first had acted ahead are acted again, and no more than the run needs
        assert name == "wall_s" or again.summary[name] > first.summary[name] - ahead
    assert 160 <= again.summary["trained"] < 160 + 2 * 32  # no more than was asked for
    if algo != "ppo":
        assert again.summary["updates"] <= 0.5 * (again.summary["trained"] - 32)  # no burst of updates


@pytest.mark.parametrize(
    ("algo", "mode", "switches", "world"),
    [
        ("ppo", "sequential", {}, {}),
        ("sac", "lockstep", {}, {}),
        ("mbpo", "batch", {}, {}),
        pytest.param("ppo", "batch", {}, {}, marks=pytest.mark.system),
        pytest.param("sac", "batch", {"priority": "td", "n_step": 3}, {}, marks=pytest.mark.system),
        pytest.param("mbpo", "lockstep", {}, {"discrete": 5}, marks=pytest.mark.system),
    ],
    ids=str,
)
def test_stopped_by_a_hook_and_by_a_signal_it_equals_a_run_that_was_not(
    tmp_path: Path, algo: str, mode: str, switches: dict[str, Any], world: dict[str, Any]
) -> None:
    """In a world with episodes of any length: some are under way at every stop. The buffer keeps all rows of a fit."""
    roomy = {} if algo == "ppo" else {"buffer": 500}
    algorithm = ALGORITHMS[algo] | roomy | switches
    options: dict[str, Any] = {"env": "tests.support.worlds:Wandering", "env_args": world, algo: algorithm}
    straight = small(tmp_path / "straight", algo, mode, **options)
    first = small(tmp_path / "stopped", algo, mode, **options, hooks=[StopAt(64)])
    with pytest.raises(KeyboardInterrupt):
        freewheel.resume(first, quiet=True, hooks=[StopAt(96, by_signal=True)])
    second = json.loads((first.path / "summary.json").read_text())
    assert (first.summary["ended"], second["ended"]) == ("enough", "interrupted (SIGINT)")
    last = freewheel.resume(first, quiet=True)
    for name in ("weights_sha256", "env_steps", "updates", "episodes", "return_mean", "length_mean", "trained"):
        assert last.summary[name] == straight.summary[name], name
    weights = {one["weights_sha256"] for one in (first.summary, second, last.summary)}
    assert len(weights) == 3, "each of them has learned"
    states = [one.path / "checkpoints" / "latest" / LEARNER for one in (straight, last)]
    assert states[0].read_bytes() == states[1].read_bytes(), "networks, optimisers, statistics, generators"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return small(tmp_path_factory.mktemp("finished"), evals=2, eval_episodes=2)


@pytest.fixture
def copy(finished: Result, tmp_path: Path) -> Path:
    shutil.copytree(finished.path, tmp_path / "it", symlinks=True)
    return tmp_path / "it"


def test_more_budget_is_more_of_the_same_run(copy: Path, finished: Result) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config["origin"], config["sha256"]  # it is signed again
    again = freewheel.resume(copy, steps=320, quiet=True)
    summary = again.summary
    assert (summary["env_steps"], summary["trained"], summary["updates"]) == (320, 320, 10)
    for name in ("wall_s", "env_steps"):
        assert [row[name] for row in rows_of(again)] == sorted(row[name] for row in rows_of(again))
    again = json.loads((copy / "config.json").read_text())
    assert again.pop("origin")
    assert again.pop("sha256")
    assert again == {
        **config, "steps": 320, "sources": {**config["sources"], "steps": "resume"},
    }  # fmt: skip
    assert summary["best_eval"] is not None


def test_a_run_with_nothing_left_to_do_says_so(
    copy: Path, finished: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    again = freewheel.resume(copy)
    assert capsys.readouterr().out == "it has nothing left to do: 160 of 160 steps are done; give more with --steps\n"
    assert again.summary == finished.summary
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}


def test_a_run_that_was_killed_in_its_closing_evaluation_is_closed(copy: Path, finished: Result) -> None:
    (copy / "summary.json").unlink()
    summary = freewheel.resume(copy, quiet=True).summary
    for name in ("env_steps", "final_eval", "best_eval", "best_step"):
        assert summary[name] == finished.summary[name]
    assert summary["weights_sha256"] == finished.summary["weights_sha256"]


class Interrupting(IdentityBox):
    """Ctrl-C in the first episode of the closing evaluation, once."""

    times = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed == tree(closing_seed(1000), "eval", 0) and not Interrupting.times:
            Interrupting.times += 1
            signal.raise_signal(signal.SIGINT)
        return super().reset(seed=seed, options=options)


def test_an_interrupted_closing_evaluation_is_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path, env=Interrupting, evals=1, eval_episodes=2)  # type: ignore[arg-type]
    cut = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert (cut["ended"], cut["env_steps"], cut["final_eval"]) == ("interrupted (SIGINT)", 160, None)
    again = freewheel.resume(tmp_path / "it", env=Interrupting, quiet=True)
    assert (again.summary["ended"], again.summary["env_steps"]) == ("steps", 160)
    assert again.summary["final_eval"] is not None
    assert again.summary["weights_sha256"] == cut["weights_sha256"]
    freewheel.resume(tmp_path / "it", env=Interrupting)
    assert "it has nothing left to do" in capsys.readouterr().out


def test_metrics_after_the_checkpoint_are_cut(copy: Path) -> None:
    position = json.loads((copy / "checkpoints" / "latest" / PROGRESS).read_text())["metrics_bytes"]
    kept = (copy / "metrics.jsonl").read_bytes()[:position]
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b'{"env_steps": 1000}\n{"env_st')
    again = freewheel.resume(copy, steps=192, quiet=True)
    assert (again.path / "metrics.jsonl").read_bytes().startswith(kept)
    steps = [row["env_steps"] for row in rows_of(again)]
    assert steps == sorted(steps)
    assert steps[-1] == 192


def test_a_damaged_checkpoint_is_passed_over(copy: Path, finished: Result) -> None:
    root = copy / "checkpoints"
    again = freewheel.resume(copy, steps=320, quiet=True)
    assert [name.step for name in checkpoint.names(root) if checkpoint.is_full(root / str(name))] == [320, 160]
    (root / "320" / LEARNER).write_bytes(b"damaged")
    kept = Kept()
    last = freewheel.resume(copy, steps=352, quiet=True, sinks=[kept])
    assert any(f"{root / '320' / LEARNER} is damaged" in note for note in kept.notes)
    assert "using step 160 instead of 'latest'" in kept.notes
    assert last.summary["env_steps"] == 352
    left = [name.step for name in checkpoint.names(root) if checkpoint.is_full(root / str(name))]
    assert left == [352, 160]  # the damaged one is gone
    assert again.summary["env_steps"] == 320


def test_where_none_is_whole_it_is_one_error(copy: Path) -> None:
    for folder in (copy / "checkpoints").iterdir():
        if not folder.is_symlink() and (folder / PROGRESS).exists():
            (folder / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match="verifies"):
        freewheel.resume(copy, steps=320, quiet=True)


def test_going_back_to_an_older_checkpoint(copy: Path) -> None:
    root = copy / "checkpoints"
    freewheel.resume(copy, steps=320, quiet=True)
    assert freewheel.resume(f"{copy}@160", steps=192, quiet=True).summary["env_steps"] == 192
    assert [name.step for name in checkpoint.names(root) if checkpoint.is_full(root / str(name))] == [192, 160]
    assert freewheel.resume(root / "160", steps=224, quiet=True).summary["env_steps"] == 224


def test_a_second_trainer_is_refused(copy: Path) -> None:
    with FileLock(copy / ".lock"), pytest.raises(SetupError, match=f"is being trained by process {os.getpid()}"):
        freewheel.resume(copy, steps=320, quiet=True)
    assert freewheel.resume(copy, steps=320, quiet=True).exit_code == 0


def test_weights_alone_are_nothing_to_resume_from(copy: Path) -> None:
    root = copy / "checkpoints"
    for name in checkpoint.names(root):
        for path in (root / str(name)).iterdir():
            if path.name not in ("weights.safetensors", "policy.json", "manifest.json"):
                path.unlink()
    with pytest.raises(CheckpointError, match=r"has weights only, nothing to resume from: freewheel train --init .*it"):
        freewheel.resume(copy, quiet=True)


def test_other_spaces_are_refused_and_nothing_is_changed(copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    with pytest.raises(SetupError, match="does not fit the policy"):
        freewheel.resume(copy, steps=320, env=lambda: IdentityBox(n=3), quiet=True)
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}


def test_weights_of_any_checkpoint_can_be_used(copy: Path) -> None:
    freewheel.resume(copy, steps=320, quiet=True)
    root = copy / "checkpoints"
    by_step = [freewheel.load(f"{copy}@160"), freewheel.load(root / "160"), freewheel.load(copy, 160)]
    assert [policy.step for policy in by_step] == [160] * 3
    assert freewheel.load(f"{copy}@latest").step == freewheel.load(root / "latest").step == 320
    assert freewheel.score(f"{copy}@160", episodes=2, seed=1) == freewheel.score(root / "160", episodes=2, seed=1)
    with pytest.raises(UsageError, match="which weights of it, 160 or best"):
        freewheel.load(f"{copy}@160", "best")
    obs = np.zeros(2, np.float32)
    assert by_step[0].predict(obs)[0].tolist() == by_step[1].predict(obs)[0].tolist()
    heir = small(copy.parent / "heirs", init=str(root / "160"))
    assert heir.exit_code == 0
    shutil.rmtree(copy)
    assert freewheel.resume(heir, steps=320, quiet=True).exit_code == 0, "it has its own weights by now"


def test_ticks_and_versions_go_on(copy: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    class Look:
        def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
            seen.append((run.env_steps, run.version, run.updates))

    freewheel.resume(copy, steps=256, quiet=True, hooks=[Look()])
    assert seen == [(192, 6, 6), (224, 7, 7), (256, 8, 8)]
    assert [b[0] - a[0] for a, b in itertools.pairwise(seen)] == [32, 32]


@pytest.mark.system
def test_a_run_that_was_saved_on_the_way_goes_on_after_a_kill(tmp_path: Path) -> None:
    """SIGKILL in training and in the resume: it goes on from the same checkpoint, and equals a run that never stopped."""
    code = (
        "import freewheel, os, sys\n"
        "from tests.run.test_resume import BOX, KillAt, small\n"
        "from pathlib import Path\n"
        "if sys.argv[2] == 'train':\n"
        "    small(Path(sys.argv[1]), hooks=[KillAt(128, save=64)])\n"
        "else:\n"
        "    freewheel.resume(Path(sys.argv[1]) / 'it', quiet=True, hooks=[KillAt(96)])\n"
    )
    for phase in ("train", "resume"):
        command = [sys.executable, "-c", code, str(tmp_path), phase]
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=50, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert str(checkpoint.names(tmp_path / "it" / "checkpoints")[0]) == "64"
        assert not (tmp_path / "it" / "summary.json").exists()
    again, straight = freewheel.resume(tmp_path / "it", quiet=True), small(tmp_path / "straight")
    assert again.summary["weights_sha256"] == straight.summary["weights_sha256"]
    assert [row["env_steps"] for row in rows_of(again)] == [32, 96, 128, 160]  # it was saved before the row of step 64


@pytest.mark.system
@pytest.mark.parametrize("algo", ["ppo", "mbpo"])
def test_a_run_that_was_killed_before_its_first_save_begins_again(tmp_path: Path, algo: str) -> None:
    """With its options, its seed and its name: it equals a run that was not killed."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.run.test_resume import KillAt, small\n"
        f"small(Path(sys.argv[1]), {algo!r}, hooks=[KillAt(1)], record_schedule={algo == 'mbpo'})\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=50, check=False)
    assert ended.returncode == -signal.SIGKILL
    run = tmp_path / "it"
    assert not checkpoint.names(run / "checkpoints")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 32}\n{"env_')
    again = freewheel.resume(run, quiet=True)
    straight = small(tmp_path / "straight", algo)
    assert (again.path, again.exit_code) == (run, 0)
    assert again.summary["weights_sha256"] == straight.summary["weights_sha256"]
    assert all("wall_s" in row for row in rows_of(again)), "rows of the session that is done again are gone"
    assert_balanced(again.summary)


def test_a_finished_run_whose_checkpoints_are_gone_is_not_trained_again(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    before = (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="there is nothing to resume from"):
        freewheel.resume(copy, quiet=True)
    assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(("algo", "rows"), [("ppo", 32), ("sac", 96), ("mbpo", 96)])
def test_the_first_save_comes_with_the_first_update(tmp_path: Path, algo: str, rows: int) -> None:
    """Also where the first version comes before it, while rows to start with are collected; and before weights alone."""
    seen: list[tuple[int, set[str]]] = []

    class Look:
        def on_checkpoint(self, run: Run, path: Path) -> None:
            seen.append((int(path.name), {one.name for one in path.iterdir()}))

    own: dict[str, Any] = {algo: ALGORITHMS[algo] | ({} if algo == "ppo" else {"learning_starts": 64})}
    result = small(tmp_path, algo, steps=640, evals=2, hooks=[Look()], **own)
    assert seen, "it was saved on the way"
    assert seen[0][0] == rows
    assert {LEARNER, PROGRESS} <= seen[0][1]
    assert result.summary["checkpoints"]["saved"] == 2


class KillAt:
    """A hook that saves at one step and kills the trainer at another."""

    def __init__(self, steps: int, save: int = -1) -> None:
        self.steps, self.save = steps, save

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.env_steps == self.save:
            assert run.save() is not None
        if run.env_steps == self.steps or self.steps == 1 <= run.updates:
            os.kill(os.getpid(), signal.SIGKILL)


def test_checkpoints_in_the_background_are_told_to_hooks(tmp_path: Path) -> None:
    folders: list[Path] = []

    class Look:
        def on_checkpoint(self, run: Run, path: Path) -> None:
            folders.append(path)
            if len(folders) == 3:
                run.stop("enough")

    result = small(tmp_path, "sac", checkpoint_every=1e-6, steps=10**6, hooks=[Look()])
    counts = result.summary["checkpoints"]
    assert counts["saved"] >= 3
    assert counts["failed"] == 0
    assert counts["saved"] - 1 <= len(folders) <= counts["saved"]  # one that ends when the run does is not told
    steps = [int(path.name.partition("-")[0]) for path in folders]
    assert steps == sorted(steps)
    assert checkpoint.load_state(result.path / "checkpoints")[0].step == steps[-1]
