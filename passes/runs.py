"""Gradients taken together into runs between which a bucket may end, and what lies before each such bound.

    gradients      0  1  2 │ 3 │ 4  5 │ 6  7  8 │ ...
    bounds       0         1   2      3         4

A cut is a bound at which a bucket ends. When all can be sent depends on the bytes of all kinds together; what is in a
bucket, on those of its own kind. So both are counted.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from .plan import GradSpec, Kind

__all__ = ["Cuts", "Runs"]

RUNS = 2048
"""A run has at least one part in so many of all gradients, or of their bytes: there are at most twice as many."""

Cuts: TypeAlias = tuple[int, ...]
"""How many runs lie before each end of a bucket, ascending; the last is all of them."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What lies before each bound of one kind.

    Attributes:
        sent: bytes that travel.
        last: the place of the last gradient, in ready order; -1 for none.
    """

    sent: list[float]
    last: list[int]


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a backward's gradients; of n runs there are n + 1 bounds.

    Attributes:
        ready: seconds of the backward until each run is.
        memory: bytes of the gradients before each bound.
        sent: bytes that travel for them.
        kinds: the same of each kind; the one with the most bytes comes first.
    """

    ready: list[float]
    memory: list[int]
    sent: list[float]
    kinds: list[Prefixes]

    @staticmethod
    def of(grads: Sequence[GradSpec], when: Sequence[float], sent: Sequence[float]) -> "Runs":
        """Those of gradients in ready order, with the seconds until each is ready and the bytes that travel for it."""
        bounds = _bounds(sent)
        sizes: defaultdict[Kind, list[float]] = defaultdict(lambda: [0.0] * len(bounds))
        places: defaultdict[Kind, list[int]] = defaultdict(lambda: [-1] * len(bounds))
        for run, (start, stop) in enumerate(pairwise(bounds), 1):
            for k in range(start, stop):
                kind = grads[k].dtype, grads[k].device
                sizes[kind][run] += sent[k]
                places[kind][run] = k
        kinds = [Prefixes(list(accumulate(sizes[kind])), list(accumulate(places[kind], max))) for kind in sizes]
        kinds.sort(key=lambda kind: -kind.sent[-1])
        memory = list(accumulate((grad.nbytes for grad in grads), initial=0))
        return Runs(
            ready=[when[bound - 1] for bound in bounds[1:]],
            memory=[memory[bound] for bound in bounds],
            sent=[sum(sizes) for sizes in zip(*(kind.sent for kind in kinds), strict=True)],
            kinds=kinds,
        )


def _bounds(sent: Sequence[float]) -> list[int]:
    """How many gradients lie before each bound."""
    most, large = -(-len(sent) // RUNS), sum(sent) / RUNS
    found, size = [0], 0.0
    for count, nbytes in enumerate(sent, 1):
        size += nbytes
        if count - found[-1] >= most or size >= large > 0:
            found.append(count)
            size = 0.0
    return found if found[-1] == len(sent) else [*found, len(sent)]
