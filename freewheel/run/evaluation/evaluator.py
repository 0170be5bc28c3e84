"""Chooses where evaluation episodes are played, by the mode and the cost of the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

from freewheel.collect.workers import WORKER_MEMORY
from freewheel.core import Collector, Env
from freewheel.errors import SetupError
from freewheel.policies.numpy_actor import make_actor
from freewheel.rollout.factory import RunnerFactory
from freewheel.run.evaluation.episodes import eval_lanes, playable
from freewheel.run.evaluation.players import (
    Cost,
    Evaluator,
    InlinePlayer,
    Players,
    ProcessPlayer,
    ProcessPlayers,
    ReservedLanes,
    Rounds,
)
from freewheel.run.plan import Plan
from freewheel.transport import forkserver


def _cost(plan: Plan) -> Cost:
    """Return the cost of the environment as measured for the plan."""
    cost = plan.cost
    if cost is None:
        return Cost()
    return Cost(cost.usual, cost.duty, WORKER_MEMORY + cost.memory)


@contextmanager
def open_evaluator(plan: Plan, factory: RunnerFactory) -> Iterator[Evaluator | None]:
    """Yield an evaluator. It uses separate processes if training does. Otherwise it takes turns with training in this
    process, and `factory` makes its environment.

    Yields None if there are no evaluations or if reserved lanes play them.
    """
    options, actor = plan.config.run.evaluation, make_actor(plan.policy)
    if not options.evals or plan.spec.one_per_process:
        yield None
        return
    batched, cost = plan.config.env.batched, _cost(plan)
    separate = plan.env_processes > 0  # as training does
    lanes = eval_lanes(plan.config.env, options.eval_episodes, *((1,) if separate else ()))
    if batched:
        cost = cost._replace(step=cost.step / len(lanes))
    if not separate:
        build = partial(
            Rounds, lambda: playable(factory.env(lanes, fault_tolerant=True)), actor, options.eval_max_steps
        )
        with closing(InlinePlayer(build)) as player:
            yield Players(lambda: player, plan.spec, len(lanes), cost, in_turn=True)
        return
    how = plan.worker_spec
    forkserver.prepare(how.modules)  # the fork server imports them while training starts
    make_env: Callable[[], Env] = partial(plan.config.env.make, lanes, fault_tolerant=True)
    make = partial(ProcessPlayer, partial(Rounds, make_env, actor, options.eval_max_steps), how, plan.spec.name)
    in_turn = plan.worker_config is None and not cost.waits
    with closing(ProcessPlayers(make, plan.spec, len(lanes), cost, in_turn=in_turn, busy=plan.workers)) as players:
        yield players


def reserved_lanes(plan: Plan, collector: Collector) -> Evaluator | None:
    """Return the evaluator of a simulation that must be alone in its process; None: reserved lanes are not used."""
    options = plan.config.run.evaluation
    if not options.evals or not plan.spec.one_per_process:
        return None
    if collector.eval_episodes() is None:
        raise SetupError(f"{plan.spec.name} cannot be evaluated in mode {plan.config.mode}: use --evals 0")
    return ReservedLanes(collector, options.eval_episodes, plan.spec.measures)
