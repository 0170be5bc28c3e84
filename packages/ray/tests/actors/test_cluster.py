"""A local Ray cluster uses only the loopback device, has a separate token, prints nothing, and always ends completely."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from freewheel_ray.actors.cluster import Cluster
from tests.support.trainers import wait_until

ray = pytest.importorskip("ray")

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


class Pid:
    """An actor that returns its process id."""

    def of(self) -> int:
        return os.getpid()


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def listening(processes: list[psutil.Process]) -> set[str]:
    return {
        link.laddr.ip
        for process in processes
        for link in process.net_connections("inet")
        if link.status == psutil.CONN_LISTEN or (link.type == 2 and not link.raddr)
    }


def test_a_local_cluster_is_private_and_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    before = family(os.getpid())
    with Cluster(None, workers=3, cpus_per_worker=1.0, placement="spread") as cluster:
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert cluster.room() == 3
        make: Any = ray.remote(Pid)
        actors = [make.options(**cluster.actor_options(worker)).remote() for worker in range(3)]
        pids = ray.get([actor.of.remote() for actor in actors], timeout=30)
        assert len(set(pids)) == 3
        assert cluster.room() == 0
        members = family(os.getpid())
        assert {psutil.Process(pid) for pid in pids} <= set(members)
        assert listening(members) <= LOOPBACK
        assert {process.name() for process in members} >= {"gcs_server", "raylet"}
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ray.exceptions.ActorDiedError):
            ray.get(actors[0].of.remote(), timeout=30)
    assert not ray.is_initialized()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert not token.parent.exists()
    assert not [process for process in members if process not in before and process.is_running()]
    assert capfd.readouterr() == ("", "")


DRIVER = """
import time
from freewheel_ray.actors.cluster import Cluster
import ray, os
class Pid:
    def of(self):
        import subprocess
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
with Cluster(None, workers=1, cpus_per_worker=1.0) as cluster:
    actor = ray.remote(Pid).options(**cluster.actor_options(0)).remote()
    ray.get(actor.of.remote())
    print(os.environ["RAY_AUTH_TOKEN_PATH"], flush=True)
    time.sleep(600)
"""


def test_a_killed_driver_leaves_no_process_and_no_folder() -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        folder = Path(driver.stdout.readline().strip()).parent
        members = family(driver.pid)
        assert {"gcs_server", "raylet", "sleep"} <= {process.name() for process in members}
        driver.kill()
    gone, left = psutil.wait_procs([process for process in members if process.pid != driver.pid], timeout=30)
    assert gone
    assert not left
    assert not folder.exists()


def test_an_interrupt_while_it_starts_leaves_nothing() -> None:
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may have it ignored
    with subprocess.Popen(
        [sys.executable, "-c", heard + DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as driver:
        wait_until(lambda: any("raylet" in process.name() for process in family(driver.pid)), limit=30.0)
        members = family(driver.pid)
        folders = {
            Path(word).parent
            for process in members
            for word in process.cmdline()
            if Path(word).parent.name.startswith("fw-ray-")
        }
        assert folders
        driver.send_signal(signal.SIGINT)
        out, err = driver.communicate(timeout=30)
    assert out == b""
    assert err.strip().endswith(b"KeyboardInterrupt")
    assert not psutil.wait_procs(members, timeout=30)[1]
    assert not any(folder.exists() for folder in folders)
