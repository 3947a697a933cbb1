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


def packed_after(local: Any, packing: Sequence[int]) -> list[float]:
    """Seconds until each bucket was packed, and until all was through, from the record of a backward that sent none."""
    begins = [seconds for what, _, seconds in local.events if what == "piece"]
    ends = [seconds - local.begin for seconds in (*begins[1:], local.end)]
    return [*(ends[piece] for piece in packing), ends[-1]]
