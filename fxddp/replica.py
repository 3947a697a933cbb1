"""The state that ranks share: rank 0's parameters and buffers, checked and sent before a graph first uses them.

Note [first contact]: ranks compile at different times or not at all, so nothing is sent while compiling. The callable
that Dynamo calls knows its parameters; when grad is enabled and it sees some for the first time, every rank is there.
"""

import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .channel import RanksDisagree
from .compiler import source_digest
from .config import AUTO, MIB
from .decision import BUFFERS, CONTACT, HOOKS, Event
from .group import alive
from .packing import packs
from .passes.layout import contiguous_strides, gradient_strides
from .speeds import speeds_of
from .turns import refuse_another
from .values import broadcast_values, overwrite, send_before_forward

if TYPE_CHECKING:
    from .backend import Backend
    from .config import Settings
    from .group import Group

PACK_BYTES = 64 << 20


class Replica:
    """Remembers which tensors were made equal over which group, and by which number the ranks speak of each."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = weakref.ref(backend)
        self._met: dict[int, tuple[weakref.ref[Tensor], Group, int, Layout]] = {}
        self._by_number: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._used: dict[int, weakref.ref[Tensor]] = {}
        self._owner: tuple[Group | None, int] = (None, 0)
        self._unmet: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def is_new(self, tensor: Tensor, group: "Group") -> bool:
        """True until `contact` met this tensor on this group, and again when it was converted in place."""
        reference, met, _, layout = self._met.get(id(tensor), (None, None, 0, None))
        return reference is None or reference() is not tensor or met is not group or layout != _layout(tensor)

    def has_met(self, tensor: Tensor) -> bool:
        """Whether a tensor has a number."""
        return id(tensor) in self._met

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor that was met, the same on all ranks."""
        return self._met[id(tensor)][2]

    def tensor(self, number: int) -> Tensor:
        """The tensor with a number.

        Raises:
            RuntimeError: it is gone on this rank.
        """
        reference, name = self._by_number.get(number, (None, ""))
        found = reference() if reference is not None else None
        if found is None:
            raise RuntimeError(f"another rank trains {name or number}, which does not exist any more on this one")
        return found

    def owner(self, group: "Group") -> int:
        """The number of the backend on a group, the same on all ranks; 0 before its first contact."""
        return self._owner[1] if self._owner[0] is group else 0

    def name(self, number: int) -> str:
        """Qualified name of the tensor with a number."""
        return self._by_number.get(number, (None, ""))[1] or f"<parameter {number}>"

    def title(self, number: int) -> str:
        """Qualified name and shape of the tensor with a number."""
        reference, _ = self._by_number.get(number, (None, ""))
        tensor = reference() if reference is not None else None
        return self.name(number) + ("" if tensor is None else f" {tuple(tensor.shape)}")

    def note_use(self, tensors: Iterable[tuple[str, Tensor]], *, late: bool) -> None:
        """Notes that tensors are computed with before `contact` met them: where this rank may be the only one.

        Args:
            tensors: names and tensors.
            late: in a step that trains, so that it is too late to send rank 0's values. Otherwise, as in an
                evaluation, they may still be sent; if they never are they must be equal on the ranks that use them.
        """
        for name, tensor in tensors:
            identity = id(tensor)
            if identity in self._met:
                continue

            def forget(_: object, identity: int = identity) -> None:
                self._used.pop(identity, None)
                self._unmet.pop(identity, None)

            self._unmet[identity] = (weakref.ref(tensor, forget), name)
            if late:
                self._used[identity] = weakref.ref(tensor, forget)

    @property
    def has_unmet(self) -> bool:
        """Whether this rank computed with tensors that were never compared with the others'."""
        return bool(self._unmet)

    def compare_unmet(self, group: "Group") -> None:
        """Compares what ranks computed with and never met, such as a frozen network that only runs under `no_grad`.

        A collective. What only some ranks used, as in an evaluation on one of them, is not looked at.

        Raises:
            RanksDisagree: on every rank.
        """
        if group.size == 1:
            self._unmet.clear()
            return
        backend = self._backend()
        assert backend is not None
        written = backend.modules.only_written()
        mine: dict[str, list[str]] = {}  # several networks may have the same names
        for reference, name in self._unmet.values():
            tensor = reference()
            if tensor is not None and id(tensor) not in written:
                key = json.dumps([name, list(tensor.shape), str(tensor.dtype)])
                mine.setdefault(key, []).append(digest(tensor))
        self._unmet.clear()
        everyone = group.channel.gather(mine, lambda: "compare what ran without gradients")
        for rank, theirs in enumerate(everyone):
            for key in everyone[0].keys() & theirs.keys():
                fewer, more = sorted((Counter(theirs[key]), Counter(everyone[0][key])), key=Counter.total)
                if not fewer <= more:
                    raise RanksDisagree(
                        f"{json.loads(key)[0]} on rank {rank} differs from rank 0's, and was computed with: no "
                        f"graph that trains uses it, so that fxddp had no moment to send rank 0's. {EQUAL_STARTS}"
                    )

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
        backend = self._backend()
        assert backend is not None
        if backend.settings.measures:
            speeds_of(backend, group, next(iter(fresh.values()))[1])
        turn = None if backend.turn is None else backend.turn.told()
        self._agree({"settings": _common(backend.settings), "kinds": kinds, "turn": turn}, group, _compare_contact)
        late: list[str] = []
        if send and group.size > 1:
            written = backend.modules.only_written()
            late = self._send(list(fresh.values()), group, {*used, *self._used} - written, written)
            self._agree({"late": late}, group, _refuse_late)
        if self._owner[0] is not group:
            self._owner = (group, next(group.numbers))
            group.owners[self._owner[1]] = weakref.ref(backend)
        for identity, (name, tensor) in fresh.items():
            self._used.pop(identity, None)
            self._unmet.pop(identity, None)
            number = next(group.numbers)

            def forget(_: object, identity: int = identity, number: int = number) -> None:
                self._met.pop(identity, None)
                self._by_number.pop(number, None)

            reference = weakref.ref(tensor, forget)
            self._met[identity] = (reference, group, number, _layout(tensor))
            self._by_number[number] = (reference, name)

    def agree_on_hooks(self, names: Sequence[str], group: "Group") -> None:
        """Checks that all ranks have the same communication hook and optimizer in backward. A collective.

        Raises:
            RanksDisagree: on every rank.
        """
        backend = self._backend()
        assert backend is not None
        backend.agreement.announce(Event(HOOKS, details=names, owner=self.owner(group)), group).decision()

    def _agree(self, mine: dict[str, Any], group: "Group", compare: Callable[[int, Any, Any], None]) -> None:
        """Has `compare(rank, theirs, rank 0's)` look at what differs between ranks."""
        backend = self._backend()
        assert backend is not None
        proposal = backend.agreement.announce(Event(CONTACT, details=json.loads(json.dumps(mine))), group)
        proposal.decision()
        for rank, event in enumerate(proposal.events):
            compare(rank, event.details, proposal.events[0].details)

    def sync_buffers(self, buffers: Sequence[Tensor], group: "Group") -> None:
        """Overwrites buffers that were met with those of `Backend.root`'s rank. A collective.

        Raises:
            RanksDisagree: the other ranks are at another step.
        """
        if not buffers or group.size == 1:
            return
        backend = self._backend()
        assert backend is not None
        size = sum(map(_nbytes, buffers))
        event = Event(BUFFERS, (tuple(map(self.number, buffers)),), owner=self.owner(group), nbytes=size)
        send_before_forward(backend, event, buffers, group)

    @torch.no_grad()
    def _send(self, tensors: list[tuple[str, Tensor]], group: "Group", used: set[int], written: set[int]) -> list[str]:
        late = []
        names = {id(tensor): name for name, tensor in tensors}
        for pack in packs((tensor for _, tensor in tensors), PACK_BYTES):
            for tensor, value in zip(pack, broadcast_values(pack, group), strict=True):
                if group.rank == 0 or torch.equal(tensor, value):
                    continue
                if id(tensor) in used:
                    late.append(names[id(tensor)])
                elif id(tensor) in written:
                    overwrite([tensor.data], [value])  # saved for the backward by some normalisations, not used there
                else:
                    overwrite([tensor], [value])
        return late


