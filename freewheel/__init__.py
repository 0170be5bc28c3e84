"""Freewheel: reinforcement learning with acting and learning uncoupled.

import freewheel
result = freewheel.train("CartPole-v1", mode="lockstep", num_envs=8, steps=100_000)
print(result.summary["best_eval"], result.path)
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from freewheel.core import Sink
    from freewheel.run.evaluate import Score
    from freewheel.run.trainer import Result, Until

__all__ = ["score", "train"]


def train(
    env: str | Callable[..., Any],
    *,
    quiet: bool = False,
    until: Until | None = None,
    sinks: Sequence[str | Sink] = (),
    **options: Any,
) -> Result:
    """Train on a Gymnasium id, 'package.module:Factory', or a class or function that returns an environment.

    Options are those of `freewheel train --help`, with underscores: steps=..., mode=..., ppo={"lr": 1e-3},
    env_args={"gravity": 9.8}. The run directory is complete when this returns or raises; Ctrl-C raises as usual.

    `until(episodes, tick)` is called after every turn of the loop with the episodes that ended in it; the run ends when it
    returns a reason, which becomes summary["ended"]. `sinks` are names of registered sinks, or core.Sink objects.
    """
    from freewheel.config.resolve import from_options
    from freewheel.run.trainer import run

    if names := [sink for sink in sinks if isinstance(sink, str)]:
        options["sinks"] = names
    own = [sink for sink in sinks if not isinstance(sink, str)]
    result = run(from_options(env, options), quiet=quiet, until=until, sinks=own)
    if result.exit_code == 130:
        raise KeyboardInterrupt
    return result


def score(run: str, *, episodes: int = 20, which: str = "best", seed: int | None = None) -> Score:
    """Score greedy episodes of a finished run; `which` weights: best, latest or a step."""
    import warnings

    from freewheel.run.saved import open_run

    saved = open_run(run)
    actor, problems = saved.actor(which)
    for text in problems:
        warnings.warn(text, stacklevel=2)
    return saved.score(actor, episodes, seed)
