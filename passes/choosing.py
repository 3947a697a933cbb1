"""The plan of `bucket_mb="auto"` for a backward graph: its work becomes moments, these become buckets (`sizing.py`).

Note [alone]
~~~~~~~~~~~~
A gradient whose rows are added up to a table is its own bucket where it has one (`folding.py`), and is copied into one
that it shares. So it shares none where copying it takes longer than one more bucket (`COPYING`).
"""

from collections.abc import Callable, Iterable

from .cost import Speeds, Work, rounded
from .outline import Outline
from .plan import BucketPlan, GradSpec
from .sizing import Stretch, cut_of
from .tables import roughly

__all__ = ["choose_plan"]

COPYING = 3
"""How often the bytes of a gradient cross the memory bus when it is copied: read, and written to what is read first."""


def choose_plan(
    grads: Iterable[GradSpec], told: Outline, *, speeds: Speeds, sent: Callable[[GradSpec], float]
) -> BucketPlan:
    """Plans the buckets of a backward graph from its work.

    Dynamic sizes and numbers of rows count as the nearest powers of two, so that ranks whose inputs differ a little
    plan the same.

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
    when = {output: seconds(note.before) for output, note in told.grads.items()}
    alone = frozenset(
        grad.output
        for grad in grads
        if told.grads[grad.output].rows
        and seconds(Work(nbytes=COPYING * grad.nbytes)) > network.delay + cut_of(network)
    )

    def travels(grad: GradSpec) -> float:
        return sent(roughly(grad))

    return Stretch.of(grads, when, seconds(told.work), network, sent=travels, alone=alone).plan()
