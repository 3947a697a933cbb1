"""The order of a scheduled backward: each bucket as early as it can be, waits last, side effects where they were."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxddp.passes.allreduce import ALL_REDUCE, BUCKET_META, WAIT, insert_allreduce, is_send, is_wait, scale_dtypes
from fxddp.passes.plan import BucketPlan
from fxddp.passes.schedule import schedule
from fxddp.passes.verify import snapshot, verify
from tests.passes.graphs import (
    GROUP,
    WAY,
    Builder,
    Drawn,
    assert_same,
    aten,
    backwards,
    calls,
    capture,
    plan_by_hand,
    plan_of,
    random_inputs,
    run_graph,
    scales_for,
    sends,
    specs_of,
)


def prepared(gm: fx.GraphModule, plan: BucketPlan) -> fx.GraphModule:
    return insert_allreduce(gm, plan=plan, groups=[GROUP])


def ancestors(node: fx.Node) -> set[fx.Node]:
    found = {node}
    stack = [node]
    while stack:
        new = set(stack.pop().all_input_nodes) - found
        found |= new
        stack += new
    return found


def check_order(before: Sequence[fx.Node], gm: fx.GraphModule) -> None:
    """What `schedule` promises for a graph without side effects, given its nodes before."""
    after = list(gm.graph.nodes)
    assert set(after) == set(before)
    assert len(after) == len(before)
    place = {node: i for i, node in enumerate(before)}
    launches = [i for i, node in enumerate(after) if is_send(node)]
    assert [after[i].meta[BUCKET_META] for i in launches] == list(range(len(launches)))
    start = sum(node.op == "placeholder" for node in after)
    assert all(node.op == "placeholder" for node in after[:start])
    done = set(after[:start])
    for end in launches:
        segment = after[start : end + 1]
        assert set(segment) == ancestors(after[end]) - done, "just what the bucket needs"
        assert segment == sorted(segment, key=place.__getitem__), "in the old order"
        done |= set(segment)
        start = end + 1
    rest = after[start:]
    waits = [i for i, node in enumerate(rest) if is_wait(node)]
    early = rest[: waits[0]] if waits else rest
    late = {node for node in before if any(is_wait(parent) for parent in ancestors(node))}
    assert set(early) & late <= {after[-1]}, "nothing that waits stands before what does not"
    assert late == set(rest[len(early) :])
    assert early == sorted(early, key=place.__getitem__)


@settings(max_examples=150)
@given(backwards(), st.sampled_from([1, 8, 20, 40, 1000]))
def test_any_graph(drawn: Drawn, cap: int) -> None:
    gm, strides = drawn
    inputs = random_inputs(gm)
    expected = run_graph(gm, *inputs)
    plan = plan_of(gm, cap, strides)
    old = snapshot(gm)
    prepared(gm, plan)
    before = list(gm.graph.nodes)
    assert schedule(gm) is gm
    if plan.buckets:
        check_order(before, gm)
    else:
        assert list(gm.graph.nodes) == before
    verify(gm, plan=plan, before=old, way=WAY)
    assert_same(run_graph(gm, *inputs, *scales_for(scale_dtypes(plan), 1.0)), expected)


@settings(max_examples=150)
@given(backwards(writes=True), st.sampled_from([1, 8, 20, 40, 1000]))
def test_writes_keep_their_place_among_reads(drawn: Drawn, cap: int) -> None:
    """The outputs are the same although memory is written to in between, through views too."""
    gm, strides = drawn
    inputs = random_inputs(gm)
    expected = run_graph(gm, *inputs)
    plan = plan_of(gm, cap, strides)
    schedule(prepared(gm, plan))
    gm.graph.lint()
    assert_same(run_graph(gm, *inputs, *scales_for(scale_dtypes(plan), 1.0)), expected)


@settings(max_examples=75)
@given(backwards() | backwards(writes=True), st.sampled_from([1, 20, 1000]))
def test_a_scheduled_graph_is_in_order(drawn: Drawn, cap: int) -> None:
    gm, strides = drawn
    schedule(prepared(gm, plan_of(gm, cap, strides)))
    once = list(gm.graph.nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fx.GraphModule, "recompile", lambda _: pytest.fail("touched"))
        schedule(gm)
    assert list(gm.graph.nodes) == once


def chain() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """Gradients `a` then `b`, with work before, between and after that only the gradient of the input needs."""
    builder = Builder()
    x = builder.tangent(4)
    nodes: dict[str, fx.Node] = {}
    nodes["first"] = builder.call(aten.exp.default, x)
    nodes["a"] = builder.call(aten.neg.default, x)
    nodes["second"] = builder.call(aten.sin.default, nodes["first"])
    nodes["h"] = builder.call(aten.cos.default, x)
    nodes["b"] = builder.call(aten.abs.default, nodes["h"])
    nodes["third"] = builder.call(aten.mul.Tensor, nodes["second"], nodes["b"])
    return builder.finish([nodes["third"], nodes["a"], nodes["b"]], {1: 0, 2: 1}), nodes


def test_as_drawn_in_the_module() -> None:
    gm, n = chain()
    prepared(gm, plan_of(gm))
    schedule(gm)
    order = [node for node in calls(gm) if node in n.values() or node.target in (ALL_REDUCE, WAIT)]
    a, b = (node for node in order if is_send(node))
    (wait_a,), (wait_b,) = a.users, b.users
    assert order == [n["a"], a, n["h"], n["b"], b, n["first"], n["second"], n["third"], wait_a, wait_b]


@pytest.mark.parametrize("buckets", [([1], [2]), ([2], [1])])
def test_launches_follow_the_plan_not_the_graph(buckets: tuple[list[int], ...]) -> None:
    gm, _ = chain()
    plan = plan_by_hand(specs_of(gm), *buckets)
    prepared(gm, plan)
    before = list(gm.graph.nodes)
    schedule(gm)
    assert sends(gm) == [0, 1]
    check_order(before, gm)


def test_without_all_reduces_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _ = chain()
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda _: pytest.fail("touched"))
    before, code = list(gm.graph.nodes), gm.code
    assert schedule(gm) is gm
    assert list(gm.graph.nodes) == before
    assert gm.code == code


def test_the_code_follows_the_graph() -> None:
    gm, _ = chain()
    prepared(gm, plan_of(gm))
    code = gm.code
    schedule(gm)
    assert gm.code != code
    assert gm.code == fx.GraphModule(nn.Module(), gm.graph).code


def test_a_real_backward() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    captured = capture(model, torch.randn(2, 3, 6, 6, requires_grad=True))
    gm = captured.backward
    expected = gm(*captured.arguments)
    plan = plan_of(gm, strides={grad.output: grad.stride for grad in captured.grads().values()})
    prepared(gm, plan)
    before = list(gm.graph.nodes)
    schedule(gm)
    check_order(before, gm)
    assert_same(run_graph(gm, *captured.arguments, *scales_for(scale_dtypes(plan), 1.0)), expected)


# Note [side effects]


def order_of(gm: fx.GraphModule, *nodes: Any) -> list[Any]:
    """The given nodes in the order in which they stand now."""
    return [node for node in gm.graph.nodes if node in nodes]


def test_random_operators_keep_their_order() -> None:
    """The second bucket's dropout must not draw before the first one's, nor before the one that no bucket needs."""
    builder = Builder()
    x = builder.tangent(4)
    local = builder.call(aten.bernoulli.p, x, 0.5)
    one = builder.call(aten.bernoulli.p, x, 0.5)
    plain = builder.call(aten.neg.default, x)
    two = builder.call(aten.bernoulli.p, x, 0.5)
    gm = builder.finish([local, one, plain, two], {1: 1, 2: 2, 3: 3})
    plan = plan_by_hand(specs_of(gm), [3], [2], [1])
    prepared(gm, plan)
    inputs = random_inputs(gm)
    torch.manual_seed(0)
    expected = run_graph(gm, *inputs, *scales_for([torch.float32], 1.0))
    schedule(gm)
    assert order_of(gm, local, one, two, plain) == [local, one, two, plain]
    torch.manual_seed(0)
    assert_same(run_graph(gm, *inputs, *scales_for([torch.float32], 1.0)), expected)


def test_a_read_before_a_write_stays_before_it() -> None:
    """`a` reads what is written before `b`, and `b` is launched first."""
    builder = Builder()
    x = builder.tangent(4)
    buffer = builder.call(aten.clone.default, x)
    a = builder.call(aten.sin.default, buffer)
    write = builder.call(aten.mul_.Tensor, buffer, 2)
    b = builder.call(aten.cos.default, buffer)
    gm = builder.finish([a, b])
    prepared(gm, plan_by_hand(specs_of(gm), [1], [0]))
    schedule(gm)
    assert order_of(gm, a, write, b) == [a, write, b]


def test_a_read_through_a_view_counts() -> None:
    builder = Builder()
    x = builder.tangent(2, 2)
    buffer = builder.call(aten.clone.default, x)
    view = builder.call(aten.t.default, buffer)
    a = builder.call(aten.sin.default, view)
    write = builder.call(aten.mul_.Tensor, buffer, 2)
    other = builder.call(aten.t.default, view)
    b = builder.call(aten.cos.default, other)
    gm = builder.finish([a, b])
    prepared(gm, plan_by_hand(specs_of(gm), [1], [0]))
    schedule(gm)
    assert order_of(gm, a, write, b) == [a, write, b]


def test_a_write_into_a_view_counts_for_its_base() -> None:
    builder = Builder()
    buffer = builder.call(aten.clone.default, builder.tangent(2, 2))
    view = builder.call(aten.t.default, buffer)
    a = builder.call(aten.sin.default, buffer)
    write = builder.call(aten.mul_.Tensor, view, 2)
    b = builder.call(aten.cos.default, buffer)
    gm = builder.finish([a, b])
    prepared(gm, plan_by_hand(specs_of(gm), [1], [0]))
    schedule(gm)
    assert order_of(gm, a, write, b) == [a, write, b]


def test_a_write_into_a_list_counts() -> None:
    builder = Builder()
    x = builder.tangent(4)
    buffer = builder.call(aten.clone.default, x)
    a = builder.call(aten.sin.default, buffer)
    write = builder.graph.call_function(aten._foreach_mul_.Scalar, ([buffer], 2.0))
    write.meta["val"] = None
    b = builder.call(aten.cos.default, buffer)
    gm = builder.finish([a, b])
    prepared(gm, plan_by_hand(specs_of(gm), [1], [0]))
    schedule(gm)
    assert order_of(gm, a, write, b) == [a, write, b]


def test_an_input_written_at_the_end_is_written_after_its_reads() -> None:
    """AOTAutograd's epilogue: `copy_` into an input that the backward changes."""
    builder = Builder()
    x, state = builder.tangent(2, 2), builder.saved(2, 2)
    view = builder.call(aten.t.default, state)
    local = builder.call(aten.mul.Tensor, x, view)
    new = builder.call(aten.add.Tensor, state, 1)
    a = builder.call(aten.neg.default, x)
    write = builder.call(aten.copy_.default, state, new)
    drop = builder.call(aten.bernoulli.p, x, 0.5)  # chained to the write
    gm = builder.finish([local, a, drop], {1: 1, 2: 2})
    prepared(gm, plan_by_hand(specs_of(gm), [2], [1]))
    schedule(gm)
    assert order_of(gm, local, new, write, drop) == [local, new, write, drop]


def test_collectives_of_the_model_are_work_like_any_other() -> None:
    """What depends on the model's own wait is not late."""
    builder = Builder()
    x = builder.tangent(4)
    mine = builder.call(WAIT, builder.call(ALL_REDUCE, x, "sum", "tensor-parallel"))
    a = builder.call(aten.neg.default, mine)
    b = builder.call(aten.sin.default, a)
    gm = builder.finish([b, a], {1: 0})
    prepared(gm, plan_of(gm))
    before = list(gm.graph.nodes)
    schedule(gm)
    check_order(before, gm)
    assert [node.target for node in calls(gm)].count(WAIT) == 2
