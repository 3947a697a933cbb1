"""The state that ranks share: rank 0's parameters and buffers, checked and sent before a graph first uses them.

Note [first contact]: ranks compile at different times or not at all, so nothing is sent while compiling. The callable
that Dynamo calls knows its parameters; when grad is enabled and it sees some for the first time, every rank is there.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .agreement import RanksDisagree
from .passes.layout import contiguous_strides, gradient_strides

if TYPE_CHECKING:
    from .group import Group

PACK_BYTES = 64 << 20


class Replica:
    """Remembers which tensors were made equal over which group."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[weakref.ref[Tensor], Group]] = {}
        self._used: dict[int, weakref.ref[Tensor]] = {}

    def is_new(self, tensor: Tensor, group: "Group") -> bool:
        """True until `contact` met this tensor on this group."""
        reference, met = self._done.get(id(tensor), (None, None))
        return reference is None or reference() is not tensor or met is not group

    def has_met(self, tensor: Tensor) -> bool:
        """Whether `contact` met this tensor on some group."""
        return id(tensor) in self._done

    def note_use(self, tensors: Iterable[Tensor]) -> None:
        """Notes that tensors are computed with before `contact` met them: where this rank may be the only one."""
        for tensor in tensors:
            identity = id(tensor)

            def forget(_: object, identity: int = identity) -> None:
                self._used.pop(identity, None)

            self._used[identity] = weakref.ref(tensor, forget)

    def contact(
        self, tensors: Sequence[tuple[str, Tensor]], group: "Group", *, send: bool, used: Iterable[int] = ()
    ) -> None:
        """Checks that all ranks hold tensors of the same kinds, and makes their values rank 0's. A collective.

        Args:
            tensors: (name, tensor) of parameters and buffers, in the same order on all ranks; those met before are left
                out.
            group: the ranks.
            send: overwrite with rank 0's values; otherwise only names, shapes and dtypes are checked.
            used: ids of tensors that this step has already computed with: they must be equal, it is too late to send.

        Raises:
            RanksDisagree: on every rank, naming rank and parameter.
        """
        fresh = {id(t): (name, t) for name, t in tensors if self.is_new(t, group)}
        if not fresh:
            return
        kinds = [_kind_of(name, tensor) for name, tensor in fresh.values()]
        device = next(iter(fresh.values()))[1].device
        everyone = group.gather_objects(kinds, device)
        for rank, theirs in enumerate(everyone):
            _compare(rank, theirs, everyone[0])
        if send and group.size > 1:
            late = self._send(list(fresh.values()), group, {*used, *self._used})
            for rank, names in enumerate(group.gather_objects(late, device)):
                if names:
                    raise RanksDisagree(
                        f"{names[0]} on rank {rank} differs from rank 0's, but this step has already computed with it "
                        "outside of the compiled graphs or in a graph where nothing trains. Start from equal weights "
                        "on all ranks (the same seed, or a broadcast), or compile the whole module, so that fxddp can "
                        "send rank 0's weights in time"
                    )
        for identity, (_, tensor) in fresh.items():
            self._used.pop(identity, None)

            def forget(_: object, identity: int = identity) -> None:
                self._done.pop(identity, None)

            self._done[identity] = (weakref.ref(tensor, forget), group)

    @torch.no_grad()
    def _send(self, tensors: list[tuple[str, Tensor]], group: "Group", used: set[int]) -> list[str]:
        late = []
        for pack in _packs(tensors):
            for (name, tensor), value in zip(pack, broadcast_values([t for _, t in pack], group), strict=True):
                if group.rank == 0 or torch.equal(tensor, value):
                    continue
                if id(tensor) in used:
                    late.append(name)
                else:
                    tensor.copy_(value)
        return late


@torch.no_grad()
def sync_buffers(buffers: Sequence[Tensor], group: "Group") -> None:
    """Overwrites buffers with rank 0's: one collective for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for same in kinds.values():
        values = broadcast_values(same, group)
        if group.rank != 0:
            torch._foreach_copy_(same, values)


def broadcast_values(tensors: Sequence[Tensor], group: "Group") -> list[Tensor]:
    """Rank 0's values of tensors of one dtype and device, through one flat broadcast; the tensors stay as they are."""
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
        group.broadcast(wire)
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]


def _packs(tensors: list[tuple[str, Tensor]]) -> Iterable[list[tuple[str, Tensor]]]:
    pack: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if pack and (
            (pack[0][1].dtype, pack[0][1].device) != (tensor.dtype, tensor.device) or size + tensor.nbytes > PACK_BYTES
        ):
            yield pack
            pack, size = [], 0
        pack.append((name, tensor))
        size += tensor.nbytes
    if pack:
        yield pack


Kind = tuple[str, tuple[int, ...], tuple[int, ...], str, bool]
"""Name, shape, strides, dtype and whether it requires grad."""


def _kind_of(name: str, tensor: Tensor) -> Kind:
    shape = tuple(tensor.shape)
    return name, shape, gradient_strides(shape, tensor.stride()), str(tensor.dtype), tensor.requires_grad


def _compare(rank: int, theirs: list[Kind], first: list[Kind]) -> None:
    for mine, other in zip(theirs, first, strict=False):
        if mine != other:
            raise RanksDisagree(
                f"the model differs between ranks: rank {rank} has {_show(mine)} where rank 0 has {_show(other)}. "
                "Build the same model on every rank"
            )
    if len(theirs) != len(first):
        longer, where = (theirs, rank) if len(theirs) > len(first) else (first, 0)
        extra = longer[min(len(theirs), len(first))]
        raise RanksDisagree(
            f"the model differs between ranks: rank {rank} has {len(theirs)} parameters and buffers, rank 0 has "
            f"{len(first)}; only rank {where} has {_show(extra)}. Build the same model on every rank"
        )


def _show(kind: Kind) -> str:
    name, shape, stride, dtype, requires_grad = kind
    layout = "" if stride == contiguous_strides(shape) else f" with strides {stride}"
    return f"{name} {shape} {dtype}{layout}{'' if requires_grad else ' (frozen)'}"
