"""The forkserver: children have one thread and the workers' modules, never run the caller's script, and die with it; and with
them all that they have started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

from freewheel.transport import forkserver
from freewheel.transport.forkserver import Leftovers, end, without_main
from tests.support import children
from tests.support.places import ROOT
from tests.support.trainers import alive, wait_until
from tests.transport.conftest import Pipe, Start

LIMIT = 20.0

#: A script without an `if __name__` guard that prints which process runs it.
SCRIPT = """
import multiprocessing, os, sys
print("run by", "me" if sys.argv[1:] == ["main"] else "a child", flush=True)
from freewheel.transport.executors import call_in_process
from freewheel.transport import forkserver
from tests.support import children

{first}
ours, theirs = multiprocessing.Pipe(duplex=False)
lifeline = forkserver.Lifeline()
process = lifeline.process(children.describe, theirs, *forkserver.ONE_THREAD, name="child")
forkserver.start(process)
assert ours.poll(20)
facts, modules, main = ours.recv()
process.join(20)
print(sorted(set(facts.values())), "json.tool" in modules, "torch" in modules, main, process.exitcode)
print([os.environ.get(name) for name in forkserver.ONE_THREAD])
"""


def run(tmp_path: Path, first: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(first=first))
    environ = {name: value for name, value in os.environ.items() if name not in forkserver.ONE_THREAD}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "7"}
    done = subprocess.run(
        [sys.executable, str(script), "main"], env=environ, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("first", "loaded"),
    [
        ("forkserver.prepare(['json.tool'])", True),
        ("assert call_in_process(lambda: os.environ['OMP_NUM_THREADS'], 'a question', 20) == '1'", False),
        ("", False),
    ],
    ids=["prepared", "after a call in a process", "unprepared"],
)
def test_children_have_one_thread_and_never_run_the_callers_script(tmp_path: Path, first: str, loaded: bool) -> None:
    run_by_me, child, environment = run(tmp_path, first)
    assert run_by_me == "run by me"
    assert child == f"['1'] {loaded} False None 0"
    assert environment == "['7', None, None, None]", "the caller's own settings are unchanged"


@pytest.mark.system
def test_a_module_that_hangs_in_c_when_it_is_imported_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "import ctypes\nlibrary, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n"
        "for _ in range(2): library.pthread_mutex_lock(mutex)  # no signal ends that\n"
    )
    assert run(tmp_path, "forkserver.prepare(['stuck'], 0.2)")[1] == "['1'] False False None 0"


@pytest.mark.system
@pytest.mark.parametrize("left", ["threading.Thread(target=for_ever).start()", "atexit.register(for_ever)"])
def test_the_server_ends_with_its_parent_whatever_a_module_has_left_in_it(tmp_path: Path, left: str) -> None:
    lines = ("import atexit, os, threading, time", "def for_ever():", "    while True: time.sleep(1.0)")
    only_there = f"if 'multiprocessing.forkserver' in ' '.join(__import__('sys').orig_argv): {left}"
    (tmp_path / "lingers.py").write_text("\n".join((*lines, only_there)))
    server = psutil.Process(int(run(tmp_path, "forkserver.prepare(['lingers']); print(forkserver.server_pid())")[1]))
    wait_until(lambda: not alive(server))


def test_a_child_has_the_modules_of_a_worker_and_not_torch(start: Start, pipe: Pipe) -> None:
    ours, theirs = pipe
    start(children.describe, theirs)
    assert ours.poll(LIMIT)
    _, modules, _ = ours.recv()
    assert "freewheel.transport.shm.worker" in modules
    assert "torch" not in modules


def test_a_child_ignores_interrupts_and_dies_with_its_lifeline(pipe: Pipe) -> None:
    lifeline = forkserver.Lifeline()
    ours, theirs = pipe
    processes = [lifeline.process(children.hang_on, theirs, name="child") for _ in range(2)]
    for process in processes:
        forkserver.start(process)
        assert ours.poll(LIMIT)
        assert ours.recv() == "here"
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        assert ours.poll(LIMIT)
        assert ours.recv() == "still here"
    lifeline.close()
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == -signal.SIGKILL
        process.close()


TIED = """
import sys
from freewheel.transport.forkserver import tie
if {wait}:
    sys.stdin.readline()
