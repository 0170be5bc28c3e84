"""Reinforcement learning with acting decoupled from learning.

import freewheel

result = freewheel.train("CartPole-v1", mode="lockstep", num_envs=8, steps=100_000)
print(result.summary["best_eval"], result.path)
policy = freewheel.load(result)
action, _ = policy.predict(observation)
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from typing import Any, TypedDict, Unpack

    from freewheel.config.arguments import TrainOptions
    from freewheel.run.evaluation.episodes import Score
    from freewheel.run.hooks import Hook, Run
    from freewheel.run.naming import Result
    from freewheel.run.policy import Policy
    from freewheel.run.schedule.replay import ScheduleReplay
    from freewheel.sinks.sink import Sink

    class Limits(TypedDict, total=False):
        """The limits of a run, which ends at the first one reached, and consent to import code that its files name."""

        steps: int | None
        minutes: float | None
        episodes: int | None
        trust: bool


__version__ = "0.1.0"
__all__ = ["Hook", "Policy", "Run", "load", "replay", "resume", "score", "train"]
_HOMES = {  # names that are imported at their first use
    "Hook": "freewheel.run.hooks",
    "Policy": "freewheel.run.policy",
    "Run": "freewheel.run.hooks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'freewheel' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def train(
    env: str | Callable[..., Any],
    *,
    quiet: bool = False,
    hooks: Sequence[object] = (),
    sinks: Sequence[str | Sink] = (),
    options: Mapping[str, Any] | None = None,
    trust: bool = False,
    **arguments: Unpack[TrainOptions],
) -> Result:
    """Train an agent; return the summary and the path of its run directory.

        result = freewheel.train("Pendulum-v1", algo="sac", mode="continuous", workers=2, steps=20_000, sac={"lr": 1e-3})

    env        a Gymnasium id, "package.module:Factory", or a class or function that returns an environment
    quiet      print nothing
    hooks      user code to call during the run: objects like freewheel.Hook, or "package.module:Name"
    sinks      further destinations of metrics: names of registered sinks, or objects like freewheel.sinks.sink.Sink
    options    options without a type here, by name: those of algorithms, modes and worlds of other packages
    trust      run code that the file of `config` names, even if another user wrote that file
    arguments  all other options of `freewheel train --help`, with underscores: algo, mode, steps, minutes, episodes, seed,
               num_envs, workers, evals, run, runs_dir, threads, device, env_args={"gravity": 9.8}, ppo={"lr": 1e-3},
               policy={"hidden": [64, 64]}, ...

    However training ends, the run directory is complete. A failure is raised; Ctrl-C raises KeyboardInterrupt.
    """
    from freewheel.config.resolve import answers_in_python, from_options
    from freewheel.run.trainer import run

    given = {**(options or {}), **arguments}
    if names := [sink for sink in sinks if isinstance(sink, str)]:
        given["sinks"] = names
    own = [sink for sink in sinks if not isinstance(sink, str)]
    with answers_in_python():
        result = run(from_options(env, given, trust=trust), quiet=quiet, hooks=hooks, sinks=own)
    if result.exit_code == 130:
        raise KeyboardInterrupt
    return result


def resume(
    run: str | PathLike[str] | Result,
    *,
    checkpoint: str | int = "",
    env: str | Callable[..., Any] | None = None,
    quiet: bool = False,
    hooks: Sequence[object] = (),
    sinks: Sequence[Sink] = (),
    **limits: Unpack[Limits],
) -> Result:
    """Resume a run in its own directory, from its newest checkpoint, with its own options.

        freewheel.resume("CartPole-v1-ppo-lockstep", steps=200_000)

    run         a name under runs/, a path, what train() returned, or the path of a checkpoint
    limits      steps, minutes, episodes: new limits for all its sessions together (default: unchanged)
    checkpoint  the step of the checkpoint to resume from (default: the newest)
    env         the environment, if it was defined in a script or a notebook and cannot be found by its name
    trust       run code that the run names, even if you did not create the run on this machine
    quiet, hooks, sinks   as in train(); pass again the hooks and sinks that were objects

    A run with nothing left to do is not started; its existing result is returned.
    """
    import dataclasses

    from freewheel.config import flags
    from freewheel.config.resolve import LimitOptions, all_names
    from freewheel.run.checkpoints.resume import ResumeSettings
    from freewheel.run.checkpoints.resume import resume as go_on

    given: dict[str, Any] = {**limits}
    trust = given.pop("trust", False)
    known = dict.fromkeys(field.name for field in dataclasses.fields(LimitOptions))
    flags.check_names(given, known, "resume()", dict.fromkeys(all_names(), "a run continues with the options it has"))
    settings = ResumeSettings(limits=LimitOptions(**given), which=str(checkpoint), env=env, trust=trust)
    again = go_on(run, settings, quiet=quiet, hooks=hooks, sinks=sinks)
    if again.exit_code == 130:
        raise KeyboardInterrupt
    return again


def load(run: str | PathLike[str] | Result, which: str | int = "", *, env: Any = None, trust: bool = False) -> Policy:
    """Load the trained policy of a run, with `predict`. It needs no environment.

    `run` is a name under runs/, a path, a train() result, a checkpoint (RUN@STEP or its path), or a folder written by
    `freewheel export`. `which` weights: best (default), latest or a step. `env`, the training environment, is needed
    only for runs saved without their spaces. `trust`: import the run's network (--policy.module), even if you did not
    save it on this machine.
    """
    from freewheel.run.policy import load

    return load(run, which, env=env, trust=trust)


def score(
    run: str | PathLike[str] | Result,
    *,
    env: str | Callable[..., Any] | None = None,
    episodes: int = 20,
    which: str | int = "",
    seed: int | None = None,
    trust: bool = False,
) -> Score:
    """Score greedy episodes of a run. `which` selects the weights: best (default), latest or a step.

    `env` (a class, a function, an id) replaces the run's environment; it is needed if that was defined in a script or a
    notebook. `trust`: run code that the run names, even if you did not create the run on this machine.
    """
    import warnings

    from freewheel.run.saved import open_run

    saved = open_run(run, env=env, which=str(which), trust=trust)
    actor, problems = saved.actor()
    for text in problems:
        warnings.warn(text, stacklevel=2)
    found = saved.score(actor, episodes, seed)
    if found.warning:
        warnings.warn(found.warning, stacklevel=2)
    return found


def replay(
    run: str | PathLike[str] | Result,
    *,
    env: str | Callable[..., Any] | None = None,
    until: int | None = None,
    out: str | PathLike[str] | None = None,
    hooks: Sequence[object] = (),
    inline: bool = False,
    trust: bool = False,
) -> ScheduleReplay:
    """Repeat the learning of a recorded run (train(..., record_schedule=True)) bit for bit, at most to step `until`.

        result = freewheel.replay("runs/CartPole-v1-ppo-continuous")
        print(result.identical, result.difference)

    env      as for score()
    out      a new directory for the weights at the end of the replay; the run itself is not changed
    hooks    the hooks that were given to train()
    inline   run environments in this process, so that a debugger can step into them
    trust    run code that the run names, even if you did not create the run on this machine
    """
    from pathlib import Path

    from freewheel.run.saved import open_run
    from freewheel.run.schedule.replay import Until, replay

    where = None if out is None else Path(out)
    stop = Until(steps=until)
    saved = open_run(run, env=env, trust=trust, use="train")
    return replay(saved, until=stop, out=where, hooks=hooks, inline=inline)
