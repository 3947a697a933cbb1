"""Buckets that live on in `.grad`, as under `zero_grad(set_to_none=False)`, and are filled again in place.

    step n      bucket ─ all-reduce ─► every `.grad` of it is a view
                zero_grad(set_to_none=False)
    step n+1    old bucket += new bucket, which is freed ─ all-reduce of the old one ─► the same `.grad`s

Otherwise all gradients would be there twice at the end of a backward. What was in the old bucket cannot be put back
when the backward fails: its `.grad`s are NaN then, so that nobody steps with less than what was accumulated; the next
`zero_grad` makes zeros of it. This is done only with gradients that were kept since they were reduced. What accumulates
under `no_sync` from None on is left alone until the backward is over, and an exception leaves it as it was.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import _compat
from .passes.plan import Bucket

_grad = attrgetter("grad")


class ReducedBuckets:
    """Remembers which memory came back reduced, without keeping it alive."""

    def __init__(self) -> None:
        self._memory: Any = WeakIdKeyDictionary()

    def note(self, parameters: Sequence[Tensor]) -> None:
        """Notes where the gradients of a bucket are, that of the first for all of them."""
        grad = parameters[0].grad
        if grad is not None:
            self._memory[parameters[0]] = _compat.weak_memory(grad)

    def gradients(self, bucket: Bucket, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The parameters' `.grad`s, if they still are what a reduced bucket of this layout consists of."""
        grads = list(map(_grad, parameters))
        memory = self._memory.get(parameters[0])
        if memory is None or not all(map(is_not, grads, repeat(None))) or not all(map(_is_plain, grads)):
            return None
        first = grads[0]
        if memory != _compat.weak_memory(first):
            return None
        start, base = first.data_ptr(), first.untyped_storage().data_ptr()
        for grad, (shape, stride, offset) in zip(grads, bucket.places, strict=True):
            if (
                grad.untyped_storage().data_ptr() != base
                or grad.data_ptr() != start + offset * bucket.dtype.itemsize
                or grad.shape != shape
                or grad.stride() != stride
                or grad.dtype != bucket.dtype
            ):
                return None
        return grads


def refill(bucket: Bucket, flat: Tensor, grads: Sequence[Tensor], scale: float) -> Tensor:
    """Adds a packed bucket to what is in the one that these `.grad`s make up, times `scale`; returns the latter."""
    old = _compat.alias(grads[0], (bucket.numel,), (1,))
    return torch.add(flat, old, alpha=scale, out=old)


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.layout is torch.strided and not grad.requires_grad
