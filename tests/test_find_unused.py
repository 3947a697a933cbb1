"""Ranks that use different parameters in one step: averaged over the union; or the same ones in other graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.live.lab import (
    Gradients,
    compiled,
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
from tests.test_agreement import Experts, Heads, eager_expert, expert, head, sometimes_eager, square

SPLITS = pytest.mark.parametrize("split", [True, False])


def union_average(local: Gradients, shapes: nn.Module) -> Gradients:
    """The averages over the ranks, zeros where a rank has none; None where no rank has one."""
    found: Gradients = {}
    for name, parameter in shapes.named_parameters():
        mine = local[name]
        there = torch.tensor(float(mine is not None))
        dist.all_reduce(there)
        flat = torch.zeros_like(parameter) if mine is None else mine / dist.get_world_size()
        dist.all_reduce(flat)
        found[name] = flat if there else None
    return found


KINDS: dict[str, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    "compiled": (Experts, expert),
    "eager": (Experts, eager_expert),
    "eager or not at all": (Experts, sometimes_eager),
    "outputs": (Heads, head),
}


def routed(rank: int, world: int, kind: str, split: bool) -> None:
    """Every rank draws a branch of its own in every step; all steps of every kind of accumulation."""
    make, loss = KINDS[kind]
    module = seeded(0, make)
    model, backend = compiled(module, split=split, find_unused_parameters=True)
    stock_module = seeded(0, make)
    stock = DistributedDataParallel(stock_module, find_unused_parameters=True)
    draw = random.Random(5 * rank)
    before: Gradients = dict.fromkeys(gradients(module))
    for i in range(8):
        which = draw.randrange(3)
        if i % 3 != 2:  # or else on top of the averages of the last step
            module.zero_grad()
            stock_module.zero_grad()
            before = dict.fromkeys(before)
        new = [local_gradients(module, partial(loss, which=which, i=i))]
        if i % 2:  # another branch under no_sync first: what was used there counts as well
            with_it = draw.randrange(3)
            new.append(local_gradients(module, partial(loss, which=with_it, i=20 + i)))
            with backend.no_sync():
                loss(model, with_it, 20 + i).backward()
        loss(model, which, i).backward()
        expected = union_average(total(before, *new), module)
        expect_equal(gradients(module), expected, f"{kind}, step {i}", tol=1e-6)
        before = gradients(module)
        if kind != "eager or not at all" and not i % 2:  # stock DDP does not see uses outside of its forward
            loss(stock, which, i).backward() if i % 3 != 2 else None
            if i % 3 != 2:
                expect_equal(gradients(module), gradients(stock_module), f"stock DDP, step {i}", tol=1e-6)
    expect(not backend._running, "a backward is still running")


@SPLITS
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_uses_other_parameters(pool: Pool, kind: str, split: bool):
    pool.run(routed, kind, split)


@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_use_other_parameters(pool3: Pool, kind: str):
    pool3.run(routed, kind, True)


def untouched(rank: int, world: int) -> None:
    """What no rank uses keeps its `.grad`, and an optimizer with weight decay and momentum leaves it alone."""
    module = seeded(0, Experts)
    model, backend = compiled(module, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    start = module.experts[2].weight.detach().clone()
    for i in range(4):
        optimizer.zero_grad()
        expert(model, (i + rank) % 2, i).backward()
        expect(module.experts[2].weight.grad is None, f"step {i}: a gradient from nowhere")
        optimizer.step()
    expect(torch.equal(module.experts[2].weight, start), "weight decay moved what nobody used")
    module.experts[2].weight.grad = kept = torch.full_like(start, 3.0)
    expert(model, rank, 9).backward()
    expect(module.experts[2].weight.grad is kept and bool((kept == 3).all()), "its .grad was touched")
    del backend


def test_what_no_rank_uses_is_left_alone(pool: Pool):
    pool.run(untouched)


def bytes_of_dropped_layers(rank: int, world: int) -> None:
    """Layers that all ranks drop are not sent at all."""
    module = seeded(0, Experts)
    model, backend = compiled(module, find_unused_parameters=True)
    full = sum(p.nbytes for p in module.parameters())
    trunk, one = (sum(p.nbytes for p in m.parameters()) for m in (module.trunk, module.experts[0]))
    expert(model, 0, 0).backward()
    expect(backend.stats().last.bytes == trunk + one < full, f"{backend.stats().last.bytes} bytes for one expert")
    expert(model, rank, 1).backward()
    last = backend.stats().last
    expect(last.bytes == trunk + 2 * one, f"{last.bytes} bytes for two experts")
    sent = [None] * world
    dist.all_gather_object(sent, (last.launches, last.bytes))
    expect(len(set(sent)) == 1, f"ranks sent {sent}")


def test_dropped_layers_are_not_sent(pool: Pool):
    pool.run(bytes_of_dropped_layers)


def overlapped(rank: int, world: int) -> None:
    """Buckets of the union are launched while later pieces still run."""
    module = seeded(0, Experts)
    model, backend = compiled(module, find_unused_parameters=True)
    for i in range(2):
        expert(model, rank, i).backward()
    kinds = [kind for kind, _, _ in backend.stats().last.events]
    expect("launch" in kinds[: len(kinds) - 1 - kinds[::-1].index("piece")], f"nothing overlaps: {kinds}")


def test_the_union_overlaps(pool: Pool):
    pool.run(overlapped)


# ---- the same parameters in other graphs: no argument needed ---------------------------------------------------------


class Breaking(nn.Module):
    """Two layers in one graph, or in two, or with one of them run eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, how: str) -> Tensor:
        x = self.first(x).relu()
        if how == "break":
            torch._dynamo.graph_break()
        x = self.eagerly(x) if how == "eager" else self.second(x)
        return self.third(x.relu())

    @torch._dynamo.disable
    def eagerly(self, x: Tensor) -> Tensor:
        return self.second(x)


