"""Checks a backward graph after each pass. A failed check is a bug of a pass, never of the user's: AssertionError.

Checked: each planned gradient comes back reduced exactly once and at its place; each wait follows its launch; no
all-reduce is dead; everything that is not a planned gradient comes back as it was.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .allreduce import BUCKET_META, GRADIENT_META, SCALE_META, is_send, is_wait
from .compress import narrows, packed_bucket, reduced_by
from .forward import ForwardProgram
from .gradients import graph_outputs
from .plan import Bucket, BucketPlan, GradSpec
from .split import Program

aten = torch.ops.aten


def snapshot(gm: fx.GraphModule) -> tuple[Any, ...]:
    """The outputs of a graph by which later checks tell whether a pass kept them."""
    return graph_outputs(gm.graph)


def verify(gm: fx.GraphModule, *, plan: BucketPlan, before: Sequence[Any], wire: torch.dtype | None = None) -> None:
    """Raises AssertionError unless `gm` reduces what `plan` says, once each, and returns the rest as `before`.

    With `wire`, wider buckets must travel in that dtype and come back in their own.
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
        wait = reduced_by(done) if isinstance(done, fx.Node) else None
        assert isinstance(wait, fx.Node) and is_wait(wait), f"output {output} does not come from a wait"
        send = wait.args[0]
        assert isinstance(send, fx.Node) and send.meta[BUCKET_META] == where[0], f"output {output} is in {send}"
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


def _check_wire(send: fx.Node, done: Any, bucket: Bucket, wire: torch.dtype | None) -> None:
    """A bucket travels in the wire's dtype if that is narrower, in its own otherwise, and comes back in its own."""
    expected = wire if narrows(bucket.dtype, wire) else bucket.dtype
    travels, back = (node.meta["val"].dtype for node in (send, done))
    assert travels == expected, f"{send} sends {travels}, expected {expected}"
    assert back == bucket.dtype, f"bucket {bucket.index} comes back as {back}, its gradients are {bucket.dtype}"


def _packed(send: fx.Node, bucket: Bucket) -> list[Any]:
    """The values that an all-reduce sends, as they were before they were scaled; None for one that was not scaled."""
    flat, _ = packed_bucket(send)
    parts = flat.args[0] if flat.target is aten.cat.default else [flat]
    return [_unscaled(part, grad) for part, grad in zip(parts, bucket.grads, strict=False)]


def _unscaled(part: Any, grad: GradSpec) -> Any:
    while part.target in (aten.reshape.default, aten.permute.default):
        part = part.args[0]
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
        assert filled.issuperset(launched_from), f"bucket {step.bucket} is launched from an empty slot"
        filled -= set(step.dead)
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
