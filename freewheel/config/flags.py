"""Options by name, from a command line, a file or Python: layered into one mapping and converted to types by tyro."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from freewheel.errors import FileError, UsageError, nearest
from freewheel.files.read import JSON_SIZE, content, parse_json, show, typed_content
from freewheel.registry import require_package

T = TypeVar("T")
TOML_SIZE = 1 << 20  # bytes
#: A key of 40 parts or more. The time that tomllib takes grows with the square of the number of parts.
DOTTED = re.compile(rb"""(?<![\w-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.){0,200}+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){40}""")
Tokens = tuple[str, ...]
Flags = dict[str, Tokens]  # "ppo.lr" -> ("0.001",)

#: Marks a nested dataclass of options: its options have no prefix.
FLAT: Any = tyro.conf.OmitArgPrefixes
_CONFIG = (tyro.conf.FlagConversionOff,)
Types = Mapping[str, Any]
Texts = Mapping[str, str]
NONE: Texts = types.MappingProxyType({})
_RULES = tyro.constructors.ConstructorRegistry()


def named(flag: str = "", description: str | None = None) -> Any:
    """Return an annotation that gives an option another name than its field's, or a description made at run time."""
    return tyro.conf.arg(name=flag or None, help=description)


def _read_table(words: list[str]) -> tuple[tuple[float, ...], ...]:
    rows = json.loads(words[0])
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(words[0])
    table, widths = tuple(tuple(map(float, row)) for row in rows), set(map(len, rows))
    if len(widths) > 1 or 0 in widths or not all(math.isfinite(cell) for row in table for cell in row):
        raise ValueError(words[0])
    return table


#: Rows of numbers, all of the same length, written as JSON.
Table: typing.TypeAlias = Annotated[
    tuple[tuple[float, ...], ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="[[NUMBER,...],...]",
        instance_from_str=_read_table,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda table: [json.dumps(table)],
    ),
]


@dataclass(frozen=True)
class Layer:
    """Options from one source; later layers win over earlier ones."""

    source: str
    flags: Flags
    words: dict[str, str] = dataclasses.field(default_factory=dict)  # flags of other libraries -> our flags
    trusted: bool = True  # whether code that this layer names may be imported (config/trust.py)

    def add(self, option: str, value: Tokens, word: str = "") -> None:
        """Add an option that was written as `word`; UsageError if it is there already under another name."""
        if option in self.flags:
            raise UsageError(f"{as_flag(option)} is given twice, once under another name; leave one out")
        self.flags[option] = value
        if word not in ("", option):
            self.words[as_flag(word)] = as_flag(option)


@functools.cache
def hints_of(kind: type[Any]) -> Mapping[str, Any]:
    """Return the types of the fields; cached, because reading them is slow."""
    return typing.get_type_hints(kind, include_extras=True)


