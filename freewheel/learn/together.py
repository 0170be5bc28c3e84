"""The arithmetic of learners that train together: each has its share of the rows, and all do what one with all rows would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from freewheel.core import NDArray
from freewheel.errors import FreewheelError
from freewheel.learn.spec import LearnerSpec, Peers
from freewheel.seeding import tree

#: Why a device replays no graph of what sums are a part of.
NO_GRAPH = "several learners train together, and a graph cannot wait for the others"


def gathered(peers: Peers, values: NDArray) -> NDArray:
    """The numbers [n] of every learner, [count, n] float64: zeros are added to them, so that all have the same bits."""
    table = np.zeros((peers.count, len(values)))
    table[peers.rank] = values
    if peers.count > 1:
        peers.sum(table)
    return table


def share(total: int, peers: Peers) -> int:
    """This learner's part of so many: those of all learners differ by one at most."""
    return total * (peers.rank + 1) // peers.count - total * peers.rank // peers.count


def own_seed(spec: LearnerSpec) -> int:
    """Of random numbers that differ between learners. The seed of the run is that of what is the same in all."""
    rank = spec.services.peers.rank
    return tree(spec.seed, "learners", rank) if rank else spec.seed


def checksum(vector: Tensor) -> float:
    """A number that is the same for the same bits, on any device."""
    return float(int(vector.detach().view(torch.int32).sum(dtype=torch.int64)) % 2**52)


def require_same(checksums: NDArray) -> None:
    """That all learners have the same weights."""
    if (checksums != checksums[0]).any():
        other = int(np.flatnonzero(checksums != checksums[0])[0])
        raise FreewheelError(f"learners 0 and {other} train together but have different weights: please report this")


def first_of(peers: Peers, names: Sequence[str], found: str) -> str:
    """The first of these names that a learner has found; each has found one of them."""
    return names[int(gathered(peers, np.array([names.index(found)])).min())] if peers.count > 1 else found


def sum_gradients(peers: Peers, parameters: Sequence[Tensor], means: Tensor, share: float) -> Tensor:
    """Gradients in place, and further means [n] over this learner's rows, as those over the rows of all: by one sum.

    share: how many of all rows are this learner's. Parameters that the loss does not reach have no gradient, in any learner.
    """
    if peers.count == 1:
        return means
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([part.reshape(-1) for part in (*grads, means)]).mul_(share)
    peers.sum(flat)
    *parts, means = flat.split([part.numel() for part in (*grads, means)])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))
    return means


class Split(NamedTuple):
    """Minibatches of an epoch over the rows of all learners: each brings its part of every one of them."""

    sizes: list[int]  # rows of this learner; may be 0 where others have many more
    totals: list[int]  # rows of all

    @classmethod
    def of(cls, counts: Sequence[int], rank: int, rows: int, *, even: bool = False) -> Split:
        """From the rows that each learner has, in minibatches of `rows` over all, at least. even: all of a learner have the same
        size, for which rows may be left over."""
        parts = max(1, sum(counts) // rows)
        each = [
            [_from(count, part + 1, parts) - _from(count, part, parts) for part in range(parts)] for count in counts
        ]
        if even:
            each = [[count // parts] * parts for count in counts]
        return cls(each[rank], [sum(sizes) for sizes in zip(*each, strict=True)])


def _from(count: int, part: int, parts: int) -> int:
    return count * part // parts


def standards(peers: Peers, values: Sequence[NDArray], totals: Sequence[int]) -> list[tuple[float, float]]:
    """Mean and deviation (N - 1) over all learners of the values of each minibatch, by one sum; (0, 1) of fewer than two."""
    wide = [part.astype(np.float64) for part in values]
    sums = np.array([(part.sum(), part @ part) for part in wide])
    peers.sum(sums)
    means = [total and each / total for (each, _), total in zip(sums, totals, strict=True)]
    spread = [max(0.0, square - each * mean) for (each, square), mean in zip(sums, means, strict=True)]
    found = zip(means, spread, totals, strict=True)
    return [(mean, (far / (rows - 1)) ** 0.5) if rows > 1 else (0.0, 1.0) for mean, far, rows in found]
