"""Finds options of `train` by a word, in any mode, algorithm and world, for the help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freewheel.collect.mode import MODES
from freewheel.config import flags, resolve
from freewheel.envs.family import WORLDS
from freewheel.learn.spec import ALGORITHMS
from freewheel.policies.spec import PolicyConfig

WIDTH = 80


@dataclass(frozen=True)
class Option:
    """One option, and where it exists."""

    flag: str  # --max-lag
    default: str
    text: str
    where: tuple[str, ...]  # --mode continuous, --algo sac, drone environments; empty: everywhere

    def lines(self) -> Iterator[str]:
        """Yield the lines for the help, WIDTH columns wide."""
        yield f"{self.flag}  (default: {self.default})" if self.default else self.flag
        where = f" [{', '.join(self.where)}]" if self.where else ""
        yield from textwrap.wrap(self.text + where, WIDTH, initial_indent="    ", subsequent_indent="    ")


def all_options(*more: type[Any]) -> list[Option]:
    """Return all options of `train`; `more` are the option classes of the command itself."""
    parts: list[tuple[str, Any, str]] = [("", kind, "") for kind in (resolve._choices(), resolve.RunConfig, *more)]
    parts += [("", mode.config, f"--mode {mode.name}") for mode in MODES.values()]
    parts += [("policy.", PolicyConfig, "")]
    parts += [(f"{name}.", entry.config, f"--algo {name}") for name, entry in ALGORITHMS.items()]
    parts += [("", family.options, f"{family.name} environments") for family in WORLDS.values()]
    found: dict[str, Option] = {}
    for prefix, kind, where in parts:
        for name, default, text in _fields(kind):
            flag = f"--{prefix}{name}".replace("_", "-")
            before = found.get(flag, Option(flag, default, text, ()))
            places = (*before.where, where) if where else before.where
            found[flag] = dataclasses.replace(before, where=tuple(dict.fromkeys(places)))
    everywhere = [{f"--mode {name}" for name in MODES}, {f"{name} environments" for name in WORLDS}]
    return [dataclasses.replace(one, where=() if set(one.where) in everywhere else one.where) for one in found.values()]


def matching(word: str, options: Sequence[Option]) -> list[Option]:
    """Return the options whose name contains the word, else those whose description does."""
    wanted = flags.canonical(word.lstrip("-")).lower()
    named = [one for one in options if wanted in flags.canonical(one.flag.lstrip("-")).lower()]
    return named or [one for one in options if re.search(rf"(?i)\b{re.escape(wanted.replace('_', ' '))}", one.text)]


def _fields(kind: type[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, default and description of every option of a dataclass and of its nested dataclasses."""
    hints, texts = flags.hints_of(kind), _descriptions(kind)  # type: ignore[arg-type] # classes can be hashed
    for name, field, inner in flags.options_of(kind, "", flat=True):
        if dataclasses.is_dataclass(inner):
            yield from _fields(typing.cast(type[Any], inner))
            continue
        marks = [mark for mark in typing.get_args(hints[field.name])[1:] if isinstance(mark, type(flags.named()))]
        made = next((mark.help for mark in marks if isinstance(mark.help, str)), "")
        text = field.metadata.get("help") or made or texts.get(field.name, "")
        yield name, _shown(field), " ".join(text.split())


def _shown(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default is not dataclasses.MISSING else ""
    if value is None or value == "" or value == ():
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _descriptions(kind: type[Any]) -> Mapping[str, str]:
    """Return the docstring of every field of a dataclass and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # made at run time
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                found[field.target.id] = text
    return found
