"""The order of a run's saves, as a number in each manifest. Clocks are not used, because they may be set back."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from freewheel.errors import FileError
from freewheel.files.read import json_object

MOST = 10**12  # saves of a run, more than any run can make: a manifest with a larger number is damaged


class SaveOrder(NamedTuple):
    """The place of a checkpoint among all saves of a run."""

    number: int = 0  # 1 for the first save; 0: not known
    furthest: int = -1  # the highest step of all saves up to this one, including removed ones

    @classmethod
    def read(cls, manifest: Path) -> SaveOrder:
        """Read the place from a manifest; it is not known if the manifest lacks it or is damaged."""
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
