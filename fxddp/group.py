"""The process group a backend reduces over, looked up when it is needed: names and groups do not outlive each other."""

import itertools
import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _compat
from .channel import Channel, Record
from .decision import Decision
from .passes.cost import Speeds

if TYPE_CHECKING:
    from .agreement import Proposal
    from .backend import Backend
    from .transport import Stages

DRAIN = timedelta(seconds=30)

GroupReference = weakref.ref[dist.ProcessGroup]
"""How fxddp refers to process groups: one that lives on after `destroy_process_group` has threads that may still drop
a tensor when Python is no more, which aborts the process."""

KEPT = 1_000_000
"""Parameters in the joint decisions that are remembered; routed models may make many."""


class Group:
    """The collectives fxddp uses, on one process group.

    Attributes:
        reference: to the process group.
        numbers: gives backends, parameters and buffers the numbers by which ranks speak of them, in the order they
            were met.
        owners: the backends by number.
        joint: what was decided where ranks were at different steps, by the records of all; the same on all ranks.
        notices: the backend of `Join`'s first model, and how many of its next forwards' notices were answered.
        lines: where buckets go through stages; see Note [stages] in `transport.py`.
        unsettled: a bucket under way with collectives left to start; see Note [rounds] in `rounds.py`.
        taken_together: steps that all ranks took together, so that it is safe to expect the same of them again.
        speeds: how fast its ranks compute and send, once that was measured.
        unconfirmed: what was announced and acted upon, before the other ranks' records were there.
        shadowed: (backend, kind, details) of what a rank without inputs has answered for models whose turn is to come.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.reference = GroupReference(process_group)
        self.size = process_group.size()
        self.rank = process_group.rank()
        self.scale = 1.0 / self.size
        self.numbers = itertools.count(1)
        self.owners: dict[int, weakref.ref[Backend]] = {}
        self.joint: dict[tuple[Record, ...], Decision] = {}
        self._joint_size = 0
        self.notices = (0, 0)
        self.unsettled: Any = None
        self.lines: weakref.WeakSet[Stages] = weakref.WeakSet()
        self.shadowed: list[tuple[int, str, Any]] = []
        self.unconfirmed: Proposal | None = None
        self.speeds: Speeds | None = None
        self.taken_together: set[Record] = set()
        self._channel: Channel | None = None
        self._sum = dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: it was destroyed.
        """
        return alive(self.reference)

    @property
    def exists(self) -> bool:
        """Whether the process group was not destroyed."""
        made = self.reference()
        return made is not None and _compat.group_exists(made)

    @property
    def name(self) -> str:
        """The group's name; names are used again after a group is destroyed."""
        return str(self.process_group.group_name)

    @property
    def backend_name(self) -> str:
        """Such as "gloo" or "nccl"."""
        return _compat.backend_name(self.process_group)

    def owner(self, number: int) -> "Backend | None":
        """The backend with a number."""
        reference = self.owners.get(number)
        return None if reference is None else reference()

    def title(self, number: int) -> str:
        """Qualified name and shape of a tensor by the number that ranks share, whichever backend met it."""
        owners = [owner for reference in self.owners.values() if (owner := reference()) is not None]
        return next(
            (owner.replica.title(number) for owner in owners if number in owner.replica), f"<parameter {number}>"
        )

    def remember(self, records: tuple[Record, ...], decision: Decision) -> None:
        """Keeps a joint decision; all ranks make the same ones, and forget them at the same time."""
        self._joint_size += sum(map(len, decision.buckets)) + len(records)
        if self._joint_size > KEPT:
            self.joint.clear()
            self._joint_size = 0
        self.joint[records] = decision

    @property
    def channel(self) -> Channel:
        """The side channel of the group; all ranks must ask for it the first time."""
        if self._channel is None:
            self._channel = Channel(self)
        return self._channel

    def confirm(self) -> None:
        """Looks at what the other ranks announced when this one went on without waiting for them.

        Raises:
            RanksDisagree: they were at another step.
        """
        proposal, self.unconfirmed = self.unconfirmed, None
        if proposal is not None:
            proposal.decision()

    def count(self, collectives: int = 1) -> None:
        """Counts collectives that are about to start on the data group."""
        if self.size > 1:
            self.channel.launched += collectives

    def settle(self) -> None:
        """Starts what is left to start of a bucket under way: before anything else starts."""
        if self.unsettled is not None:
            self.wait(SimpleNamespace(wait=self.unsettled.settle), lambda: "send the second part of a bucket")

    def settle_all(self) -> None:
        """Starts all that is left to start, waiting for what comes before it."""
        self.settle()
        for line in self.lines:
            self.wait(SimpleNamespace(wait=line.enter_all), lambda: "send the next part of a bucket")

    def all_reduce(self, tensor: Tensor, over: dist.ProcessGroup | None = None, *, counts: bool = True) -> Any:
        """Starts summing `tensor` over the ranks, in place; returns the work to wait for.

        Args:
            tensor: a contiguous one.
            over: another process group of the same ranks.
            counts: whether what ranks announce says that it was started.
        """
        if counts:
            self.count()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        return (over or self.process_group).allreduce([tensor], self._sum)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites `tensor` with that of one of the group's ranks."""
        self.settle()
        self.count()
        dist.broadcast(tensor, group=self.process_group, group_src=root)

    def wait(self, work: Any, what: Callable[[], str]) -> None:
        """Waits for launched work; `what` says what for, in an error. NCCL's wait returns at once.

        Raises:
            RanksDisagree: another rank gave up, or did not come in time.
        """
        if self._channel is None or self.backend_name != "gloo":
            work.wait()
        else:
            self._channel.wait(work, what)

    def gather_objects(self, value: Any, device: torch.device | None = None) -> list[Any]:
        """Everybody's `value`, by rank; on NCCL it travels through `device`, by default the current one."""
        values: list[Any] = [None] * self.size
        with torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext():
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def give_up(self, reason: str) -> None:
        """Tells the other ranks that this one launches nothing more of what was announced."""
        if self._channel is not None:
            self._channel.give_up(reason)

    def lose(self, reason: str) -> None:
        """Tells the other ranks that this one cannot go on with them."""
        if self._channel is not None:
            self._channel.lose(reason)

    def close(self) -> None:
        """Closes the side channel of a group that was destroyed."""
        if self._channel is not None:
            self._channel.close()

    def drain(self, work: Any) -> bool:
        """Waits for launched work that nobody will use, for a while at most; False if it failed.

        NCCL's work runs on its own stream and holds its tensors until it is done: there is nothing to wait for, and a
        wait that times out would abort the communicator.
        """
        if self._channel is None or self.backend_name != "gloo":
            return True
        return self._channel.drain(work, DRAIN)

    def store(self, prefix: str) -> dist.Store:
        """A key-value store shared by the members, with keys of its own."""
        return dist.PrefixStore(prefix, _compat.group_store(self.process_group))


