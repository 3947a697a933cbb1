"""The end of a backward: what no graph reduced is reduced, everything is waited for, and every `.grad` is written."""

from collections import Counter, deque
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _compat
from .decision import END, INNER, Decision, Event, nothing_left
from .executor import bucket_views
from .next_forward import Late
from .packing import packs

if TYPE_CHECKING:
    from .backward import Backward, Launched
    from .group import Group
    from .optimizer import OptimizerInBackward

_grad = attrgetter("grad")

NESTED = (
    "an optimizer in backward cannot tell when a re-entrant checkpoint's backward is over, because nothing around it "
    "is compiled: use torch.utils.checkpoint with use_reentrant=False, or call optimizer.step() yourself"
)


class Ending:
    """What is done when autograd is through with a backward."""

    def __init__(self, backward: "Backward") -> None:
        self.backward = backward
        self.holdings = backward.holdings
        self._whole: list[Launched] = []

    @torch.no_grad()
    def run(self) -> None:
        """Reduces what is still local, waits for everything and writes every `.grad`."""
        backward, backend = self.backward, self.backward.backend
        backward.spare_no_more()
        for parameter in chain.from_iterable(passage.accumulated_elsewhere() for passage in backward.passages):
            backward.accumulated(parameter, now=False)
        for stranger in backward.strangers:
            if stranger.grad is not None:
                backward.local[id(stranger)] = stranger
        synchronises = backward.synchronises(backward.local.keys())
        if synchronises:
            backward.record.sync = True
            backward.group = backward.group or backend.lookup()
            if backward.gathers:
                self.holdings.show()
            if backward.group is not None:
                self._reduce_rest(backward.group)
        else:
            backend.watch.keep_pending(backward.local.values())
        if backend.around(backward) is None:
            backend.under_way.doubtful.clear()
        under_way = self._write_all(backend.registered.optimizer if synchronises else None)
        for launched in self._whole:
            backend.reduced.note(launched.parameters)
        for parameter in backward.stood_in.values():  # autograd has accumulated nothing here, and called nobody
            _compat.run_other_accumulation_hooks(parameter)
        backend.watch.keep_pending(self.holdings.lay_back())
        backward.launched.clear()
        backend.log.add(backward.record, under_way=under_way)

    def _reduce_rest(self, group: "Group") -> None:
        """Averages what no graph has reduced, and stands in with zeros for what only other ranks have."""
        backward, backend = self.backward, self.backward.backend
        kind = END if backend.around(backward) is None else INNER
        while True:
            rest = self._rest(group)
            owner = backend.replica.owner(group)
            if rest or backend.replica.has_unmet:
                buckets = (tuple(sorted(rest)),) if rest else ()
                details = "unmet" if backend.replica.has_unmet else None
                event = Event(kind, buckets, details=details, owner=owner)
            else:
                event = nothing_left(kind, owner)
            proposal = backend.agreement.announce(event, group, carried=bool(backward.carried))
            if backend.registered.optimizer is None:
                self._make_views()  # while they travel
            decision = proposal.decision()
            backward.follow_decision(decision)
            if decision.defer:
                backward.deferring = True
            else:
                self._stand_in(decision, group)
            if group.rank not in decision.again:
                break
        if decision.compare:
            backend.replica.compare_unmet(group)

    def _make_views(self) -> None:
        """Makes the gradients of buckets that all go the usual way, for which there was no need so far."""
        for launched, bucket, flat in self.backward.lazy:
            launched.views = bucket_views(bucket, flat)
            self._whole.append(launched)
        self.backward.lazy.clear()

    def _rest(self, group: "Group") -> dict[int, Tensor]:
        """The parameters that have something local, by number."""
        backward, holdings = self.backward, self.holdings
        watch, replica = backward.backend.watch, backward.backend.replica
        backward.carried += watch.take_pending()
        found = [p for p in backward.carried if p.grad is not None and id(p) not in holdings.taken]
        found += [p for p, _ in holdings.kept.values()]
        if holdings.aside:  # left by a graph under no_sync, and reduced by another one: averaged, whichever came first
            reduced = set(map(id, chain.from_iterable(launched.parameters for launched in backward.launched)))
            found += [p for identity, (p, _) in holdings.aside.items() if identity in reduced]
        rest = {id(p): p for p in (*found, *backward.local.values())}
        watch.meet([p for p in rest.values() if replica.is_new(p, group)], group)
        return {replica.number(p): p for p in rest.values()}

    def _stand_in(self, decision: Decision, group: "Group") -> None:
        """Takes part in the reduction of buckets that no graph of this rank packs."""
        backward, backend = self.backward, self.backward.backend
        at_end = group.rank not in decision.again  # and so are all others: none of them packs these into a bucket
        sparse: list[Tensor] = []
        packed: list[list[Tensor]] = []
        for bucket in decision.buckets:
            dense: list[Tensor] = []
            for parameter in map(backend.replica.tensor, bucket):
                (sparse if at_end and backend.expects_sparse(parameter, group) else dense).append(parameter)
            packed += packs(dense, backend.settings.cap)
        unused = backward.ids(decision.unused)
        for members in packed:
            flat, views = backward.fill(members, [None] * len(members), unused)
            kept = [i for i, p in enumerate(members) if id(p) not in unused]
            backward.launch(flat, members, kept, views, idle=unused, is_last=members is packed[-1], outside=True)
            backward.record.uncovered += tuple(map(backend.watch.name, members))
            backward.record.uncovered_bytes += flat.nbytes
        for parameter in sparse:
            backward.launch_sparse(parameter, group)

    def _write_all(self, optimizer: "OptimizerInBackward | None") -> bool:
        """Waits for each bucket and updates its parameters, while those after it travel; see Note [update].

        Returns:
            Whether some are left to be waited for in the next forward.
        """
        if optimizer is None:
            self._write_gradients()
            return False
        backward = self.backward
        outer = backward.backend.around(backward) if backward.nested else None
        if backward.nested and outer is None:
            raise RuntimeError(NESTED)
        optimizer.begin(backward.task if outer is None else outer.task)
        last = {id(p): launched for launched in backward.launched for p in launched.parameters}
        late = self._late(optimizer) if outer is None else []
        left = {id(each.launched) for each in late}
        self._make_views()
        for launched in [each for each in backward.launched if id(each) not in left]:
            backward.wait_through(launched)
            self._write(launched)
            ready = [p for p in launched.parameters if last[id(p)] is launched and id(p) not in backward.later]
            if outer is None:
                backward.update(optimizer, ready)
            else:
                outer.update_later(ready)
        if backward.group is None:
            backward.update_later(backward.local.values())
        if outer is None:
            backward.update(optimizer, backward.later.values())
        else:
            outer.update_later(backward.later.values())
        if late:
            self._leave(late, optimizer)
        return bool(late)

    def _leave(self, late: list[Late], optimizer: "OptimizerInBackward") -> None:
        """Leaves buckets to the next forward: this backward can fail no more."""
        backward = self.backward
        assert backward.group is not None
        parameters = [p for each in late for p in each.launched.parameters]
        for parameter in parameters:
            self.holdings.taken.pop(id(parameter), None)  # it is in the bucket
        backward.backend.under_way.add(late, backward.group, optimizer.capture(parameters), backward.record)

    def _write_gradients(self) -> None:
        """Waits for all buckets and writes `.grad`s: before it waits, where they are nothing but what will arrive."""
        launched = self.backward.launched
        rest = [each for each in launched if not self._write_new(each)]
        for each in launched:
            self.backward.wait(each)
        for each in rest:
            self._write(each)

    def _late(self, optimizer: "OptimizerInBackward") -> list[Late]:
        """The buckets that the next forward may wait for: all of their gradients went one way, and no other."""
        backward, backend, group = self.backward, self.backward.backend, self.backward.group
        if backend.settings.overlap is None or backend.joining or group is None or group.size == 1:
            return []
        launches = Counter(id(p) for launched in backward.launched for p in launched.parameters)
        elsewhere = backward.by_autograd.keys() | backward.local.keys() | backward.later.keys()
        late = [
            Late(launched, bucket, flat)
            for launched, bucket, flat in backward.lazy
            if launched.work is not None
            and elsewhere.isdisjoint(map(id, launched.parameters))
            and all(p.grad is None and launches[id(p)] == 1 for p in launched.parameters)
            and optimizer.knows(launched.parameters)
        ]
        left = {id(each.launched) for each in late}
        backward.lazy = [entry for entry in backward.lazy if id(entry[0]) not in left]
        return late

    def _write_new(self, launched: "Launched") -> bool:
        """Writes the `.grad`s of a bucket, if its parameters have none; taken back if the backward fails."""
        if self.holdings.taken or self.backward.by_autograd:
            return False
        if not all(map(is_, map(_grad, launched.parameters), repeat(None))):
            return False
        views, launched.views = launched.views, None
        assert views is not None
        self.holdings.new.append(launched.parameters)
        deque(map(setattr, launched.parameters, repeat("grad"), views), maxlen=0)
        return True

    def _write(self, launched: "Launched") -> None:
        if self._write_new(launched):
            return
        views, launched.views = launched.views, None
        assert views is not None
        taken = self.holdings.taken
        for parameter, view in zip(launched.parameters, views, strict=True):
            if id(parameter) in self.backward.by_autograd and not launched.outside:
                continue
            current = parameter.grad
            if view.is_sparse:
                taken.pop(id(parameter), None)
                parameter.grad = view if current is None else view + current
            elif taken and id(parameter) in taken:
                _, old = taken.pop(id(parameter))
                old.copy_(view)
                _compat.keep_until_read(view)
                parameter.grad = old if current is None else old.add_(current)
            elif current is None:
                parameter.grad = view
            else:
                current.add_(view)
