"""The command line: train | eval | play | workflow | doctor. Thin: every command is one function of the house."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

HELP = """\
usage: freewheel COMMAND ...

Train reinforcement-learning agents with acting and learning uncoupled.

  train ENV     train an agent:  freewheel train CartPole-v1 --mode lockstep --num-envs 8 --steps 100000
  eval RUN      score a run's greedy policy
  play RUN      watch it play
  workflow      search the best workflow of CAGE 2:  freewheel workflow search --total-episodes 20000
  doctor        what this machine has and what is missing

ENV is a Gymnasium id (CartPole-v1) or package.module:Factory. RUN is a name under runs/ or a path.
freewheel COMMAND --help lists the options of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code says how it went."""
    # One BLAS thread: small networks are fastest so, and it must be said before numpy is imported.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from freewheel.errors import FreewheelError

    try:
        code = _obey(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except FreewheelError as error:
        sys.stderr.write(f"freewheel: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _obey(argv: list[str]) -> int:
    from freewheel.errors import UsageError, nearest

    command, *rest = argv or ["--help"]
    if command in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        return 0
    if command in ("-V", "--version"):
        return _version()
    if command not in COMMANDS:
        raise UsageError(f"unknown command '{command}'{nearest(command, COMMANDS)}")
    return COMMANDS[command](rest)


def _version() -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("freewheel")
    except PackageNotFoundError:
        number = "(run from source)"
    sys.stdout.write(f"freewheel {number}\n")
    return 0


def _train(argv: list[str]) -> int:
    from freewheel.config import resolve as config

    if "--help" in argv or "-h" in argv:
        config.show_help(argv)
    dry, argv = _switch(argv, "--dry-run")
    show, argv = _switch(argv, "--print-config")
    resolved = config.from_argv(argv)
    if show:
        import json

        sys.stdout.write(json.dumps(resolved.to_json(), indent=2) + "\n")
        return 0
    from freewheel.run.plan import plan
    from freewheel.run.trainer import run

    if dry:
        sys.stdout.write("\n".join(plan(resolved).lines()) + "\n")
        return 0
    return run(resolved).exit_code


def _eval(argv: list[str]) -> int:
    from freewheel.cli.commands import EvalOptions, OfficialOptions, parse, report_official, report_score

    official, argv = _switch(argv, "--official")
    if official:
        what = "Score a run's greedy policy by the protocol of CAGE Challenge 2, on the real simulator."
        return report_official(parse(OfficialOptions, argv, "freewheel eval RUN --official", what))
    what = "Score a run's greedy policy. --official: by the protocol of CAGE Challenge 2, on the real simulator."
    return report_score(parse(EvalOptions, argv, "freewheel eval RUN", what))


def _play(argv: list[str]) -> int:
    from freewheel.cli.commands import PlayOptions, parse, show_episodes

    return show_episodes(
        parse(PlayOptions, argv, "freewheel play RUN", "FaultTolerantLanes a run's greedy policy play.")
    )


def _workflow(argv: list[str]) -> int:
    from freewheel.errors import UsageError, nearest

    command, *rest = argv or [""]
    if command in ("-h", "--help"):
        command, rest = "search", ["--help"]
    if command != "search":
        raise UsageError(f"unknown command 'workflow {command}'{nearest(command, ['search'])}")
    from freewheel.worlds.cage2.workflow.command import search_workflows

    return search_workflows(rest)


def _doctor(argv: list[str]) -> int:
    from freewheel.cli.commands import report_health
    from freewheel.errors import UsageError

    if "--help" in argv or "-h" in argv:
        sys.stdout.write(
            "usage: freewheel doctor\n\nWhat this machine has, what is missing, and what to do about it.\n"
        )
        return 0
    if argv:
        raise UsageError(f"freewheel doctor takes no arguments, not {' '.join(argv)}")
    return report_health()


def _switch(argv: list[str], flag: str) -> tuple[bool, list[str]]:
    spellings = (flag, flag.replace("-", "_").replace("__", "--"))
    return any(word in spellings for word in argv), [word for word in argv if word not in spellings]


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "train": _train,
    "eval": _eval,
    "play": _play,
    "workflow": _workflow,
    "doctor": _doctor,
}
