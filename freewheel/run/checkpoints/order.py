"""Which save of a run made a checkpoint: a number in its manifest. No clock is asked, because it may step."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from freewheel.errors import FileError
from freewheel.files.read import json_object

MOST = 10**12  # saves of a run, many a second for years: a manifest that claims more is damaged


class SaveOrder(NamedTuple):
    """The place of a checkpoint among all that a run has saved."""

    number: int = 0  # 1 for the first one; 0: not known
    furthest: int = -1  # the last step that any save up to this one has had, also those that are gone

    @classmethod
    def read(cls, manifest: Path) -> SaveOrder:
        """What a manifest says; where it says nothing or is damaged, the place is not known."""
        try:
            found = json_object(manifest)
        except FileError:
            return cls()
        number, furthest = found.get("order"), found.get("furthest")
        if type(number) is not int or type(furthest) is not int or not 0 < number < MOST:
            return cls()
        return cls(number, furthest)

    def to_json(self) -> dict[str, int]:
        return {"order": self.number, "furthest": self.furthest} if self.number else {}
