"""`no_sync`: gradients stay local and accumulate; the next synchronised backward averages the sum."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxddp
from tests.live.lab import (
    Gradients,
    Mlp,
    Recurrent,
    average,
    buckets,
    compiled,
    counted_collectives,
    error_of,
    expect,
    expect_equal,
    gradients,
    launches,
    local,
    local_gradients,
    loss_of,
    seeded,
    small_backend,
    total,
)
from tests.live.pool import Pool

Loss = Callable[[Any], Tensor]


def same(module: nn.Module, expected: Gradients, what: str, tol: float = 0.0) -> None:
    expect_equal(gradients(module), expected, what, tol)


@contextlib.contextmanager
def silent(what: str) -> Iterator[None]:
    """Raises if a collective starts inside."""
    with counted_collectives() as started:
        yield
    expect(not started, f"{what}: {started}")


# ---- where forward and backward stand --------------------------------------------------------------------------------


def positions(rank: int, world: int, split: bool) -> None:
    module = seeded(0, Mlp)
    model, backend = compiled(module, split=split)

    loss_of(model, 0).backward()
    same(module, average(local(module, 0)), "first step")

    module.zero_grad()
    with silent("both inside"), backend.no_sync():
        loss_of(model, 1).backward()
    same(module, local(module, 1), "both inside")
    expect(
        not backend.stats().last.sync and not backend.stats().last.launches, "both inside: on record as synchronised"
    )

    module.zero_grad()
    with silent("forward inside, backward outside"):
        with backend.no_sync():
            loss = loss_of(model, 2)
        loss.backward()
    same(module, local(module, 2), "forward inside, backward outside")

    module.zero_grad()
    loss = loss_of(model, 3)
    with backend.no_sync():
        loss.backward()
    same(module, average(local(module, 3)), "forward outside, backward inside")
    expect(backend.stats().last.sync and backend.stats().last.launches == buckets(backend), "on record")


@pytest.mark.parametrize("split", [True, False])
def test_the_place_of_the_forward_decides(pool: Pool, split: bool):
    pool.run(positions, split)


# ---- accumulation ----------------------------------------------------------------------------------------------------


def accumulation(rank: int, world: int, split: bool, set_to_none: bool) -> None:
    module = seeded(0, Mlp)
    model, backend = compiled(module, split=split)
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    loss_of(model, 9).backward()
    normal = backend.stats().last
    for cycle, micro_batches in enumerate((4, 1, 2, 2)):
        opt.zero_grad(set_to_none=set_to_none)
        kept = [p.grad for p in module.parameters()]
        numbers = [10 * cycle + k for k in range(micro_batches)]
        for i in numbers[:-1]:
            with silent("micro-batch"), backend.no_sync():
                loss_of(model, i).backward()
        sums = local(module, *numbers[:-1])
        same(
            module,
            sums if len(numbers) > 1 or set_to_none else {n: torch.zeros_like(p) for n, p in module.named_parameters()},
            "pending",
        )
        loss_of(model, numbers[-1]).backward()
        same(module, average(local(module, *numbers)), f"cycle {cycle}")
        last = backend.stats().last
        expect(last.launches == normal.launches > 1, f"{last.launches} launches, {normal.launches} in a normal step")
        expect(last.bytes == normal.bytes, f"{last.bytes} bytes, {normal.bytes} in a normal step")
        expect(not last.uncovered, f"outside of the graphs: {last.uncovered}")
        if not set_to_none:
            expect(
                all(p.grad is old for p, old in zip(module.parameters(), kept, strict=True)), ".grad is another tensor"
            )
        opt.step()
    for i in (70, 71):  # without zero_grad in between, accumulating onto averages
        loss_of(model, i).backward()
    every = [average(local(module, i)) for i in (70, 71)]
    opt.zero_grad()
    for i in (70, 71):
        loss_of(model, i).backward()
    same(module, total(*every), "averages that accumulate", tol=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_accumulation_costs_what_one_step_costs(pool: Pool, split: bool, set_to_none: bool):
    pool.run(accumulation, split, set_to_none)


def accumulation_of_three(rank: int, world: int) -> None:
    module = seeded(0, Mlp)
    model, backend = compiled(module)
    for i in range(2):
        with backend.no_sync():
            loss_of(model, i).backward()
    loss_of(model, 2).backward()
    same(module, average(local(module, *range(3))), "gradients")
    expect(launches(backend) == [0, 0, buckets(backend)], f"{launches(backend)}")


def test_accumulation_on_three_ranks(pool3: Pool):
    pool3.run(accumulation_of_three)


# ---- one model of several --------------------------------------------------------------------------------------------


def one_of_two(rank: int, world: int) -> None:
    backend = small_backend()
    raw = [seeded(k, Mlp) for k in range(2)]
    models: list[Any] = [torch.compile(module, backend=backend) for module in raw]
    first, second = models

    def run(what: str, scope: Any, *, stay: tuple[bool, bool]) -> None:
        for module in raw:
            module.zero_grad()
        with scope:
            losses = [loss_of(first, 1), loss_of(second, 2)]
        for k, (module, stays) in enumerate(zip(raw, stay, strict=True)):
            losses[k].backward()
            gradient = local(module, k + 1)
            same(module, gradient if stays else average(gradient), f"{what}: model {k}")
        for model in (first, second):  # what was pending is averaged with the next step
            loss_of(model, 3).backward()
        for k, module in enumerate(raw):
            expected = local(module, k + 1, 3)
            same(module, average(expected), f"{what}: model {k} afterwards", tol=1e-6)

    run("no scope", contextlib.nullcontext(), stay=(False, False))
    run("backend.no_sync(raw model)", backend.no_sync(raw[0]), stay=(True, False))
    run("backend.no_sync(compiled model)", backend.no_sync(second), stay=(False, True))
    run("fxddp.no_sync(compiled model)", fxddp.no_sync(first), stay=(True, False))
    run("backend.no_sync()", backend.no_sync(), stay=(True, True))

    # Two in one backward: one reduced, one not.
    for module in raw:
        module.zero_grad()
    with backend.no_sync(first):
        (loss_of(first, 1) + loss_of(second, 2)).backward()
    same(raw[0], local(raw[0], 1), "one backward, local model")
    same(raw[1], average(local(raw[1], 2)), "one backward, other model")


def test_one_model_of_several(pool: Pool):
    pool.run(one_of_two)


def several_backends(rank: int, world: int) -> None:
    """`fxddp.no_sync(model)` reaches all backends of a model whose parts are compiled one by one."""
    module = nn.Sequential(seeded(0, Mlp), nn.Linear(4, 8), seeded(1, Mlp))
    for part in (module[0], module[2]):
        part.compile(backend=small_backend())
    loss_of(module, 0).backward()
    same(module, average(local(module, 0)), "synchronised", tol=1e-6)
    module.zero_grad()
    with silent("no_sync"), fxddp.no_sync(module):
        loss_of(module, 1).backward()
    same(module, local(module, 1), "no_sync")
    loss_of(module, 2).backward()
    same(module, average(local(module, 1, 2)), "afterwards", tol=1e-6)


def test_a_model_with_several_backends(pool: Pool):
    pool.run(several_backends)


# ---- both kinds in one backward --------------------------------------------------------------------------------------


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 24), nn.Linear(24, 4), nn.Linear(24, 5)

    def forward(self, x: Tensor, side: str) -> Tensor:
        x = self.trunk(x).relu()
        return self.left(x) if side == "left" else self.right(x)


def side(i: int, which: str) -> Loss:
    return lambda model: loss_of(lambda x: model(x, which), i)


def both_kinds(rank: int, world: int) -> None:
    """One backward of a forward under no_sync and one that synchronises, in both orders."""
    for local_first in (True, False):
        module = seeded(0, Mlp)
        model, backend = compiled(module)
        loss_of(model, 0).backward()
        for pending in (False, True):
            module.zero_grad()
            if pending:
                with backend.no_sync():
                    loss_of(model, 5).backward()
            losses = []
            for number in (1, 2) if local_first else (2, 1):
                with backend.no_sync() if number == 1 else contextlib.nullcontext():
                    losses.append(loss_of(model, number))
            sum(losses).backward()  # type: ignore[union-attr]
            what = (
                f"local forward {'first' if local_first else 'last'}, {'something' if pending else 'nothing'} pending"
            )
            expect(backend.stats().last.sync, f"{what}: not on record as synchronised")
            averaged = average(local(module, *[5] * pending, 2, 1))
            same(module, averaged, what, tol=1e-6)  # what a parameter accumulates is averaged, whichever came first
            loss_of(model, 3).backward()
            everything = local(module, *[5, 1, 2, 3] if pending else [1, 2, 3])
            same(module, average(everything), f"{what}: the next step", tol=1e-6)


def test_both_kinds_in_one_backward(pool: Pool):
    pool.run(both_kinds)


def both_kinds_of_two_models(rank: int, world: int) -> None:
    """One backward of a model under no_sync and another that synchronises: each as if it were alone."""
    local_module, other_module = seeded(0, Mlp), seeded(1, lambda: Mlp(16))
    backend = small_backend()
    local_model, other = (torch.compile(module, backend=backend) for module in (local_module, other_module))
    for order in (1, -1):
        local_module.zero_grad()
        other_module.zero_grad()
        with backend.no_sync(local_module):
            losses = [loss_of(local_model, 1)]
        losses.append(loss_of(other, 2))
        sum(losses[::order]).backward()  # type: ignore[union-attr]
        same(local_module, local(local_module, 1), "under no_sync", tol=1e-6)
        same(other_module, average(local(other_module, 2)), "synchronised", tol=1e-6)
        loss_of(local_model, 3).backward()
        same(local_module, average(local(local_module, 1, 3)), "the next step", tol=1e-6)


def test_both_kinds_of_two_models(pool: Pool):
    pool.run(both_kinds_of_two_models)


def untouched_by_the_synchronised_step(rank: int, world: int, split: bool) -> None:
    """The synchronised step goes another way through the model than the local ones before it."""
    module = seeded(0, TwoWays)
    model, backend = compiled(module, split=split)
    for cycle in range(3):
        module.zero_grad()
        with silent("local") if cycle else contextlib.nullcontext(), backend.no_sync():  # the first one meets
            side(cycle, "left")(model).backward()
        side(cycle + 50, "right")(model).backward()
        expected = average(local_gradients(module, side(cycle, "left"), side(cycle + 50, "right")))
        same(module, expected, f"cycle {cycle}")
        expect(set(backend.stats().last.uncovered) == {"left.weight", "left.bias"}, f"{backend.stats().last.uncovered}")
        side(cycle + 80, "right")(model).backward()
        expect(not backend.stats().last.uncovered, "what was pending is reduced a second time")


@pytest.mark.parametrize("split", [True, False])
def test_what_is_pending_elsewhere_is_averaged_too(pool: Pool, split: bool):
    pool.run(untouched_by_the_synchronised_step, split)


def zeroed_while_pending(rank: int, world: int) -> None:
    """Gradients that the user drops or replaces are nobody's debt any more."""
    module = seeded(0, TwoWays)
    model, backend = compiled(module)
    side(0, "left")(model).backward()
    with backend.no_sync():
        side(1, "left")(model).backward()
    module.zero_grad()
    side(2, "right")(model).backward()
    same(module, average(local_gradients(module, side(2, "right"))), "dropped")
    expect(not backend.stats().last.uncovered, f"reduced nothing: {backend.stats().last.uncovered}")


