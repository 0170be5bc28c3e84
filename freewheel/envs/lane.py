"""One environment with its stream of seeds, the rows it writes, and its position for error messages."""

from __future__ import annotations

import errno
import resource
import traceback
import warnings
from collections.abc import Callable
from textwrap import shorten
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete, Space

from freewheel.core import NO_CONTEXT, EnvSpec, NDArray, SeedStream, Step
from freewheel.envs.spaces import layout_of
from freewheel.errors import EnvError, SetupError, cut, text_of
from freewheel.policies.layout import CONTEXT, MASK, BadObservationError, Layout, short
from freewheel.rollout import probe
from freewheel.rollout.call_state import LANE, LANES, SEEDS, STEP
from freewheel.rollout.call_state import cells as here
from freewheel.seeding import drawn

LONGEST_TRACE = 20_000  # characters of a traceback
FLAGS = (bool, np.bool_)


class LaneBuffers(NamedTuple):
    """The arrays that a lane writes."""

    first: NDArray  # [D] the first observation of the next episode
    successor: NDArray  # [D] the observation after a step
    measures: NDArray  # [M] the measures of an episode that has just ended


def blank_step(spec: EnvSpec) -> Step:
    """Allocate the arrays of a Step, which are reused at every step."""
    lanes, dtype = spec.lanes, np.dtype(spec.obs_dtype)
    return Step(
        reward=np.zeros(lanes, np.float32),
        terminated=np.zeros(lanes, np.bool_),
        truncated=np.zeros(lanes, np.bool_),
        next_obs=np.zeros((lanes, spec.obs_size), dtype),
        valid=np.ones(lanes, np.bool_),
        measures=np.zeros((lanes, len(spec.measures)), np.float32),
    )


def raised(who: str, error: BaseException, where: str) -> EnvError:
    """Convert an exception of the env to an EnvError: a summary line, then the traceback without our leading frames."""
    kind, message = type(error).__name__, " ".join(text_of(error).split())
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        message += f"; a process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} (ulimit -n)"
    trace = error.__traceback__
    while trace and trace.tb_frame.f_globals.get("__name__", "").startswith("freewheel.envs."):
        trace = trace.tb_next
    return EnvError(f"{who} raised {kind}: {cut(message)} ({where})\n{cut(_traceback(error, trace), LONGEST_TRACE)}")


def close_env(env: Any, who: str) -> None:
    """Close the user's env. An exception only becomes a warning, so that it cannot break the start or end of a run."""
    try:
        env.close()
    except Exception as error:  # noqa: BLE001 - the user's code
        told = cut(" ".join(text_of(error).split()))
        warnings.warn(f"{who} raised {type(error).__name__} in close(): {told}", RuntimeWarning, stacklevel=2)


def _traceback(error: BaseException, trace: TracebackType | None) -> str:
    try:
        lines = traceback.TracebackException(type(error), error, trace).format()
        return "".join(lines).rstrip().encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 - the exception's own code
        places = "".join(traceback.format_tb(trace))
        return f"Traceback (most recent call last):\n{places}{type(error).__name__}: {text_of(error)}"


def survey(env: gymnasium.Env[Any, Any], who: str) -> Layout:
    """Return the layout of the env's spaces; a reset shows whether its info has an action mask."""
    spaces, info_mask = _spaces(env, who), False
    if isinstance(spaces[1], Discrete):
        probe.surveying()
        try:
            info_mask = MASK in env.reset(seed=0)[1]
        except Exception as error:
            raise raised(who, error, "in its first reset, seed 0") from error
    return layout_of(*spaces, info_mask=info_mask)


def _spaces(env: gymnasium.Env[Any, Any], who: str) -> tuple[Space[Any], Space[Any]]:
    try:
        return env.observation_space, env.action_space
    except AttributeError as error:
        raise SetupError(f"{who} does not define its spaces: {error}") from error


def position(stream: SeedStream | None, episode: int, steps: int, action: object) -> str:
    """Describe the position of a lane, so that its failure can be reproduced."""
    if stream is None:
        return "before its first episode"
    place = f"step {steps}, last action {shorten(str(action), 80)}" if steps else "in reset"
    return f"episode {stream.number(episode)}, seed {stream.seed(episode)}, {place}"


def _plain(reward: Any, terminated: Any, truncated: Any) -> tuple[float, bool, bool]:
    """Convert to Python types; TypeError if the reward is not a number, or a flag is not a boolean."""
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        array = getattr(flag, "shape", ()) == () and getattr(getattr(flag, "dtype", None), "kind", "O") in "bui"
        if not isinstance(flag, bool | int | np.bool_) and not array:
            raise TypeError(f"{name} must be True or False, not {short(flag)}")
        if flag not in (0, 1):
            raise TypeError(f"{name} must be True or False, not {short(flag)}")
    kind = getattr(getattr(reward, "dtype", None), "kind", "f")
    if isinstance(reward, str | bytes) or getattr(reward, "shape", ()) != () or kind not in "fiub":
        raise TypeError(f"the reward must be a number, not {short(reward)}")
    try:
        return float(reward), bool(terminated), bool(truncated)
    except (TypeError, ValueError):
        raise TypeError(f"the reward must be a number, not {short(reward)}") from None


