"""Which graphs count as the same, and which do not although they look it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxddp.passes.alike import structure


def traced(function: Callable[..., Any], *inputs: Tensor, symbolic: bool = False) -> fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs)


def renamed(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph with other names throughout, and other notes of where it comes from."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(gm.graph.nodes):
        copies[node] = graph.create_node(
            node.op,
            f"other_{i}" if node.op == "placeholder" else node.target,
            fx.map_arg(node.args, copies.__getitem__),
            fx.map_arg(node.kwargs, copies.__getitem__),
            f"other_{i}",
        )
        copies[node].meta = {**node.meta, "stack_trace": "elsewhere"}
    return fx.GraphModule(gm, graph)


def plain(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2 + y).sum(0)


X, Y = torch.ones(4, 6), torch.ones(4, 6)


def test_names_do_not_count() -> None:
    gm = traced(plain, X, Y)
    assert structure(gm) is not None
    assert structure(gm) == structure(renamed(gm)) == structure(traced(plain, X, Y))
    assert hash(structure(gm)) == hash(structure(renamed(gm)))


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: (x * 3 + y).sum(0),
        lambda x, y: (x * 2.0 + y).sum(0),  # 2 == 2.0
        lambda x, y: (x * 2 - y).sum(0),
        lambda x, y: (y * 2 + x).sum(0),
        lambda x, y: (x * 2 + x).sum(0),
        lambda x, y: (x * 2 + y).sum(1),
        lambda x, y: (x * 2 + y).sum([0], keepdim=True),
        lambda x, y: (x * 2 + y).sum(0, dtype=torch.float64),
        lambda x, y: ((x * 2 + y).sum(0), y),
    ],
)
def test_what_differs_in_operators_operands_or_constants(other: Callable[..., Any]) -> None:
    assert structure(traced(plain, X, Y)) != structure(traced(other, X, Y))


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(6, 4).t(),
        torch.ones(4, 6, dtype=torch.float64),
        torch.ones(1, 6),
        torch.ones(4, 6, device="meta"),
        torch.ones(25).as_strided((4, 6), (6, 1), 1),
    ],
)
def test_what_differs_in_inputs(x: Tensor) -> None:
    gm = traced(plain, X, Y)
    other = renamed(gm)
    first = next(iter(other.graph.nodes))
    mode = first.meta["val"].fake_mode
    first.meta["val"] = mode.from_tensor(torch.ones(4, 6))
    assert structure(gm) == structure(other)
    first.meta["val"] = mode.from_tensor(x)
    assert structure(gm) != structure(other)


def test_kinds_of_tensors_differ() -> None:
    gm = traced(plain, X, Y)
    other = renamed(gm)
    next(iter(other.graph.nodes)).meta["val"] = X  # a real one
    assert structure(gm) != structure(other)


def test_zeros_of_either_sign() -> None:
    assert structure(traced(lambda x: x + 0.0, X)) != structure(traced(lambda x: x + -0.0, X))


def test_symbols_are_compared_by_name() -> None:
    gm = traced(plain, X, Y, symbolic=True)
    other = renamed(gm)
    assert structure(gm) == structure(other)
    assert structure(gm) != structure(traced(plain, X, Y))
    first = next(iter(other.graph.nodes))
    first.meta["val"] = first.meta["val"].t()
    assert structure(gm) != structure(other)


def with_constant(constant: Tensor) -> fx.GraphModule:
    root, graph = torch.nn.Module(), fx.Graph()
    root.register_buffer("constant", constant)
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, graph.get_attr("constant"))),))
    return fx.GraphModule(root, graph)


def test_constants_must_be_the_same_tensor() -> None:
    one = torch.ones(3)
    assert structure(with_constant(one)) == structure(renamed(with_constant(one)))
    assert structure(with_constant(one)) != structure(with_constant(torch.ones(3)))


def test_what_cannot_be_compared_is_like_nothing() -> None:
    gm = traced(plain, X, Y)
    next(node for node in gm.graph.nodes if node.op == "call_function").kwargs = {"unknown": object()}
    assert structure(gm) is None
    gm = traced(plain, X, Y)
    next(node for node in gm.graph.nodes if node.op == "call_function").meta["unbacked_bindings"] = {}
    assert structure(gm) is None
