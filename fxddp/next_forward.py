"""Waits that move past the end of the backward: each bucket is waited for right before the next forward reads it.

    backward N     pieces ─ launch … │ end: the rest is launched, nothing waited for
    forward N+1    settle(piece 0's parameters) ─ piece 0 ─ settle(piece 1's) ─ piece 1 ─ …
                   └ wait, write .grad, update, take .grad

So the link works while the forward computes, and where it is the bottleneck a step takes as long as the link needs, not
that and the forward: the schedule of P3 and ByteScheduler (see `passes/launching.py`), in a compiled program.

Note [stale weights]: between a backward and the forward that reads them, parameters of buckets under way hold the
values of the step before. Nothing that fxddp, torch's checkpoints or copies read is stale: every graph compiled with it
settles what it reads, under `no_grad` too; `state_dict`, `load_state_dict`, a copy or pickle of a parameter settle what
they touch; the next backward settles everything. A parameter that eager code computes with is not left under way: its
gradient was noticed in the backward. One that eager code takes up later, while it may have been under way, is refused
by name in the backward of that use. Code that reads weights by itself calls `Backend.synchronize` first; autograd tells
nobody of that. Code that writes them has to, too, and is noticed by their version.

A backward of a forward that came before the one that left something under way (two losses of one forward, two forwards
before two backwards) would read saved weights that change under it. So everything is settled before autograd unpacks
them, and it refuses them by their version, as after any `optimizer.step()` in between.

An update uses the optimizer's settings of the end of its backward: a scheduler's step comes in between.

Note [torn weights]: once a first parameter is updated there is no way back, and ranks that fail then may have updated
different ones. So an interrupt (Ctrl-C) in a wait costs no update: in the next forward the bucket stays under way, and
whoever needs it next waits again; at the end of a backward it is raised when all is updated (`ending.py`). After
whatever else fails from there on, weights are of two steps: nothing uses them again, on any rank.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _compat, ranges
from .executor import bucket_views
from .notes import reason
from .passes.plan import Bucket

if TYPE_CHECKING:
    from .artifact import SplitForward
    from .backend import Backend
    from .backward import Launched
    from .group import Group
    from .stats import BackwardRecord

_local = threading.local()
_busy: "weakref.WeakSet[UnderWay]" = weakref.WeakSet()
"""Those that have buckets under way, of all backends."""


class Late:
    """One bucket that is waited for in the next forward."""

    __slots__ = ("bucket", "flat", "launched", "states")

    def __init__(self, launched: "Launched", bucket: Bucket, flat: Tensor) -> None:
        self.launched = launched
        self.bucket = bucket
        self.flat = flat
        self.states = tuple(map(_state, launched.parameters))

    def changed(self) -> list[Tensor]:
        """The parameters that somebody wrote to since, or gave another dtype, device or shape."""
        states = map(_state, self.launched.parameters)
        return [p for p, now, then in zip(self.launched.parameters, states, self.states, strict=True) if now != then]


class UnderWay:
    """A backend's buckets whose backward is over.

    Attributes:
        doubtful: ids of parameters that may have been read while they were under way; until the next backward is over.
    """

    def __init__(self, backend: "Backend") -> None:
        self._backend = weakref.ref(backend)
        self._late: list[Late] = []
        self._of: dict[int, Late] = {}
        self._group: Group | None = None
        self._update: Callable[[Iterable[Tensor]], None] | None = None
        self._record: BackwardRecord | None = None
        self._torn: dict[int, Tensor] = {}
        self._why = ""
        self.doubtful: set[int] = set()
        _guard()

    def add(
        self, late: Sequence[Late], group: "Group", update: Callable[[Iterable[Tensor]], None], record: "BackwardRecord"
    ) -> None:
        """Takes over what a backward has launched and not waited for, in the order of launches.

        Args:
            late: the buckets.
            group: the ranks.
            update: updates their parameters with the settings of this moment.
            record: the backward's.
        """
        self._late = list(late)
        self._of = {id(p): each for each in late for p in each.launched.parameters}
        self._group, self._update, self._record = group, update, record
        self.doubtful.update(self._of)
        _busy.add(self)

    def settle(self, tensors: Iterable[Any]) -> None:
        """Waits for the buckets of these parameters, and updates all that are in them.

        Raises:
            RanksDisagree: another rank gave up, or did not come in time; from then on this raises every time.
        """
        tensors = list(tensors)
        if self._torn and any(id(tensor) in self._torn for tensor in tensors):
            self._refuse()
        wanted = {id(each) for tensor in tensors if (each := self._of.get(id(tensor))) is not None}
        if wanted:
            self._settle([each for each in self._late if id(each) in wanted])

    def settle_all(self) -> None:
        """`settle` for everything."""
        if self._torn:
            self._refuse()
        self._settle(list(self._late))

    def tear(self, parameters: Iterable[Tensor], error: BaseException | None, group: "Group | None") -> None:
        """Notes that an update of these failed half-way: they are refused from now on, here and by the other ranks.

        What is still under way is never used. See Note [torn weights].
        """
        under_way = chain.from_iterable(late.launched.parameters for late in self._late)
        self._torn = {id(p): p for p in chain(parameters, under_way)}
        self._why = reason(error)
        self._late, self._of, self._record, self._update = [], {}, None, None
        _busy.add(self)
        if group is not None:
            group.lose(f"failed in the middle of an update ({self._why})")

    def note_piece(self, number: int) -> None:
        """Notes that a piece of a forward starts while buckets are under way."""
        if self._record is not None:
            self._record.forward_piece(number)

    def refuse_doubtful(self, parameter: Tensor) -> None:
        """Raises if eager code has computed with a parameter that may have been under way then."""
        if id(parameter) not in self.doubtful:
            return
        backend = self._backend()
        assert backend is not None
        raise RuntimeError(
            f"{backend.names([parameter])} was computed with outside of the compiled graphs, perhaps before its last "
            'update: with overlap="next_forward" it was still under way when this forward began. Call '
            "backend.synchronize() before a forward that uses parameters in eager code for the first time"
        )

    def _settle(self, late: list[Late]) -> None:
        for each in late:
            while each in self._late:
                self._finish(self._first_arrived(each))
        if late and not self._late:
            assert self._record is not None
            self._record.stop_looking()
            self._group = self._update = self._record = None
            _busy.discard(self)

    def _first_arrived(self, wanted: Late) -> Late:
        """This one if it has arrived, else another one that has: its update takes time that is spent waiting."""
        return next((each for each in (wanted, *self._late) if each.launched.work.is_completed()), wanted)

    @torch.no_grad()
    def _finish(self, late: Late) -> None:
        try:
            self._wait(late)
        except Exception as error:  # not an interrupt, after which it is as much under way as before
            self.tear((), error, self._group)
            raise
        try:
            self._write(late)
        except BaseException as error:
            self.tear((), error, self._group)
            raise

    def _wait(self, late: Late) -> None:
        launched, backend = late.launched, self._backend()
        assert backend is not None and self._group is not None and self._record is not None
        if changed := late.changed():
            raise RuntimeError(
                f'{backend.names(changed)} changed while its update was under way (overlap="next_forward"): what was '
                "written was computed from the value of the step before, or would be updated once more. Call "
                "backend.synchronize() before code that writes to parameters by itself, or changes their dtype, device "
                "or shape"
            )
        with ranges.wait(launched.index):
            self._record.wait(launched.index)
            self._group.wait(launched.work, lambda: f"average {backend.names(launched.parameters)}")
            self._record.waited(launched.index)
        launched.work = None

    def _write(self, late: Late) -> None:
        launched = late.launched
        assert self._update is not None
        written = [(p, p.grad) for p in launched.parameters if p.grad is not None]
        for parameter, view in zip(launched.parameters, bucket_views(late.bucket, late.flat), strict=True):
            parameter.grad = view
        late.flat = None  # type: ignore[assignment]  # whose views go with the gradients
        self._update(launched.parameters)
        for parameter, grad in written:  # what somebody wrote there since
            parameter.grad = grad
        self._late.remove(late)
        for parameter in launched.parameters:
            del self._of[id(parameter)]

    def _refuse(self) -> None:
        raise RuntimeError(
            f"an update failed half-way earlier ({self._why}): some weights are of one step and some of another. Make "
            "model, optimizer and backend anew, on a new process group, and load a checkpoint; or start all processes "
            "again from one"
        )


def _state(parameter: Tensor) -> tuple[Any, ...]:
    return _compat.data_version(parameter), parameter.dtype, parameter.device, parameter.shape


def settle(tensors: Iterable[Any]) -> None:
    """Waits for these parameters, whatever backend updates them."""
    if _busy:
        tensors = list(tensors)
        for under_way in list(_busy):
            under_way.settle(tensors)


def run(compiled: Any, arguments: Sequence[Any], *, in_pieces: bool) -> Any:
    """Calls a compiled graph; what it reads is settled before it is read.

    Args:
        compiled: the graph.
        arguments: its inputs.
        in_pieces: its forward settles what its pieces read (`run_forward`).
    """
    if not _busy:
        return compiled(*arguments)
    if not in_pieces:
        settle(arguments)
        return compiled(*arguments)
    before, _local.arguments = getattr(_local, "arguments", None), arguments
    try:
        return compiled(*arguments)
    finally:
        _local.arguments = before


def run_forward(artifact: "SplitForward", inputs: list[Any]) -> list[Any]:
    """Runs a forward in pieces, and waits before each for the parameters that it reads."""
    program = artifact.program
    arguments, _local.arguments = getattr(_local, "arguments", None), None
    values: list[Any] = [*inputs, *[None] * (program.slots - len(inputs))]
    inputs.clear()
    for number, (piece, step) in enumerate(zip(artifact.pieces, program.steps, strict=True)):
        if arguments is not None:
            settle([arguments[position] for position in step.reads])
            for under_way in _busy:
                under_way.note_piece(number)
        passed = [values[slot] for slot in step.inputs]
        for slot in step.dead:
            values[slot] = None
        results = ranges.run_piece(piece, passed, number, "forward") if _compat.profiling() else piece(passed)
        for slot, result in zip(step.outputs, results, strict=True):
            values[slot] = result
        del results
    if arguments is not None:
        settle(arguments)  # what is only returned
    found = [None if slot is None else values[slot] for slot in program.outputs]
    for position, constant in program.constants.items():
        found[position] = constant
    return found


@cache
def _guard() -> None:
    _compat.before_saving(settle)
