"""Each invariant, once broken, is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from fxddp.passes.allreduce import ALL_REDUCE, BUCKET_META, GRADIENT_META, SCALE_META, WAIT, insert_allreduce, is_send
from fxddp.passes.gradients import graph_outputs
from fxddp.passes.plan import BucketPlan
from fxddp.passes.schedule import schedule
from fxddp.passes.split import Program, split
from fxddp.passes.verify import snapshot, verify, verify_program
from tests.passes.graphs import GROUP, WAY, Builder, aten, plan_by_hand, specs_of


def some_graph() -> fx.GraphModule:
    """Gradients of shapes (4,), (2, 3), (4,), () at outputs 0 to 3, one of an input at 4, None at 5."""
    builder = Builder()
    x, y = builder.tangent(4), builder.tangent(2, 3)
    a = builder.call(aten.neg.default, x)
    b = builder.call(aten.sin.default, y)
    c = builder.call(aten.cos.default, a)
    d = builder.call(aten.sum.default, b)
    local = builder.call(aten.exp.default, c)
    return builder.finish([a, b, c, d, local, None], {0: 0, 1: 1, 2: 2, 3: 3})


class Case:
    """A rewritten graph in order, to be spoilt; buckets [0, 1] and [2, 3]."""

    def __init__(self) -> None:
        self.gm = some_graph()
        self.graph = self.gm.graph
        self.before = snapshot(self.gm)
        self.plan = plan_by_hand(specs_of(self.gm), [0, 1], [2, 3])
        insert_allreduce(self.gm, plan=self.plan, groups=[GROUP])
        schedule(self.gm)

    @property
    def outputs(self) -> list[Any]:
        return list(graph_outputs(self.graph))

    def give(self, outputs: list[Any]) -> None:
        self.graph.output_node().args = (tuple(outputs),)

    def exchange(self, i: int, value: Any) -> None:
        outputs = self.outputs
        outputs[i] = value
        self.give(outputs)

    def send(self, i: int) -> fx.Node:
        return next(node for node in self.graph.nodes if is_send(node) and node.meta[BUCKET_META] == i)

    def wait(self, i: int) -> fx.Node:
        return next(iter(self.send(i).users))

    def verify(self) -> None:
        verify(self.gm, plan=self.plan, before=self.before, way=WAY)


def test_a_right_graph_passes() -> None:
    case = Case()
    case.verify()
    gm = some_graph()
    verify(gm, plan=plan_by_hand(()), before=snapshot(gm), way=WAY)
    with pytest.raises(AssertionError):
        verify(gm, plan=case.plan, before=snapshot(gm), way=WAY)


def drop_a_reduce(case: Case) -> None:
    case.exchange(0, case.before[0])


def drop_an_all_reduce(case: Case) -> None:
    send = case.send(0)
    case.wait(0).replace_all_uses_with(send.args[0])  # type: ignore[arg-type]
    case.graph.erase_node(case.wait(0))
    case.graph.erase_node(send)


def reduce_twice(case: Case) -> None:
    wait = case.wait(0)
    with case.graph.inserting_after(wait):
        again = case.graph.call_function(ALL_REDUCE, (wait, "sum", GROUP))
    again.meta[BUCKET_META] = 0
    with case.graph.inserting_after(again):
        done = case.graph.call_function(WAIT, (again,))
    wait.replace_all_uses_with(done, delete_user_cb=lambda user: user is not again)


def reduce_twice_unseen(case: Case) -> None:
    """The second all-reduce pretends to be the model's own."""
    reduce_twice(case)
    again = next(node for node in case.wait(0).users if node.target is ALL_REDUCE)
    del again.meta[BUCKET_META]


def read_the_sent_bucket(case: Case) -> None:
    """A view of the all-reduce itself, not of what was waited for."""
    case.outputs[0].args = (case.send(0), *case.outputs[0].args[1:])


def wait_before_launch(case: Case) -> None:
    case.send(0).prepend(case.wait(0))


def dead_all_reduce(case: Case) -> None:
    """The views read the packed bucket: nothing uses what came back."""
    case.wait(0).replace_all_uses_with(case.send(0).args[0])  # type: ignore[arg-type]


def no_wait(case: Case) -> None:
    send, wait = case.send(0), case.wait(0)
    wait.replace_all_uses_with(send)
    case.graph.erase_node(wait)


def swap_outputs(case: Case) -> None:
    a, b, c, *rest = case.outputs
    case.give([c, b, a, *rest])


def swap_outputs_and_their_marks(case: Case) -> None:
    """Only the all-reduce they come from tells them apart."""
    swap_outputs(case)
    a, _, c, *_ = case.outputs
    a.meta[GRADIENT_META], c.meta[GRADIENT_META] = c.meta[GRADIENT_META], a.meta[GRADIENT_META]


def swap_in_the_bucket(case: Case) -> None:
    flat: Any = case.send(0).args[0]
    flat.args = (flat.args[0][::-1],)


def pack_another(case: Case) -> None:
    (scaled,) = (node for node in case.before[0].users if node.target is aten.mul.Tensor)
    scaled.args = (case.before[2], scaled.args[1])


def do_not_scale(case: Case) -> None:
    for node in list(case.graph.nodes):
        if node.target is aten.mul.Tensor and node.args[0] is case.before[0]:
            node.replace_all_uses_with(case.before[0])


def scale_twice(case: Case) -> None:
    for node in list(case.graph.nodes):
        if node.target is aten.mul.Tensor and node.args[0] is case.before[0]:
            with case.graph.inserting_before(node):
                node.args = (case.graph.call_function(aten.mul.Tensor, node.args), node.args[1])


