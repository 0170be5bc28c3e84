"""The run directory: config.json at the start, checkpoints, and summary.json at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.core import Snapshot, to_numpy
from freewheel.errors import SetupError
from freewheel.policies.spec import PolicySpec
from freewheel.run import checkpoint


class RunDirectory:
    """A new directory, which this process alone writes to."""

    def __init__(self, path: Path, policy: PolicySpec) -> None:
        self.path, self._policy = path, policy
        try:
            checkpoint.make_private(path.parent)
            path.mkdir(mode=0o700)
        except FileExistsError:
            raise SetupError(f"run '{path.name}' was just created by another process; choose another --run") from None
        except OSError as error:
            raise SetupError(f"cannot create {path}: {error.strerror}; choose another --runs-dir") from None

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """A JSON file, whole or absent."""
        part = self.path / f".{name}.part"
        part.write_text(json.dumps(data, indent=2) + "\n")
        os.replace(part, self.path / name)

    def save(self, step: int, snapshot: Snapshot, *, best: bool = False) -> str:
        """A checkpoint of these weights; returns their fingerprint."""
        params = {name: to_numpy(value) for name, value in snapshot.params.items()}
        about = {"policy": self._policy.to_json(), "version": snapshot.version}
        checkpoint.save(self.path / "checkpoints", step, params, about, tag="best" if best else None)
        return checkpoint.fingerprint(params)
