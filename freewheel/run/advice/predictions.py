"""Advice: the predicted speed of every mode here, and what to change about a run that has ended.

Predictions come from throughput.py. Another mode is only advised if it is faster by at least GAIN.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, TypeAlias

from freewheel.collect.mode import MODES
from freewheel.collect.workers import WORKER_MEMORY
from freewheel.config import flags, resolve, translation
from freewheel.config.resolve import Config
from freewheel.errors import FreewheelError
from freewheel.metrics.names import WORKING
from freewheel.rollout.probe import BUDGET, EnvCost, usable_cores
from freewheel.run.advice.keeping_up import way_of
from freewheel.run.advice.policy_times import PolicyClock, measure_policy
from freewheel.run.advice.throughput import NO_WIRE, Forecast, Limit, PolicyTimes, StepTimes, Way, WireTimes, forecast
from freewheel.run.plan import Plan
from freewheel.run.planning import arrange, survey_env

Measure: TypeAlias = Callable[[Plan], PolicyTimes | None]

GAIN = 1.3  # factor on env steps/s; less is not worth another command
AS_GOOD = 0.9  # share of the best mode's env steps/s; of the modes above it, the one with the least lag is advised
BY_LAG = ("sequential", "lockstep", "batch", "continuous", "episodes", "ray")  # from no lag to the most
SIDE_BY_SIDE = 16  # lanes that are measured together
SHORT_S, FEW_UPDATES = 10.0, 5  # runs with less show too little
BUSY, IDLE, LOST, EVALUATING = 0.9, 0.3, 0.1, 0.3  # shares of time or rows that are worth a remark
WAITS_FOR: Mapping[Limit, str] = {
    "envs": "the envs",
    "barrier": "the slowest env",
    "cores": "the cores",
    "learner": "the learner",
}
GIVEN = ("flag", "argument")  # the sources of options that the user has given
LAYERS = {"preset": "--preset", "file": "--config"}  # sources that are repeated as options
OTHER_RUN = ("run", "preset", "config", "env", "mode")  # not repeated, or handled separately


@dataclass(frozen=True)
class ModeRate:
    """The prediction for one mode."""

    mode: str
    plan: Plan | None = None
    forecast: Forecast | None = None  # None: not predictable
    refused: str = ""  # why this mode does not support the run

    @property
    def rate(self) -> float:
        """Return the env steps/s; 0: not known."""
        return self.forecast.rate if self.forecast is not None else 0.0

    @property
    def memory(self) -> int:
        """Return the bytes of all environments and workers."""
        if self.plan is None or self.plan.cost is None:
            return 0
        workers = self.plan.workers if self.plan.worker_config is not None else 0
        return self.plan.spec.lanes * self.plan.cost.memory + workers * WORKER_MEMORY


def step_times(config: Config, cost: EnvCost) -> StepTimes:
    """Return the times of a measured environment. For a batched environment, several lanes are measured as well."""
    return StepTimes.of(cost, survey_env(config, budget=BUDGET, lanes=SIDE_BY_SIDE) if config.env.batched else None)


def predictions(planned: Plan, env: StepTimes, policy: PolicyTimes | None = None) -> list[ModeRate]:
    """Predict every mode with its default options, from the least lag to the most. Measures the policy unless given."""
    measure: Measure = PolicyClock() if policy is None else lambda _: policy
    modes = [mode for mode in sorted(MODES, key=by_lag) if not MODES[mode].on_request or mode == planned.config.mode]
    return [_prediction(planned, mode, env, measure) for mode in modes]


def by_lag(mode: str) -> int:
    """Return the place of a mode in the order from no lag to the most."""
    return BY_LAG.index(mode) if mode in BY_LAG else len(BY_LAG)


def _prediction(planned: Plan, mode: str, env: StepTimes, measure: Measure) -> ModeRate:
    assert planned.cost is not None, "the environment has been measured"
    try:
        config = in_mode(planned.config, mode)
        there = arrange(config, planned.cost, planned.name, planned.device)
    except FreewheelError as error:
        return ModeRate(mode, refused=str(error))
    return predict(there, env, measure)


def predict(planned: Plan, env: StepTimes, measure: Measure = measure_policy, wire: WireTimes = NO_WIRE) -> ModeRate:
    """Predict the speed of this plan."""
    way = way_of(planned)
    known = bool(env.together) or not planned.config.env.batched  # cost of several lanes in one process
    policy = measure(planned) if known and way is not None else None
    if way is None or policy is None:
        return ModeRate(planned.config.mode, planned)
    return ModeRate(planned.config.mode, planned, forecast(way, env, policy, usable_cores(), wire))


def best_of(found: Sequence[ModeRate], own: str = "") -> ModeRate | None:
    """Return, of the modes about as fast as the fastest, the mode `own` or else the first, which has the least lag."""
    fastest = max((one.rate for one in found), default=0.0)
    good = [one for one in found if one.rate > 0 and one.rate >= AS_GOOD * fastest]
    return next((one for one in good if one.mode == own), good[0] if good else None)


def times(gain: float) -> str:
    """Write a factor, such as 1.4x or 12x."""
    return f"{gain:.0f}x" if gain >= 9.5 else f"{gain:.1f}x"


def in_mode(config: Config, mode: str) -> Config:
    """Return the run in this mode, which may be its present one, with the default options of the mode."""
    return replace(resolve.from_argv(words(config, mode)), env=config.env)


def words(config: Config, mode: str = "") -> list[str]:
    """Return the arguments of `freewheel train` for this run; with a mode: in that mode, with its default options."""
    layers = (source.partition(" ") for source in dict.fromkeys(config.sources.values()))
    files = [(LAYERS[kind], name) for kind, _, name in layers if kind in LAYERS]
    line = [config.env.name, *(word for pair in files for word in pair)]
    if (mode and mode != config.mode) or config.sources.get("mode") in (*GIVEN, resolve.AUTO):
        line += ["--mode", mode or config.mode]
    for name, value in _given(config, mode).items():
        line += [f"--{name.replace('_', '-')}", *_tokens(name, value)]
    return line


def typed(config: Config, mode: str = "") -> str:
    """Return the command line for this run, or for the run in that mode; a call of `freewheel.train` if the run was
    started by one."""
    if config.sources.get("env") != "argument":
        return shlex.join(["freewheel", "train", *words(config, mode)])
    made = getattr(config.env, "factory", None) is not None
    name = config.env.name.rpartition(":")[2] if made else repr(config.env.name)
    options: dict[str, Any] = {"mode": mode or config.mode}
    for option, value in _given(config, mode).items():
        group, dot, key = option.partition(".")
        group = "env_args" if dot and group == "env" else group
        options[group] = {**options.get(group, {}), key: value} if dot else value
    return f"freewheel.train({', '.join([name, *(f'{key}={value!r}' for key, value in options.items())])})"


def _given(config: Config, mode: str) -> dict[str, Any]:
    """Return the options that the user has given, by dotted names; with a mode: without the present mode's options."""
    own = flags.option_types(MODES[config.mode].config) if mode else {}
    data = {name: value for name, value in config.to_json().items() if name not in ("sources", "env_args")}
    values = flags.flatten(data) | {f"{translation.FREE}{key}": value for key, value in config.env.args.items()}
    written = (name for name, source in config.sources.items() if source in GIVEN)
    return {name: values[name] for name in written if name in values and name not in (*OTHER_RUN, *own)}


