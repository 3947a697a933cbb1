"""One running backward: what was launched, what is still local, and how every `.grad` ends up.

    graph node 1: pieces ─ launch 0 ─ pieces ─ launch 1          (executor)
    eager nodes, graph node 2, …                                 (autograd; hooks note what they accumulate)
    end of backward: reduce what no graph reduced ─ wait for all ─ write .grad

Note [averages are linear]: whatever reached `.grad` outside of the graphs is averaged by itself and added; averaging an
already averaged value changes nothing. So a parameter used in a graph and in an eager gap, or in two graphs, or in an
inner backward of a re-entrant checkpoint, comes out right in any order.

An exception in between leaves no trace: `.grad`s that were taken are put back and launched work is drained, as soon as
autograd drops the callback it will not run. Only buckets that were filled again in place are lost (`refill.py`).
"""

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _compat, ranges
from .accumulation import Accumulation
from .channel import RanksDisagree
from .coverage import Passage
from .decision import Decision
from .ending import Ending
from .holdings import Holdings
from .notes import reason
from .packing import empty_bucket, sparse_gradient
from .passes.plan import Bucket
from .rounds import Travelling
from .rows import Rows
from .stats import BackwardRecord
from .watchers import hook

if TYPE_CHECKING:
    from .backend import Backend
    from .call import Call
    from .group import Group
    from .optimizer import OptimizerInBackward
    from .passes.stages import Way

_grad = attrgetter("grad")


class Launched:
    """A bucket under way: the work, and which of its views go to which parameters.

    Attributes:
        index: its number among the launches of graphs, or among those of `outside`; -1 if nothing travels.
        work: what to wait for; None if nothing travels.
        parameters, views: whose gradients they become at the end of the backward.
        outside: no graph packed it.
    """

    __slots__ = ("index", "outside", "parameters", "views", "work")

    def __init__(self, parameters: Sequence[Tensor], views: list[Tensor] | None, *, outside: bool = False) -> None:
        self.index = -1
        self.work: Any = None
        self.parameters = parameters
        self.views = views
        self.outside = outside


