"""Where `.grad` lies from step to step, and how many bytes a step needs: next to torch's DDP, counted and not timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.memory import MEASURED_STEPS, STEP, peaks
from tests.live.lab import (
    Mlp,
    average,
    buckets,
    compiled,
    error_of,
    expect,
    expect_equal,
    gradients,
    launches,
    local,
    loss_of,
    seeded,
    total,
)
from tests.live.pool import Pool


def memory(module: nn.Module) -> list[int]:
    """Where each gradient lies."""
    return [0 if p.grad is None else p.grad.data_ptr() for p in module.parameters()]


def step_kept(module: nn.Module, step: Callable[[], object], what: str, *, kept: bool = True) -> None:
    """Runs a step; raises unless all gradients stay in their memory and tensors, or all leave it."""
    grads, before = [p.grad for p in module.parameters()], memory(module)
    step()
    stays = [a == b for a, b in zip(before, memory(module), strict=True)]
    expect(all(stays) if kept else not any(stays), f"{what}: {stays}")
    if kept:
        expect(all(p.grad is g for p, g in zip(module.parameters(), grads, strict=True)), f"{what}: other tensors")


def refilled(rank: int, world: int, split: bool, hook: str | None) -> None:
    module = seeded(0, Mlp)
    model, backend = compiled(module, split=split, comm_hook=hook)
    tolerance = 0.0 if hook is None else 1e-3

    def same(expected: Any, what: str) -> None:
        expect_equal(gradients(module), expected, what, tolerance)

    loss_of(model, 0).backward()
    same(average(local(module, 0)), "first step")
    held = {name: p.grad for name, p in module.named_parameters()}

    module.zero_grad(set_to_none=False)
    step_kept(module, lambda: loss_of(model, 1).backward(), "zeros")
    same(average(local(module, 1)), "zeros")
    expect_equal(held, gradients(module), "what was held is `.grad` itself")
    expect(launches(backend)[-1] == buckets(backend), "zeros: launches")

    kept = gradients(module)
    step_kept(module, lambda: loss_of(model, 2).backward(), "added to what is there")
    same(average(total(kept, local(module, 2))), "added to what is there")

    module.zero_grad(set_to_none=False)
    with backend.no_sync():
        step_kept(module, lambda: loss_of(model, 3).backward(), "under no_sync")
        step_kept(module, lambda: loss_of(model, 4).backward(), "under no_sync, again")
    same(local(module, 3, 4), "under no_sync")
    step_kept(module, lambda: loss_of(model, 5).backward(), "after no_sync")
    same(average(local(module, 3, 4, 5)), "after no_sync")


@pytest.mark.parametrize(("split", "hook"), [(True, None), (False, None), (True, "fp16")])
def test_zeroed_gradients_stay_in_their_bucket(pool: Pool, split: bool, hook: str | None):
    pool.run(refilled, split, hook)


def not_refilled(rank: int, world: int) -> None:
    """Gradients that are no bucket any more, or never were, are averaged all the same."""
    module = seeded(0, Mlp)
    model, _ = compiled(module)
    parameters = dict(module.named_parameters())

    def another_order() -> None:
        middle = parameters["middle.weight"]
        assert middle.grad is not None
        rows, columns = middle.shape
        middle.grad = torch.as_strided(middle.grad, (rows, columns), (1, rows))

    def exchanged() -> None:
        first, last = parameters["first.bias"], parameters["middle.bias"]
        assert first.grad is not None and last.grad is not None
        first.grad, last.grad = last.grad[:24], torch.cat([first.grad, last.grad[:1]])

    def cloned() -> None:
        for parameter in parameters.values():
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()

    def one_is_none() -> None:
        parameters["last.weight"].grad = None

    def part_of_another() -> None:
        flat = torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None])
        for parameter, part in zip(
            parameters.values(), flat.split([p.numel() for p in parameters.values()]), strict=True
        ):
            parameter.grad = part.view(parameter.shape)

    for i, change in enumerate((another_order, exchanged, cloned, one_is_none, part_of_another)):
        module.zero_grad()
        loss_of(model, 10 + i).backward()
        change()
        kept = {
            name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(parameters.items(), gradients(module).values(), strict=True)
        }
        loss_of(model, 20 + i).backward()
        expect_equal(gradients(module), average(total(kept, local(module, 20 + i))), change.__name__)


def test_other_gradients_are_not_taken_for_a_bucket(pool: Pool):
    pool.run(not_refilled)


def failing(rank: int, world: int) -> None:
    """A backward that fails leaves NaN in buckets it filled again, and what it had not come to as it was."""
    fuse = [0]

    def inner(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def run(*arguments: Any) -> Any:
            fuse[0] -= 1
            if fuse[0] == 0:
                raise RuntimeError("an accident")
            return gm(*arguments)

        return run

    module = seeded(0, Mlp)
    model, backend = compiled(module, inner=inner)
    loss_of(model, 0).backward()
    lost_at = []
    for piece in range(1, backend.stats().last.pieces + 1):
        before, loss = gradients(module), loss_of(model, 1)
        fuse[0] = piece
        expect("an accident" in str(error_of(loss.backward, f"piece {piece}")), f"piece {piece}")
        after = gradients(module)
        lost = {name for name, grad in after.items() if grad is not None and grad.isnan().all()}
        lost_at.append(len(lost))
        kept, expected = ({n: g for n, g in some.items() if n not in lost} for some in (after, before))
        expect_equal(kept, expected, f"piece {piece}: .grad after it")
        module.zero_grad(set_to_none=False)
        loss_of(model, 2).backward()
        expect_equal(gradients(module), average(local(module, 2)), f"piece {piece}: the next step")
    expect(lost_at[0] == 0 < lost_at[-1], f"lost in backwards that failed at each piece: {lost_at}")


def test_a_failed_backward_leaves_nan(pool: Pool):
    pool.run(failing)


def beside_eager_code(rank: int, world: int) -> None:
    """A layer of a compiled part that eager code uses as well, and a backward under `no_sync` in between."""
    module = seeded(0, Mlp)
    model, backend = compiled(module)

    def losses(of: Any, i: int) -> Tensor:
        return loss_of(of, i) + module.last.weight.square().mean()

    def expected(*numbers: int) -> Any:
        sums = local(module, *numbers)
        sums["last.weight"] = sums["last.weight"] + 2 * module.last.weight.detach() / module.last.weight.numel()
        return average(sums)

    losses(model, 0).backward()
    for i in (1, 2):
        module.zero_grad(set_to_none=False)
        losses(model, i).backward()
        expect_equal(gradients(module), expected(i), f"step {i}", tol=1e-6)
    expect("last.weight" in backend.stats().last.uncovered, "nothing came from eager code")


def test_eager_code_adds_to_a_refilled_bucket(pool: Pool):
    pool.run(beside_eager_code)


LEVEL = "level"


class Wide(nn.Module):
    """Six layers of 64 KiB, whose activations are small beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def most_alive(rank: int, world: int, rival: bool) -> dict[str, int]:
    """Most bytes alive during a step beyond the weights, way by way."""
    bucket = 0.07  # MiB: a layer each
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        module = seeded(0, Wide)
        backend = None
        if rival:
            model: Any = DistributedDataParallel(module, bucket_cap_mb=bucket, gradient_as_bucket_view=True)
            no_sync = model.no_sync
        else:
            model, backend = compiled(module, bucket_mb=bucket, first_bucket_mb=bucket)
            no_sync = backend.no_sync
        x = torch.ones(2, 128)
        ways = [(kept, batches) for kept in (False, True) for batches in (0, 2)]
        for kept, batches in ways:
            for measured in (False,) * 2 + (True,) * MEASURED_STEPS:
                dist.barrier()
                with record_function(LEVEL if measured else "warm-up"):
                    torch.ones(1)
                with record_function(STEP if measured else "warm-up"):
                    module.zero_grad(set_to_none=not kept)
                    for _ in range(batches):
                        with no_sync():
                            model(x).backward()
                    model(x).backward()
    gradients = sum(p.nbytes for p in module.parameters())  # there when a step begins, under DDP as well
    # against the level then: a block that a thread of gloo's frees unseen counts until its place is used again
    steps = [peak - level for level, peak in zip(peaks(recorded, LEVEL), peaks(recorded), strict=True)]
    least = [gradients + min(steps[i : i + MEASURED_STEPS]) for i in range(0, len(steps), MEASURED_STEPS)]
    return {f"{kept=}, {batches=}": peak for (kept, batches), peak in zip(ways, least, strict=True)}


def test_a_step_needs_no_more_than_under_ddp(pool: Pool):
    """Gradients exist once, not twice, but for what one bucket and its piece need; DDP keeps its buckets."""
    gradient = 128 * 128 * 4
    ours, rivals = pool.run(most_alive, False), pool.run(most_alive, True)
    for mine, theirs in zip(ours, rivals, strict=True):
        # a bucket, and its gradient before it is scaled into it; activations
        slack = 2 * gradient + gradient // 2
        for way, peak in mine.items():
            assert peak <= theirs[way] + slack, (way, mine, theirs)
        assert max(mine["kept=True, batches=0"], mine["kept=True, batches=2"]) <= 6 * gradient + slack, mine
