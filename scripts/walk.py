"""A new user's first five minutes: an empty virtual environment elsewhere, the built wheel, and what the README says."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
SECTION = "## Five minutes"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """The language and the text of every code block of the README's first steps, in their order."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    return BLOCK.findall(page.partition(SECTION)[2].partition("\n## ")[0])


def commands(block: str) -> Iterator[list[str]]:
    for line in block.splitlines():
        if words := shlex.split(line, comments=True):
            yield words


class Walk:
    """One walk: every step is timed, and the first that fails ends it."""

    def __init__(self, folder: Path) -> None:
        self._home, self._bin = folder / "work", folder / "venv" / "bin"
        self._home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self._env = {**kept, "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}"}
        self._begun = time.monotonic()

    def run(self, *words: str, cwd: Path | None = None) -> str:
        begun = time.monotonic()
        done = subprocess.run(
            words, cwd=cwd or self._home, env=self._env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )  # fmt: skip
        print(f"{time.monotonic() - begun:6.1f} s  {shlex.join(words)}", flush=True)
        if done.returncode:
            raise SystemExit(f"walk: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout

    def install(self, wheel: Path) -> None:
        """As `pip install WHEEL`, with the versions that are known to work: an open range may pull GB of GPU libraries."""
        constraints = ROOT / "constraints.txt"
        torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
        pip = (str(self._bin / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        self.run(*pip, "--constraint", str(constraints), str(wheel), torch)

    def follow(self) -> None:
        """Every block of the README's first steps: files are written, commands and scripts run."""
        for language, block in blocks():
            if language == "python":
                name = block.split()[1]  # the first line is a comment with the name of the file
                (self._home / name).write_text(block, encoding="utf-8")
                continue
            for words in commands(block):
                if words[0] in ("make", "pip"):
                    continue  # done by `install`
                print(self.run(*words).rstrip())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun


def main() -> int:
    parser = argparse.ArgumentParser(prog="python scripts/walk.py", description=__doc__)
    parser.add_argument("wheel", type=Path, help="the wheel to install")
    wheel = parser.parse_args().wheel.resolve()
    with TemporaryDirectory() as folder:
        walk = Walk(Path(folder))
        venv.create(Path(folder) / "venv", with_pip=True)
        walk.install(wheel)
        walk.follow()
        print(f"walk: {walk.seconds:.0f} s in all")
        if walk.seconds > LIMIT_S:
            raise SystemExit(f"walk: longer than {LIMIT_S:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
