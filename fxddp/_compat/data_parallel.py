"""What is private in torch's own DistributedDataParallel and of use to ours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel.distributed import _BufferCommHookLocation, _find_tensors, _MixedPrecision
from torch.utils.hooks import RemovableHandle

MixedPrecision = _MixedPrecision
"""DistributedDataParallel's configuration of reduced precision."""

HookLocation = _BufferCommHookLocation
"""Where a hook that synchronises buffers runs: before or after the forward."""


def tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors in a module's output: in sequences, dicts and dataclasses, nested."""
    yield from _find_tensors(output)


def moved(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with all their tensors on this device."""
    several_args, several_kwargs = _to_kwargs(args, kwargs, device, True)
    return several_args[0], several_kwargs[0]


def cast(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with all their floating point tensors in this dtype."""
    return _cast_forward_inputs(dtype, *args, **kwargs)


def same_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Inside, writing to these tensors does not invalidate graphs that saved them.

    A buffer may be synchronised between a forward and its backward, which uses it as it is then, as torch's wrapper
    allows.
    """
    return _unsafe_preserve_version_counter(tuple(tensors))


def default_group() -> dist.ProcessGroup:
    """The default process group; an error where there is none."""
    return dist.distributed_c10d._get_default_group()


def fsdp_managed(module: nn.Module) -> bool:
    """Whether FSDP, of either kind, shards this module's parameters."""
    return bool(getattr(module, "_is_fsdp_managed_module", False)) or hasattr(module, "_handle")


def active() -> bool:
    """Whether this runs inside of the forward of torch's own DistributedDataParallel."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def on_module_set(hook: Callable[[nn.Module, str, nn.Module], None]) -> RemovableHandle:
    """Has `hook(parent, name, child)` called before any module becomes an attribute of another."""
    return nn.modules.module.register_module_module_registration_hook(hook)


def builtin_hook(kind: Any) -> Callable[..., Any]:
    """The hook in Python that does what one of torch's hooks in C++ does."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if kind == dist.BuiltinCommHookType.FP16_COMPRESS:
        return default_hooks.fp16_compress_hook
    return default_hooks.allreduce_hook


def no_join() -> Any:
    """What a joinable's configuration is outside of `Join`."""
    from torch.distributed.algorithms.join import _JoinConfig

    return _JoinConfig.construct_disabled_join_config()
