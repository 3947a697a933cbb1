"""When each bucket is launched, where the next forward waits for them: the first it needs must not queue behind others.

Buckets become ready late layers first and are needed first layers first. Launched as they fill, the ones needed first
are the last in line, and the forward cannot start before all have arrived. So buckets are held back while the link has
enough to do, and whenever it needs more, the one that is needed first goes first; what is left when the backward ends
goes in the order of need. That is preemptive priority at the grain of a bucket: A. Jayarajan et al., "Priority-based
Parameter Propagation for Distributed DNN Training", MLSys 2019; Y. Peng et al., "A Generic Communication Scheduler for
Distributed DNN Training Acceleration" (ByteScheduler), SOSP 2019.

Here the order is fixed before the first step, by a model of when pieces are done and buckets have arrived: all ranks
must launch the same buckets in the same order, whatever their clocks say. A wrong figure costs time, nothing else.
"""

from collections.abc import Sequence

DEPTH = 2
"""Buckets that are under way at once, while there are others to choose from: so that the link never waits for the
processor, and as many as a gloo group works on at a time."""


def plan_launches(
    ready: Sequence[float], sending: Sequence[float], needed: Sequence[int], *, depth: int = DEPTH
) -> tuple[tuple[int, ...], ...]:
    """Decides which buckets are launched when another one has been packed.

    Args:
        ready: seconds of the backward until each bucket is packed, ascending.
        sending: seconds that each travels.
        needed: where the next forward first needs each; equal ones go in the order in which they are packed.
        depth: buckets under way at once.

    Returns:
        For each bucket those launched right after it was packed, in order. All are, once, and none before its turn.
    """
    waiting: list[int] = []
    arrivals: list[float] = []
    launches = []
    for bucket, now in enumerate(ready):
        waiting.append(bucket)
        last = bucket == len(ready) - 1
        started = []
        while waiting and (last or sum(arrival > now for arrival in arrivals) < depth):
            first = min(waiting, key=lambda each: (needed[each], each))
            waiting.remove(first)
            started.append(first)
            arrivals.append(max(now, arrivals[-1] if arrivals else now) + sending[first])
        launches.append(tuple(started))
    return tuple(launches)
