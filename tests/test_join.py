"""Ranks with different numbers of batches: those that run out answer the others' steps, compared with stock DDP."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import fxddp
from tests.live.lab import (
    SMALL,
    Mlp,
    average,
    data,
    error_of,
    expect,
    expect_equal,
    gradients,
    local_gradients,
    seeded,
    total,
)
from tests.live.pool import Pool
from tests.test_agreement import Experts, square

BATCHES = (2, 5, 3)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def wrapped(module: nn.Module, **options: Any) -> Any:
    return fxddp.DistributedDataParallel(module, bucket_cap_mb=SMALL, inner="aot_eager", **options)


def state(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def train(model: Any, batches: int, *, accumulate: bool = False, which: int | None = None) -> None:
    """Plain SGD; every step on what the last ones left if it accumulates first."""
    extra = () if which is None else (which,)
    # stock DDP gives what only a rank without inputs has used a gradient of zero, and momentum then moves it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if extra else 0.9)
    for i in range(batches):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                square(model(data(20 + i, 6, 8), *extra)).backward()
        square(model(data(i, 6, 8), *extra)).backward()
        optimizer.step()


def uneven(rank: int, world: int, kind: str, by_initial: bool, compiles: bool) -> None:
    """The same program with stock DDP and with ours; after `join` all ranks hold what the last joiner has."""
    make = {"experts": Experts, "buffers": Normalised}.get(kind, Mlp)
    options: dict[str, Any] = {"find_unused_parameters": kind == "experts"}
    arguments: dict[str, Any] = {
        "accumulate": kind == "no_sync",
        "which": min(rank, 1) if kind == "experts" else None,
    }
    reference, module = seeded(0, make), seeded(0, make)
    stock = Stock(reference, bucket_cap_mb=SMALL, **options)
    with stock.join(divide_by_initial_world_size=by_initial):
        train(stock, BATCHES[rank], **arguments)
    model = wrapped(module, compile=compiles, **options)
    with model.join(divide_by_initial_world_size=by_initial):
        train(model, BATCHES[rank], **arguments)
    expect_equal(state(module), state(reference), f"{kind}, {by_initial=}", tol=1e-5)
    expect(not model.backend.joining, "still joining")
    module.zero_grad()
    square(model(data(9, 6, 8), *(() if kind != "experts" else (0,)))).backward()
    stock_again = Stock(reference, bucket_cap_mb=SMALL, **options)
    reference.zero_grad()
    square(stock_again(data(9, 6, 8), *(() if kind != "experts" else (0,)))).backward()
    expect_equal(gradients(module), gradients(reference), "a step after join", tol=1e-4)


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("kind", ["plain", "no_sync", "experts", "buffers"])
def test_uneven_inputs(pool: Pool, kind: str, by_initial: bool, compiles: bool):
    pool.run(uneven, kind, by_initial, compiles)


@pytest.mark.parametrize("kind", ["plain", "experts"])
def test_uneven_inputs_on_three_ranks(pool3: Pool, kind: str):
    pool3.run(uneven, kind, False, True)


def two_models(rank: int, world: int, apart: bool) -> None:
    """Two wrapped models in one `Join`, with a backward for each or one for both."""
    found = []
    for wrap in (lambda m: Stock(m, bucket_cap_mb=SMALL), wrapped):
        modules = seeded(0, Mlp), seeded(1, lambda: Mlp(12))
        models = [wrap(module) for module in modules]
        if wrap is not wrapped and not apart:
            # stock DDP cannot shadow one backward of two models: both models in one
            both = seeded(0, lambda: nn.ModuleList([nn.Identity(), nn.Identity()]))
            both[0], both[1] = modules
            models = [Stock(Sum(both), bucket_cap_mb=SMALL)]
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.05)
        with Join(models):
            for i in range(BATCHES[rank]):
                optimizer.zero_grad()
                if apart:
                    for model in models:
                        square(model(data(i, 6, 8))).backward()
                else:
                    sum(square(model(data(i, 6, 8))) for model in models).backward()  # type: ignore[union-attr]
                optimizer.step()
        found.append(
            {f"{k}.{name}": value for k, module in enumerate(modules) for name, value in state(module).items()}
        )
    expect_equal(found[1], found[0], f"{apart=}", tol=1e-5)


class Sum(nn.Module):
    """Outputs of two models side by side: their squares' mean is half the sum of the means."""

    def __init__(self, both: nn.ModuleList) -> None:
        super().__init__()
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([model(x) * 2**0.5 for model in self.both], 1)


