"""Which outputs of a backward graph are gradients of parameters: told by descriptors, never by names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.testing._internal.two_tensor import TwoTensor

from fxddp.passes.gradients import find_gradients, graph_outputs, output_node, tangent_positions
from fxddp.passes.plan import GradSpec
from tests.passes.graphs import Builder, Captured, aten, capture, capture_all, plain_outputs, specs_of


class Forward(nn.Module):
    """Named layers and a forward given as a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            if isinstance(layer, Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)
        self._forward = forward

    def forward(self, *inputs: Any) -> Any:
        return self._forward(self, *inputs)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def backward_of(*positions: int) -> Callable[[Any], None]:
    """A backward through some of the outputs."""
    return lambda results: torch.autograd.backward([results[i].sum() for i in positions])


# Identity


def test_each_parameter_has_one_gradient_with_its_facts() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    captured = capture(model, torch.randn(5, 4))
    grads = captured.grads()
    assert list(grads) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    outputs = graph_outputs(captured.backward.graph)
    order = list(captured.backward.graph.nodes)
    for name, parameter in model.named_parameters():
        grad = grads[name]
        assert captured.names[grad.input] == name
        assert (grad.shape, grad.stride) == (tuple(parameter.shape), parameter.stride())
        assert (grad.dtype, grad.device) == (parameter.dtype, parameter.device)
        assert order[grad.ready] is outputs[grad.output]
        assert grad.tangents == {0}
    assert grads["2.weight"].ready < grads["0.weight"].ready


def test_gradients_carry_the_values_that_autograd_accumulates() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    captured = capture(model, torch.randn(5, 4))
    values = captured.backward(*captured.arguments)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(values[captured.grads()[name].output], parameter.grad)


def test_tied_weights_have_one_gradient() -> None:
    table, head = nn.Embedding(7, 4), linear(4, 7)
    head.weight = table.weight
    captured = capture(Forward(lambda m, i: m.head(m.table(i)), table=table, head=head), torch.arange(5))
    assert len(captured.grads()) == 1
    (grad,) = captured.grads().values()
    assert grad.shape == (7, 4)


def test_a_parameter_used_twice_has_one_gradient() -> None:
    captured = capture(Forward(lambda m, x: m.a(m.a(x)), a=linear(4, 4)), torch.randn(5, 4))
    assert list(captured.grads()) == ["a.weight"]


def test_frozen_and_unused_parameters_and_buffers_have_none() -> None:
    model = Forward(
        lambda m, x: m.last(m.frozen(m.first(x)) + m.table),
        first=linear(4, 4),
        frozen=linear(4, 4).requires_grad_(False),
        unused=linear(4, 4),
        table=torch.randn(4),
        last=linear(4, 2),
    )
    captured = capture(model, torch.randn(5, 4))
    assert set(captured.grads()) == {"first.weight", "last.weight"}


def test_differentiable_inputs_and_buffers_are_no_parameters() -> None:
    table = torch.randn(4, requires_grad=True)
    captured = capture(
        Forward(lambda m, x: m.a(x + m.table), a=linear(4, 4), table=table), torch.randn(4, requires_grad=True)
    )
    outputs = graph_outputs(captured.backward.graph)
    assert sum(isinstance(value, fx.Node) for value in outputs) == 3
    assert list(captured.grads()) == ["a.weight"]


def test_activations_across_a_graph_break_are_no_parameters() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        torch._dynamo.graph_break()
        return m.b(y).sum() + m.a(y).sum()

    first, second = capture_all(Forward(forward, a=linear(4, 4), b=linear(4, 4)), torch.randn(5, 4))
    assert list(first.grads()) == ["a.weight"]
    assert sorted(second.grads()) == ["a.weight", "b.weight"]
    assert sum(isinstance(value, fx.Node) for value in graph_outputs(second.backward.graph)) == 3


def test_names_of_nodes_do_not_matter() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(5, 4, requires_grad=True))
    found = captured.grads()
    for i, node in enumerate(captured.backward.graph.nodes):
        node.name = f"tangents_{i}" if i % 2 else f"primals_{i}"
    assert captured.grads() == found


def test_parameters_not_asked_for_are_left_out() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(5, 4))
    some = {position: p for position, p in captured.parameters.items() if captured.names[position] != "0.bias"}
    found = find_gradients(captured.backward, parameters=some)
    assert {captured.names[grad.input] for grad in found} == {"0.weight", "1.weight", "1.bias"}
    assert find_gradients(captured.backward, parameters={}) == ()


def test_a_sparse_gradient_stays_out() -> None:
    model = Forward(lambda m, i: m.a(m.sparse(i)), sparse=nn.Embedding(9, 4, sparse=True), a=linear(4, 2))
    assert list(capture(model, torch.arange(3)).grads()) == ["a.weight"]