class GroupLookup:
    """Finds the group a backend means: the one it was given, or the default one of the moment."""

    def __init__(self, given: GroupReference | None) -> None:
        self._given = given
        self._last: Group | None = None

    def __call__(self) -> Group | None:
        """The group; None for a plain single-process run without `torch.distributed`.

        Raises:
            RuntimeError: the given group was destroyed, or the launcher started several processes and no group exists.
        """
        wanted = None if self._given is None else self._given()
        if self._given is None:
            wanted = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
            if wanted is None:
                if self._last is not None and self._last.size > 1:
                    raise RuntimeError(
                        f"the default process group of {self._last.size} ranks, over which this backend averaged, was "
                        "destroyed: gradients would stay local. Train before destroy_process_group, or make a new "
                        "group first"
                    )
                self._last = None
                _refuse_forgotten_group()
                return None
        elif wanted is None or not _compat.group_exists(wanted):
            raise RuntimeError(
                "the process_group given to fxddp.backend was destroyed; make a new backend with the new group and "
                "compile again"
            )
        if self._last is None or self._last.reference() is not wanted:
            self._last = _shared(wanted)
        return self._last


def alive(reference: GroupReference) -> dist.ProcessGroup:
    """The process group that is meant.

    Raises:
        RuntimeError: it was destroyed.
    """
    group = reference()
    if group is None:
        raise RuntimeError(
            "a process group that this backend sends over was destroyed: make a new one and a new backend"
        )
    return group


_groups: list[Group] = []


def _shared(process_group: dist.ProcessGroup) -> Group:
    """The one `Group` of a process group: all backends on it share its side channel."""
    for group in list(_groups):
        if not group.exists:
            group.close()
            _groups.remove(group)
    for group in _groups:
        if group.reference() is process_group:
            return group
    _groups.append(Group(process_group))
    return _groups[-1]


def _refuse_forgotten_group() -> None:
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes.isdecimal() and int(processes) > 1:
        raise RuntimeError(
            f"the launcher started {processes} processes (WORLD_SIZE={processes}), but there is no process group: "
            f"gradients would "
            "stay local. Call torch.distributed.init_process_group before the first training step, or unset "
            "WORLD_SIZE to train "
            "alone"
        )
