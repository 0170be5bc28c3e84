"""Gymnasium envs in this process: B envs stepped in turn, or a single env with minimal overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from freewheel.core import Env, EnvSpec, EpisodePrefix, NDArray, SeedStream, Step
from freewheel.envs.fault_tolerant import FaultTolerantLane, FaultTolerantLanes, finite
from freewheel.envs.lane import Lane, LaneBuffers, blank_step, close_env, survey
from freewheel.rollout.restoring import ReplayDeadline, play_again
from freewheel.rollout.single_env_runner import SingleEnv

LARGEST = float(np.finfo(np.float32).max)


class GymLoop(Env):
    """Steps B envs in turn in this process. If an env fails, the loop raises, and can be reset and used again.
    A fault-tolerant loop reports the failure in its Step instead, and begins the lane's next episode.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        name: str,
        lanes: range,
        measures: tuple[str, ...] = (),
        *,
        fault_tolerant: bool = False,
        part: bool = False,
    ) -> None:
        """`part`: other processes have lanes of the same Env, so losing all lanes here is no error."""
        who = [f"lane {lane} of {name}" for lane in lanes]
        layout = survey(envs[0], who[0])
        self._spec = layout.spec(name, len(envs), measures)
        self._step = step = blank_step(self._spec)
        self._first = np.zeros_like(step.next_obs)  # [B, D] first observations, written by `autoreset`
        self._obs = self._first  # what to act on: `_first` or step.next_obs
        rows = map(LaneBuffers, self._first, step.next_obs, step.measures)
        parts = zip(envs, who, rows, lanes, strict=True)
        self._lanes = [Lane(env, own, layout, measures, row, number) for env, own, row, number in parts]
        tolerant = FaultTolerantLanes(name, self._lanes, step, self._first, part=part) if fault_tolerant else None
        self._tolerant, self.actions = tolerant, layout.action
        self._steppers: Sequence[Lane | FaultTolerantLane] = self._tolerant.lanes if self._tolerant else self._lanes
        self._ended: Sequence[Lane | FaultTolerantLane] = self._steppers  # lanes whose next episode has not begun
        self._advance = [stepper.step for stepper in self._steppers]
        self._encode = layout.action.encoder()
        self._split: Callable[[NDArray], Sequence[Any]] = (
            list if layout.action.spec.kind == "box" else np.ndarray.tolist
        )
        self._at = memoryview(bytearray(8)).cast("q")  # the lane that is being stepped
        self._closed = False

    def watch(self, lane: memoryview, reset: Callable[[int, int], None]) -> None:
        self._at = lane
        for index, own in enumerate(self._lanes):
            own.before_reset = partial(reset, index)

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def set_context(self, context: NDArray) -> None:
        self._spec.check_context(context)
        for lane in self._lanes:
            lane.set_context(context)

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        for lane, stream in zip(self._lanes, seeds, strict=True):
            lane.follow(stream)
        self._ended = self._steppers
        return self.autoreset()

    def replay(
        self, seeds: Sequence[SeedStream], played: Sequence[EpisodePrefix | None], calling: Callable[[str], None]
    ) -> tuple[NDArray, list[str]]:
        clock, reasons = ReplayDeadline(), []
        lanes = zip(self._lanes, seeds, played, self._step.next_obs, strict=True)
        for self._at[0], (lane, stream, own, successor) in enumerate(lanes):
            lane.follow(stream)
            context = lane.context
            actions = () if own is None else self._split(self._encode(own.action))
            reasons.append("" if own is None else play_again(lane, own, actions, successor, clock, calling))
            lane.set_context(context)
        found = zip(self._steppers, played, reasons, strict=True)
        self._ended = [stepper for stepper, own, reason in found if own is None or reason]
        for stepper in self._steppers:
            if isinstance(stepper, FaultTolerantLane) and stepper not in self._ended:
                stepper.down = False
        self._obs = self._step.next_obs
        calling("reset")
        return self.autoreset(), reasons

    def step(self, action: NDArray) -> Step:
        step = self._step
        reward, at = step.reward, self._at
        ended: list[Lane | FaultTolerantLane] = []
        step.terminated.fill(False)
        step.truncated.fill(False)
        for lane, (advance, own) in enumerate(zip(self._advance, self._split(self._encode(action)), strict=True)):
            at[0] = lane
            reward[lane], terminated, truncated = advance(own)
            if terminated or truncated:
                step.terminated[lane], step.truncated[lane] = terminated, truncated
                ended.append(self._steppers[lane])
        self._ended, self._obs = ended, step.next_obs
        return step if self._tolerant is None else self._tolerant.check(step, ended)

    def autoreset(self) -> NDArray:
        if self._ended:
            np.copyto(self._first, self._step.next_obs)
            for stepper in self._ended:
                stepper.reset()
            if self._tolerant is not None:
                self._tolerant.require_a_lane()
            self._ended, self._obs = [], self._first
        return self._obs

    def render(self) -> NDArray | str | None:
        env = self._lanes[0].env
        picture = env.render() if env.render_mode else None
        return picture if isinstance(picture, np.ndarray | str) else None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes:
            close_env(lane.env, self._spec.name)


class GymSingle(GymLoop, SingleEnv):
    """A fault-tolerant loop of one env that can be stepped without arrays."""

    def __init__(self, env: gymnasium.Env[Any, Any], name: str, lanes: range, measures: tuple[str, ...] = ()) -> None:
        super().__init__([env], name, lanes, measures, fault_tolerant=True)
        assert self._tolerant is not None, "it is fault-tolerant"
        self.first, self.after = self._first, self._step
        self._check, self._failures = self._tolerant.check, self._tolerant.failures
        self._advance_one, (row,) = self._advance[0], self._step.next_obs
        self._row = row if row.dtype == np.float32 else self._step.reward  # the values to check
        self._translate = self._translator()
        self._gap = False  # the last step was not valid

    def step_one(self, action: Any) -> tuple[float, bool, bool] | Step:
        answer = self._advance_one(action if self._translate is None else self._translate(action))
        reward, terminated, truncated = answer
        self._obs = self._step.next_obs
        if self._failures or self._gap or not (-LARGEST <= reward <= LARGEST and finite(self._row)):
            return self._step_checked(answer)
        self._ended = self._steppers if terminated or truncated else ()
        return answer

    def _step_checked(self, answer: tuple[float, bool, bool]) -> Step:
        step = self._step
        with np.errstate(over="ignore"):  # a reward beyond float32 becomes infinite, which the check finds
            step.reward[0], step.terminated[0], step.truncated[0] = answer
        ended = list(self._steppers) if answer[1] or answer[2] else []
        checked = self._check(step, ended)
        self._ended, self._gap = ended, not step.valid[0]
        return checked

    def _translator(self) -> Callable[[Any], Any] | None:
        """Return the conversion of our actions to the env's; None if they are the same."""
        encode = self._encode
        if self._spec.action.kind == "box":
            return lambda action: encode(action[None])[0]
        start = int(encode(np.zeros(1, np.int64))[0])
        return (lambda action: action + start) if start else None
