"""Searches the places at which buckets end: how early all can be sent, and the fewest buckets that meet a deadline.

Note [unequal buckets]
~~~~~~~~~~~~~~~~~~~~~~
In the model of `step.py`, let P[j] be the time of the first j gradients' bytes, F[j] the earliest moment at which they
can all be there:

    F[j] = min over i < j of  max(F[i], r[j]) + α + P[j] − P[i]

F never falls, so among the i whose network is idle by r[j] (F[i] ≤ r[j]) the last is best, and among the others, a
window that only moves forward, the least F[i] − P[i]: a queue of minima gives all F in O(n) (after sorting). From the
end, the fewest buckets that meet a deadline follow greedily: the last bucket is the longest that can start in time
after what is left, and what is left has a deadline again. Both are exact; buckets come out as large as what is left to
hide them, and the last ones small.

While a bucket is packed its gradients are there twice, and a large one leaves the caches before it is sent. So none is
larger than `LARGEST` bytes or this `SHARE` of all, whichever is more, except a single gradient: fewer i are allowed,
and all of the above still holds.

Note [two extremes]
~~~~~~~~~~~~~~~~~~~
How much is sent beside the computation depends on the plan that is looked for, and so does what that takes from it. So
plans are looked for at two extremes: nothing is sent (r), and all that was ready is (`late`: r' of Note [one
processor], `step.py`, in place of r).
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .runs import Cuts, Runs
from .step import Step

__all__ = ["LARGEST", "Search"]

LARGEST, SHARE = 16 << 20, 1 / 8
"""What a bucket may hold: bytes, or a share of all gradients."""


@dataclass(frozen=True)
class Search:
    """Where the buckets of a backward's gradients can end; see Note [unequal buckets], for `late` Note [two extremes].

    Attributes:
        runs: the gradients.
        step: which they are sent in.
    """

    runs: Runs
    step: Step
    _known: dict[tuple[float, bool], tuple[list[float], list[float]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def largest(self) -> float:
        """Bytes that several gradients may have in one bucket."""
        return max(LARGEST, SHARE * self.runs.memory[-1])

    def soonest(self, scale: float, *, late: bool = False) -> float:
        """Seconds of the shortest step, in a computation that takes so many times as long as predicted.

        What sending takes from it counts if `late`, up to the last gradient.
        """
        return max(self._earliest(scale, late=late)[1][-1], scale * self.step.total)

    def fewest(self, scales: Sequence[float], slack: float, *, late: bool = False) -> Cuts:
        """The fewest buckets with which, at each of these scales, the step ends at most this share later than it could.

        With one scale there always are such buckets. With several there may be none: then it ends later at some.
        """
        times, memory, alpha = self._times, self.runs.memory, self.step.network.delay
        ready, earliest = zip(*(self._earliest(scale, late=late) for scale in scales), strict=True)
        ends = [self.soonest(scale, late=late) * (1 + slack) for scale in scales]
        rounding = 1e-12 * (max(ends) + times[-1])
        found = [len(self.runs.ready)]
        while True:
            last = found[-1]
            starts = [end - alpha - times[last] + rounding for end in ends]  # of this bucket, were it empty
            spare = min(start - moments[last - 1] for start, moments in zip(starts, ready, strict=True))
            smallest = bisect_left(memory, memory[last] - self.largest, 0, last - 1)
            first = max(smallest, bisect_left(times, -spare, 0, last - 1))
            while first < last - 1 and any(f[first] > s + times[first] for f, s in zip(earliest, starts, strict=True)):
                first += 1
            if first == 0:
                return tuple(reversed(found))
            ends = [start + times[first] for start in starts]
            found.append(first)

    def buckets(self, cuts: Cuts) -> list[tuple[int, float]]:
        """Of each bucket that ends there the place of its last gradient, ascending, and the bytes that travel.

        The kind with the most bytes has an end at every cut, others where sending takes longer than an empty message.
        """
        network, found = self.step.network, []
        for kind in self.runs.kinds:
            before = 0
            for cut in cuts:
                nbytes = kind.sent[cut] - kind.sent[before]
                due = kind is self.runs.kinds[0] or cut == cuts[-1]
                if kind.last[cut] > kind.last[before] and (due or network.sending(nbytes) > network.delay):
                    found.append((kind.last[cut], nbytes))
                    before = cut
        return sorted(found)

    @cached_property
    def _times(self) -> list[float]:
        """Seconds that the bytes before each bound take: P."""
        return [self.step.network.sending(nbytes) for nbytes in self.runs.sent]

    def _moments(self, scale: float, *, late: bool) -> list[float]:
        """When each run is ready: r, or r' if `late`."""
        moments = [scale * ready for ready in self.runs.ready]
        if not late:
            return moments
        taken = map(self.step.network.taken, self.runs.sent)
        return [
            moment + self.step.lag(before, moment - moments[0]) for moment, before in zip(moments, taken, strict=False)
        ]

    def _earliest(self, scale: float, *, late: bool) -> tuple[list[float], list[float]]:
        """`_moments`, and when what lies before each bound can have been sent: F."""
        if (scale, late) in self._known:
            return self._known[scale, late]
        moments = self._moments(scale, late=late)
        times, memory, largest, alpha = self._times, self.runs.memory, self.largest, self.step.network.delay
        earliest = [0.0]
        idle = 0  # the last bound whose bytes can have been sent when the run at hand is ready
        window: deque[int] = deque()  # bounds after it, F - P ascending
        for j, ready in enumerate(moments, 1):
            while window and earliest[window[-1]] - times[window[-1]] >= earliest[j - 1] - times[j - 1]:
                window.pop()
            window.append(j - 1)
            while idle + 1 < j and earliest[idle + 1] <= ready:
                idle += 1
            while window and (window[0] <= idle or (window[0] < j - 1 and memory[j] - memory[window[0]] > largest)):
                window.popleft()
            end = math.inf
            if idle == j - 1 or memory[j] - memory[idle] <= largest:
                end = ready - times[idle]
            if window:
                end = min(end, earliest[window[0]] - times[window[0]])
            earliest.append(end + alpha + times[j])
        self._known[scale, late] = moments, earliest
        return moments, earliest
