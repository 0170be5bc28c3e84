"""A new user's first five minutes: what the README says, word for word, in a copy of this clone and a folder of one's own; how
large its environment is, and how long it takes until the first policy is trained. Any Python will do."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0  # of all of it
MOST_BYTES, MOST_S = 1.2e9, 180.0  # of the environment on a machine without a GPU, and until a policy is trained
SECTION, FIRST = "## Five minutes", "freewheel train"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """The language and the text of every code block of the README's first steps, in their order."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    return BLOCK.findall(page.partition(SECTION)[2].partition("\n## ")[0])


def commands(block: str) -> Iterator[list[str]]:
    for line in block.splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def size_of(folder: Path) -> int:
    """Bytes of its files; one with several names counts once."""
    found = [one.lstat() for one in folder.rglob("*")]
    return sum({about.st_ino: about.st_size for about in found}.values())


def verdicts(size: int, seconds: float) -> list[str]:
    """What is beyond its limit."""
    found = []
    if size > MOST_BYTES:
        found.append(
            f"the environment has {size / 1e9:.2f} GB, at most {MOST_BYTES / 1e9:g} are meant: does torch bring CUDA along?"
        )
    if seconds > MOST_S:
        found.append(
            f"{seconds:.0f} s to the first trained policy, at most {MOST_S:.0f} are meant; run it again if pip had to download"
        )
    return found


class Walk:
    """One walk: every line is timed, and the first that fails ends it. A line may change the variables of those after it."""

    def __init__(self, folder: Path) -> None:
        self._env = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        self._env["FREEWHEEL_CACHE"] = str(folder / "cache")  # a new user's is empty
        self._after, self._begun, self.trained_s = folder / "variables", time.monotonic(), 0.0

    def run(self, line: str, cwd: Path) -> str:
        begun = time.monotonic()
        words = ["bash", "-c", f"{{ {line}\n}} || exit; env -0 > {shlex.quote(str(self._after))}"]
        done = subprocess.run(
            words, cwd=cwd, env=self._env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        print(f"{time.monotonic() - begun:6.1f} s  {line}", flush=True)
        if done.returncode:
            raise SystemExit(f"walk: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        self._env = dict(one.split("=", 1) for one in self._after.read_text().split("\0") if one)
        if line.startswith(FIRST) and not self.trained_s:
            self.trained_s = self.seconds
        return done.stdout

    def follow(self, clone: Path, own: Path) -> None:
        """Every block of the README's first steps: the first one in the clone, which is installed, the others elsewhere."""
        place = clone
        for language, block in blocks():
            if language == "python":
                name = block.split()[1]  # the first line is a comment with the name of the file
                (own / name).write_text(block, encoding="utf-8")
                continue
            for line in block.splitlines():
                output = self.run(line, place)
                if place == own:
                    print(output.rstrip())
            place = own

    def core_alone(self, own: Path) -> None:
        """Without the packages the core still trains, and says what to install for what is missing."""
        names = " ".join(f"freewheel-{folder.name}" for folder in sorted((ROOT / "packages").iterdir()))
        self.run(f"pip uninstall --quiet --yes {names}", own)
        self.run("freewheel train CartPole-v1 --steps 4096 --evals 1 --run alone", own)
        answer = self.run("freewheel compare CartPole-v1 2>&1 || [ $? = 2 ]", own).strip()
        if not answer.endswith("pip install freewheel-lab"):
            raise SystemExit(f"walk: the core alone answers compare with: {answer}")

    @property
    def environment(self) -> Path:
        """The virtual environment that was activated."""
        return Path(self._env["VIRTUAL_ENV"])

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun


def copy_of_clone(folder: Path) -> None:
    """What git knows of this tree, changes included; nothing that was built in it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    words = ["tar", "c", "--null", "--files-from", "-"]
    packed = subprocess.run(words, cwd=ROOT, input=listed, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=packed, check=True)


def main() -> int:
    with TemporaryDirectory() as folder:
        clone, own = Path(folder, "clone"), Path(folder, "own")
        clone.mkdir()
        own.mkdir()
        copy_of_clone(clone)
        walk = Walk(Path(folder))
        walk.follow(clone, own)
        size = size_of(walk.environment)
        walk.core_alone(own)
        told = f"{size / 1e9:.2f} GB of environment, {walk.trained_s:.0f} s to the first trained policy"
        print(f"walk: {told}, {walk.seconds:.0f} s in all")
        if found := verdicts(size, walk.trained_s):
            raise SystemExit(f"walk: {'; '.join(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
