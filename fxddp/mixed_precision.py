"""How a wrapped module is called: as it is, or with its parameters in DistributedDataParallel's reduced precision."""

import warnings
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ._compat.data_parallel import MixedPrecision


def plain_run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the module. A frame of its own: Dynamo would skip those of torch's own classes, such as `nn.Sequential`."""
    return module(*args, **kwargs)


def runner(config: MixedPrecision | None, ignored: AbstractSet[str]) -> Callable[..., Any]:
    """What `forward` calls with the module and its arguments.

    In reduced precision the parameters are cast inside of the differentiated code, so that gradients arrive in full
    precision, and are averaged so.
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
def prepare(config: MixedPrecision, module: nn.Module, ignored: AbstractSet[str]) -> None:
    """Casts floating point buffers, and warns if gradients will travel in more bytes than `reduce_dtype` asks for."""
    for name, buffer in module.named_buffers():
        if config.buffer_dtype is not None and name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.to(config.buffer_dtype)
    own = {p.dtype for name, p in module.named_parameters() if name not in ignored and p.requires_grad}
    if config.reduce_dtype is not None and own != {config.reduce_dtype}:
        warnings.warn(
            f"reduce_dtype={config.reduce_dtype} is not supported yet: gradients are averaged in the parameters' own "
            f"dtype, {', '.join(sorted(map(str, own)))}",
            stacklevel=3,
        )
