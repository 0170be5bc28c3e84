"""The message of a learner in an exchange between all learners: a fixed number of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from freewheel.core import CAUSES, NDArray, RowCounts

EPISODES = 8  # latest episodes (return and length) that a message has room for
#: Why a learner wants to end; ASKED: because another learner has asked for it.
ASKED = "asked"
REASONS = ("", "minutes", "stopped", "interrupted", "failed", ASKED)


class Word(NamedTuple):
    """The state of a learner at an exchange."""

    number: int  # of the exchange, the same in all learners
    stop: int = 0  # index in REASONS
    signal: int = 0  # the signal that asked for the end
    save: bool = False  # a checkpoint is due
    busy: bool = False  # a checkpoint is being written
    learning_rate: float = np.nan  # the value that a hook has assigned
    contexts: int = 0  # how often a hook has assigned a table
    notes: int = 0  # messages for the user so far
    env_steps: int = 0
    episodes: int = 0
    waited_s: float = 0.0
    produced: int = 0
    trained: int = 0
    queued: int = 0
    open: int = 0


FIELDS = len(Word._fields)


@dataclass(frozen=True)
class Said:
    """A Word of one learner, with its dropped rows and its latest episodes."""

    word: Word
    dropped: tuple[int, ...] = (0,) * len(CAUSES)
    played: tuple[tuple[float, float], ...] = ()  # (return, length) of episodes since the last exchange

    def pack(self) -> NDArray:
        packed = np.full(FIELDS + len(CAUSES) + 2 * EPISODES, np.nan)
        packed[:FIELDS], packed[FIELDS : FIELDS + len(CAUSES)] = self.word, self.dropped
        latest = [number for pair in self.played[-EPISODES:] for number in pair]
        packed[FIELDS + len(CAUSES) :][: len(latest)] = latest
        return packed

    @classmethod
    def unpack(cls, packed: NDArray) -> Said:
        kinds = Word.__annotations__.values()
        numbers = [
            float(value) if "float" in str(kind) else int(value) for kind, value in zip(kinds, packed, strict=False)
        ]
        dropped = tuple(int(rows) for rows in packed[FIELDS : FIELDS + len(CAUSES)])
        played = packed[FIELDS + len(CAUSES) :].reshape(-1, 2)
        word = Word._make(numbers)
        return cls(word, dropped, tuple((ret, length) for ret, length in played.tolist() if length == length))

    @classmethod
    def of(cls, rows: RowCounts, word: Word = Word(0), played: Sequence[tuple[float, float]] = ()) -> Said:  # noqa: B008
        """Return the message for these row counts and the other fields of `word`."""
        word = word._replace(produced=rows.produced, trained=rows.trained, queued=rows.queued, open=rows.open)
        return cls(word, tuple(rows.dropped.get(cause, 0) for cause in CAUSES), tuple(played))

    @property
    def rows(self) -> RowCounts:
        word, causes = self.word, zip(CAUSES, self.dropped, strict=True)
        return RowCounts(
            word.produced, word.trained, word.queued, word.open, {cause: rows for cause, rows in causes if rows}
        )