def forget_a_part(case: Case) -> None:
    flat: Any = case.send(0).args[0]
    flat.args = (flat.args[0][:1],)


def read_at_another_place(case: Case) -> None:
    view = case.outputs[1]
    view.args = (*view.args[:3], view.args[3] + 1)


def read_in_other_strides(case: Case) -> None:
    view = case.outputs[1]
    view.args = (*view.args[:2], [1, 2], view.args[3])


def change_a_foreign_output(case: Case) -> None:
    case.exchange(4, case.before[2])


def replace_none(case: Case) -> None:
    case.exchange(5, case.before[2])


def forget_an_output(case: Case) -> None:
    case.give(case.outputs[:-1])


def return_a_gradient_twice(case: Case) -> None:
    case.exchange(4, case.outputs[0])


def bucket_of_another_index(case: Case) -> None:
    case.send(0).meta[BUCKET_META] = 1


def use_before_definition(case: Case) -> None:
    next(iter(case.graph.nodes)).append(case.before[4])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_a_reduce, "output 0 is not"),
        (drop_an_all_reduce, "all-reduces"),
        (reduce_twice, "all-reduces"),
        (reduce_twice_unseen, "output 0 does not come from a wait"),
        (read_the_sent_bucket, "2 users"),
        (wait_before_launch, "stands before"),
        (dead_all_reduce, "is dead"),
        (no_wait, "0 waits"),
        (swap_outputs, "output 0 is not"),
        (swap_outputs_and_their_marks, "output 0 is in"),
        (swap_in_the_bucket, "sends"),
        (pack_another, "sends"),
        (do_not_scale, "sends"),
        (scale_twice, "sends"),
        (forget_a_part, "sends"),
        (read_at_another_place, "output 1 is read at"),
        (read_in_other_strides, "output 1 is read at"),
        (change_a_foreign_output, "output 4 was"),
        (replace_none, "output 5 was None"),
        (forget_an_output, "5 outputs, 6 expected"),
        (return_a_gradient_twice, "output 4 was"),
        (bucket_of_another_index, "all-reduces"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_spoilt_graph_is_found(spoil: Callable[[Case], None], message: str) -> None:
    case = Case()
    spoil(case)
    with pytest.raises(AssertionError, match=message):
        case.verify()


def test_a_graph_that_is_none_is_found() -> None:
    case = Case()
    use_before_definition(case)
    with pytest.raises(RuntimeError, match="before it has been defined"):
        case.verify()


def test_one_gradient_as_two_outputs_needs_two_views() -> None:
    builder = Builder()
    value = builder.call(aten.neg.default, builder.tangent(4))
    gm = builder.finish([value, value])
    before = snapshot(gm)
    plan = plan_by_hand(specs_of(gm), [0, 1])
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    verify(gm, plan=plan, before=before, way=WAY)
    first, _ = graph_outputs(gm.graph)
    gm.graph.output_node().args = ((first, first),)
    with pytest.raises(AssertionError):
        verify(gm, plan=plan, before=before, way=WAY)


# Programs


def some_program() -> tuple[Program, BucketPlan]:
    case = Case()
    program, _ = split(case.gm, plan=case.plan)
    return program, case.plan


def with_step(program: Program, k: int, **changes: Any) -> Program:
    steps = list(program.steps)
    steps[k] = replace(steps[k], **changes)
    return replace(program, steps=tuple(steps))


def reverse_launches(program: Program) -> Program:
    first, second, *rest = program.steps
    return replace(program, steps=(replace(first, bucket=second.bucket), replace(second, bucket=first.bucket), *rest))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (reverse_launches, "launches"),
        (lambda p: with_step(p, 0, bucket=None), "launches"),
        (lambda p: with_step(p, 1, bucket=0), "launches"),
        (lambda p: replace(p, steps=p.steps[:1] + p.steps), "launches"),
        (lambda p: with_step(p, 0, inputs=(p.slots - 1,)), "piece 0 reads empty slots"),
        (lambda p: with_step(p, 0, dead=tuple(range(p.slots))), "empty"),
        (lambda p: with_step(p, 0, flat=p.slots), "bucket 0 is launched from an empty slot"),
        (lambda p: replace(p, steps=(p.steps[0], *p.steps[2:], p.steps[1])), "empty"),
        (lambda p: with_step(p, -1, dead=(p.outputs[4],)), "output slot . is empty"),
        (lambda p: replace(p, outputs=p.outputs[:-1]), "5 outputs, 6 expected"),
        (lambda p: replace(p, outputs=((0, 1), *p.outputs[1:])), "planned"),
        (lambda p: replace(p, outputs=(None, *p.outputs[1:])), "planned"),
    ],
)
def test_a_spoilt_program_is_found(spoil: Callable[[Program], Program], message: str) -> None:
    program, _ = some_program()
    verify_program(program, outputs=6)
    with pytest.raises(AssertionError, match=message):
        verify_program(spoil(program), outputs=6)


def test_the_factor_is_told_from_other_scalars() -> None:
    """A gradient that is itself a product with a 0-d tensor is taken for what it is."""
    builder = Builder()
    value = builder.call(aten.mul.Tensor, builder.tangent(4), builder.saved())
    gm = builder.finish([value])
    before = snapshot(gm)
    plan = plan_by_hand(specs_of(gm), [0])
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    verify(gm, plan=plan, before=before, way=WAY)
    scale = next(node for node in gm.graph.nodes if SCALE_META in node.meta)
    assert scale.meta[SCALE_META] is torch.float32
