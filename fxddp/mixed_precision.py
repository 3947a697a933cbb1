"""DistributedDataParallel's reduced precision: how a wrapped module is called, and how its gradients are averaged."""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ._compat.data_parallel import MixedPrecision

if TYPE_CHECKING:
    from .group import Group
    from .sending import Sending


def plain_run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the module. A frame of its own: Dynamo would skip those of torch's own classes, such as `nn.Sequential`."""
    return module(*args, **kwargs)


def runner(config: MixedPrecision | None, ignored: AbstractSet[str]) -> Callable[..., Any]:
    """What `forward` calls with the module and its arguments.

    In reduced precision the parameters are cast inside of the differentiated code, so that gradients arrive, and
    accumulate, in the parameters' own.
    """
    if config is None or config.param_dtype is None:
        return plain_run
    dtype = config.param_dtype

    def reduced_run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        parameters = {
            name: parameter.to(dtype)
            for name, parameter in module.named_parameters()
            if name not in ignored and parameter.is_floating_point()
        }
        return functional_call(module, parameters, args, kwargs)

    return reduced_run


@torch.no_grad()
def cast_buffers(config: MixedPrecision, module: nn.Module, ignored: AbstractSet[str]) -> None:
    """Casts floating point buffers to `buffer_dtype`."""
    for name, buffer in module.named_buffers():
        if config.buffer_dtype is not None and name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.to(config.buffer_dtype)


class ReducedPrecision:
    """Averages in another dtype, as `reduce_dtype` asks for: sums, then divides.

    Complex buckets are averaged as they are.

    Args:
        dtype: a floating point type.
    """

    divides = True
    in_graphs = False
    takes_rows = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = f"the average in {dtype}"
        self._dtype = dtype

    def start(
        self, flat: Tensor, members: Sequence[Tensor], sending: "Sending", travels: Callable[[int], None], **_: Any
    ) -> "CastWork":
        """As `Carrier.start`: starts the all-reduce of a bucket, which is divided then."""
        sending.group.settle()
        dtype = self._dtype if flat.is_floating_point() else flat.dtype
        work = CastWork(flat, dtype, sending.group, sending.divisor)
        travels(work.nbytes)
        return work


class CastWork:
    """The average of a bucket that travels in another dtype; waits as the work of a collective does."""

    def __init__(self, flat: Tensor, dtype: torch.dtype, group: "Group", divisor: int) -> None:
        self._flat = flat
        self._sum = flat.to(dtype)
        self._divisor = divisor
        self._work = group.all_reduce(self._sum)
        self.nbytes = self._sum.nbytes

    def is_completed(self) -> bool:
        """Whether the sum is there."""
        return bool(self._work.is_completed())

    def wait(self, *timeout: timedelta) -> None:
        """Waits for the sum, and puts the average into the bucket."""
        self._work.wait(*timeout)
        self._flat.copy_(self._sum.div_(self._divisor))


def reduction(config: MixedPrecision | None, parameters: Iterable[nn.Parameter]) -> ReducedPrecision | None:
    """How gradients are averaged: in `reduce_dtype`, which is `param_dtype` by default; None for the usual way.

    Raises:
        ValueError: `reduce_dtype` is no floating point type.
    """
    dtype = None if config is None else config.reduce_dtype or config.param_dtype
    if dtype is None:
        return None
    if not dtype.is_floating_point:
        raise ValueError(f"mixed_precision: gradients cannot be averaged in {dtype}, which has no fractions")
    return None if {p.dtype for p in parameters if p.requires_grad} <= {dtype} else ReducedPrecision(dtype)
