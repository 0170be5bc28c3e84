"""Options by name: how they are written, layered and typed, and what is said when they are not right."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tyro

from freewheel.config import flags
from freewheel.errors import UsageError


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    limit: float | None = 1.0
    scale: Literal["none", "some"] = "some"
    centred: bool = True


@dataclass(frozen=True)
class Flat:
    num_envs: int = 1
    seed: int | None = None
    name: str = ""
    hidden: tuple[int, ...] = (8, 8)
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    flat: Annotated[Flat, tyro.conf.OmitArgPrefixes] = field(default_factory=Flat)
    inner: Inner = field(default_factory=Inner)


KNOWN = flags.option_types(Options)


def typed(*argv: str) -> Options:
    positional, given = flags.read_argv(argv, KNOWN)
    assert positional == []
    return flags.build(Options, given)


def complaint(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        typed(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_options_have_dotted_names_and_types() -> None:
    inner = ["inner.rate", "inner.limit", "inner.scale", "inner.centred"]
    assert list(KNOWN) == ["num_envs", "seed", "name", "hidden", "words", *inner]
    assert KNOWN["num_envs"] is int
    assert KNOWN["inner.scale"] == Literal["none", "some"]


@pytest.mark.parametrize(
    ("argv", "positional", "given"),
    [
        (["World", "--num-envs", "3"], ["World"], {"num_envs": ("3",)}),
        (["--num_envs", "3", "World"], ["World"], {"num_envs": ("3",)}),
        (["--num-envs=3", "--name=a=b"], [], {"num_envs": ("3",), "name": ("a=b",)}),
        (["--name="], [], {"name": ("",)}),
        (["--inner.rate", "-1e-3"], [], {"inner.rate": ("-1e-3",)}),
        (["--inner.centred", "World"], ["World"], {"inner.centred": ("True",)}),
        (["--inner.centred", "false", "World"], ["World"], {"inner.centred": ("false",)}),
        (["--no-inner.centred", "World"], ["World"], {"inner.centred": ("False",)}),
        (["--hidden", "4", "5", "World"], ["World"], {"hidden": ("4", "5")}),
        (["--hidden", "--words", "a", "b"], [], {"hidden": (), "words": ("a", "b")}),
        (["--num-envs", "1", "--num-envs", "2"], [], {"num_envs": ("2",)}),
        (["--env.some-key", "x", "--env.b=1"], [], {"env.some_key": ("x",), "env.b": ("1",)}),
    ],
)
def test_a_command_line_is_words_and_flags(argv: list[str], positional: list[str], given: flags.Flags) -> None:
    assert flags.read_argv(argv, KNOWN, free="env.") == (positional, given)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--num-envz", "3"], "unknown option --num-envz; did you mean '--num-envs'?"),
        (["--inner.raet=1"], "unknown option --inner.raet; did you mean '--inner.rate'?"),
        (["--qqqqqqqqqqqqqqqq"], "unknown option --qqqqqqqqqqqqqqqq; see --help"),
        (["-seed", "3"], "unknown option -seed: options start with two dashes; see --help"),
        (["--num-envs"], "--num-envs needs a value: a whole number"),
        (["--inner.limit", "--hidden"], "--inner.limit needs a value: a number or none"),
        (["--no-inner.centred=True"], "--no-inner.centred takes no value"),
        (["--no-num-envs"], "unknown option --no-num-envs; did you mean '--num-envs'?"),
    ],
)
def test_a_flag_that_cannot_be_read_is_named(argv: list[str], text: str) -> None:
    assert complaint(*argv) == text


def test_values_get_their_types() -> None:
    options = typed("--num-envs=7", "--inner.rate", "1e-3", "--hidden", "3", "--words", "a", "b", "--name", "none")
    assert options == Options(Flat(num_envs=7, hidden=(3,), words=("a", "b"), name="none"), Inner(rate=1e-3))
    assert typed("--hidden").flat.hidden == ()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--inner.limit", "none"], Inner(limit=None)),
        (["--inner.limit=None"], Inner(limit=None)),
        (["--inner.scale", "none"], Inner(scale="none")),  # here it is a word
        (["--inner.centred=false"], Inner(centred=False)),
        (["--inner.centred", "FALSE"], Inner(centred=False)),
        (["--inner.rate", "-2"], Inner(rate=-2.0)),
    ],
)
def test_none_and_truth_may_be_written_small(argv: list[str], expected: Inner) -> None:
    assert typed(*argv).inner == expected


@pytest.mark.parametrize("written", ["1e5", "100_000", "100000", "1E5", "100000.0"])
def test_whole_numbers_may_be_written_as_people_write_them(written: str) -> None:
    assert typed("--seed", written).flat.seed == 100_000


def test_large_numbers_keep_every_digit_and_a_value_may_look_like_a_flag() -> None:
    assert typed("--seed", "9007199254740993").flat.seed == 9007199254740993
    assert typed("--name=--seed").flat.name == "--seed"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--num-envs", "many"], "--num-envs must be a whole number, not many"),
        (["--num-envs", "1.5"], "--num-envs must be a whole number, not 1.5"),
        (["--num-envs", "none"], "--num-envs must be a whole number, not none"),
        (["--seed=x"], "--seed must be a whole number or none, not x"),
        (["--inner.scale", "all"], "--inner.scale must be one of none, some, not all"),
        (["--inner.centred=maybe"], "--inner.centred must be True or False, not maybe"),
        (["--hidden=a"], "--hidden must be a whole number, once or more, not a"),
        (["--name", "x", "--inner.rate", "fast"], "--inner.rate must be a number, not fast"),
    ],
)
def test_the_first_value_that_does_not_fit_is_named(argv: list[str], text: str) -> None:
    assert complaint(*argv) == text


def test_a_later_layer_wins_and_is_named() -> None:
    first = flags.Layer("preset p", {"num_envs": ("2",), "name": ("a",)})
    second = flags.Layer("flag", {"num_envs": ("3",)})
    merged, sources = {"num_envs": ("3",), "name": ("a",)}, {"num_envs": "flag", "name": "preset p"}
    assert flags.merge([first, second]) == (merged, sources)


def test_nested_tables_become_dotted_names() -> None:
    nested = {"inner": {"rate": 1, "nested-key": {"b": 2}}, "env.some-key": {"c": 3}}
    assert flags.flatten(nested, free="env.") == {"inner.rate": 1, "inner.nested_key.b": 2, "env.some_key": {"c": 3}}


@pytest.mark.parametrize(
    ("name", "text"),
    [("options.json", '{"inner": {"rate": 1}, "hidden": [3, 4]}'), ("options.toml", "hidden = [3, 4]\ninner.rate = 1")],
)
def test_files_are_json_or_toml(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert flags.read_file(tmp_path / name, typed=True) == {"inner": {"rate": 1}, "hidden": [3, 4]}


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", b"{", "is damaged: it is not JSON (Expecting property name enclosed in double quotes, line 1)"),
        ("a.toml", b"= 3", "is not valid toml: "),
        ("a.toml", b"a = " + b"[" * 20_000, "is not valid toml: it is nested too deeply"),
        ("a.toml", b"\xff", "is not valid toml: 'utf-8' codec"),
        ("a.toml", b"a." * 400_000 + b"b = 1", "is not valid toml: a key has too many parts"),  # hours
        ("a.toml", b'a = 1\n\'b.\'."\\""' + b" . '='" * 40 + b" = 1", "is not valid toml: a key has too many parts"),
        ("a.toml", b"#" * (2 << 20), "has more than 1,048,576 bytes"),
        ("a.toml", b'env = "a\\nb"', r"is damaged: 'a\nb' is not a name or value of an option"),
        ("a.json", b'{"a\\u2028b": 1}', r"is damaged: 'a\u2028b' is not a name or value of an option"),
        ("a", b"x", "is damaged: it is not JSON (Expecting value, line 1)"),
        ("a.json", b"\xff\xfe\x00", "is damaged: it is not text in UTF-8 (byte 0)"),
        ("a.json", b"[1]", "is damaged: it should hold a JSON object, not [1]"),
        ("a.json", b"{}" + b" " * (16 << 20), "has more than 16,777,216 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        flags.read_file(tmp_path / name, typed=True)
    assert f"--config {tmp_path / name} {text}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    told = r"nosuch\.json cannot be read: No such file or directory; give a JSON or TOML file"
    with pytest.raises(UsageError, match=told):
        flags.read_file(tmp_path / "nosuch.json", typed=True)


@pytest.mark.parametrize(
    ("value", "words"),
    [(1, ("1",)), (None, ("None",)), (True, ("True",)), ((1, 2), ("1", "2")), ([], ()), ("a b", ("a b",))],
)
def test_a_value_is_written_as_it_would_be_typed(value: Any, words: tuple[str, ...]) -> None:
    assert flags.tokens(value) == words


def test_where_an_unknown_name_stands_is_said() -> None:
    with pytest.raises(UsageError) as caught:
        flags.check_names(["num_envs", "inner.raet"], KNOWN, "some.json")
    assert str(caught.value) == "unknown option inner.raet in some.json; did you mean 'inner.rate'?"
