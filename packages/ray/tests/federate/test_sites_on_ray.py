"""Sites on a local Ray cluster: their messages and averages, and sites that are killed or hang and later join again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from freewheel.config.resolve import from_argv
from freewheel.core import NDArray
from freewheel.run.checkpoints import checkpoint
from freewheel.run.planning import survey_env
from freewheel_ray.actors.cluster import Cluster
from freewheel_ray.federate.coordinator import Coordinator
from freewheel_ray.federate.federation import SITE
from freewheel_ray.federate.message import SiteMessage, unpack
from freewheel_ray.federate.options import FederateOptions
from freewheel_ray.federate.site_config import SiteConfig, site_of

pytest.importorskip("ray")
from freewheel_ray.actors.calls import NodeSpec
from freewheel_ray.actors.driver import Driver
from freewheel_ray.actors.node_processes import NodeProcesses, ProcessReply

pytestmark = pytest.mark.system
WORDS = ["CartPole-v1", "--num-envs", "2", "--num-steps-per-env", "32", "--policy.hidden", "8", "--log-every", "100"]
ROUNDS = 100  # more rounds than the test plays


class Recorded(NodeProcesses):
    """Records every byte that travels."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.sent: list[tuple[Sequence[str], bytes]] = []
        self.received: list[ProcessReply] = []

    def ask(self, names: Sequence[str], data: bytes) -> None:
        self.sent.append((names, data))
        super().ask(names, data)

    def answers(self, seconds: float) -> list[ProcessReply]:
        found = super().answers(seconds)
        self.received += found
        return found


class Story:
    """A federation that the test plays round by round."""

    def __init__(self, folder: Path, carrier: Recorded, sites: Sequence[SiteConfig], options: FederateOptions) -> None:
        self.folder, self.carrier = folder, carrier
        layout = survey_env(from_argv(WORDS), budget=0.05).spec.layout
        self.coordinator = Coordinator(sites, options, layout, str(folder))

    def start(self, name: str) -> None:
        self.carrier.start(name, SITE, str(self.folder / f"{name}.txt"), NodeSpec())

    def pid(self, name: str) -> int:
        """Start the process of a site, which prints to its file."""
        for process in psutil.process_iter():
            try:
                if SITE in process.cmdline() and os.readlink(f"/proc/{process.pid}/fd/1") == str(
                    self.folder / f"{name}.txt"
                ):
                    return process.pid
            except (psutil.Error, OSError):
                continue
        raise AssertionError(f"{name} does not run")

    def round(self, waiting: object = None) -> dict[str, str]:
        """Play one round and return the skipped sites with the reasons."""

        def first() -> None:
            nonlocal waiting
            if callable(waiting) and self.coordinator.rounds.waiting:
                call, waiting = waiting, None
                call()

        outcome = self.coordinator.round(self.carrier, first, self.start)
        assert outcome is not None
        self.row = self.coordinator.adopt(outcome)
        return outcome.skipped

    def until_ready(self, name: str, limit: float = 60.0) -> None:
        """Wait until this site can be asked again."""
        began = time.monotonic()
        while self.coordinator.rounds.sites[name].state != "ready":
            self.coordinator.look(self.carrier, lambda: None)
            assert time.monotonic() - began < limit, f"{name} does not come back"


@contextmanager
def story(folder: Path, steps: dict[str, int], **options: float) -> Iterator[Story]:
    chosen = FederateOptions(federate=ROUNDS, **options)  # type: ignore[arg-type]
    sites = [
        site_of({"name": name, "steps": ROUNDS * each}, number, WORDS, trust=False)
        for number, (name, each) in enumerate(steps.items())
    ]
    with Driver(Cluster(None, workers=len(steps), cpus_per_worker=1.0)) as driver, Recorded(driver) as carrier:
        played = Story(folder, carrier, sites, chosen)
        played.coordinator.join(carrier, lambda: None, played.start)
        yield played
        assert not carrier.end(SiteMessage("end", {}, played.coordinator.base).pack())


