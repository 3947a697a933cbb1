"""The run of one compiled node within a backward: what happens to each bucket it packs.

synchronised   fold what was accumulated ─ launch ─ … ─ hand back what autograd must see
under no_sync  set aside ─ … ─ hand back
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _compat
from .executor import Exceptions, bucket_views, run_pieces, scale_tensors
from .passes.plan import Bucket

if TYPE_CHECKING:
    from .artifact import SplitBackward
    from .backward import Backward, Launched
    from .call import Call

Where = tuple[int, int]
"""A gradient: (bucket, position in it)."""


class NodeRun:
    """What the two kinds of run share: the node, its parameters by bucket, and what goes back through autograd."""

    def __init__(self, backward: "Backward", artifact: "SplitBackward", call: "Call", exceptions: Exceptions) -> None:
        self.backward = backward
        self.artifact = artifact
        self.call = call
        self.exceptions = exceptions
        self.by_bucket = call.parameters_by_bucket(artifact.program.plan)
        self.handed: dict[Where, Tensor] = {}
        backward.enter(call)

    def hand_back(self, values: list[Any]) -> list[Any]:
        """Puts what autograd must see into the backward's outputs."""
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

    def _on_bucket(self, bucket: Bucket, flat: Tensor) -> None:
        back = self.exceptions.local | self.exceptions.reduced
        members = self.by_bucket[bucket.index]
        for i, (parameter, view) in enumerate(zip(members, bucket_views(bucket, flat), strict=True)):
            where = (bucket.index, i)
            if where in back:
                self.handed[where] = view.clone()
                self.backward.returned(parameter, None)
            elif where not in self.exceptions.dropped:
                self.backward.set_aside(parameter, view)


class Reduction(NodeRun):
    """A node whose gradients are reduced, each bucket launched as soon as it is packed."""

    def __init__(self, backward: "Backward", artifact: "SplitBackward", call: "Call", exceptions: Exceptions) -> None:
        super().__init__(backward, artifact, call, exceptions)
        agreement = backward.backend.agreement
        self._wire = agreement.settle(call, artifact.program.plan, self.by_bucket, exceptions.dropped)
        self._packed: list[tuple[Bucket, Tensor]] = []
        self._to_autograd: list[tuple[Where, Tensor, Tensor, Launched]] = []

    def run(self, inputs: list[Any]) -> list[Any]:
        """Runs the pieces and launches; returns the backward's outputs."""
        if self._can_run_whole():
            return self._run_whole(inputs)
        backward = self.backward
        values = run_pieces(self.artifact, inputs, self.call.group.scale, self._on_bucket, backward.record.piece)
        if self._wire is not None:
            self._launch_repacked(self._wire)
        for where, parameter, view, launched in self._to_autograd:
            backward.wait(launched)
            own = self.handed[where] = view.clone()
            backward.returned(parameter, own)
        return self.hand_back(values)

    def _on_bucket(self, bucket: Bucket, flat: Tensor) -> None:
        members = self.by_bucket[bucket.index]
        if self.exceptions.local:
            for i, view in enumerate(bucket_views(bucket, flat)):
                if (bucket.index, i) in self.exceptions.local:
                    self.handed[bucket.index, i] = view * self.call.group.size
        self._fold(bucket, flat, members)
        if self._wire is not None:
            self._packed.append((bucket, flat))
        elif self.exceptions.none:
            self.backward.launch_later(bucket, flat, members)
        else:
            wheres = [(bucket.index, i) for i in range(len(members))]
            self._launch(flat, wheres, members, bucket_views(bucket, flat))

    def _fold(self, bucket: Bucket, flat: Tensor, members: Sequence[Tensor]) -> None:
        """Adds what the parameters accumulated so far to the packed bucket, and takes it from them."""
        before = self.backward.accumulated_before(members)
        if before is None:
            return
        into, added = [], []
        skipped = self.exceptions.skipped
        for i, view in enumerate(bucket_views(bucket, flat)):
            old = None if (bucket.index, i) in skipped else self.backward.take(members[i], before[i])
            if old is not None:
                into.append(view)
                added.append(old)
        if into:
            torch._foreach_add_(into, added, alpha=self.call.group.scale)

    def _launch(
        self, flat: Tensor, wheres: Sequence[Where], members: Sequence[Tensor], views: Sequence[Tensor]
    ) -> None:
        """Launches a bucket of which not every view goes the usual way."""
        skipped = self.exceptions.skipped
        kept = [i for i, where in enumerate(wheres) if where not in skipped]
        launched = self.backward.launch(flat, [views[i] for i in kept], [members[i] for i in kept])
        for i in kept:
            if wheres[i] in self.exceptions.reduced:
                self._to_autograd.append((wheres[i], members[i], views[i], launched))

    def _launch_repacked(self, wire: Sequence[Sequence[int]]) -> None:
        """Copies gradients into the buckets all ranks agreed on and launches those: same collectives as theirs."""
        found: dict[int, tuple[Where, Tensor, Tensor]] = {}
        for bucket, flat in self._packed:
            members = self.by_bucket[bucket.index]
            for i, view in enumerate(bucket_views(bucket, flat)):
                found[id(members[i])] = ((bucket.index, i), members[i], view)
        for identities in wire:
            wheres, members, old_views = zip(*(found[identity] for identity in identities), strict=True)
            flat = torch.cat([view.as_strided((view.numel(),), (1,)) for view in old_views])
            views, offset = [], 0
            with _compat.below_autograd():
                for view in old_views:
                    views.append(flat.as_strided(view.shape, view.stride(), offset))
                    offset += view.numel()
            self._launch(flat, wheres, members, views)

    def _can_run_whole(self) -> bool:
        """Whether the unsplit graph, with its collectives inside, does what this backward needs."""
        artifact, group = self.artifact, self.call.group
        return (
            artifact.whole is not None
            and self._wire is None
            and self.exceptions.none
            and (artifact.group_name, artifact.group_size) == (group.name, group.size)
            and all(self.backward.accumulated_before(members) is None for members in self.by_bucket)
        )

    def _run_whole(self, inputs: list[Any]) -> list[Any]:
        program, backward = self.artifact.program, self.backward
        assert self.artifact.whole is not None
        backward.record.piece()
        arguments = [*inputs, *scale_tensors(program, self.call.group.scale)]
        inputs.clear()
        values = list(self.artifact.whole(arguments))
        members: list[Tensor] = []
        views: list[Tensor] = []
        for position, ref in enumerate(program.outputs):
            if isinstance(ref, tuple):
                members.append(self.by_bucket[ref[0]][ref[1]])
                views.append(_compat.no_view(values[position]))
                values[position] = None
        backward.launched_inside([bucket.nbytes for bucket in program.plan.buckets], views, members)
        return values
