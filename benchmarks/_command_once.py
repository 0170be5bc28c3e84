"""One `freewheel train CartPole-v1`, as typed: seconds until its first line, until the first env step in training, and in all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._common import sources

COMMANDS = {
    "lockstep": ("--steps", "2048"),
    "continuous": ("--mode", "continuous", "--workers", "16", "--steps", "4096"),
}
HIDE = (
    Path(__file__).parent / "_without_packages" / "sitecustomize.py"
)  # for a checkout that is older than the packages
OTHERS = ("survey", "executor")  # in the names of processes that step envs, but not for the training
#: Python imports a module of this name in every process: it notes when CartPole is stepped first, and by whom.
CLOCK = """
import importlib.util, os, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "gymnasium.envs.classic_control.cartpole":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def loaded(module):
            execute(module)
            step, noted = module.CartPoleEnv.step, set()
            def first(env, action):
                if os.getpid() not in noted:
                    noted.add(os.getpid())
                    from multiprocessing import current_process
                    with open(os.environ["FIRST_STEPS"], "a") as file:
                        file.write(f"{time.time()} {current_process().name}\\n")
                return step(env, action)
            module.CartPoleEnv.step = first
        spec.loader.exec_module = loaded
        return spec

sys.meta_path.insert(0, Finder())
"""


def measured(command: str, tree: Path, cache: str) -> dict[str, Any]:
    """Of the code of this tree; `cache`: what it may remember from one time to the next."""
    with TemporaryDirectory() as folder:
        hidden = "" if (tree / "packages").is_dir() else HIDE.read_text(encoding="utf-8")
        Path(folder, "sitecustomize.py").write_text(hidden + CLOCK)
        steps = Path(folder, "steps")
        steps.touch()
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env |= {
            "PYTHONPATH": os.pathsep.join([folder, *sources(tree)]),
            "FREEWHEEL_CACHE": cache,
            "FIRST_STEPS": str(steps),
        }
        words = [sys.executable, "-m", "freewheel", "train", "CartPole-v1", *COMMANDS[command], "--runs-dir", folder]
        began = time.time()
        with subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None, "it is a pipe"
            process.stdout.readline()
            line = time.time() - began
            process.stdout.read()
        ended = time.time() - began
        if process.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
        first = [text.split(maxsplit=1) for text in steps.read_text().splitlines()]
    step = min(float(at) - began for at, who in first if not any(other in who for other in OTHERS))
    return {"line_s": line, "step_s": step, "all_s": ended}


def main() -> None:
    command, tree, cache = sys.argv[1:]
    print(json.dumps(measured(command, Path(tree), cache)))


if __name__ == "__main__":
    main()
