"""A daemon of Ray that dies takes all that is connected to it along, without a word: the run says so, saves, and is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray")

from benchmarks._faults import Setup
from benchmarks._faults_ray import daemon_killed

pytestmark = pytest.mark.long


@pytest.mark.parametrize("daemon", ["raylet", "ray::DashboardAgent", "gcs_server"])
def test_a_run_whose_cluster_dies_is_saved_and_goes_on(tmp_path: Path, daemon: str) -> None:
    row = daemon_killed(tmp_path, Setup("ray").argv("--workers", "2", "--evals", "0"), daemon)
    assert row["survived"], row
    assert row["said"].startswith("freewheel: the connection to Ray is lost")
