"""Checks the arguments of `fxddp.DistributedDataParallel`: errors say what was found, what is expected, what to do."""

import warnings
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from . import _compat
from ._compat import data_parallel as stock
from .config import AUTO, FIRST_MB, USUAL_MB, size_in_bytes
from .module_backend import compiled_with_fxddp, wrapped_with_fxddp
from .uncovered import refuse_subclass


def flags(**values: Any) -> None:
    """Refuses anything but True and False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def types(module: Any, device_mesh: Any, mixed_precision: Any) -> None:
    """Refuses what is no module, mesh or configuration at all."""
    given = {"module": module, "device_mesh": device_mesh, "mixed_precision": mixed_precision}
    wanted = {"module": nn.Module, "device_mesh": DeviceMesh, "mixed_precision": stock.MixedPrecision}
    for name, value in given.items():
        if not isinstance(value, wanted[name]) and (value is not None or name == "module"):
            raise ValueError(f"{name} must be a {wanted[name].__module__}.{wanted[name].__qualname__}, got {value!r}")


def group(process_group: Any, device_mesh: DeviceMesh | None, algorithm: str | None = None) -> dist.ProcessGroup:
    """The group of all ranks that these arguments mean.

    Raises:
        RuntimeError: both are given, or the mesh has several dimensions.
        ValueError: neither is given and there is no default group, or this rank is not in the group.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments: the mesh brings its own group. Leave one out"
        )
    if device_mesh is not None:
        if device_mesh.ndim != 1 and algorithm != "hierarchical":
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}: take the dimension of the replicas out of "
                "it, or add algorithm='hierarchical'"
            )
        found: Any = _compat.flat_group(device_mesh) or stock.default_group()
    elif isinstance(process_group, (list, tuple)) and process_group:
        found = process_group[0]
    else:
        found = stock.default_group() if process_group is None else process_group
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(
            f"process_group must be a torch.distributed.ProcessGroup that this rank belongs to, or None for the "
            f"default group, got {found!r}"
        )
    if not _compat.group_exists(found):
        raise ValueError("the process_group was destroyed; make a new one first")
    return found


def given_groups(
    process_group: Any, found: dist.ProcessGroup, device_mesh: DeviceMesh | None, algorithm: str | None
) -> Any:
    """The `process_group` for the backend: None where it can find the groups itself, as a pickled wrapper must."""
    if isinstance(process_group, (list, tuple)):
        return process_group
    if device_mesh is not None and algorithm == "hierarchical":
        return None
    return None if found is dist.group.WORLD else found


def buffer_flags(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are sent before forwards, and at construction; with torch's warnings about the old name."""
    for name, value in {"broadcast_buffers": broadcast_buffers, "forward_sync_buffers": forward_sync_buffers}.items():
        if value is not None:
            flags(**{name: value})
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and "
            "its value is ignored when `forward_sync_buffers` is provided.",
            FutureWarning,
            stacklevel=3,
        )
    elif broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at init.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    effective = True if broadcast_buffers is None else broadcast_buffers
    return effective, effective


def delayed(
    named: Iterable[tuple[str, nn.Parameter]] | None, trigger: Tensor | None, shared: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Refuses `delay_all_reduce_named_params` that would not be averaged, or without `param_to_hook_all_reduce`.

    Args:
        named: the former; torch averages them wherever they belong, fxddp only those that are shared.
        trigger: the latter.
        shared: the parameters of the module that are averaged.
    """
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time; fxddp needs "
            "neither, as it averages in the order of the backward"
        )
    if trigger is not None and not (isinstance(trigger, Tensor) and trigger.requires_grad):
        raise ValueError(f"param_to_hook_all_reduce must be a parameter that requires grad, got {trigger!r}")
    averaged = {id(parameter) for _, parameter in shared}
    strangers = [name for name, parameter in named or () if id(parameter) not in averaged]
    if strangers:
        raise ValueError(
            f"delay_all_reduce_named_params: fxddp averages parameters of the module that are not in its "
            f"_ddp_params_and_buffers_to_ignore, and {', '.join(strangers)} would stay local. Register them in the "
            "module, or take their names out of that list"
        )


def parameters(model: nn.Module, ignored: AbstractSet[str]) -> list[tuple[str, nn.Parameter]]:
    """The named parameters to train and send.

    Raises:
        RuntimeError: none of them requires grad, one is not initialised yet, or another library manages one.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if name not in ignored]
    for name, parameter in named:
        if is_lazy(parameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy "
                f"forward pass to correctly initialize the modules; {name} has no shape yet"
            )
        refuse_subclass(parameter, name)
    if not any(parameter.requires_grad for _, parameter in named):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient: "
            f"{type(model).__name__} has {len(named)} parameters, all frozen. Use the plain module"
        )
    return named