@pytest.mark.parametrize("apart", [True, False])
def test_two_models_in_one_join(pool: Pool, apart: bool):
    pool.run(two_models, apart)


def without_a_backward(rank: int, world: int, compiles: bool, stray: int, forwards: int) -> None:
    """Ranks that evaluate with grad enabled behind their last step: with others still at it, and as the last ones.

    The forward comes with a batch of the others, to which this rank has nothing to add.
    """

    def loss(model: Any, i: int, rank: int = rank) -> Tensor:
        return sum((square(model(data(i + 20 * n, 6, 8, rank=rank))) for n in range(forwards)), torch.zeros(()))

    module = seeded(0, Mlp)
    model = wrapped(module, compile=compiles)
    steps = [2, 4, 3][:world]
    with model.join():
        for i in range(steps[rank]):
            module.zero_grad()
            loss(model, i).backward()
            there = [r for r in range(world) if i < steps[r]]
            parts = [local_gradients(module, partial(loss, i=i, rank=r)) for r in there]
            mean = {n: g / world for n, g in total(*parts).items() if g is not None}
            expect_equal(gradients(module), mean, f"step {i}", tol=1e-5)
        if stray in (rank, -1):
            model(data(9, 6, 8))
    expect(not model.backend.joining, "still joining")
    module.zero_grad()
    square(model(data(9, 6, 8))).backward()
    expect_equal(gradients(module), average(local_gradients(module, lambda m: square(m(data(9, 6, 8))))), "after join")


@pytest.mark.parametrize(("stray", "forwards"), [(0, 1), (0, 2), (1, 1), (-1, 1)])
@pytest.mark.parametrize("compiles", [True, False])
def test_a_last_forward_without_a_backward(pool: Pool, compiles: bool, stray: int, forwards: int):
    pool.run(without_a_backward, compiles, stray, forwards)


@pytest.mark.parametrize("stray", [0, -1])
def test_a_last_forward_without_a_backward_of_three(pool3: Pool, stray: int):
    pool3.run(without_a_backward, True, stray, 1)


def left_torchs_join(rank: int, world: int) -> str:
    model = wrapped(seeded(0, Mlp))

    def run() -> None:
        with Join([model]):
            train(model, 1 + 2 * rank)
            if rank == 1:
                model(data(9, 6, 8))

    message = str(error_of(run))
    if rank == 0:
        dist.all_reduce(torch.zeros(1))  # what rank 1 waits for, or it would do so until the timeout
    return message


def test_a_last_forward_without_a_backward_in_torchs_join(pool: Pool):
    """Nobody is told, so the rank that waits looks where the other one is."""
    message, _ = pool.run(left_torchs_join, discard=True)
    assert "test_join.py" in message
    assert "at the end of Join, and its last forward" in message


def early(rank: int, world: int) -> str:
    model = wrapped(seeded(0, Mlp))

    def run() -> None:
        with model.join(throw_on_early_termination=True):
            train(model, BATCHES[rank])

    return str(error_of(run))


def test_early_termination(pool: Pool):
    for message in pool.run(early):
        assert "exhausted" in message


def disabled(rank: int, world: int) -> None:
    model = wrapped(seeded(0, Mlp))
    with model.join(enable=False):
        train(model, 2)
    expect(not model.backend.joining, "joining although it was not enabled")


def test_join_can_be_turned_off(pool: Pool):
    pool.run(disabled)


