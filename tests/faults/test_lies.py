"""Envs that raise or lie: the row is dropped and counted, the lane named and begun anew or given up; nobody learns from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from freewheel.cli import main as cli
from tests.support.chaos import LONG, MODES, SMALL_ARGV, finite, tokens, trial, world

PLACE = r"episode \d+, seed \d+, step \d+, last action [01]"


@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_raises_now_and_then_does_not_stop_training(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two kinds of error in 1 % of all steps: each told once with its traceback, all of them counted."""
    argv = ["train", world("Mishap"), "--env.how", "raises variously", "--env.rate", "0.01", *SMALL_ARGV]
    argv += ["--mode", mode, "--workers", "3", "--num-envs", "3", "--log-every", "0.2"]
    argv += ["--steps", "200000" if LONG else "2000", "--runs-dir", str(tmp_path), "--run", "bumpy"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    summary = json.loads((tmp_path / "bumpy" / "summary.json").read_text())
    assert (summary["ended"], summary["exit_code"]) == ("steps", 0)
    assert (summary["workers_lost"], summary["worker_restarts"]) == (0, 0)
    assert summary["dropped"]["env_error"] > 0.004 * summary["produced"]
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values())
    for error in ("ValueError: boom", "KeyError: 'bang'"):
        first = re.findall(rf"^lane [0-2] of \S+:Mishap raised {error} \(({PLACE})\)$", said, re.MULTILINE)
        assert len(first) == said.count(f"\n{error}\n") == 1, said
    assert said.count("Traceback (most recent call last)") == 2


#: What is told of worlds.LIES; those that differ in numbers alone are told once a lane.
COMPLAINTS = (
    r"gave an observation that is not finite: \[nan nan nan\]",
    r"gave a reward that is not finite: inf",
    r"gave an observation that is not finite: \[.*-inf.*\]",
    r"gave a wrong observation in step\(\): .*\(3,\).*\([12],\)",
    r"gave a wrong observation in step\(\): .*None",
    r"gave a wrong observation in step\(\): .*float32.*(<U1|complex)",
)


@pytest.mark.parametrize("mode", MODES)
def test_a_lie_reaches_nobody(mode: str, tmp_path: Path) -> None:
    """Every lie is a row dropped and told (in episodes, with the rows of its episode that came before)."""
    args = {"how": "lies", "at": 12, "folder": tokens(tmp_path, 8)}
    with trial(world("Mishap"), mode, workers=2, num_envs=2 if mode == "episodes" else 4, env_args=args) as on:
        on.run(lambda: not list(tmp_path.glob("token-*")))
        each = 12 if mode == "episodes" else 1
        on.run(lambda: on.dropped == {"nan": 3 * each, "shape": 5 * each})
        on.learn(2)
        assert (on.supervisor.losses, on.audit.gaps > 0) == ([], mode == "episodes")
        assert finite(on.learner.snapshot())
        place = rf" \({PLACE}\)"
        on.run(lambda: all(re.search(rf"lane \d of \S+:Mishap {what}.*{place}", on.told) for what in COMPLAINTS))


@pytest.mark.parametrize(("mode", "how", "cause"), [("batch", "nan", "nan"), ("continuous", "raises", "env_error")])
def test_a_lane_that_does_little_but_fail_is_given_up(mode: str, how: str, cause: str) -> None:
    """The first of two envs of worker 1, that is lane 2, at the fourth step of every episode; its neighbour goes on."""
    args = {"how": how, "only": 1, "envs": 1, "at": 4}
    with trial(world("Mishap"), mode, workers=2, num_envs=4, env_args=args) as on:
        on.run(lambda: "given up" in on.told)
        on.learn(5)
        assert on.dropped == {cause: 3}
        assert on.supervisor.losses == []
        (told,) = re.findall(r"^lane 2 of .* was given up after 3 failures in a row.*$", on.told, re.MULTILINE)
        assert re.search(PLACE, told)
        assert finite(on.learner.snapshot())


def test_a_worker_whose_only_lane_was_given_up_is_given_up() -> None:
    """In episodes a worker has one lane: it is tried in three processes before its place is left empty."""
    args = {"how": "nan", "only": 1, "at": 4}
    with trial(world("Mishap"), "episodes", workers=3, num_envs=3, env_args=args) as on:
        on.run(lambda: on.supervisor.given_up == 1)
        on.learn(3)
        # Each process ends in its third step that failed; the three good ones before it go when another takes its place.
        assert on.dropped == {"nan": 3 * 2 * 4, "worker_death": 2 * 3}
        on.run(lambda: on.told.count("worker 1 ended (exit code 4) and is given up\nno lane of") == 1)
        assert on.told.count("worker 1 ended (exit code 4) and is replaced\nno lane of") == 2


@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_writes_into_what_it_returned_harms_nobody(mode: str) -> None:
    with trial(world("Scribbles"), mode, workers=2, num_envs=2) as on:
        on.learn(10)
        assert on.dropped == {}