@pytest.mark.parametrize("what", ["dtype", "shape", "device", "constant", "None"])
def test_a_gradient_unlike_its_parameter_stays_out(what: str) -> None:
    builder = Builder()
    tangent = builder.tangent(4)
    other: Any = {
        "dtype": lambda: builder.call(aten._to_copy.default, tangent, dtype=torch.float64),
        "shape": lambda: builder.call(aten.sum.default, tangent),
        "device": lambda: builder.tangent(4, device="cuda"),
        "constant": lambda: 0.0,
        "None": lambda: None,
    }[what]()
    gm = builder.finish([tangent, other])
    with builder.mode:
        parameters = {0: torch.empty(4), 1: torch.empty(4)}
    assert [grad.input for grad in find_gradients(gm, parameters=parameters)] == [0]


def test_parameters_keep_their_strides() -> None:
    turned = nn.Parameter(torch.randn(3, 4).t())
    gapped = nn.Parameter(torch.randn(4, 6)[:, ::2])
    last = nn.Conv2d(3, 4, 3)
    last.weight = nn.Parameter(last.weight.detach().contiguous(memory_format=torch.channels_last))
    model = Forward(
        lambda m, x: (m.last(x).flatten() @ m.flat).sum() + (m.turned * m.gapped).sum(),
        last=last,
        flat=nn.Parameter(torch.randn(64)),
        turned=turned,
        gapped=gapped,
    )
    grads = capture(model, torch.randn(1, 3, 6, 6)).grads()
    assert grads["last.weight"].stride == last.weight.stride() == (27, 1, 9, 3)
    assert grads["turned"].stride == (1, 4)
    assert gapped.stride() == (6, 2)
    assert grads["gapped"].stride == (3, 1)


def test_outputs_of_a_graph_in_any_form() -> None:
    builder = Builder()
    tangent = builder.tangent(4)
    gm = builder.finish([tangent, None])
    assert graph_outputs(gm.graph) == (tangent, None)
    assert output_node(gm.graph).op == "output"
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.output(node)
    assert graph_outputs(graph) == (node,)


def test_a_graph_without_descriptors_has_no_gradients() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("primals_1"), graph.placeholder("tangents_1")))
    assert find_gradients(fx.GraphModule(nn.Module(), graph), parameters={0: torch.empty(2)}) == ()


# Which outputs a gradient depends on


def tangents(captured: Captured) -> dict[str, set[int]]:
    return {name.removesuffix(".weight"): set(grad.tangents) for name, grad in captured.grads().items()}


def two_heads(m: Any, x: Tensor) -> Any:
    h = m.trunk(x)
    return m.a(h), m.b(h)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_heads_depend_on_their_output_and_the_trunk_on_both(used: tuple[int, ...]) -> None:
    model = Forward(two_heads, trunk=linear(4, 4), a=linear(4, 2), b=linear(4, 3))
    captured = capture(model, torch.randn(5, 4), backward=backward_of(*used))
    assert tangents(captured) == {"trunk": {0, 1}, "a": {0}, "b": {1}}
    assert captured.undefined == {0, 1} - set(used)


def check_undefined(captured: Captured, model: nn.Module, used: set[str]) -> None:
    """The parameters in no used output are those whose outputs all lack a gradient, as autograd counts outputs."""
    lost = {name for name, outputs in tangents(captured).items() if outputs and outputs <= captured.undefined}
    assert lost == set(tangents(captured)) - used


def mutate_running_stats(m: Any, x: Tensor) -> Any:
    return m.a(m.norm(x)), m.b(x)


def mutate_input(m: Any, x: Tensor) -> Any:
    x = x * 1
    torch._dynamo.graph_break()
    x.mul_(2)
    return m.a(x), m.b(x)


def mutate_input_by_parameter(m: Any, x: Tensor) -> Any:
    x = x * 1
    torch._dynamo.graph_break()
    h = m.b(x.clone())
    x.add_(h)
    return m.a(x), h


def alias_outputs(m: Any, x: Tensor) -> Any:
    h = m.a(x)
    return h.view(-1), h.t(), m.b(x), x.view(-1), m.a(x).detach(), 7


def alias_of_an_output(m: Any, x: Tensor) -> Any:
    h = m.b(x)
    return h, h.t(), m.a(x)


def one_output_twice(m: Any, x: Tensor) -> Any:
    h, y = m.a(x), m.b(x)
    return y, h, y, None


def integers_and_constants_first(m: Any, x: Tensor) -> Any:
    return 3, x.argmax(), m.a(x), m.b(x)