def breaking(model: Any, i: int, how: str) -> Tensor:
    return square(model(data(i, 6, 8), how))


def grouped(rank: int, world: int, ways: tuple[str, ...], split: bool, find_unused: bool) -> None:
    module = seeded(0, Breaking)
    model, backend = compiled(module, split=split, find_unused_parameters=find_unused)
    how = ways[rank]
    for i in range(5):
        if i != 3:
            module.zero_grad()
        before = gradients(module)
        new = local_gradients(module, partial(breaking, i=i, how=how))
        breaking(model, i, how).backward()
        expect_equal(gradients(module), union_average(total(before, new), module), f"{ways}, step {i}", tol=1e-6)
    module.zero_grad()
    with backend.no_sync():
        breaking(model, 7, how).backward()
    breaking(model, 8, how).backward()
    new = local_gradients(module, *(partial(breaking, i=i, how=how) for i in (7, 8)))
    expect_equal(gradients(module), union_average(new, module), f"{ways}, accumulated", tol=1e-6)
    module.zero_grad()
    breaking(model, 9, "whole").backward()
    new = local_gradients(module, partial(breaking, i=9, how="whole"))
    expect_equal(gradients(module), union_average(new, module), f"{ways}, equal again", tol=1e-6)
    expect(not backend.stats().last.uncovered, "what all ranks compiled alike was not reduced by the graph")


@pytest.mark.parametrize("find_unused", [False, True])
@SPLITS
@pytest.mark.parametrize("ways", [("whole", "break"), ("eager", "whole"), ("break", "eager")])
def test_ranks_that_break_their_graphs_elsewhere(pool: Pool, ways: tuple[str, ...], split: bool, find_unused: bool):
    pool.run(grouped, ways, split, find_unused)


def test_three_ranks_that_break_their_graphs_elsewhere(pool3: Pool):
    pool3.run(grouped, ("whole", "break", "eager"), True, False)


class Shaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, turns: int) -> Tensor:
        for _ in range(turns):
            x = self.inner(x).tanh()
        return self.last(x)


def turns(model: Any, i: int, n: int) -> Tensor:
    return square(model(data(i, 6, 8), n))


def limited(rank: int, world: int) -> None:
    """One rank compiles a variant for each number of turns until Dynamo gives up; the other always does the same."""
    module = seeded(0, Shaped)
    with torch._dynamo.config.patch(recompile_limit=3, accumulated_recompile_limit=3):
        torch._dynamo.reset()
        model, backend = compiled(module)
        for i in range(7):
            module.zero_grad()
            n = 1 + i * rank
            turns(model, i, n).backward()
            new = local_gradients(module, partial(turns, i=i, n=n))
            expect_equal(gradients(module), union_average(new, module), f"step {i}", tol=1e-6)
    uncovered = backend.stats().last.uncovered
    expect(bool(uncovered), "the limit was not reached: this tests nothing")
    torch._dynamo.reset()


def test_a_recompile_limit_on_one_rank_only(pool: Pool):
    pool.run(limited)


def hooked(rank: int, world: int) -> tuple[str, str]:
    """A hook that needs the average now cannot wait for the end of the backward."""
    module = seeded(0, Breaking)
    module.second.weight.register_post_accumulate_grad_hook(lambda p: None)
    model, _ = compiled(module)
    error = error_of(lambda: breaking(model, 0, ("whole", "break")[rank]).backward())
    module.zero_grad()
    breaking(model, 1, "whole").backward()
    new = local_gradients(module, partial(breaking, i=1, how="whole"))
    expect_equal(gradients(module), union_average(new, module), "the step after", tol=1e-6)
    return type(error).__name__, str(error)


