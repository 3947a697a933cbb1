"""Flat buckets filled at run time: for gradients that no compiled piece packed the way they travel."""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from . import _compat
from .passes.layout import gradient_strides


def empty_bucket(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor for these parameters' gradients, and the place of each in it, in its parameter's strides."""
    first = parameters[0]
    flat = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    return flat, places_in(flat, parameters)


def places_in(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The places of these parameters' gradients in a flat bucket, one after the other."""
    views, offset = [], 0
    for parameter in parameters:
        shape = tuple(parameter.shape)
        views.append(_compat.alias(flat, shape, gradient_strides(shape, parameter.stride()), offset))
        offset += parameter.numel()
    return views


def packs(tensors: Iterable[Tensor], cap: int) -> list[list[Tensor]]:
    """Consecutive tensors of one dtype and device, together at most `cap` bytes unless one alone is larger."""
    found: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if not found or (found[-1][0].dtype, found[-1][0].device) != kind or size + tensor.nbytes > cap:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.nbytes
    return found


def sparse_gradient(parameter: Tensor, parts: Iterable[Tensor] = ()) -> Tensor:
    """The sum of these gradients of an embedding, sparse by rows; some may be dense."""
    rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    total = torch.sparse_coo_tensor(rows, values, parameter.shape)
    for part in parts:
        total = total + (part if part.is_sparse else part.to_sparse(1))
    return total.coalesce()


class Assembly:
    """Collects gradients for buckets laid out otherwise than the plan's, and gives out those that are full.

    Attributes:
        unused: ids of the parameters that no rank has a gradient of.
    """

    def __init__(self, buckets: Sequence[Sequence[Tensor]], here: AbstractSet[int], unused: AbstractSet[int]) -> None:
        """Makes one.

        Args:
            buckets: the parameters of each, in the order in which they are to travel.
            here: ids of the parameters whose gradients will be added.
            unused: see above.
        """
        self.unused = unused
        self._buckets = buckets
        self._here = here
        self._next = 0
        self._found: dict[int, Any] = {}

    @property
    def finished(self) -> bool:
        """Whether all buckets were given out."""
        return self._next == len(self._buckets)

    def add(self, parameters: Sequence[Tensor], found: Iterable[Any]) -> Iterator[tuple[Sequence[Tensor], list[Any]]]:
        """Adds gradients, and gives the buckets that are full now, in order.

        Yields:
            A bucket's parameters, and what was added for each; None for those of other ranks.
        """
        self._found.update(zip(map(id, parameters), found, strict=True))
        while self._next < len(self._buckets):
            wanted = self._buckets[self._next]
            if any(id(p) in self._here and id(p) not in self._found for p in wanted):
                return
            self._next += 1
            yield wanted, [self._found.pop(id(p), None) for p in wanted]