def test_pending_gradients_may_be_dropped(pool: Pool):
    pool.run(zeroed_while_pending)


# ---- scopes ----------------------------------------------------------------------------------------------------------


def scopes(rank: int, world: int) -> None:
    module = seeded(0, Mlp)
    model, backend = compiled(module)
    loss_of(model, 0).backward()

    def is_local() -> bool:
        module.zero_grad()
        loss_of(model, 1).backward()
        one, other = local(module, 1), average(local(module, 1))
        kept = not backend.stats().last.sync
        same(module, one if kept else other, "record and gradients")
        return kept

    expect(not is_local(), "outside")
    with backend.no_sync():
        expect(is_local(), "inside")
        with backend.no_sync():
            expect(is_local(), "twice inside")
        expect(is_local(), "inside again")
        with fxddp.no_sync(model), backend.no_sync(module):
            expect(is_local(), "three kinds")
        expect(is_local(), "still inside")
    module.zero_grad()
    expect(not is_local(), "outside again")

    class Stop(Exception):
        pass

    def fail() -> None:
        with backend.no_sync(), fxddp.no_sync(model):
            loss_of(model, 1).backward()
            raise Stop

    expect(isinstance(error_of(fail), Stop), "an exception passes")
    expect(not is_local(), "after an exception")
    first, second = backend.no_sync(), backend.no_sync(module)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # in whatever order
    expect(is_local(), "the other one is still open")
    second.__exit__(None, None, None)
    expect(not is_local(), "at the end")


