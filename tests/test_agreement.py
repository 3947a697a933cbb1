"""Ranks agree on what a backward reduces, whatever order their compilers chose, or say by name how they differ."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxddp
from tests.live.lab import (
    Gradients,
    Mlp,
    average,
    buckets,
    compiled,
    data,
    error_of,
    expect,
    expect_equal,
    gradients,
    launches,
    local_gradients,
    loss_of,
    seeded,
    small_backend,
)
from tests.live.pool import Pool

SPLITS = pytest.mark.parametrize("split", [True, False])
Report = list[tuple[str, str]]


def square(y: Tensor) -> Tensor:
    return y.square().mean()


# ---- ranks that use different parameters -----------------------------------------------------------------------------


class Experts(nn.Module):
    """Three experts of one shape: their buckets would fit each other. One of them may run eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Tensor, which: int, *, eager: bool = False) -> Tensor:
        x = self.trunk(x).relu()
        return self.run_eagerly(x, which) if eager else self.experts[which](x)

    @torch._dynamo.disable
    def run_eagerly(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).relu()
        return self.left(x), self.right(x)


def expert(model: Any, which: int, i: int) -> Tensor:
    return square(model(data(i, 6, 8), which))


def eager_expert(model: Any, which: int, i: int) -> Tensor:
    return square(model(data(i, 6, 8), which, eager=True))


def sometimes_eager(model: Any, which: int, i: int) -> Tensor:
    loss = expert(model, 0, i)
    module = getattr(model, "_orig_mod", model)
    return loss + square(module.experts[2](data(i, 6, 16))) if which == 1 else loss


def head(model: Any, which: int, i: int) -> Tensor:
    return square(model(data(i, 6, 8))[which % 2])


DIFFERENT: dict[str, tuple[type[nn.Module], Callable[..., Tensor], tuple[str, ...]]] = {
    "compiled": (Experts, expert, ("experts.0.weight", "experts.1.weight")),
    "eager": (Experts, eager_expert, ("experts.0.weight", "experts.1.weight")),
    "eager or not at all": (Experts, sometimes_eager, ("experts.2.weight",)),
    "outputs": (Heads, head, ("left.weight", "right.weight")),
}


def run_different(rank: int, world: int, kind: str, seen: bool, split: bool) -> tuple[str, str]:
    make, loss, _ = DIFFERENT[kind]
    module = seeded(0, make)
    model, backend = compiled(module, split=split)
    which = min(rank, 1)  # the last ranks agree with each other
    if seen:
        for i in range(6):
            module.zero_grad()
            loss(model, i % 2, i).backward()
            expect_equal(
                gradients(module),
                average(local_gradients(module, partial(loss, which=i % 2, i=i))),
                f"step {i}",
                tol=1e-6,
            )
    module.zero_grad()
    error = error_of(lambda: loss(model, which, 9).backward(), f"{kind}, {seen=}")
    expect(not backend._running, "the backward that failed is still running")
    return type(error).__name__, str(error)


def check_different(results: list[tuple[str, str]], kind: str) -> None:
    for rank, (error, message) in enumerate(results):
        assert error == "RanksDisagree", f"rank {rank}: {error}: {message}"
        assert all(name in message for name in DIFFERENT[kind][2]), f"rank {rank}: {message}"
        assert re.search(r"rank [01]\b", message)
        assert "All ranks must use the same parameters in a step" in message


@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_that_use_different_parameters(pool: Pool, kind: str):
    check_different(pool.run(run_different, kind, True, True), kind)


@pytest.mark.parametrize("kind", sorted(DIFFERENT.keys() - {"eager or not at all"}))
def test_ranks_that_use_different_parameters_in_the_first_step(pool: Pool, kind: str):
    check_different(pool.run(run_different, kind, False, True), kind)


def test_ranks_that_use_different_parameters_unsplit(pool: Pool):
    check_different(pool.run(run_different, "compiled", True, False), "compiled")


def test_one_rank_of_three_uses_different_parameters(pool3: Pool):
    check_different(pool3.run(run_different, "compiled", True, True), "compiled")


def first_time_on_one_rank(rank: int, world: int, kind: str) -> None:
    make, loss, _ = DIFFERENT[kind]
    module = seeded(0, make)
    model, _ = compiled(module)
    for i in range(2):
        loss(model, 0, i).backward()
    for i in range(2):
        loss(model, rank, 5 + i).backward()