def _tokens(name: str, value: Any) -> flags.Tokens:
    """Return a value as command line arguments."""
    rows = isinstance(value, (list, tuple)) and any(isinstance(part, (list, tuple)) for part in value)
    if rows or (name.startswith(translation.FREE) and not isinstance(value, str)):
        return (json.dumps(value),)
    return flags.tokens(value)


def closing(planned: Plan, summary: Mapping[str, Any]) -> str | None:
    """Return one line of advice that would make this run faster, from its measured shares; None: no advice."""
    if summary["exit_code"] == 0 and not summary["updates"] and planned.config.learner.on_policy:
        return _never_learned(planned, summary)
    ended_well = summary["exit_code"] == 0 and summary["wall_s"] >= SHORT_S and summary["updates"] >= FEW_UPDATES
    if not ended_well:
        return None
    return next(_remarks(planned, summary), None)


def _never_learned(planned: Plan, summary: Mapping[str, Any]) -> str:
    """Return the advice for a run that ended before its first update."""
    if planned.batch.episodes is not None:
        return f"nothing was learned: an update takes {planned.batch.episodes:,} episodes; --episodes-per-update makes it smaller"
    fewer = max(1, min(planned.batch.steps // 4, summary["produced"] // (8 * planned.batch.lanes)))
    came = f"an update takes {planned.batch.rows:,} rows, and {summary['produced']:,} came"
    smaller = f"--num-steps-per-env {fewer} makes it smaller"
    return f"nothing was learned: {came}; {smaller}, and freewheel check shows the mode with the most rows"


def _remarks(planned: Plan, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield all advice, the most helpful first."""
    yield from _another_mode(planned, summary)
    yield from _lost_rows(summary)
    yield from _too_many_workers(planned, summary)
    learner = summary["shares"]["learner"]
    if learner["wait-model"] >= IDLE:
        share = f"the learner waited for the model {learner['wait-model']:.0%} of the time"
        smaller = ", ".join(f"--{planned.config.algo}.{name}" for name in ("model-every", "max-epochs", "model-hidden"))
        yield f"{share}: {smaller} make fits rarer or shorter"
    if learner["eval"] >= EVALUATING:
        share = f"evaluations were {learner['eval']:.0%} of the time"
        yield f"{share}: fewer of them (--evals, --eval-episodes) leave up to {times(1 / (1 - learner['eval']))} for training"


def _another_mode(planned: Plan, summary: Mapping[str, Any]) -> Iterator[str]:
    """Advise another mode if it would be clearly faster with the times that this run has measured."""
    learner, rows = summary["shares"]["learner"], summary["env_steps"]
    training = summary.get("training_s") or summary["wall_s"] * (1.0 - learner["eval"] - learner["save"])
    learning = sum(learner[kind] for kind in (*WORKING, "wait-model")) * summary["wall_s"]  # no mode fits models faster
    acting = {kind: share * planned.workers * summary["wall_s"] for kind, share in summary["shares"]["worker"].items()}
    policy = PolicyTimes(act=acting["infer"] / rows, learn=learning / rows)
    rate, way, config = rows / training, way_of(planned), planned.config
    if way is None or planned.cost is None or config.env.batched:
        return
    if GAIN * rate * policy.learn >= 1:  # no mode is faster than its learner
        return
    env = StepTimes.of(planned.cost)
    if way.kind == "barrier":
        env = _calibrated(way, env, policy, rate)
    else:
        env = env.scaled((acting["step"] + acting["reset"]) / rows / env.row)
    own = forecast(way, env, policy, usable_cores()).rate
    if not rate / GAIN <= own <= GAIN * rate:
        return  # the model does not explain this run: its predictions are not reliable
    best = best_of(predictions(planned, env, policy), config.mode)
    if best is None or best.rate < GAIN * own or typed(config, best.mode) == typed(config):
        return
    what = f"--mode {best.mode}" if best.mode != config.mode else f"--mode {best.mode} with the default numbers of envs"
    would = f"{what} would make about {times(best.rate / own)}"
    yield f"{_why(planned, summary)}: {would}; try: {typed(config, best.mode)}"


def _calibrated(way: Way, env: StepTimes, policy: PolicyTimes, rate: float) -> StepTimes:
    """Scale the environment's times until the model predicts the measured rate. Behind a barrier the run only measures
    the slowest lane."""
    least, most, factor = 0.1, 10.0, 1.0
    for _ in range(20):
        if forecast(way, env.scaled(factor), policy, usable_cores()).rate > rate:
            least = factor
        else:
            most = factor
        factor = (least * most) ** 0.5
    return env.scaled(factor)


def _why(planned: Plan, summary: Mapping[str, Any]) -> str:
    """Describe what the run spent its time on."""
    learner, worker = summary["shares"]["learner"], summary["shares"]["worker"]
    envs, learning = worker["step"] + worker["reset"], sum(learner[kind] for kind in WORKING)
    waiting = sum(share for kind, share in worker.items() if kind.startswith("wait"))
    if planned.worker_config is not None and waiting >= IDLE:
        return f"workers waited {waiting:.0%} of the time"
    if planned.worker_config is None and learning > envs:
        return f"learning took {learning:.0%} of the time, while no env stepped"
    return f"envs were {envs:.0%} of the time"


def _lost_rows(summary: Mapping[str, Any]) -> Iterator[str]:
    lost = {cause: count / max(1, summary["produced"]) for cause, count in summary["dropped"].items()}
    if lost.get("overflow", 0.0) >= LOST:
        yield f"{lost['overflow']:.0%} of the rows were dropped because the queue was full: --overflow block keeps them"
    if lost.get("stale", 0.0) >= LOST:
        yield f"{lost['stale']:.0%} of the rows came too late to be learned from: a higher --patience or --max-lag keeps them"


def _too_many_workers(planned: Plan, summary: Mapping[str, Any]) -> Iterator[str]:
    """Advise fewer workers if they only wait for the learner, or take the cores from it."""
    config, cores, workers = planned.worker_config, usable_cores(), planned.workers
    if config is None or planned.cost is None:
        return
    learner, worker = summary["shares"]["learner"], summary["shares"]["worker"]
    busy = sum(learner[kind] for kind in WORKING)
    waiting = sum(share for kind, share in worker.items() if kind.startswith("wait"))
    enough = max(1, ceil(workers * (1 - waiting)))
    if planned.cost.computes and workers > cores:
        yield f"{workers} workers that compute share {cores} cores with the learner: --workers {cores} would be as fast"
    elif busy >= BUSY and waiting >= IDLE and enough < workers:
        yield f"the learner was busy {busy:.0%} of the time: more workers would not help, --workers {enough} is enough"
    elif busy >= BUSY:
        yield f"the learner was busy {busy:.0%} of the time and sets the speed: more workers would not help"
