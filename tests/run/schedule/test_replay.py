"""Recorded runs learn again, bit for bit: every mode and algorithm, with failures, kills and steps that come too late."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.cli.main import main
from freewheel.errors import SetupError
from freewheel.run.naming import Result
from freewheel.run.saved import open_run
from freewheel.run.schedule.log import Act, LogLine, Schedule
from freewheel.run.schedule.replay import ScheduleReplay, Until, replay
from freewheel.seeding import training_episodes
from tests.support.replay_worlds import Curriculum
from tests.support.runs import train

UNEVEN = "tests.support.replay_worlds:Uneven"
SMALL_SAC = {"learning_starts": 32, "batch": 16, "updates_per_row": 0.5}
SMALL_MODEL = {"members": 2, "elites": 1, "model_hidden": [8], "model_every": 90, "rollouts_per_row": 4}
SMALL_MODEL |= {"max_epochs": 2}
OFF_POLICY = {"mode": "continuous", "workers": 2, "env_args": {"box": True}, "steps": 200, "num_steps_per_env": 2}


def record(folder: Path, env: str = UNEVEN, **options: Any) -> Result:
    small = {"evals": 0, "policy": {"hidden": [8]}, "log_every": 1.0}
    return train(folder, env, record_schedule=True, **small | options)


def lines(run: Path) -> list[LogLine]:
    return list(Schedule(run / "schedule.jsonl", workers=64, most_steps=1000))


def order(run: Path) -> list[int]:
    """Whose chunks the learner got."""
    return [delivery.worker for line in lines(run) for delivery in line.deliveries or ()]


def assert_identical(result: Result, found: ScheduleReplay) -> None:
    assert (found.difference, found.note) == ("", "")
    assert found.weights_sha256 == result.summary["weights_sha256"]
    assert (found.env_steps, found.updates) == (result.summary["env_steps"], result.summary["updates"])
    assert found.checks >= 2, "before the first update, and at the end"


@dataclass(frozen=True)
class Recorded:
    result: Result
    files: dict[str, bytes]  # of the run directory, as the run has left it

    @property
    def path(self) -> Path:
        return self.result.path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Steps that raise, a worker that is killed twice, steps that take too long."""
    folder = tmp_path_factory.mktemp("story")
    for name in ("slow", "kill-1", "kill-2"):
        (folder / name).touch()
    args = {"fails": 0.01, "folder": str(folder)}
    result = record(folder, mode="continuous", workers=2, env_args=args, max_lag=0, patience=2.0, steps=1200)
    (folder / "slow").unlink()
    return Recorded(result, contents(result.path))


def test_everything_that_can_happen_is_in_it(story: Recorded) -> None:
    summary, events = story.result.summary, [event for line in lines(story.path) for event in line.events]
    assert summary["worker_restarts"] == 2
    assert summary["dropped"]["stale"] > 0
    assert summary["dropped"]["env_error"] > 0
    assert {start.author[1] for line in lines(story.path) for start in line.starts} > {0}, "later processes"
    assert any(type(event).__name__ == "Drop" for event in events)


def test_it_is_replayed_and_nothing_is_written_into_the_run(story: Recorded) -> None:
    assert_identical(story.result, replay(story.path))
    assert contents(story.path) == story.files


def test_it_stops_where_it_is_asked_to_and_keeps_the_weights(story: Recorded, tmp_path: Path) -> None:
    half = replay(story.path, until=Until(updates=10), out=tmp_path / "half")
    assert half.identical
    assert half.updates == 10
    assert "update 10" in half.note
    assert half.out == tmp_path / "half"
    assert freewheel.load(half.out, "latest").step == half.env_steps
    with pytest.raises(SetupError, match="exists"):
        replay(story.path, out=tmp_path / "half")


def copy_of(story: Recorded, folder: Path, schedule: bytes) -> Path:
    run = folder / "copy"
    shutil.copytree(story.path, run)
    (run / "schedule.jsonl").write_bytes(schedule)
    return run


