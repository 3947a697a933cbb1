"""One running backward: what was launched, what is still local, and how every `.grad` ends up.

    graph node 1: pieces ─ launch 0 ─ pieces ─ launch 1          (executor)
    eager nodes, graph node 2, …                                 (autograd; hooks note what they accumulate)
    end of backward: reduce what no graph reduced ─ wait for all ─ write .grad

Note [averages are linear]: whatever reached `.grad` outside of the graphs is averaged by itself and added; averaging an
already averaged value changes nothing. So a parameter used in a graph and in an eager gap, or in two graphs, or in an
inner backward of a re-entrant checkpoint, comes out right in any order.

An exception in between leaves no trace: `.grad`s that were taken are put back and launched work is drained, as soon as
autograd drops the callback it will not run.
"""

from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _compat
from .executor import Exceptions, bucket_views, run_pieces, scale_tensors
from .passes.plan import Bucket
from .stats import BackwardRecord

if TYPE_CHECKING:
    from .artifact import SplitBackward
    from .backend import Backend
    from .call import Call
    from .group import Group

_grad = attrgetter("grad")
DRAIN = timedelta(seconds=30)


class _Launched:
    """A bucket under way: the work, and which of its views go to which parameters."""

    __slots__ = ("index", "parameters", "views", "work")

    def __init__(self, index: int, work: Any, parameters: Sequence[Tensor], views: list[Tensor] | None) -> None:
        self.index = index
        self.work = work
        self.parameters = parameters
        self.views = views