@pytest.mark.parametrize(
    ("forward", "through", "used"),
    [
        (mutate_running_stats, 0, {"a", "norm", "norm.bias"}),
        (mutate_running_stats, 1, {"b"}),
        (mutate_input, 0, {"a"}),
        (mutate_input, 1, {"b"}),
        (mutate_input_by_parameter, 0, {"a", "b"}),
        (mutate_input_by_parameter, 1, {"b"}),
        (alias_outputs, 0, {"a"}),
        (alias_outputs, 1, {"a"}),
        (alias_outputs, 2, {"b"}),
        (alias_of_an_output, 1, {"b"}),
        (alias_of_an_output, 2, {"a"}),
        (one_output_twice, 0, {"b"}),
        (one_output_twice, 1, {"a"}),
        (one_output_twice, 2, {"b"}),
        (integers_and_constants_first, 2, {"a"}),
        (integers_and_constants_first, 3, {"b"}),
    ],
)
def test_positions_are_those_that_autograd_counts(forward: Callable[..., Any], through: int, used: set[str]) -> None:
    """Inputs that are written to, views and bases come back as outputs, too, and shift the others."""
    layers = {"a": linear(4, 4), "b": linear(4, 4)}
    if forward is mutate_running_stats:
        layers["norm"] = nn.BatchNorm1d(4)  # type: ignore[assignment]
    model = Forward(forward, **layers)
    captured = capture_all(model, torch.randn(4, 4, requires_grad=True), backward=backward_of(through))[-1]
    assert captured.undefined or forward is one_output_twice
    check_undefined(captured, model, used)


@pytest.fixture(scope="module")
def recorded() -> Any:
    """An operator with an ordered side effect, in forward and backward: it adds tokens to the graphs."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    @torch.library.custom_op("fxddp_test::recorded", mutates_args=())
    def recorded(x: Tensor) -> Tensor:
        return x.clone()

    recorded.register_fake(torch.empty_like)
    recorded.register_autograd(lambda ctx, grad: torch.ops.fxddp_test.recorded(grad) * 3)
    _register_effectful_op(torch.ops.fxddp_test.recorded.default, _EffectType.ORDERED)
    return torch.ops.fxddp_test.recorded


@pytest.mark.parametrize(("through", "used"), [(0, {"a"}), (1, {"b"})])
def test_tokens_are_no_outputs(recorded: Any, through: int, used: set[str]) -> None:
    model = Forward(lambda m, x: (recorded(m.a(x)), m.b(x)), a=linear(4, 4), b=linear(4, 3))
    captured = capture(model, torch.randn(5, 4), backward=backward_of(through))
    assert "Token" in type(captured.forward_outputs[0]).__name__
    check_undefined(captured, model, used)


@pytest.mark.parametrize(("through", "used"), [(1, {"a"}), (2, {"b"})])
def test_the_parts_of_a_tensor_subclass_are_one_output(through: int, used: set[str]) -> None:
    model = Forward(lambda m, x, y: (y * m.w, m.a(x), m.b(x)), w=linear(4, 4).weight, a=linear(4, 4), b=linear(4, 3))
    pair = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    captured = capture(model, torch.randn(5, 4), pair, backward=backward_of(0, through))
    assert len(captured.forward_outputs) > 3
    check_undefined(captured, model, used)  # `w` itself gets a subclass as gradient, which stays out


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_what_depends_on_a_subclass_depends_on_its_output(used: tuple[int, ...]) -> None:
    """A nested tensor made of a plain activation: the gradients behind it are plain."""

    def forward(m: Any, x: Tensor, offsets: Tensor) -> Any:
        return torch.nested.nested_tensor_from_jagged(m.a(x), offsets), m.b(x)

    def backward(results: Any) -> None:
        nested, plain = results
        torch.autograd.backward([(nested.values(), plain)[i].sum() for i in used])

    model = Forward(forward, a=linear(4, 4), b=linear(4, 3))
    captured = capture(model, torch.randn(5, 4), torch.tensor([0, 2, 5]), backward=backward)
    assert len(captured.forward_outputs) > 2
    assert tangents(captured) == {"a": {0}, "b": {1}}
    check_undefined(captured, model, {"ab"[i] for i in used})


def spec(gm: fx.GraphModule, outputs: int) -> GradSpec:
    with torch._subclasses.FakeTensorMode():
        parameters = {0: torch.empty(4)}
    (found,) = find_gradients(gm, parameters=parameters, forward_outputs=plain_outputs(outputs))
    return found


def test_an_unknown_tangent_counts_as_always_there() -> None:
    builder = Builder()
    one, two = builder.tangent(4), builder.tangent(4)
    gm = builder.finish([builder.call(aten.add.Tensor, one, two)])
    assert spec(gm, 2).tangents == {0, 1}
    assert spec(gm, 1).tangents == frozenset()
    assert spec(gm, 0).tangents == frozenset()
    assert tangent_positions(gm.graph, plain_outputs(1)) == {one: 0, two: None}


def test_a_constant_gradient_depends_on_nothing() -> None:
    builder = Builder()
    saved = builder.saved(4)
    builder.tangent(4)
    assert spec(builder.finish([saved]), 1).tangents == frozenset()


def test_many_outputs_have_a_mask_each() -> None:
    builder = Builder()
    inputs = [builder.tangent(4) for _ in range(200)]
    total = builder.call(aten.add.Tensor, inputs[3], inputs[197])
    assert spec(builder.finish([total]), 200).tangents == {3, 197}


def test_one_node_may_be_the_gradient_of_two_parameters() -> None:
    builder = Builder()
    tangent = builder.tangent(4)
    first, second = specs_of(builder.finish([tangent, tangent], {0: 5, 1: 3}))
    assert (first.output, first.input, second.output, second.input) == (0, 5, 1, 3)
    assert first.ready == second.ready
