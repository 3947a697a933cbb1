"""Rank 0's buffers before a forward: any kind and size, and nobody waits for more than rank 0."""

from __future__ import annotations

import gc
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxddp
from fxddp.values import CAST_BYTES
from tests.live.lab import compiled, counted_collectives, error_of, expect, expect_equal, loss_of, seeded
from tests.live.pool import Pool


class Counting(nn.Module):
    """A model whose forward writes to buffers of many kinds."""

    calls: Tensor
    seen: Tensor
    narrow: Tensor
    phase: Tensor
    turned: Tensor
    none: Tensor
    large: Tensor

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("turned", torch.zeros(4, 6).t())
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("large", torch.zeros(extra))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.seen.logical_not_()
        for buffer in (self.narrow, self.phase, self.turned, self.none, self.large):
            buffer.mul_(2)
        total = self.calls + self.narrow.sum() + self.phase.real.sum() + self.turned.sum() + self.large.sum()
        return self.linear(x) + 1e-9 * total


def shared(rank: int, world: int, wraps: bool, extra: int) -> None:
    module = seeded(0, partial(Counting, extra))
    if wraps:
        model: nn.Module = fxddp.DistributedDataParallel(module, inner="aot_eager")
    else:
        model = compiled(module)[0]
    loss_of(model, 0).backward()
    for step in range(3):
        with torch.no_grad():
            for i, buffer in enumerate(module.buffers()):
                buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape) % (2 + rank) + i + rank)
        expected = {}
        if rank == 0:
            alone = seeded(0, partial(Counting, extra))
            alone.load_state_dict(module.state_dict())
            loss_of(alone, step)
            expected = dict(alone.named_buffers())
        everyone: list[dict[str, Tensor]] = [{}] * world
        dist.all_gather_object(everyone, expected)
        with counted_collectives() as started:
            loss = loss_of(model, step)
        expect_equal(dict(module.named_buffers()), everyone[0], f"step {step}")
        small = extra * 4 < CAST_BYTES
        expect(bool(started) is not small, f"{extra} more values: forward started {started}")
        loss.backward()


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("extra", [10, CAST_BYTES // 4])
def test_all_kinds_of_buffers_are_rank_0s(pool3: Pool, wraps: bool, extra: int):
    pool3.run(shared, wraps, extra)


def ahead(rank: int, world: int, wraps: bool) -> None:
    """The other ranks start their forward when rank 0 is through with its own: forever, if that waited for them."""
    module = seeded(0, partial(Counting, 10))
    model = fxddp.DistributedDataParallel(module, inner="aot_eager") if wraps else compiled(module)[0]
    loss_of(model, 0).backward()
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        if rank != 0:
            store.wait([f"ahead/{wraps}/{step}"])
        loss = loss_of(model, step)
        if rank == 0:
            store.set(f"ahead/{wraps}/{step}", "")
        loss.backward()


@pytest.mark.parametrize("wraps", [False, True])
def test_rank_0_waits_for_nobody(pool3: Pool, wraps: bool):
    pool3.run(ahead, wraps)


def evaluating(rank: int, world: int, who: int) -> tuple[str, float]:
    """One rank is in eval mode, where no buffers come; it would have passed them on to others."""
    module = seeded(0, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    model = fxddp.DistributedDataParallel(module, compile=False)
    for i in range(2):
        loss_of(model, i).backward()
    if rank == who:
        model.eval()
    since = time.monotonic()
    error = error_of(lambda: [loss_of(model, i).backward() for i in range(2)])
    return type(error).__name__, time.monotonic() - since


@pytest.mark.parametrize("who", [0, 3])
def test_a_rank_in_eval_mode_is_named_at_once(pool4: Pool, who: int):
    for kind, seconds in pool4.run(evaluating, who, timeout=40, discard=True):
        assert kind == "RanksDisagree"
        assert seconds < 5


class Shifted(nn.Module):
    """A model with a buffer whose elements share memory, or with a sparse one."""

    shift: Tensor

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift if self.shift.layout is torch.strided else self.shift.to_dense()
        return self.linear(x) + shift[:, :3].mean()


def expanded(rank: int, world: int, wraps: bool, rows: int) -> None:
    module = seeded(0, lambda: Shifted(torch.arange(4.0).add(rank).expand(rows, 4)))
    model = fxddp.DistributedDataParallel(module, inner="aot_eager") if wraps else compiled(module)[0]
    for step in range(3):
        loss_of(model, step).backward()
        expect_equal({"shift": module.shift}, {"shift": torch.arange(4.0).expand(rows, 4)}, f"step {step}")
    if wraps:  # which sends all buffers before each forward
        with torch.no_grad():
            module.shift[0].add_(rank + 1)
        loss_of(model, 3).backward()
        expect_equal({"shift": module.shift}, {"shift": torch.arange(1.0, 5.0).expand(rows, 4)}, "a later forward")


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("rows", [2, CAST_BYTES // 8])
def test_an_expanded_buffer_is_rank_0s(pool: Pool, wraps: bool, rows: int):
    pool.run(expanded, wraps, rows)


def sparse(rank: int, world: int, wraps: bool, layout: torch.layout) -> str:
    module = Shifted(torch.eye(8).to_sparse(layout=layout))

    def train() -> None:
        model = fxddp.DistributedDataParallel(module, inner="aot_eager") if wraps else compiled(module)[0]
        loss_of(model, 0).backward()

    return str(error_of(train))


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_is_refused_by_name(pool: Pool, wraps: bool, layout: torch.layout):
    for message in pool.run(sparse, wraps, layout, discard=True):
        assert "shift is a sparse tensor" in message


class Caching(nn.Module):
    """A model whose forward writes to a buffer of any size."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("cache", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.cache.mul_(2)
        return self.linear(x) + self.cache.mean()


def grown(rank: int, world: int, wraps: bool, large: int) -> str:
    module = seeded(0, Caching)
    model = fxddp.DistributedDataParallel(module, inner="aot_eager") if wraps else compiled(module)[0]
    for size in (4, 6, large, large):  # on all ranks alike
        module.cache = torch.ones(size) * (rank + 1)
        loss_of(model, size).backward()
        expect_equal({"cache": module.cache}, {"cache": torch.full((size,), 2.0)}, f"rank 0's, of size {size}")
    module.cache = torch.ones(large + rank)
    return str(error_of(lambda: loss_of(model, 2).backward()))


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("large", [8, CAST_BYTES // 4 + 8])
def test_buffers_of_other_sizes_are_refused_on_all_ranks(pool: Pool, wraps: bool, large: int):
    for message in pool.run(grown, wraps, large, discard=True):
        sizes = ("differ in size", str(4 * large + 4)) if wraps else ("model differs between ranks", str(large + 1))
        assert all(part in message for part in sizes), message


def outlived(rank: int, world: int) -> None:
    """What ranks announced for a model that is gone is looked at when the next one is made."""
    for step in range(2):
        model = fxddp.DistributedDataParallel(seeded(step, partial(Counting, 0)), compile=False)
        for i in range(3):  # the last one's buffers are not confirmed yet
            loss_of(model, i)
        del model
        gc.collect()


def test_a_model_that_is_gone_after_a_forward(pool: Pool):
    pool.run(outlived)