def module(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuses modules that cannot be trained this way.

    Raises:
        RuntimeError: FSDP or fxddp manages it already.
        ValueError: its parameters are on several kinds of devices, or it has SyncBatchNorm on a CPU.
    """
    for name, part in model.named_modules():
        if stock.fsdp_managed(part):
            raise RuntimeError(
                f"{name or type(model).__name__} is managed by FSDP, which averages gradients itself: wrap the plain "
                f"module, or leave fxddp.DistributedDataParallel out"
            )
    if compiled_with_fxddp(model):
        raise averaged_already(model, "fxddp.DistributedDataParallel")
    kinds = sorted({parameter.device.type for _, parameter in named})
    if len(kinds) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {kinds}: move it to one kind"
        )
    if kinds == ["cpu"] and any(type(part) is nn.SyncBatchNorm for part in model.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules, and this module is on the CPU")


def averaged_already(model: nn.Module, by: str) -> RuntimeError:
    """The error for a module whose gradients would be averaged twice, and whose `no_sync` would reach one of both."""
    return RuntimeError(
        f"{type(model).__name__} averages its gradients with fxddp already, and {by} would average them again: give it "
        "the plain module, or leave it out"
    )


def not_for_stock(model: nn.Module) -> None:
    """Refuses to be wrapped by torch's own class, which would launch all-reduces of its own and wait for its hooks."""
    if wrapped_with_fxddp(model) or compiled_with_fxddp(model):
        raise averaged_already(model, "torch.nn.parallel.DistributedDataParallel")


def no_stock_around() -> None:
    """Refuses to run inside of the forward of torch's own wrapper."""
    if stock.active():
        raise RuntimeError(
            "fxddp.DistributedDataParallel runs inside torch.nn.parallel.DistributedDataParallel, which averages the "
            "same gradients again: take one of the two away"
        )


def devices(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Sequence[Tensor],
) -> tuple[list[int] | None, int | None]:
    """The indices of these devices; None for modules on the CPU or on several devices.

    Raises:
        ValueError: they do not fit each other or the module.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, got {list(device_ids)}: start one process for "
            "each device"
        )
    found = {parameter.device for parameter in parameters}
    if not device_ids or parameters[0].device.type == "cpu" or len(found) > 1:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device/"
                f"multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
                f"{output_device}, and module parameters {sorted(map(str, found))}. Leave both out"
            )
        return None, None
    return [_index(device_ids[0])], _index(device_ids[0] if output_device is None else output_device)


def _index(device: int | torch.device | str) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def bucket_sizes(bucket_cap_mb: Any, several: Sequence[float] | None, first: float | None) -> tuple[list[Any], float]:
    """MiB of a usual bucket, followed by those of `bucket_cap_mb_list`; and of the first bucket."""
    if several:
        if bucket_cap_mb is not None or first is not None:
            raise ValueError(
                f"bucket_cap_mb_list={list(several)} gives all sizes, but bucket_cap_mb={bucket_cap_mb} and "
                f"first_bucket_mb={first} were given too: leave them out"
            )
        return [max(several), *several], max(several)
    if bucket_cap_mb is None:
        return [USUAL_MB], FIRST_MB if first is None else first
    if bucket_cap_mb == AUTO:
        return [AUTO], FIRST_MB if first is None else first
    size_in_bytes("bucket_cap_mb", bucket_cap_mb)
    return [bucket_cap_mb], bucket_cap_mb if first is None else first
