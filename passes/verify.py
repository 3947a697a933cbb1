"""Checks a backward graph after each pass. A failed check is a bug of a pass, never of the user's: AssertionError.

Checked: each planned gradient comes back reduced exactly once, over its groups and in its steps, and at its place; each
wait follows its launch; no all-reduce is dead; everything that is not a planned gradient comes back as it was.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .allreduce import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BUCKET_META,
    GRADIENT_META,
    REDUCE_SCATTER,
    SCALE_META,
    STAGE_META,
    is_send,
    is_wait,
)
from .compress import narrows, packed_bucket, reduced_by
from .folding import folded
from .forward import ForwardProgram
from .gradients import graph_outputs
from .plan import Bucket, BucketPlan, GradSpec
from .split import Program
from .stages import Way

aten = torch.ops.aten
OPERATORS = {
    "reduce_scatter": REDUCE_SCATTER,
    "exchange": ALL_TO_ALL,
    "all_reduce": ALL_REDUCE,
    "all_gather": ALL_GATHER,
}
EVENED = (aten.view_as_complex.default, aten.reshape.default, aten.slice.Tensor)
"""What brings a bucket back into its own size and dtype after its last step."""


def snapshot(gm: fx.GraphModule) -> tuple[Any, ...]:
    """The outputs of a graph by which later checks tell whether a pass kept them."""
    return graph_outputs(gm.graph)


def verify(
    gm: fx.GraphModule, *, plan: BucketPlan, before: Sequence[Any], way: Way, wire: torch.dtype | None = None
) -> None:
    """Raises AssertionError unless `gm` reduces what `plan` says, once each, and returns the rest as `before`.

    It must do so on the `way` that is given. With `wire`, wider buckets must travel in that dtype and come back in
    their own.
    """
    graph = gm.graph
    outputs = graph_outputs(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    assert len(outputs) == len(before), f"{len(outputs)} outputs, {len(before)} expected"
    sends = [node for node in graph.nodes if is_send(node)]
    indices = [node.meta[BUCKET_META] for node in sends]
    assert sorted(indices) == list(range(len(plan.buckets))), f"all-reduces {indices} for {len(plan.buckets)} buckets"
    for send in sends:
        waits = [user for user in send.users if is_wait(user)]
        assert len(waits) == 1 and len(send.users) == 1, f"{send} has {len(waits)} waits and {len(send.users)} users"
        assert waits[0].users, f"{send} is dead: nothing uses what {waits[0]} gives"
        assert place[waits[0]] > place[send], f"{waits[0]} stands before {send}"
    planned = {grad.output: (bucket.index, i) for bucket in plan.buckets for i, grad in enumerate(bucket.grads)}
    sent: dict[fx.Node, list[Any]] = {}  # once for each all-reduce: a bucket may hold thousands of gradients
    for output, (value, old) in enumerate(zip(outputs, before, strict=True)):
        if output not in planned:
            assert value is old, f"output {output} was {old}, is {value}"
            continue
        where = planned[output]
        assert isinstance(value, fx.Node) and value.meta.get(GRADIENT_META) == where, f"output {output} is not {where}"
        done = value.args[0]
        send = _sent(reduced_by(done), where[0], way) if isinstance(done, fx.Node) else None
        assert isinstance(send, fx.Node) and is_send(send), f"output {output} does not come from a wait"
        assert send.meta[BUCKET_META] == where[0], f"output {output} is in {send}"
        bucket = plan.buckets[where[0]]
        grad, offset = bucket.grads[where[1]], bucket.offsets[where[1]]
        at = (list(grad.shape), list(grad.stride), offset)
        assert value.args[1:] == at, f"output {output} is read at {value.args[1:]}, packed at {at}"
        if send not in sent:
            sent[send] = _packed(send, bucket)
            _check_wire(send, done, bucket, wire)
        packed = sent[send]
        assert len(packed) == len(bucket.grads) and packed[where[1]] is old, f"{send} sends {packed}, not {old}"
    views = Counter(value for value in outputs if isinstance(value, fx.Node) and GRADIENT_META in value.meta)
    assert all(count == 1 for count in views.values()), f"a reduced gradient is returned twice: {views}"
    graph.lint()


def _sent(value: Any, bucket: int, way: Way) -> Any:
    """The first collective of the bucket that `value` is the sum of, which must have taken all steps in order."""
    if not way.stages:
        send = value.args[0] if is_wait(value) else None
        group = way.groups[bucket % len(way.groups)]
        assert send is None or send.args[1:] == ("sum", group), f"{send} is a {send.args[1:]}, expected {group}"
        return send
    sent: Any = None
    while value.target in EVENED:
        value = value.args[0]
    for k, stage in reversed(list(enumerate(way.stages))):
        if stage.kind == "exchange":
            assert value.target is aten.sum.dim_IntList, f"{value} does not add up what {stage} gave"
            value = value.args[0].args[0]
        assert is_wait(value), f"{value} does not wait for {stage}"
        sent = value.args[0]
        whose, step = sent.meta[STAGE_META]
        assert (sent.target, sent.args[-1]) == (OPERATORS[stage.kind], stage.group), f"{sent} is not {stage}"
        assert (whose, step) == (bucket, k), f"{sent} is step {step} of bucket {whose}, expected {k} of {bucket}"
        size = sent.args[0].meta["val"].numel() / sent.meta["val"].numel()
        grows = {"reduce_scatter": stage.ranks, "all_gather": 1 / stage.ranks}.get(stage.kind, 1)
        assert size == grows or not sent.meta["val"].numel(), f"{sent} makes {size} of its input, expected {grows}"
        value = sent.args[0]
    return sent


def _check_wire(send: fx.Node, done: Any, bucket: Bucket, wire: torch.dtype | None) -> None:
    """A bucket travels in the wire's dtype if that is narrower, in its own otherwise, and comes back in its own."""
    own = bucket.dtype.to_real() if STAGE_META in send.meta else bucket.dtype
    expected = wire if narrows(bucket.dtype, wire) else own
    travels, back = (node.meta["val"].dtype for node in (send, done))
    assert travels == expected, f"{send} sends {travels}, expected {expected}"
    assert back == bucket.dtype, f"bucket {bucket.index} comes back as {back}, its gradients are {bucket.dtype}"


