"""The plan of one backward graph: which gradients travel together in which bucket, and in which order.

Everything here is plain data: frozen, hashable, picklable and equal by value. A gradient is named by its position in
the backward graph's outputs and its parameter by its position among the Dynamo graph's placeholders. Which parameter,
tensor or rank that is belongs to the moment a plan is run, not to the plan: one compiled graph serves many modules.

``fxddp.passes.bucketing`` makes plans; ``check_plan`` judges them and shares no code with it.
"""

import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

__all__ = ["Bucket", "BucketPlan", "GradSpec", "Kind", "check_plan"]

Kind: TypeAlias = "tuple[torch.dtype, torch.device]"
"""What the gradients of one bucket have in common."""


@dataclass(frozen=True, slots=True)
class GradSpec:
    """One gradient of one parameter in one backward graph."""

    output: int  # index in the backward graph's outputs
    input: int  # index of the parameter among the Dynamo graph's placeholders
    ready: int  # position in the backward graph's order at which the gradient is computed
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # strides the gradient must have: the parameter's own
    dtype: torch.dtype
    device: torch.device
    tangents: frozenset[int]  # which tangents (indices among the backward's tangent inputs) it depends on
    rows: int | None = None  # how many rows are added up to it, if it is a table of zeros otherwise (`tables.py`)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes it takes in a bucket."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype on one device that are packed into one flat buffer and reduced by one collective.

    A bucket may hold zero bytes, when all its gradients are empty. What follows from its fields is computed once.
    """

    index: int  # position in the plan, which is the order of launches
    grads: tuple[GradSpec, ...]  # in the order in which they become ready; never empty

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the flat buffer."""
        return self.grads[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the flat buffer."""
        return self.grads[0].device

    @cached_property
    def numel(self) -> int:
        """Elements in the flat buffer."""
        return sum(grad.numel for grad in self.grads)

    @cached_property
    def nbytes(self) -> int:
        """Bytes in the flat buffer."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each gradient in the flat buffer: packed in order, without gaps."""
        return tuple(itertools.accumulate((grad.numel for grad in self.grads[:-1]), initial=0))

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Shape, strides and offset of each gradient in the flat buffer: the arguments of `as_strided`."""
        return tuple((g.shape, g.stride, offset) for g, offset in zip(self.grads, self.offsets, strict=True))


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The buckets of one backward graph, in the order in which they are launched."""

    buckets: tuple[Bucket, ...]
    cap: int  # bytes a bucket may hold
    first_cap: int  # bytes the first bucket to fill may hold, at most `cap`
    caps: tuple[int, ...] = ()  # if given, in place of both: bytes of each kind's first, second, … and further buckets
    ends: frozenset[int] | None = None  # if given, in place of all: outputs that are the last in their bucket

    @property
    def grads(self) -> tuple[GradSpec, ...]:
        """All gradients, bucket by bucket."""
        return tuple(grad for bucket in self.buckets for grad in bucket.grads)

    @property
    def nbytes(self) -> int:
        """Bytes all buckets hold together."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def digest(self) -> str:
        """Names the layout of the buckets, the same in every process; ranks whose digests agree can share collectives.

        Covers what a collective and the unpacking after it depend on: bucket boundaries and, in order, each gradient's
        placeholder, shape, strides, dtype and device type. Leaves out what may differ between ranks without harm:
        device indices, positions in the backward graph, tangents, and the caps that led to the layout.
        """
        layout = hashlib.sha256(b"fxddp bucket layout 1\n")
        for bucket in self.buckets:
            # Text of ints and names only: hash() and pickle differ between processes and versions.
            rows = [(g.input, tuple(g.shape), tuple(g.stride), str(g.dtype), g.device.type) for g in bucket.grads]
            layout.update(f"{rows}\n".encode())
        return layout.hexdigest()


def check_plan(plan: BucketPlan, grads: Sequence[GradSpec]) -> None:
    """Raises AssertionError, saying what is wrong, unless `plan` is the right plan for `grads` under its caps.

    *Ready order* is by `ready`, ties by `output`. A *kind* is a dtype on a device.

    - Partition: every gradient is in exactly one bucket, unchanged; no output and no placeholder occurs twice.
    - Buckets: numbered 0, 1, ...; not empty; of one kind; in ready order inside; packed without gaps, each gradient
      filling exactly its own part.
    - Huge: a gradient larger than `cap` is alone in its bucket. What follows about the buckets of one kind leaves these
      out. With `caps` or `ends` no gradient is huge.
    - Order: buckets follow the moment they are ready, which is their last gradient's place in ready order. The buckets
      of one kind, one after the other, hold that kind's gradients in ready order.
    - Caps: a bucket's limit is `cap`; only the *first bucket to fill* has the limit `first_cap`. That is the first
      bucket of the kind whose gradients, in ready order, are the first to add up to more than `first_cap`, unless a
      huge gradient is ready before they do. Only a single gradient larger than the limit may exceed it. (So bucket 0
      always keeps to `first_cap`: whatever is ready before the first bucket to fill belongs to kinds that do not add
      up to more until then.) With `caps`, each kind's buckets have these limits, one after the other, and the last of
      them from then on. With `ends` there are no limits: a bucket ends with each of these outputs, with the last
      gradient of its kind, and nowhere else.
    - Greedy: no bucket could have taken one gradient more. For each bucket and the next one of its kind, the bytes of
      the one and of the other's first gradient add up to more than the limit of the one.

    Exactly one plan passes for given gradients and caps. The order in which `grads` come does not matter.
    """
    assert 0 < plan.first_cap <= plan.cap, (
        f"caps must satisfy 0 < first_cap <= cap, got first_cap={plan.first_cap} and cap={plan.cap}"
    )
    _check_partition(plan, grads)
    for position, bucket in enumerate(plan.buckets):
        assert bucket.index == position, f"bucket at position {position} has index {bucket.index}"
        _check_bucket(bucket)
    _check_order(plan)
    if plan.ends is None:
        _check_caps(plan, grads)
    else:
        _check_ends(plan, plan.ends)


def _place(grad: GradSpec) -> tuple[int, int]:
    """Where a gradient stands in ready order."""
    return grad.ready, grad.output


def _check_partition(plan: BucketPlan, grads: Sequence[GradSpec]) -> None:
    expected, planned = Counter(grads), Counter(plan.grads)
    missing, extra = list((expected - planned).elements()), list((planned - expected).elements())
    assert not missing, f"{len(missing)} of {len(grads)} gradients are in no bucket, the first is {missing[0]}"
    assert not extra, f"{len(extra)} gradients are planned twice or were never given, the first is {extra[0]}"
    for what, count in (("output", Counter(g.output for g in grads)), ("input", Counter(g.input for g in grads))):
        twice = sorted(index for index, times in count.items() if times > 1)
        assert not twice, f"{what} {twice[0]} has more than one gradient"


def _check_bucket(bucket: Bucket) -> None:
    where = f"bucket {bucket.index}"
    assert bucket.grads, f"{where} is empty"
    kinds = {(grad.dtype, grad.device) for grad in bucket.grads}
    assert kinds == {(bucket.dtype, bucket.device)}, f"{where} mixes dtypes or devices: {sorted(map(str, kinds))}"
    for before, after in itertools.pairwise(bucket.grads):
        assert _place(before) < _place(after), (
            f"{where} has output {before.output} before output {after.output}: ready order"
        )
    assert len(bucket.offsets) == len(bucket.grads), (
        f"{where} has {len(bucket.offsets)} offsets for {len(bucket.grads)} gradients"
    )
    end = 0
    for grad, offset in zip(bucket.grads, bucket.offsets, strict=True):
        assert offset == end, f"{where} puts output {grad.output} at element {offset}, expected {end}"
        assert _is_packed(grad), (
            f"output {grad.output} does not fill its part: shape {grad.shape}, strides {grad.stride}"
        )
        end += math.prod(grad.shape)
    assert bucket.numel == end, f"{where} has numel {bucket.numel}, its gradients have {end}"
    assert bucket.nbytes == end * bucket.dtype.itemsize, f"{where} has nbytes {bucket.nbytes} for {end} {bucket.dtype}"


def _is_packed(grad: GradSpec) -> bool:
    """Whether shape and strides reach each of numel consecutive elements exactly once."""
    if len(grad.shape) != len(grad.stride):
        return False
    step = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(grad.shape, grad.stride, strict=True) if size != 1
    ):
        if stride != step:
            return 0 in grad.shape
        step *= size
    return True


def _check_order(plan: BucketPlan) -> None:
    for before, after in itertools.pairwise(plan.buckets):
        ready = max(map(_place, before.grads)), max(map(_place, after.grads))
        assert ready[0] < ready[1], (
            f"bucket {before.index} is launched before bucket {after.index} but is ready later: "
            f"(ready, output) {ready[0]} against {ready[1]}"
        )
    for before, after in _neighbours(plan):
        assert _place(before.grads[-1]) < _place(after.grads[0]), (
            f"bucket {after.index} holds a gradient that is ready before the last one of bucket {before.index}, "
            f"of the same dtype and device"
        )


def _huge(plan: BucketPlan, bucket: "Bucket | GradSpec") -> bool:
    return not plan.caps and plan.ends is None and bucket.nbytes > plan.cap


def _neighbours(plan: BucketPlan) -> list[tuple[Bucket, Bucket]]:
    """Pairs each bucket with the next one of its dtype and device, those of huge gradients apart."""
    by_kind: defaultdict[Kind, list[Bucket]] = defaultdict(list)
    for bucket in plan.buckets:
        if not _huge(plan, bucket):
            by_kind[bucket.dtype, bucket.device].append(bucket)
    return [pair for same in by_kind.values() for pair in itertools.pairwise(same)]


def _check_ends(plan: BucketPlan, ends: frozenset[int]) -> None:
    for bucket in plan.buckets:
        early = [grad.output for grad in bucket.grads[:-1] if grad.output in ends]
        assert not early, f"bucket {bucket.index} goes on after output {early[0]}, which is to end one"
    for before, _ in _neighbours(plan):
        last = before.grads[-1].output
        assert last in ends, f"bucket {before.index} ends with output {last}, which is none of those that end one"


def _check_caps(plan: BucketPlan, grads: Sequence[GradSpec]) -> None:
    limits = _limits(plan, grads)
    for bucket in plan.buckets:
        limit = limits[bucket.index]
        assert bucket.nbytes <= limit or len(bucket.grads) == 1, (
            f"bucket {bucket.index} holds {bucket.nbytes} bytes in {len(bucket.grads)} gradients, its cap is {limit}"
        )
    for before, after in _neighbours(plan):
        total, limit = before.nbytes + after.grads[0].nbytes, limits[before.index]
        assert total > limit, (
            f"bucket {before.index} has room for output {after.grads[0].output}, which is in bucket {after.index}: "
            f"{total} bytes together, the cap is {limit}"
        )


def _limits(plan: BucketPlan, grads: Sequence[GradSpec]) -> dict[int, int]:
    if plan.caps:
        seen: Counter[Kind] = Counter()
        limits = {}
        for bucket in plan.buckets:
            kind = bucket.dtype, bucket.device
            limits[bucket.index] = plan.caps[min(seen[kind], len(plan.caps) - 1)]
            seen[kind] += 1
        return limits
    limits = dict.fromkeys(range(len(plan.buckets)), plan.cap)
    first = _first_to_fill(plan, grads)
    if first is not None:
        limits[first.index] = plan.first_cap
    return limits


def _first_to_fill(plan: BucketPlan, grads: Sequence[GradSpec]) -> Bucket | None:
    """The first bucket of the kind that is the first to have more than `first_cap` bytes; None if no kind has.

    None as well if a huge gradient is ready before.
    """
    seen: Counter[Kind] = Counter()
    for grad in sorted(grads, key=_place):
        if _huge(plan, grad):
            return None
        kind = grad.dtype, grad.device
        seen[kind] += grad.nbytes
        if seen[kind] > plan.first_cap:
            alike = (bucket for bucket in plan.buckets if (bucket.dtype, bucket.device) == kind)
            return next((bucket for bucket in alike if not _huge(plan, bucket)), None)
    return None
