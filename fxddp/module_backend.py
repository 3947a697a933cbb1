"""The backend of one wrapped module: knows which tensors to leave alone, and for every forward whether it synchronises.

Note [marks]: where a forward ran decides whether its gradients are averaged. A compiled graph's autograd node carries
that; for what runs eagerly, the nodes of the forward's outputs do. They run first in its backward. A backward without
any, while no synchronised forward waits for one, is none of the wrapper's: somebody used the plain module.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, compress
from math import inf
from operator import is_
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _compat
from .backend import Backend
from .call import refuse_distributed_autograd
from .compiled import backends_in
from .config import Settings
from .decision import BUFFERS, Event
from .group import Group
from .modules import Modules
from .uncovered import Watch
from .values import send, send_before_forward

if TYPE_CHECKING:
    from .backward import Backward

KEPT_MARKS = 64

HOLDERS = ("_modules", "_parameters")
"""Where modules keep their members, in dicts; those of TorchScript have something else there, and never change."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where modules keep their hooks."""


class ModuleBackend(Backend):
    """A backend that serves one module, told about each of its forwards.

    Attributes:
        has_buffers: whether there are buffers to share, as of the last `keep_up`.
        owes_backward: under `join`, the last forward was announced with a backward that has not come.
    """

    def __init__(self, settings: Settings, module: nn.Module, ignored: AbstractSet[str]) -> None:
        super().__init__(settings)
        self._module = weakref.ref(module)
        self._ignored = ignored
        self._own: dict[int, weakref.ref[Tensor]] = {}
        self._awaited = 0.0
        self._marks: dict[int, bool] = {}
        self._buffers: tuple[Any, Event] = ((), Event(BUFFERS))
        self.watch = _Watch(self)
        self.modules = Modules(self.watch)
        self._sparse: set[int] = set()
        self.has_buffers = False
        self.owes_backward = False
        self._frames: weakref.WeakSet[CodeType] = weakref.WeakSet()
        self.keep_up()  # what is wrapped is going to be trained

    def __call__(self, *arguments: Any, **kwargs: Any) -> Any:
        """As `Backend.__call__`."""
        if (code := _compat.code_compiled()) is not None:
            self._frames.add(code)
        return super().__call__(*arguments, **kwargs)

    def forget_frames(self, kept: AbstractSet[CodeType]) -> None:
        """Has all code that graphs came from compiled anew, but for some."""
        for code in self._frames - kept:
            _compat.forget_compiled(code)

    def keep_up(self) -> None:
        """Watches parameters that came or took the place of others."""
        module = self._living()
        with torch.enable_grad():
            self.adopt(module)
        embeddings = (part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))
        self._sparse = {id(part.weight) for part in embeddings if part.sparse}
        self.has_buffers = bool(self.shared_buffers())

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """The module's parameters by name, without those to leave alone."""
        return {name: p for name, p in self._living().named_parameters() if name not in self._ignored}

    def shared_buffers(self) -> dict[str, Tensor]:
        """The module's buffers as they are now, by name, without those to leave alone."""
        return {name: buffer for name, buffer in self._living().named_buffers() if name not in self._ignored}

    def _living(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the wrapped module is gone"
        return module

    def is_ignored(self, tensor: Any) -> bool:
        """Whether graphs leave this tensor alone: parameters that are not the module's may differ between ranks.

        Buffers are the wrapper's business: it sends all of them, and a user may replace one on one rank alone.
        """
        return not (isinstance(tensor, nn.Parameter) and self.has(tensor))

    def has(self, parameter: Tensor) -> bool:
        """Whether this is one of the module's own parameters, and not one to leave alone."""
        reference = self._own.get(id(parameter))
        if reference is None or reference() is not parameter:
            self._own = {id(p): weakref.ref(p) for p in self.shared_parameters().values()}
        return id(parameter) in self._own

    def known_tensors(self, owners_of: Any = None) -> list[tuple[str, Tensor]]:
        """As `Backend.known_tensors`, without those to leave alone."""
        return [(name, tensor) for name, tensor in super().known_tensors(owners_of) if not self.is_ignored(tensor)]

    def expects_sparse(self, parameter: Tensor, group: Group) -> bool:
        """As `Backend.expects_sparse`: those of embeddings that say so, on gloo, which alone sums them over ranks."""
        return id(parameter) in self._sparse and self.registered.carrier.name is None and group.backend_name == "gloo"

    @property
    def is_local(self) -> bool:
        """Whether forwards here and now are under `no_sync`."""
        return bool(self._local_scopes)

    def send_buffers(self, buffers: Mapping[str, Tensor], group: Group) -> None:
        """Overwrites all shared buffers with those of `Backend.root`'s rank. A collective.

        Raises:
            RanksDisagree: the other ranks are at another step.
        """
        if not buffers or group.size == 1:
            return
        size = sum(buffer.nbytes for buffer in buffers.values())
        key = (owner := self.replica.owner(group), size, *buffers)
        if self._buffers[0] != key:  # by name: a user may replace a buffer, on one rank alone
            self._buffers = (key, Event(BUFFERS, details=list(buffers), owner=owner, nbytes=size))
        send_before_forward(self, self._buffers[1], list(buffers.values()), group)

    def receive_buffers(self, names: Sequence[str], group: Group, root: int) -> None:
        """What a rank without inputs does while others are in `send_buffers`."""
        buffers = self.shared_buffers()
        send([buffers[name] for name in names], group, root)

    def mark(self, outputs: Iterable[Tensor], *, sync: bool) -> None:
        """Has the backward of these outputs of a forward follow it; see Note [marks]."""
        mark = _Mark(self, sync)
        nodes = {id(node): node for t in outputs if (node := t.grad_fn) is not None}
        for node in nodes.values():
            node.register_prehook(mark)
        if sync:
            self._awaited += 1 if nodes else inf  # what nobody can see may have any number of backwards

    def note(self, *, sync: bool) -> None:
        """Notes that the running backward belongs to a forward that does or does not synchronise."""
        task = _compat.task_id()
        if task not in self._running and _compat.accumulates_everywhere() and (self.joining or self._trains):
            self.backward()  # around those inside it, which are not the end of the iteration
        self._marks[task] = self._marks.pop(task, False) or sync
        while len(self._marks) > KEPT_MARKS:  # those of an `autograd.grad`, which has no end that anybody tells us of
            del self._marks[next(iter(self._marks))]

    @property
    def _trains(self) -> bool:
        module = self._module()  # gone, if the user kept a loss alone
        return module is not None and any(parameter.requires_grad for parameter in module.parameters())

    @property
    def _mark(self) -> bool | None:
        """Whether the forward of the running backward synchronises, or of the one around it; None if there is none."""
        outermost = next(iter(self._running), None)
        return self._marks.get(_compat.task_id(), None if outermost is None else self._marks.get(outermost))

    def under_no_sync(self, parameters: Collection[int]) -> bool:
        """Whether what eager code accumulated stays local: as the forwards of this backward say.

        If there are none that we know of, and none is waiting for its backward, the plain module was used.
        """
        sync = self._mark
        return (not self._awaited or super().under_no_sync(parameters)) if sync is None else not sync

    def concern(self) -> int:
        """As `Backend.concern`; a forward that waits for its backward makes it 1."""
        sync = self._mark
        return max(super().concern(), int(self._awaited > 0), 0 if sync is None else 2 + sync)

    def forget(self, backward: "Backward") -> None:
        """Called when a backward is over."""
        self._marks.pop(backward.task, None)
        super().forget(backward)
        if backward.record.sync and not self.running:
            self._awaited = max(self._awaited - 1, 0)
            self.owes_backward = False


class Structure:
    """What a module consisted of; keeps that alive.

    Not all changes call hooks of torch's: `ModuleList.insert` and `_apply` call none.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(map(vars, module.modules()))
        self._holders = [held for part in parts for key in HOLDERS if isinstance(held := part.get(key), dict)]
        self._counted = [*self._holders, *(held for part in parts if isinstance(held := part.get("_buffers"), dict))]
        self._counts = list(map(len, self._counted))
        self._members = list(self._now())
        hooks = [held for part in parts for key in HOOKS if isinstance(held := part.get(key), dict)]
        self._hooks = [*_compat.hooks_of_all_modules(), *hooks]

    @property
    def hooked(self) -> tuple[int, ...]:
        """Which modules have hooks of which kinds here and now: positions in an order of its own."""
        return tuple(compress(range(len(self._hooks)), self._hooks))

    def has_changed(self) -> bool:
        """Whether modules or parameters came, went or were replaced, or the number of buffers is another."""
        return list(map(len, self._counted)) != self._counts or not all(map(is_, self._now(), self._members))

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._holders))


class _Watch(Watch):
    """Leaves alone what its backend leaves alone."""

    def __init__(self, backend: ModuleBackend) -> None:
        super().__init__(backend)
        self._module_backend = weakref.ref(backend)

    def add(self, parameter: Tensor, name: str, *, rename: bool = False) -> None:
        """As `Watch.add`."""
        backend = self._module_backend()
        if backend is None or not backend.is_ignored(parameter):
            super().add(parameter, name, rename=rename)

    def strangers(self) -> list[Tensor]:
        """As `Watch.strangers`; there are none, as others than the module's parameters are left alone."""
        return []


class _Mark:
    """Pre-hook of an output's autograd node."""

    def __init__(self, backend: ModuleBackend, sync: bool) -> None:
        self._backend = weakref.ref(backend)
        self._sync = sync

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a whole training step may be compiled
    def __call__(self, _: Any) -> None:
        refuse_distributed_autograd()
        backend = self._backend()
        if backend is not None:
            backend.note(sync=self._sync)


def compiled_with_fxddp(module: nn.Module) -> bool:
    """Whether a module, or a part of it, is compiled with an `fxddp.backend`."""
    return any(not isinstance(backend, ModuleBackend) for backend in backends_in(module))


def wrapped_with_fxddp(module: nn.Module) -> bool:
    """Whether a module, or a part of it, is an `fxddp.DistributedDataParallel`."""
    return any(isinstance(vars(part).get("backend"), ModuleBackend) for part in module.modules())
