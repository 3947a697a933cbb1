"""Pieces of a backward that are the same are compiled once, whoever compiles them, and again out of a cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import fxddp
from tests.live.lab import average, compiled, expect_equal, gradients, local, loss_of, seeded
from tests.live.pool import Pool

LAYERS = 6
LAYER = 0.0003  # MiB: a bucket holds one layer's gradients


class Layers(nn.Module):
    """Equal layers, each times its own factor."""

    def __init__(self, factors: Sequence[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in factors)
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        for layer, factor in zip(self.layers, self.factors, strict=True):
            x = x + factor * torch.tanh(layer(x))
        return x


def counted(rank: int, world: int, factors: Sequence[float], split: bool) -> tuple[int, int]:
    """How many pieces there are, and how many were compiled."""
    seen: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(gm)
        return gm

    module = seeded(0, lambda: Layers(factors))
    model, backend = compiled(module, inner=inner, split=split, bucket_mb=LAYER, first_bucket_mb=LAYER)
    for i in range(3):
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), f"step {i}", tol=1e-6)
    module.zero_grad()
    with backend.no_sync():
        loss_of(model, 5).backward()  # of an unsplit backward, compiles the pieces
    expect_equal(gradients(module), local(module, 5), "local", tol=1e-6)
    return backend.stats().last.pieces, len(seen) - (1 if split else 2)  # the forward, and the whole backward


@pytest.mark.parametrize("split", [True, False])
def test_equal_layers_are_compiled_once(pool: Pool, split: bool):
    for pieces, made in pool.run(counted, [0.5] * LAYERS, split):
        assert pieces >= LAYERS
        assert made <= 4  # the loss's, one inside, the first layer's, and what is left


def test_layers_that_differ_in_a_constant_are_not_shared(pool: Pool):
    for pieces, made in pool.run(counted, [0.5 + i / 8 for i in range(LAYERS)], True):
        assert pieces >= LAYERS
        assert made >= pieces - 1  # the last one may be empty but for views


def from_a_cache(rank: int, world: int, folder: str) -> list[tuple[int, int, int]]:
    """Pieces, different objects among them, and hits of AOTAutograd's cache: cold and warm."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        module = seeded(0, lambda: Layers([0.5] * LAYERS))
        backend = fxddp.backend(LAYER, first_bucket_mb=LAYER)
        model = torch.compile(module, backend=backend)
        for i in range(2):
            module.zero_grad()
            loss_of(model, i).backward()
            expect_equal(gradients(module), average(local(module, i)), f"step {i}", tol=1e-5)
        artifact = backend.sites[0].compilation.backward
        assert artifact is not None
        different = len(set(map(id, artifact.pieces)))
        found.append((len(artifact.pieces), different, counters["aot_autograd"]["autograd_cache_hit"]))
    return found


def test_pieces_from_a_cache_are_shared_as_well(pool: Pool, tmp_path: Path):
    for cold, warm in pool.run(from_a_cache, str(tmp_path), timeout=200):
        assert (cold[2], warm[2]) == (0, 1)
        assert cold[:2] == warm[:2]
        assert cold[1] <= 4 < cold[0]
