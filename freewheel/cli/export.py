"""The command `freewheel export`: a trained policy as files that need no Freewheel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freewheel.cli.eval import WeightsOptions, parse
from freewheel.errors import UsageError
from freewheel.registry import Command


@dataclass(frozen=True)
class ExportOptions(WeightsOptions):
    """Write the policy of a run as files that need no Freewheel: weights, JSON, and a loader in numpy or an ONNX graph."""

    out: str = ""
    """The folder to write (default: `export` in the run's directory)."""
    format: Literal["numpy", "onnx"] = "numpy"
    """numpy: weights.safetensors, policy.json and predict.py; onnx: policy.onnx as well."""


def _run(argv: Sequence[str]) -> int:
    from freewheel.run.export import export
    from freewheel.run.planning import print_line
    from freewheel.run.policy import load

    options = parse(ExportOptions, argv, "export")
    policy = load(options.run, options.which, runs_dir=options.runs_dir, trust=options.trust)
    if not options.out and policy.path.parent.name != "checkpoints":
        raise UsageError(f"{options.run} is not a run: say where to write with --out")
    out = Path(options.out) if options.out else policy.path.parents[1] / "export"
    folder = export(policy, out, options.format)
    for path in sorted(folder.iterdir()):
        print_line(str(path))
    return 0


COMMAND = Command(
    name="export",
    argument="RUN",
    summary="write its policy for other programs: numpy, ONNX",
    options=lambda _: ExportOptions,
    run=_run,
    order=4,
)