def test_scopes_nest_and_end(pool: Pool):
    pool.run(scopes)


# ---- outside of the graphs -------------------------------------------------------------------------------------------


class Gap(nn.Module):
    """Compiled, eager, compiled; one weight is used in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.gap = nn.Linear(8, 8)
        self.end = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.shared(self.leave(self.shared(x).relu())).relu())

    @torch._dynamo.disable
    def leave(self, x: Tensor) -> Tensor:
        return x + self.gap(x) * self.shared.weight.sum()


def eager_gap(rank: int, world: int, set_to_none: bool) -> None:
    module = seeded(0, Gap)
    model, backend = compiled(module)
    loss_of(model, 0).backward()
    same(module, average(local(module, 0)), "first step", tol=1e-5)
    expect({"gap.weight", "gap.bias"} <= set(backend.stats().last.uncovered), f"{backend.stats().last.uncovered}")
    for cycle in range(2):
        module.zero_grad(set_to_none=set_to_none)
        numbers = [10 * cycle + k for k in range(3)]
        for i in numbers[:-1]:
            with silent("gap under no_sync"), backend.no_sync():
                loss_of(model, i).backward()
        same(module, local(module, *numbers[:-1]), "pending", tol=1e-5)
        loss_of(model, numbers[-1]).backward()
        same(module, average(local(module, *numbers)), f"cycle {cycle}", tol=1e-5)
    module.zero_grad(set_to_none=set_to_none)
    with silent("forward inside"):
        with backend.no_sync():
            loss = loss_of(model, 5)
        loss.backward()
    same(module, local(module, 5), "forward inside, backward outside", tol=1e-5)
    loss = loss_of(model, 6)
    with backend.no_sync():
        loss.backward()
    same(module, average(local(module, 5, 6)), "forward outside, backward inside", tol=1e-5)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_eager_parameters_follow(pool: Pool, set_to_none: bool):
    pool.run(eager_gap, set_to_none)


def nothing_compiled(rank: int, world: int) -> None:
    module = seeded(0, Recurrent)
    model, backend = compiled(module)
    loss_of(model, 0).backward()
    same(module, average(local(module, 0)), "synchronised", tol=1e-6)
    module.zero_grad()
    for scope in (backend.no_sync(), fxddp.no_sync(model)):
        module.zero_grad()
        with silent("no_sync"), scope:
            loss_of(model, 1).backward()
        same(module, local(module, 1), "no_sync", tol=1e-6)
    loss_of(model, 2).backward()
    same(module, average(local(module, 1, 2)), "afterwards", tol=1e-6)


def test_a_model_of_which_nothing_is_compiled(pool: Pool):
    pool.run(nothing_compiled)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def hooks(rank: int, world: int) -> None:
    """Tensor hooks see local gradients, accumulation hooks run each time, whether or not it synchronises."""
    module = seeded(0, Mlp)
    seen: list[Tensor] = []
    after: list[Tensor] = []
    module.first.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    module.last.weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    model, backend = compiled(module)

    def run(i: int) -> None:
        seen.clear()
        after.clear()
        loss_of(model, i).backward()
        (one,), (two,) = seen, after
        expect_equal(
            {"first.weight": one}, {"first.weight": local(module, i)["first.weight"]}, "seen by the tensor hook"
        )
        expect(torch.equal(two, module.last.weight.grad), "the accumulation hook saw something else than .grad")

    run(0)
    same(module, average(local(module, 0)), "synchronised")
    module.zero_grad()
    for i in (1, 2):
        with silent("no_sync"), backend.no_sync():
            run(i)
    same(module, local(module, 1, 2), "no_sync")
    run(3)
    same(module, average(local(module, 1, 2, 3)), "afterwards")


def test_hooks_under_no_sync(pool: Pool):
    pool.run(hooks)