def in_turns(rank: int, world: int) -> None:
    """Two models in one `Join`, of which one is under `no_sync` in every other step; and steps after it."""
    modules = seeded(0, Mlp), seeded(1, lambda: Mlp(12))
    first, second = (wrapped(module) for module in modules)
    with Join([first, second]):
        for i in range(BATCHES[rank]):
            with first.no_sync() if i % 2 else nullcontext():
                loss = square(first(data(i, 6, 8)))
            (loss + square(second(data(i, 6, 8)))).backward()
    channel = first.backend.lookup().channel
    before = channel.step
    square(first(data(9, 6, 8))).backward()
    expect(channel.step - before == 2, f"{channel.step - before} records in a step after join")


def test_models_under_no_sync_in_turns(pool: Pool):
    pool.run(in_turns)


def divided(rank: int, world: int, compiles: bool) -> None:
    """What travels in another precision is divided by the number of ranks that have inputs as well."""
    precision = _MixedPrecision(reduce_dtype=torch.bfloat16)
    module = seeded(0, Mlp)
    model = wrapped(module, mixed_precision=precision, compile=compiles)
    square(model(data(0, 6, 8))).backward()
    with model.join(divide_by_initial_world_size=False):
        for i in range(1 + rank):
            module.zero_grad()
            square(model(data(i, 6, 8))).backward()
    if rank == 1:
        alone = local_gradients(module, lambda each: square(each(data(1, 6, 8))))
        expect_equal(gradients(module), alone, "alone", tol=1e-2)


@pytest.mark.parametrize("compiles", [True, False])
def test_the_divisor_in_another_precision(pool: Pool, compiles: bool):
    pool.run(divided, compiles)


class WithHelper(nn.Module):
    """A frozen helper that is no part of the module and runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.helper = [nn.Linear(8, 8).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        torch._dynamo.graph_break()
        with torch.no_grad():
            factor = self.helper[0](x)
        torch._dynamo.graph_break()
        return y * factor


def without_batches(rank: int, world: int, init_sync: bool) -> None:
    """A rank that has no inputs at all."""
    module = seeded(0, WithHelper)
    model = wrapped(module, init_sync=init_sync)
    with model.join():
        train(model, 0 if rank else 3)
    ours = torch.cat([value.reshape(-1) for value in module.state_dict().values()])
    everyone = [torch.empty_like(ours) for _ in range(world)]
    torch.distributed.all_gather(everyone, ours)
    expect(all(torch.equal(one, ours) for one in everyone), "ranks differ after join")


@pytest.mark.parametrize("init_sync", [True, False])
def test_a_rank_without_batches(pool: Pool, init_sync: bool):
    pool.run(without_batches, init_sync)


class Recomputed(nn.Module):
    """A block in a re-entrant checkpoint: its gradients are reduced in a backward inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), Mlp(8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._again(self.first(x)))

    @torch.compiler.disable
    def _again(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=True)


def recomputed(rank: int, world: int, kind: str) -> None:
    """A rank without inputs answers both backwards, and sends its zeros over the groups that the others use."""
    module, reference = seeded(0, Recomputed), seeded(0, Recomputed)
    options: dict[str, Any] = {"process_group": [torch.distributed.new_group() for _ in range(2)]}
    if kind == "optimizer":
        options = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.05)}
    if kind == "codec":
        options = {"comm_hook": fxddp.Int8(8, use_error_feedback=False)}
    model = fxddp.DistributedDataParallel(
        module, bucket_cap_mb=SMALL / 2, first_bucket_mb=SMALL / 2, inner="aot_eager", **options
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (module, reference)]
    batches = (2, 4, 3)
    with model.join():
        for i in range(batches[rank]):
            square(model(data(i, 6, 8))).backward()
            if kind != "optimizer":
                optimizers[0].step()
            optimizers[0].zero_grad()
    for i in range(max(batches[:world])):
        for each in range(world):
            if i < batches[each]:
                (square(reference(data(i, 6, 8, rank=each))) / world).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    expect_equal(state(module), state(reference), kind, tol=0.02 if kind == "codec" else 1e-5)


@pytest.mark.parametrize("kind", ["groups", "optimizer", "codec"])
def test_a_backward_inside_a_backward(pool: Pool, kind: str):
    pool.run(recomputed, kind, timeout=40)