_nbytes = attrgetter("nbytes")

EQUAL_STARTS = (
    "Start from equal weights on all ranks (the same seed, or a broadcast), or compile the whole module, so that fxddp "
    "can send rank 0's weights in time"
)

Kind = list[Any]
"""Name, shape, strides, dtype and whether it requires grad."""

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""Dtype, shape and strides: what the bytes of a collective mean."""


def _common(settings: "Settings") -> dict[str, Any]:
    """What must be the same on all ranks."""
    return {
        "the version of torch": torch.__version__.split("+")[0],
        "the version of fxddp": source_digest()[:12],
        "bucket_mb": AUTO if settings.auto else settings.cap / MIB,
        "first_bucket_mb": settings.first_cap / MIB,
        "find_unused_parameters": settings.find_unused_parameters,
        "static_graph": settings.static_graph,
        "init_sync": settings.init_sync,
        "algorithm": settings.algorithm,
        "overlap": settings.overlap,
        "the list of process groups": [str(alive(lane).group_name) for lane in settings.lanes],
        "forward_sync_buffers": settings.forward_sync_buffers,
    }


def digest(tensor: Tensor) -> str:
    """Changes with any bit of a tensor's values."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def _layout(tensor: Tensor) -> Layout:
    return tensor.dtype, tensor.shape, tensor.stride()


def _kind_of(name: str, tensor: Tensor) -> Kind:
    if tensor.layout is not torch.strided:
        raise RuntimeError(
            f"{name} is a sparse tensor, which fxddp does not send to other ranks: keep it in a plain attribute, out "
            "of the module's buffers, or name it in its _ddp_params_and_buffers_to_ignore and use "
            "fxddp.DistributedDataParallel"
        )
    shape = tuple(tensor.shape)
    return [name, shape, gradient_strides(shape, tensor.stride()), str(tensor.dtype), tensor.requires_grad]


def _compare_contact(rank: int, theirs: Any, first: Any) -> None:
    for setting, value in first["settings"].items():
        if (other := theirs["settings"][setting]) != value:
            raise RanksDisagree(
                f"{setting} differs between ranks: {other!r} on rank {rank}, {value!r} on rank 0. Give all ranks the "
                "same"
            )
    _compare(rank, theirs["kinds"], first["kinds"])
    refuse_another(rank, theirs["turn"], first["turn"])


def _refuse_late(rank: int, theirs: Any, _: Any) -> None:
    if theirs["late"]:
        raise RanksDisagree(
            f"{theirs['late'][0]} on rank {rank} differs from rank 0's, but this step has already computed with it "
            f"outside of the compiled graphs or in a graph where nothing trains. {EQUAL_STARTS}"
        )


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
    shape, stride = tuple(shape), tuple(stride)
    layout = "" if stride == contiguous_strides(shape) else f" with strides {stride}"
    return f"{name} {shape} {dtype}{layout}{'' if requires_grad else ' (frozen)'}"
