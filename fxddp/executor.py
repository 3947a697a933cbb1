"""Runs one compiled backward: pieces, launches between them, and what each parameter's gradient becomes.

Note [who writes .grad]: the compiled backward returns None for the gradients it owns and the end of the backward writes
`.grad` (`backward.py`). So waits move behind everything the backward still has to do, eager parts and other graphs
included, and an accumulation that autograd does on such a parameter can only be somebody else's contribution. What was
in `.grad` before is folded into the bucket before it is launched: the average is that of accumulated plus new
gradients, as under DistributedDataParallel, with the collectives of one normal step.

A gradient goes back through autograd instead
  * local and unscaled: if the parameter has tensor hooks (they see the local gradient), is not a leaf or not an
    `nn.Parameter` any more, stands at several inputs of the graph (autograd adds up what comes from each), or the
    backward accumulates only somewhere (`autograd.grad`, `backward(inputs=…)`) or makes a graph of its own
    (`create_graph=True`);
  * reduced: if the user hooked its accumulation (optimizer in backward);
  * not at all: if no output it depends on got a gradient (AOTAutograd fills zeros), or it was frozen meanwhile.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _compat, coverage, ranges
from .passes.plan import Bucket
from .passes.split import Program

if TYPE_CHECKING:
    from .artifact import SplitBackward
    from .call import Call

_requires_grad = attrgetter("requires_grad")
_tensor_hooks = attrgetter("_backward_hooks")
_accumulation_hooks = attrgetter("_post_accumulate_grad_hooks")

_local = threading.local()
_scales: dict[tuple[torch.dtype, float], Tensor] = {}


def announce(call: "Call") -> None:
    """Names the call whose compiled backward runs next in this thread."""
    _local.call = (call, _compat.task_id())


def _take() -> "Call | None":
    """The call announced last; one of another backward was left over by an error and counts for nothing."""
    call, task = getattr(_local, "call", (None, -1))
    _local.call = (None, -1)
    return call if task == _compat.task_id() else None


def scale_tensors(program: Program, scale: float) -> list[Tensor]:
    """The factors a program takes as its last inputs."""
    tensors = []
    for dtype in program.scales:
        key = (dtype, scale)
        if key not in _scales:
            _scales[key] = torch.tensor(scale, dtype=dtype)
        tensors.append(_scales[key])
    return tensors


@dataclass(slots=True)
class Exceptions:
    """Gradients of one call that do not take the usual way, as (bucket, position).

    Attributes:
        local: go back through autograd as they are.
        reduced: go back through autograd when they are averaged.
        dropped: there is none: no output they depend on got a gradient, on any rank.
        zeros: there is none on this rank.
    """

    local: set[tuple[int, int]] = field(default_factory=set)
    reduced: set[tuple[int, int]] = field(default_factory=set)
    dropped: set[tuple[int, int]] = field(default_factory=set)
    zeros: set[tuple[int, int]] = field(default_factory=set)

    @property
    def none(self) -> bool:
        """Whether every gradient takes the usual way."""
        return not (self.local or self.reduced or self.dropped or self.zeros)

    @property
    def skipped(self) -> set[tuple[int, int]]:
        """Those that the end of the backward does not write."""
        return self.local | self.dropped


NO_EXCEPTIONS = Exceptions()


def execute(artifact: "SplitBackward", inputs: list[Any]) -> list[Any]:
    """Runs a compiled backward for the call announced last; without one, everything comes back local."""
    from .reduction import LocalRun, Reduction

    call = _take()
    program = artifact.program
    restricted = _compat.restricted_to()
    if call is None or restricted is not None or call.creates_graph:
        if call is not None and (restricted is None or not restricted.isdisjoint(call.binding.ids)):
            call.binding.uncover()
            call.backend.backward().follow(call)
        flats = _Flats(program)
        values = run_pieces(artifact, inputs, 1.0, flats.keep)
        return [flats.view(ref) if isinstance(ref, tuple) else values[i] for i, ref in enumerate(program.outputs)]
    if not _compat.seen_to_begin():
        coverage.end_all()
    backward = call.backend.backward()
    try:
        exceptions = _exceptions(program, call)
        kind = Reduction if call.sync else LocalRun
        return kind(backward, artifact, call, exceptions).run(inputs)
    except BaseException as error:
        backward.abort(error)
        raise


def run_pieces(
    artifact: "SplitBackward",
    inputs: list[Any],
    scale: float,
    on_bucket: Callable[[Bucket, Tensor, Tensor | None, Sequence[Tensor]], None],
    on_piece: Callable[[], int] | None = None,
) -> list[Any]:
    """Runs the pieces in order and hands each packed bucket to `on_bucket` as soon as it is there.

    With it comes the same bucket in the dtype in which it is to travel, or None, and what the slots of its tables hold.

    Returns:
        The backward's outputs, None in place of planned gradients.
    """
    program = artifact.program
    pieces = artifact.local_pieces()
    values: list[Any] = [*inputs, *scale_tensors(program, scale)]
    inputs.clear()
    values += [None] * (program.slots - len(values))
    buckets, tables = program.plan.buckets, program.tables_in
    for k, (piece, step) in enumerate(zip(pieces, program.steps, strict=True)):
        number = k if on_piece is None else on_piece()
        arguments = [values[slot] for slot in step.inputs]
        for slot in step.dead:
            values[slot] = None
        results = ranges.run_piece(piece, arguments, number) if _compat.profiling() else piece(arguments)
        deque(map(values.__setitem__, step.outputs, results), maxlen=0)
        del results  # and no loop variable that would keep the last of them, a packed bucket, through the next piece
        if step.bucket is not None:
            flat, wire = values[step.flat], None if step.wire < 0 else values[step.wire]
            indices = [values[slot] for table in tables.get(step.bucket, ()) for slot in table.slots]
            for slot in step.spent:
                values[slot] = None
            on_bucket(buckets[step.bucket], flat, wire, indices)
            del flat, wire
    outputs: list[Any] = [None] * len(program.outputs)
    for position, slot in program.results:
        outputs[position] = values[slot]
    return outputs


def bucket_views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """The gradients in a flat bucket, each in its parameter's shape and strides."""
    return list(starmap(partial(_compat.alias, flat), bucket.places))


