"""Where evaluation episodes are played, by the mode and by what the environment costs."""

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
    """Of an environment, as it was measured for the plan."""
    cost = plan.cost
    if cost is None:
        return Cost()
    return Cost(cost.usual, cost.duty, WORKER_MEMORY + cost.memory)


def _in_processes(plan: Plan) -> bool:
    """Whether environments are played in processes of their own, as in training."""
    return plan.env_processes > 0


@contextmanager
def open_evaluator(plan: Plan, factory: RunnerFactory) -> Iterator[Evaluator | None]:
    """Processes beside training where workers act or lanes have processes, else this process in turn with training, where
    `factory` makes the environment.

    None: no evaluations, or by reserved lanes.
    """
    options, actor = plan.config.run.evaluation, make_actor(plan.policy)
    if not options.evals or plan.spec.one_per_process:
        yield None
        return
    batched, cost = plan.config.env.batched, _cost(plan)
    separate = _in_processes(plan)
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
    forkserver.prepare(how.modules)  # it imports them while training begins
    make_env: Callable[[], Env] = partial(plan.config.env.make, lanes, fault_tolerant=True)
    make = partial(ProcessPlayer, partial(Rounds, make_env, actor, options.eval_max_steps), how, plan.spec.name)
    in_turn = plan.worker_config is None and not cost.waits
    with closing(ProcessPlayers(make, plan.spec, len(lanes), cost, in_turn=in_turn, busy=plan.workers)) as players:
        yield players


def reserved_lanes(plan: Plan, collector: Collector) -> Evaluator | None:
    """Where only one simulation can live in a process; None: evaluations have a place of their own, or there are none."""
    options = plan.config.run.evaluation
    if not options.evals or not plan.spec.one_per_process:
        return None
    if collector.eval_episodes() is None:
        raise SetupError(f"{plan.spec.name} cannot be evaluated in mode {plan.config.mode}: use --evals 0")
    return ReservedLanes(collector, options.eval_episodes, plan.spec.measures)
