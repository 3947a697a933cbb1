"""The run of one compiled node within a backward: what happens to each bucket it packs.

synchronised   fold what was accumulated ─ launch ─ … ─ hand back what autograd must see
under no_sync  set aside ─ … ─ hand back
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _compat
from .agreement import Proposal
from .coverage import Passage
from .decision import Decision
from .executor import Exceptions, bucket_views, run_pieces, scale_tensors
from .packing import Assembly
from .passes.plan import Bucket
from .refill import refill
from .rows import WHOLE, Rows

if TYPE_CHECKING:
    from .artifact import SplitBackward
    from .backward import Backward, Launched
    from .call import Call

Where = tuple[int, int]
"""A gradient: (bucket, position in it)."""

ELSEWHERE, UNUSED = (-1, 0), (-1, 1)
"""Gradients that only other ranks have, and that no rank has."""

DEFER = Decision(defer=True)


class NodeRun:
    """What the two kinds of run share: the node, its parameters by bucket, and what goes back through autograd.

    Attributes:
        usual: all gradients go the usual way (Note [coverage]).
        by_bucket: the node's parameters.
        handed: what goes back through autograd.
    """

    def __init__(self, backward: "Backward", artifact: "SplitBackward", call: "Call", exceptions: Exceptions) -> None:
        self.backward = backward
        self.artifact = artifact
        self.call = call
        self.exceptions = exceptions
        self.usual = exceptions.none
        self.by_bucket = call.parameters_by_bucket(artifact.program.plan)
        self.handed: dict[Where, Tensor] = {}
        backward.enter(call)
        for index, i in exceptions.dropped:
            backward.spare_hooks(self.by_bucket[index][i])

    def hand_back(self, values: list[Any]) -> list[Any]:
        """Puts what autograd must see into the backward's outputs."""
        if self.usual:
            self.backward.passages.append(Passage(self.call.binding.bare, self.by_bucket))
        if not self.handed:
            return values
        for position, ref in enumerate(self.artifact.program.outputs):
            if isinstance(ref, tuple) and ref in self.handed:
                values[position] = self.handed[ref]
        return values


class LocalRun(NodeRun):
    """A node whose forward stood under `no_sync`: gradients accumulate and stay local."""

    def run(self, inputs: list[Any]) -> list[Any]:
        """Runs the pieces; returns the backward's outputs."""
        values = run_pieces(self.artifact, inputs, 1.0, self._on_bucket, self.backward.record.piece)
        self.backward.backend.watch.keep_pending(p for members in self.by_bucket for p in members)
        return self.hand_back(values)

    def _on_bucket(self, bucket: Bucket, flat: Tensor, _wire: Tensor | None, _indices: Sequence[Tensor]) -> None:
        back = self.exceptions.local | self.exceptions.reduced
        members = self.by_bucket[bucket.index]
        for i, (parameter, view) in enumerate(zip(members, bucket_views(bucket, flat), strict=True)):
            where = (bucket.index, i)
            if where in back:
                self.handed[where] = view.clone()
                self.backward.accumulation.handed_back(parameter, None)
            elif where not in self.exceptions.dropped:
                self.backward.holdings.set_aside(parameter, view)


