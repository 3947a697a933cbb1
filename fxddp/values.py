"""One rank's values of parameters and buffers for all ranks.

Note [few buffers]: before most forwards there is little to send, and whatever makes ranks wait there costs every step.
So a few bytes go out with rank 0's record, which waits for nobody; the others wait for rank 0 alone. All ranks look at
the records when they announce their next step: until then nothing was done that another rank would have to take part
in.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .channel import RanksDisagree
from .decision import Event

if TYPE_CHECKING:
    from .backend import Backend
    from .group import Group

CAST_BYTES = 1 << 20
"""How much of buffers goes out with a record; more would keep the thread that trains from training."""


def send_before_forward(backend: "Backend", event: Event, buffers: Sequence[Tensor], group: "Group") -> None:
    """Overwrites buffers with those of `Backend.root`'s rank; see Note [few buffers]. A collective.

    Raises:
        RanksDisagree: the other ranks are at another step.
    """
    if backend.joining or not _few(buffers):
        send(buffers, group, backend.root(backend.agreement.announce(event, group).decision(), group))
        return
    event = event.with_cast
    proposal = backend.agreement.announce(event, group, cast=lambda: _to_bytes(buffers))
    if group.rank != 0:
        received = proposal.receive()
        if received is not None:
            _from_bytes(buffers, received)
    if event.record in group.taken_together:
        group.unconfirmed = proposal
    else:  # ranks may have compiled other graphs
        proposal.decision()
        group.taken_together.add(event.record)


@torch.no_grad()
def send(tensors: Sequence[Tensor], group: "Group", root: int = 0) -> None:
    """Overwrites tensors with one rank's: one collective for each dtype and device."""
    for same in _by_kind(tensors):
        values = broadcast_values(same, group, root)
        if group.rank != root:
            overwrite(same, values)


def overwrite(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies values into tensors; an expanded one, whose elements share memory, gets each of its own elements once."""
    torch._foreach_copy_(
        [_once(tensor, tensor) for tensor in tensors],
        [_once(value, tensor) for value, tensor in zip(values, tensors, strict=True)],
    )


def _once(values: Tensor, tensor: Tensor) -> Tensor:
    if 0 in tensor.stride():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                values = values.narrow(dim, 0, min(1, values.shape[dim]))
    return values


def broadcast_values(tensors: Sequence[Tensor], group: "Group", root: int = 0) -> list[Tensor]:
    """One rank's values of tensors of one dtype and device, through one flat broadcast; changes none of them."""
    first = tensors[0]
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    if flat.numel():
        wire = (
            torch.view_as_real(flat)
            if flat.is_complex()
            else flat.view(torch.uint8)
            if first.dtype == torch.bool
            else flat
        )
        group.broadcast(wire, root)
    return _parts(flat, tensors)


def _few(tensors: Sequence[Tensor]) -> bool:
    return all(t.device.type == "cpu" for t in tensors) and sum(t.nbytes for t in tensors) <= CAST_BYTES


@torch.no_grad()
def _to_bytes(tensors: Sequence[Tensor]) -> bytes:
    flats = [torch.cat([t.detach().reshape(-1) for t in same]) for same in _by_kind(tensors)]
    return b"".join(flat.view(torch.uint8).numpy().tobytes() for flat in flats if flat.numel())


@torch.no_grad()
def _from_bytes(tensors: Sequence[Tensor], data: bytes) -> None:
    size = sum(t.nbytes for t in tensors)
    if len(data) != size:
        raise RanksDisagree(
            f"rank 0 sent {len(data)} bytes of buffers, this rank has {size}: a buffer was replaced by one of another "
            "shape or dtype on some ranks only"
        )
    values, at = bytearray(data), 0
    for same in _by_kind(tensors):
        count = sum(t.numel() for t in same)
        if count:
            flat = torch.frombuffer(values, dtype=same[0].dtype, count=count, offset=at)
            at += flat.nbytes
            overwrite(same, _parts(flat, same))


def _parts(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())
