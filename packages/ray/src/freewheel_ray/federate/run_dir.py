"""What a federation leaves behind, in the run directory of its coordinator: averages as checkpoints, a row of metrics a round,
what it goes on from, and the summary.

    config.json, checkpoints/, metrics.jsonl, summary.json    as in any run; a row of metrics is a round
    federation.json           the rounds, the sites and their options, and what has become of each
    federation.safetensors    the newest average, all of it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from freewheel.core import NDArray, Snapshot
from freewheel.files import disk, origin
from freewheel.run.checkpoints import checkpoint
from freewheel.run.naming import METRICS, SUMMARY
from freewheel.run.plan import Plan, print_line
from freewheel.run.saved import RunDirectory
from freewheel.sinks.jsonl import JsonlSink
from freewheel_ray.federate.average import weights_of
from freewheel_ray.federate.options import FEDERATION, SITES

AVERAGE = "federation.safetensors"


class FederationRunDir:
    """The run directory of a federation."""

    def __init__(self, planned: Plan) -> None:
        self._policy, self.path = planned.policy, planned.path
        self._directory = RunDirectory(planned, print_line)
        self._metrics = JsonlSink(self.path / METRICS, print_line)
        self.problems: list[str] = []
        with suppress(OSError):
            checkpoint.make_private(self.path / SITES)  # it is known for a federation before its first round has ended
        self._directory.keep()

    def snapshot(self, version: int, learned: Mapping[str, NDArray]) -> Snapshot:
        """What acts after so many rounds."""
        return Snapshot(version, weights_of(learned, self._policy))

    def save(self, step: int, snapshot: Snapshot, *, best: bool = False) -> Path | None:
        """A checkpoint."""
        return self._directory.save(step, snapshot, best=best)

    def keep(self, about: Mapping[str, Any], learned: Mapping[str, NDArray]) -> None:
        """What the federation goes on from. A disk that fails does not end it."""
        try:
            disk.replace(self.path / AVERAGE, checkpoint.encode_arrays(learned))
            signed = {**about, origin.FIELD: origin.signature("federation", about)}
            disk.replace(self.path / FEDERATION, (json.dumps(signed, indent=2) + "\n").encode())
        except OSError as error:
            self.problems.append(f"{self.path / FEDERATION} could not be written: {error.strerror}")

    def row(self, row: Mapping[str, Any]) -> None:
        """A round."""
        self._directory.keep()
        self._metrics.write(row)

    def close(self, summary: Mapping[str, Any]) -> None:
        problems = [*summary["problems"], *self._directory.problems, self._metrics.problem, *self.problems]
        self._directory.write(SUMMARY, {**summary, "problems": list(filter(None, problems))})
        with suppress(OSError):
            self._metrics.close(summary)
