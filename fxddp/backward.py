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

from collections import deque
from collections.abc import Collection, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _compat
from .agreement import RanksDisagree
from .executor import bucket_views
from .passes.plan import Bucket
from .stats import BackwardRecord
from .uncovered import Watch, parameters_registered

if TYPE_CHECKING:
    from .backend import Backend
    from .call import Binding, Call
    from .group import Group

_grad = attrgetter("grad")


class Launched:
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
        self._reduced: tuple[int, ...] = ()
        self._launched: list[Launched] = []
        self._deferred: list[tuple[Launched, Bucket, Tensor]] = []
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}
        self._aside: dict[int, tuple[Tensor, Tensor]] = {}
        self._local: dict[int, Tensor] = {}
        self._returned: dict[int, tuple[Tensor, Any]] = {}
        self._strangers: list[Tensor] = []
        self._explored = False
        _compat.queue_callback(_AtEnd(self))

    # --- called by a node's run (reduction.py) -----------------------------------------------

    def follow(self, call: "Call") -> None:
        """What this backward accumulates is reduced if this call synchronises, or another one."""
        self._calls += 1
        self.group = call.group
        self.record.sync = self.record.sync or call.sync

    def enter(self, call: "Call") -> None:
        """Notes that a compiled node of this backward starts."""
        self.follow(call)
        if call.sync:
            self._reduced += (call.binding.number,)
        self.explore(call.binding)

    def explore(self, seen: "Binding | Watch") -> None:
        """Looks for parameters of this backward that nobody told us about, when this is seen for the first time.

        And again after a module got a new parameter.
        """
        if seen.unexplored:
            seen.explored = parameters_registered()
            if not self._explored:
                self._explored = True
                self._strangers += self.backend.watch.strangers()

    def launch(self, flat: Tensor, views: list[Tensor] | None, parameters: Sequence[Tensor]) -> Launched:
        """Starts reducing a packed bucket; its views become the parameters' gradients at the end."""
        assert self.group is not None
        launched = Launched(-1, None, parameters, views)
        if flat.numel():
            launched.work = self.group.all_reduce(flat)
            launched.index = self.record.launch(flat.nbytes)
        self._launched.append(launched)
        return launched

    def launch_later(self, bucket: Bucket, flat: Tensor, parameters: Sequence[Tensor]) -> None:
        """`launch` for a bucket whose views all go the usual way: they are only made when they are needed."""
        self._deferred.append((self.launch(flat, None, parameters), bucket, flat))

    def launched_inside(self, bucket_bytes: Sequence[int], views: list[Tensor], parameters: Sequence[Tensor]) -> None:
        """Notes gradients that a graph with collectives inside has reduced already."""
        for nbytes in filter(None, bucket_bytes):
            self.record.launch(nbytes)
        self._launched.append(Launched(-1, None, parameters, views))

    def returned(self, parameter: Tensor, reduced: Tensor | None) -> None:
        """Notes that a parameter's gradient goes back through autograd as it is, local or reduced.

        Of a reduced one the storage is kept, not the tensor: autograd takes it over as `.grad` all the same, but cannot
        add another contribution to it in place, so that one shows.
        """
        self._returned[id(parameter)] = (parameter, None if reduced is None else reduced.untyped_storage())

    def accumulated_before(self, parameters: Sequence[Tensor]) -> list[Tensor | None] | None:
        """What was accumulated so far; None on the usual path, where it is nothing."""
        old = list(map(_grad, parameters))
        if all(map(is_, old, repeat(None))) and not (self._aside and any(id(p) in self._aside for p in parameters)):
            return None
        return old

    def take(self, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
        """Takes what a parameter accumulated so far, to be put back if this backward fails."""
        identity = id(parameter)
        kept = self._aside.pop(identity, (parameter, None))[1]
        if kept is not None and grad is not None:
            kept.add_(grad)
        old = grad if kept is None else kept
        if old is not None:
            parameter.grad = None
            self._local.pop(identity, None)
            self._taken.setdefault(identity, (parameter, old))
        return old

    def set_aside(self, parameter: Tensor, gradient: Tensor) -> None:
        """Accumulates a local gradient out of sight of the hooks; `.grad` gets it back at the end."""
        identity = id(parameter)
        if identity in self._aside:
            self._aside[identity][1].add_(gradient)
            return
        old = parameter.grad
        if old is not None:
            gradient = old.add_(gradient)
            parameter.grad = None
        self._aside[identity] = (parameter, gradient)

    # --- called by hooks, when autograd accumulated into a watched parameter ----------------------

    def accumulated(self, parameter: Tensor, *, now: bool) -> None:
        """Notes that autograd accumulated into a parameter; with `now` it is averaged at once: others look next."""
        identity = id(parameter)
        self.explore(self.backend.watch)
        if identity in self._returned:
            _, storage = self._returned[identity]
            self._returned[identity] = (parameter, None)
            if storage is None or parameter.grad is None or parameter.grad.data_ptr() == storage.data_ptr():
                return  # ours alone; otherwise somebody added a local part, and averaging the sum is right
        elif not now:
            self._local[identity] = parameter
            return
        group = self.group or self.backend.lookup()
        if group is None or not self._synchronises({identity}):
            return
        self.group = group
        self.backend.agreement.settle_uncovered([parameter], group, self._reduced)
        self._reduced += (identity,)
        self.backend.watch.meet([parameter], group)
        grad = parameter.grad
        assert grad is not None
        with torch.no_grad():
            flat = grad.reshape(-1) * group.scale
            group.all_reduce(flat).wait()
            grad.copy_(flat.view(grad.shape))

    def _synchronises(self, accumulated: Collection[int]) -> bool:
        """Whether what was accumulated outside of the graphs, for these parameters, is reduced in this backward."""
        return self.record.sync if self._calls else not self.backend.under_no_sync(accumulated)

    # --- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Reduces what is still local, waits for everything and writes every `.grad`."""
        try:
            self._finish()
        except BaseException as error:
            self.abort(error)
            raise
        self.over = True
        self.backend.forget(self)

    @torch.no_grad()
    def _finish(self) -> None:
        backend = self.backend
        for stranger in self._strangers:
            if stranger.grad is not None:
                self._local[id(stranger)] = stranger
        if self._synchronises(self._local.keys()):
            self.record.sync = True
            group = self.group or backend.lookup()
            for parameter in backend.watch.take_pending():
                if id(parameter) not in self._taken and parameter.grad is not None:
                    self._local[id(parameter)] = parameter
            if group is not None:
                backend.watch.reduce(list(self._local.values()), group, self.record, self._reduced)
        else:
            backend.watch.keep_pending(self._local.values())
        for launched, bucket, flat in self._deferred:
            launched.views = bucket_views(bucket, flat)
        self._deferred.clear()
        for launched in self._launched:
            self.wait(launched)
            self._write(launched)
            launched.views = None
        for parameter, kept in self._aside.values():
            parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)
            backend.watch.keep_pending([parameter])
        self._launched.clear()
        self._taken.clear()
        self._aside.clear()
        backend.log.add(self.record)

    def wait(self, launched: Launched) -> None:
        """Waits for a bucket."""
        if launched.work is not None:
            self.record.wait(launched.index)
            assert self.group is not None
            self.backend.agreement.wait(launched.work, launched.parameters, self.group)
            launched.work = None

    def _write(self, launched: Launched) -> None:
        views = launched.views
        assert views is not None
        taken = self._taken
        if not taken and not self._returned and all(map(is_, map(_grad, launched.parameters), repeat(None))):
            deque(map(setattr, launched.parameters, repeat("grad"), views), maxlen=0)
            return
        for parameter, view in zip(launched.parameters, views, strict=True):
            if id(parameter) in self._returned:
                continue
            current = parameter.grad
            if taken and id(parameter) in taken:
                _, old = taken.pop(id(parameter))
                old.copy_(view)
                _compat.keep_until_read(view)
                parameter.grad = old if current is None else old.add_(current)
            elif current is None:
                parameter.grad = view
            else:
                current.add_(view)

    def abort(self, error: BaseException | None = None) -> None:
        """Puts back what was taken and drains what was launched, for a backward that raised.

        Where ranks disagree the others will not launch the same, and there is nothing to wait for.
        """
        if self.over:
            return
        self.over = True
        for parameter, old in [*self._taken.values(), *self._aside.values()]:
            parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        self._taken.clear()
        self._aside.clear()
        for launched in () if isinstance(error, RanksDisagree) else self._launched:
            if launched.work is not None and self.group is not None and not self.group.drain(launched.work):
                break
        if self._launched:
            self.backend.agreement.doubt()
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