@pytest.mark.parametrize("kind", ["compiled", "eager or not at all"])
def test_a_rank_that_uses_other_parameters_for_the_first_time(kind: str):
    """The other goes on with what was settled and waits in a collective; both find out long before the timeout."""
    with Pool(2, group_timeout=60) as pool:
        errors = pool.run(first_time_on_one_rank, kind, expect_error=True)
    assert [error and error.type for error in errors] == ["RanksDisagree", "RanksDisagree"]
    assert all("reduce different parameters in the same backward" in error.message for error in errors)
    assert all(DIFFERENT[kind][2][-1] in error.message for error in errors)


def one_backward_more(rank: int, world: int) -> None:
    module = seeded(0, Experts)
    model, _ = compiled(module)
    for i in range(3):
        expert(model, i, i).backward()
    if rank == 0:
        expert(model, 1, 9).backward()


def test_a_rank_that_runs_one_more_backward_is_not_left_waiting():
    with Pool(2, group_timeout=7) as pool:
        error, fine = pool.run(one_backward_more, expect_error=True)
    assert fine is None
    assert error.type == "RanksDisagree"
    assert "did not come to the same point within the group's timeout" in error.message
    assert "experts.1.weight" in error.message


def stays_away(rank: int, world: int) -> str:
    """Rank 1 does something else for longer than the timeout, and comes back."""
    module = seeded(0, Experts)
    model, _ = compiled(module)
    expert(model, 0, 0).backward()
    if rank == 1:
        time.sleep(7)
    first = error_of(lambda: expert(model, 0, 1).backward())
    again = error_of(lambda: expert(model, 0, 2).backward())
    assert type(first).__name__ == type(again).__name__ == "RanksDisagree", (first, again)
    assert "start the training again from a checkpoint" in str(again)
    return str(first)


def test_a_rank_that_stays_away_hears_of_it_when_it_comes_back():
    with Pool(2, group_timeout=4) as pool:
        waited, away = pool.run(stays_away, discard=True)
    assert "rank 1 did not come to the same point within the group's timeout of 4 s" in waited
    assert "experts.0.weight" in waited
    assert "rank 0" in away
    assert "rank 1 did not come to the same point" in away


# ---- static_graph, find_unused_parameters ----------------------------------------------------------------------------


def static_graph(rank: int, world: int) -> list[str]:
    messages = []
    for make, loss in ((Experts, expert), (Heads, head)):
        module = seeded(0, make)
        model, backend = compiled(module, static_graph=True, find_unused_parameters=True)
        for i in range(3):
            module.zero_grad()
            loss(model, 0, i).backward()
        with backend.no_sync():
            loss(model, 0, 5).backward()
        loss(model, 0, 6).backward()
        module.zero_grad()
        error = error_of(lambda: loss(model, 1, 7).backward(), "another expert")  # noqa: B023 (called at once)
        messages.append(str(error))
        module.zero_grad()
        loss(model, 0, 8).backward()
        expect_equal(gradients(module), average(local_gradients(module, lambda m: loss(m, 0, 8))), "the step after")  # noqa: B023
    return messages


def test_static_graph(pool: Pool):
    for experts, heads in pool.run(static_graph):
        assert "static_graph=True, but the parameters that get gradients changed" in experts
        assert "came ['experts.1.bias', 'experts.1.weight']" in experts
        assert "went ['experts.0.bias', 'experts.0.weight']" in experts
        assert "came ['right.bias', 'right.weight']" in heads
        assert "went ['left.bias', 'left.weight']" in heads


def find_unused(rank: int, world: int) -> None:
    module = seeded(0, Heads)
    model, _ = compiled(module, find_unused_parameters=True)
    for i in range(4):
        module.zero_grad()
        head(model, i, i).backward()
        expect_equal(gradients(module), average(local_gradients(module, lambda m: head(m, i, i))), f"step {i}")  # noqa: B023


def test_find_unused_parameters_is_accepted(pool: Pool):
    pool.run(find_unused)


# ---- ranks that compile another order --------------------------------------------------------------------------------


