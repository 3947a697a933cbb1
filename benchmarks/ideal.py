"""The ideal of a plan: its own pieces, and all-reduces of its own buckets, each as fast as when nothing else runs.

A list schedule on two machines, one that computes and one that sends: pieces one after the other, and each bucket as
soon as it is packed and those before it have arrived. What a step takes longer is what computing and sending cost each
other, and what is neither. It is the ideal of these buckets, not of all plans; limits know no buckets.
"""

from collections.abc import Sequence
from typing import Any


def list_schedule(ready: Sequence[float], sending: Sequence[float], computed: float) -> float:
    """When all is computed and sent.

    Args:
        ready: when each bucket is packed, in order.
        sending: how long each travels alone.
        computed: when the last piece is through.
    """
    free = 0.0
    for packed, seconds in zip(ready, sending, strict=True):
        free = max(free, packed) + seconds
    return max(free, computed)


def packing_pieces(sent: Any) -> list[int]:
    """The number of the piece that packs each bucket, from the record of a backward that sent them."""
    found, last = [], -1
    for what, number, _ in sent.events:
        if what == "piece":
            last = number
        elif what == "launch":
            found.append(last)
    return found


def packed_after(local: Any, sent: Any) -> list[float]:
    """Seconds until each bucket was packed, and until all pieces were through.

    Args:
        local: the record of a backward that sent nothing. Its end comes late: autograd accumulates what is not sent.
        sent: of one that sent the buckets, which tells how long the last piece takes.
    """
    begins = [seconds - local.begin for what, _, seconds in local.events if what == "piece"]
    last = max(i for i, (what, _, _) in enumerate(sent.events) if what == "piece")
    (_, _, begin), (_, _, end) = sent.events[last : last + 2]
    ends = [*begins[1:], begins[-1] + end - begin]
    return [*(ends[piece] for piece in packing_pieces(sent)), ends[-1]]
