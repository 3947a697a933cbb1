"""Where buckets should end: what `bucket_mb="auto"` does in place of a size (`choosing.py`).

The model of a step: gradient k is ready r[k] seconds after the backward began, which computes for T seconds; a bucket
of B bytes is launched with its last gradient and takes α + βB on a network that sends one bucket after the other (α is
`Network.delay`, β the time of a byte in `Network.all_reduce`). The step is over when both are done.

Note [equal buckets]
~~~~~~~~~~~~~~~~~~~~
Of S bytes that become ready evenly, in buckets of b bytes:

    βS > T, the network is the bottleneck: it starts after one bucket, and is busy from then on
        end(b) = T·b/S + α·S/b + βS         least at b* = S·sqrt(α/T), with sqrt(T/α) buckets
    βS < T, computation is: what is exposed is the last bucket, if the network keeps up with those before
        end(b) = T + α + βb, α + βb ≤ T·b/S     least at b* = α·S/(T − βS)

A model twice as large computes about twice as long, T = τS. Then b* = sqrt(αS/τ) in the first case: the best size grows
as the square root of the model, as S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020, arXiv:2006.15704, saw it grow slower than the model; and in the second it is α/(τ − β), the same
for all. `equal_size` is b*; at βS = T the two meet nowhere, which is where unequal buckets gain most.

Note [unequal buckets]
~~~~~~~~~~~~~~~~~~~~~~
Let P[j] be the time of the first j gradients' bytes, F[j] the earliest moment at which they can all be there:

    F[j] = min over i < j of  max(F[i], r[j]) + α + P[j] − P[i]

F never falls, so among the i whose network is idle by r[j] (F[i] ≤ r[j]) the last is best, and among the others, a
window that only moves forward, the least F[i] − P[i]: a queue of minima gives all F in O(n) (after sorting). From the
end, the fewest buckets that meet a deadline follow greedily: the last bucket is the longest that can start in time
after what is left, and what is left has a deadline again. Both are exact; buckets come out as large as what is left to
hide them, and the last ones small.

While a bucket is packed its gradients are there twice, and a large one leaves the caches before it is sent. So none is
larger than `LARGEST` bytes or this `SHARE` of all, whichever is more, except a single gradient: fewer i are allowed,
and all of the above still holds.

A plan of one size can send a gradient that large alone and go on with the bucket it found open (`bucketing.py`), where
buckets that end one after the other need one before it and one after it. So these plans are tried as well then
(`SIZES`). Otherwise they have no advantage: what was open can travel with the gradient, no later and with one latency
less.

Note [one processor]
~~~~~~~~~~~~~~~~~~~~
On a CPU without a core to spare, what sends takes its time from what computes: c seconds for each byte, of which at
most b are sent in a second. So of the B bytes that are ready before gradient k, from r[0] on, those that can have been
sent delay it:

    r'[k] = r[k] + min(c·B, f/(1 − f)·(r[k] − r[0])), f = min(1/2, b·c)

where the half is what a fair scheduler leaves; what is left of c·S then delays what follows the last one. What a plan
is worth (`finish`) counts the bytes of the buckets launched before. What searches for plans does not know these yet, so
it looks for those of two extremes: all that was ready is sent, r' in place of r, and nothing is, r.

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
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import sympy
import torch

from .bucketing import plan_buckets
from .cost import Network
from .plan import BucketPlan, GradSpec

__all__ = ["Stretch", "cut_of", "equal_size"]

SCALES = (0.7, 1.0, 1.4, 2.0, 2.8)
SLACK = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Later than the earliest end of the step, as a share of it."""

TAIL = 1 / 32
"""Share of a bucket that is not worth waiting for."""

CUT = 50e-6
"""Seconds that one more bucket costs the processor, without its all-reduce: a piece of compiled code, launch, wait."""

LARGEST, SHARE = 16 << 20, 1 / 8
"""What a bucket may hold: bytes, or a share of all gradients; see Note [unequal buckets]."""

