"""Where buckets should end: what `bucket_mb="auto"` does in place of a size (`choosing.py`).

Plans are compared by the step they lead to (`step.py`); what is compared is found by a search (`cutting.py`) among the
places at which buckets may end (`runs.py`).

Note [equal buckets]
~~~~~~~~~~~~~~~~~~~~
Of S bytes that become ready evenly in T seconds, in buckets of b bytes (α and β as in `step.py`):

    βS > T, the network is the bottleneck: it starts after one bucket, and is busy from then on
        end(b) = T·b/S + α·S/b + βS         least at b* = S·sqrt(α/T), with sqrt(T/α) buckets
    βS < T, computation is: what is exposed is the last bucket, if the network keeps up with those before
        end(b) = T + α + βb, α + βb ≤ T·b/S     least at b* = α·S/(T − βS)

A model twice as large computes about twice as long, T = τS. Then b* = sqrt(αS/τ) in the first case: the best size grows
as the square root of the model, as S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020, arXiv:2006.15704, saw it grow slower than the model; and in the second it is α/(τ − β), the same
for all. `equal_size` is b*; at βS = T the two meet nowhere, which is where unequal buckets gain most.

Note [one size]
~~~~~~~~~~~~~~~
A plan of one size can send a large gradient alone and go on with the bucket it found open (`bucketing.py`), where
buckets that end one after the other need one before it and one after it. So where a gradient may be too large to share
a bucket, these plans are tried as well (`SIZES`). Otherwise they have no advantage: what was open can travel with the
gradient, no later and with one latency less.

Note [doubt]
~~~~~~~~~~~~
Few buckets that just meet a deadline are wrong by as much as the prediction of the computation is, and that comes from
arithmetic at the speed of large matrix products, which little else reaches: backwards of five models took 1.2 to 2.8
times as long, compiled by inductor, on one core. So what is minimised is the mean step, each relative to the best
possible, over computations that last `SCALES` times as long as predicted; a bucket also costs the processor `CUT`, and
what its all-reduce takes from it. Candidates are the fewest buckets for each of these computations and for all of them,
with more and less `SLACK`.

Least certain is when the small gradients between large ones are ready: those of a norm come out of reductions, which
no peak speed describes. So no bucket waits for a `TAIL` of such; they travel with the next one.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import sympy

from .bucketing import plan_buckets
from .cost import Network
from .cutting import LARGEST, Search
from .plan import BucketPlan, GradSpec, Kind
from .runs import Cuts, Runs
from .step import Step

__all__ = ["Stretch", "cut_of", "equal_size"]

SCALES = (0.7, 1.0, 1.4, 2.0, 2.8)
TOGETHER = (SCALES, *((scale,) for scale in SCALES))
"""For which of them candidates are looked for: all at once, and each."""

SLACK = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Later than the earliest end of the step, as a share of it."""

TAIL = 1 / 32
"""Share of a bucket that is not worth waiting for."""

CUT = 50e-6
"""Seconds that one more bucket costs the processor, without its all-reduce: a piece of compiled code, launch, wait."""

SIZES = tuple(int(mib * (1 << 20)) for mib in (0.5, 1, 2, 4, 8, 16, 25, 32, 64))
"""Bytes of a bucket that are tried where a gradient may be too large to share one."""

FIRST = 1 << 20
"""Bytes of the first bucket then, at most."""


def cut_of(network: Network) -> float:
    """Seconds that one more bucket costs the processor."""
    return CUT + network.cpu_per_call


def equal_size(network: Network, nbytes: Any, seconds: Any) -> Any:
    """The best size of equal buckets, in bytes; see Note [equal buckets]. Takes and gives sympy expressions as well.

    Args:
        network: what sends them.
        nbytes: of all gradients.
        seconds: that the backward computes for.
    """
    spare = sympy.sympify(seconds - network.sending(nbytes))
    bound = nbytes * sympy.sqrt(network.delay / seconds)
    return sympy.Piecewise((bound, spare <= 0), (sympy.Min(nbytes, network.delay * nbytes / spare), True))