class Branches(nn.Module):
    """Independent branches of one shape, computed in the order this rank was told."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.trunk = nn.Linear(8, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.wide = nn.Linear(8, 40)

    def forward(self, x: Tensor, *, wide_first: bool = False) -> tuple[Tensor, ...]:
        x = self.trunk(x).relu()
        found: dict[int, Tensor] = {}
        if wide_first:
            found[9] = self.wide(x).tanh()
        for k in self.order:
            found[k] = self.branches[k](x).tanh()
        if not wide_first:
            found[9] = self.wide(x).tanh()
        return tuple(found[k] for k in sorted(found))


ORDERS = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1))


def branches(model: Any, i: int, *, left_out: int = -1, **options: Any) -> Tensor:
    outputs = model(data(i, 6, 8), **options)
    return sum((square(y) * (k + 1) for k, y in enumerate(outputs) if k != left_out), torch.zeros(()))


def other_order(rank: int, world: int, split: bool, bucket_mb: float) -> None:
    module = seeded(0, lambda: Branches(ORDERS[rank]))
    model, backend = compiled(module, split=split, bucket_mb=bucket_mb, first_bucket_mb=bucket_mb)
    options = {"wide_first": rank == 1}

    def local(*numbers: int, **more: Any) -> Gradients:
        return local_gradients(module, *(lambda m, i=i: branches(m, i, **options, **more) for i in numbers))

    for i in range(3):
        module.zero_grad()
        branches(model, i, **options).backward()
        expect_equal(gradients(module), average(local(i)), f"step {i}", tol=1e-6)
    normal = backend.stats().last
    counts = [None] * world
    torch.distributed.all_gather_object(counts, (normal.launches, normal.bytes))
    expect(len(set(counts)) == 1, f"ranks launched {counts}")
    expect(not normal.uncovered, f"{normal.uncovered}")
    orders = [None] * world
    names = [[module_names(module)[id(p)] for p in order] for order in layouts(backend, module)]
    torch.distributed.all_gather_object(orders, names)
    expect(len({repr(order) for order in orders}) == world, f"all ranks compiled the same order: {orders}")

    module.zero_grad()
    with backend.no_sync():
        branches(model, 3, **options).backward()
    expect_equal(gradients(module), local(3), "under no_sync", tol=1e-6)
    branches(model, 4, **options).backward()
    expect_equal(gradients(module), average(local(3, 4)), "accumulated", tol=1e-6)

    for left_out in (1, 3):
        module.zero_grad()
        branches(model, 5, left_out=left_out, **options).backward()
        expect_equal(gradients(module), average(local(5, left_out=left_out)), f"without output {left_out}", tol=1e-6)

    seen: dict[str, Tensor] = {}
    module.branches[1].weight.register_hook(lambda gradient: gradient * 2)
    module.branches[2].weight.register_post_accumulate_grad_hook(lambda p: seen.update(weight=p.grad.clone()))
    for i in (6, 7):
        module.zero_grad()
        branches(model, i, **options).backward()
        expected = average({n: g * 2 if n == "branches.1.weight" and g is not None else g for n, g in local(i).items()})
        if i == 6:
            expect(expected["branches.1.weight"] is not None, "this tests nothing")
        expect_equal(gradients(module), expected, f"with hooks, step {i}", tol=1e-6)
        expect_equal(seen, {"weight": expected["branches.2.weight"]}, "what the accumulation hook saw", tol=1e-6)


def module_names(module: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in module.named_parameters()}


def layouts(backend: fxddp.Backend, module: nn.Module) -> list[list[Tensor]]:
    """The parameters of each plan, in the order in which this rank compiled them."""
    found = []
    for site in backend.sites:
        assert site.compilation.backward is not None
        (binding,) = site._bindings._known.values()
        (_, event) = next(iter(binding._events.values()))
        found.append([backend.replica.tensor(number) for bucket in event.buckets for number in bucket])
    return found


@SPLITS
@pytest.mark.parametrize("bucket_mb", [0.0005, 0.001])
def test_ranks_that_compile_another_order(pool: Pool, split: bool, bucket_mb: float):
    pool.run(other_order, split, bucket_mb)


def test_three_ranks_that_compile_another_order(pool3: Pool):
    pool3.run(other_order, True, 0.0005)


def same_class_in_another_order(rank: int, world: int, differs: bool) -> str:
    """Two models of one class in one graph have parameters of the same names and shapes."""
    raw = [seeded(k, Mlp) for k in range(2)]
    both = nn.ModuleList(raw)
    first, second = raw
    backend = small_backend()
    turned = differs and rank == 1

    def loss(x: Tensor) -> Tensor:
        if turned:
            b = square(second(x))
            return square(first(x)) * 2 + b
        a = square(first(x))
        return square(second(x)) + a * 2

    model = torch.compile(loss, backend=backend)
    for i in range(2):
        both.zero_grad()
        loss(data(i, 6, 8)).backward()
        expected = average(gradients(both))
        both.zero_grad()
        try:
            model(data(i, 6, 8)).backward()
        except fxddp.RanksDisagree as error:
            return str(error)
        expect_equal(gradients(both), expected, f"step {i}", tol=1e-6)
    return ""


@pytest.mark.parametrize("differs", [False, True])
def test_two_models_of_one_class_in_one_graph(pool: Pool, differs: bool):
    for message in pool.run(same_class_in_another_order, differs):
        assert not message


class EagerBranches(nn.Module):
    """Nothing of the branches is compiled."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.trunk = nn.Linear(8, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.branch(self.trunk(x).relu())

    @torch._dynamo.disable
    def branch(self, x: Tensor) -> tuple[Tensor, ...]:
        found = {k: self.branches[k](x).tanh() for k in self.order}
        return tuple(found[k] for k in range(3))