SIZES = tuple(int(mib * (1 << 20)) for mib in (0.5, 1, 2, 4, 8, 16, 25, 32, 64))
"""Bytes of a bucket that are tried where a gradient may be too large to share one."""

FIRST = 1 << 20
"""Bytes of the first bucket then, at most."""

RUNS = 2048
"""Gradients between which a bucket may end; where there are more, some are taken together."""

Kind: TypeAlias = "tuple[torch.dtype, torch.device]"
Cuts: TypeAlias = tuple[int, ...]
"""How many runs lie before each end of a bucket, ascending; the last is all of them."""


def equal_size(network: Network, nbytes: Any, seconds: Any) -> Any:
    """The best size of equal buckets, in bytes; see Note [equal buckets]. Takes and gives sympy expressions as well.

    Args:
        network: what sends them.
        nbytes: of all gradients.
        seconds: that the backward computes for.
    """
    sending = network.all_reduce(nbytes) - network.delay
    spare = sympy.sympify(seconds - sending)
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
        place = {grad.output: k for k, grad in enumerate(self.grads)}
        launches = []
        for bucket in plan.buckets:
            members = [place[grad.output] for grad in bucket.grads]
            launches.append((max(self.when[k] for k in members), sum(self.sent[k] for k in members)))
        return self._end(launches, scale)

    def _end(self, launches: Sequence[tuple[float, float]], scale: float) -> float:
        """`finish`, for buckets that are ready at these seconds and have so many bytes to be sent."""
        free, taking, delay, ready = 0.0, 0.0, 0.0, 0.0
        for ready, nbytes in launches:
            delay = self._delay(taking, scale * (ready - self.when[0]))
            free = max(free, scale * ready + delay) + float(self.network.all_reduce(nbytes))
            taking += self._taking(nbytes)
        rest = scale * (self.total - ready)
        return max(free, scale * ready + delay + rest + self._delay(taking - delay, rest))

    def _taking(self, nbytes: float) -> float:
        """Seconds that sending so many bytes takes from the processor."""
        return float(self.network.cpu_per_byte * self.network.sent(nbytes))

    def _delay(self, taking: float, computed: float) -> float:
        """Seconds for which what takes so many from the processor delays what computes meanwhile."""
        share = min(0.5, self.network.bandwidth * self.network.cpu_per_byte)
        return min(taking, share / (1 - share) * computed)

    def price(self, plan: BucketPlan) -> float:
        """What Note [doubt] minimises: 1 is a step of which nothing but the unavoidable is exposed."""
        return self._mean([self.finish(plan, scale) for scale in SCALES], len(plan.buckets))

    def plan(self) -> BucketPlan:
        """The best plan: one with these ends, unless one of a single size is better; see Note [unequal buckets]."""
        found = [plan_buckets(self.grads, cap=LARGEST, first_cap=FIRST, ends=self.ends() | self._ends_around_alone())]
        if max((grad.nbytes for grad in self.grads), default=0) > self._largest / 2:
            least = min((grad.nbytes for grad in self.grads if grad.output in self.alone), default=math.inf)
            found += [plan_buckets(self.grads, cap=size, first_cap=FIRST) for size in SIZES if size < least]
        return min(found, key=self.price)

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

    def ends(self) -> frozenset[int]:
        """The outputs of the gradients that end a bucket in the best plan."""
        if not self.grads:
            return frozenset()
        several = (SCALES, *((scale,) for scale in SCALES))
        extremes = (True, False) if self.network.cpu_per_byte else (False,)
        found = {self._fewest(scales, slack, late=late) for late in extremes for scales in several for slack in SLACK}
        _, _, best = min((self._price_of(cuts), len(cuts), cuts) for cuts in map(self._trimmed, found))
        return frozenset(self._last[kind][cut] for kind, own in self._by_kind(best).items() for cut in own)

    def _trimmed(self, cuts: Cuts) -> Cuts:
        """Without the tails of buckets but the last; see Note [doubt]."""
        held, found = self._held, [0]
        for cut in cuts[:-1]:
            least = held[cut] - TAIL * (held[cut] - held[found[-1]])
            found.append(bisect_left(held, least, found[-1] + 1, cut))
        return (*found[1:], cuts[-1])

    # --- runs of gradients ------------------------------------------------------------------------

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """How many gradients lie before each place where a bucket may end."""
        most, large = -(-len(self.grads) // RUNS), sum(self.sent) / RUNS
        found, count, size = [0], 0, 0.0
        for k, nbytes in enumerate(self.sent):
            count, size = count + 1, size + nbytes
            if count >= most or size >= large:
                found.append(k + 1)
                count, size = 0, 0.0
        return (*found, len(self.sent)) if found[-1] < len(self.sent) else tuple(found)

    @cached_property
    def _ready(self) -> tuple[float, ...]:
        """When each run is ready."""
        return tuple(self.when[bound - 1] for bound in self._bounds[1:])

    def _moments(self, scale: float, *, late: bool) -> list[float]:
        """`_ready` in a computation that lasts so many times as long; `late`: all that was ready is sent beside it."""
        moments = [scale * ready for ready in self._ready]
        if not late:
            return moments
        sent = (sum(sizes) for sizes in zip(*self._bytes.values(), strict=True))
        return [
            moment + self._delay(self._taking(before), moment - moments[0])
            for moment, before in zip(moments, sent, strict=False)
        ]

    @cached_property
    def _bytes(self) -> dict[Kind, list[float]]:
        """Bytes of each kind before each bound; the kind with the most of them comes first."""
        found: dict[Kind, list[float]] = {}
        for k, (start, stop) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            for grad, nbytes in zip(self.grads[start:stop], self.sent[start:stop], strict=True):
                sizes = found.setdefault((grad.dtype, grad.device), [0.0] * len(self._bounds))
                sizes[k + 1] += nbytes
        sums = {kind: list(accumulate(sizes)) for kind, sizes in found.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1][-1]))

    @cached_property
    def _last(self) -> dict[Kind, list[int]]:
        """Of each kind, the output of the last gradient before each bound; -1 for none."""
        return {kind: [-1 if k is None else self.grads[k].output for k in places] for kind, places in self._at.items()}

    @cached_property
    def _held(self) -> list[float]:
        """Bytes of memory before each bound."""
        sums = list(accumulate((grad.nbytes for grad in self.grads), initial=0))
        return [sums[bound] for bound in self._bounds]

    @property
    def _largest(self) -> float:
        return max(LARGEST, SHARE * self._held[-1])

    @cached_property
    def _at(self) -> dict[Kind, list[int | None]]:
        found: dict[Kind, list[int | None]] = {kind: [None] for kind in self._bytes}
        for start, stop in zip(self._bounds, self._bounds[1:], strict=False):
            for places in found.values():
                places.append(places[-1])
            for k in range(start, stop):
                found[self.grads[k].dtype, self.grads[k].device][-1] = k
        return found

    def _by_kind(self, cuts: Cuts) -> dict[Kind, list[int]]:
        """Where buckets of each kind end: the largest kind's at every cut, others' where there is enough to send."""
        found: dict[Kind, list[int]] = {}
        enough = self.network.delay
        for number, (kind, sizes) in enumerate(self._bytes.items()):
            own, before = [], 0
            for cut in cuts:
                some = self._at[kind][cut] is not None and self._at[kind][cut] != self._at[kind][before]
                worth = self._sending(sizes[cut] - sizes[before]) > enough
                if some and (number == 0 or worth or cut == cuts[-1]):
                    own.append(cut)
                    before = cut
            if not own or self._at[kind][own[-1]] != self._at[kind][-1]:
                own.append(len(self._ready))
            found[kind] = own
        return found

    # --- the model --------------------------------------------------------------------------------

    def _sending(self, nbytes: float) -> float:
        return float(self.network.all_reduce(nbytes)) - self.network.delay

    def _price_of(self, cuts: Cuts) -> float:
        launches = []
        for kind, own in self._by_kind(cuts).items():
            sizes = self._bytes[kind]
            for start, cut in zip([0, *own], own, strict=False):
                at = self._at[kind][cut]
                assert at is not None
                launches.append((at, self.when[at], sizes[cut] - sizes[start]))
        launches.sort()
        timed = [(ready, nbytes) for _, ready, nbytes in launches]
        return self._mean([self._end(timed, scale) for scale in SCALES], len(launches))

    def _mean(self, ends: Sequence[float], buckets: int) -> float:
        shares = [
            (end + cut_of(self.network) * buckets) / max(self._earliest(scale)[-1], scale * self.total, CUT)
            for scale, end in zip(SCALES, ends, strict=True)
        ]
        return sum(shares) / len(shares)

    @cached_property
    def _times(self) -> list[float]:
        """Seconds that the bytes before each bound take, P of Note [unequal buckets]."""
        return [self._sending(sum(sizes)) for sizes in zip(*self._bytes.values(), strict=True)]

    @cached_property
    def _found(self) -> dict[tuple[float, bool], tuple[list[float], list[float]]]:
        return {}

    def _earliest(self, scale: float) -> list[float]:
        """F of Note [unequal buckets]: when what lies before each bound can have been sent."""
        return self._search(scale, late=False)[1]

    def _search(self, scale: float, *, late: bool) -> tuple[list[float], list[float]]:
        """`_moments`, and the F that follow from them."""
        if (scale, late) in self._found:
            return self._found[scale, late]
        moments = self._moments(scale, late=late)
        times, alpha, held, largest = self._times, self.network.delay, self._held, self._largest
        finish = [0.0]
        idle = 0  # the last bound whose bytes can have been sent when the run at hand is ready
        window: deque[int] = deque()  # bounds after it, F - P ascending
        for j, ready in enumerate(moments, 1):
            while window and finish[window[-1]] - times[window[-1]] >= finish[j - 1] - times[j - 1]:
                window.pop()
            window.append(j - 1)
            while idle + 1 < j and finish[idle + 1] <= ready:
                idle += 1
            while window and (window[0] <= idle or (window[0] < j - 1 and held[j] - held[window[0]] > largest)):
                window.popleft()
            end = math.inf
            if idle == j - 1 or held[j] - held[idle] <= largest:
                end = ready - times[idle]
            if window:
                end = min(end, finish[window[0]] - times[window[0]])
            finish.append(end + alpha + times[j])
        self._found[scale, late] = moments, finish
        return moments, finish

    def _fewest(self, scales: Sequence[float], slack: float, *, late: bool = False) -> Cuts:
        """The fewest buckets with which, at each of these scales, the step ends at most this share later than it could.

        For one scale. No buckets may do that for several: then some of them end later.
        """
        times, alpha = self._times, self.network.delay
        ready, finish = zip(*(self._search(scale, late=late) for scale in scales), strict=True)
        ends = [max(f[-1], scale * self.total) * (1 + slack) for f, scale in zip(finish, scales, strict=True)]
        rounding = 1e-12 * (max(ends) + times[-1])
        found = [len(self._ready)]
        while True:
            last = found[-1]
            starts = [end - alpha - times[last] + rounding for end in ends]  # of this bucket, were it empty
            spare = min(start - moments[last - 1] for start, moments in zip(starts, ready, strict=True))
            smallest = bisect_left(self._held, self._held[last] - self._largest, 0, last - 1)
            first = max(smallest, bisect_left(times, -spare, 0, last - 1))
            while first < last - 1 and any(f[first] > s + times[first] for f, s in zip(finish, starts, strict=True)):
                first += 1
            if first == 0:
                return tuple(reversed(found))
            ends = [start + times[first] for start in starts]
            found.append(first)


def cut_of(network: Network) -> float:
    """Seconds that one more bucket costs the processor."""
    return CUT + network.cpu_per_call