def test_a_hook_that_cannot_wait(pool: Pool):
    for kind, message in pool.run(hooked):
        assert kind == "RanksDisagree"
        assert "second.weight has an accumulation hook" in message or "took different paths" in message


def hooks_on_one_rank(rank: int, world: int) -> str:
    module = seeded(0, Breaking)
    if rank:
        module.second.weight.register_hook(lambda gradient: gradient * 2)
    model, _ = compiled(module, find_unused_parameters=True)
    return str(error_of(lambda: breaking(model, 0, "whole").backward()))


def test_tensor_hooks_on_one_rank_only(pool: Pool):
    for message in pool.run(hooks_on_one_rank):
        assert "tensor hooks sit on nothing on rank 0 and on second.weight (12, 16) on rank 1" in message


# ---- stand-ins leave alone what is not theirs ------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Two heads in one graph; or only one of them, by eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 5)

    def forward(self, x: Tensor, eagerly: str = "") -> tuple[Tensor | None, Tensor | None]:
        if eagerly:
            return (self.by_hand(x, self.left), None) if eagerly == "left" else (None, self.by_hand(x, self.right))
        return self.left(x), self.right(x)

    @torch._dynamo.disable
    def by_hand(self, x: Tensor, layer: nn.Linear) -> Tensor:
        return layer(x)


def used_heads(model: Any, i: int, eagerly: str, used: str) -> Tensor:
    left, right = model(data(i, 6, 8), eagerly)
    heads = [head for name, head in (("left", left), ("right", right)) if head is not None and name in used]
    return sum((square(head) for head in heads), torch.zeros(()))


def stand_in(rank: int, world: int, hooked: bool) -> None:
    """Ranks at a graph and at the end of a backward, with a head that only one of them uses, or nobody."""
    module = seeded(0, TwoHeads)
    if hooked:
        module.right.weight.register_hook(lambda gradient: gradient * 2)
    model, _ = compiled(module, find_unused_parameters=True)
    steps = [
        (("", "right"), ("left", "right")),  # dropped in a graph, and computed by eager code of the other rank
        (("", "left"), ("left", "left")),  # used by nobody: .grad, if there is one, stays
        (("", "left"), ("left right", "left")),
        (("", "right"), ("left right", "right")),
    ]
    for i, (eagerly, used) in enumerate(steps):
        for kept in (False, True):
            module.zero_grad()
            before: Gradients = dict.fromkeys(gradients(module))
            if kept:  # .grad of an earlier step, which all ranks have
                used_heads(model, 9, "", "left right").backward()
                before = gradients(module)
            new = local_gradients(module, partial(used_heads, i=i, eagerly=eagerly[rank], used=used[rank]))
            if hooked and new["right.weight"] is not None:  # a copy has no hooks
                new["right.weight"] *= 2
            expected = union_average(new, module)
            used_heads(model, i, eagerly[rank], used[rank]).backward()
            expect_equal(gradients(module), total(before, expected), f"step {i}, {kept=}, {hooked=}", tol=1e-5)


@pytest.mark.parametrize("hooked", [False, True])
def test_stand_ins(pool: Pool, hooked: bool):
    pool.run(stand_in, hooked)


def optimizer_in_backward(rank: int, world: int) -> None:
    """A hook that updates a parameter runs on every rank that gets its average, with or without a part in it."""
    module = seeded(0, Experts)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    model, _ = compiled(module, find_unused_parameters=True)
    for i in range(4):
        expert(model, (rank + i) % 3, i).backward()
        expect(all(p.grad is None for p in module.parameters()), f"step {i}: a gradient was left")
    for name, parameter in module.named_parameters():
        everyone = [torch.empty_like(parameter) for _ in range(world)]
        dist.all_gather(everyone, parameter.detach())
        expect(all(torch.equal(one, everyone[0]) for one in everyone), f"{name} differs between ranks")


@torch.no_grad()
def update(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.sub_(parameter.grad)
        parameter.grad = None


def test_an_optimizer_in_backward_runs_on_every_rank(pool: Pool):
    pool.run(optimizer_in_backward)


def static_ways(rank: int, world: int) -> None:
    """Ranks that break their graphs elsewhere, alike in every step: what the first one decided is repeated."""
    module = seeded(0, Breaking)
    model, backend = compiled(module, static_graph=True, find_unused_parameters=True)
    how = ("whole", "break")[rank]
    for i in range(4):
        module.zero_grad()
        new = local_gradients(module, partial(breaking, i=i, how=how))
        breaking(model, i, how).backward()
        expect_equal(gradients(module), union_average(new, module), f"step {i}", tol=1e-6)
    expect(len(backend.stats().backwards) == 4, "a backward is missing")


def test_a_static_graph_that_ranks_break_elsewhere(pool: Pool):
    pool.run(static_ways)
