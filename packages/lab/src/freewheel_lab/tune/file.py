"""The config file of a tuning: the options that were chosen, in the form that `train --config` reads, with the reasons."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from freewheel.config import flags, vocabulary
from freewheel.config.resolve import Config
from freewheel.errors import UsageError
from freewheel.files import disk
from freewheel.run.advice.prospects import words
from freewheel_lab.tune.result import Tuning
from freewheel_lab.tune.search import TuningCandidate

MARK = "Written by freewheel tune"


def check_place(path: Path) -> None:
    """UsageError if the file cannot be written there, or would replace one that no tuning wrote."""
    if path.suffix not in (".toml", ".json"):
        raise UsageError(f"--out must end in .toml or .json, not {path.name}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--out {path}: there is no directory {path.parent}")
    if path.exists() and MARK not in path.read_text(errors="replace")[:4096]:
        raise UsageError(f"{path} exists and was not written by freewheel tune: choose another --out or remove it")


def options_of(config: Config, chosen: TuningCandidate) -> dict[str, Any]:
    """What the file holds: the options that were chosen, after those of the file that was given, by their dotted names."""
    values = flags.flatten({name: value for name, value in config.to_json().items() if name != "sources"})
    args = {f"{vocabulary.FREE}{key}": value for key, value in config.env.args.items()}
    read = [name for name, source in config.sources.items() if source.startswith("file ")]
    own = flags.option_types(type(config.collector))
    kept = {name: (values | args)[name] for name in read if name in values | args and name not in ("env", "mode", *own)}
    fixed = {name: value for name, value in flags.values(chosen.plan.config.collector).items() if name in read}
    return {**kept, **{name: value for name, value in fixed.items() if value is not None}, **chosen.options}


def command(config: Config, chosen: TuningCandidate, path: Path) -> str:
    """What to type to train with the file."""
    held = options_of(config, chosen)
    own = chosen.plan.config  # with the options of its mode that were given
    left = {name: source for name, source in own.sources.items() if name not in held and not source.startswith("file ")}
    return shlex.join(["freewheel", "train", *words(replace(own, sources=left)), "--config", str(path)])


def write(tuning: Tuning, path: Path) -> None:
    """Write the file; `tuning` is told where it is and what to type."""
    chosen = tuning.chosen
    assert chosen is not None, "there is a setting"
    tuning.command = command(tuning.config, chosen, path)
    options, why = options_of(tuning.config, chosen), [f"{MARK}: {tuning.sentence}.", f"To use it: {tuning.command}"]
    text = _json(options, why) if path.suffix == ".json" else _toml(options, why)
    disk.deliver(path, text.encode())
    tuning.file = str(path)


def _toml(options: dict[str, Any], why: list[str]) -> str:
    lines = [f"# {' '.join(line.split())}" for line in why]
    for name, value in options.items():
        name = f"env_args.{name.removeprefix(vocabulary.FREE)}" if name.startswith(vocabulary.FREE) else name
        lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _json(options: dict[str, Any], why: list[str]) -> str:
    """`sources` is where a file says why; it is not read as an option."""
    plain = {name: value for name, value in options.items() if not name.startswith(vocabulary.FREE)}
    args = {name.removeprefix(vocabulary.FREE): value for name, value in options.items() if name not in plain}
    told = ({"env_args": args} if args else {}) | {"sources": {"tune": " ".join(why)}}
    return json.dumps({**plain, **told}, indent=2) + "\n"
