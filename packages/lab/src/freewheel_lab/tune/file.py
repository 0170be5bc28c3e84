"""This module writes the config file of a tuning. It holds the chosen options in the form that
`train --config` reads, and the reasons for them."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from freewheel.config import flags, translation
from freewheel.config.resolve import Config
from freewheel.errors import UsageError
from freewheel.files import disk
from freewheel.run.advice.predictions import words
from freewheel_lab.tune.result import Tuning
from freewheel_lab.tune.search import TuningCandidate

MARK = "Written by freewheel tune"


def check_place(path: Path) -> None:
    """Raise UsageError if the file cannot be written, or if it would replace a file that no tuning
    has written."""
    if path.suffix not in (".toml", ".json"):
        raise UsageError(f"--out must end in .toml or .json, not {path.name}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--out {path}: there is no directory {path.parent}")
    if path.exists() and MARK not in path.read_text(errors="replace")[:4096]:
        raise UsageError(f"{path} exists and was not written by freewheel tune; choose another --out or remove it")


def options_of(config: Config, chosen: TuningCandidate) -> dict[str, Any]:
    """Return the contents of the file by dotted names. The options of the given config file come
    first, and the chosen ones follow."""
    values = flags.flatten({name: value for name, value in config.to_json().items() if name != "sources"})
    args = {f"{translation.FREE}{key}": value for key, value in config.env.args.items()}
    read = [name for name, source in config.sources.items() if source.startswith("file ")]
    own = flags.option_types(type(config.collector))
    kept = {name: (values | args)[name] for name in read if name in values | args and name not in ("env", "mode", *own)}
    fixed = {name: value for name, value in flags.values(chosen.plan.config.collector).items() if name in read}
    return {**kept, **{name: value for name, value in fixed.items() if value is not None}, **chosen.options}


def command(config: Config, chosen: TuningCandidate, path: Path) -> str:
    """Return the command that trains with the file."""
    held = options_of(config, chosen)
    own = chosen.plan.config  # includes the given options of its mode
    left = {name: source for name, source in own.sources.items() if name not in held and not source.startswith("file ")}
    return shlex.join(["freewheel", "train", *words(replace(own, sources=left)), "--config", str(path)])


def write(tuning: Tuning, path: Path) -> None:
    """Write the file, and store its path and the command in `tuning`."""
    chosen = tuning.chosen
    assert chosen is not None, "a setting was chosen"
    tuning.command = command(tuning.config, chosen, path)
    options = options_of(tuning.config, chosen)
    why = [f"{MARK}: {tuning.sentence}.", f"To use it: {tuning.command}"]
    text = _json(options, why) if path.suffix == ".json" else _toml(options, why)
    disk.deliver(path, text.encode())
    tuning.file = str(path)


def _toml(options: dict[str, Any], why: list[str]) -> str:
    lines = [f"# {' '.join(line.split())}" for line in why]
    for name, value in options.items():
        name = f"env_args.{name.removeprefix(translation.FREE)}" if name.startswith(translation.FREE) else name
        lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _json(options: dict[str, Any], why: list[str]) -> str:
    """Return the JSON text. `sources` holds the reasons; it is not read as an option."""
    plain = {name: value for name, value in options.items() if not name.startswith(translation.FREE)}
    args = {name.removeprefix(translation.FREE): value for name, value in options.items() if name not in plain}
    extra = ({"env_args": args} if args else {}) | {"sources": {"tune": " ".join(why)}}
    return json.dumps({**plain, **extra}, indent=2) + "\n"