def size(arrays: dict[str, NDArray]) -> int:
    return sum(value.nbytes for value in arrays.values())


def check_what_travelled(carrier: Recorded, known: dict[str, NDArray]) -> None:
    """The bytes that travel are exactly weights, statistics and counts."""
    for names, data in carrier.sent:
        frame = unpack(data, "the coordinator", "order", "round", known=known)
        assert names
        assert frame.values.keys() == ({"round"} if frame.kind == "round" else
            {"words", "trust", "round_steps", "returns", "patience"})  # fmt: skip
    for answer in carrier.received:
        if not answer.data:
            continue
        frame = unpack(answer.data, answer.name, "ready", "learned", known=known)
        assert frame.arrays.keys() == known.keys()
        assert frame.values.keys() == ({"round", "rows"} if frame.kind == "learned" else {"spaces"})
        head = answer.data.partition(b"\n")[0]
        names_of_arrays = 200 * len(known)  # at most, with their shapes and types
        assert len(answer.data) - len(head) <= size(known) + names_of_arrays


@pytest.mark.timeout(180)
def test_uneven_sites_are_averaged_by_rows_and_continue_without_lost_ones(tmp_path: Path) -> None:
    with story(tmp_path, {"a": 64, "b": 64, "c": 3200}, round_timeout=30.0, site_restarts=1) as played:
        coordinator, carrier = played.coordinator, played.carrier
        ready = {answer.name: unpack(answer.data, answer.name, "ready").arrays for answer in carrier.received}
        assert all(np.array_equal(coordinator.base[name], value) for name, value in ready["a"].items()), "all begin so"
        assert any(not np.array_equal(coordinator.base[name], value) for name, value in ready["b"].items())
        assert played.round() == {}
        parts = [unpack(answer.data, answer.name, "learned") for answer in carrier.received[-3:]]
        rows = np.array([part.values["rows"] for part in parts])
        assert sorted(rows.tolist()) == [64, 64, 3200]
        for name, value in coordinator.base.items():
            mean = sum(part.arrays[name].astype(np.float64) * count for part, count in zip(parts, rows, strict=True))
            if name.startswith("policy.") and not name.startswith("policy.norm."):
                np.testing.assert_allclose(value, mean / rows.sum(), rtol=1e-5, atol=1e-7)
        assert (played.row["rows"], played.row["sites"], played.row["env_steps"]) == (3328, 3, 3328)
        assert played.row["distance"] > 0

        assert played.round(lambda: os.kill(played.pid("c"), signal.SIGKILL)) == {"c": "lost"}, "in mid-round"
        assert coordinator.rounds.sites["c"].problem == "its training was killed by SIGKILL"
        assert played.round() == {"c": "starting"}
        played.until_ready("c")
        assert played.round() == {}, "it has joined again"
        assert coordinator.rounds.sites["c"].starts == 2

        os.kill(played.pid("b"), signal.SIGSTOP)
        coordinator.options = replace(coordinator.options, round_timeout=2.0)
        assert played.round()["b"] == "late"
        os.kill(played.pid("b"), signal.SIGCONT)
        coordinator.options = replace(coordinator.options, round_timeout=30.0)
        played.until_ready("b")
        assert played.round() == {}
        check_what_travelled(carrier, coordinator.base)
        last = played.coordinator.base
    for run in ("a", "b", "c"):
        summary = json.loads((tmp_path / run / "summary.json").read_text())
        assert summary["ended"] == "the federation has ended"
        assert summary["exit_code"] == 0
        saved = checkpoint.load(tmp_path / run / "checkpoints").params
        assert all(np.array_equal(saved[name], last[f"policy.{name}"]) for name in saved), "the last average too"
    assert json.loads((tmp_path / "c" / "config.json").read_text())["env"] == "CartPole-v1"
