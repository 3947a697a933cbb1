"""Models with collectives of their own, forward and backward: theirs and ours run in one order on every rank.

torch's SyncBatchNorm refuses CPU tensors: a small one over functional collectives stands in for it in compiled graphs.
Dynamo does not trace torch's own (torch 2.13: a mask inside makes sizes that depend on data): it runs between compiled
graphs, here with its own autograd function and collectives over kernels for the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchsFunction
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxddp.passes.allreduce import is_collective, is_send
from tests.live.lab import compiled, counted_collectives, data, error_of, expect, expect_equal, gradients, seeded
from tests.live.pool import Pool
from tests.passes.graphs import capture, on_cuda


def everyone() -> Any:
    return dist.group.WORLD


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks, whose gradient is summed over the ranks as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", everyone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return funcol.all_reduce(gradient.contiguous(), "sum", everyone())


class SyncNorm(nn.Module):
    """Batch normalisation over the batches of all ranks."""

    running_mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0] * dist.get_world_size()
        mean = SumOverRanks.apply(x.sum(0)) / count
        square = SumOverRanks.apply((x * x).sum(0)) / count
        self.running_mean.lerp_(mean.detach(), 0.1)
        return (x - mean) / (square - mean * mean + 1e-5).sqrt() * self.weight + self.bias


class Net(nn.Module):
    """Normalised layers and two branches, which this rank computes in the order it was told."""

    def __init__(self, order: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        self.order = order
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 12, bias=False)
        self.norms = nn.ModuleList([SyncNorm(16), SyncNorm(12)])
        self.branches = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])

    def forward(self, x: Tensor, *, eager: bool = False) -> Tensor:
        x = self.norms[0](self.first(x)).relu()
        if eager:
            torch._dynamo.graph_break()
        x = self.norms[1](self.second(x)).relu()
        found = {k: self.branches[k](x).tanh() for k in self.order}
        return torch.cat([found[0], found[1] * 2], 1)


def loss_of(model: Any, i: int, **options: Any) -> Tensor:
    return model(data(i, 6, 8), **options).square().mean()


def normalised(rank: int, world: int, differs: str, split: bool, inner: str) -> None:
    orders = ((0, 1), (1, 0), (0, 1)) if differs == "order" else ((0, 1),) * 3
    options = {"eager": differs == "break" and rank == 0}
    module = seeded(0, lambda: Net(orders[rank]))
    model, backend = compiled(module, split=split, inner=inner, forward_sync_buffers=differs != "break")
    reference = seeded(0, lambda: Net(orders[rank]))
    stock = DistributedDataParallel(reference, find_unused_parameters=True)
    for i in range(5):
        module.zero_grad()
        reference.zero_grad()
        loss_of(model, i, **options).backward()
        loss_of(stock, i, **options).backward()
        expect_equal(gradients(module), gradients(reference), f"step {i}", tol=1e-5)
    expect_equal(dict(module.named_buffers()), dict(reference.named_buffers()), "buffers", tol=1e-5)
    inside = [step.collectives for site in backend.sites for step in site.compilation.backward.program.steps]  # type: ignore[union-attr]
    expect(sum(inside) >= 4, f"{inside} collectives in the backward: this tests nothing")


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("differs", ["", "order", "break"])
def test_synchronised_normalisation(pool: Pool, differs: str, split: bool):
    pool.run(normalised, differs, split, "aot_eager")


@pytest.mark.parametrize("split", [True, False])
def test_synchronised_normalisation_by_inductor(pool: Pool, split: bool):
    pool.run(normalised, "", split, "inductor")


def test_synchronised_normalisation_on_three_ranks(pool3: Pool):
    pool3.run(normalised, "order", True, "aot_eager")


def buffers_of_other_graphs(rank: int, world: int) -> str:
    model, _ = compiled(seeded(0, Net))
    return str(error_of(lambda: loss_of(model, 0, eager=rank == 0).backward()))  # rank 0 does not wait in forward


def test_buffers_of_other_graphs_are_refused(pool: Pool):
    for message in pool.run(buffers_of_other_graphs):
        assert "only rank 1 has norms.1.running_mean (12,)" in message
        assert "Use fxddp.DistributedDataParallel" in message


# ---- torch's own -----------------------------------------------------------------------------------------------------


def _over(x: Tensor) -> list[int]:
    return [i for i in range(x.dim()) if i != 1]


def _along(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.mean(_over(x)), (x.var(_over(x), correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(  # noqa: PLR0917 (as in aten)
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    n: Tensor,
) -> tuple[Tensor, Tensor]:
    share = (n / n.sum())[:, None]
    mean = (means * share).sum(0)
    var = ((invstds.reciprocal().square() - eps + (means - mean).square()) * share).sum(0)
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(var * n.sum() / (n.sum() - 1), momentum)
    return mean, (var + eps).rsqrt()


def batch_norm_elemt(  # noqa: PLR0917 (as in aten)
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    return (x - _along(mean, x)) * _along(invstd * weight, x) + _along(bias, x)


def batch_norm_backward_reduce(
    g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, with_x = g.sum(_over(g)), (g * (x - _along(mean, x))).sum(_over(g))
    return total, with_x, with_x * invstd, total.clone()


def batch_norm_backward_elemt(  # noqa: PLR0917 (as in aten)
    g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, total: Tensor, with_x: Tensor, counts: Tensor
) -> Tensor:
    n = counts.sum()
    along_x = (x - _along(mean, x)) * _along(invstd.square() * with_x / n, x)
    return (g - _along(total / n, x) - along_x) * _along(invstd * weight, x)


KERNELS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


@contextmanager
def kernels_on_the_cpu() -> Iterator[None]:
    """Inside, the operators of torch's SyncBatchNorm, which exist for GPUs alone, work on the CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for kernel in KERNELS:
            for key in ("CPU", "Meta"):
                library.impl(kernel.__name__, kernel, key)
        yield


