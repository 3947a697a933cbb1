"""Several features of what travels and how at once: as a user may put them together, stopped and gone on with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fxddp
from tests.live.lab import SMALL, Mlp, data, expect, expect_equal, seeded
from tests.live.pool import Pool


class Routed(nn.Module):
    """Two branches of which a rank takes one, around a layer that all use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branches = nn.Linear(8, 8), nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](self.first(x).tanh())


CODECS: dict[str, Callable[[], Any]] = {
    "fp16": lambda: "fp16",
    "bf16": lambda: "bf16",
    "PowerSGD": lambda: fxddp.PowerSGD(2, start_iter=1, min_compression_rate=0.5),
    "Int8": lambda: fxddp.Int8(16),
    "Adaptive": lambda: fxddp.Adaptive(0.05, start_iter=1, every=2, block=16),
    "hook": lambda: default_hooks.allreduce_hook,
}
EXACT = ("hook", "")

COMBINATIONS = [
    "Int8 unused no_sync optimizer",
    "PowerSGD join optimizer",
    "PowerSGD lanes join no_sync",
    "fp16 ring join unused",
    "bf16 lanes unused no_sync",
    "Int8 ring scaler no_sync",
    "Adaptive lanes scaler unused",
    "Adaptive join unused no_sync optimizer",
    "ring unused no_sync optimizer",
    "lanes join unused optimizer",
    "hook unused no_sync optimizer",
    "hook join scaler",
]
STEPS = 6


def combined(rank: int, world: int, combination: str) -> None:
    """Training whose ranks stay equal, near to one without any of this, and the same after a stop in the middle."""
    words = combination.split()
    codec = next((word for word in words if word in CODECS), "")
    groups = [dist.new_group() for _ in range(2)]
    whole = train(words, codec, groups, seeded(0, Routed), [range(STEPS)])
    parts = train(words, codec, groups, seeded(0, Routed), [range(STEPS // 2), range(STEPS // 2, STEPS)])
    expect_equal(parts, whole, f"{combination}, stopped and gone on with", tol=1e-6)
    plain = by_hand(words, seeded(0, Routed), world)
    start = dict(seeded(0, Routed).named_parameters())
    for name, expected in plain.items():
        moved = (expected - start[name]).norm()
        off = (whole[name] - expected).norm()
        expect(off <= (1e-5 if codec in EXACT else 0.25) * moved + 1e-6, f"{name} is off by {off:.2g} of {moved:.2g}")
    flat = torch.cat([value.flatten() for value in whole.values()])
    everyone = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(everyone, flat)
    expect(all(torch.equal(flat, other) for other in everyone), "equal weights on all ranks")


def branch(words: list[str], step: int, rank: int) -> int:
    return (step + rank) % 2 if "unused" in words else step % 2


def batches(words: list[str], step: int, rank: int) -> list[int]:
    """Numbers of the batches of a step, the last of which synchronises; none for a rank that has run out."""
    if "join" in words and rank == 0 and step >= STEPS - 1:
        return []
    return [100 + step, step] if "no_sync" in words and step % 2 else [step]


def train(words: list[str], codec: str, groups: list[Any], module: nn.Module, parts: list[range]) -> dict[str, Tensor]:
    """The weights after these steps, with a new model that goes on from a checkpoint in each part."""
    saved: dict[str, Any] = {}
    rank = dist.get_rank()
    for part in parts:
        if saved:
            module = seeded(3, Routed)
            module.load_state_dict(saved["model"])
        carrier: Any = CODECS[codec]() if codec else None
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        options: dict[str, Any] = {"comm_hook": carrier}
        options |= {"process_group": groups} if "lanes" in words else {}
        options |= {"algorithm": "ring"} if "ring" in words else {}
        options |= {"optimizer": optimizer} if "optimizer" in words else {}
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000, enabled="scaler" in words)
        if saved and saved["codec"] is not None:
            carrier.load_state_dict(saved["codec"])
        model = fxddp.DistributedDataParallel(
            module,
            bucket_cap_mb=SMALL,
            first_bucket_mb=SMALL,
            inner="aot_eager",
            find_unused_parameters=True,
            **options,
        )
        with model.join(divide_by_initial_world_size=True) if "join" in words else contextlib.nullcontext():
            for step in part:
                numbers = batches(words, step, rank)
                for number in numbers:
                    with contextlib.nullcontext() if number == numbers[-1] else model.no_sync():
                        loss = model(data(number, 6, 8), branch(words, step, rank)).square().mean()
                        scaler.scale(loss).backward()
                if numbers and "optimizer" not in words:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        state = carrier.state_dict() if hasattr(carrier, "state_dict") else None
        saved = copy.deepcopy({"model": module.state_dict(), "codec": state})
    return saved["model"]


def by_hand(words: list[str], module: nn.Module, world: int) -> dict[str, Tensor]:
    """The same steps on all ranks' batches in one process, uncompressed."""
    for step in range(STEPS):
        for rank in range(world):
            for number in batches(words, step, rank):
                inputs = data(number, 6, 8, rank=rank)
                (module(inputs, branch(words, step, rank)).square().mean() / world).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
    return module.state_dict()


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_several_at_once(pool: Pool, combination: str):
    pool.run(combined, combination, timeout=60)
