"""What a run uses of its machine, as the operating system reports it."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from freewheel.metrics.meter import gpu_util, usage


def test_children_count_while_they_run_and_their_time_after_they_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    before = usage()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        running = usage()
        child.communicate(b"\n", timeout=10)
    ended = usage()
    assert running.cpu_s - before.cpu_s >= 0.25
    assert ended.cpu_s - before.cpu_s >= 0.25
    assert before.trainer_mb > 50
    assert running.workers_mb - before.workers_mb > 4
    assert running.workers_mb > ended.workers_mb


def test_gpu_util_is_unknown_without_torch_or_cuda_and_a_share_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> float:
        raise ModuleNotFoundError("pynvml")

    def fake(initialised: bool, utilisation: object) -> float | None:
        module = ModuleType("torch")
        module.__dict__["cuda"] = SimpleNamespace(is_initialized=lambda: initialised, utilization=utilisation)
        monkeypatch.setitem(sys.modules, "torch", module)
        return gpu_util()

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gpu_util() is None
    assert "torch" not in sys.modules
    assert [fake(False, lambda: 50), fake(True, lambda: 42), fake(True, unknown)] == [None, 0.42, None]


def test_metrics_do_not_import_torch() -> None:
    check = "import sys, freewheel.metrics.meter, freewheel.ledger; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=30)
