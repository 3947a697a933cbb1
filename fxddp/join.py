"""A rank that has run out of inputs: it answers the others' steps until they have run out as well.

Note [join]: every step that communicates is announced (`channel.py`), so a rank without inputs needs no plan: it learns
from the records what the others reduce, and takes part with zeros. Under `join` a forward is announced too: it says
whether a synchronised backward follows. The numbers in events tell one wrapped model from another on the same group,
whose steps may come in any order.

A last forward with grad enabled that gets no backward was announced as if it had one, and others wait for that.
`Uneven`, the context manager of `DistributedDataParallel.join`, has its rank take part in the rest of that iteration
without inputs; where no rank has any, the iteration is over. torch's `Join` tells nobody of its end before it asks all
ranks who is left, so that ranks that wait for the backward have to find out where this one is (`whereabouts.py`) and
raise. (Stock DDP's shadows pair an all-reduce of gradients with that question.)
"""

from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook

from .channel import RanksDisagree
from .decision import BUFFERS, END, ENDS, FORWARD, HOOKS, JOINED, Decision, Event, hooks_differ
from .packing import empty_bucket, packs, sparse_gradient
from .values import send

if TYPE_CHECKING:
    from .backend import Backend
    from .ddp_members import Members
    from .group import Group
    from .module_backend import ModuleBackend


class Shadow(JoinHook):
    """What `torch.distributed.algorithms.Join` runs for a wrapped module on a rank without inputs."""

    def __init__(self, model: "Members") -> None:
        self._model = model

    def main_hook(self) -> None:
        """Shadows one iteration of the other ranks: a forward, and the backward if it synchronises."""
        backend = self._model.backend
        backend.under_way.settle_all()
        group = backend.lookup()
        if group is None or group.size == 1:
            return
        backend.joining = True
        if self._model.joins_first:
            group.notices = (backend.replica.owner(group), 1)  # `Join` has answered that of one forward
        shadow_iteration(backend, group)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Sends the parameters and buffers of a rank that ran out last to all others."""
        backend = self._model.backend
        backend.joining = False
        self._model.leave_join()
        group = backend.lookup()
        if group is None or group.size == 1:
            return
        group.shadowed.clear()
        group.confirm()
        last = group.channel.gather(is_last_joiner, lambda: "find out who ran out of inputs last")
        root = max(rank for rank, is_last in enumerate(last) if is_last)
        tensors = [tensor for _, tensor in self._model.shared_tensors()]
        for members in packs(tensors, backend.settings.cap):
            send(members, group, root)


class Uneven(Join):
    """`Join` for one wrapped module, whose last forward need not get a backward."""

    def __init__(self, model: "Members", *, enable: bool, throw: bool, by_initial: bool) -> None:
        super().__init__([model], enable, throw, divide_by_initial_world_size=by_initial)
        self._model = model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends this rank's iteration, and takes part in those of the others."""
        backend = self._model.backend
        if kind is None and backend.owes_backward:
            backend.owes_backward = False
            group = backend.lookup()
            if group is not None and group.size > 1:
                group.notices = (backend.replica.owner(group), 0)
                shadow_iteration(backend, group)
        super().__exit__(kind, error, traceback)


def announce_forward(backend: "ModuleBackend", group: "Group", *, sync: bool) -> None:
    """Tells ranks without inputs that a forward starts, and whether a backward follows that synchronises."""
    backend.joining = True
    backend.owes_backward = sync
    event = Event(FORWARD, details=sync, owner=backend.replica.owner(group))
    backend.agreement.announce(event, group).decision()


def shadow_iteration(backend: "Backend", group: "Group") -> None:
    """Takes part, with zeros, in all that the other ranks do until this backend's iteration is over.

    It is over as well where none of them has inputs left.

    Raises:
        RanksDisagree: they do something that cannot be shadowed.
    """
    seen: list[Any] = group.shadowed
    own = backend.replica.owner(group)
    while not _is_over(seen, own):
        decision = backend.agreement.announce(Event(JOINED), group).decision()
        step = decision.step
        if step is None:
            break
        owner = group.owner(step.owner)
        if owner is None:
            raise RanksDisagree(
                f"a rank without inputs cannot take part in {step.kind}: the model that is at it is none of those "
                "given to Join"
            )
        if step.kind == FORWARD:
            _answer_notice(step.owner, group)
        _shadow(owner, group, decision, step)
        if decision.compare:
            owner.replica.compare_unmet(group)
        if step.kind in (FORWARD, END):
            seen.append((step.owner, step.kind, step.details))
    group.shadowed = [entry for entry in seen if entry[0] != own]


def _answer_notice(owner: int, group: "Group") -> None:
    """Takes part in the all-reduce by which each forward of `Join`'s first model tells how many ranks have inputs."""
    first, answered = group.notices
    if owner != first:
        return
    if answered:
        group.notices = (first, answered - 1)
    else:
        group.settle()
        group.wait(group.all_reduce(torch.zeros(1), counts=False), lambda: "answer a forward of a rank with inputs")


def _is_over(seen: list[Any], own: int) -> bool:
    mine = [(kind, details) for owner, kind, details in seen if owner == own]
    return bool(mine) and (mine[-1][0] == END or (mine[-1][0] == FORWARD and not mine[-1][1]))


@torch.no_grad()
def _shadow(backend: Any, group: "Group", decision: Decision, step: Event) -> None:
    if step.kind == HOOKS:
        _compare_hook(backend, group, step)
        return
    if step.kind == BUFFERS and step.details:
        backend.receive_buffers(step.details, group, backend.root(decision, group))
        return
    tensors = [[backend.replica.tensor(number) for number in bucket] for bucket in decision.buckets]
    if step.kind == BUFFERS:
        for members in tensors:
            send(members, group, backend.root(decision, group))
        return
    idle = {id(backend.replica.tensor(number)) for number in {*decision.unused, *step.hooked}}
    _reduce_zeros(backend, group, tensors, idle, at_end=step.kind in ENDS)
    if step.kind == END:
        backend.outbox.commit()


def _reduce_zeros(
    backend: "Backend", group: "Group", tensors: list[list[Tensor]], idle: AbstractSet[int], *, at_end: bool
) -> None:
    works: list[tuple[Any, Tensor]] = []
    sending = backend.outbox.to(group)
    sparse = [p for bucket in tensors for p in bucket if at_end and backend.expects_sparse(p, group)]
    if sparse:
        known = set(map(id, sparse))
        tensors = [[p for p in bucket if id(p) not in known] for bucket in tensors]
    for bucket in tensors:
        cap = backend.settings.cap if at_end else sum(t.nbytes for t in bucket)
        for members in packs(bucket, cap):
            flat, _ = empty_bucket(members)
            if flat.numel():
                is_last = bucket is tensors[-1]
                works.append((sending.start(flat.zero_(), members, lambda _: None, idle=idle, is_last=is_last), flat))
    for parameter in sparse:
        zeros = sparse_gradient(parameter)
        group.settle()
        works.append((group.all_reduce(zeros), zeros))
    for work, _ in works:
        group.wait(work, lambda: "take part with zeros")


def _compare_hook(backend: "Backend", group: "Group", step: Event) -> None:
    names = backend.registered.names
    if list(names) != list(step.details):
        mine = f"rank {group.rank}, which has no inputs left"
        raise RanksDisagree(hooks_differ(mine, names, "others", step.details))
    backend.registered.were_confirmed(group)
