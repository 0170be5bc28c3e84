"""The size table of the package: `!` marks what is beyond the guide figure, `!!` what is beyond the gate (exit 1)."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "freewheel"


@dataclass(frozen=True)
class Limit:
    """A guide figure, and the gate a little above it."""

    guide: int
    gate: int

    def mark(self, size: int) -> str:
        return "!!" if size > self.gate else "!" if size > self.guide else ""


FILE = Limit(400, 450)
ROOMS = {"collect": Limit(200, 225), "learn": Limit(250, 280)}
FOLDER, HALL = Limit(12, 12), Limit(8, 8)  # modules of a folder, and directly in the package
PACKAGE_FILES, PACKAGE_LINES = Limit(120, 350), Limit(15_000, 54_000)
FUNCTION = Limit(50, 60)
PARAMETERS = Limit(7, 7)


@dataclass(frozen=True)
class Size:
    """One file, measured."""

    path: Path
    lines: int
    function: int  # lines of the longest function
    parameters: int  # of the function with the most, self and cls apart

    @property
    def marks(self) -> tuple[str, str, str]:
        limit = ROOMS.get(self.path.relative_to(PACKAGE).parts[0], FILE)
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


def row(name: str, *cells: tuple[int, str]) -> str:
    return f"{name:<32}" + "".join(f"{size:>9} {mark:<2}" for size, mark in cells)


def main() -> int:
    sizes = [measure(path) for path in sorted(PACKAGE.rglob("*.py"))]
    print(f"{'file':<32}{'lines':>9}   {'longest':>9}   {'params':>9}")
    for size in sizes:
        figures = (size.lines, size.function, size.parameters)
        print(row(str(size.path.relative_to(PACKAGE)), *zip(figures, size.marks, strict=True)))
    lines, function, most = (
        sum(s.lines for s in sizes),
        max(s.function for s in sizes),
        max(s.parameters for s in sizes),
    )
    print(row(f"{len(sizes)} files", (lines, PACKAGE_LINES.mark(lines)), (function, ""), (most, "")))
    full = [PACKAGE_LINES.mark(lines), PACKAGE_FILES.mark(len(sizes))]
    for folder, count in sorted(Counter(size.path.parent for size in sizes).items()):
        mark = (HALL if folder == PACKAGE else FOLDER).mark(count)
        full.append(mark)
        if mark:
            print(f"{folder.relative_to(PACKAGE.parent)} has {count} modules {mark}")
    return int("!!" in full or any("!!" in size.marks for size in sizes))


if __name__ == "__main__":
    sys.exit(main())
