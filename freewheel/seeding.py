"""A tree of seeds from one seed: run, learner, lane, episode and its context, evaluation. No global generator is used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from freewheel.core import NDArray

Path = tuple[int | str, ...]
RNG_WORDS = 6  # of the state of a generator
POSITION_WORDS = RNG_WORDS + 1  # and of a position in its numbers


def _digest(path: Path) -> int:
    """A 128-bit number that depends only on the path, not on the process or PYTHONHASHSEED."""
    return int.from_bytes(hashlib.blake2b(repr(path).encode(), digest_size=16).digest(), "little")


def tree(*path: int | str) -> int:
    """The seed at this path, for example tree(run_seed, "env", lane, k): 31 bits, which every simulator accepts."""
    return _digest(path) & 0x7FFFFFFF


def pick(seed: int, count: int) -> int:
    """Which of `count` things the episode with this seed gets: uniform, and independent of other uses of the seed."""
    return _digest(("pick", int(seed))) % count


def drawn(context: NDArray, seed: int) -> NDArray:
    """The row [C] of the contexts [K, C] that the episode with this seed gets, as a copy."""
    row: NDArray = context[pick(seed, len(context))].copy()
    return row


def generator(*path: int | str) -> np.random.Generator:
    """A numpy generator for this path."""
    return np.random.Generator(np.random.SFC64(_digest(path)))


def generator_state(rng: np.random.Generator) -> NDArray:
    """The state of a generator made by `generator`, as an array."""
    state = rng.bit_generator.state
    return np.array([*state["state"]["state"], state["has_uint32"], state["uinteger"]], np.uint64)


class Position(NamedTuple):
    """Where somebody is who draws from a generator made by `generator`, in blocks, and has not used all of the last one."""

    state: Mapping[str, Any]  # of the bit generator, as numpy gives it, before the block
    used: int = 0  # numbers of random() that were used since

    def packed(self) -> NDArray:
        """[POSITION_WORDS], for `words_at`."""
        state, packed = self.state, np.empty(POSITION_WORDS, np.uint64)
        packed[: RNG_WORDS - 2] = state["state"]["state"]
        packed[RNG_WORDS - 2], packed[RNG_WORDS - 1], packed[RNG_WORDS] = (
            state["has_uint32"],
            state["uinteger"],
            self.used,
        )
        return packed


def words_at(packed: NDArray) -> NDArray:
    """The state of a generator that has drawn just what was used there, as `generator_state` gives it."""
    rng = generator()
    restore_generator(rng, packed[:RNG_WORDS])
    rng.random(int(packed[RNG_WORDS]))
    return generator_state(rng)


def restore_generator(rng: np.random.Generator, saved: NDArray) -> None:
    """Set a generator made by `generator` to a saved state."""
    *state, has_uint32, uinteger = (int(word) for word in saved)
    words = {"state": np.array(state, np.uint64)}
    rng.bit_generator.state = {"bit_generator": "SFC64", "state": words, "has_uint32": has_uint32, "uinteger": uinteger}


@dataclass(frozen=True, slots=True)
class EpisodeSeeds:
    """The episodes of one lane: number(k) = start + k × stride, seeded by tree(*path, number). Implements core.SeedStream."""

    path: Path
    start: int = 0
    stride: int = 1

    def number(self, k: int) -> int:
        return self.start + int(k) * self.stride  # a vector env counts in numpy, whose integers have another repr

    def seed(self, k: int) -> int:
        return tree(*self.path, self.number(k))


def training_episodes(run_seed: int, lane: int, start: int = 0) -> EpisodeSeeds:
    """The lane's episodes from number `start` on: the same in every worker and mode."""
    return EpisodeSeeds((run_seed, "env", lane), start)


def closing_seed(eval_seed: int) -> int:
    """The evaluation seed of the closing evaluation: fresh episodes, by which no weights were chosen during training."""
    return tree(eval_seed, "closing")


def scoring_seed(eval_seed: int) -> int:
    """The evaluation seed of `freewheel eval`: episodes that the run itself has not seen in any evaluation."""
    return tree(eval_seed, "scoring")


def evaluation_episodes(eval_seed: int, lane: int, lanes: int) -> EpisodeSeeds:
    """The lane's share of evaluation episodes 0, 1, 2, ...: the same for every mode, algorithm and number of lanes."""
    return EpisodeSeeds((eval_seed, "eval"), start=lane, stride=lanes)
