"""The command line: finds the command, shows help, and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from freewheel import __version__
from freewheel.errors import FAILED, SIGNALLED, FreewheelError
from freewheel.files.stdout import complain, discard_output, fill_standard_streams
from freewheel.registry import Command, Registry
from freewheel.transport.learners.rank import of_torchrun

COMMANDS: Registry[Command] = Registry("command", "COMMAND", "freewheel.cli")
HELP = ("-h", "--help")
#: Advice for each resource that the system can run out of.
EXHAUSTED = {
    errno.EMFILE: "use fewer workers or envs, or raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the whole system has no more; close other programs",
    errno.EAGAIN: "no more processes or threads may be started; use fewer workers or envs, or raise the limit (ulimit -u)",
    errno.ENOMEM: "use fewer workers or envs, or close other programs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    fill_standard_streams()
    # One BLAS thread is fastest for small networks. It has to be set before numpy is imported.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except FreewheelError as error:
        if (place := of_torchrun()) is None or not place.rank:  # only the first of several learners reports it
            complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:  # raised by the user's code, unless a signal has ended the command
        if isinstance(error.code, int) and error.code > SIGNALLED:
            raise
        from freewheel.run.stopping.exits import exit_called

        complain(str(exit_called(error)))
        return FAILED
    except BrokenPipeError:  # the reader of our output has closed it
        discard_output(sys.stdout)
        return 0
    except OSError as error:
        return _exhausted(error)


def _exhausted(error: OSError) -> int:
    """Report that the system has run out of something, or that a typed path is too long; return the exit code."""
    if error.errno == errno.ENAMETOOLONG:  # nothing has been started
        complain(f"{str(error.filename)[:60]}...: this path, or a name in it, is too long; choose a shorter one")
        return 2
    if error.errno not in EXHAUSTED:
        raise error
    complain(f"{os.strerror(error.errno)}: {EXHAUSTED[error.errno]}")
    return 1


def _dispatch(argv: list[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in (*HELP, "help"):
        return _help(rest)
    if name in ("-V", "--version"):
        sys.stdout.write(f"freewheel {__version__}\n")
        return 0
    from freewheel.config import synonyms

    command = COMMANDS.choose(name, synonyms.COMMANDS)
    if not any(word in HELP for word in rest):
        return command.run(rest)
    if command.help is not None:
        return command.help(rest)
    from freewheel.config import flags

    flags.show_help(command.options(rest), f"freewheel {name} {command.argument}".rstrip())
    return 0


def _help(words: list[str]) -> int:
    """Print the overview, the glossary (`freewheel help shares`) or the help of a command."""
    if words and words[0] != "shares":
        return _dispatch([words[0], "--help", *words[1:]])
    from freewheel.metrics.names import glossary

    sys.stdout.write(glossary() if words else overview())
    return 0


def overview() -> str:
    """Return the text of `freewheel --help`."""
    commands = sorted(COMMANDS.values(), key=lambda command: command.order)
    width = max(len(f"{command.name} {command.argument}") for command in commands)
    lines = [f"  {f'{command.name} {command.argument}':{width}}  {command.summary}\n" for command in commands]
    return f"""usage: freewheel COMMAND ...

Train reinforcement-learning agents with acting and learning uncoupled.

{"".join(lines)}
ENV is a Gymnasium id (CartPole-v1), package.module:Factory or path/to/file.py:Factory. RUN is a name under runs/ or a path.
freewheel COMMAND --help lists the options of a command, freewheel train --help WORD those about a word,
freewheel help shares explains the bars at the end of a run.
"""
