"""Process groups: what a group's members share."""

import uuid
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def group_exists(group: dist.ProcessGroup) -> bool:
    """False once a group was destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that the members of a group share."""
    return dist.distributed_c10d._world.pg_map[group][1]


def group_timeout(group: dist.ProcessGroup) -> Any:
    """How long collectives of a group may take."""
    return group._get_backend(group._device_types[0]).options._timeout


def all_to_all(group: dist.ProcessGroup, received: Tensor, sent: Tensor) -> Any:
    """Starts sending each rank its part of a flat tensor; returns the work."""
    return group.alltoall_base(received, sent, [], [])


def all_gather(group: dist.ProcessGroup, received: Tensor, sent: Tensor) -> Any:
    """Starts sending a tensor to all ranks; returns the work."""
    return group._allgather_base(received, sent)


def reduce_scatter(group: dist.ProcessGroup, received: Tensor, sent: Tensor) -> Any:
    """Starts summing a flat tensor over the ranks, each of which gets a part; returns the work.

    Gloo's own (2.13) makes an all-reduce of it, whose work never says that it is done.
    """
    if has_reduce_scatter(group):
        return group._reduce_scatter_base(received, sent, dist.ReduceScatterOptions())
    parts = torch.empty_like(sent)
    return _Summing(all_to_all(group, parts, sent), parts, received)


def has_reduce_scatter(group: dist.ProcessGroup) -> bool:
    """Whether all of a group's backends have one that sends each part once."""
    return "gloo" not in _backend_names(group)


def backend_name(group: dist.ProcessGroup) -> str:
    """Such as "gloo" or "nccl"; torch's own name for the choice where it is another one for each kind of device."""
    names = _backend_names(group)
    return names.pop() if len(names) == 1 else str(dist.get_backend(group))


def _backend_names(group: dist.ProcessGroup) -> set[str]:
    """One for each kind of device, or the same for several."""
    return {group._get_backend(device).name() for device in group._device_types}


def call_group(group: dist.ProcessGroup, name: str) -> None:
    """Has functional collectives find a group under one more name, in place of what had that name before."""
    c10d: Any = dist.distributed_c10d
    c10d._unregister_process_group(name)  # if there is one
    c10d._register_process_group(name, group)


def finds_group(name: str) -> bool:
    """Whether functional collectives find a group under a name."""
    try:
        c10d: Any = dist.distributed_c10d
        c10d._resolve_process_group(name)
    except RuntimeError:
        return False
    return True


class _Summing:
    """The work of an all-to-all, whose parts are summed when it is waited for."""

    def __init__(self, work: Any, parts: Tensor, into: Tensor) -> None:
        self.is_completed = work.is_completed
        self._work = work
        self._parts = parts
        self._into = into

    def wait(self, *timeout: Any) -> None:
        self._work.wait(*timeout)
        torch.sum(self._parts.view(-1, self._into.numel()), dim=0, out=self._into)


def twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks, made by them alone and together.

    torch names such a group by how many groups a rank belongs to, and ranks that belong to different numbers of them
    would look for each other under different names, for ever. So the first of these ranks names it.
    """
    ranks = dist.get_process_group_ranks(group)
    names = [""] * len(ranks)
    dist.all_gather_object(names, f"twin of {group.group_name}, {uuid.uuid4().hex}", group=group)
    backend, timeout = dist.get_backend(group), group_timeout(group)
    with patch.object(dist.distributed_c10d, "_process_group_name", lambda *_, **__: names[0]):
        made: Any = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def flat_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of all ranks of a mesh; None for the default group."""
    if mesh.ndim == 1:
        return mesh.get_group(0)
    return None if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()


def store_host(store: Any) -> str | None:
    """The host that a store's server runs on, if it has one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
