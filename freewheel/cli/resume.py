"""The command `freewheel resume`: continues a run from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freewheel.cli import campaigns
from freewheel.cli.eval import parse
from freewheel.errors import UsageError
from freewheel.files.stdout import lasting_output, loading
from freewheel.registry import Command


@dataclass(frozen=True)
class ResumeOptions:
    """Continue a run in its own directory, from its newest checkpoint, with the options it has."""

    run: str = ""
    """The run: a name under --runs-dir, a path, RUN@STEP or the path of a checkpoint; also the first or last word."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""
    checkpoint: str = ""
    """The checkpoint to continue from: latest, or the number of a step (default: latest, or the one that RUN names)."""
    steps: int | None = None
    """A new limit of environment steps for all sessions of the run together (default: the limit that it has)."""
    minutes: float | None = None
    """A new limit of minutes for all its sessions together."""
    episodes: int | None = None
    """A new limit of finished episodes for all its sessions together."""
    env: str = ""
    """The environment, if a script or a notebook defined it (./file.py:Toy)."""
    trust: bool = False
    """Run code that the run names (its environment, its hooks, ...), even if you did not make it on this machine."""

    def __post_init__(self) -> None:
        if self.checkpoint == "best":
            raise UsageError("--checkpoint best has weights only: use train --init RUN to start from them")


def _read(argv: Sequence[str], run: str) -> ResumeOptions:
    from freewheel.config import flags
    from freewheel.config.resolve import all_names

    own = flags.option_types(ResumeOptions)
    taken = ", ".join(map(flags.as_flag, own))
    answers = dict.fromkeys(all_names(), f"a run continues with the options it has; resume takes {taken}")
    if not run:
        return parse(ResumeOptions, argv, "resume", answers)
    envs, given = flags.read_argv(argv, own, answers=answers)
    if given.setdefault("run", (run,)) != (run,):
        raise UsageError(f"give one run, not {run} and {given['run'][0]}")
    if len(named := [*envs, *given.get("env", ())]) > 1:
        raise UsageError(f"--resume {run} continues in one environment, not in {' and '.join(named)}")
    return flags.build(ResumeOptions, given | ({"env": (envs[0],)} if envs else {}))


def _check_env(options: ResumeOptions) -> None:
    """Raise UsageError if `train ENV --resume RUN` names another environment, unless a script defined the run's."""
    from freewheel.envs.gym import GymConfig, absolute
    from freewheel.files.read import json_object
    from freewheel.run.naming import CONFIG, locate

    there = GymConfig(str(json_object(locate(options.run, options.runs_dir).run / CONFIG).get("env"))).label
    if not there.startswith("__main__:") and "<" not in there and there != GymConfig(absolute(options.env)).label:
        moved = f"freewheel resume {options.run} --env {options.env} if it is the same one, moved or renamed"
        remedy = f"leave {options.env} out, say {moved}, or begin a new run with --init {options.run}"
        raise UsageError(f"the environment of {options.run} is {there}, not {options.env}: {remedy}")


def _resume_campaign(options: ResumeOptions) -> int | None:
    """Resume a campaign and return its exit code; None if the run is not a campaign."""
    from freewheel.run.naming import find_run

    path = find_run(options.run.partition("@")[0], options.runs_dir)
    if (campaign := campaigns.owner(path)) is None or campaign.resume is None:
        return None
    if options != ResumeOptions(run=options.run, runs_dir=options.runs_dir, trust=options.trust):
        taken = "give only the run, --runs-dir and --trust"
        raise UsageError(f"{path.name} is a run of --{campaign.name} and keeps the options it has: {taken}")

    with lasting_output():
        return campaign.resume(find_run(options.run, options.runs_dir), options.trust)


def resume_with(argv: Sequence[str], run: str = "") -> int:
    """Run the command. If `run` is given, a word without a flag is the environment, as it is for `train`."""
    if not run:  # `train --resume` has already called it
        loading()
    from freewheel.config.resolve import LimitOptions
    from freewheel.run.checkpoints.resume import ResumeSettings, resume

    options = _read(argv, run)
    if run and options.env:
        _check_env(options)
    if options.run and (code := _resume_campaign(options)) is not None:
        return code
    limits = LimitOptions(steps=options.steps, minutes=options.minutes, episodes=options.episodes)
    settings = ResumeSettings(
        limits=limits, which=options.checkpoint, runs_dir=options.runs_dir, env=options.env or None, trust=options.trust
    )
    with lasting_output():
        return resume(options.run, settings).exit_code


COMMAND = Command(
    name="resume",
    argument="RUN",
    summary="continue a run from its newest checkpoint, perhaps for longer (--steps)",
    options=lambda _: ResumeOptions,
    run=resume_with,
    order=1,
)
