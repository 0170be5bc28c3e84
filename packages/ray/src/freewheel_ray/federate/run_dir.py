"""The run directory of a federation. It holds averages as checkpoints, metrics, the state for resuming, and the summary.

config.json, checkpoints/, metrics.jsonl, summary.json    as in any run; each row of metrics describes a round
federation.json           the rounds, and the options and state of each site
federation.safetensors    the complete newest average
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from freewheel.core import NDArray, Snapshot
from freewheel.files import disk, signatures
from freewheel.run.checkpoints import checkpoint
from freewheel.run.naming import METRICS, SUMMARY
from freewheel.run.plan import Plan
from freewheel.run.planning import print_line
from freewheel.run.saved import RunDirectory
from freewheel.sinks.jsonl import JsonlSink
from freewheel_ray.federate.average import weights_of
from freewheel_ray.federate.options import FEDERATION, SITES

AVERAGE = "federation.safetensors"


class FederationRunDir:
    """The run directory of a federation."""

    def __init__(self, planned: Plan) -> None:
        self._policy = planned.policy
        self.path = planned.path
        self._directory = RunDirectory(planned, print_line)
        self._metrics = JsonlSink(self.path / METRICS, print_line)
        self.problems: list[str] = []
        with suppress(OSError):
            checkpoint.make_private(
                self.path / SITES
            )  # marks the directory as a federation before its first round ends
        self._directory.keep()

    def snapshot(self, version: int, learned: Mapping[str, NDArray]) -> Snapshot:
        """Return the policy after this many rounds."""
        return Snapshot(version, weights_of(learned, self._policy))

    def save(self, step: int, snapshot: Snapshot, *, best: bool = False) -> Path | None:
        """Save a checkpoint."""
        return self._directory.save(step, snapshot, best=best)

    def keep(self, about: Mapping[str, Any], learned: Mapping[str, NDArray]) -> None:
        """Save the state for resuming. A failing disk does not end the federation."""
        try:
            disk.replace(self.path / AVERAGE, checkpoint.encode_arrays(learned))
            signed = {**about, signatures.FIELD: signatures.signature("federation", about)}
            disk.replace(self.path / FEDERATION, (json.dumps(signed, indent=2) + "\n").encode())
        except OSError as error:
            self.problems.append(f"{self.path / FEDERATION} could not be written: {error.strerror}")

    def row(self, row: Mapping[str, Any]) -> None:
        """Write the metrics of a round."""
        self._directory.keep()
        self._metrics.write(row)

    def close(self, summary: Mapping[str, Any]) -> None:
        problems = [*summary["problems"], *self._directory.problems, self._metrics.problem, *self.problems]
        self._directory.write(SUMMARY, {**summary, "problems": list(filter(None, problems))})
        with suppress(OSError):
            self._metrics.close(summary)
