"""Writes the typed keyword arguments of `freewheel.train` from the options of all our algorithms, modes and worlds.

`python -m freewheel.config.signature` writes arguments.py; tests/test_architecture.py compares it with the options.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from freewheel.collect.mode import MODES
from freewheel.config import flags
from freewheel.config.resolve import AUTO, options_of
from freewheel.envs.family import WORLDS
from freewheel.learn.spec import ALGORITHMS
from freewheel.registry import names_of_packages

FILE = Path(__file__).with_name("arguments.py")
HEADER = '''\
"""The keyword arguments of `freewheel.train`, for editors and type checkers; nothing imports this at run time.

`python -m freewheel.config.signature` writes this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import numpy.typing as npt

Table: TypeAlias = Sequence[Sequence[float]] | npt.NDArray[Any]  # [K, C]
'''
PARAMETERS = ("env", "hooks", "sinks")  # separate parameters of train()
PATHS = ("config", "init", "runs_dir")
LISTS = ("device",)  # several values in one word; from Python also a list


def source() -> str:
    """Return the text of arguments.py."""
    groups: dict[str, dict[str, str]] = {"": {}}
    for name, kinds in _types().items():
        group, _, option = name.rpartition(".")
        groups.setdefault(group, {})[option] = _union(part for kind in kinds for part in _parts(kind))
    modes = sorted([*MODES.ours, *names_of_packages("modes")])
    top = groups.pop("")
    top |= {"algo": _literal(ALGORITHMS.ours), "mode": _literal([AUTO, *modes]), "env_args": "Mapping[str, Any]"}
    top |= dict.fromkeys(LISTS, "str | Sequence[str]")
    top |= dict.fromkeys(PATHS, f"str | {Path.__name__}") | {name: _class_name(name) for name in groups}
    groups["policy"]["module"] = "str | Callable[..., Any]"
    parts, named = list[str](), sorted(groups, key=lambda name: len(groups[name]))
    for name in named:
        base = next((one for one in reversed(named) if groups[one].items() < groups[name].items()), "")
        own = dict(option for option in groups[name].items() if option not in groups.get(base, {}).items())
        kind = _class_name(base) if base else "TypedDict"
        parts.append(_typed_dict(_class_name(name), f"Options of {name}.", own, kind))
    text = "Options of a run, which `freewheel train --help` describes."
    return "\n\n".join([HEADER, *parts, _typed_dict("TrainOptions", text, top)])


def _types() -> Mapping[str, list[Any]]:
    """Return every option of this package's algorithms, modes and worlds, with all types that it has."""
    found: dict[str, list[Any]] = {}
    for algo in ALGORITHMS.ours:
        for mode in MODES.ours:
            for family in WORLDS.ours.values():
                for name, kind in flags.option_types(options_of(algo, mode, family)).items():
                    kinds = found.setdefault(name, [])
                    if kind not in kinds:
                        kinds.append(kind)
    return {name: kinds for name, kinds in found.items() if name not in PARAMETERS}


def _parts(kind: Any) -> list[str]:
    """Return a type, or the members of a union, as text."""
    if kind is flags.Table:
        return ["Table"]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return [text for part in inner for text in _parts(part)]
    if origin is Literal:
        return [_literal(inner)]
    if origin is tuple:
        return [f"Sequence[{_union(text for part in inner if part is not Ellipsis for text in _parts(part))}]"]
    return ["None" if kind is types.NoneType else kind.__name__]


def _union(parts: typing.Iterable[str]) -> str:
    """Join the members of a union: without repetition, all literals as one, None last."""
    found, begins = list(dict.fromkeys(parts)), "Literal["
    literals = [text for text in found if text.startswith(begins)]
    if len(literals) > 1:
        values = [value for text in literals for value in json.loads(text.removeprefix("Literal"))]
        found[found.index(literals[0])] = _literal(dict.fromkeys(values))
        found = [text for text in found if text not in literals[1:]]
    return " | ".join(sorted(found, key=lambda text: text == "None"))


def _literal(values: typing.Iterable[str]) -> str:
    return f"Literal[{', '.join(map(json.dumps, values))}]"


def _class_name(group: str) -> str:
    return f"{group.upper() if group in ALGORITHMS.ours else group.title()}Options"


def _typed_dict(name: str, text: str, options: Mapping[str, str], base: str = "TypedDict") -> str:
    fields = "".join(f"    {option}: {kind}\n" for option, kind in options.items())
    return f'class {name}({base}, total=False):\n    """{text}"""\n\n{fields}'


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