class TorchsSyncBatchNorm(nn.SyncBatchNorm):
    """Without the check that refuses CPU tensors."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        state = (self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum)
        return TorchsFunction.apply(x, *state, everyone(), dist.get_world_size())


class StockOnCpu(DistributedDataParallel):
    """Without the check that refuses SyncBatchNorm on CPUs."""

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        pass


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 3)
        self.norms = nn.ModuleList([TorchsSyncBatchNorm(6), TorchsSyncBatchNorm(4)])
        self.last = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.first(x)).relu()
        return self.last(self.norms[1](self.second(x)).relu().flatten(1))


def step_of(model: Any, no_sync: Any, batch: Tensor, *, accumulate: bool) -> list[str]:
    """One step; returns the collectives of its last forward and backward."""
    model.zero_grad()
    if accumulate:
        with no_sync():
            model(batch * 2).square().mean().backward()
    with counted_collectives() as started:
        model(batch).square().mean().backward()
    return started


def torchs_own(rank: int, world: int, split: bool, accumulate: bool) -> None:
    with kernels_on_the_cpu():
        module, reference = seeded(0, ConvNet), seeded(0, ConvNet)
        model, backend = compiled(module, split=split)
        stock = StockOnCpu(reference)
        normalised = {name for name, _ in module.named_parameters() if name.startswith("norms")}
        for i in range(4):
            batch = data(i, 3 + rank, 2, 8, 8)  # of other sizes on other ranks
            step_of(stock, stock.no_sync, batch, accumulate=accumulate)
            started = step_of(model, backend.no_sync, batch, accumulate=accumulate)
            expect_equal(gradients(module), gradients(reference), f"step {i}", tol=1e-6)
            orders: list[Any] = [None] * world
            dist.all_gather_object(orders, started)
            expect(all(order == orders[0] for order in orders), f"ranks started {orders}")
            last = backend.stats().last
            expect(not i or len(started) == 4 + last.launches + last.uncovered_launches, f"{started}: four are torch's")
            expect(set(last.uncovered) == normalised, f"uncovered: {last.uncovered}")
        expect_equal(dict(module.named_buffers()), dict(reference.named_buffers()), "buffers", tol=1e-6)
        expect(len(backend.plans) == 3, "compiled up to, between and after the two layers")


@pytest.mark.parametrize(("split", "accumulate"), [(True, False), (False, True)])
def test_torchs_sync_batchnorm(pool: Pool, split: bool, accumulate: bool):
    pool.run(torchs_own, split, accumulate)


# ---- on a GPU that is not there --------------------------------------------------------------------------------------


def test_collectives_of_a_cuda_model_keep_their_places():
    """Those in its backward stay, are counted, and come in one order with those of the buckets."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        captured = on_cuda(capture(Net(), torch.randn(6, 8)))
        rewritten = captured.rewrite(cap=600)
    finally:
        dist.destroy_process_group()
    theirs = [node.args[1:] for node in captured.backward.graph.nodes if is_collective(node)]
    assert len(theirs) == 4, "two layers, each with two sums whose gradients are summed"
    started = [node for node in rewritten.gm.graph.nodes if is_collective(node)]
    assert [node.args[1:] for node in started if not is_send(node)] == theirs
    assert len([node for node in started if is_send(node)]) == len(rewritten.plan.buckets) > 2
    assert all(node.meta["val"].device == torch.device("cuda", 0) for node in started)
    places = [i for i, step in enumerate(rewritten.program.steps) for _ in range(step.collectives)]
    assert len(places) == 4
    launched = [step.bucket for step in rewritten.program.steps if step.bucket is not None]
    assert launched == sorted(launched), "buckets leave in the order of the plan"
