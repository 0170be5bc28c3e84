"""Tests of the file that a tuning writes. If --config reads it, the plan is the same."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from freewheel.config.resolve import from_argv
from freewheel.errors import UsageError
from freewheel_lab.tune import file
from freewheel_lab.tune.command import configure
from freewheel_lab.tune.result import Tuning
from freewheel_lab.tune.search import TuningCandidate
from packages.lab.tests.tune.test_search import WAITING, probed, searched


def tuned(words: str = "") -> Tuning:
    probe = probed(WAITING, words)
    return Tuning(probe.config, probe, searched(WAITING, words))


def only(tuning: Tuning, one: TuningCandidate) -> Tuning:
    return Tuning(tuning.config, tuning.probe, [one])


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_the_command_reads_the_file_and_is_the_same_plan(tmp_path: Path, suffix: str) -> None:
    tuning, path = tuned("--ppo.lr 1e-3 --seed 7"), tmp_path / f"tuned.{suffix}"
    best = {one.mode: one for one in reversed(tuning.order)}
    for one in [*best.values(), next(one for one in tuning.order if "collection_batch_size" in one.options)]:
        chosen = only(tuning, one)
        file.write(chosen, path)
        freewheel, train, *words = shlex.split(chosen.command)
        assert (freewheel, train) == ("freewheel", "train")
        assert tuning.probe is not None
        again = tuning.probe.arrange(from_argv(words))
        assert again.config.collector == one.plan.config.collector
        assert (again.config.mode, again.batch, again.spec) == (one.mode, one.plan.batch, one.plan.spec)
        assert again.config.learner == one.plan.config.learner
        assert again.config.run.seed == 7


def test_only_what_was_chosen_is_in_it_with_the_reason(tmp_path: Path) -> None:
    tuning, path = tuned("--workers 4 --mode batch"), tmp_path / "tuned.toml"
    file.write(tuning, path)
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# Written by freewheel tune: use --mode batch with 4 workers x ")
    assert lines[1] == f"# To use it: {tuning.command}"
    assert [line.partition(" = ")[0] for line in lines[2:]] == ["mode", "workers", "envs_per_worker"]
    assert tuning.command == f"freewheel train Toy-v0 --config {path}"


def test_options_of_a_file_that_was_given_are_taken_over(tmp_path: Path) -> None:
    given, path = tmp_path / "mine.toml", tmp_path / "tuned.json"
    given.write_text("seed = 5\nppo.lr = 0.002\nworkers = 4\nmax_lag = 1\nmode = 'continuous'\n")
    tuning = tuned(f"--config {given}")
    assert {one.plan.workers for one in tuning.order} == {4}
    file.write(tuning, path)
    data = json.loads(path.read_text())
    assert (data["seed"], data["ppo.lr"], data["workers"], data["max_lag"]) == (5, 0.002, 4, 1)
    assert "mine.toml" not in tuning.command
    config = from_argv(shlex.split(tuning.command)[2:])
    assert (config.run.seed, config.mode, config.collector.max_lag) == (5, "continuous", 1)


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text("seed = 1\n")
    for place, said in (
        ("tuned.toml", r"tuned.toml exists and was not written by freewheel tune; choose another --out"),
        ("tuned.yaml", r"--out must end in .toml or .json"),
        ("nowhere/tuned.toml", "there is no directory"),
    ):
        with pytest.raises(UsageError, match=said):
            file.check_place(tmp_path / place)
    file.write(tuned(), tmp_path / "other.toml")
    file.check_place(tmp_path / "other.toml")


def test_a_mode_is_searched_unless_it_was_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mode = 'batch'\n")
    assert len(configure(["Toy-v0"]).among) == 5
    assert not configure(["Toy-v0", "--mode", "batch"]).among
    named = configure(["Toy-v0", "--config", str(path)])
    assert (named.mode, named.among) == ("batch", ())
