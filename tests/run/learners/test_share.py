"""A learner's share of a plan, and what cannot be shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel.config.resolve import Config, from_argv
from freewheel.errors import CheckpointError, SetupError, UsageError
from freewheel.run.learners.share import by_torchrun, check_together, evenly, share_of
from freewheel.run.learners.versions import check_number, never_saved, newest_of_all, remedy
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan, Share
from freewheel.run.planning import arrange
from freewheel.transport.learners.rank import RankInfo
from tests.support.costs import cost
from tests.support.runs import IDENTITY


def config_of(*argv: str) -> Config:
    return from_argv([IDENTITY, "--learners", "2", *argv])


def plan_of(*argv: str) -> Plan:
    return arrange(config_of(*argv), cost(1e-3, 1e-3), RunName(Path("runs"), "shared"), "cpu")


def place(rank: int, count: int = 2) -> RankInfo:
    return RankInfo(rank, count, rank, count)


@pytest.mark.parametrize(
    ("argv", "lanes", "workers"),
    [
        (["--num-envs", "6"], 3, 1),
        (["--mode", "sequential", "--num-envs", "2"], 1, 1),
        (["--mode", "batch", "--workers", "4", "--num-envs", "8"], 4, 2),
        (["--mode", "continuous", "--workers", "2"], 4, 1),
        (["--mode", "episodes", "--workers", "6"], 3, 3),
    ],
)
def test_lanes_and_workers_are_divided(argv: list[str], lanes: int, workers: int) -> None:
    whole = plan_of(*argv)
    for rank, share in enumerate([share_of(whole, place(rank)) for rank in range(2)]):
        assert (share.spec.lanes, share.workers, share.share) == (lanes, workers, Share(rank, 2, 2))
        assert share.batch.rows == whole.batch.rows // 2
        assert share.learner_spec.total_steps == 50_000
        assert share.config.collector.lanes == lanes
    assert whole.spec.lanes == 2 * lanes


def test_no_two_play_the_same_episode_and_all_play_what_one_would() -> None:
    whole = plan_of("--mode", "batch", "--workers", "4", "--num-envs", "8")
    factories = [share_of(whole, place(rank)).runner_factory for rank in range(2)]
    seeds = [factory.episodes(lane).seed(k) for factory in factories for lane in range(4) for k in range(3)]
    assert seeds == [whole.runner_factory.episodes(lane).seed(k) for lane in range(8) for k in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert [factory.first_worker for factory in factories] == [0, 2]


def test_episodes_of_an_update_are_divided() -> None:
    whole = plan_of("--mode", "episodes", "--workers", "2", "--episodes-per-update", "6")
    assert share_of(whole, place(1)).batch.episodes == 3
    assert "each with 1 env in 1 worker and 3 episodes of an update" in whole.learners_line


@pytest.mark.parametrize(
    ("argv", "given", "use"),
    [
        ("--num-envs 5", "--num-envs 5", "--num-envs 6"),
        ("--mode sequential", "--num-envs 1", "--num-envs 2"),
        ("--mode batch --workers 3", "--workers 3", "--workers 4"),
        ("--mode episodes --workers 2 --episodes-per-update 5", "--episodes-per-update 5", "--episodes-per-update 6"),
    ],
)
def test_what_cannot_be_divided_says_what_to_use(argv: str, given: str, use: str) -> None:
    with pytest.raises(UsageError, match=f"^{given} cannot be divided evenly over 2 learners; use {use}$"):
        plan_of(*argv.split())


def test_numbers_that_are_chosen_can_be_divided() -> None:
    config = from_argv([IDENTITY, "--learners", "3", "--mode", "batch"])
    planned = evenly(config.collector.planned(cost(1e-3, 1e-3)), config.collector, 3)
    workers: Any = planned
    assert workers.worker_count % 3 == 0
    assert planned.lanes % workers.worker_count == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--record-schedule", "--mode", "continuous"], "--record-schedule records the order of one learner's rows"),
        (["--adapt", "--mode", "continuous"], "--adapt steers the collector of one learner"),
        (
            ["--policy.module", "__main__:Net"],
            r"policy.module Net was defined in a script or a notebook, and other learners can only import it from a file \(.*\)",
        ),
    ],
)
def test_what_several_learners_cannot_do_is_refused_in_one_line(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}: leave it out, or leave out --learners$"):
        check_together(config_of(*argv))


def test_the_plan_shows_the_shares() -> None:
    lines = plan_of("--mode", "batch", "--workers", "2", "--num-envs", "8", "--num-steps-per-env", "16").lines()
    assert "learners 2 that train together, each with 4 envs in 1 worker and 64 rows of an update" in lines


def test_torchrun_and_learners_together_say_what_to_leave_out() -> None:
    with pytest.raises(UsageError, match=r"^torchrun has already started 2 learners: leave out --learners$"):
        by_torchrun(config_of(), replace(place(0), by_torchrun=True))
    assert by_torchrun(from_argv([IDENTITY]), place(0, 4)).run.machine.learners == 4


def test_a_run_goes_on_with_as_many_learners_as_it_has(tmp_path: Path) -> None:
    check_number(tmp_path, 2, None)
    check_number(tmp_path, 2, place(0))
    with pytest.raises(SetupError, match=r"has 2 learners and cannot resume with 3: use torchrun --nproc-per-node 2 "):
        check_number(tmp_path, 2, place(0, 3))
    with pytest.raises(CheckpointError, match=r"learners/1 is missing: resuming needs the checkpoints of learner 1"):
        newest_of_all(tmp_path, 2)
    (tmp_path / "learners/1").mkdir(parents=True)
    told = "has no checkpoint that all its 2 learners have saved: freewheel train --init"
    with pytest.raises(CheckpointError, match=told):
        newest_of_all(tmp_path, 2)


def test_learners_of_which_only_one_has_made_its_first_save_have_never_saved(tmp_path: Path) -> None:
    others = tmp_path / "learners/1"
    assert never_saved(tmp_path, 2)
    assert "starts it again" in remedy(tmp_path, 2)
    (tmp_path / "checkpoints/64").mkdir(parents=True)
    assert not never_saved(tmp_path, 2), "what the others have saved is missing"
    others.mkdir(parents=True)
    assert never_saved(tmp_path, 2)
    (others / "checkpoints/64").mkdir(parents=True)
    assert not never_saved(tmp_path, 2)
