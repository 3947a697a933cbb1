"""Compressed gradients on live ranks: their numbers against plain references, their bytes, and all ways of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxddp
from tests.live.lab import (
    Gradients,
    Mlp,
    average,
    compiled,
    expect,
    expect_equal,
    gradients,
    local,
    loss_of,
    seeded,
)
from tests.live.pool import Pool

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def cast_average(gradients: Gradients, wire: torch.dtype) -> Gradients:
    """Divided, rounded, added up in the wire's dtype, as a plain program does it."""
    averages: Gradients = {}
    for name, gradient in gradients.items():
        if gradient is None:
            averages[name] = None
            continue
        small = (gradient / dist.get_world_size()).to(wire)
        dist.all_reduce(small)
        averages[name] = small.to(gradient.dtype)
    return averages


def casts(rank: int, world: int, kind: str, split: bool, inner: str) -> None:
    module = seeded(0, Mlp)
    model, backend = compiled(module, comm_hook=kind, split=split, inner=inner)
    tol = 1e-6 if inner == "aot_eager" else 2e-2  # inductor's gradients differ in the last bit, which rounding may lift
    for i in range(3):
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), cast_average(local(module, i), CASTS[kind]), f"step {i}", tol=tol)
        record = backend.stats().last
        expect(record.wire_bytes * 2 == record.bytes == sum(p.nbytes for p in module.parameters()), "bytes")
    expect(backend.stats().last.launches > 1, "one bucket: this tests nothing")


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", CASTS)
def test_casts(pool: Pool, kind: str, split: bool, inner: str):
    pool.run(casts, kind, split, inner, timeout=180)
