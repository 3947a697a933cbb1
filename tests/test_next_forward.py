"""Waits in the next forward: the weights of an optimizer in backward, bit by bit, whenever somebody reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import fxddp
from tests.live.lab import SMALL, Mlp, buckets, compiled, data, error_of, expect, expect_equal, loss_of, seeded
from tests.live.pool import Pool

OVERLAP = {"overlap": "next_forward"}


class Deep(nn.Module):
    """Layers with a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 if i == 0 else 16, 16) for i in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def weights(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """Fused, so that no update is compiled: Dynamo compiles torch's `step` for eight sets of parameters in a process."""
    return torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)


def waits_in_forward(record: Any) -> list[tuple[str, int]]:
    """What happened after the backward of this record was over."""
    return [(kind, index) for kind, index, when in record.events if when > record.end]


def pairs(make: Any, inner: str, **options: Any) -> Any:
    """Equal models with and without overlap: (module, optimizer, compiled, backend) of each."""
    found = []
    for more in (OVERLAP, {}):
        module = seeded(0, make)
        optimizer = adam(module)
        model, backend = compiled(module, inner=inner, optimizer=optimizer, **options, **more)
        found.append((module, optimizer, model, backend))
    return found


def same_weights(rank: int, world: int, inner: str) -> None:
    (module, optimizer, model, backend), (reference, stepped, usual, _) = pairs(Deep, inner)
    schedules = [lr_scheduler.ExponentialLR(each, 0.8) for each in (optimizer, stepped)]
    for step in range(5):
        losses = []
        for each in (model, usual):
            loss = loss_of(each, step)
            loss.backward()
            losses.append(loss.detach())
        expect(torch.equal(*losses), f"step {step}: losses {losses}")
        expect(all(p.grad is None for p in module.parameters()), f"step {step}: a gradient is left")
        optimizer.step()  # a training loop may stay as it is
        optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    before = waits_in_forward(backend.stats().last)
    expect(not before, f"waited before anybody read a weight: {before}")
    backend.synchronize()
    expect_equal(weights(module), weights(reference), "after the last step")
    for record in backend.stats().backwards[:-1]:
        kinds = [kind for kind, _ in waits_in_forward(record)]
        expect(kinds.count("wait") == buckets(backend), f"all buckets are waited for in the next forward: {kinds}")
        expect(kinds.count("forward") >= 2, f"in several pieces: {kinds}")
        expect("wait" in kinds[kinds.index("forward") :], f"between the pieces: {kinds}")


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_weights_of_an_optimizer_in_backward(pool: Pool, inner: str):
    pool.run(same_weights, inner, timeout=180)
