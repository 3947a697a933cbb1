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

import math
from collections.abc import Sequence
from itertools import pairwise

CAUTION = 2.0
"""How many times as long as predicted pieces are taken to run. A link that idles in the backward is never made up for;
a bucket that leaves too early costs at most its own time."""


def plan_launches(
    ready: Sequence[float], sending: Sequence[float], needed: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Decides which buckets are launched when another one has been packed: as few as keep the link busy until the next.

    Args:
        ready: seconds of the backward until each bucket is packed, ascending.
        sending: seconds that each travels.
        needed: where the next forward first needs each; equal ones go in the order in which they are packed.

    Returns:
        For each bucket those launched right after it was packed, in order. All are, once, and none before its turn.
    """
    waiting: list[int] = []
    launches = []
    busy = 0.0  # until when the link has enough to do
    for bucket, (now, then) in enumerate(pairwise((*ready, math.inf))):
        waiting.append(bucket)
        started = []
        while waiting and busy <= then:
            first = min(waiting, key=lambda each: (needed[each], each))
            waiting.remove(first)
            started.append(first)
            busy = max(busy, now) + sending[first]
        launches.append(tuple(started))
    return tuple(launches)
