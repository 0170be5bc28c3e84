"""Gymnasium's vector envs as an Env, for all three of its autoreset modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from freewheel.core import NO_CONTEXT, Env, EnvSpec, EpisodePrefix, NDArray, SeedStream, Step
from freewheel.envs.lane import blank_step, close_env, raised
from freewheel.envs.spaces import layout_of
from freewheel.errors import EnvError, FreewheelError, SetupError
from freewheel.policies.layout import MASK, BadObservationError, Layout
from freewheel.rollout.restoring import OTHERWISE, HeldStream, ReplayDeadline, after_what_was_played, differs


class GymVector(Env):
    """An Env over a VectorEnv. If the metadata has `"lane_seeds": True`, the vector env gets one stream per lane in
    options["seeds"] and seeds every episode from it; otherwise it is seeded once. If the metadata also has
    `"contexts": True` and autoreset is disabled, every reset gets a non-empty table [K, C] in options["contexts"]. A
    lane whose episode begins then takes row seeding.pick(its seed, K) and shows it as "context" in its observation.
    """

    def __init__(
        self,
        vector: VectorEnv[Any, Any, Any],
        name: str,
        measures: tuple[str, ...] = (),
        *,
        wary: bool = False,
    ) -> None:
        self._vector, self._name, self._wary = vector, name, wary
        mode = vector.metadata.get("autoreset_mode")
        if mode is None:
            raise SetupError(f"{name} does not define its autoreset mode: set metadata['autoreset_mode'] in its class")
        self._mode = AutoresetMode(mode)
        layout = self._survey()
        self._spec = self._with_contexts(layout.spec(name, vector.num_envs, measures))
        self._context: dict[str, NDArray] = {}  # reset options
        self._encode = layout.action.encoder()
        self._step = blank_step(self._spec)
        self._obs = np.zeros_like(self._step.next_obs)  # [B, D] what to act on next
        self._rows = _VectorRows(layout, self._obs)
        self._some = _VectorRows(layout, np.zeros_like(self._obs))  # only the rows of ended lanes are used
        self._ended = np.zeros(vector.num_envs, np.bool_)  # the episode is over and the next has not begun

    def _survey(self) -> Layout:
        vector, info = self._vector, dict[str, Any]()
        if isinstance(vector.single_action_space, Discrete):
            with self._errors_in("reset"):
                _, info = vector.reset(seed=0)
        return layout_of(vector.single_observation_space, vector.single_action_space, info_mask=MASK in info)

    def _with_contexts(self, spec: EnvSpec) -> EnvSpec:
        """Keep contexts only if the env reads them at every reset and knows the seeds of its lanes."""
        able = all(self._vector.metadata.get(name) for name in ("lane_seeds", "contexts"))
        return spec if able and self._mode is AutoresetMode.DISABLED else replace(spec, context=0)

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def set_context(self, context: NDArray) -> None:
        self._spec.check_context(context)
        self._context = {"contexts": context} if context.size else {}

    @property
    def contexts(self) -> NDArray:
        """The table that episodes draw their context from."""
        return self._context.get("contexts", NO_CONTEXT)

    @property
    def acting_on(self) -> NDArray:
        """[B, D] the observations to act on next."""
        return self._obs

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        with self._errors_in("reset"):
            if self._vector.metadata.get("lane_seeds"):
                self._rows.put(*self._vector.reset(options={"seeds": list(seeds), **self._context}))
            else:
                self._rows.put(*self._vector.reset(seed=seeds[0].seed(0)))
        self._ended[:] = False
        return self._obs

    def replay(
        self, seeds: Sequence[SeedStream], played: Sequence[EpisodePrefix | None], calling: Callable[[str], None]
    ) -> tuple[NDArray, list[str]]:
        """Step all lanes together. A lane with fewer steps to replay waits until the others have as many left."""
        why = f"{self._name} is not seeded anew for each episode"
        if self._vector.metadata.get("lane_seeds") and self._mode is AutoresetMode.DISABLED:
            try:
                return _VectorReplay(self, seeds, played).run(calling)
            except EnvError as error:
                why = f"it failed: {error.report.splitlines()[0]}"
        calling("reset")
        return self.reset(after_what_was_played(seeds, played)), ["" if own is None else why for own in played]

    def restart(self, lanes: NDArray, context: NDArray) -> None:
        """Begin the next episode of these lanes [B] with a row of this table, even if the current one has not ended."""
        before, self._context = self._context, {"contexts": context} if context.size else {}
        self._ended[:] = lanes
        self.autoreset()
        self._context = before

    def step(self, action: NDArray) -> Step:
        with self._errors_in("step"):
            self._convert(*self._vector.step(self._encode(action)))
            if self._wary:
                self._check_finite()
        return self._step

    def autoreset(self) -> NDArray:
        if self._mode is AutoresetMode.DISABLED and self._ended.any():
            with self._errors_in("reset"):
                options = {"reset_mask": self._ended.copy(), **self._context}
                self._some.put(*self._vector.reset(options=options))
            np.copyto(self._obs, self._some.out, where=self._ended[:, None])
            self._ended[:] = False
        return self._obs

    def _convert(
        self, observation: Any, reward: NDArray, terminated: NDArray, truncated: NDArray, info: Mapping[str, Any]
    ) -> None:
        """Write the answer of a step into the rows of the Step."""
        step, final = self._step, info
        self._rows.put(observation, info)
        np.copyto(step.next_obs, self._obs)
        np.copyto(step.reward, reward, casting="same_kind")
        np.copyto(step.terminated, terminated)
        np.copyto(step.truncated, truncated)
        over = step.terminated | step.truncated
        if self._mode is AutoresetMode.NEXT_STEP:
            np.logical_not(self._ended, out=step.valid)
            step.reward[self._ended] = 0.0
        elif self._mode is AutoresetMode.SAME_STEP and over.any():
            final = info.get("final_info", {})
            self._some.put(info["final_obs"], final)
            np.copyto(step.next_obs, self._some.out, where=over[:, None])
        self._measure(final, over)
        self._ended[:] = over

    def _check_finite(self) -> None:
        """Raise an EnvError if a value of the step is not finite."""
        step = self._step
        for what, values in (("an observation", step.next_obs), ("a reward", step.reward)):
            finite = np.isfinite(values).reshape(len(values), -1).all(axis=1) | ~step.valid
            if not finite.all():
                lane = int(np.argmin(finite))
                raise EnvError(f"{self._name} gave {what} that is not finite in its lane {lane}: {values[lane]}", "nan")

    def _measure(self, info: Mapping[str, Any], lanes: NDArray) -> None:
        for column, name in enumerate(self._spec.measures if lanes.any() else ()):
            self._step.measures[lanes, column] = info[name][lanes]

    @contextmanager
    def _errors_in(self, method: str) -> Iterator[None]:
        try:
            yield
        except FreewheelError:
            raise
        except BadObservationError as error:
            raise EnvError(f"{self._name} gave a wrong observation in {method}(): {error}", "shape") from error
        except Exception as error:
            raise raised(self._name, error, f"in {method}()") from error

    def render(self) -> NDArray | str | None:
        return None

    def close(self) -> None:
        close_env(self._vector, self._name)


class _VectorReplay:
    """Replays the episodes of a vector env up to where they were."""

    def __init__(self, env: GymVector, seeds: Sequence[SeedStream], played: Sequence[EpisodePrefix | None]) -> None:
        self._env, self._played = env, played
        self._streams = [HeldStream(stream) for stream in seeds]
        self._steps = np.array([0 if own is None else len(own.action) for own in played])
        self._total = np.zeros(len(played))
        self._reasons = [""] * len(played)

    def run(self, calling: Callable[[str], None]) -> tuple[NDArray, list[str]]:
        env, most, clock = self._env, int(self._steps.max()), ReplayDeadline()
        calling("reset")
        env.reset(self._streams)
        for stream in self._streams:
            stream.resets = 1
        reason = ""
        for left in range(most, 0, -1):
            calling("step")
            self._begin(self._steps == left)
            self._step(left)
            if left > 1 and (reason := clock.too_slow(left - 1)):
                break
        for lane, own in enumerate(self._played):
            if own is not None:
                here = differs(own, env.acting_on[lane], float(self._total[lane]))
                self._reasons[lane] = self._reasons[lane] or reason or here
        calling("reset")
        self._begin(self._steps == 0)
        for lane in (lane for lane, why in enumerate(self._reasons) if why):
            self._begin(np.arange(len(self._played)) == lane, skip=1)
        return env.acting_on, self._reasons

    def _begin(self, lanes: NDArray, skip: int = 0) -> None:
        """Begin the first episode of these lanes, or one after it: `skip` episodes of their streams are left out."""
        for lane in np.flatnonzero(lanes).tolist():
            stream, own = self._streams[lane], self._played[lane]
            stream.waited = stream.resets - skip
            context = self._env.contexts if own is None or skip else own.context
            self._env.restart(np.arange(len(lanes)) == lane, context)
            stream.resets += 1

    def _step(self, left: int) -> None:
        """Step all lanes. Lanes that have begun take their next action; the actions of the others do not matter."""
        begun = self._steps >= left
        example = next(own.action for own in self._played if own is not None)
        action = np.zeros((len(begun), *example.shape[1:]), example.dtype)
        for lane, own in enumerate(self._played):
            if own is not None:
                action[lane] = own.action[max(0, len(own.action) - left)]
        step = self._env.step(action)
        np.add(self._total, step.reward, out=self._total, where=begun)
        over = step.terminated | step.truncated
        for lane in np.flatnonzero(over).tolist():
            if begun[lane]:
                self._reasons[lane] = OTHERWISE
            stream = self._streams[lane]
            stream.waited = stream.resets
            stream.resets += 1
        self._env.autoreset()


class _VectorRows:
    """Writes observations of a vector env to rows [B, D]: a batch of all lanes, or an object array with some lanes."""

    def __init__(self, layout: Layout, out: NDArray) -> None:
        columns, mask = layout.observation, layout.observation.mask
        self.out = out
        self._write, self._write_lane = columns.writer(out), [columns.writer(row) for row in out]
        self._write_mask = mask.writer(out) if mask else None
        self._allowed = np.ones((len(out), layout.action.spec.size), np.bool_)

    def put(self, observation: Any, info: Mapping[str, Any]) -> None:
        if isinstance(observation, np.ndarray) and observation.dtype == object:
            for write, own in zip(self._write_lane, observation, strict=True):
                if own is not None:
                    write(own)
        else:
            self._write(observation)
        if self._write_mask is not None:
            self._write_mask(info.get(MASK, self._allowed))
