"""How a wrapped module is called: as it is, or with its parameters in DistributedDataParallel's reduced precision."""

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ._compat.data_parallel import MixedPrecision
from .comm_hook import ReducedPrecision


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