class _Flats:
    """Keeps packed buckets and hands out single gradients of them."""

    def __init__(self, program: Program) -> None:
        self._flats: list[Tensor | None] = [None] * len(program.plan.buckets)
        self._buckets = program.plan.buckets

    def keep(self, bucket: Bucket, flat: Tensor, _wire: Tensor | None, _indices: Sequence[Tensor]) -> None:
        self._flats[bucket.index] = flat

    def view(self, where: tuple[int, int]) -> Tensor:
        flat = self._flats[where[0]]
        assert flat is not None
        bucket = self._buckets[where[0]]
        view = _compat.alias(flat, *bucket.places[where[1]])
        return view if len(bucket.grads) == 1 else view.clone()


def _exceptions(program: Program, call: "Call") -> Exceptions:
    """Sorts out the gradients that cannot take the usual way; on the steady path one look per parameter, in C."""
    parameters = call.parameters
    usual = (
        not call.undefined
        and not call.binding.foreign
        and all(map(_requires_grad, parameters))
        and not any(map(_tensor_hooks, parameters))
        and not _hooked_accumulation(program, call)
    )
    if usual:
        return NO_EXCEPTIONS
    call.binding.uncover()
    by_bucket = list(zip(program.plan.buckets, call.parameters_by_bucket(program.plan), strict=True))
    defined = {
        id(parameter)
        for bucket, members in by_bucket
        for grad, parameter in zip(bucket.grads, members, strict=True)
        if not grad.tangents or not grad.tangents <= call.undefined
    }
    found = Exceptions()
    for bucket, members in by_bucket:
        for i, parameter in enumerate(members):
            where = (bucket.index, i)
            if id(parameter) not in defined or not parameter.requires_grad:
                found.dropped.add(where)
            elif (
                not isinstance(parameter, nn.Parameter)
                or not parameter.is_leaf
                or id(parameter) in call.binding.repeated
                or _compat.hooks_before_accumulation(parameter)
            ):
                found.local.add(where)
            elif _hook_count(_compat.hooks_after_accumulation(parameter)) > 1:
                found.reduced.add(where)
    return found


def _hooked_accumulation(program: Program, call: "Call") -> bool:
    """Whether the user hooked the accumulation of what is packed; where that has no hook of ours, any is his."""
    hooks = map(_accumulation_hooks, chain.from_iterable(call.parameters_by_bucket(program.plan)))
    if call.binding.bare:
        return any(hooks)
    return max(map(len, filter(None, hooks)), default=0) > 1


def _hook_count(hooks: Any) -> int:
    return len(hooks) if hooks else 0