def _packed(send: fx.Node, bucket: Bucket) -> list[Any]:
    """The values that an all-reduce sends, as they were before they were scaled; None for one that was not scaled."""
    flat, _ = packed_bucket(send)
    parts = flat.args[0] if flat.target is aten.cat.default else [flat]
    return [_unscaled(part, grad) for part, grad in zip(parts, bucket.grads, strict=False)]


def _unscaled(part: Any, grad: GradSpec) -> Any:
    while (gradient := folded(part)) is None and part.target in (aten.reshape.default, aten.permute.default):
        part = part.args[0]
    if gradient is not None:
        return gradient
    if part.target is not aten.mul.Tensor or SCALE_META not in part.args[1].meta:
        return None
    return part.args[0] if grad.shape else part.args[0].args[0]


def verify_program(program: Program, *, outputs: int) -> None:
    """Raises AssertionError unless a program launches each bucket once, in order, and reads only filled slots."""
    launched = [step.bucket for step in program.steps if step.bucket is not None]
    assert launched == list(range(len(program.plan.buckets))), f"launches {launched}"
    assert len(program.outputs) == outputs, f"{len(program.outputs)} outputs, {outputs} expected"
    filled = set(range(program.inputs + len(program.scales)))
    for k, step in enumerate(program.steps):
        assert filled.issuperset(step.inputs), f"piece {k} reads empty slots {set(step.inputs) - filled}"
        filled |= set(step.outputs)
        launched_from = {step.flat, step.wire} - {-1} if step.bucket is not None else set()
        launched_from.update(slot for table in program.tables if table.bucket == step.bucket for slot in table.slots)
        assert filled.issuperset(launched_from), f"bucket {step.bucket} is launched from an empty slot"
        filled -= {*step.dead, *step.spent}
    for output in program.outputs:
        assert not isinstance(output, int) or output in filled, f"output slot {output} is empty"
    _verify_launches(program)
    planned = {(bucket.index, i) for bucket in program.plan.buckets for i in range(len(bucket.grads))}
    returned = [output for output in program.outputs if isinstance(output, tuple)]
    assert sorted(returned) == sorted(planned), f"gradients {returned} returned, {sorted(planned)} planned"


def _verify_launches(program: Program) -> None:
    if not program.launches:
        return
    packed: set[int] = set()
    launched: list[int] = []
    for bucket, then in enumerate(program.launches):
        packed.add(bucket)
        assert packed.issuperset(then), f"buckets {set(then) - packed} are launched with bucket {bucket}, unpacked"
        launched += then
    assert sorted(launched) == list(range(len(program.plan.buckets))), f"launches {launched} when others are packed"


def verify_forward(program: ForwardProgram, *, inputs: int) -> None:
    """Raises AssertionError unless each piece of a forward reads only filled slots, and each output has one."""
    filled = set(range(inputs))
    for k, step in enumerate(program.steps):
        assert filled.issuperset(step.inputs), f"piece {k} reads empty slots {set(step.inputs) - filled}"
        filled = (filled | set(step.outputs)) - set(step.dead)
    for output in program.outputs:
        assert output is None or output in filled, f"output slot {output} is empty"
    read = [position for step in program.steps for position in step.reads]
    assert len(read) == len(set(read)), f"read first by several pieces: {read}"
