"""The checkup of an environment: its spaces, its contract, its cost, and the speed that each mode would reach with it.

The environment's code runs in other processes. First it is measured, then `inspect_env` tests what training relies on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from time import perf_counter
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.utils.passive_env_checker import env_reset_passive_checker, env_step_passive_checker

from freewheel.collect.mode import MODES
from freewheel.config.resolve import Config
from freewheel.core import Env, EnvSpec, NDArray, Step
from freewheel.envs.family import EnvConfig, imported_by_workers
from freewheel.envs.gym import GymConfig
from freewheel.envs.legacy import OldGym
from freewheel.errors import EnvError, FreewheelError
from freewheel.policies.spec import UNNORMALISED
from freewheel.rollout.probe import EnvCost, random_actions, usable_cores
from freewheel.run.advice.predictions import GAIN, WAITS_FOR, ModeRate, best_of, predict, predictions, step_times, typed
from freewheel.run.learners.devices import placed
from freewheel.run.naming import name_run
from freewheel.run.planning import arrange, survey_env
from freewheel.run.process import learner_threads
from freewheel.seeding import generator, training_episodes
from freewheel.transport.executors import call_in_process

BUDGET = 2.5  # seconds of stepping for the measurement
COSTS = ("wall", "own", "cpu", "duty", "median", "slow", "longest", "lengths", "reset", "memory", "children", "steps")
STEPS, SECONDS = 200, 0.7  # most steps and seconds of one trial
FEW_STEPS = 10  # least steps of one trial
SELDOM = 0.05  # share of calls that raise below which training still works
FAR = 30  # factor from 1 beyond which the size of observations is reported


@dataclass(frozen=True)
class Finding:
    """The result of one test, with a remedy if one is needed."""

    level: Literal["ok", "note", "problem"]  # problem: training would fail
    about: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Checkup:
    """The results of a checkup."""

    config: Config
    findings: Sequence[Finding]
    spec: EnvSpec | None = None
    cost: EnvCost | None = None
    usual: ModeRate | None = None  # prediction of the command as given
    modes: Sequence[ModeRate] = ()  # predictions of all modes with their default options

    @property
    def fine(self) -> bool:
        """Return whether no problem was found."""
        return not any(finding.level == "problem" for finding in self.findings)

    @property
    def better(self) -> ModeRate | None:
        """Return a mode that is clearly faster than the usual prediction, if there is one."""
        best, usual = best_of(self.modes, self.config.mode), self.usual
        if not self.fine or best is None or usual is None or best.rate < GAIN * usual.rate:
            return None
        return best

    def to_json(self) -> dict[str, Any]:
        better, usual = self.better, self.usual
        given = None if usual is None else _mode_json(self.config, usual) | {"command": typed(self.config)}
        advice = None
        if better is not None and usual is not None:
            advice = {**_mode_json(self.config, better), "gain": better.rate / usual.rate}
        return {
            "env": self.config.env.name,
            "fine": self.fine,
            "cores": usable_cores(),
            "spaces": None if self.spec is None else asdict(replace(self.spec, bounds=None, model_task=None)),
            "cost": None if self.cost is None else {name: getattr(self.cost, name) for name in COSTS},
            "findings": [vars(finding) for finding in self.findings],
            "default": given,
            "modes": [_mode_json(self.config, one) for one in self.modes],
            "advice": advice,
        }


def _mode_json(config: Config, one: ModeRate) -> dict[str, Any]:
    if one.plan is None:
        return {"mode": one.mode, "refused": one.refused}
    limit = None if one.forecast is None else WAITS_FOR[one.forecast.limit]
    return {
        "mode": one.mode,
        "workers": one.plan.workers,
        "envs": one.plan.spec.lanes,
        "rows_per_update": one.plan.batch.rows,
        "steps_per_s": one.rate or None,
        "waits_for": limit,
        "memory": one.memory,
        "command": typed(config, one.mode),
    }


def checkup(config: Config, report: Callable[[str], None]) -> Checkup:
    """Test the environment in other processes and measure the policy here. `report` receives the progress."""
    config, device = placed(config)
    report(f"measuring {config.env.label} ...")
    try:
        cost = survey_env(config, budget=BUDGET, report=report)
    except FreewheelError as error:
        return Checkup(config, [Finding("problem", "start", str(error))])
    if config.env.on_device:
        return _simulator(config, cost.spec)
    report(f"testing {config.env.label} ...")
    seen, tried = _tried(config, cost)
    findings = [*_about(cost), *tried]
    findings += [Finding("note", "images", remark) for remark in config.policy.remarks(cost.spec)]
    try:
        planned = arrange(config, cost, name_run(config), device)
    except FreewheelError as error:
        return Checkup(config, [*findings, Finding("problem", config.algo, str(error))], cost.spec, cost)
    if seen is not None:
        findings += _scales(planned.config, seen)
    if any(finding.level == "problem" for finding in findings):
        return Checkup(config, findings, cost.spec, cost)
    report("measuring the policy and its learner ...")
    env = step_times(config, cost)
    with learner_threads(config.run.machine.threads):
        modes = predictions(planned, env)
        usual = next((one for one in modes if one.plan is not None and one.plan.config == planned.config), None)
        usual = usual or predict(planned, env)
    if config.env.batched and env.together:
        lanes, together = env.together[-1]
        text = f"{lanes} lanes in one process take {together:.2g} times as long as one"
        findings.append(Finding("ok", "lanes", text))
    if all(one.forecast is None for one in modes):
        findings.append(Finding("ok", config.algo, "its learner is not measured: speeds are not predicted"))
    return Checkup(config, findings, cost.spec, cost, usual, modes)


def _simulator(config: Config, spec: EnvSpec) -> Checkup:
    """Return the checkup of a simulator of all lanes. It is not measured: its speed depends on the number of lanes."""
    modes = ", ".join(name for name, mode in MODES.items() if mode.simulators)
    text = f"all lanes are one simulation on {spec.device}: cost, seeds and speeds are not measured; modes: {modes}"
    return Checkup(config, [Finding("ok", "simulator", text)], spec)


def _about(cost: EnvCost) -> list[Finding]:
    """Return the findings of the measurement itself."""
    found = []
    if not cost.portable:
        remedy = "use --mode sequential, or make it with a function that can be imported"
        found.append(Finding("note", "workers", "it cannot be sent to other processes", remedy))
    if cost.failures:
        text = f"{cost.failures} of {cost.steps + cost.failures} calls raised: {cost.failure.splitlines()[0]}"
        found.append(Finding("note", "failures", text, "each failure costs one episode"))
    if not cost.closed:
        found.append(Finding("note", "close", "close() did not return within 5 s", "every run would end late"))
    return found


def _tried(config: Config, cost: EnvCost) -> tuple[Inspection | None, Sequence[Finding]]:
    """Test the contract in two processes, one after the other."""
    if not cost.portable:
        return None, ()
    env, limits = config.env, config.env.timeouts
    modules, seconds = imported_by_workers(env), limits.construct + limits.reset + limits.step
    call = partial(call_in_process, what=env.name, limit=seconds, modules=modules)
    seen: Inspection | None = None
    found: Sequence[Finding] = ()
    try:
        seen = inspected = call(partial(inspect_env, env, cost))
        found = inspected.findings
        if inspected.digest:
            found = [*found, _elsewhere(call(partial(digest, env)) == inspected.digest)]
    except FreewheelError as error:
        raised = isinstance(error, EnvError) and error.cause == "env_error"
        if raised and 0 < cost.failures < SELDOM * cost.steps:
            found = [*found, Finding("note", "contract", "not tested to the end: a call raised again", "check again")]
        else:
            found = [*found, Finding("problem", "contract", str(error))]
    return seen, found


def _scales(config: Config, seen: Inspection) -> list[Finding]:
    """Return findings about the size of rewards and observations for the algorithm."""
    rewards, size = config.learner.about_rewards(seen.first.rewards), seen.first.size
    found = [Finding("ok", "rewards", rewards)] if rewards else []
    if size > FAR or 0 < size < 1 / FAR:
        good = config.policy.normalize_obs is True
        told = f"a column is about {size:,.5g}, far from 1: observations {'are' if good else 'should be'} normalised"
        found.append(Finding("ok" if good else "note", "scale", told, "" if good else "--policy.normalize-obs true"))
    return found


def _elsewhere(same: bool) -> Finding:
    if same:
        return Finding("ok", "processes", "another process gives the same steps under the same seed")
    remedy = "look for state outside of the env: files, the time, a global generator, the order of a set"
    return Finding("note", "processes", "another process gives different steps under the same seed", remedy)


@dataclass(frozen=True)
class Inspection:
    """The results from one process."""

    findings: tuple[Finding, ...]
    digest: str  # of the first steps under a fixed seed; empty if these steps cannot be repeated
    first: _Played


@dataclass(frozen=True)
class _Played:
    """The experience of one lane under one seed."""

    digests: list[str]  # cumulative: up to the first observation, then up to each step
    lengths: list[int]  # of the episodes that ended
    bad: str  # description of a number that was not finite; empty: none
    changes: bool  # whether the observation ever changed
    rewards: NDArray
    size: float  # root mean square of the largest column that can be normalised

    @property
    def steps(self) -> int:
        return len(self.digests) - 1

    def same(self, other: _Played) -> int:
        """Return how many steps are the same; -1: the first observations differ."""
        pairs = zip(self.digests, other.digests, strict=False)
        all_of_them = min(self.steps, other.steps)
        return next((step - 1 for step, (here, there) in enumerate(pairs) if here != there), all_of_them)


def inspect_env(env: EnvConfig, cost: EnvCost) -> Inspection:
    """Run all tests in one process."""
    with closing(env.make(range(1))) as one:
        played = [_play(one, seed, STEPS) for seed in (1, 1, 2)]
    found = [_seeds(*played), _numbers(played[0]), _episodes(played[0], cost)]
    if isinstance(env, GymConfig) and not env.batched:
        found += _answers(env)
    repeats = played[0].same(played[1]) >= FEW_STEPS
    return Inspection(tuple(found), played[0].digests[FEW_STEPS] if repeats else "", played[0])


def digest(env: EnvConfig) -> str:
    """Return the digest of the same first steps, for a comparison between processes."""
    with closing(env.make(range(1))) as one:
        return _play(one, 1, FEW_STEPS).digests[-1]


def _play(env: Env, seed: int, steps: int) -> _Played:
    """Play the same random actions under a seed for `steps` steps or SECONDS, but at least FEW_STEPS steps."""
    spec, rng, hashed = env.spec, generator(0, "contract"), sha256()
    obs = env.reset([training_episodes(seed, lane) for lane in range(spec.lanes)]).copy()
    first, length, bad, changes, end = obs.tobytes(), 0, "", False, perf_counter() + SECONDS
    hashed.update(first)
    digests, lengths, rewards, squares = [hashed.hexdigest()], list[int](), list[NDArray](), np.zeros(spec.obs_size)
    while len(digests) <= FEW_STEPS or (len(digests) <= steps and perf_counter() < end):
        step = env.step(random_actions(spec, obs, rng))
        for values in (step.reward, step.next_obs, step.terminated, step.truncated):
            hashed.update(np.ascontiguousarray(values).tobytes())
        bad = bad or _not_finite(step)
        rewards.append(np.array(step.reward))
        squares += np.square(step.next_obs, dtype=np.float64).mean(0)
        changes, length = changes or step.next_obs.tobytes() != first, length + 1
        obs = env.autoreset().copy()
        if step.terminated[0] or step.truncated[0]:
            lengths.append(length)
            length = 0
            hashed.update(obs.tobytes())
        digests.append(hashed.hexdigest())
    sizes = [squares[part.start : part.stop].max() for part in spec.slices if part.name not in UNNORMALISED]
    size = math.sqrt(max(sizes, default=0.0) / len(rewards)) if spec.obs_dtype == "float32" else 1.0
    return _Played(digests, lengths, bad, changes, np.concatenate(rewards), size)


def _not_finite(step: Step) -> str:
    if not np.isfinite(step.reward).all():
        return f"a reward was {step.reward[0]}"
    return "" if np.isfinite(step.next_obs).all() else "an observation had NaN or inf"


def _seeds(one: _Played, again: _Played, other: _Played) -> Finding:
    """Compare two trials with the same seed and one with another seed."""
    same = one.same(again)
    if same < min(one.steps, again.steps):
        what = "starts a different episode" if same < 0 else f"diverges after {same} steps"
        remedy = "call super().reset(seed=seed) in reset() and draw from self.np_random only"
        return Finding("note", "seeds", f"the same seed {what}: runs cannot be repeated", remedy)
    if one.same(other) >= min(one.steps, other.steps):
        remedy = "fine if nothing is random; else draw from self.np_random, which super().reset(seed=seed) seeds"
        return Finding("note", "seeds", f"other seeds give the same {same} steps under the same actions", remedy)
    return Finding("ok", "seeds", f"the same seed gives the same {same} steps, another seed gives others")


def _numbers(one: _Played) -> Finding:
    if one.bad:
        remedy = "find its source: training stops, or drops such rows"
        return Finding("problem", "numbers", one.bad, remedy)
    if not one.changes:
        text = f"the observation never changed in {one.steps} steps"
        return Finding("note", "numbers", text, "is it updated in step()?")
    return Finding("ok", "numbers", "observations and rewards are finite")


def _episodes(one: _Played, cost: EnvCost) -> Finding:
    lengths, steps = (*one.lengths, *cost.lengths), one.steps + cost.steps
    if not lengths:
        remedy = "if it has no time limit, give it one: --max-episode-steps N"
        return Finding("note", "episodes", f"none ended in {steps} random steps", remedy)
    if max(lengths) == 1:
        return Finding("note", "episodes", "every episode has one step", "does step() return terminated too early?")
    return Finding("ok", "episodes", f"{len(lengths)} ended in {steps} random steps, and the next ones began")


def _answers(config: GymConfig) -> Iterator[Finding]:
    """Yield the findings of Gymnasium's passive checks about a reset and a step."""
    with closing(config.open(0)) as env, warnings.catch_warnings(record=True, action="always") as caught:
        if isinstance(env.unwrapped, OldGym):
            return
        failure = ""
        try:
            _, info = env_reset_passive_checker(env.unwrapped, seed=1)
            env_step_passive_checker(env.unwrapped, _action(env, info))
        except Exception as error:  # noqa: BLE001 - the trials have shown that training works: this is a remark
            failure = str(error)
    said = dict.fromkeys(" ".join(str(one.message).split()) for one in caught)
    texts = [_plain(text) for text in [*said, *([failure] if failure else [])]]
    for text in texts:
        yield Finding("note", "answers", text, "training works with it; fix it for other libraries")
    if not texts:
        yield Finding("ok", "answers", "reset() and step() follow the Gymnasium API")


def _action(env: gymnasium.Env[Any, Any], info: dict[str, Any]) -> Any:
    env.action_space.seed(1)
    if (mask := info.get("action_mask")) is None:
        return env.action_space.sample()
    return env.action_space.sample(mask=np.asarray(mask).astype(np.int8))


def _plain(text: str) -> str:
    """Remove the colours and the leading WARN from a text."""
    return text.replace("\x1b[33m", "").replace("\x1b[0m", "").removeprefix("WARN: ")