@dataclass(frozen=True)
class Stretch:
    """The gradients of one backward on their way to the network.

    Attributes:
        grads: in ready order.
        when: seconds of the backward until each is ready.
        sent: bytes that travel for each.
        total: seconds of the backward.
        network: what sends them.
        alone: outputs of gradients that share no bucket.
    """

    grads: tuple[GradSpec, ...]
    when: tuple[float, ...]
    sent: tuple[float, ...]
    total: float
    network: Network
    alone: frozenset[int] = frozenset()

    @staticmethod
    def of(
        grads: Iterable[GradSpec],
        when: Mapping[int, float],
        total: float,
        network: Network,
        *,
        sent: Callable[[GradSpec], float] = lambda grad: grad.nbytes,
        alone: frozenset[int] = frozenset(),
    ) -> "Stretch":
        """Makes one of gradients in any order, `when` by their outputs."""
        ordered = tuple(sorted(grads, key=lambda grad: (grad.ready, grad.output)))
        ready = accumulate((when[grad.output] for grad in ordered), max)
        return Stretch(ordered, tuple(ready), tuple(map(sent, ordered)), total, network, alone)

    def finish(self, plan: BucketPlan, scale: float = 1.0) -> float:
        """Seconds after which backward and sending are over.

        Args:
            plan: how the gradients are packed.
            scale: how many times as long computation takes as predicted.
        """
        return self._step.end(self._launches(plan), scale)

    def price(self, plan: BucketPlan) -> float:
        """What Note [doubt] minimises: 1 is a step that exposes only what it must, where another processor sends."""
        return self._price(self._launches(plan))

    def plan(self) -> BucketPlan:
        """The best plan: one with these ends, unless one of a single size is better; see Note [one size]."""
        found = [plan_buckets(self.grads, cap=LARGEST, first_cap=FIRST, ends=self.ends() | self._ends_around_alone())]
        if max((grad.nbytes for grad in self.grads), default=0) > self._search.largest / 2:
            least = min((grad.nbytes for grad in self.grads if grad.output in self.alone), default=math.inf)
            found += [plan_buckets(self.grads, cap=size, first_cap=FIRST) for size in SIZES if size < least]
        return min(found, key=self.price)

    def ends(self) -> frozenset[int]:
        """The outputs of the gradients that end a bucket in the best plan."""
        if not self.grads:
            return frozenset()
        extremes = (True, False) if self.network.cpu_per_byte else (False,)
        fewest = self._search.fewest
        found = {fewest(scales, slack, late=late) for late in extremes for scales in TOGETHER for slack in SLACK}

        def order(cuts: Cuts) -> tuple[float, int, Cuts]:
            launches = [(self.when[last], nbytes) for last, nbytes in self._search.buckets(cuts)]
            return self._price(launches), len(cuts), cuts

        best = min(set(map(self._trimmed, found)), key=order)
        return frozenset(self.grads[last].output for last, _ in self._search.buckets(best))

    def _ends_around_alone(self) -> frozenset[int]:
        """The outputs of those that are alone, and of those of their kinds right before them."""
        found: set[int] = set()
        before: dict[Kind, int] = {}
        for grad in self.grads:
            kind = grad.dtype, grad.device
            if grad.output in self.alone:
                found |= {grad.output, before.get(kind, grad.output)}
            before[kind] = grad.output
        return frozenset(found)

    def _trimmed(self, cuts: Cuts) -> Cuts:
        """Without the tails of buckets but the last; see Note [doubt]."""
        memory, found = self._runs.memory, [0]
        for cut in cuts[:-1]:
            least = memory[cut] - TAIL * (memory[cut] - memory[found[-1]])
            found.append(bisect_left(memory, least, found[-1] + 1, cut))
        return (*found[1:], cuts[-1])

    @cached_property
    def _runs(self) -> Runs:
        return Runs.of(self.grads, self.when, self.sent)

    @cached_property
    def _step(self) -> Step:
        return Step(next(iter(self.when), 0.0), self.total, self.network)

    @cached_property
    def _search(self) -> Search:
        return Search(self._runs, self._step)

    def _launches(self, plan: BucketPlan) -> list[tuple[float, float]]:
        """When each bucket is ready, and how many bytes travel for it."""
        place = {grad.output: k for k, grad in enumerate(self.grads)}
        members = ([place[grad.output] for grad in bucket.grads] for bucket in plan.buckets)
        return [(max(self.when[k] for k in own), sum(self.sent[k] for k in own)) for own in members]

    def _price(self, launches: Sequence[tuple[float, float]]) -> float:
        """`price`, for buckets that are ready at these seconds and have so many bytes to be sent."""
        calls, soonest = cut_of(self.network) * len(launches), self._search.soonest
        # A backward of nothing would have no shares: it counts as long as a cut.
        shares = [(self._step.end(launches, scale) + calls) / max(soonest(scale), CUT) for scale in SCALES]
        return sum(shares) / len(shares)
