"""The command `freewheel eval`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from freewheel.cli.saved import RunOptions, open_policy, parse
from freewheel.registry import Command

if TYPE_CHECKING:
    from rich.console import Console

    from freewheel.envs.family import EvalProtocol

EPISODES = 20


@dataclass(frozen=True)
class EvalOptions(RunOptions):
    """Score the greedy policy of a run."""


def _protocols() -> Mapping[str, EvalProtocol]:
    from freewheel.envs.family import WORLDS

    return {one.name: one for family in WORLDS.entries.values() for one in family.evaluation.protocols}


def _options() -> type[Any]:
    """With a switch for every protocol of a world family."""
    from freewheel.config import flags

    protocols = _protocols().values()
    texts = {one.name: f"Use {one.help} ({one.episodes} episodes, seed {one.seed} by default)." for one in protocols}
    switches = [(name, Annotated[bool, flags.named(description=text)], False) for name, text in texts.items()]
    options = dataclasses.make_dataclass("EvalOptions", switches, bases=(EvalOptions,), frozen=True)
    options.__doc__ = EvalOptions.__doc__
    return options


def _run(argv: Sequence[str]) -> int:
    from rich.console import Console

    options = parse(_options(), argv, "eval")
    console = Console(highlight=False)
    chosen = [protocol for name, protocol in _protocols().items() if getattr(options, name)]
    if chosen:
        _run_protocol(chosen[0], options, console)
    else:
        _score(options, console)
    return 0


def _score(options: EvalOptions, console: Console) -> None:
    """Greedy episodes as one line, and what the world family compares them with."""
    from freewheel.envs.family import family_of

    run, actor = open_policy(options, console)
    episodes = options.episodes or EPISODES
    score, name = run.score(actor, episodes, options.seed), run.config.env.id
    console.print(
        f"{name}: mean {score.mean:.1f} ± {score.spread:.1f} over {episodes} greedy episodes "
        f"(min {min(score.returns):.1f}, max {max(score.returns):.1f}, "
        f"length {sum(score.lengths) / len(score.lengths):.0f})",
        soft_wrap=True,
        markup=False,
    )
    if (compare := family_of(run.config.env.name).evaluation.compare) is not None:
        compare(run, score.mean, console)


def _run_protocol(protocol: EvalProtocol, options: EvalOptions, console: Console) -> None:
    """The protocol's table, and its result in a file of its name."""
    run, actor = open_policy(options, console)
    seed = protocol.seed if options.seed is None else options.seed
    data, table = protocol.run(run, actor, options.episodes or protocol.episodes, seed)
    path = run.path / f"{protocol.name}.json"
    path.write_text(json.dumps({"run": run.path.name, "which": options.which, **data}, indent=2) + "\n")
    console.print(table)
    console.print(f"  {path}", markup=False, soft_wrap=True)


COMMAND = Command(
    name="eval",
    argument="RUN",
    summary="score the greedy policy of a run",
    options=lambda _: _options(),
    run=_run,
    order=1,
)
