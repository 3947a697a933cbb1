"""Decide which gradients of a backward graph are reduced together.

Note [bucket order]
~~~~~~~~~~~~~~~~~~~
A bucket can be sent once its last gradient is there. So its gradients should become ready one after the other, and
buckets should be sent in the order in which they fill. Eager DistributedDataParallel does not know that order: it
starts from the reverse of the order in which parameters were registered, watches the first backward, and regroups once.
DDPOptimizer cuts the forward graph and relies on the backward to mirror it.

Here the backward graph is at hand before it has ever run, and the order in which it computes gradients *is* the order
in which they become ready. `GradSpec.ready` is a gradient's position in it: the first step has the final buckets::

    backward graph   mm ─► g7    mm ─► g6, g5    sum ─► g2    mm ─► g4   ...     (g2: its parameter is used late)
    ready             3           7      7         9           12
    buckets          [ 0      ]  [ 1                      ]   [ 2        ...
                              └► launch 0                 └► launch 1

- Ready order is by `ready`. Gradients of one node have the same `ready`; ties go by `output`, so the order is total.
- A bucket is ready with its last gradient; that gradient's place in ready order gives the bucket's place in the plan.
- Buckets of different dtypes or devices fill side by side, and each is launched when it is ready: index order is launch
  order, whatever the kinds.
- Nothing else has a say: not the order in which gradients are listed, not hashes, not the rank. Ranks with equal graphs
  get equal plans without talking.
- A plan describes the graph it was made from. A pass that moves gradients must run before planning.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from .plan import Bucket, BucketPlan, GradSpec, Kind

__all__ = ["plan_buckets"]


def plan_buckets(
    grads: Iterable[GradSpec],
    *,
    cap: int,
    first_cap: int,
    caps: tuple[int, ...] = (),
    ends: frozenset[int] | None = None,
) -> BucketPlan:
    """Packs gradients into buckets of at most `cap` bytes, in the order in which they become ready.

    Order is explained in Note [bucket order]. Each dtype on each device has one open bucket. A gradient joins the open
    bucket of its kind; if it would lift it over the limit, that bucket is closed and a new one opened. A gradient
    larger than `cap` has a bucket of its own, and what is open stays open: between the weights of large layers there
    are often just a bias and a norm, whose few bytes are not worth an all-reduce. An empty gradient needs no room: it
    joins the open bucket, or opens one where none is open, so a bucket of zero bytes is possible.

    The limit is `first_cap` until the first bucket, of whatever kind, has been closed, and `cap` from then on. A small
    first bucket puts the network to work early; once it works, another small bucket would only be overhead. Whichever
    kind fills up first gets it: a kind with one early scalar does not use it up, and a kind that fills slowly does not
    hold it back. Buckets that are complete before then have kept to `first_cap` too, so bucket 0 always does. A
    `first_cap` larger than `cap` means `cap`.

    With `caps`, the limit is the first of these for the first bucket of each kind, the second for its second one, and
    so on; the last one for all others. A gradient larger than the limit of its turn is alone in that bucket.
    With `ends` nothing is limited: a bucket is closed with each gradient whose output is one of them; `sizing.py` finds
    such.

    The result depends on the gradients and the caps alone, not on the order in which the gradients come. O(n log n).
    """
    _check_cap("cap", cap)
    _check_cap("first_cap", first_cap)
    for size in caps:
        _check_cap("caps", size)
    first_cap = min(first_cap, cap)
    ordered = sorted(grads, key=_place)
    assert len({grad.output for grad in ordered}) == len(ordered), "two gradients have the same output index"

    closed: list[list[GradSpec]] = []
    open_buckets: defaultdict[Kind, list[GradSpec]] = defaultdict(list)
    used: defaultdict[Kind, int] = defaultdict(int)  # bytes in the open bucket
    full: defaultdict[Kind, int] = defaultdict(int)  # buckets closed so far

    def limit(kind: Kind) -> float:
        if ends is not None:
            return math.inf
        if caps:
            return caps[min(full[kind], len(caps) - 1)]
        return cap if closed else first_cap

    def close(kind: Kind) -> None:
        closed.append(open_buckets.pop(kind))
        del used[kind]
        full[kind] += 1

    for grad in ordered:
        kind = grad.dtype, grad.device
        nbytes = grad.nbytes
        if not caps and ends is None and nbytes > cap:
            closed.append([grad])
            continue
        if open_buckets[kind] and used[kind] + nbytes > limit(kind):
            close(kind)
        open_buckets[kind].append(grad)
        used[kind] += nbytes
        # a single gradient larger than the limit: nothing may join it
        if used[kind] > limit(kind) or (ends is not None and grad.output in ends):
            close(kind)

    closed.extend(open_buckets.values())
    closed.sort(key=lambda bucket: _place(bucket[-1]))
    buckets = tuple(Bucket(index, tuple(bucket)) for index, bucket in enumerate(closed))
    return BucketPlan(buckets, cap=cap, first_cap=first_cap, caps=caps, ends=ends)


def _place(grad: GradSpec) -> tuple[int, int]:
    """Where a gradient stands in ready order."""
    return grad.ready, grad.output


def _check_cap(name: str, value: object) -> None:
    # A bool is an int to Python, and a float is most likely a size in MiB that was not converted.
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive whole number of bytes (an int), got {value!r}")
