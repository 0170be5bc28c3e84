"""What becomes of what the sites have learned: weights are averaged by rows, running statistics are pooled. Decides nothing else.

Statistics are vectors [mean, square, count], as learn/moments.py keeps them: `square` is the sum of squared distances from the
mean. Two of them are joined by Chan's formula, which is exact, and a part can be taken out of a whole again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from freewheel.core import NDArray
from freewheel.learn.spec import OBS_STATISTICS, POLICY, STATISTICS
from freewheel.policies.spec import PolicySpec


class Contribution(NamedTuple):
    """What a site has learned in one round."""

    learned: Mapping[str, NDArray]  # statistics: of the rows of this round alone
    rows: int  # that it was learned from, > 0


def average(base: Mapping[str, NDArray], sites: Sequence[Contribution]) -> dict[str, NDArray]:
    """The mean of their weights, each counted by its rows, in the types of `base`; to the statistics of `base`, which all of them
    have begun with, those of their rows are added."""
    total = sum(site.rows for site in sites)
    found: dict[str, NDArray] = {}
    for name, value in base.items():
        if name.startswith(STATISTICS):
            found[name] = value
            for site in sites:
                found[name] = joined(found[name], site.learned[name])
        else:
            mean = sum(site.learned[name].astype(np.float64) * (site.rows / total) for site in sites)
            found[name] = np.asarray(mean, value.dtype)
    return found


def distance(mean: Mapping[str, NDArray], sites: Sequence[Contribution]) -> float:
    """How far the sites' weights are from their mean, as a part of its length: the root of the mean square, by rows."""
    names = [name for name in mean if not name.startswith(STATISTICS)]
    total = sum(site.rows for site in sites)
    apart = sum(site.rows / total * _square(site.learned[name] - mean[name]) for name in names for site in sites)
    length = sum(_square(mean[name]) for name in names)
    return math.sqrt(apart / length) if length else 0.0


def _square(values: NDArray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def joined(one: NDArray, other: NDArray) -> NDArray:
    """The statistics of all rows of both."""
    total = one[-1] + other[-1]
    if not total:
        return one.copy()
    (mean, square), (their_mean, their_square) = _parts(one), _parts(other)
    distance = their_mean - mean
    share = other[-1] / total
    return np.concatenate(
        [mean + distance * share, square + their_square + np.square(distance) * one[-1] * share, [total]]
    )


def without(whole: NDArray, part: NDArray) -> NDArray:
    """The statistics of the rows of a whole that are not of this part of it."""
    count = whole[-1] - part[-1]
    if count <= 0:
        return np.zeros_like(whole)
    (mean, square), (their_mean, their_square) = _parts(whole), _parts(part)
    rest = mean + (mean - their_mean) * (part[-1] / count)
    between = np.square(rest - their_mean) * (part[-1] * count / whole[-1])
    return np.concatenate([rest, np.maximum(square - their_square - between, 0.0), [count]])


def _parts(statistics: NDArray) -> tuple[NDArray, NDArray]:
    columns = len(statistics) // 2
    return statistics[:columns], statistics[columns:-1]


def bounded(learned: Mapping[str, NDArray], rows: int) -> dict[str, NDArray]:
    """The same with statistics that count for so many rows at most; ValueError if they are of no rows at all."""
    found = dict(learned)
    for name, value in learned.items():
        if name.startswith(STATISTICS):
            mean, square = _parts(value)
            if value[-1] < 0 or (square < 0).any():
                raise ValueError(f"'{name}' are no statistics of rows")
            if value[-1] > rows:
                found[name] = np.concatenate([mean, square * (rows / value[-1]), [rows]])
    return found


def round_of(learned: Mapping[str, NDArray], base: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """What a site hands over that has begun with `base`: its weights, and the statistics of the rows since then."""
    return {
        name: without(value, base[name]) if name.startswith(STATISTICS) else value for name, value in learned.items()
    }


def weights_of(learned: Mapping[str, NDArray], policy: PolicySpec) -> dict[str, NDArray]:
    """What acts, with the statistics that it normalises observations by: the weights of a checkpoint."""
    weights = {name.removeprefix(POLICY): np.array(value) for name, value in learned.items() if name.startswith(POLICY)}
    if OBS_STATISTICS in learned:
        statistics = learned[OBS_STATISTICS]
        mean, square = _parts(statistics)
        scale = 1.0 / np.sqrt(square / max(statistics[-1], 1.0) + 1e-8)
        for start, stop in policy.normalised:
            weights["norm.mean"][start:stop], weights["norm.scale"][start:stop] = mean[start:stop], scale[start:stop]
    return weights
