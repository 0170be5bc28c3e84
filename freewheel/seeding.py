"""A tree of seeds derived from one seed, for all random choices of a run. No global generator is used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from freewheel.core import NDArray

Path = tuple[int | str, ...]
RNG_WORDS = 6  # length of a packed generator state
POSITION_WORDS = RNG_WORDS + 1  # length of a packed Position


def _digest(path: Path) -> int:
    """Return a 128-bit number that depends only on the path, not on the process or PYTHONHASHSEED."""
    return int.from_bytes(hashlib.blake2b(repr(path).encode(), digest_size=16).digest(), "little")


def tree(*path: int | str) -> int:
    """Return the seed at this path, for example tree(run_seed, "env", lane, k): 31 bits, as every simulator accepts."""
    return _digest(path) & 0x7FFFFFFF


def pick(seed: int, count: int) -> int:
    """Return the index, below `count`, for the episode with this seed: uniform and independent of its other uses."""
    return _digest(("pick", int(seed))) % count


def drawn(context: NDArray, seed: int) -> NDArray:
    """Return a copy of the row [C] of the contexts [K, C] for the episode with this seed."""
    row: NDArray = context[pick(seed, len(context))].copy()
    return row


def generator(*path: int | str) -> np.random.Generator:
    """Return a numpy generator for this path."""
    return np.random.Generator(np.random.SFC64(_digest(path)))


def generator_state(rng: np.random.Generator) -> NDArray:
    """Return the state of a generator made by `generator`, as an array."""
    state = rng.bit_generator.state
    return np.array([*state["state"]["state"], state["has_uint32"], state["uinteger"]], np.uint64)


class Position(NamedTuple):
    """A position in the numbers of a generator made by `generator`, for a reader that draws them in blocks."""

    state: Mapping[str, Any]  # numpy's state of the bit generator before the current block
    used: int = 0  # numbers of random() used from the block

    def packed(self) -> NDArray:
        """Return the position as an array [POSITION_WORDS], for `words_at`."""
        state, packed = self.state, np.empty(POSITION_WORDS, np.uint64)
        packed[: RNG_WORDS - 2] = state["state"]["state"]
        packed[RNG_WORDS - 2], packed[RNG_WORDS - 1], packed[RNG_WORDS] = (
            state["has_uint32"],
            state["uinteger"],
            self.used,
        )
        return packed


def words_at(packed: NDArray) -> NDArray:
    """Return the state of a generator that has drawn exactly the used numbers, in the form of `generator_state`."""
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
        return self.start + int(k) * self.stride  # int: numpy integers, in which a vector env counts, have another repr

    def seed(self, k: int) -> int:
        return tree(*self.path, self.number(k))


def training_episodes(run_seed: int, lane: int, start: int = 0) -> EpisodeSeeds:
    """Return the lane's episodes from number `start` on, which are the same in every worker and mode."""
    return EpisodeSeeds((run_seed, "env", lane), start)


def closing_seed(eval_seed: int) -> int:
    """Return the seed of the closing evaluation: fresh episodes, which did not select weights during training."""
    return tree(eval_seed, "closing")


def scoring_seed(eval_seed: int) -> int:
    """Return the seed of `freewheel eval`: episodes that no evaluation of the run has played."""
    return tree(eval_seed, "scoring")


def evaluation_episodes(eval_seed: int, lane: int, lanes: int) -> EpisodeSeeds:
    """Return the lane's share of evaluation episodes 0, 1, 2, ..., which depend on no mode, algorithm or lane count."""
    return EpisodeSeeds((eval_seed, "eval"), start=lane, stride=lanes)
