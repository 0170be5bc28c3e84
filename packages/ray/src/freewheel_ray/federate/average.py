"""Average the weights of the sites by rows, and pool their running statistics.

Statistics are vectors [mean, square, count] as in learn/moments.py, where `square` is the sum of squared distances from the mean.
Chan's formula joins two of them exactly, and also removes a part from a whole.
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
    """The weights and statistics that a site has learned in one round."""

    learned: Mapping[str, NDArray]  # its statistics cover only the rows of this round
    rows: int  # rows of the round, > 0


def average(base: Mapping[str, NDArray], sites: Sequence[Contribution]) -> dict[str, NDArray]:
    """Return the mean of the sites' weights, weighted by rows, in the types of `base`. The statistics of the sites' rows are
    added to those of `base`, from which all sites have begun."""
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
    """Return the distance of the sites' weights from their mean: the root mean square, weighted by rows, over the mean's norm."""
    names = [name for name in mean if not name.startswith(STATISTICS)]
    total = sum(site.rows for site in sites)
    apart = sum(site.rows / total * _square(site.learned[name] - mean[name]) for name in names for site in sites)
    length = sum(_square(mean[name]) for name in names)
    return math.sqrt(apart / length) if length else 0.0


def _square(values: NDArray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def joined(one: NDArray, other: NDArray) -> NDArray:
    """Return the statistics of the rows of both."""
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
    """Return the statistics of the rows that are in the whole but not in the part."""
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
    """Return the same with statistics that count for at most this many rows; raise ValueError if they cannot be statistics."""
    found = dict(learned)
    for name, value in learned.items():
        if name.startswith(STATISTICS):
            mean, square = _parts(value)
            if value[-1] < 0 or (square < 0).any():
                raise ValueError(f"'{name}' does not hold statistics of rows")
            if value[-1] > rows:
                found[name] = np.concatenate([mean, square * (rows / value[-1]), [rows]])
    return found


def round_of(learned: Mapping[str, NDArray], base: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Return what a site sends after it has begun with `base`: its weights, and the statistics of the rows since then."""
    return {
        name: without(value, base[name]) if name.startswith(STATISTICS) else value for name, value in learned.items()
    }


def weights_of(learned: Mapping[str, NDArray], policy: PolicySpec) -> dict[str, NDArray]:
    """Return the weights of a checkpoint: the policy, with the statistics that normalise its observations."""
    weights = {name.removeprefix(POLICY): np.array(value) for name, value in learned.items() if name.startswith(POLICY)}
    if OBS_STATISTICS in learned:
        statistics = learned[OBS_STATISTICS]
        mean, square = _parts(statistics)
        scale = 1.0 / np.sqrt(square / max(statistics[-1], 1.0) + 1e-8)
        for start, stop in policy.normalised:
            weights["norm.mean"][start:stop], weights["norm.scale"][start:stop] = mean[start:stop], scale[start:stop]
    return weights
