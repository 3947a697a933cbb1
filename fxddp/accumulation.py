"""What autograd itself accumulates in one backward: gradients that no graph packed into a bucket.

Hooks tell (`watchers.py`), or the end of a backward where parameters have none (Note [coverage]). Hooks are called for
all that went back through autograd, also for what graphs reduced and handed back, and for gradients that a graph left
out; only the rest is news. News is averaged at the end of the backward (`ending.py`), or at once where others look at
`.grad` next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _compat
from .decision import HOOK, Event
from .uncovered import Watch, parameters_registered

if TYPE_CHECKING:
    from .backend import Backend
    from .backward import Backward
    from .call import Binding
    from .group import Group


@dataclass(frozen=True, slots=True)
class Returned:
    """A reduced gradient that went back through autograd."""

    storage: Any
    shape: Sequence[int]
    stride: Sequence[int]


def _sum(parts: Sequence[Returned], dtype: torch.dtype) -> Tensor:
    """The sum of these, added up as autograd does: in the order in which they came."""
    tensors = [
        torch.empty((), dtype=dtype, device=p.storage.device).set_(p.storage, 0, p.shape, p.stride) for p in parts
    ]
    return reduce(torch.add, tensors)


class Accumulation:
    """The gradients of one backward that autograd accumulates.

    Attributes:
        local: parameters into which it accumulated something local, by id.
        by_graphs: what graphs handed back to it, of parameters by id; None for something local.
        strangers: parameters of this backward that nobody told us about.
    """

    def __init__(self, backend: "Backend") -> None:
        self._backend = backend
        self.local: dict[int, Tensor] = {}
        self.by_graphs: dict[int, tuple[Tensor, list[Returned] | None]] = {}
        self.strangers: list[Tensor] = []
        self._left_out: dict[int, tuple[Tensor, int]] = {}
        self._explored = False

    def explore(self, seen: "Binding | Watch") -> None:
        """Looks for parameters of this backward that nobody told us about, when this is seen for the first time.

        And again after a module got a new parameter.
        """
        if seen.unexplored:
            seen.explored = parameters_registered()
            if not self._explored:
                self._explored = True
                self.strangers += self._backend.watch.strangers()

    def left_out(self, parameter: Tensor) -> None:
        """Notes that a graph gives a parameter no gradient in this backward."""
        if parameter.grad is not None:
            self._left_out[id(parameter)] = (parameter.grad, _compat.data_version(parameter.grad))

    def handed_back(self, parameter: Tensor, reduced: Tensor | None) -> None:
        """Notes that a parameter's gradient goes back through autograd as it is, local or reduced.

        Of reduced ones the storage is kept, not the tensor: autograd takes it over as `.grad` all the same, but cannot
        add another contribution to it in place, so that one shows.
        """
        _, parts = self.by_graphs.setdefault(id(parameter), (parameter, None))
        if reduced is not None:
            part = Returned(reduced.untyped_storage(), reduced.shape, reduced.stride())
            self.by_graphs[id(parameter)] = (parameter, [*(parts or ()), part])

    @torch.no_grad()
    def note(self, parameter: Tensor, backward: "Backward", *, now: bool) -> None:
        """Notes that autograd accumulated into a parameter; with `now` it is averaged at once: others look next."""
        identity = id(parameter)
        self.explore(self._backend.watch)
        grad, version = self._left_out.get(identity, (None, 0))
        if grad is not None and grad is parameter.grad and _compat.data_version(grad) == version:
            return  # autograd calls hooks for undefined gradients as well
        reduced: Tensor | None = None
        if identity in self.by_graphs:
            _, parts = self.by_graphs[identity]
            self.by_graphs[identity] = (parameter, None)
            grad = parameter.grad
            if parts is None or grad is None or grad.data_ptr() == parts[0].storage.data_ptr():
                return
            reduced = _sum(parts, grad.dtype)
            if torch.allclose(grad, reduced, rtol=0, atol=0, equal_nan=True):
                return  # ours alone
        elif not now:
            self._backend.under_way.refuse_doubtful(parameter)
            self.local[identity] = parameter
            return
        self._backend.under_way.refuse_doubtful(parameter)
        group = backward.group or self._backend.lookup()
        if group is None:  # alone: an optimizer in backward updates it
            self.local[identity] = parameter
        if group is None or not backward.synchronises({identity}):
            return
        backward.group = group
        self._average(parameter, backward, group, reduced)

    def _average(self, parameter: Tensor, backward: "Backward", group: "Group", reduced: Tensor | None) -> None:
        """Averages what a parameter accumulated, but for the part of it that was reduced already."""
        backend = self._backend
        backend.watch.meet([parameter], group)
        number = backend.replica.number(parameter)
        event = Event(HOOK, ((number,),), owner=backend.replica.owner(group))
        decision = backend.agreement.announce(event, group).decision()
        backward.follow_decision(decision)
        grad = parameter.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            grad = parameter.grad = grad.to_dense()
        if reduced is not None:
            grad.sub_(reduced)
        unused = backward.ids(decision.unused)
        for bucket in decision.buckets:
            members = [backend.replica.tensor(i) for i in bucket]
            there = [grad * backward.scale if p is parameter else None for p in members]
            flat, views = backward.fill(members, there, unused)
            others = [i for i, p in enumerate(members) if p is not parameter and bucket[i] not in decision.unused]
            is_last = bucket is decision.buckets[-1]
            launched = backward.launch(flat, members, others, views, idle=unused, is_last=is_last, outside=True)
            if number in bucket:
                backward.wait(launched)
                grad.copy_(views[bucket.index(number)])
        if reduced is not None:
            grad.add_(reduced)