class Backward:
    """The state of one backward (one graph task of autograd's engine) of one backend.

    Attributes:
        group: the ranks; known when something of this backward is to be reduced.
        scale: what gradients are multiplied with before they are added up.
        deferring: ranks took different ways through this backward, and nothing travels before its end.
        launched: what is under way, in the order of launches; `lazy` those whose views are still to be made.
        holdings: gradients that are not under way.
        accumulation: what autograd itself accumulates.
        carried: parameters with local gradients left from backwards under `no_sync`.
        stood_in: parameters with hooks that get a gradient that only other ranks have, by id.
        passages: nodes whose gradients all go the usual way.
        later: parameters that a backward inside this one has averaged gradients for, to be updated at the end.
        nested: this backward runs inside a node of another one.
        gathers: what forwards under `no_sync` left is averaged at its end, what they leave in it too.
    """

    def __init__(self, backend: "Backend", task: int) -> None:
        backend.under_way.settle_all()  # also what only runs later, or eagerly; what this one leaves takes its place
        self.backend = backend
        self.task = task
        self.record = BackwardRecord()
        self._group: Group | None = None
        self.scale = 1.0
        self.over = False
        self.deferring = False
        self.gathers = False
        self._calls = 0
        self.launched: list[Launched] = []
        self.lazy: list[tuple[Launched, Bucket, Tensor]] = []
        self.holdings = Holdings()
        self.accumulation = Accumulation(backend)
        self.carried: list[Tensor] = []
        self.stood_in: dict[int, Tensor] = {}
        self._spared: list[tuple[Tensor, dict[int, Any]]] = []
        self.passages: list[Passage] = []
        self._updating = False
        self._interrupt: BaseException | None = None
        self.later: dict[int, Tensor] = {}
        self.nested = backend.registered.optimizer is not None and _compat.is_nested()
        _compat.queue_callback(_AtEnd(self))

    @property
    def group(self) -> "Group | None":  # noqa: D102 (see the class)
        return self._group

    @group.setter
    def group(self, group: "Group | None") -> None:
        if group is not self._group:
            self._group = group
            self.scale = 1.0 if group is None or self.backend.registered.carrier.divides else group.scale

    # --- called by a node's run (reduction.py) -----------------------------------------------

    def follow(self, call: "Call") -> None:
        """What this backward accumulates is reduced if this call synchronises, or another one."""
        self._calls += 1
        self.group = call.group
        self.record.sync = self.record.sync or call.sync

    def follow_decision(self, decision: Decision) -> None:
        """Divides by the number of ranks that have inputs from now on, if `join` was asked to."""
        if decision.active is not None and not self.backend.divide_by_initial_world_size:
            assert self.group is not None
            self.backend.outbox.to(self.group).divisor = decision.active
            if not self.backend.registered.carrier.divides:
                self.scale = 1.0 / decision.active

    def enter(self, call: "Call") -> None:
        """Notes that a compiled node of this backward starts."""
        self.follow(call)
        self.record.graphs.append(call.graph)
        self.accumulation.explore(call.binding)

    @ranges.launches
    def launch(
        self,
        flat: Tensor,
        members: Sequence[Tensor],
        kept: Sequence[int] | None,
        views: list[Tensor] | None,
        wire: Tensor | None = None,
        *,
        rows: Rows | None = None,
        idle: AbstractSet[int] = frozenset(),
        is_last: bool,
        outside: bool = False,
    ) -> Launched:
        """Starts reducing a packed bucket; its views become the parameters' gradients at the end.

        Args:
            flat: the bucket.
            members: the parameters whose gradients it holds.
            kept: positions of those that get theirs from here; None for all.
            views: of all gradients in it; None if they are only made later.
            wire: the bucket in the dtype in which it is to travel, if it was cast already.
            rows: of tables in it that travel in place of these; the same ones on all ranks.
            idle: ids of the parameters that no rank takes a gradient of from here; the same ones on all ranks.
            is_last: whether no bucket of this graph, or of this end, follows.
            outside: no graph packed it.
        """
        record = self.record
        assert self.group is not None
        if kept is not None and views is not None:
            launched = Launched([members[i] for i in kept], [views[i] for i in kept], outside=outside)
        else:
            launched = Launched(members, views, outside=outside)
        if flat.numel():
            sending = self.backend.outbox.to(self.group)
            launched.work = sending.start(
                flat, members, record.travels, wire=wire, rows=rows, idle=idle, is_last=is_last
            )
            launched.index = record.launch_outside() if outside else record.launch(flat.nbytes, launched.work)
        self.launched.append(launched)
        return launched

    def launch_later(
        self,
        bucket: Bucket,
        flat: Tensor,
        parameters: Sequence[Tensor],
        wire: Tensor | None,
        rows: Rows | None,
        *,
        is_last: bool,
    ) -> None:
        """`launch` for a bucket whose views all go the usual way: they are only made when they are needed."""
        launched = self.launch(flat, parameters, None, None, wire, rows=rows, is_last=is_last)
        self.lazy.append((launched, bucket, flat))

    def can_launch_inside(self, way: "Way | None") -> bool:
        """Whether collectives that a graph holds are those that would be launched; makes their groups."""
        assert self.group is not None
        count = self.backend.outbox.to(self.group).count
        return way == self.backend.way(self.group) and count % len(way.groups) == 0

    def launched_inside(self, buckets: Sequence[Bucket], views: list[Tensor], parameters: Sequence[Tensor]) -> None:
        """Notes gradients that a graph with collectives inside has reduced already."""
        assert self.group is not None
        self.backend.outbox.to(self.group).count += len(buckets)
        self.group.count(len(buckets))
        for bucket in buckets:
            self.record.launch(bucket.nbytes)
            self.record.travels(self.backend.settings.wire_bytes(bucket, self.group.size))
        self.launched.append(Launched(parameters, views))

    def stands_in(self, parameter: Tensor) -> None:
        """Notes that a parameter gets a gradient that only other ranks have: autograd will call no hook for it."""
        hook(parameter)
        if len(_compat.hooks_after_accumulation(parameter) or ()) > 1:
            self.stood_in[id(parameter)] = parameter

    def spare_hooks(self, parameter: Tensor) -> None:
        """Has no tensor hook of a parameter called with None in this backward, for a gradient that a graph leaves out.

        Eager code would not even reach the parameter.
        """
        if _compat.hooks_before_accumulation(parameter):
            self._spared.append((parameter, _compat.spare_undefined(parameter)))

    def spare_no_more(self) -> None:
        """Ends `spare_hooks`."""
        while self._spared:
            _compat.spare_no_more(*self._spared.pop())

    def take(self, parameter: Tensor, *, sparse: bool = False) -> Tensor | None:
        """`Holdings.take`; what was taken is not local any more."""
        old = self.holdings.take(parameter, sparse=sparse)
        if old is not None:
            self.accumulation.local.pop(id(parameter), None)
        return old

    def fill(
        self, members: Sequence[Tensor], there: Sequence[Tensor | None], unused: AbstractSet[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """A bucket of these parameters: what is there, divided already, or else what they accumulated, or zeros.

        Args:
            members: the parameters.
            there: their gradients, as far as there are any.
            unused: ids of those that no rank has a gradient of, whose `.grad` is left alone.
        """
        flat, views = empty_bucket(members)
        for parameter, view, value in zip(members, views, there, strict=True):
            if value is not None:
                view.copy_(value)
                continue
            old = None if id(parameter) in unused else self.take(parameter)
            held = self.holdings.pop_kept(parameter)
            if old is None:
                view.zero_()
            else:
                torch.mul(old, self.scale, out=view)
            for part in held:
                view.add_(part)
                _compat.keep_until_read(part)
            if old is None and not held:
                self.stands_in(parameter)
        return flat, views

    def launch_sparse(self, parameter: Tensor, group: "Group") -> None:
        """Starts averaging a sparse gradient, or the lack of one here."""
        old = self.take(parameter, sparse=True)
        held = self.holdings.pop_kept(parameter)
        if old is None and not held:
            self.stands_in(parameter)
        total = sparse_gradient(parameter, held if old is None else [old * self.scale, *held])
        group.settle()
        self.record.uncovered_bytes += total.values().nbytes
        self.record.travels(total.values().nbytes)
        launched = Launched([parameter], [total], outside=True)
        with ranges.launch(ranges.OUTSIDE):
            launched.work = group.all_reduce(total)
        launched.index = self.record.launch_outside()
        self.launched.append(launched)
        self.record.uncovered += (self.backend.watch.name(parameter),)

    def accumulated(self, parameter: Tensor, *, now: bool) -> None:
        """Told that autograd accumulated into a parameter; with `now` others look at its `.grad` next."""
        try:
            self.accumulation.note(parameter, self, now=now)
        except BaseException as error:
            self.abort(error)
            raise

    def synchronises(self, accumulated: Collection[int]) -> bool:
        """Whether what was accumulated outside of the graphs, for these parameters, is reduced in this backward."""
        if self.gathers:
            return True
        return self.record.sync if self._calls else not self.backend.under_no_sync(accumulated)

    # --- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Called by autograd when it is through."""
        try:
            Ending(self).run()
        except BaseException as error:
            self.abort(error)
            raise
        self.over = True
        self.backend.forget(self)
        if not self.backend.running:
            self.backend.outbox.commit()
            if self.record.sync:
                self.backend.agreement.end_of_iteration()
        if self._interrupt is not None:
            raise self._interrupt

    def ids(self, numbers: Iterable[int]) -> set[int]:
        """The ids of the parameters with these numbers."""
        return {id(self.backend.replica.tensor(number)) for number in numbers}

    @ranges.waits
    def wait(self, launched: Launched) -> None:
        """Waits for a bucket."""
        if launched.work is not None:
            self.record.wait(launched.index, outside=launched.outside)
            assert self.group is not None
            self.group.wait(launched.work, lambda: f"average {self.backend.names(launched.parameters)}")
            launched.work = None
            if not launched.outside:
                self.record.waited(launched.index)

    def wait_through(self, launched: Launched) -> None:
        """`wait` that an interrupt does not end, only a second one does: it is raised when this backward is over."""
        try:
            self.wait(launched)
        except Exception:
            raise
        except BaseException as interrupt:
            if self._interrupt is not None:
                raise
            self._interrupt = interrupt
            self.wait(launched)

    def update(self, optimizer: "OptimizerInBackward", parameters: Iterable[Tensor]) -> None:
        """Has parameters updated: from the first one on this backward cannot be undone (Note [torn weights])."""
        parameters = list(parameters)
        self._updating = self._updating or bool(parameters)
        optimizer.update(parameters)

    def update_later(self, parameters: Iterable[Tensor]) -> None:
        """Has parameters updated at the very end: a backward inside this one has averaged gradients for them."""
        self.later.update((id(p), p) for p in parameters)

    def abort(self, error: BaseException | None = None) -> None:
        """Puts back what was taken and drains what was launched, for a backward that raised.

        Where ranks disagree all of them raised at the same point, and launched the same.
        """
        if self.over:
            return
        self.over = True
        self.spare_no_more()
        self.holdings.put_back()
        self.stood_in.clear()
        self.backend.watch.keep_pending(self.carried)
        group = self.group
        local = self.accumulation.local
        if group is None and local and self.synchronises(local.keys()):
            with suppress(RuntimeError):
                group = self.backend.lookup()
            self.record.sync = True
        for launched in self.launched:
            if isinstance(launched.work, Travelling):
                launched.work.abandon()
        if self._updating:
            parameters = chain.from_iterable(launched.parameters for launched in self.launched)
            self.backend.under_way.tear(chain(parameters, self.later.values()), error, group)
        elif self.record.sync and group is not None and not isinstance(error, RanksDisagree):
            group.give_up(reason(error))
            for launched in self.launched:
                if launched.work is not None and not group.drain(launched.work):
                    break
        self.launched.clear()
        self.lazy.clear()
        self.backend.outbox.discard()
        self.backend.forget(self)


class _AtEnd:
    """Autograd's end-of-backward callback; dropped unused by a backward that raised, which aborts it."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a whole training step may be compiled
    def __call__(self) -> None:
        self._backward.finish()

    def __del__(self) -> None:
        self._backward.abort()
