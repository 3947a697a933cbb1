"""`fxddp.passes.cost`: what graphs cost to compute and buckets cost to send."""

from typing import Literal

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxddp.passes.cost import Machine, Network, Work, graph_work, node_work, symbol_values


def traced(function, *inputs: Tensor, mode: Literal["fake", "symbolic"] = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def test_a_matrix_product_costs_its_multiplications_and_its_operands() -> None:
    work = graph_work(traced(torch.mm, torch.empty(3, 5), torch.empty(5, 7)))
    assert work == Work(flops=2 * 3 * 5 * 7, nbytes=4 * (3 * 5 + 5 * 7 + 3 * 7), kernels=1)


def test_elementwise_operations_are_fused_into_one() -> None:
    def chain(x: Tensor) -> Tensor:
        return ((x * 2).sin() + 1).cos()

    work = graph_work(traced(chain, torch.empty(10)))
    assert work == Work(flops=40, nbytes=2 * 40, kernels=1)


def test_what_a_product_reads_is_written_first() -> None:
    work = graph_work(traced(lambda x, w: (x + 1) @ w, torch.empty(4, 4), torch.empty(4, 4)))
    assert work == Work(flops=16 + 2 * 64, nbytes=4 * (2 * 16 + 3 * 16), kernels=2)


def test_views_are_free_and_a_broadcast_is_read_once() -> None:
    assert graph_work(traced(lambda x: x.t().reshape(2, 8).view(16), torch.empty(4, 4))).kernels <= 1
    assert graph_work(traced(lambda x: x.t(), torch.empty(4, 4))) == Work()
    work = graph_work(traced(lambda x: x.expand(100, 8) + 1, torch.empty(1, 8)))
    assert work.nbytes == 4 * (8 + 800)


def test_convolutions_and_their_gradients_are_counted_by_torch() -> None:
    conv = nn.Conv2d(3, 8, 3, bias=False)

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch.conv2d(x, w).sum(), (w,))

    x, w = torch.empty(2, 3, 8, 8, requires_grad=True), conv.weight.detach().requires_grad_()
    one = 2 * 2 * 8 * 6 * 6 * 3 * 9
    flops = int(graph_work(traced(step, x, w)).flops)
    assert 2 * one <= flops < 2.1 * one


def test_dynamic_sizes_stay_symbols_and_have_values() -> None:
    gm = traced(torch.mm, torch.empty(6, 5), torch.empty(5, 7), mode="symbolic")
    work = graph_work(gm)
    assert isinstance(work.flops, sympy.Expr)
    assert len(work.flops.free_symbols) == 3
    static = graph_work(traced(torch.mm, torch.empty(6, 5), torch.empty(5, 7)))
    assert work.at(symbol_values(gm)) == static
    assert sympy.diff(work.flops, *work.flops.free_symbols) == 2


def test_the_nodes_add_up_to_the_graph() -> None:
    gm = traced(lambda x, w: torch.relu(x @ w).sum(), torch.empty(4, 4), torch.empty(4, 4))
    assert sum(node_work(gm).values(), Work()) == graph_work(gm)
    machine = Machine(flops=1e9, memory=1e8, launch=1e-6)
    assert machine.seconds(Work(2e9, 3e8, 4)) == pytest.approx(2 + 3 + 4e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_a_ring_sends_each_part_round_twice(ranks: int) -> None:
    """Counted by hand: N-1 steps of reduce-scatter and N-1 of all-gather, each with 1/N of the bytes."""
    network = Network(ranks, bandwidth=1e9, latency=5e-6)
    steps = 2 * (ranks - 1)
    assert network.all_reduce(6e6) == pytest.approx(steps * (6e6 / ranks / 1e9 + 5e-6))
    assert network.sent(6e6) == pytest.approx(steps * 6e6 / ranks)


def test_the_price_of_sending_may_be_an_expression() -> None:
    nbytes = sympy.Symbol("nbytes", positive=True)
    price = Network(4, bandwidth=1000, latency=1).all_reduce(nbytes)
    assert float(price.subs(nbytes, 2000)) == 2 * 3 * 2000 / 4 / 1000 + 6
