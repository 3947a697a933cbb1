"""The plan of `bucket_mb="auto"` for a backward graph: from its work to moments, and from these to buckets (`sizing.py`).

Note [one processor]
~~~~~~~~~~~~~~~~~~~~
On a CPU, what sends takes its time from what computes: c seconds for each byte, of which at most b are sent in a
second. So of the B bytes that were ready before gradient k, from r[0] on, those that can have been sent delay it:

    r'[k] = r[k] + min(c·B, f/(1 − f)·(r[k] − r[0])), f = min(1, b·c)

`beside_sending` puts r' in place of r.

Note [alone]
~~~~~~~~~~~~
A gradient whose rows are added up to a table is its own bucket where it has one (`folding.py`), and is copied into one
that it shares. So it shares none where copying it takes longer than one more bucket (`COPYING`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .cost import Network, Speeds, Work
from .outline import Outline
from .plan import BucketPlan, GradSpec
from .sizing import Stretch, cut_of

__all__ = ["beside_sending", "choose_plan", "rounded"]

COPYING = 3
"""How often the bytes of a gradient cross the memory bus when it is copied: read, and written to what is read first."""


def beside_sending(
    grads: Iterable[GradSpec],
    when: Mapping[int, float],
    network: Network,
    *,
    sent: Callable[[GradSpec], float] = lambda grad: grad.nbytes,
) -> dict[int, float]:
    """When gradients are ready, by their outputs, if the processor also sends those before; Note [one processor].

    Args:
        grads: in any order.
        when: seconds of the backward, without sending, until each is ready.
        network: what sends them.
        sent: bytes that travel for a gradient.
    """
    share = min(1.0, network.bandwidth * network.cpu_per_byte)
    found: dict[int, float] = {}
    taken, begin = 0.0, None
    for grad in sorted(grads, key=lambda grad: when[grad.output]):
        ready = when[grad.output]
        begin = ready if begin is None else begin
        most = share / (1 - share) * (ready - begin) if share < 1 else math.inf
        found[grad.output] = ready + min(taken, most)
        taken += network.cpu_per_byte * network.sent(sent(grad))
    return found


def choose_plan(
    grads: Iterable[GradSpec], told: Outline, *, speeds: Speeds, sent: Callable[[GradSpec], float]
) -> BucketPlan:
    """Plans the buckets of a backward graph from its work.

    Dynamic sizes count as the nearest powers of two, so that ranks whose inputs differ a little plan the same.

    Args:
        grads: of the graph.
        told: the graph's outline.
        speeds: how fast ranks compute and send.
        sent: bytes that travel for a gradient.
    """
    values = rounded(told.values)

    def seconds(work: Work) -> float:
        return float(speeds.machine.seconds(work.at(values)))

    grads = list(grads)
    network = speeds.network
    computed = {output: seconds(note.before) for output, note in told.grads.items()}
    when = beside_sending(grads, computed, network, sent=sent)
    alone = frozenset(
        grad.output
        for grad in grads
        if told.grads[grad.output].rows
        and seconds(Work(nbytes=COPYING * grad.nbytes)) > network.delay + cut_of(network)
    )
    return Stretch.of(grads, when, seconds(told.work), network, sent=sent, alone=alone).plan()


def rounded(sizes: Mapping[Any, int]) -> dict[Any, int]:
    """Dynamic sizes as the nearest powers of two."""
    return {size: 1 << max(0, round(math.log2(max(1, value)))) for size, value in sizes.items()}
