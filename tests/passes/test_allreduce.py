"""Inserted all-reduces: the arithmetic, the memory layout, and what stays as it was."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxddp.passes.allreduce import (
    ALL_REDUCE,
    GRADIENT_META,
    SCALE_META,
    WAIT,
    insert_allreduce,
    is_send,
    is_wait,
    scale_dtype,
    scale_dtypes,
)
from fxddp.passes.gradients import graph_outputs
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
    text,
)

SCALES = (1.0, 1 / 2, 1 / 3)


def check_values(gm: fx.GraphModule, plan: Any, inputs: list[Any]) -> None:
    """Rewrites a graph and compares its outputs, for several factors, bit by bit with the old ones times the factor."""
    before = snapshot(gm)
    expected = run_graph(gm, *inputs)
    planned = {grad.output: grad for grad in plan.grads}
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    verify(gm, plan=plan, before=before, way=WAY)
    for scale in SCALES:
        found = run_graph(gm, *inputs, *scales_for(scale_dtypes(plan), scale))
        assert len(found) == len(expected)
        for i, (value, old) in enumerate(zip(found, expected, strict=True)):
            if i not in planned:
                assert_same([value], [old])
                continue
            factor = torch.tensor(scale, dtype=scale_dtype(old.dtype))
            want = (old.reshape(-1) * factor).reshape(old.shape)
            assert_same([value], [want])
            assert value.stride() == planned[i].stride


def two_gradients() -> fx.GraphModule:
    """`a` of shape (3, 4) and `b` of shape (5,), and an output that is no gradient."""
    builder = Builder()
    x, g, saved = builder.tangent(4, 3), builder.tangent(5), builder.saved(2)
    a = builder.call(aten.t.default, builder.call(aten.mul.Tensor, x, 3))
    b = builder.call(aten.neg.default, g)
    return builder.finish([a, b, builder.call(aten.sin.default, saved)], {0: 0, 1: 1})


def test_divide_pack_sum_in_this_order() -> None:
    gm = two_gradients()
    plan = plan_by_hand(specs_of(gm, {0: (4, 1)}), [0, 1])
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    assert [node.target for node in calls(gm)] == [
        aten.mul.Tensor,
        aten.t.default,
        aten.neg.default,
        aten.mul.Tensor,
        aten.reshape.default,
        aten.mul.Tensor,
        aten.cat.default,
        ALL_REDUCE,
        WAIT,
        aten.as_strided.default,
        aten.as_strided.default,
        aten.sin.default,
    ]
    (send,) = (node for node in gm.graph.nodes if node.target is ALL_REDUCE)
    assert send.args[1:] == ("sum", GROUP)
    assert is_send(send)
    assert [is_wait(node) for node in send.users] == [True]


def test_a_lone_row_major_vector_is_neither_copied_nor_permuted() -> None:
    builder = Builder()
    gm = builder.finish([builder.tangent(5)])
    insert_allreduce(gm, plan=plan_of(gm), groups=[GROUP])
    assert [node.target for node in calls(gm)] == [aten.mul.Tensor, ALL_REDUCE, WAIT, aten.as_strided.default]


@pytest.mark.parametrize("buckets", [([0, 1],), ([1, 0],), ([0], [1]), ([1], [0]), ([1],)])
@pytest.mark.parametrize("turned", [False, True])
def test_values_are_the_gradients_times_the_factor(buckets: tuple[list[int], ...], turned: bool) -> None:
    gm = two_gradients()
    strides = {0: (1, 3)} if turned else {0: (4, 1)}
    check_values(gm, plan_by_hand(specs_of(gm, strides), *buckets), random_inputs(gm))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    ids=str,
)
@pytest.mark.parametrize("together", [False, True])
def test_each_dtype_with_scalars_and_empty_gradients(dtype: torch.dtype, together: bool) -> None:
    """A 0-d gradient keeps its dtype although the factor, 0-d as well, has a wider one."""
    builder = Builder()
    nodes = [builder.tangent(*shape, dtype=dtype) for shape in [(3, 4), (), (0, 2), (5,), (1, 1)]]
    gm = builder.finish([*nodes, builder.call(aten.sum.default, nodes[0])])
    order = [[0, 1, 2, 3, 4, 5]] if together else [[i] for i in range(6)]
    check_values(gm, plan_by_hand(specs_of(gm), *order), random_inputs(gm))


def test_only_empty_gradients() -> None:
    builder = Builder()
    gm = builder.finish([builder.tangent(0), builder.tangent(3, 0, 2)])
    check_values(gm, plan_by_hand(specs_of(gm), [0, 1]), random_inputs(gm))


def test_half_precision_averages_without_overflow() -> None:
    """Two ranks with 40,000 each: divided first, the sum is 40,000 and not infinite."""
    builder = Builder()
    gm = builder.finish([builder.tangent(2, dtype=torch.float16)])
    plan = plan_of(gm)
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    (found,) = run_graph(gm, torch.full((2,), 40_000, dtype=torch.float16), *scales_for(scale_dtypes(plan), 1 / 2))
    assert (found + found).tolist() == [40_000, 40_000]


def test_the_factor_is_as_wide_as_the_gradients_need() -> None:
    assert scale_dtype(torch.bfloat16) is torch.float32
    assert scale_dtype(torch.complex64) is torch.float32
    assert scale_dtype(torch.float64) is torch.float64
    assert scale_dtype(torch.complex128) is torch.float64
    builder = Builder()
    dtypes = [torch.complex128, torch.float16, torch.float64, torch.float32]
    gm = builder.finish([builder.tangent(2, dtype=dtype) for dtype in dtypes])
    plan = plan_of(gm)
    assert scale_dtypes(plan) == (torch.float32, torch.float64)
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    added = [node for node in gm.graph.find_nodes(op="placeholder") if SCALE_META in node.meta]
    assert [node.meta[SCALE_META] for node in added] == [torch.float32, torch.float64]
    assert [node.meta["val"].dtype for node in added] == [torch.float32, torch.float64]
    assert all(node.meta["val"].shape == () and node.meta["val"].device.type == "cpu" for node in added)
    assert list(gm.graph.find_nodes(op="placeholder"))[-2:] == added
    for bucket in plan.buckets:
        (scaled,) = (node for node in calls(gm) if node.args[0] is bucket_input(gm, bucket.grads[0].output))
        assert scaled.args[1] is added[scale_dtype(bucket.dtype) is torch.float64]


def bucket_input(gm: fx.GraphModule, position: int) -> fx.Node:
    return list(gm.graph.find_nodes(op="placeholder"))[position]


def test_parameters_channels_last_and_transposed() -> None:
    """Whatever strides the gradient comes in, it goes in those of the parameter."""
    weight = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    for stride in (weight.stride(), weight.contiguous().stride()):
        builder = Builder()
        gm = builder.finish(
            [
                builder.tangent(4, 3, 2, 2, stride=stride),
                builder.tangent(5, 6, stride=(1, 5)),
                builder.tangent(5, 6),
                builder.tangent(4, 1, 3, stride=(3, 77, 1)),
            ]
        )
        for parameters in ({0: weight.stride(), 1: (6, 1)}, {2: (1, 5)}, {3: (1, 9, 4)}):
            plan = plan_by_hand(specs_of(gm, parameters), [0, 1, 2, 3])
            check_values(fx.GraphModule(gm, _copy(gm.graph)), plan, random_inputs(gm))


def _copy(graph: fx.Graph) -> fx.Graph:
    import copy

    return copy.deepcopy(graph)


def test_every_new_node_knows_its_value() -> None:
    captured = capture(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)), torch.randn(2, 3, 6, 6))
    gm = captured.rewrite(cap=300).gm
    values = {}

    class Record(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if is_send(n) or is_wait(n):
                values[n] = self.env[n.args[0]]  # type: ignore[index]
            else:
                values[n] = super().run_node(n)
            return values[n]

    Record(gm).run(*captured.arguments, *scales_for([torch.float32], 1.0))
    for node in calls(gm):
        expected, found = values[node], node.meta["val"]
        if isinstance(expected, torch.Tensor):
            assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
            assert found.device == expected.device
            assert found.storage_offset() == expected.storage_offset()


def test_views_say_which_gradient_they_are() -> None:
    gm = two_gradients()
    plan = plan_by_hand(specs_of(gm), [1], [0])
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    a, b, other = graph_outputs(gm.graph)
    assert (a.meta[GRADIENT_META], b.meta[GRADIENT_META]) == ((1, 0), (0, 0))
    assert GRADIENT_META not in other.meta


def test_the_output_keeps_its_descriptors() -> None:
    gm = two_gradients()
    before = gm.graph.output_node().meta["desc"]
    insert_allreduce(gm, plan=plan_of(gm), groups=[GROUP])
    assert gm.graph.output_node().meta["desc"] is before


def test_no_bucket_leaves_the_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = two_gradients()
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda _: pytest.fail("touched"))
    before, code = text(gm), gm.code
    nodes = list(gm.graph.nodes)
    assert insert_allreduce(gm, plan=plan_by_hand(()), groups=[GROUP]) is gm
    assert (text(gm), gm.code) == (before, code)
    assert list(gm.graph.nodes) == nodes


def test_a_gradient_that_is_an_input_of_the_graph() -> None:
    """It is packed after the placeholders, the factors included."""
    for buckets in ([[0, 1, 2]], [[0], [1], [2]], [[1], [2, 0]]):
        builder = Builder()
        first, second = builder.tangent(4), builder.tangent(2)
        gm = builder.finish([first, second, builder.call(aten.neg.default, first)])
        check_values(gm, plan_by_hand(specs_of(gm), *buckets), random_inputs(gm))


def test_a_gradient_that_is_a_constant() -> None:
    builder = Builder()
    builder.tangent(4)
    gm = builder.finish([builder.constant("one", torch.arange(4.0))])
    check_values(gm, plan_of(gm), random_inputs(gm))


def test_a_graph_without_inputs() -> None:
    builder = Builder()
    fake = builder.constant("one", torch.arange(4.0))
    gm = builder.finish([builder.call(aten.neg.default, fake)])
    check_values(gm, plan_of(gm), [])


@pytest.mark.parametrize("buckets", [([0, 1],), ([0], [1]), ([1], [0])])
def test_one_node_as_the_gradient_of_two_parameters(buckets: tuple[list[int], ...]) -> None:
    """As for `a + b`: each is reduced, each has its own view."""
    builder = Builder()
    value = builder.call(aten.neg.default, builder.tangent(4))
    gm = builder.finish([value, value])
    check_values(gm, plan_by_hand(specs_of(gm), *buckets), random_inputs(gm))
    first, second = graph_outputs(gm.graph)
    assert first is not second


def test_a_node_that_is_the_gradient_of_a_parameter_and_of_an_input() -> None:
    """Only the parameter's is reduced: the input's stays local and unscaled."""
    builder = Builder()
    value = builder.call(aten.neg.default, builder.tangent(4))
    gm = builder.finish([value, value, builder.call(aten.sin.default, value)], {1: 0})
    check_values(gm, plan_of(gm), random_inputs(gm))
    assert graph_outputs(gm.graph)[0] is value


def test_collectives_of_the_model_are_not_ours() -> None:
    builder = Builder()
    mine = builder.call(WAIT, builder.call(ALL_REDUCE, builder.tangent(4), "sum", "tensor-parallel"))
    assert not is_send(mine.args[0])  # type: ignore[arg-type]
    assert not is_wait(mine)
    gm = builder.finish([builder.call(aten.neg.default, mine)])
    before = snapshot(gm)
    plan = plan_of(gm)
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    assert sends(gm) == [0]
    verify(gm, plan=plan, before=before, way=WAY)


def test_sizes_of_other_values_may_be_symbolic() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 4), dynamic=True)
    rewritten = captured.rewrite(cap=40)
    expected = captured.backward(*captured.arguments)
    dtypes = rewritten.program.scales
    assert_same(run_graph(rewritten.gm, *captured.arguments, *scales_for(dtypes, 1.0)), expected)


@settings(max_examples=100)
@given(backwards(), st.sampled_from([1, 8, 20, 40, 1000]))
def test_values_of_any_graph(drawn: Drawn, cap: int) -> None:
    gm, strides = drawn
    check_values(gm, plan_of(gm, cap, strides), random_inputs(gm))
