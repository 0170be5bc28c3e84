"""A daemon of Ray that dies takes all that is connected to it along, without a word: the run says so, saves, and is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray")

from benchmarks._faults import Setup
from benchmarks._faults_ray import clusters, daemon_killed, named
from benchmarks._trainers import RUN, Trainer, wait_until

pytestmark = pytest.mark.long


@pytest.mark.parametrize("daemon", ["raylet", "ray::DashboardAgent", "gcs_server"])
def test_a_run_whose_cluster_dies_is_saved_and_goes_on(tmp_path: Path, daemon: str) -> None:
    row = daemon_killed(tmp_path, Setup("ray").argv("--workers", "2", "--evals", "0"), daemon)
    assert row["survived"], row
    assert row["said"].startswith("freewheel: the connection to Ray is lost")


def test_a_federation_whose_cluster_dies_says_so_and_has_a_summary(tmp_path: Path) -> None:
    options = ["--steps", "1000000", "--federate", "200", "--sites", "2", "--evals", "0", "--run", RUN]
    with Trainer(tmp_path, "train", "CartPole-v1", *options) as one:
        wait_until(lambda: bool(one.rows()), 90.0, "no round was played")
        named(one, "raylet").kill()
        one.end(30.0)
        wait_until(lambda: not one.left() and not clusters(one), 30.0, "something is left")
        summary, last = one.summary(), one.said().splitlines()[-1]
    assert (one.process.returncode, summary["exit_code"]) == (1, 1)
    assert last == f"freewheel: {summary['error']}"
    assert last.startswith("freewheel: the connection to Ray is lost")
    assert summary["rounds"] > 0
