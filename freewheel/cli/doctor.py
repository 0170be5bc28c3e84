"""The command `freewheel doctor`: shows what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from freewheel import __version__
from freewheel.errors import UsageError, printable
from freewheel.files.memory import in_words
from freewheel.registry import Command

REQUIRED = ("numpy", "torch", "gymnasium", "tyro", "rich", "safetensors", "psutil", "cloudpickle", "threadpoolctl")
#: Optional modules: what each is for, and how to install it. World families add more.
OPTIONAL = {
    "mujoco": "MuJoCo environments (HalfCheetah-v5): pip install 'freewheel[mujoco]'",
    "pygame": "windows and pictures of classic-control environments: pip install 'freewheel[classic]'",
    "PIL": "animated pictures from `freewheel play`: pip install 'freewheel[video]'",
    "imageio_ffmpeg": "films (mp4) from `freewheel play`: pip install 'freewheel[video]'",
    "onnx": "`freewheel export` to ONNX: pip install onnx",
    "tensorboard": "`--tensorboard`: pip install 'freewheel[tensorboard]'",
    "wandb": "`--wandb`: pip install 'freewheel[wandb]'",
    "stable_baselines3": "the comparison in `make bench`: pip install 'freewheel[bench]'",
}
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class DoctorOptions:
    """Show what this machine has, what is missing, and what to do about it; or show what a run waits for."""

    why_stuck: str = ""
    """A run (a name under --runs-dir or a path): show what each part of its trainer waits for, and which timeout will
    end the wait. The run is only observed, from outside."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""


def _run(argv: Sequence[str]) -> int:
    """Print a table; return 1 if something required is missing."""
    if argv:
        return _with_options(argv)
    from rich.table import Table
    from rich.text import Text

    from freewheel.files.terminal import Terminal

    table = Table(show_header=False, box=None)
    healthy = True
    for good, what, text in findings():
        healthy &= good
        table.add_row(Text("ok", "green") if good else Text("!!", "red"), Text(what), Text(text))
    Terminal().print(table)
    return 0 if healthy else 1


def _with_options(argv: Sequence[str]) -> int:
    from freewheel.config import flags

    words, given = flags.read_argv(argv, flags.option_types(DoctorOptions))
    options = flags.build(DoctorOptions, given)
    if words or not options.why_stuck:
        raise UsageError(f"freewheel doctor takes no arguments but --why-stuck RUN, not {' '.join(argv)}")
    from freewheel.run.live.stuck import why_stuck
    from freewheel.run.naming import find_run

    lines = map(printable, why_stuck(find_run(options.why_stuck, options.runs_dir)))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def findings() -> Iterator[tuple[bool, str, str]]:
    """Yield (whether it is good, what it is about, what was found) for everything worth knowing."""
    system = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    yield sys.version_info >= (3, 11), "python", system
    yield True, "freewheel", __version__
    for name in REQUIRED:
        version = _version(name)
        yield version is not None, name, version or f"missing: pip install {name}"
    compiled = importlib.util.find_spec("freewheel.rollout._kernel") is not None
    hint = "not compiled, so steps of single environments cost more: install gcc and Python's headers, then reinstall"
    yield True, "kernel", "compiled" if compiled else hint
    yield from _machine()
    for module, purpose in {**OPTIONAL, **_of_worlds()}.items():
        found = importlib.util.find_spec(module) is not None
        yield True, module, "installed" if found else f"not installed; for {purpose}"


def _of_worlds() -> dict[str, str]:
    if importlib.util.find_spec("gymnasium") is None:  # already reported as missing
        return {}
    from freewheel.envs.family import WORLDS

    return {module: purpose for family in WORLDS.values() for module, purpose in family.packages.items()}


def _machine() -> Iterator[tuple[bool, str, str]]:
    import psutil

    from freewheel.rollout.probe import usable_cores

    yield True, "cores", f"{usable_cores()} usable of {os.cpu_count()}{_quota()}"
    memory = psutil.virtual_memory()
    yield memory.available > 2**30, "memory", f"{in_words(memory.available)} free of {in_words(memory.total)}"
    yield True, "gpu", _gpu()


def _quota() -> str:
    """Return the CPU limit of the container as text, if there is one."""
    if not CPU_LIMIT.is_file():
        return ""
    quota, period = CPU_LIMIT.read_text().split()
    return "" if quota == "max" else f", limited to {int(quota) / int(period):g} by the container"


def _gpu() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown (torch is missing)"
    import torch

    if not torch.cuda.is_available():
        return "none (the CPU is fine for small networks)"
    names = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    hint = "; --device cuda:0,cuda:1 puts a batched simulator on the second, --learners 2 uses both"
    return ", ".join(names) + (hint if len(names) > 1 else "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


COMMAND = Command(
    name="doctor",
    argument="",
    summary="show what this machine has and what is missing, or why a run is stuck (--why-stuck RUN)",
    options=lambda _: DoctorOptions,
    run=_run,
    order=3,
)
