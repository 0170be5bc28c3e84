"""Plays simple defenders against both red agents on the real simulator and keeps what happened, to judge other worlds by."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from time import perf_counter
from typing import Any, cast

import numpy as np

from packages.cage2.tests.support.cage2_games import DATA, DEFENDERS, REDS, Games, joined, play_real, record, stored

AT_ONCE = 25  # episodes a process plays before it answers


def asked(pool: ProcessPoolExecutor, episodes: int) -> Iterator[tuple[str, str, list[Future[Games]]]]:
    """Every pair of defender and red, and its games under way."""
    for red in REDS:
        for name in DEFENDERS:
            parts = [range(first, min(first + AT_ONCE, episodes)) for first in range(0, episodes, AT_ONCE)]
            yield name, red, [pool.submit(partial(play_real, name, red), part) for part in parts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000, help="of each pair, with the seeds 0, 1, 2, ...")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="see that it works: few episodes, and nothing is kept")
    given = parser.parse_args()
    episodes = 4 if given.quick else given.episodes
    began = perf_counter()
    with ProcessPoolExecutor(given.workers, get_context("forkserver")) as pool:
        for name, red, parts in list(asked(pool, episodes)):
            kept = record(joined([part.result() for part in parts]))
            returns = kept["reward"].sum(axis=1) / 10
            print(f"{red:16} {name:10} mean {np.mean(returns):9.2f}  sd {np.std(returns):7.2f}", flush=True)
            if not given.quick:
                DATA.mkdir(exist_ok=True)
                np.savez_compressed(stored(name, red), **cast("dict[str, Any]", kept))
    print(f"{6 * episodes} episodes in {perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
