"""The size table of the engine, its packages and their tests; what is beyond a limit fails it (exit 1).

`!` marks a file that is beyond its guide figure, `!!` what is beyond a limit. Each package has one number of lines and no guide
beside it; whoever raises it writes the reason into the table below. Issue 25 aims at 28,000 lines for the engine, and at 42,000
for the engine and its packages together.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "freewheel"
#: Lines of each package at most, and why it is so many. These are the sizes of the day when the packages were made.
LINES = {
    "freewheel": (38_400, "what was left when the packages had moved out, and the processes of lockstep"),
    "freewheel_cage2": (2_900, "docstrings are sentences, and one assignment has a line"),
    "freewheel_drone": (1_500, "moved here as it was"),
    "freewheel_lab": (6_500, "docstrings are sentences, and one assignment has a line"),
    "freewheel_ray": (4_000, "docstrings are sentences, and one assignment has a line"),
    "freewheel_watch": (2_000, "docstrings are sentences, and one assignment has a line"),
}
TOGETHER = (55_100, "the engine and what has moved out of it")
#: All tests have at most as many lines as the engine and its packages, and these.
TESTS_BEYOND = (600, "there were 200 more of them when this limit was made, and rules for packages came; it goes to 0")
FOLDER, HALL = 12, 8  # modules of a folder, and directly in the engine
#: Folders that have more modules, and why.
LARGER: dict[str, tuple[int, str]] = {}


@dataclass(frozen=True)
class Limit:
    """A guide figure for a file, and the gate a little above it."""

    guide: int
    gate: int

    def mark(self, size: int) -> str:
        return "!!" if size > self.gate else "!" if size > self.guide else ""


FILE = Limit(400, 450)
ROOMS = {"collect": Limit(200, 225), "learn": Limit(250, 280)}  # of the engine
FUNCTION = Limit(50, 60)
PARAMETERS = Limit(7, 7)


def packages(root: Path = ROOT) -> dict[str, Path]:
    """The engine and the packages beside it: the folder of each module."""
    found = [root / "freewheel", *sorted(root.glob("packages/*/src/freewheel_*"))]
    return {folder.name: folder for folder in found if not folder.suffix}  # an installer leaves NAME.egg-info there


@dataclass(frozen=True)
class Size:
    """One file, measured."""

    path: Path
    lines: int
    function: int  # lines of the longest function
    parameters: int  # of the function with the most, self and cls apart

    @property
    def marks(self) -> tuple[str, str, str]:
        room = self.path.relative_to(ENGINE).parts[0] if self.path.is_relative_to(ENGINE) else ""
        limit = ROOMS.get(room, FILE)
        return limit.mark(self.lines), FUNCTION.mark(self.function), PARAMETERS.mark(self.parameters)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    positional = [*function.args.posonlyargs, *function.args.args]
    bound = bool(positional) and positional[0].arg in ("self", "cls")
    starred = [function.args.vararg, function.args.kwarg]
    return len(positional) - bound + len(function.args.kwonlyargs) + sum(star is not None for star in starred)


def measure(path: Path) -> Size:
    source = path.read_text(encoding="utf-8")
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    longest = max(((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions), default=0)
    return Size(path, len(source.splitlines()), longest, max(map(parameters, functions), default=0))


def lines_of_tests(root: Path = ROOT) -> int:
    """Of every Python file that is there for tests alone."""
    files = [*root.glob("conftest.py"), *root.glob("tests/**/*.py"), *root.glob("packages/*/tests/**/*.py")]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def totals(lines: dict[str, int], tests: int) -> Iterator[tuple[str, int, int]]:
    """What is limited as a whole: name, lines, and how many there may be. A package that the table lacks may have none."""
    whole = sum(lines.values())
    for name, count in lines.items():
        yield name, count, LINES.get(name, (0, ""))[0]
    yield "the engine and its packages", whole, TOGETHER[0]
    yield "all tests", tests, whole + TESTS_BEYOND[0]


def full_folders(modules: dict[str, int]) -> Iterator[str]:
    """Folders (their names as modules) that have too many modules, a line each."""
    for folder, count in modules.items():
        limit = LARGER[folder][0] if folder in LARGER else HALL if folder == ENGINE.name else FOLDER
        if count > limit:
            yield f"{folder} has {count} modules, at most {limit}"


def row(name: str, *cells: tuple[int, str]) -> str:
    return f"{name:<48}" + "".join(f"{size:>9,} {mark:<2}" for size, mark in cells)


def main() -> int:
    failed, lines, modules = False, dict[str, int](), Counter[str]()
    print(f"{'file':<48}{'lines':>9}   {'longest':>9}   {'params':>9}")
    for package, folder in packages().items():
        sizes = [measure(path) for path in sorted(folder.rglob("*.py"))]
        for size in sizes:
            figures = (size.lines, size.function, size.parameters)
            print(row(str(size.path.relative_to(folder.parent)), *zip(figures, size.marks, strict=True)))
        failed |= any("!!" in size.marks for size in sizes)
        lines[package] = sum(size.lines for size in sizes)
        modules.update(".".join(size.path.parent.relative_to(folder.parent).parts) for size in sizes)
    print(f"\n{'in all':<48}{'lines':>9}   {'at most':>9}")
    for name, count, limit in totals(lines, lines_of_tests()):
        print(row(name, (count, "!!" if count > limit else ""), (limit, "")))
        failed |= count > limit
    if full := [*full_folders(modules)]:
        print("\n".join(full))
    return int(failed or bool(full))


if __name__ == "__main__":
    sys.exit(main())
