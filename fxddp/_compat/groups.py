"""Process groups: what a group's members share."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


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
    """Starts sending a flat tensor to all ranks; returns the work. The public names differ between torch versions."""
    return group._allgather_base(received, sent)


def store_host(store: Any) -> str | None:
    """The host that a store's server runs on, if it has one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