class Reduction(NodeRun):
    """A node whose gradients are reduced, each bucket launched as soon as it is packed and the ranks agree on it."""

    def __init__(self, backward: "Backward", artifact: "SplitBackward", call: "Call", exceptions: Exceptions) -> None:
        super().__init__(backward, artifact, call, exceptions)
        self._plan = artifact.program.plan
        self._proposal: Proposal | None = None
        self._decision: Decision | None = None
        self._assembly: Assembly | None = None
        self._held: dict[int, Callable[..., object]] = {}
        self._to_autograd: list[tuple[Where, Tensor, Tensor, Launched]] = []

    def run(self, inputs: list[Any]) -> list[Any]:
        """Runs the pieces and launches; returns the backward's outputs."""
        if self._plan.buckets and not self.backward.deferring:
            event = self.call.binding.event(self.call, self.artifact.program, self.exceptions)
            sizes = self._rows_here(inputs) if event.tables else ()
            self._proposal = self.backward.backend.agreement.announce(event, self.call.group, sizes=sizes)
        if self.backward.backend.joining:
            self._decide()
        if self._can_run_whole():
            return self._run_whole(inputs)
        backward = self.backward
        values = run_pieces(self.artifact, inputs, backward.scale, self._on_bucket, backward.record.piece)
        for where, parameter, view, launched in self._to_autograd:
            backward.wait(launched)
            own = self.handed[where] = view.clone()
            backward.accumulation.handed_back(parameter, own)
        return self.hand_back(values)

    def _decide(self) -> Decision:
        """What the ranks agreed on; waits for them the first time."""
        if self._decision is None:
            self._decision = DEFER if self._proposal is None else self._proposal.decision()
            self._apply(self._decision)
            if self._decision.defer or self._assembly is not None:
                self.usual = False
                self.call.binding.uncover()
        return self._decision

    def _apply(self, decision: Decision) -> None:
        self.backward.follow_decision(decision)
        exceptions, number = self.exceptions, self.backward.backend.replica.number
        if decision.defer:
            self.backward.deferring = True
            for index, i in exceptions.dropped:
                self.backward.accumulation.left_out(self.by_bucket[index][i])
            return
        assert self._proposal is not None
        if exceptions.dropped:
            elsewhere = {
                (index, i)
                for index, i in exceptions.dropped
                if self.by_bucket[index][i].requires_grad and number(self.by_bucket[index][i]) not in decision.unused
            }
            self.exceptions = replace(exceptions, dropped=exceptions.dropped - elsewhere, zeros=elsewhere)
            for index, i in self.exceptions.dropped:
                self.backward.accumulation.left_out(self.by_bucket[index][i])
        if decision.buckets != self._proposal.event.buckets:
            members = [[self.backward.backend.replica.tensor(n) for n in bucket] for bucket in decision.buckets]
            unused = self.backward.ids(decision.unused)
            here = {id(p) for bucket in self.by_bucket for p in bucket}
            self._assembly = Assembly(members, here, unused)

    def _rows_here(self, inputs: Sequence[Any]) -> list[int]:
        """How many rows each table has on this rank; `WHOLE` if something is to be added to its bucket."""
        tables, accumulated = self.artifact.program.tables, self.backward.holdings.have_accumulated
        whole = {t.bucket for t in tables if not self.exceptions.none or accumulated(self.by_bucket[t.bucket])}
        return [WHOLE if table.bucket in whole else table.count(inputs) for table in tables]

    def _rows(self, bucket: Bucket, indices: Sequence[Tensor]) -> Rows | None:
        """What of a bucket travels in rows; all ranks find the same."""
        if not indices or not self._decide().in_rows:
            return None
        assert self._proposal is not None
        counts = dict(zip(self.artifact.program.tables, zip(*self._proposal.sizes, strict=True), strict=True))
        tables = {table: counts[table] for table in self.artifact.program.tables_in[bucket.index]}
        return Rows.of(bucket, tables, indices, self.backward.backend.settings.wire_dtype(bucket).itemsize)

    def _on_bucket(self, bucket: Bucket, flat: Tensor, wire: Tensor | None, indices: Sequence[Tensor]) -> None:
        decision = self._decide()
        members = self.by_bucket[bucket.index]
        exceptions = self.exceptions
        if exceptions.none and not decision.defer and self._assembly is None:
            rows = self._rows(bucket, indices)
            start = self._refill(bucket, flat, members)
            if start is None:
                folded = self._fold(bucket, flat, members)
                assert rows is None or not folded, f"what was added to bucket {bucket.index} is not in its rows"
                start = partial(self.backward.launch_later, bucket, flat, members, None if folded else wire, rows)
            self._start(bucket, start)
            return
        wheres = [(bucket.index, i) for i in range(len(members))]
        if exceptions.local or exceptions.zeros or decision.defer:
            self._set_apart(wheres, members, bucket_views(bucket, flat), defer=decision.defer)
        if decision.defer:
            return
        if self._fold(bucket, flat, members) or exceptions.zeros:
            wire = None  # not the same any more
        views = bucket_views(bucket, flat)
        if self._assembly is not None:
            self._launch_ready(self._assembly, wheres, members, views)
        else:
            self._start(bucket, partial(self._launch, flat, wheres, members, views, wire))

    def _start(self, bucket: Bucket, start: Callable[..., object]) -> None:
        """Starts a packed bucket, or has it wait for its turn; then those whose turn it is."""
        is_last = bucket is self._plan.buckets[-1]
        if not self._decide().order:
            start(is_last=is_last)
            return
        self._held[bucket.index] = start
        for index in self.artifact.program.launches[bucket.index]:
            self._held.pop(index)(is_last=is_last and not self._held)

    def _set_apart(
        self, wheres: Sequence[Where], members: Sequence[Tensor], views: Sequence[Tensor], *, defer: bool
    ) -> None:
        """Sees to gradients of a packed bucket that do not travel in it, or only in the end."""
        exceptions = self.exceptions
        for where, parameter, view in zip(wheres, members, views, strict=True):
            if where in exceptions.local:
                self.handed[where] = view / self.backward.scale
            elif where in exceptions.zeros:
                view.zero_()
                self.backward.stands_in(parameter)
            elif defer and where not in exceptions.skipped:
                self.backward.holdings.keep(parameter, view)

    def _refill(self, bucket: Bucket, flat: Tensor, members: Sequence[Tensor]) -> Callable[..., object] | None:
        """Adds the packed bucket to the one `.grad`s are still views of; what launches that, None if there is none."""
        backward = self.backward
        if members[0].grad is None or backward.holdings.aside:
            return None
        grads = backward.backend.reduced.gradients(bucket, members)
        if grads is None:
            return None
        old = refill(bucket, flat, grads, backward.scale)
        backward.holdings.refills(members, grads)
        return partial(backward.launch, old, members, None, grads)

    def _fold(self, bucket: Bucket, flat: Tensor, members: Sequence[Tensor]) -> bool:
        """Adds what the parameters accumulated so far to the packed bucket, and takes it from them; whether any had."""
        if not self.backward.holdings.have_accumulated(members):
            return False
        into, added = [], []
        skipped = self.exceptions.skipped
        for i, view in enumerate(bucket_views(bucket, flat)):
            old = None if (bucket.index, i) in skipped else self.backward.take(members[i])
            if old is not None:
                into.append(view)
                added.append(old)
        if into:
            torch._foreach_add_(into, added, alpha=self.backward.scale)
        return bool(into)

    def _launch(
        self,
        flat: Tensor,
        wheres: Sequence[Where],
        members: Sequence[Tensor],
        views: list[Tensor],
        wire: Tensor | None = None,
        *,
        is_last: bool,
    ) -> None:
        """Launches a bucket of which not every view goes the usual way."""
        skipped = self.exceptions.skipped | {UNUSED}
        kept = [i for i, where in enumerate(wheres) if where not in skipped]
        launched = self.backward.launch(flat, members, kept, views, wire, idle=self._idle(), is_last=is_last)
        for i in kept:
            if wheres[i] in self.exceptions.reduced:
                self._to_autograd.append((wheres[i], members[i], views[i], launched))

    def _idle(self) -> frozenset[int]:
        """Ids of the parameters that no rank takes a gradient of from the buckets; the same ones on all ranks."""
        assert self._proposal is not None
        tensor = self.backward.backend.replica.tensor
        return frozenset(id(tensor(number)) for number in {*self._decide().unused, *self._proposal.event.hooked})

    def _launch_ready(
        self, assembly: "Assembly", wheres: Sequence[Where], members: Sequence[Tensor], views: Sequence[Tensor]
    ) -> None:
        """Copies gradients into the buckets all ranks agreed on and launches those that are full: in their order."""
        for wanted, found in assembly.add(members, zip(wheres, views, strict=True)):
            there = [None if local is None else local[1] for local in found]
            flat, places = self.backward.fill(wanted, there, assembly.unused)
            missing = [UNUSED if id(parameter) in assembly.unused else ELSEWHERE for parameter in wanted]
            whose = [where if local is None else local[0] for local, where in zip(found, missing, strict=True)]
            self._launch(flat, whose, wanted, places, is_last=assembly.finished)

    def _can_run_whole(self) -> bool:
        """Whether the unsplit graph, with its collectives inside, does what this backward needs."""
        artifact = self.artifact
        return (
            artifact.whole is not None
            and not self._decide().defer
            and self._assembly is None
            and self.exceptions.none
            and self.backward.backend.registered.carrier.in_graphs
            and self.backward.can_launch_inside(artifact.way)
            and not any(map(self.backward.holdings.have_accumulated, self.by_bucket))
        )

    def _run_whole(self, inputs: list[Any]) -> list[Any]:
        program, backward = self.artifact.program, self.backward
        assert self.artifact.whole is not None
        backward.record.piece()
        arguments = [*inputs, *scale_tensors(program, backward.scale)]
        inputs.clear()
        self.call.group.settle_all()  # on every group, what the graph starts comes after what was started
        values = list(self.artifact.whole(arguments))
        members: list[Tensor] = []
        views: list[Tensor] = []
        for position, ref in enumerate(program.outputs):
            if isinstance(ref, tuple):
                members.append(self.by_bucket[ref[0]][ref[1]])
                views.append(_compat.no_view(values[position]))
                values[position] = None
        backward.launched_inside(program.plan.buckets, views, members)
        return self.hand_back(values)
