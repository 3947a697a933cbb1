"""Models with collectives of their own, forward and backward: theirs and ours run in one order on every rank.

torch's SyncBatchNorm refuses CPU tensors, so a small one over functional collectives stands in for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.live.lab import compiled, data, error_of, expect, expect_equal, gradients, seeded
from tests.live.pool import Pool


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
