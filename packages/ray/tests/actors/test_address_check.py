"""Every problem with the address of a cluster is reported in one line within 15 seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from freewheel.errors import FreewheelError, SetupError, UsageError
from freewheel_ray.actors import address_check
from freewheel_ray.actors.cluster import Cluster, cluster_cpus
from freewheel_ray.actors.driver import Driver
from packages.ray.tests.support.ray_nodes import Nodes
from tests.support.trainers import wait_until


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes(1, 2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def token(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """This user has the right token."""
    for name in address_check.TOKENS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", nodes.environment["RAY_AUTH_TOKEN_PATH"])


def problem_at(address: str) -> str:
    """Return the error about an address, which must come soon."""
    began = time.monotonic()
    with pytest.raises(FreewheelError) as caught:
        address_check.find(address)
    assert time.monotonic() - began < 15
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"--address {address}: ")
    return text


def test_a_cluster_is_found_with_its_nodes(nodes: Nodes) -> None:
    found = address_check.find(nodes.address)
    assert (found.address, found.guarded, found.loopback, found.autoscales) == (nodes.address, True, True, False)
    assert found.cpus == {nodes.ids[0]: 1.0, nodes.ids[1]: 2.0}
    assert cluster_cpus(nodes.address) == 3.0


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "http://head:8265", "head", "head:", ":6379", "head:port", "head:99999"]
)
def test_an_address_of_another_form_is_a_wrong_flag(address: str) -> None:
    with pytest.raises(UsageError, match=f"--address {address}: .*host:port"):
        address_check.find(address)


def test_a_host_that_does_not_exist_and_a_port_where_nobody_listens() -> None:
    assert "there is no host nowhere.invalid" in problem_at("nowhere.invalid:6379")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert "nothing listens there" in problem_at(f"127.0.0.1:{held.getsockname()[1]}")


def test_a_silent_program_that_is_not_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_check.LIMIT < 15 - 1
    monkeypatch.setattr(address_check, "LIMIT", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert "is not the head of a Ray cluster" in problem_at(f"127.0.0.1:{other.getsockname()[1]}")


def test_a_wrong_token_and_none(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(wrong))
    assert "refuses this user's token" in problem_at(nodes.address)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "asks for a token" in problem_at(nodes.address)


def test_other_versions_are_named() -> None:
    import ray

    address_check.check_versions(
        {"ray_version": ray.__version__, "python_version": ".".join(map(str, address_check.PYTHON))}
    )
    with pytest.raises(
        address_check.AddressError,
        match=r"the cluster has Ray 2\.1\.0 and Python 3\.8\.1, this program has Ray .*must be the same",
    ):
        address_check.check_versions({"ray_version": "2.1.0", "python_version": "3.8.1"})


def test_auto_finds_the_cluster_of_the_environment_or_of_this_machine(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "no cluster is known on this machine" in problem_at("auto")
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    assert address_check.find("auto").address == nodes.address


def test_a_worker_that_no_node_can_hold(nodes: Nodes) -> None:
    cluster = Cluster(nodes.address, workers=1, cpus_per_worker=3.0, placement="spread")
    with pytest.raises(SetupError, match="no node of the cluster has 3 CPUs for a worker; the largest has 2"), cluster:
        pass


def test_workers_are_spread_over_nodes_or_packed(nodes: Nodes) -> None:
    import ray

    class Located:
        def node(self) -> str:
            node: str = ray.get_runtime_context().get_node_id()
            return node

    found = {}
    with Cluster(nodes.address, workers=4, cpus_per_worker=0.5, placement="spread") as cluster:
        assert not cluster.notes
        assert cluster.room() == 6
        for placement in ("spread", "pack"):
            cluster.placement = placement
            actors = [ray.remote(Located).options(**cluster.actor_options(worker)).remote() for worker in range(3)]
            where = ray.get([actor.node.remote() for actor in actors], timeout=30)
            found[placement] = [nodes.ids.index(node) for node in where]
            assert cluster.room() == 3
            del actors
            wait_until(lambda: cluster.room() == 6)
    assert found["spread"].count(0) == 1
    assert found["pack"] == [0, 0, 1]


def test_a_note_says_that_workers_have_no_room_yet(nodes: Nodes) -> None:
    with Cluster(nodes.address, workers=50, cpus_per_worker=1.0, placement="spread") as cluster:
        assert cluster.notes == [
            "the cluster has room for 3 of 50 workers now; the others will start when there is room"
        ]


def test_a_connection_of_the_users_own_program_is_used_and_stays(nodes: Nodes) -> None:
    import ray

    with Cluster(nodes.address, workers=1, cpus_per_worker=1.0, placement="spread"):
        with Cluster(None, workers=1, cpus_per_worker=1.0, placement="spread") as inner:
            assert len(inner.nodes()) == 2
        with Driver(Cluster(None, workers=1, cpus_per_worker=1.0)) as driver:  # as a run does
            answer = driver.call(driver.start(0), "hello")
            wait_until(lambda: driver.wait([answer], 0.1) == [answer])
            assert driver.get(answer).pid in psutil.pids()
        assert ray.is_initialized()
        with pytest.raises(UsageError, match=f"connected to Ray at {nodes.address} already"):
            Cluster("127.0.0.1:1", workers=1, cpus_per_worker=1.0, placement="spread").__enter__()
    assert not ray.is_initialized()
