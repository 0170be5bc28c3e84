"""A recording that can restore the episodes under way: their actions and rewards, kept by reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from freewheel.core import Array, EpisodePrefix, NDArray, Transitions

MOST_STEPS = 100_000  # of an episode; a longer episode is not replayed
MOST_BYTES = 64 * 2**20  # of actions and rewards of one recording
SMALL = 64  # chunks that are joined to one piece
UNKNOWN = -1  # in place of the steps of an episode: its beginning was not recorded


class _Piece(NamedTuple):
    """Consecutive steps."""

    end: int
    action: NDArray  # [T, B, ...]
    reward: NDArray  # [T, B]


class EpisodeRecording:
    """Actions and rewards of B lanes, from the beginning of the oldest episode under way."""

    def __init__(self, lanes: int, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._pieces: deque[_Piece] = deque()
        self._end = self._bytes = 0
        self._small = 0  # pieces at the end that are not joined yet
        self._start = [0] * lanes  # the first step of each lane's episode, or UNKNOWN
        self._obs: NDArray | None = None  # [B, D] after the last step

    def add(self, data: Transitions, *, ends: bool, whole: bool = False) -> None:
        """Add the next rows. ends: episodes ended or were cut short in these rows. whole: all rows are valid."""
        begin = self._end
        self._end += len(data.valid)
        self._put(data.action, data.reward)
        self._obs = data.next_obs[-1]
        if ends:
            over = data.terminated | data.truncated
            if not whole:
                over |= ~data.valid
            if len(self._start) == 1:
                if (last := over.tobytes().rfind(1)) >= 0:
                    self._start[0] = begin + last + 1
            else:
                after = (self._end - over[::-1].argmax(axis=0)).tolist()
                for lane in np.flatnonzero(over.any(axis=0)).tolist():
                    self._start[lane] = after[lane]
        if ends or self._bytes > self._most_bytes or self._end - self._pieces[0].end > 2 * MOST_STEPS:
            self._trim()

    def restart(self, lane: int, steps: int) -> None:
        """Note that the lane's episode began this many steps ago."""
        self._start[lane] = self._end - steps

    def forget(self) -> None:
        """Forget the episodes under way: rows are missing, so they cannot be replayed."""
        self._start = [UNKNOWN] * len(self._start)
        self._trim()

    @property
    def steps(self) -> NDArray:
        """[B] steps of each lane's episode, or UNKNOWN."""
        most = min(self._end, MOST_STEPS)
        return np.array(
            [self._end - start if start >= self._end - most else UNKNOWN for start in self._start], np.int64
        )

    def played(self, contexts: list[NDArray]) -> list[EpisodePrefix | None]:
        """Return the episode of each lane; None: there is nothing to replay."""
        found: list[EpisodePrefix | None] = []
        for lane, (steps, context) in enumerate(zip(self.steps.tolist(), contexts, strict=True)):
            if steps < 1 or self._obs is None:
                found.append(None)
                continue
            action, reward = self._joined(steps)
            # cumsum adds rewards in the same order as a Runner; a plain sum uses another order.
            ret = float(np.cumsum(reward[:, lane], dtype=np.float64)[-1])
            found.append(EpisodePrefix(action[:, lane], self._obs[lane], ret, context))
        return found

    def state(self) -> dict[str, Array]:
        """Return the state as copies."""
        steps = self.steps
        lanes = np.flatnonzero(steps > 0).tolist()
        state: dict[str, Array] = {"steps": steps}
        if not lanes or self._obs is None:
            return state
        action, reward = self._joined(int(steps.max()))
        state["action"] = np.concatenate([action[len(action) - steps[lane] :, lane] for lane in lanes])
        state["reward"] = np.concatenate([reward[len(reward) - steps[lane] :, lane] for lane in lanes])
        state["obs"] = self._obs.copy()
        return state

    def restore(self, state: Mapping[str, Array]) -> None:
        """Continue from another recording. Call it before `add`."""
        steps = np.asarray(state["steps"])
        most = max(0, int(steps.max()))
        self._end, self._start = most, [UNKNOWN if own == UNKNOWN else most - own for own in steps.tolist()]
        if not most:
            return
        flat, rewards = np.asarray(state["action"]), np.asarray(state["reward"])
        action = np.zeros((most, len(steps), *flat.shape[1:]), flat.dtype)
        reward = np.zeros((most, len(steps)), rewards.dtype)
        row = 0
        for lane, count in enumerate(steps.tolist()):
            if count > 0:
                action[most - count :, lane] = flat[row : row + count]
                reward[most - count :, lane] = rewards[row : row + count]
                row += count
        self._put(action, reward)
        self._obs = np.array(state["obs"])

    def _put(self, action: NDArray, reward: NDArray) -> None:
        self._pieces.append(_Piece(self._end, action, reward))
        self._bytes += action.nbytes + reward.nbytes
        self._small += 1
        if self._small == SMALL:  # many short chunks: each array has a fixed cost
            parts = [self._pieces.pop() for _ in range(min(SMALL, len(self._pieces)))][::-1]
            joined = (np.concatenate([part[column] for part in parts]) for column in (1, 2))
            self._pieces.append(_Piece(self._end, *joined))
            self._small = 0

    def _joined(self, steps: int) -> tuple[NDArray, NDArray]:
        """Return the last `steps` steps of all lanes."""
        needed = [piece for piece in self._pieces if piece.end > self._end - steps]
        action, reward = (np.concatenate([piece[column] for piece in needed]) for column in (1, 2))
        return action[len(action) - steps :], reward[len(reward) - steps :]

    def _trim(self) -> None:
        """Drop what no lane needs; while the rest is too large, give up the longest episode."""
        while True:
            oldest = max(0, self._end - MOST_STEPS)
            known = [start for start in self._start if start >= oldest]
            first = min(known, default=self._end)
            while self._pieces and self._pieces[0].end <= first:
                dropped = self._pieces.popleft()
                self._bytes -= dropped.action.nbytes + dropped.reward.nbytes
                self._small = min(self._small, len(self._pieces))
            if self._bytes <= self._most_bytes or not known:
                return
            self._start = [UNKNOWN if start == first else start for start in self._start]
