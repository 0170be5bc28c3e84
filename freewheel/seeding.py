"""One seed grows a tree of seeds: run, learner, lane, episode and its context, evaluation. Nobody touches a global RNG."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from freewheel.core import NDArray

Path = tuple[int | str, ...]


def _digest(path: Path) -> int:
    """A number of 128 bits that depends on the path alone, not on the process or PYTHONHASHSEED."""
    return int.from_bytes(hashlib.blake2b(repr(path).encode(), digest_size=16).digest(), "little")


def tree(*path: int | str) -> int:
    """The seed at this branch, e.g. tree(run_seed, "env", lane, k): 31 bits, so that any simulator takes it."""
    return _digest(path) & 0x7FFFFFFF


def pick(seed: int, count: int) -> int:
    """Which of `count` things the episode of this seed gets: uniform, whatever else the seed is used for."""
    return _digest(("pick", int(seed))) % count


def drawn(context: NDArray, seed: int) -> NDArray:
    """The row [C] of a table of contexts [K, C] that the episode of this seed is told, as a copy."""
    row: NDArray = context[pick(seed, len(context))].copy()
    return row


def generator(*path: int | str) -> np.random.Generator:
    """A numpy generator of its own for this branch."""
    return np.random.Generator(np.random.SFC64(_digest(path)))


def generator_state(rng: np.random.Generator) -> NDArray:
    """Where a generator of ours stands, as an array."""
    state = rng.bit_generator.state
    return np.array([*state["state"]["state"], state["has_uint32"], state["uinteger"]], np.uint64)


def restore_generator(rng: np.random.Generator, saved: NDArray) -> None:
    """Put a generator of ours where it stood."""
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
    """Lane's episodes from number `start` on: the same whoever plays them."""
    return EpisodeSeeds((run_seed, "env", lane), start)


def evaluation_episodes(eval_seed: int, lane: int, lanes: int) -> EpisodeSeeds:
    """Lane's share of evaluation episodes 0, 1, 2, ...: the same for every mode, algorithm and number of lanes."""
    return EpisodeSeeds((eval_seed, "eval"), start=lane, stride=lanes)
