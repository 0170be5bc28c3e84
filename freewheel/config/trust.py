"""Consent: code that a file names is imported only if the user agrees, or has written the file.

A value that is typed on a command line or passed in Python needs no other consent, nor does a file that this user's
Freewheel has written on this machine (files/signatures.py). Everything else needs --trust. Names of our worlds and of
Gymnasium's registry are not code: whoever installed them chose what they import. docs/security.md explains it to users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from freewheel.config import flags
from freewheel.config.translation import FREE, literal
from freewheel.envs.family import WorldFamily
from freewheel.files.read import show
from freewheel.files.signatures import refusal
from freewheel.registry import names_code

#: The purpose of a config: train imports everything that it names, play only the environment.
Use = Literal["train", "play", "nothing"]
#: Options whose values are never imported, whatever they look like.
PLAIN = ("config", "console", "context", "device", "init", "measures", "run", "sinks", "wandb_project")


@dataclass(frozen=True)
class Consent:
    """The user's consent, and the purpose of the config."""

    trust: bool = False  # whether all code that files name may be imported
    use: Use = "train"

    def check(self, layers: Sequence[flags.Layer], family: WorldFamily) -> None:
        """Raise ConsentError about the first code that an untrusted file names in an option that takes effect."""
        merged, _ = flags.merge(layers)
        owner = {name: layer for layer in layers for name in layer.flags}
        for name, words in merged.items():
            if not owner[name].trusted and (found := self._code(name, words, family)):
                raise refusal(owner[name].source.removeprefix("file "), f"{name} {show(found[0])}")

    def _code(self, name: str, words: flags.Tokens, family: WorldFamily) -> Sequence[str]:
        """Return the values of an option that are imported, or that are places for the environment to read or write."""
        if self.use == "nothing" or name in PLAIN:
            return []
        if name == "env":
            return [word for word in words if family.names_code(word)]
        if name.startswith(FREE):
            return [
                text for word in words for text in _texts(literal(word)) if names_code(text) or set("/\\") & set(text)
            ]
        if name == "runs_dir" and self.use == "train":
            return [word for word in words if Path(word).is_absolute() or ".." in Path(word).parts]
        return [word for word in words if names_code(word)] if self.use == "train" else []


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    inside = (
        (*value.keys(), *value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    for inner in inside:
        yield from _texts(inner)
