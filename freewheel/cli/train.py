"""The command `freewheel train`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from freewheel.registry import Command


@dataclass(frozen=True)
class ShowOptions:
    """Show what would be done."""

    dry_run: bool = False
    """Print the plan and exit."""
    print_config: bool = False
    """Print all options as JSON, in the form that --config reads, and exit."""


def _options(argv: Sequence[str]) -> type[Any]:
    from freewheel.config import flags, resolve

    options = resolve.options_type(argv)
    show: list[Any] = [("show", Annotated[ShowOptions, flags.FLAT], dataclasses.field(default_factory=ShowOptions))]
    shown = dataclasses.make_dataclass("Options", show, bases=(options,))
    shown.__doc__ = options.__doc__
    return shown


def _run(argv: Sequence[str]) -> int:
    from freewheel.config import flags, resolve

    others, own = flags.split_argv(argv, flags.option_types(ShowOptions))
    show, config = flags.build(ShowOptions, own), resolve.from_argv(others)
    if show.print_config:
        import json

        sys.stdout.write(json.dumps(config.to_json(), indent=2) + "\n")
        return 0
    from freewheel.run.plan import plan

    if show.dry_run:
        sys.stdout.write("\n".join(plan(config).lines()) + "\n")
        return 0
    from freewheel.run.trainer import run

    return run(config).exit_code


COMMAND = Command(
    name="train",
    argument="ENV",
    summary="train an agent:  freewheel train CartPole-v1 --mode lockstep --num-envs 8 --steps 100000",
    options=_options,
    run=_run,
    order=0,
)
