"""Processes that actors supervise end cleanly, even if an answer is on its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from freewheel_ray.actors.cluster import Cluster
from packages.ray.tests.support.late_answer import ASKED, ENDED
from tests.support.places import ROOT
from tests.support.trainers import wait_until

pytest.importorskip("ray")
from freewheel_ray.actors.calls import NodeSpec
from freewheel_ray.actors.driver import Driver
from freewheel_ray.actors.node_processes import NodeProcesses


def test_an_answer_that_was_under_way_is_not_taken_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    with Driver(Cluster(None, workers=1, cpus_per_worker=1.0)) as driver, NodeProcesses(driver) as carrier:
        carrier.start("one", "packages.ray.tests.support.late_answer", str(tmp_path / "one.txt"), NodeSpec())
        carrier.ask(["one"], b"a question")
        wait_until(ASKED.exists)
        assert carrier.end(b"the end") == {}
        assert ENDED.exists()
        assert (tmp_path / "one.txt").read_text() == ""
