"""The command `freewheel train`."""

from __future__ import annotations

import itertools
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from freewheel.errors import Range, UsageError, nearest
from freewheel.federate.options import FederateOptions
from freewheel.files.output import lasting_output, loading
from freewheel.registry import Command
from freewheel.transport.learners.place import of_torchrun

if TYPE_CHECKING:
    from freewheel.config.find import Option
    from freewheel.config.resolve import Config


@dataclass(frozen=True)
class CommandOptions(FederateOptions):
    """Several runs, or none."""

    seeds: str = ""
    """Run the same command with each of these seeds (1..5 or 1,2,7), side by side as the cores allow, and report mean and
    interval of their evaluations. The runs are NAME-s1, NAME-s2, ...; the table is also in NAME-seeds.json."""
    jobs: Annotated[int | None, Range(least=1, most=10_000)] = None
    """Runs of --seeds side by side (default: as many as the cores can serve)."""
    resume: str = ""
    """Go on with this run instead, as `freewheel resume RUN` does: only --steps, --minutes and --episodes can be given."""
    dry_run: bool = False
    """Print the plan and exit; what `train` would refuse is refused."""
    print_config: bool = False
    """Print all options as JSON, in the form that --config reads, and exit."""
    trust: bool = False
    """Run code that the file of --config names (an environment, hooks, a network, ...), though you have not written it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jobs is not None and not self.seeds:
            raise UsageError("--jobs is the number of runs of --seeds side by side; add --seeds or leave it out")


def _options(argv: Sequence[str]) -> type[Any]:
    from freewheel.config import flags, resolve

    return flags.with_own(resolve.options_type(argv), CommandOptions)


def _help(argv: Sequence[str]) -> int:
    """The options that a word after --help finds in any mode, algorithm and world; else those of this command line."""
    import gymnasium

    from freewheel.config import find, flags
    from freewheel.envs.family import WORLDS, register_ids

    register_ids()
    known = find.all_options(CommandOptions)
    word = next((after for flag, after in itertools.pairwise(argv) if flag in ("-h", "--help")), "-")
    is_env = word in gymnasium.registry
    if not is_env and not word.startswith("-") and (found := _about(word, known)):
        sys.stdout.write("\n".join(line for option in found for line in option.lines()) + "\n")
        return 0
    if not (is_env or word in WORLDS or re.search(r"^-|[:/]|\.py$|-v\d+$", word)):  # no environment either
        near = nearest(word, (option.flag.removeprefix("--") for option in known), "; freewheel train --help lists all")
        raise UsageError(f"nothing in the help of train is about '{word}'{near}")
    env = next(iter(WORLDS[word].ids), word) if word in WORLDS else word
    options = _options(argv if word.startswith("-") else [env, *argv])
    flags.show_help(options, "freewheel train ENV")
    shown = {f"--{name.replace('_', '-')}" for name in flags.option_types(options)}
    others = " ".join(option.flag for option in known if option.flag not in shown)
    told = f"Options of other modes, algorithms and environments: {others}"
    sys.stdout.write(textwrap.fill(told, find.WIDTH, break_on_hyphens=False, subsequent_indent="  ") + "\n\n")
    sys.stdout.write("freewheel train --help WORD tells of options by name or subject, e.g. --help max-lag\n")
    return 0


def _about(word: str, known: Sequence[Option]) -> list[Option]:
    """The options that a word of another library stands for in any algorithm, and those that have the word."""
    from freewheel.config import find, flags, vocabulary, words
    from freewheel.learn.spec import ALGORITHMS

    name, names = flags.canonical(word.lstrip("-")), [flags.canonical(option.flag[2:]) for option in known]
    owners = ALGORITHMS if name in words.LEARNER else ()
    meant = {words.learner_option(name, algo, names) for algo in owners}
    found = find.matching(vocabulary.aliases().get(name, word), known)
    return [*(one for one, full in zip(known, names, strict=True) if full in meant and one not in found), *found]


def _run(argv: Sequence[str]) -> int:
    from freewheel.config import flags

    others, given = flags.split_argv(argv, flags.option_types(CommandOptions))
    own = flags.build(CommandOptions, given)
    trains = not (own.dry_run or own.print_config)
    if trains and ((place := of_torchrun()) is None or not place.rank):  # the first of several learners tells for all
        loading()
    from freewheel.config import resolve

    if own.resume:
        return _resume(own, others)
    if own.federate is not None:
        return _federate(others, own)
    if own.seeds:
        return _run_seeds(others, own)
    config = resolve.from_argv(others, trust=own.trust, use="nothing" if own.print_config else "train")
    if own.print_config:
        return _print_config(config)
    if own.dry_run:
        from freewheel.run.plan import print_line
        from freewheel.run.trainer import check

        print_line("\n".join(check(config).lines()))
        return 0
    if not config.env.on_device:  # a process needs about as long to start as what follows to be imported
        from freewheel.envs.family import imported_by_workers
        from freewheel.transport import forkserver

        seconds = 60 * (config.run.budget.minutes or math.inf)
        forkserver.prepare(imported_by_workers(config.env), min(config.env.timeouts.construct, seconds))
    from freewheel.run.trainer import run

    with lasting_output():
        return run(config).exit_code


def _resume(own: CommandOptions, argv: Sequence[str]) -> int:
    from freewheel.cli.resume import resume_with

    if own != CommandOptions(resume=own.resume, trust=own.trust):
        raise UsageError("--resume goes on with one run: leave out --seeds, --federate, --dry-run and --print-config")
    return resume_with([*argv, *(["--trust"] if own.trust else [])], own.resume)


def _federate(argv: Sequence[str], own: CommandOptions) -> int:
    from freewheel.federate import start
    from freewheel.run.plan import print_line

    if own.seeds or own.print_config:
        raise UsageError("--federate is one run of many sites: leave out --seeds, --jobs and --print-config")
    federation = start.read(argv, own.federation, trust=own.trust)
    if own.dry_run:
        print_line("\n".join(federation.lines()))
        return 0
    with lasting_output():
        return start.train(federation)


def _run_seeds(argv: Sequence[str], own: CommandOptions) -> int:
    from freewheel.cli import seeds
    from freewheel.config import resolve

    numbers = seeds.read(own.seeds)
    trust = own.trust or own.print_config
    if resolve.from_argv(argv, trust=trust).sources.get("seed") == "flag":
        raise UsageError("give --seed or --seeds, not both")
    config = resolve.from_argv([*argv, "--seed", str(numbers[0])], trust=trust)
    if own.print_config:
        return _print_config(config)
    from freewheel.run.plan import print_line
    from freewheel.run.trainer import check

    planned = check(config)
    if own.dry_run:
        group = seeds.group_of(planned, numbers, own.jobs)
        print_line("\n".join(seeds.plan_lines(planned, group)))
        return 0
    if config.among:  # all runs in one mode
        argv = [*argv, "--mode", planned.config.mode]
    with lasting_output():
        trusting = [*argv, "--trust"] if own.trust else argv
        return seeds.claim(planned, numbers, own.jobs).start(trusting, config.run.output.log_every)


def _print_config(config: Config) -> int:
    import json

    sys.stdout.write(json.dumps(config.to_json(), indent=2) + "\n")
    return 0


COMMAND = Command(
    name="train",
    argument="ENV",
    summary="train an agent:  freewheel train CartPole-v1 --mode lockstep --num-envs 8 --steps 100000",
    options=_options,
    run=_run,
    order=0,
    help=_help,
)
