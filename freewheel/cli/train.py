"""The command `freewheel train`."""

from __future__ import annotations

import itertools
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freewheel.cli import campaigns
from freewheel.errors import UsageError, nearest
from freewheel.files.stdout import lasting_output, loading
from freewheel.registry import Command
from freewheel.transport.learners.rank import of_torchrun

if TYPE_CHECKING:
    from freewheel.config.find import Option


@dataclass(frozen=True)
class CommandOptions:
    """Options of the command itself."""

    resume: str = ""
    """Continue this run instead, as `freewheel resume RUN` does; only options of `freewheel resume` can be given."""
    dry_run: bool = False
    """Check the options as for a training, print the plan and exit."""
    print_config: bool = False
    """Print all options as JSON, in the form that --config reads, and exit."""
    trust: bool = False
    """Run code that the --config file names (an environment, hooks, a network, ...), even if you did not write it."""


def _options(argv: Sequence[str]) -> type[Any]:
    from freewheel.config import flags, resolve

    return flags.with_own(resolve.options_type(argv), *_own_types())


def _own_types() -> list[type[Any]]:
    """Return the option classes of the command and of every campaign."""
    return [CommandOptions, *(campaign.options for campaign in campaigns.CAMPAIGNS.values())]


def _help(argv: Sequence[str]) -> int:
    """Show the options of any mode, algorithm and world that match the word after --help, else this command line's."""
    import gymnasium

    from freewheel.config import find, flags
    from freewheel.envs.family import WORLDS, register_ids

    register_ids()
    known = find.all_options(*_own_types())
    word = next((after for flag, after in itertools.pairwise(argv) if flag in ("-h", "--help")), "-")
    is_env = word in gymnasium.registry
    if not is_env and not word.startswith("-") and (found := _about(word, known)):
        sys.stdout.write("\n".join(line for option in found for line in option.lines()) + "\n")
        return 0
    if not (is_env or word in WORLDS or re.search(r"^-|[:/]|\.py$|-v\d+$", word)):  # not an environment either
        near = nearest(word, (option.flag.removeprefix("--") for option in known), "; freewheel train --help lists all")
        raise UsageError(f"nothing in the help of train is about '{word}'{near}")
    env = next(iter(WORLDS[word].ids), word) if word in WORLDS else word
    options = _options(argv if word.startswith("-") else [env, *argv])
    flags.show_help(options, "freewheel train ENV")
    shown = {f"--{name.replace('_', '-')}" for name in flags.option_types(options)}
    others = " ".join(option.flag for option in known if option.flag not in shown)
    told = f"Options of other modes, algorithms and environments: {others}"
    sys.stdout.write(textwrap.fill(told, find.WIDTH, break_on_hyphens=False, subsequent_indent="  ") + "\n\n")
    sys.stdout.write("freewheel train --help WORD finds options by name or subject, e.g. --help max-lag\n")
    return 0


def _about(word: str, known: Sequence[Option]) -> list[Option]:
    """Return the options that a word of another library means in any algorithm, and those that contain the word."""
    from freewheel.config import find, flags, synonyms, translation
    from freewheel.learn.spec import ALGORITHMS

    name, names = flags.canonical(word.lstrip("-")), [flags.canonical(option.flag[2:]) for option in known]
    owners = ALGORITHMS if name in synonyms.LEARNER else ()
    meant = {synonyms.learner_option(name, algo, names) for algo in owners}
    found = find.matching(translation.aliases().get(name, word), known)
    return [*(one for one, full in zip(known, names, strict=True) if full in meant and one not in found), *found]


def _run(argv: Sequence[str]) -> int:
    from freewheel.config import flags

    types = {name: kind for own in _own_types() for name, kind in flags.option_types(own).items()}
    others, given = flags.split_argv(argv, types)
    words, theirs = campaigns.separated(given)
    own = flags.build(CommandOptions, words)
    campaign = campaigns.chosen(theirs)
    trains = not (own.dry_run or own.print_config)
    if trains and ((place := of_torchrun()) is None or not place.rank):  # only the first of several learners prints it
        loading()
    from freewheel.config import resolve

    if own.resume:
        return _resume(own, others, alone=campaign is None)
    if campaign is not None:
        kind, options = campaign
        return kind.train(options, campaigns.CampaignRequest(others, own.dry_run, own.print_config, own.trust))
    config = resolve.from_argv(others, trust=own.trust, use="nothing" if own.print_config else "train")
    if own.print_config:
        sys.stdout.write(config.to_text())
        return 0
    if own.dry_run:
        from freewheel.run.planning import print_line
        from freewheel.run.trainer import check

        print_line("\n".join(check(config).lines()))
        return 0
    if not config.env.on_device:  # the server process starts while the imports below run; both take about as long
        from freewheel.envs.family import imported_by_workers
        from freewheel.transport import forkserver

        seconds = 60 * (config.run.budget.minutes or math.inf)
        forkserver.prepare(imported_by_workers(config.env), min(config.env.timeouts.construct, seconds))
    from freewheel.run.trainer import run

    with lasting_output():
        return run(config).exit_code


def _resume(own: CommandOptions, argv: Sequence[str], *, alone: bool) -> int:
    from freewheel.cli.resume import resume_with

    if not alone or own != CommandOptions(resume=own.resume, trust=own.trust):
        others = "".join(f"--{name}, " for name in campaigns.CAMPAIGNS)
        raise UsageError(f"--resume continues one run: leave out {others}--dry-run and --print-config")
    return resume_with([*argv, *(["--trust"] if own.trust else [])], own.resume)


COMMAND = Command(
    name="train",
    argument="ENV",
    summary="train an agent:  freewheel train CartPole-v1 --mode lockstep --num-envs 8 --steps 100000",
    options=_options,
    run=_run,
    order=0,
    help=_help,
)
