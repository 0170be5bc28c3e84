"""The arithmetic of learners that train together. Each has a share of the rows; together they act like one with all."""

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

#: Why no CUDA graph replays an update that contains sums over learners.
NO_GRAPH = "several learners train together, and a graph cannot wait for the others"


def gathered(peers: Peers, values: NDArray) -> NDArray:
    """Return the numbers [n] of every learner as [count, n] float64. The sum adds only zeros: all get the same bits."""
    table = np.zeros((peers.count, len(values)))
    table[peers.rank] = values
    if peers.count > 1:
        peers.sum(table)
    return table


def share(total: int, peers: Peers) -> int:
    """Return this learner's part of `total`. The parts of all learners differ by one at most."""
    return total * (peers.rank + 1) // peers.count - total * peers.rank // peers.count


def own_seed(spec: LearnerSpec) -> int:
    """Return the seed of random numbers that differ between learners. Shared numbers come from the run's seed."""
    rank = spec.services.peers.rank
    return tree(spec.seed, "learners", rank) if rank else spec.seed


def checksum(vector: Tensor) -> float:
    """Return a number that depends only on the bits of a vector, on any device."""
    return float(int(vector.detach().view(torch.int32).sum(dtype=torch.int64)) % 2**52)


def require_same(checksums: NDArray) -> None:
    """Raise FreewheelError unless all learners have the same weights."""
    if (checksums != checksums[0]).any():
        other = int(np.flatnonzero(checksums != checksums[0])[0])
        raise FreewheelError(f"learners 0 and {other} train together but have different weights: please report this")


def first_of(peers: Peers, names: Sequence[str], found: str) -> str:
    """Return the first of `names` that any learner has found. Each learner has found one of them."""
    return names[int(gathered(peers, np.array([names.index(found)])).min())] if peers.count > 1 else found


def sum_gradients(peers: Peers, parameters: Sequence[Tensor], means: Tensor, share: float) -> Tensor:
    """Average gradients, in place, and further means [n] over the rows of all learners, by one sum. Return the means.

    share: this learner's share of all rows. Parameters that the loss does not reach have no gradient in any learner.
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
    """The minibatches of an epoch over the rows of all learners. Each learner contributes a part of every minibatch."""

    sizes: list[int]  # of this learner, in each minibatch; may be 0 if others have many more rows
    totals: list[int]  # of all learners

    @classmethod
    def of(cls, counts: Sequence[int], rank: int, rows: int, *, even: bool = False) -> Split:
        """Divide the rows `counts` of all learners into minibatches of at least `rows`. even: all parts of a learner
        have the same size, and some of its rows may be left over."""
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
    """Return mean and deviation (N - 1) of each minibatch over all learners, by one sum; (0, 1) below two values."""
    wide = [part.astype(np.float64) for part in values]
    sums = np.array([(part.sum(), part @ part) for part in wide])
    peers.sum(sums)
    means = [total and each / total for (each, _), total in zip(sums, totals, strict=True)]
    spread = [max(0.0, square - each * mean) for (each, square), mean in zip(sums, means, strict=True)]
    found = zip(means, spread, totals, strict=True)
    return [(mean, (far / (rows - 1)) ** 0.5) if rows > 1 else (0.0, 1.0) for mean, far, rows in found]