def eager_in_another_order(rank: int, world: int, hooked: bool) -> str:
    module = seeded(0, lambda: EagerBranches(((0, 1, 2), (2, 0, 1))[rank]))
    model, backend = compiled(module)
    if hooked:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: None)
    for i in range(3):
        module.zero_grad()
        if hooked:  # each wants its average at once, in an order that the other rank does not have
            return str(error_of(branches(model, i).backward))
        branches(model, i).backward()
        expect_equal(gradients(module), average(local_gradients(module, partial(branches, i=i))), f"step {i}", tol=1e-6)
    expect(len(backend.stats().last.uncovered) == 6, f"{backend.stats().last.uncovered}")
    return ""


def test_eager_branches_in_another_order(pool: Pool):
    pool.run(eager_in_another_order, False)


def test_eager_branches_in_another_order_that_hooks_wait_for(pool: Pool):
    for message in pool.run(eager_in_another_order, True):
        assert "ranks reduce different parameters in the same backward" in message
        assert re.search(r"only rank 0 has gradients of branches\.2\.", message) or "rank 1" in message


class FirstEager(nn.Module):
    """Dynamo compiles nothing of a module with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)[0]


class SecondEager(nn.Module):
    """As the other one, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x)[0]


def met_in_another_order(rank: int, world: int) -> None:
    both = seeded(0, lambda: nn.ModuleList([FirstEager(), SecondEager()]))
    backend = small_backend()
    models: dict[int, Any] = {}
    for k in (1, 0) if rank else (0, 1):
        models[k] = torch.compile(both[k], backend=backend)
        with torch.no_grad():
            models[k](data(0, 6, 8))

    def loss(m: Any, i: int) -> Tensor:
        return square(m[0](data(i, 6, 8))) + square(m[1](data(i, 6, 8)) - 1)

    for i in range(2):
        both.zero_grad()
        loss(models, i).backward()
        expected = average(local_gradients(both, partial(loss, i=i)))
        expect_equal(gradients(both), expected, f"step {i}", tol=1e-6)
    expect(len(backend.stats().last.uncovered) == 8, f"{backend.stats().last.uncovered}")


def test_eager_modules_met_in_another_order(pool: Pool):
    pool.run(met_in_another_order)


# ---- what it costs ---------------------------------------------------------------------------------------------------


def announced(rank: int, world: int) -> None:
    """A record for each graph and one for the end; under `no_sync` none, and in a static graph none after the first."""
    module = seeded(0, Mlp)
    model, backend = compiled(module)

    def records(step: Callable[[], object]) -> int:
        group = backend.lookup()
        assert group is not None
        before = group.channel.step
        step()
        return group.channel.step - before

    expect(records(lambda: loss_of(model, 0)) == 2, "first contact: what there is, and what came too late")
    expect(records(lambda: loss_of(model, 0)) == 0, "forwards announce nothing")
    for i in range(3):
        expect(records(loss_of(model, i).backward) == 2, f"step {i}")
        with backend.no_sync():
            expect(records(loss_of(model, i).backward) == 0, f"under no_sync {i}")
    for size in (3, 4, 5, 7):  # another shape is the same set of parameters
        expect(records(square(model(data(0, size, 8))).backward) == 2, f"{size} rows")
    expect(buckets(backend) > launches(backend)[-1], "one graph: this tests nothing")

    static = seeded(1, Mlp)
    model, backend = compiled(static, static_graph=True)
    expect(records(lambda: loss_of(model, 0).backward()) == 4, "contact, graph and end")
    for i in range(3):
        static.zero_grad()
        expect(records(loss_of(model, i).backward) == 0, f"static step {i}")
        expect_equal(gradients(static), average(local_gradients(static, partial(loss_of, i=i))), f"static step {i}")


def test_what_an_agreement_costs(pool: Pool):
    pool.run(announced)
