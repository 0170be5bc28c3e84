"""A training continues while nodes of its cluster join, leave and are killed. Every row and every restart is counted."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from benchmarks._trainers import RUN, Trainer, balanced
from freewheel.run.checkpoints.checkpoint import load
from packages.ray.tests.support.ray_nodes import Nodes
from tests.support.trainers import wait_until

WORKERS = 6
NODES = (2, 2, 2)  # CPUs of each node; the driver is on the first
OWN_ADDRESS = ""  # the address that `ray start` would choose for this machine
END = 30.0  # seconds


def argv(address: str, *more: str) -> list[str]:
    world = f"freewheel/Straggler-v0 --env.mean 0.002 --env.length 50 --mode ray --address {address}".split()
    size = ["--workers", str(WORKERS), "--cpus-per-worker", "1", "--num-steps-per-env", "16", "--policy.hidden", "8"]
    return ["train", *world, *size, "--evals", "0", "--log-every", "0.2", "--steps", "1000000000", "--run", RUN, *more]


@contextmanager
def training(folder: Path, nodes: Nodes, *more: str) -> Iterator[Trainer]:
    with Trainer(folder, *argv(nodes.address, *more), env=nodes.environment) as one:
        one.await_row()
        yield one


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes(*NODES, host=OWN_ADDRESS) as cluster:
        yield cluster


def actors(nodes: Nodes) -> dict[str, int]:
    """Return how many actors run on each node."""
    return {node: nodes.actors(node) for node in nodes.ids}


def end(one: Trainer) -> dict[str, Any]:
    one.send(signal.SIGINT)
    one.end(END)
    summary = one.summary()
    assert one.process.returncode == 128 + signal.SIGINT, one.said()
    assert balanced(summary)
    return summary


def goes_on(one: Trainer, seconds: float = 40.0) -> None:
    """Wait until the run has trained more rows than now."""
    trained = one.rows()[-1]["trained"]
    wait_until(lambda: one.rows()[-1]["trained"] > trained, seconds, f"it stands still: {one.said()[-1000:]}")


def restarts(one: Trainer) -> int:
    return sum(worker["restarts"] for worker in json.loads((one.path / "status.json").read_text())["workers"])


def all_on(nodes: Nodes, *which: str) -> Callable[[], bool]:
    return lambda: sum(nodes.actors(node) for node in which) == WORKERS


@pytest.mark.timeout(200)
def test_a_node_that_is_killed_costs_its_workers_only(nodes: Nodes, tmp_path: Path) -> None:
    with training(tmp_path, nodes) as one:
        wait_until(lambda: list(actors(nodes).values()) == [2, 2, 2], 40.0, "they are not spread")
        nodes.kill(nodes.ids[1])
        goes_on(one)
        wait_until(
            lambda: actors(nodes) == {nodes.ids[0]: 2, nodes.ids[1]: 0, nodes.ids[2]: 2},
            60.0,
            "actors outlive their node",
        )
        wait_until(lambda: restarts(one) >= 2, 60.0, "the loss is not seen")
        goes_on(one)
        new = nodes.add(2)  # a new machine; the two actors that wait for room start on it
        wait_until(all_on(nodes, nodes.ids[0], nodes.ids[2], new), 60.0, "workers do not come back")
        goes_on(one)
        summary = end(one)
    # Without room elsewhere Ray may try the lost node again until it notices the loss.
    assert summary["worker_restarts"] == one.said().count("is replaced") >= 2
    assert summary["workers_lost"] == 0


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("number", "how"), [(2, signal.SIGKILL), (1, signal.SIGTERM)], ids=["killed", "taken away"])
def test_workers_of_a_lost_node_restart_where_there_is_room(
    nodes: Nodes, tmp_path: Path, number: int, how: signal.Signals
) -> None:
    with training(tmp_path, nodes, "--cpus-per-worker", "0.5") as one:
        wait_until(all_on(nodes, *nodes.ids), 40.0, "they do not start")
        node, lost = nodes.ids[number], nodes.actors(nodes.ids[number])
        assert lost
        nodes.kill(node, how)
        wait_until(all_on(nodes, *(other for other in nodes.ids if other != node)), 60.0, "workers do not come back")
        goes_on(one)
        assert end(one)["worker_restarts"] == lost, one.said()


@pytest.mark.timeout(200)
def test_a_cluster_that_grows_gets_the_workers_that_had_no_room(tmp_path: Path) -> None:
    with Nodes(2, 1, host=OWN_ADDRESS) as nodes, training(tmp_path, nodes) as one:
        assert f"room for 3 of {WORKERS} workers" in one.said()
        goes_on(one)
        assert sum(actors(nodes).values()) == 3
        new = nodes.add(3)
        wait_until(all_on(nodes, *nodes.ids), 60.0, "the new node gets no workers")
        assert nodes.actors(new) == 3
        goes_on(one)
        nodes.kill(new)  # the cluster shrinks again
        wait_until(lambda: sum(actors(nodes).values()) == 3, 60.0, "actors outlive their node")
        wait_until(lambda: restarts(one) >= 3, 60.0, "the loss is not seen")  # Ray needs about 15 s
        goes_on(one)
        summary = end(one)
    assert summary["worker_restarts"] == one.said().count("is replaced") >= 3


@pytest.mark.timeout(200)
def test_nothing_of_a_killed_driver_stays_on_the_nodes(nodes: Nodes, tmp_path: Path) -> None:
    with training(tmp_path, nodes) as one:
        wait_until(all_on(nodes, *nodes.ids), 40.0, "they do not start")
        one.process.kill()
        one.process.wait()
        wait_until(lambda: sum(actors(nodes).values()) == 0, 15.0, "actors outlive their driver")


@pytest.mark.timeout(200)
def test_a_trainer_reports_the_loss_of_its_raylet_and_saves(nodes: Nodes, tmp_path: Path) -> None:
    with training(tmp_path, nodes) as one:
        wait_until(all_on(nodes, *nodes.ids), 40.0, "they do not start")
        goes_on(one)
        nodes.kill(nodes.ids[0])
        one.end(60.0)
        summary, last = one.summary(), one.said().splitlines()[-1]
    assert (one.process.returncode, last) == (1, f"freewheel: {summary['error']}")
    assert last.startswith("freewheel: the connection to Ray is lost")
    assert balanced(summary)
    assert load(one.path / "checkpoints", "latest").step == summary["env_steps"]
