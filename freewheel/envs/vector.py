"""Gymnasium's vector envs as an Env: its three ways of autoreset become one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from freewheel.core import EnvSpec, NDArray, SeedStream, Step
from freewheel.envs.lane import blank_step, raised
from freewheel.envs.spaces import MASK, BadObservationError, Layout
from freewheel.errors import EnvError, FreewheelError, SetupError


class GymVector:
    """An Env over a VectorEnv. One whose metadata has `"lane_seeds": True` gets a stream a lane in options["seeds"] and
    seeds every episode from it; another is seeded once. If its metadata has `"contexts": True` as well, and it leaves resets to
    us, it gets the table [K, C], where there is one, in options["contexts"] of every reset: a lane whose episode begins there
    takes row seeding.pick(its seed, K) and shows it as "context".
    """

    def __init__(
        self,
        vector: VectorEnv[Any, Any, Any],
        name: str,
        measures: tuple[str, ...] = (),
        layout: Layout | None = None,
        *,
        wary: bool = False,
    ) -> None:
        self._vector, self._name, self._wary = vector, name, wary
        mode = vector.metadata.get("autoreset_mode")
        if mode is None:
            raise SetupError(f"{name} does not say how it resets: set metadata['autoreset_mode'] in its class")
        self._mode = AutoresetMode(mode)
        layout = layout or self._survey()
        self._spec = self._able(layout.spec(name, vector.num_envs, measures))
        self._context: dict[str, NDArray] = {}  # what resets are told of it
        self._encode = layout.action.encoder()
        self._step = blank_step(self._spec)
        self._obs = np.zeros_like(self._step.next_obs)  # [B, D] what to act on next
        self._rows = _Rows(layout, self._obs)
        self._some = _Rows(layout, np.zeros_like(self._obs))  # of which only ended lanes are wanted
        self._ended = np.zeros(vector.num_envs, np.bool_)  # whose episode is over and no other has begun

    def _survey(self) -> Layout:
        vector, info = self._vector, dict[str, Any]()
        if isinstance(vector.single_action_space, Discrete):
            with self._blaming("reset"):
                _, info = vector.reset(seed=0)
        return Layout.of(vector.single_observation_space, vector.single_action_space, info_mask=MASK in info)

    def _able(self, spec: EnvSpec) -> EnvSpec:
        """Only who reads contexts at every reset, and knows whose seeds they go by, can be told them."""
        says = all(self._vector.metadata.get(what) for what in ("lane_seeds", "contexts"))
        return spec if says and self._mode is AutoresetMode.DISABLED else replace(spec, context=0)

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def set_context(self, context: NDArray) -> None:
        self._spec.check_context(context)
        self._context = {"contexts": context} if context.size else {}

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        with self._blaming("reset"):
            if self._vector.metadata.get("lane_seeds"):
                self._rows.put(*self._vector.reset(options={"seeds": list(seeds), **self._context}))
            else:
                self._rows.put(*self._vector.reset(seed=seeds[0].seed(0)))
        self._ended[:] = False
        return self._obs

    def step(self, action: NDArray) -> Step:
        with self._blaming("step"):
            reset_ns = self._convert(*self._vector.step(self._encode(action)))
            if self._wary:
                self._insist_on_numbers()
        return replace(self._step, reset_ns=reset_ns) if reset_ns else self._step

    def autoreset(self) -> NDArray:
        if self._mode is AutoresetMode.DISABLED and self._ended.any():
            with self._blaming("reset"):
                options = {"reset_mask": self._ended.copy(), **self._context}
                self._some.put(*self._vector.reset(options=options))
            np.copyto(self._obs, self._some.out, where=self._ended[:, None])
            self._ended[:] = False
        return self._obs

    def _convert(
        self, observation: Any, reward: NDArray, terminated: NDArray, truncated: NDArray, info: Mapping[str, Any]
    ) -> int:
        """Write an answer as rows; the ns that went into resets."""
        step, final, reset_ns = self._step, info, 0
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
            reset_ns = int(np.max(info.get("reset_ns", 0)))
        self._measure(final, over)
        self._ended[:] = over
        return reset_ns

    def _insist_on_numbers(self) -> None:
        """Raise at a number that is not finite, before the row is shown to anybody."""
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
    def _blaming(self, method: str) -> Iterator[None]:
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
        self._vector.close()


class _Rows:
    """Rows [B, D] to write what a vector env shows into: an observation of all lanes, or an object array of some lanes' own."""

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