class Lane:
    """Runs one env: checks its answers, writes them to rows, and turns every failure into an EnvError with its name."""

    __slots__ = (
        "_action", "_allowed", "_context", "_env_step", "_episode", "_mask_first", "_mask_successor", "_measures", "_names",
        "_number", "_shown", "_steps", "_stream", "_write_first", "_write_successor", "before_reset", "env", "who",
    )  # fmt: skip

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        who: str,
        layout: Layout,
        measures: tuple[str, ...],
        rows: LaneBuffers,
        number: int = 0,
    ) -> None:
        columns, mask = layout.observation, layout.observation.mask
        if layout_of(*_spaces(env, who), info_mask=mask is not None) != layout:
            raise SetupError(f"{who} has different spaces from earlier lanes: all lanes must have the same spaces")
        self.env, self.who = env, who
        self._env_step = env.step
        self._write_first, self._write_successor = columns.writer(rows.first), columns.writer(rows.successor)
        self._mask_first = mask.writer(rows.first) if mask else None
        self._mask_successor = mask.writer(rows.successor) if mask else None
        self._allowed = np.ones(layout.action.spec.size, np.bool_) if mask else None
        self._names, self._measures = measures, rows.measures
        self._context = NO_CONTEXT
        self._shown = [rows.first[part.start : part.stop] for part in columns.slices if part.name == CONTEXT]
        self._stream: SeedStream | None = None
        self._action: object = None
        self._episode = self._steps = 0
        self.before_reset: Callable[[int], None] | None = None  # called with the seed
        self._number = number % LANES

    def follow(self, stream: SeedStream) -> None:
        """Play the episodes of this stream from the first one."""
        self._stream, self._episode = stream, -1

    def set_context(self, context: NDArray) -> None:
        """Use this table of contexts for episodes that begin from now on."""
        self._context = context

    @property
    def context(self) -> NDArray:
        return self._context

    def reset(self) -> int:
        """Start the next episode; return the ns it took."""
        begun = perf_counter_ns()
        assert self._stream is not None, "call follow() first"
        self._episode += 1
        self._steps = 0
        seed = self._stream.seed(self._episode)
        if self.before_reset is not None:
            self.before_reset(seed)
        context = drawn(self._context, seed) if self._context.size else None
        options = None if context is None else {CONTEXT: context}
        here[LANE], here[STEP], here[SEEDS + self._number] = self._number, 0, seed
        try:
            answer = self.env.reset(seed=seed) if options is None else self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise raised(self.who, error, self.where) from error
        try:
            observation, info = answer
            self._write_first(observation)
            if context is not None:
                self._check_context(context)
            if self._mask_first is not None:
                self._mask_first(info[MASK])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._invalid("reset", error) from None
        return perf_counter_ns() - begun

    def step(self, action: object) -> tuple[float, bool, bool]:
        """Return reward, terminated, truncated; write the next observation, and at an end the measures."""
        self._action = action
        self._steps += 1
        here[LANE], here[STEP] = self._number, self._steps
        try:
            answer = self._env_step(action)
        except Exception as error:
            raise raised(self.who, error, self.where) from error
        try:
            observation, reward, terminated, truncated, info = answer
            if not (isinstance(reward, float) and terminated.__class__ in FLAGS and truncated.__class__ in FLAGS):
                reward, terminated, truncated = _plain(reward, terminated, truncated)
            self._write_successor(observation)
            over = terminated or truncated
            if self._mask_successor is not None:
                self._mask_successor(self._allowed if over and MASK not in info else info[MASK])
            if over and self._names:
                self._measures[:] = [float(info[name]) for name in self._names]
            return float(reward), terminated, truncated
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._invalid("step", error) from None

    def _check_context(self, context: NDArray) -> None:
        """Raise if the observation contains a context other than the given one."""
        for shown in self._shown:
            if not np.array_equal(shown, context):
                raise BadObservationError(f"{CONTEXT}: reset() was given {context} but the observation has {shown}")

    @property
    def where(self) -> str:
        """The lane's episode, seed, step and last action."""
        return position(self._stream, self._episode, self._steps, self._action)

    def _invalid(self, method: str, error: Exception) -> EnvError:
        reason = f"no {error} in info" if isinstance(error, KeyError) else cut(text_of(error))
        what = "observation" if isinstance(error, BadObservationError) else "answer"
        return EnvError(f"{self.who} gave a wrong {what} in {method}(): {reason} ({self.where})", "shape")

    def not_finite(self, what: str, values: NDArray) -> EnvError:
        """Return the error for an observation or a reward that is NaN or infinite."""
        return EnvError(f"{self.who} gave {what} that is not finite: {shorten(str(values), 80)} ({self.where})", "nan")