def options_of(kind: type[Any], prefix: str, *, flat: bool) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (option name, field, type) for every field; flat nested dataclasses (`flat`: all of them) have no name."""
    hints = hints_of(kind)  # type: ignore[arg-type] # classes can be hashed
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
        names = (mark.name for mark in marks if isinstance(mark, type(named())))
        name = field.metadata.get("flag") or next(filter(None, names), field.name)
        bare = hint if not marks or hint is Table else typing.get_args(hint)[0]
        if dataclasses.is_dataclass(bare) and (flat or FLAT in marks):
            yield "", field, bare
        else:
            yield prefix + name, field, bare


def option_types(options: type[Any], prefix: str = "", *, flat: bool = False) -> dict[str, Any]:
    """Return the type of every option by its dotted name, including options of nested dataclasses."""
    found: dict[str, Any] = {}
    for name, _, kind in options_of(options, prefix, flat=flat):
        if dataclasses.is_dataclass(kind):
            found |= option_types(typing.cast(type[Any], kind), f"{name}." if name else "", flat=not name)
        else:
            found[name] = kind
    return found


def values(options: Any) -> dict[str, Any]:
    """Return the value of every option by its name without a prefix, including options of nested dataclasses."""
    found: dict[str, Any] = {}
    for name, field, kind in options_of(type(options), "", flat=True):
        value = getattr(options, field.name)
        found |= values(value) if dataclasses.is_dataclass(kind) else {name: value}
    return found


@_RULES.struct_rule
def _renamed(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
    """Handle dataclasses without tyro's annotations: the fields' metadata has `flag` (the option's name) and `help`."""
    kind = info.type
    if not dataclasses.is_dataclass(kind) or not all("flag" in field.metadata for field in dataclasses.fields(kind)):
        return None
    hints = typing.get_type_hints(kind)
    fields = []
    for field in dataclasses.fields(kind):
        hint: Any = Annotated[hints[field.name], named(field.metadata["flag"], field.metadata["help"])]
        fields.append(tyro.constructors.StructFieldSpec(field.name, hint, field.default))
    return tyro.constructors.StructConstructorSpec(typing.cast(type[Any], kind), tuple(fields))


def read_argv(
    argv: Sequence[str], known: Mapping[str, Any], free: str = "", answers: Mapping[str, str] = NONE
) -> tuple[list[str], Flags]:
    """Return positional arguments and flags. Any name under `free` (e.g. "env.") is allowed and takes one value."""
    others, flags = split_argv(argv, known, free)
    for word in others:
        if word.startswith("--"):
            check_names([canonical(word[2:].partition("=")[0])], known, answers=answers, free=free)
        elif word.startswith("-"):
            raise UsageError(f"unknown option {word}: options start with two dashes; see --help")
    return others, flags


def split_argv(argv: Sequence[str], known: Mapping[str, Any], free: str = "") -> tuple[list[str], Flags]:
    """Return all words that belong to no known flag, in their order, and the known flags."""
    others: list[str] = []
    flags: Flags = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        written, equals, value = word[2:].partition("=")
        name = canonical(written)
        is_free = bool(free) and name.startswith(free) and len(name) > len(free)
        if not word.startswith("--"):
            others.append(word)
        elif name not in known and _is_switch(known.get(name.removeprefix("no_"))):
            if equals:
                raise UsageError(f"--{written} takes no value")
            flags[name.removeprefix("no_")] = ("False",)
        elif is_free or name in known:
            flags[name] = (value,) if equals else _take(words, str if is_free else known[name], word)
        else:
            others.append(word)
    return others, flags


def canonical(name: str) -> str:
    """Return an option's name as that of a field: dashes become underscores."""
    return name.replace("-", "_")


def check_names(names: Iterable[str], known: Types, where: str = "", answers: Texts = NONE, free: str = "") -> None:
    """Raise UsageError about the first name that is not an option. `where` is the file with the names, if there is one;
    `answers` has advice for names of other libraries; `free`: see read_argv."""
    for name in names:
        if name not in known:
            written, place = (str, f" in {where}") if where else (as_flag, "")
            group = name.partition(".")[0]
            ours = any(one.startswith(f"{group}.") for one in known)  # else it may be a table of another library
            if answer := answers.get(name if ours else group):
                table = f"{name}{place} is a table of options: " if where and ours else ""
                raise UsageError(f"{table or f'there is no {written(name)}{place}: '}{answer}")
            require_package("options", name, f"{written(name)}{place}")
            otherwise = f", or say --{free}{name} if it is an argument of the environment" if free else ""
            hint = nearest(written(name), map(written, known), f"; see --help{otherwise}", cutoff=0.75)
            raise UsageError(f"unknown option {written(name)}{place}{hint}")


def read_file(path: Path, *, typed: bool) -> dict[str, Any]:
    """Read the options in a JSON or TOML file. A file that the user has typed may also be a link or a pipe."""
    try:
        most = TOML_SIZE if path.suffix == ".toml" else JSON_SIZE
        data = typed_content(path, most) if typed else content(path, most)
        found = _read_toml(data, path) if path.suffix == ".toml" else parse_json(data, str(path))
        for text in (*found, *found.values()):
            if isinstance(text, str) and text.splitlines()[1:]:
                raise FileError(f"{path} is damaged: {show(text)} is not a name or value of an option")
    except FileError as error:
        if not typed:
            raise
        raise UsageError(f"--config {error}; give a JSON or TOML file of options") from None
    return found


def _read_toml(data: bytes | bytearray, path: Path) -> dict[str, Any]:
    if DOTTED.search(data):
        raise FileError(f"{path} is not valid toml: a key has too many parts")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # ValueError: also for text that is not UTF-8
        what = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise FileError(f"{path} is not valid toml: {what}") from None


def flatten(data: Mapping[str, Any], free: str = "", prefix: str = "") -> dict[str, Any]:
    """Turn {"ppo": {"lr": 1}} into {"ppo.lr": 1}; names that start with `free` keep their values whole."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = canonical(prefix + key)
        nested = isinstance(value, Mapping) and not (free and name.startswith(free))
        flat |= flatten(value, free, f"{name}.") if nested else {name: value}
    return flat


def tokens(value: Any) -> Tokens:
    """Return a value as it would be typed on the command line."""
    return tuple(map(str, value if isinstance(value, (list, tuple)) else [value]))


def merge(layers: Sequence[Layer]) -> tuple[Flags, dict[str, str]]:
    """Return the tokens of every option from the last layer that has it, and the source of that layer."""
    merged: Flags = {}
    sources: dict[str, str] = {}
    for layer in layers:
        merged |= layer.flags
        sources |= dict.fromkeys(layer.flags, layer.source)
    return merged, sources


def build(options: type[T], flags: Flags) -> T:
    """Build the typed options; raise UsageError about the first value that does not fit its type."""
    types_of, given = option_types(options), {}
    for name, words in flags.items():
        kind = types_of[name]
        try:
            given[name] = _value(kind, tuple(_normalised(word, kind) for word in _separated(words, kind)))
        except SystemExit:
            typed = shortened(" ".join(words) or "nothing")
            raise UsageError(f"{as_flag(name)} must be {_describe(kind)}, not {typed}") from None
    return options(**_given_fields(options, given, "", flat=False))


def _given_fields(kind: type[Any], given: Mapping[str, Any], prefix: str, *, flat: bool) -> dict[str, Any]:
    """Return the given values by field; a nested dataclass is its default with the given values."""
    found: dict[str, Any] = {}
    for name, field, inner in options_of(kind, prefix, flat=flat):
        if not dataclasses.is_dataclass(inner):
            found |= {field.name: given[name]} if name in given else {}
        elif fields := _given_fields(typing.cast(type[Any], inner), given, f"{name}." if name else "", flat=not name):
            made: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            found[field.name] = dataclasses.replace(made, **fields)
    return found


@functools.lru_cache(maxsize=4096)
def _value(kind: Any, words: Tokens) -> Any:
    """Convert words to a value of this type with tyro: a parser of one option is built fast, one of all is not."""
    one = dataclasses.make_dataclass("One", [("value", kind)])
    argv = [f"--value={words[0]}"] if len(words) == 1 else ["--value", *words]  # one value may start with a dash
    with contextlib.redirect_stderr(io.StringIO()):  # tyro prints a box; our message is one line
        return tyro.cli(one, args=argv, config=_CONFIG, registry=_RULES).value


def shortened(text: str) -> str:
    """Return the printable beginning of what the user gave, for a message."""
    text = ascii(" ".join(text.split()))[1:-1] if not text.isprintable() else text
    return text if len(text) <= 200 else f"{text[:197]}..."


def with_own(options: type[Any], *owns: type[Any], doc: str | None = None) -> type[Any]:
    """Return a dataclass of these options and of a command's own options, for its help."""
    fields: list[Any] = [
        (f"own{i}", Annotated[own, FLAT], dataclasses.field(default_factory=own)) for i, own in enumerate(owns)
    ]
    both = dataclasses.make_dataclass("Options", fields, bases=(options,))
    both.__doc__ = doc or options.__doc__
    return both


def show_help(options: type[Any], prog: str) -> None:
    """Print the options and their descriptions, under the docstring of their dataclass."""
    with contextlib.suppress(SystemExit):
        tyro.cli(options, args=["--help"], prog=prog, description=options.__doc__, config=_CONFIG, registry=_RULES)


def as_flag(name: str) -> str:
    """Return an option as it is written on a command line."""
    return f"--{name.replace('_', '-')}"


def _is_switch(kind: Any) -> bool:
    """Return whether a flag of this type needs no value, because it is True or False (perhaps also auto)."""
    return bool in (kind, *typing.get_args(kind))


def _take(words: list[str], kind: Any, flag: str) -> Tokens:
    """Remove and return the values that belong to a flag of this type."""
    if _is_switch(kind) and (not words or words[0].lower() not in ("true", "false", "auto")):
        return ("True",)
    if typing.get_origin(kind) is tuple:
        listed = _of_numbers(kind)
        ends = (i for i, word in enumerate(words) if word.startswith("--") or (listed and not _numbers(word)))
        count = next(ends, len(words))
        taken, words[:count] = words[:count], []
        return tuple(taken)
    if not words or words[0].startswith("--"):
        raise UsageError(f"{flag} needs a value: {_describe(kind)}")
    return (words.pop(0),)


def _normalised(word: str, kind: Any) -> str:
    """Return a word as tyro reads it: True, None, 100000 for true, none, 1e5 or 100k, if the type allows these."""
    kinds = {kind, *typing.get_args(kind)}
    if (bool in kinds or types.NoneType in kinds) and word.capitalize() in ("True", "False", "None"):
        return word.capitalize()
    if word.lower() in kinds.union(*map(typing.get_args, kinds)):  # one of the choices, perhaps in upper case
        return word.lower()
    if int in kinds and (thousands := re.fullmatch(r"([0-9.]+)([km])", word.lower())):
        word = f"{thousands[1]}e{'3' if thousands[2] == 'k' else '6'}"
    number = _number(word) if int in kinds and set("e.E") & set(word) else None
    return f"{number:.0f}" if number is not None and number.is_integer() else word


def _of_numbers(kind: Any) -> bool:
    """Return whether the type is a list of numbers, which ends at the first word that is not a number."""
    return typing.get_origin(kind) is tuple and typing.get_args(kind)[0] in (int, float)


def _numbers(word: str) -> list[str]:
    """Return the numbers in 64 or 64,64 or [64, 64], which other libraries use for 64 64; none if one is invalid."""
    found = word.strip("[]()").replace(",", " ").split()
    return [] if any(_number(one) is None for one in found) else found


def _separated(words: Tokens, kind: Any) -> Tokens:
    return tuple(one for word in words for one in (_of_numbers(kind) and _numbers(word)) or [word])


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _describe(kind: Any) -> str:
    if kind is Table:
        return "rows of equal length as JSON, e.g. [[1,0],[0,1]]"
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"{_describe(typing.get_args(kind)[0])}, once or more"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(kind))
    known = {int: "a whole number", float: "a number", bool: "True or False", str: "a word", type(None): "none"}
    return known.get(kind, getattr(kind, "__name__", str(kind)))