def test_a_run_that_was_killed_is_replayed_up_to_its_last_whole_line(story: Recorded, tmp_path: Path) -> None:
    text = (story.path / "schedule.jsonl").read_bytes()
    found = replay(copy_of(story, tmp_path, text[: text.index(b"\n", len(text) * 2 // 3) - 1]))
    assert found.identical
    assert "incomplete" in found.note
    assert 0 < found.env_steps < story.result.summary["env_steps"]
    assert found.checks >= 2
    lost = text[: text.rindex(b"\n", 0, -1) + 1]  # all but the end
    shutil.rmtree(tmp_path / "copy")
    found = replay(copy_of(story, tmp_path, lost))
    assert found.identical
    assert "killed" in found.note
    last = [line.check for line in lines(tmp_path / "copy") if line.check is not None][-1]
    assert found.env_steps >= last.env_steps, "everything that was written is used"


def test_the_first_fragment_that_differs_is_named(story: Recorded, tmp_path: Path) -> None:
    text = (story.path / "schedule.jsonl").read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(text) if number > 20 and '"f"' in line)
    line = json.loads(text[at])
    worker, process, version, steps, answers, _ = line["f"][0][:6]
    line["f"][0][4] = answers ^ 1
    text[at] = json.dumps(line) + "\n"
    found = replay(copy_of(story, tmp_path, "".join(text).encode()))
    assert not found.identical
    who = f"worker {worker}" + (f" (process {process + 1})" if process else "")
    assert found.difference.startswith(f"{who}: its environment answered the same actions in another way")
    assert f"{steps} steps of version {version} (lane" in found.difference


def test_a_run_that_was_resumed_is_replayed_up_to_the_end_of_its_first_session(story: Recorded, tmp_path: Path) -> None:
    run = copy_of(story, tmp_path, (story.path / "schedule.jsonl").read_bytes())
    summary = dict(story.result.summary) | {"env_steps": 10**6}
    (run / "summary.json").write_text(json.dumps(summary))
    found = replay(run)
    assert found.identical
    assert "resumed after this, up to step 1,000,000" in found.note


def test_other_weights_are_noticed_at_the_first_fingerprint(story: Recorded, tmp_path: Path) -> None:
    run = copy_of(story, tmp_path, (story.path / "schedule.jsonl").read_bytes())
    config = json.loads((run / "config.json").read_text())
    config["ppo"]["lr"] *= 1.5
    del config["sha256"]
    (run / "config.json").write_text(json.dumps(config))
    found = replay(open_run(run, trust=True, use="train"))
    assert not found.identical
    assert "weights" in found.difference
    assert found.checks >= 1, "before the first update they are the same"


def test_the_command_says_identical_or_where_it_differs(story: Recorded, tmp_path: Path, capsys: Any) -> None:
    assert main(["replay", str(story.path), "--until-update", "3", "--inline"]) == 0
    assert "identical up to" in capsys.readouterr().out
    text = (story.path / "schedule.jsonl").read_bytes().replace(b'{"w":"', b'{"w":"0', 1)
    assert main(["replay", str(copy_of(story, tmp_path, text))]) == 1
    assert "the weights differ before the first update" in capsys.readouterr().out


RUNS: dict[str, dict[str, Any]] = {
    "episodes": {"mode": "episodes", "workers": 4, "env_args": {"fails": 0.02}, "steps": 320},
    "batch": {"mode": "batch", "workers": 2, "env_args": {"fails": 0.01}, "collection_batch_size": 5, "steps": 320},
    "continuous sac": OFF_POLICY | {"algo": "sac", "sac": SMALL_SAC},
    "lockstep": {"mode": "lockstep", "steps": 320},
}
OTHER_RUNS: dict[str, dict[str, Any]] = {
    "episodes side by side": {"mode": "episodes", "workers": 2, "env": "tests.support.worlds:Identity", "envs_per_worker": 2},
    "continuous mbpo": OFF_POLICY | {"algo": "mbpo", "mbpo": SMALL_SAC | SMALL_MODEL},
}  # fmt: skip


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.system) for name in OTHER_RUNS)])
def test_every_mode_and_algorithm_learns_the_same_again(tmp_path: Path, name: str) -> None:
    result = record(tmp_path, **(RUNS | OTHER_RUNS)[name])
    assert_identical(result, replay(result.path))