tie({descriptor})
print("tied", flush=True)
while True:
    pass  # a busy loop
"""


@contextmanager
def tied(descriptor: int, *, wait: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that ties itself to this descriptor, at once or after a line on its standard input."""
    command = [sys.executable, "-c", TIED.format(descriptor=descriptor, wait=wait)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def ends() -> Iterator[list[int]]:
    """The read end and the write end, closed after the test unless removed from the list."""
    pair = list(os.pipe())
    yield pair
    for descriptor in pair:
        os.close(descriptor)


def test_a_tied_process_is_killed_when_the_other_end_is_closed(ends: list[int]) -> None:
    with tied(ends[0]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tied\n"
        assert process.poll() is None
        os.close(ends.pop())
        assert process.wait(timeout=LIMIT) == -signal.SIGKILL


def test_it_is_killed_too_if_the_end_was_closed_before(ends: list[int]) -> None:
    with tied(ends[0], wait=True) as process:
        os.close(ends.pop())
        out, _ = process.communicate("now\n", timeout=LIMIT)
        assert (out, process.returncode) == ("", -signal.SIGKILL)


def test_the_script_is_hidden_and_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "script.py", raising=False)  # a process of pytest-xdist has none
    before = {name: vars(main).get(name, "none") for name in ("__file__", "__spec__", "__name__")}

    def start() -> None:
        with without_main():
            assert "__file__" not in vars(main)
            assert main.__spec__ is None
            assert main.__name__ == "__main__"
            raise RuntimeError("no more processes")

    with pytest.raises(RuntimeError):
        start()
    assert {name: vars(main).get(name, "none") for name in before} == before


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def lifeline(prepared: None) -> Iterator[forkserver.Lifeline]:
    made = forkserver.Lifeline()
    yield made
    made.close()


def with_others(
    lifeline: forkserver.Lifeline, pipe: Pipe, *, stays: bool = True
) -> tuple[ForkServerProcess, psutil.Process, psutil.Process]:
    """A process, what it has started in its own group, and what it has started in a session apart."""
    process = lifeline.process(children.start_others, pipe[1], stays, name="child")
    forkserver.start(process)
    assert pipe[0].poll(LIMIT)
    here, apart = map(psutil.Process, pipe[0].recv())
    return process, here, apart


@pytest.mark.parametrize("stays", [True, False])
def test_what_a_process_has_started_ends_with_it(lifeline: forkserver.Lifeline, pipe: Pipe, stays: bool) -> None:
    """Also if it has ended before; what has a session of its own is found by `Leftovers`."""
    leftovers = Leftovers()
    process, here, apart = with_others(lifeline, pipe, stays=stays)
    assert os.getpgid(here.pid) == process.pid != os.getpgid(apart.pid)
    assert end([process], 0.0 if stays else 20.0) == [-signal.SIGKILL if stays else 0]
    wait_until(lambda: not alive(here))
    assert alive(apart)
    leftovers.kill()
    wait_until(lambda: not alive(apart))


def test_what_ends_spares_no_other(lifeline: forkserver.Lifeline, pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may end between the moment it is listed and the moment it is to be killed."""
    process, _, apart = with_others(lifeline, pipe, stays=False)
    end([process], LIMIT)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        ended = psutil.Process(other.pid)
    listed = psutil.Process.children
    monkeypatch.setattr(psutil.Process, "children", lambda *args, **kwargs: [ended, *listed(*args, **kwargs)])
    Leftovers().kill()
    wait_until(lambda: not alive(apart))


TRAINER = """
import multiprocessing, sys
from freewheel.transport import forkserver
from tests.support import children
from tests.support.places import ROOT

ours, theirs = multiprocessing.Pipe(duplex=False)
lifeline = forkserver.Lifeline()
forkserver.start(lifeline.process(children.start_others, theirs, True, name="child"))
print(*ours.recv(), flush=True)
sys.stdin.read()
"""


def test_what_a_process_has_started_ends_when_the_trainer_is_killed() -> None:
    """The forkserver ends with the trainer, and kills what has a session of its own."""
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        started = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(started) == 2
        trainer.kill()
        wait_until(lambda: not any(map(alive, started)))


def test_a_group_is_killed_with_its_lifeline(pipe: Pipe, start: Start) -> None:
    lifeline = forkserver.Lifeline()
    process, here, apart = with_others(lifeline, pipe)
    lifeline.close()
    wait_until(lambda: not alive(here))
    end([process], 0.0)
    Leftovers().kill()
    wait_until(lambda: not alive(apart))


@pytest.mark.parametrize("how", ["kill", "suspend"])
def test_a_forkserver_that_was_killed_or_stopped_delays_no_end_and_leaves_nothing(
    lifeline: forkserver.Lifeline, pipe: Pipe, how: str
) -> None:
    """Where nothing lets a stopped one go on (see clock.py). It is killed, and what it alone was the parent of is still found."""
    process, _, apart = with_others(lifeline, pipe)
    server = psutil.Process(psutil.Process(process.pid).ppid())
    getattr(server, how)()
    wait_until(lambda: how == "suspend" or process.exitcode == forkserver.ORPHANED)
    assert end([process], 0.0) == [forkserver.ORPHANED]
    wait_until(lambda: not alive(server))
    Leftovers().kill()
    wait_until(lambda: not alive(apart))
    forkserver.prepare(["tests.support.children"])


def test_only_what_environments_have_started_is_killed() -> None:
    with subprocess.Popen(SLEEP) as before:
        leftovers = Leftovers()
        with leftovers.spared():
            spared = subprocess.Popen(SLEEP)
        left = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({SLEEP})"])
        wait_until(lambda: bool(psutil.Process(left.pid).children()))
        (grandchild,) = psutil.Process(left.pid).children()
        leftovers.kill()
        assert left.poll() is not None
        wait_until(lambda: not alive(grandchild))
        assert (before.poll(), spared.poll()) == (None, None)
        for process in (before, spared):
            process.kill()
            process.wait()


def test_temporary_files_of_a_process_that_was_killed_go_with_its_server(tmp_path: Path) -> None:
    """Also where the server notices the end of its pipe long before the process is gone."""
    program = (
        "import os\n"
        "from multiprocessing.forkserver import _forkserver as server\n"
        "from freewheel.transport import forkserver\n"
        "forkserver.prepare()\n"
        "forkserver.wait_until_it_serves()\n"
        "os.close(server._forkserver_alive_fd)\n"
        "print(server._forkserver_pid, flush=True)\n"
        "input()\n"
    )
    command, variables = [sys.executable, "-c", program], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, cwd=ROOT) as owner:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        assert list(tmp_path.iterdir()), "its folder is there"
        wait_until(lambda: not alive(server) or not server.net_connections("unix"), what="the server did not notice")
        owner.kill()
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_a_server_whose_trainer_is_gone_before_it_serves_does_not_wait_for_it(tmp_path: Path) -> None:
    program = (
        "import multiprocessing.forkserver, freewheel.transport.preload"  # its command line tells that it is a server
    )
    (tmp_path / "left").touch()
    with subprocess.Popen(["true"]) as trainer:
        trainer.wait()
    env = {**os.environ, forkserver.TEMPORARY: f"{trainer.pid}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", program], env=env, cwd=ROOT, check=True, timeout=LIMIT)
    assert not tmp_path.exists()


def test_a_forked_process_leaves_the_temporary_files_of_its_parent_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server would remove them if it was killed."""
    monkeypatch.delitem(vars(multiprocessing.current_process())["_config"], "tempdir", raising=False)
    assert forkserver._own_temporary() == util.get_temp_dir()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert forkserver._own_temporary() == ""
