"""Memory layout: the same strides as torch, and a flat bucket gives each tensor back."""

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxddp.passes.layout import contiguous_strides, gradient_strides, is_dense, lay_out, storage_order
from tests.passes.graphs import Builder, aten, capture, text
from tests.strategies import dense_strides

some = settings(max_examples=300)

Layout = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def dense_layouts(draw: st.DrawFn) -> Layout:
    """Shape and strides without gaps; dimensions of size 1 have any stride."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=5)))
    stride = dense_strides(shape, draw(st.permutations(range(len(shape)))))
    return shape, tuple(
        draw(st.integers(0, 200)) if size == 1 else step for size, step in zip(shape, stride, strict=True)
    )


@st.composite
def any_layouts(draw: st.DrawFn) -> Layout:
    """Shape and strides of any kind: with gaps, overlaps, or dense."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    return shape, tuple(draw(st.integers(0, 24)) for _ in shape)


def layouts() -> st.SearchStrategy[Layout]:
    return dense_layouts() | any_layouts()


@some
@given(st.lists(st.integers(0, 5), max_size=5))
def test_contiguous_strides_are_those_of_torch(shape: list[int]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@some
@given(layouts())
def test_dense_means_what_it_means_to_torch(layout: Layout) -> None:
    """`empty_like` keeps the strides of what is dense and of nothing else."""
    shape, stride = layout
    if 0 not in shape:  # an empty tensor has no memory to fill: whatever its strides, ours may be kept
        assert is_dense(shape, stride) == (torch.empty_like(torch.empty_strided(shape, stride)).stride() == stride)


@some
@given(dense_layouts())
def test_dense_layouts_are_dense(layout: Layout) -> None:
    assert is_dense(*layout)
    assert gradient_strides(*layout) == layout[1]


@some
@given(layouts())
def test_gradients_have_the_strides_that_autograd_gives_them(layout: Layout) -> None:
    """AccumulateGrad's layout contract, observed: `.grad` of a parameter whose gradient comes in another layout."""
    shape, stride = layout
    parameter = nn.Parameter(torch.empty_strided(shape, stride).fill_(0))
    odd = torch.zeros(2 * parameter.numel() + 1)[::2][: parameter.numel()].view(shape)  # never to be stolen
    (parameter * odd).sum().backward()
    assert parameter.grad is not None
    if parameter.numel():
        expected = gradient_strides(shape, stride)
        real = parameter.grad.stride()
        assert [r for r, size in zip(real, shape, strict=True) if size > 1] == [
            e for e, size in zip(expected, shape, strict=True) if size > 1
        ]


@some
@given(layouts())
def test_storage_order_runs_from_the_outermost_dimension_inwards(layout: Layout) -> None:
    shape, stride = layout
    order = storage_order(shape, stride)
    assert sorted(order) == list(range(len(shape)))
    steps = [stride[d] for d in order if shape[d] != 1]
    assert steps == sorted(steps, reverse=True)
    for a, b in itertools.pairwise(order):
        assert a < b or shape[b] == 1 or shape[a] == 1 or stride[a] != stride[b], "ties keep their order"


@some
@given(layouts(), st.integers(0, 3))
def test_a_flat_bucket_gives_each_tensor_back(layout: Layout, before: int) -> None:
    """Permuted into storage order and flattened, a tensor comes back by `as_strided` alone, wherever it lies."""
    shape, stride = layout
    stride = gradient_strides(shape, stride)
    value = torch.randn(shape)
    flat = value.permute(storage_order(shape, stride)).reshape(-1)
    bucket = torch.cat([torch.full((before,), torch.nan), flat, torch.full((2,), torch.nan)])
    back = bucket.as_strided(shape, stride, before)
    assert torch.equal(back, value)
    assert back.stride() == stride


@some
@given(dense_layouts())
def test_packing_a_gradient_that_lies_right_copies_nothing(layout: Layout) -> None:
    shape, stride = layout
    value = torch.empty_strided(shape, stride)
    flat = value.permute(storage_order(shape, stride)).reshape(-1)
    assert flat.data_ptr() == value.data_ptr()


# Layouts that only the example inputs tell


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 2))


def test_values_follow_the_strides_of_the_inputs() -> None:
    """As after inductor's layout optimisation: the forward saves convolutions channels-last."""
    captured = capture(convolution(), torch.randn(2, 3, 8, 8))
    gm = captured.backward
    traced = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = next(value.fake_mode for value in traced)
    with mode:
        inputs = [
            value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value for value in traced
        ]
    before = text(gm)
    outputs = gm(*captured.arguments)
    lay_out(gm, inputs)
    assert [node.meta["val"].stride() for node in gm.graph.find_nodes(op="placeholder")] == [i.stride() for i in inputs]
    real = [v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v for v in captured.arguments]
    assert text(gm) == before.replace("aten.view.default", "aten.reshape.default")
    for a, b in zip(gm(*real), outputs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-5)


def test_equal_strides_leave_the_graph_alone() -> None:
    gm = capture(convolution(), torch.randn(2, 3, 8, 8)).backward
    values = {node: node.meta.get("val") for node in gm.graph.nodes}
    before = text(gm)
    lay_out(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])
    assert text(gm) == before
    assert all(node.meta.get("val") is value for node, value in values.items())


def test_a_view_that_new_strides_do_not_allow_becomes_a_reshape() -> None:
    builder = Builder()
    saved = builder.saved(2, 3, 4, 5)
    gm = builder.finish([builder.call(aten.sin.default, builder.call(aten.view.default, saved, [2, 60]))])
    with builder.mode:
        channels_last = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    lay_out(gm, [channels_last])
    value = torch.randn(2, 3, 4, 5)
    (found,) = gm(value.contiguous(memory_format=torch.channels_last))
    assert torch.equal(found, value.reshape(2, 60).sin())


def test_real_constants_of_the_graph_stay() -> None:
    builder = Builder()
    saved = builder.saved(4, 4)
    constant = builder.constant("constant", torch.arange(4.0))
    gm = builder.finish([builder.call(aten.add.Tensor, saved, constant)])
    with builder.mode:
        turned = torch.empty(4, 4).t()
    lay_out(gm, [turned])
    assert gm.graph.output_node().args[0][0].meta["val"].stride() == (1, 4)  # type: ignore[index, union-attr]


def symbolic(env: ShapeEnv, name: str, hint: int) -> Any:
    """A size of dynamic shape."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=hint, source=source)


@pytest.mark.parametrize("hint", [7, 9])
def test_comparing_symbolic_strides_guards_on_nothing(hint: int) -> None:
    """Whether two symbols happen to be equal today says nothing about tomorrow's batch."""
    env = ShapeEnv()
    builder = Builder(env)
    a, b, other = symbolic(env, "a", 5), symbolic(env, "b", 7), symbolic(env, "c", hint)
    saved = builder.saved(a, b)
    gm = builder.finish([builder.call(aten.neg.default, saved)])
    with builder.mode:
        strided = torch.empty_strided((a, b), (other, 1))
    guards = len(env.guards)
    with patch.object(FakeTensorProp, "propagate_dont_convert_inputs") as propagate:
        lay_out(gm, [strided])
    assert propagate.call_count == 1
    assert len(env.guards) == guards