@pytest.mark.system
def test_without_the_schedule_the_order_would_be_another(tmp_path: Path) -> None:
    """Two runs of one command: the order differs, so do the weights."""
    runs = [record(tmp_path, mode="continuous", workers=4, steps=1000) for _ in range(2)]
    assert order(runs[0].path) != order(runs[1].path)
    assert runs[0].summary["weights_sha256"] != runs[1].summary["weights_sha256"]
    assert_identical(runs[0], replay(runs[0].path))


@pytest.mark.system
def test_fragments_that_a_full_queue_dropped_are_acted_again(tmp_path: Path) -> None:
    options = {"overflow": "drop-oldest", "max_queue_size": 2, "collection_batch_size": 3}
    result = record(tmp_path, "tests.support.worlds:Identity", mode="continuous", workers=2, **options)
    assert result.summary["dropped"]["overflow"] > 0
    assert any(event.sums is None for line in lines(result.path) for event in line.events if isinstance(event, Act))
    assert_identical(result, replay(result.path))


def test_an_environment_that_is_not_reproducible_is_named(tmp_path: Path) -> None:
    """Episodes whose seed divides by 5 differ at their third step; one lane a worker, so that it is certain which was it."""
    found = replay(record(tmp_path, mode="continuous", workers=4, env_args={"drifts": True}).path)
    assert not found.identical
    named = re.match(
        r"worker (\d): its environment answered the same actions in another way within these (\d+) steps of version \d+ "
        r"\(lane (\d): episode (\d+), seed (\d+), from step (\d+)\)",
        found.difference,
    )
    assert named is not None, found.difference
    worker, steps, lane, number, seed, first = map(int, named.groups())
    assert lane == worker
    stream = training_episodes(0, lane)
    assert stream.seed(number) == seed
    at = 0  # the step, counted from the first of the fragment, at which the first such episode has its third step
    while seed % 5 or first > 3:
        at += 6 + seed % 10 - first
        number, first, seed = number + 1, 1, stream.seed(number + 1)
    assert at + 3 - first < steps


@pytest.mark.system
def test_a_process_that_starts_late_begins_with_the_contexts_of_its_time(tmp_path: Path) -> None:
    options = {"mode": "continuous", "workers": 2, "context": [[1, 2], [3, 4]], "env_args": {"folder": str(tmp_path)}}
    hooks = [Curriculum(kills=3, folder=tmp_path)]
    result = record(tmp_path, "tests.support.replay_worlds:Told", hooks=hooks, steps=3000, **options)
    started = {start.author: start.version for line in lines(result.path) for start in line.starts}
    events = [event for line in reversed(lines(result.path)) for event in line.events]
    first = {event.author: event for event in events if isinstance(event, Act)}
    late = next(author for author in started if author[1])
    assert 3 <= started[late] <= first[late].version
    assert_identical(result, replay(result.path, hooks=[Curriculum()]))


def test_a_failure_happens_again(tmp_path: Path) -> None:
    """After the update in which it happened, with the hook that was given in Python."""
    with pytest.raises(ArithmeticError):
        record(tmp_path, mode="continuous", workers=2, hooks=[Curriculum(fails=4)], run="fails")
    with pytest.raises(ArithmeticError, match="enough"):
        freewheel.replay(tmp_path / "fails", hooks=[Curriculum(fails=4)])
    found = freewheel.replay(tmp_path / "fails", hooks=[Curriculum()])
    assert found.identical
    assert "failed" in found.note
    without = freewheel.replay(tmp_path / "fails")
    assert not without.identical, "the learning rate was another"
    assert "1 more hooks" in without.difference


def test_what_cannot_be_recorded_or_replayed_is_one_line(tmp_path: Path) -> None:
    run = train(tmp_path, steps=64, evals=0)
    with pytest.raises(SetupError, match="record one with freewheel train"):
        replay(run.path)