class Backward:
    """The state of one backward (one graph task of autograd's engine) of one backend."""

    def __init__(self, backend: "Backend", task: int) -> None:
        self.backend = backend
        self.task = task
        self.record = BackwardRecord()
        self.group: Group | None = None
        self.over = False
        self._calls = 0
        self._launched: list[_Launched] = []
        self._deferred: list[tuple[_Launched, Bucket, Tensor]] = []
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}
        self._aside: dict[int, tuple[Tensor, Tensor]] = {}
        self._local: dict[int, Tensor] = {}
        self._returned: dict[int, tuple[Tensor, int | None]] = {}
        self._strangers: list[Tensor] = []
        self._explored = False
        _compat.queue_callback(_AtEnd(self))

    # --- called by the executor, at a compiled node -----------------------------------------------

    def reduce(
        self,
        artifact: "SplitBackward",
        inputs: list[Any],
        call: "Call",
        by_bucket: Sequence[Sequence[Tensor]],
        exceptions: Exceptions,
    ) -> list[Any]:
        """Runs a backward that synchronises, launching each bucket as soon as it is packed."""
        self._enter(call)
        group = call.group
        program = artifact.program
        backend = self.backend
        wire = backend.agreement.settle(call, program.plan, by_bucket, exceptions.dropped)
        handed: dict[tuple[int, int], Tensor] = {}
        engine: dict[tuple[int, int], _Launched] = {}
        packed: list[tuple[Bucket, Tensor]] = []

        def on_bucket(bucket: Bucket, flat: Tensor) -> None:
            members = by_bucket[bucket.index]
            views: list[Tensor] | None = None
            if exceptions.local:
                views = bucket_views(bucket, flat)
                for i, view in enumerate(views):
                    if (bucket.index, i) in exceptions.local:
                        handed[bucket.index, i] = view * group.size
            self._fold(bucket, flat, members, exceptions, group.scale)
            if wire is not None:
                packed.append((bucket, flat))
                return
            self._launch(bucket, flat, members, exceptions, engine, group)

        if artifact.whole is not None and self._can_run_whole(artifact, by_bucket, exceptions, wire, group):
            return self._run_whole(artifact, inputs, by_bucket, group)
        values = run_pieces(artifact, inputs, group.scale, on_bucket, self.record.piece)
        if wire is not None:
            self._launch_repacked(packed, by_bucket, wire, exceptions, engine, group)
        for (index, i), launched in engine.items():
            self._wait(launched)
            view = next(
                v for v, p in zip(launched.views or (), launched.parameters, strict=True) if p is by_bucket[index][i]
            )
            own = handed[index, i] = view.clone()
            self._returned[id(by_bucket[index][i])] = (by_bucket[index][i], own.data_ptr())
        for where, ref in enumerate(program.outputs):
            if isinstance(ref, tuple) and ref in handed:
                values[where] = handed[ref]
        return values

    def keep_local(
        self,
        artifact: "SplitBackward",
        inputs: list[Any],
        call: "Call",
        by_bucket: Sequence[Sequence[Tensor]],
        exceptions: Exceptions,
    ) -> list[Any]:
        """Runs a backward whose forward stood under `no_sync`: gradients accumulate and stay local."""
        self._enter(call)
        handed: dict[tuple[int, int], Tensor] = {}
        back = exceptions.local | exceptions.reduced

        def on_bucket(bucket: Bucket, flat: Tensor) -> None:
            views = bucket_views(bucket, flat)
            for i, (parameter, view) in enumerate(zip(by_bucket[bucket.index], views, strict=True)):
                if (bucket.index, i) in back:
                    handed[bucket.index, i] = view.clone()
                    self._returned[id(parameter)] = (parameter, None)
                elif (bucket.index, i) not in exceptions.dropped:
                    self._set_aside(parameter, view)

        values = run_pieces(artifact, inputs, 1.0, on_bucket, self.record.piece)
        for where, ref in enumerate(artifact.program.outputs):
            if isinstance(ref, tuple) and ref in handed:
                values[where] = handed[ref]
        self.backend.watch.keep_pending(p for members in by_bucket for p in members)
        return values

    def _enter(self, call: "Call") -> None:
        self._calls += 1
        self.group = call.group
        self.record.sync = self.record.sync or call.sync
        if not call.binding.explored:
            call.binding.explored = True
            if not self._explored:
                self._explored = True
                self._strangers += self.backend.watch.strangers()

    # --- folding, launching -----------------------------------------------------------------------

    def _fold(
        self, bucket: Bucket, flat: Tensor, members: Sequence[Tensor], exceptions: Exceptions, scale: float
    ) -> None:
        """Adds what the parameters accumulated so far to the packed bucket, and takes it from them."""
        old = list(map(_grad, members))
        aside = self._aside
        if old.count(None) == len(old) and not (aside and any(id(p) in aside for p in members)):
            return
        views = bucket_views(bucket, flat)
        into, added = [], []
        skipped = exceptions.skipped
        for i, (parameter, view, grad) in enumerate(zip(members, views, old, strict=True)):
            if (bucket.index, i) in skipped:
                continue
            if id(parameter) in aside:
                _, kept = aside.pop(id(parameter))
                into.append(view)
                added.append(kept)
                self._taken.setdefault(id(parameter), (parameter, kept))
            if grad is not None:
                into.append(view)
                added.append(grad)
                parameter.grad = None
                self._local.pop(id(parameter), None)
                self._taken.setdefault(id(parameter), (parameter, grad))
        if into:
            torch._foreach_add_(into, added, alpha=scale)

    def _launch(
        self,
        bucket: Bucket,
        flat: Tensor,
        members: Sequence[Tensor],
        exceptions: Exceptions,
        engine: dict[tuple[int, int], _Launched],
        group: "Group",
    ) -> None:
        work = group.all_reduce(flat) if flat.numel() else None
        index = self.record.launch(bucket.nbytes) if flat.numel() else -1
        chosen = set(range(len(members)))
        special = exceptions.local or exceptions.dropped or exceptions.reduced
        launched = _Launched(index, work, members, None)
        if special:
            views = bucket_views(bucket, flat)
            for i in range(len(members)):
                if (bucket.index, i) in exceptions.reduced:
                    engine[bucket.index, i] = launched
                if (bucket.index, i) in exceptions.skipped:
                    chosen.discard(i)
            launched.parameters = [members[i] for i in sorted(chosen)]
            launched.views = [views[i] for i in sorted(chosen)]
            self._launched.append(launched)
        else:
            self._launched.append(launched)
            self._deferred.append((launched, bucket, flat))

    def _launch_repacked(
        self,
        packed: Sequence[tuple[Bucket, Tensor]],
        by_bucket: Sequence[Sequence[Tensor]],
        wire: Sequence[Sequence[int]],
        exceptions: Exceptions,
        engine: dict[tuple[int, int], _Launched],
        group: "Group",
    ) -> None:
        """Copies gradients into the buckets all ranks agreed on and launches those: another compile, same collectives."""
        found: dict[int, tuple[Tensor, Tensor, tuple[int, int]]] = {}
        for bucket, flat in packed:
            for i, (parameter, view) in enumerate(
                zip(by_bucket[bucket.index], bucket_views(bucket, flat), strict=True)
            ):
                found[id(parameter)] = (parameter, view, (bucket.index, i))
        for members in wire:
            rows = [found[identity] for identity in members]
            flat = torch.cat([_flatten(view) for _, view, _ in rows])
            index = self.record.launch(flat.nbytes) if flat.numel() else -1
            work = group.all_reduce(flat) if flat.numel() else None
            views: list[Tensor] = []
            parameters: list[Tensor] = []
            offset = 0
            launched = _Launched(index, work, parameters, views)
            for parameter, view, where in rows:
                if where not in exceptions.skipped:
                    with _compat.below_autograd():
                        views.append(flat.as_strided(view.shape, view.stride(), offset))
                    parameters.append(parameter)
                if where in exceptions.reduced:
                    engine[where] = launched
                offset += view.numel()
            self._launched.append(launched)

    def _can_run_whole(
        self,
        artifact: "SplitBackward",
        by_bucket: Sequence[Sequence[Tensor]],
        exceptions: Exceptions,
        wire: Any,
        group: "Group",
    ) -> bool:
        clean = wire is None and not (exceptions.skipped or exceptions.reduced) and not self._aside
        same = artifact.group_name == group.name and artifact.group_size == group.size
        return clean and same and all(list(map(_grad, members)).count(None) == len(members) for members in by_bucket)

    def _run_whole(
        self, artifact: "SplitBackward", inputs: list[Any], by_bucket: Sequence[Sequence[Tensor]], group: "Group"
    ) -> list[Any]:
        program = artifact.program
        self.record.piece()
        assert artifact.whole is not None
        arguments = [*inputs, *scale_tensors(program, group.scale)]
        inputs.clear()
        values = list(artifact.whole(arguments))
        members: list[Tensor] = []
        views: list[Tensor] = []
        for where, ref in enumerate(program.outputs):
            if isinstance(ref, tuple):
                members.append(by_bucket[ref[0]][ref[1]])
                views.append(values[where])
                values[where] = None
        for bucket in program.plan.buckets:
            if bucket.nbytes:
                self.record.launch(bucket.nbytes)
        self._launched.append(_Launched(-1, None, members, views))
        return values

    def _set_aside(self, parameter: Tensor, gradient: Tensor) -> None:
        """Accumulates a local gradient out of sight of the hooks; `.grad` gets it back at the end."""
        identity = id(parameter)
        if identity in self._aside:
            self._aside[identity][1].add_(gradient)
            return
        old = parameter.grad
        if old is not None:
            old.add_(gradient)
            gradient = old
            parameter.grad = None
        self._aside[identity] = (parameter, gradient)

    # --- called by hooks, when autograd accumulated into a watched parameter ----------------------

    def accumulated(self, parameter: Tensor, *, now: bool) -> None:
        """Notes that autograd accumulated into a parameter; with `now` it is averaged at once: others look at it next."""
        identity = id(parameter)
        if identity in self._returned:
            _, address = self._returned[identity]
            if address is None or parameter.grad is None or parameter.grad.data_ptr() == address:
                return  # ours alone; otherwise somebody added a local part, and averaging the sum is right
        elif not now:
            self._local[identity] = parameter
            return
        group = self.group or self.backend.lookup()
        if group is None or not self.synchronises:
            return
        self.group = group
        grad = parameter.grad
        assert grad is not None
        with torch.no_grad():
            flat = grad.reshape(-1) * group.scale
            group.all_reduce(flat).wait()
            grad.copy_(flat.view(grad.shape))

    @property
    def synchronises(self) -> bool:
        """Whether what is accumulated outside of the graphs will be reduced in this backward."""
        return self.record.sync if self._calls else not self.backend.under_no_sync

    # --- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Reduces what is still local, waits for everything and writes every `.grad`."""
        try:
            self._finish()
        except BaseException:
            self.abort()
            raise
        self.over = True
        self.backend.forget(self)

    @torch.no_grad()
    def _finish(self) -> None:
        backend = self.backend
        for stranger in self._strangers:
            if stranger.grad is not None:
                self._local[id(stranger)] = stranger
        if self.synchronises:
            self.record.sync = True
            group = self.group or backend.lookup()
            for parameter in backend.watch.take_pending():
                if id(parameter) not in self._taken and parameter.grad is not None:
                    self._local[id(parameter)] = parameter
            if self._local and group is not None:
                backend.watch.reduce(list(self._local.values()), group, self.record)
        else:
            backend.watch.keep_pending(self._local.values())
        for launched, bucket, flat in self._deferred:
            launched.views = bucket_views(bucket, flat)
        self._deferred.clear()
        for launched in self._launched:
            self._wait(launched)
            self._write(launched)
            launched.views = None
        for parameter, kept in self._aside.values():
            parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)
            backend.watch.keep_pending([parameter])
        self._launched.clear()
        self._taken.clear()
        self._aside.clear()
        backend.log.add(self.record)

    def _wait(self, launched: _Launched) -> None:
        if launched.work is not None:
            self.record.wait(launched.index)
            launched.work.wait()
            launched.work = None

    def _write(self, launched: _Launched) -> None:
        views = launched.views
        assert views is not None
        taken = self._taken
        for parameter, view in zip(launched.parameters, views, strict=True):
            if id(parameter) in self._returned:
                continue
            current = parameter.grad
            if taken and id(parameter) in taken:
                _, old = taken.pop(id(parameter))
                old.copy_(view)
                parameter.grad = old if current is None else old.add_(current)
            elif current is None:
                parameter.grad = view
            else:
                current.add_(view)

    def abort(self) -> None:
        """Puts back what was taken and drains what was launched; for a backward that raised."""
        if self.over:
            return
        self.over = True
        for parameter, old in [*self._taken.values(), *self._aside.values()]:
            parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        self._taken.clear()
        self._aside.clear()
        for launched in self._launched:
            if launched.work is not None:
                try:
                    launched.work.wait(DRAIN)
                except RuntimeError:  # the other ranks may be gone; what matters is the error that brought us here
                    break
        self._launched.clear()
        self._deferred.clear()
        self.backend.forget(self)


class _AtEnd:
    """Autograd's end-of-backward callback; dropped unused by a backward that raised, which aborts it."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def __call__(self) -> None:
        self._backward.finish()

    def __del__(self) -> None:
        self._backward.abort()


def _flatten(view: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order."""
    return view.as_strided((view.numel(),), (1,))
