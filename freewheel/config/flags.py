"""Flags: options by name, from a command line, a file or Python, layered into one mapping and typed once, by tyro."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from freewheel.errors import UsageError, nearest

T = TypeVar("T")
Tokens = tuple[str, ...]
Flags = dict[str, Tokens]  # "ppo.lr" -> ("0.001",)

TYRO = (tyro.conf.FlagConversionOff,)


def _rows(words: list[str]) -> tuple[tuple[float, ...], ...]:
    rows = json.loads(words[0])
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(words[0])
    table, widths = tuple(tuple(map(float, row)) for row in rows), set(map(len, rows))
    if len(widths) > 1 or 0 in widths or not all(math.isfinite(cell) for row in table for cell in row):
        raise ValueError(words[0])
    return table


#: Rows of equally many numbers, typed as JSON.
Table: typing.TypeAlias = typing.Annotated[
    tuple[tuple[float, ...], ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="[[NUMBER,...],...]",
        instance_from_str=_rows,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda table: [json.dumps(table)],
    ),
]


@dataclass(frozen=True)
class Layer:
    """Options from one place; later layers win over earlier ones."""

    source: str
    flags: Flags


def option_types(options: type[Any], prefix: str = "") -> dict[str, Any]:
    """The dotted name and type of every option of a dataclass of dataclasses."""
    hints = typing.get_type_hints(options, include_extras=True)
    names: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        kind = hints[field.name]
        bare = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
        if dataclasses.is_dataclass(bare):
            names |= option_types(typing.cast(type[Any], bare), "" if bare is not kind else f"{prefix}{field.name}.")
        else:
            names[f"{prefix}{field.name}"] = kind
    return names


def read_argv(argv: Sequence[str], known: Mapping[str, Any], free: str = "") -> tuple[list[str], Flags]:
    """Positional arguments and flags. Names under `free` (e.g. "env.") are open: each takes one value."""
    positional: list[str] = []
    flags: Flags = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if word.startswith("-"):
                raise UsageError(f"unknown option {word}: options start with two dashes; see --help")
            positional.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = canonical(name, free)
        if name not in known and known.get(name.removeprefix("no_")) is bool:
            if equals:
                raise UsageError(f"--{word[2:].partition('=')[0]} takes no value")
            flags[name.removeprefix("no_")] = ("False",)
            continue
        is_free = bool(free) and name.startswith(free) and len(name) > len(free)
        if not is_free:
            check_names([name], known)
        flags[name] = (value,) if equals else _take(words, str if is_free else known[name], word)
    return positional, flags


def canonical(name: str, free: str = "") -> str:
    """Dashes and underscores are the same, except in names that belong to somebody else."""
    return name if free and name.startswith(free) else name.replace("-", "_")


def check_names(names: Iterable[str], known: Mapping[str, Any], where: str = "") -> None:
    """UsageError about the first name that is no option; `where` it stands, unless on the command line."""
    for name in names:
        if name not in known:
            as_written = str if where else _flag
            place = f"{name} in {where}" if where else _flag(name)
            hint = nearest(as_written(name), map(as_written, known), "; see --help")
            raise UsageError(f"unknown option {place}{hint}")


def read_file(path: Path) -> dict[str, Any]:
    """A JSON or TOML file of options, nested tables flattened to dotted names."""
    try:
        text = path.read_text()
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; give a JSON or TOML file of options") from None
    except (UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path} is not valid {path.suffix.lstrip('.') or 'JSON'}: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"--config {path} must hold an object of options, not a {type(data).__name__}")
    return data


def flatten(data: Mapping[str, Any], free: str = "", prefix: str = "") -> dict[str, Any]:
    """{"ppo": {"lr": 1}} -> {"ppo.lr": 1}; names that start with `free` keep their values whole."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = canonical(prefix + key, free)
        nested = isinstance(value, Mapping) and not (free and name.startswith(free))
        flat |= flatten(value, free, f"{name}.") if nested else {name: value}
    return flat


def tokens(value: Any) -> Tokens:
    """A value as it would be typed."""
    if isinstance(value, (list, tuple)):
        return tuple(str(item) for item in value)
    return (str(value),)


def merge(layers: Sequence[Layer]) -> tuple[Flags, dict[str, str]]:
    """The winning tokens of every option, and where each came from."""
    merged: Flags = {}
    sources: dict[str, str] = {}
    for layer in layers:
        merged |= layer.flags
        sources |= dict.fromkeys(layer.flags, layer.source)
    return merged, sources


def build(options: type[T], flags: Flags) -> T:
    """The typed options; one clear line about the first value that does not fit."""
    types_of = option_types(options)
    spelt = {name: tuple(_spelt(word, types_of[name]) for word in words) for name, words in flags.items()}
    try:
        return _parse(options, spelt)
    except SystemExit:
        for name, words in spelt.items():
            try:
                _parse(options, {name: words})
            except SystemExit:
                raise UsageError(_complaint(name, flags[name], types_of[name])) from None
        raise UsageError(f"these options do not go together: {' '.join(_argv(spelt))}") from None


def show_help(options: type[Any], prog: str, description: str) -> None:
    """Print what there is to set, and leave."""
    tyro.cli(options, args=["--help"], prog=prog, description=description, config=TYRO)


def _parse(options: type[T], flags: Flags) -> T:
    with contextlib.redirect_stderr(io.StringIO()):  # its boxes; ours is one line
        return tyro.cli(options, args=_argv(flags), config=TYRO)


def _argv(flags: Flags) -> list[str]:
    """One value goes with its name, whatever it starts with."""
    pairs = ((f"--{name}", words) for name, words in flags.items())
    return [part for flag, words in pairs for part in ([f"{flag}={words[0]}"] if len(words) == 1 else [flag, *words])]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _take(words: list[str], kind: Any, flag: str) -> Tokens:
    """The values that belong to a flag of this type."""
    if kind is bool and (not words or words[0].lower() not in ("true", "false")):
        return ("True",)
    if typing.get_origin(kind) is tuple:
        numbers = typing.get_args(kind)[0] in (int, float)  # then a word that is none ends them
        stops = (i for i, word in enumerate(words) if word.startswith("--") or (numbers and _number(word) is None))
        count = next(stops, len(words))
        taken, words[:count] = words[:count], []
        return tuple(taken)
    if not words or words[0].startswith("--"):
        raise UsageError(f"{flag} needs a value: {_describe(kind)}")
    return (words.pop(0),)


def _spelt(word: str, kind: Any) -> str:
    """A word as tyro wants it: True, None, 100000 for true, none, 1e5 where the type has these."""
    kinds = {kind, *typing.get_args(kind)}
    if (bool in kinds or types.NoneType in kinds) and word.capitalize() in ("True", "False", "None"):
        return word.capitalize()
    number = _number(word) if int in kinds and set("e.E") & set(word) else None
    return f"{number:.0f}" if number is not None and number.is_integer() else word


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _complaint(name: str, values: Tokens, kind: Any) -> str:
    return f"{_flag(name)} must be {_describe(kind)}, not {' '.join(values) or 'nothing'}"


def _describe(kind: Any) -> str:
    if kind is Table:
        return "rows of equally many numbers as JSON, e.g. [[1,0],[0,1]]"
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"{_describe(typing.get_args(kind)[0])}, once or more"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(kind))
    known = {int: "a whole number", float: "a number", bool: "True or False", str: "a word", type(None): "none"}
    return known.get(kind, getattr(kind, "__name__", str(kind)))
