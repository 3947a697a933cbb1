"""Tables that travel in rows, on live ranks: the numbers of an all-reduce, whatever batches the ranks have.

And all of the table where its rows do not tell everything, on all ranks alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fxddp
from fxddp.passes.tables import INDEX
from tests.live.lab import (
    Gradients,
    average,
    compiled,
    counted_collectives,
    error_of,
    expect,
    expect_equal,
    gradients,
    local_gradients,
    seeded,
    small_backend,
)
from tests.live.pool import Pool

ENTRIES, WIDTH = 300, 6


ONE = {"bucket_mb": 1, "first_bucket_mb": 1}
"""All gradients of a dtype in one bucket."""


class Lookup(nn.Module):
    """An embedding, one of whose rows gets no gradient, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(ENTRIES, WIDTH, padding_idx=3), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table(x)).tanh()


class Towers(nn.Module):
    """Tables of several sizes, which are read in all ways: by computed and negative indices, twice, in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ENTRIES, WIDTH), nn.Parameter(torch.randn(2 * ENTRIES, WIDTH))
        self.tags, self.small = nn.EmbeddingBag(ENTRIES, WIDTH, mode="mean"), nn.Embedding(8, WIDTH)
        self.between, self.last = nn.Linear(WIDTH, WIDTH), nn.Embedding(ENTRIES, 1)

    def forward(self, x: Tensor) -> Tensor:
        item = self.item[x * 7 % ENTRIES] + self.item[-1 - x]
        pair = self.tags(x.view(-1, 1)) + self.small(x % 8)
        return self.between(self.user(x) * item + pair).tanh() + self.last(x)


class Wide(nn.Module):
    """Tables of dtypes whose rows end at odd places in a message."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.wide = (
            nn.Embedding(ENTRIES, 5, dtype=torch.bfloat16),
            nn.Embedding(ENTRIES, 3, dtype=torch.float64),
        )
        self.odd = nn.Embedding(ENTRIES, 7, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        return self.short(x).float().sum() + self.wide(x).square().sum() + self.odd(x).float().square().sum()


class Tied(Lookup):
    """A table that is the projection, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) @ self.table.weight.T


class Chooses(Lookup):
    """Reads a second table where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Embedding(ENTRIES, WIDTH)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return self.layer(self.other(x) if other else self.table(x)).tanh()


class OneHot(Lookup):
    """A table on some ranks, a product of matrices on the others."""

    dense = False

    def forward(self, x: Tensor) -> Tensor:
        rows = F.one_hot(x, ENTRIES).float() @ self.table.weight if self.dense else self.table.weight[x]
        return self.layer(rows).tanh()


class Breaks(Lookup):
    """Its graph ends after the lookup, on one rank."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.layer(hidden).tanh()


def indices(i: int, count: int, entries: int = ENTRIES) -> Tensor:
    """Places in a table, others for each `i` and rank; some come several times, and one is the padding."""
    drawn = torch.randint(0, entries, (count,), generator=torch.Generator().manual_seed(100 * i + dist.get_rank()))
    drawn[: count // 4] = drawn[-1:]
    drawn[count // 2 :][:1] = 3
    return drawn


def loss_of(x: Tensor, **options: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(x, **options).square().sum()


def expected(module: nn.Module, x: Tensor) -> Gradients:
    return average(local_gradients(module, loss_of(x)))


def step(model: Any, backend: fxddp.Backend, x: Tensor, what: str, *, tol: float = 0.0) -> bool:
    """A backward, compared with the average by hand; whether less than the gradients travelled."""
    module = model._orig_mod
    want = expected(module, x)
    with counted_collectives() as started:
        loss_of(x)(model).backward()
    expect_equal(gradients(module), want, what, tol)
    record = backend.stats().last
    in_rows = record.wire_bytes < record.bytes
    expect(in_rows == ("_allgather_base" in started), f"{what}: {started}, {record.wire_bytes} of {record.bytes} bytes")
    return in_rows


# ---- the same numbers ------------------------------------------------------------------------------------------------


def batches(rank: int, world: int) -> None:
    """Batches of other sizes on each rank and in each step, empty ones too."""
    for make, options in (
        (Lookup, {}),
        (Lookup, {"static_graph": True}),
        (Towers, {}),
        (Wide, {}),
        (Towers, ONE),
        (Wide, ONE),
    ):
        for dynamic in (False, True):
            torch._dynamo.reset()  # whose limit of graphs for one function would be reached
            module = seeded(0, make)
            backend = small_backend(**options)
            model = torch.compile(module, backend=backend, dynamic=dynamic)
            for i, count in enumerate((8, 8, 5 + 3 * rank, 20, 6 - 6 * rank, 1)):
                module.zero_grad()
                what = f"{make.__name__} {options} dynamic={dynamic} step {i}"
                expect(step(model, backend, indices(i, count), what), f"{what}: all of the tables travelled")


def test_batches_of_all_sizes(pool: Pool) -> None:
    pool.run(batches, timeout=240)


def bytes_of_rows(rank: int, world: int) -> None:
    module = seeded(0, Lookup)
    model, backend = compiled(module)
    step(model, backend, indices(0, 4 + rank), "a batch")
    rows = world * (3 + world) * (INDEX + 4 * WIDTH) // 2
    expect(backend.stats().last.wire_bytes == rows + 4 * (4 * WIDTH + 4), f"{backend.stats().last.wire_bytes} bytes")


def test_what_travels_is_counted(pool: Pool) -> None:
    pool.run(bytes_of_rows)


def three(rank: int, world: int) -> None:
    """All ranks hold the same sums, bit by bit."""
    for make in (Lookup, Towers):
        module = seeded(0, make)
        model, backend = compiled(module)
        for i in range(2):
            module.zero_grad()
            expect(step(model, backend, indices(i, 6 + rank), make.__name__), "all of the tables travelled")
            for name, parameter in module.named_parameters():
                copies = [torch.empty_like(parameter) for _ in range(world)]
                assert parameter.grad is not None
                dist.all_gather(copies, parameter.grad)
                expect(all(torch.equal(each, copies[0]) for each in copies), f"{name} differs between ranks")


def test_three_ranks(pool3: Pool) -> None:
    pool3.run(three, timeout=120)


def casts(rank: int, world: int) -> None:
    """Rows are sent in 16 bits, and added up in the table's own dtype; the rest is added up in 16 bits."""
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        module = seeded(0, Lookup)
        model, backend = compiled(module, comm_hook=name, **ONE)
        x = indices(0, 9 - rank)
        local = local_gradients(module, loss_of(x))
        want: Gradients = {}
        for key, gradient in local.items():
            assert gradient is not None
            small = (gradient / world).to(dtype)
            want[key] = wide = small.float() if key == "table.weight" else small
            dist.all_reduce(wide)
            want[key] = wide.float()
        loss_of(x)(model).backward()
        expect_equal(gradients(module), want, name)
        rows = world * 9 * (INDEX + 2 * WIDTH) // 2
        expect(backend.stats().last.wire_bytes == rows + 2 * (4 * WIDTH + 4), f"{backend.stats().last.wire_bytes}")


def test_in_16_bits(pool: Pool) -> None:
    pool.run(casts)


def not_finite(rank: int, world: int) -> None:
    """What is not a number on one rank is not a number on all, in its row alone."""
    module = seeded(0, Lookup)
    model, backend = compiled(module)
    x = torch.arange(10 * rank + 4, 10 * rank + 12)
    scale = torch.ones(8, 1)
    scale[rank] = math.inf if rank else math.nan
    (model(x) * scale).sum().backward()
    assert module.table.weight.grad is not None
    bad = (~module.table.weight.grad.isfinite()).any(1).nonzero().flatten().tolist()
    expect(bad == [4, 15], f"rows {bad} are not finite")
    expect(backend.stats().last.wire_bytes < backend.stats().last.bytes, "all of the table travelled")


def test_what_is_not_finite(pool: Pool) -> None:
    pool.run(not_finite)


def with_inductor(rank: int, world: int) -> None:
    module = seeded(0, Towers)
    backend = fxddp.backend("auto")
    model = torch.compile(module, backend=backend)
    for i in range(2):
        module.zero_grad()
        expect(step(model, backend, indices(i, 8), f"step {i}", tol=1e-5), "all of the tables travelled")
    (plan,) = backend.plans
    rows = [grad.rows for grad in plan.grads if grad.rows]
    expect(sorted(rows) == [8, 8, 8, 8, 16], f"{rows} rows were found")


def test_with_inductor_and_auto(pool: Pool) -> None:
    pool.run(with_inductor, timeout=240)


def optimizers(rank: int, world: int) -> None:
    """Updates in the backward, and in the next forward, are those of the averages."""
    for overlap in (None, "next_forward"):
        module = seeded(0, Lookup)
        plain = copy.deepcopy(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        model, backend = compiled(module, optimizer=optimizer, overlap=overlap)
        for i in range(4):
            x = indices(i, 6 + rank)
            loss_of(x)(model).backward()
            for name, gradient in expected(plain, x).items():
                plain.get_parameter(name).grad = gradient
            reference.step()
            record = backend.stats().last
            expect(record.wire_bytes < record.bytes, f"{overlap}, step {i}: all of the table travelled")
        backend.synchronize()
        expect_equal(dict(module.state_dict()), dict(plain.state_dict()), f"weights, overlap={overlap}")


def test_an_optimizer_in_backward(pool: Pool) -> None:
    pool.run(optimizers, timeout=120)


# ---- all of the table ------------------------------------------------------------------------------------------------


def accumulated(rank: int, world: int) -> None:
    """What is to be added to a table, if only on one rank, makes all of it travel, on all; once."""
    module = seeded(0, Lookup)
    model, backend = compiled(module)

    def batch(i: int, before: Gradients | None = None) -> bool:
        x = indices(i, 5)
        local = local_gradients(module, loss_of(x))
        for name, gradient in (before or {}).items():
            mine = local[name]
            local[name] = mine if gradient is None or mine is None else mine + gradient
        want = average(local)
        loss_of(x)(model).backward()
        expect_equal(gradients(module), want, f"step {i}")
        module.zero_grad()
        return backend.stats().last.wire_bytes < backend.stats().last.bytes

    expect(batch(0), "all of the table travelled")
    if rank:
        module.table.weight.grad = torch.ones_like(module.table.weight)
    expect(not batch(1, gradients(module) if rank else None), "rows travelled, of more than what they hold")
    expect(batch(2), "all of the table travelled again")
    with backend.no_sync():
        loss_of(indices(3, 5))(model).backward()
    expect(not batch(4, gradients(module)), "rows travelled after no_sync")
    loss_of(indices(5, 5))(model).backward()
    module.zero_grad(set_to_none=False)
    expect(not batch(6), "rows travelled of a bucket that is filled again")
    expect(batch(7), "all of the table travelled again")


def test_something_accumulated(pool: Pool) -> None:
    pool.run(accumulated)


def whole(rank: int, world: int) -> None:
    """Where rows would be no less to send, or buckets travel in another way."""

    def hooked(module: nn.Module, backend: fxddp.Backend) -> None:
        module.get_parameter("table.weight").register_hook(lambda gradient: gradient * 1)

    def other_hook(module: nn.Module, backend: fxddp.Backend) -> None:
        backend.register_comm_hook(None, default_hooks.allreduce_hook)

    def nothing(module: nn.Module, backend: fxddp.Backend) -> None:
        pass

    for make, count, options, change in (
        (Lookup, 200, {}, nothing),
        (Tied, 5, {}, nothing),
        (Lookup, 5, {"split": False}, nothing),
        (Lookup, 5, {}, hooked),
        (Lookup, 5, {}, other_hook),
        (Lookup, 5, {"algorithm": "ring"}, nothing),
    ):
        module = seeded(0, make)
        model, backend = compiled(module, **options)
        for i in range(2):
            module.zero_grad()
            if i:
                change(module, backend)
            want = expected(module, x := indices(i, count))
            loss_of(x)(model).backward()
            what = f"{make.__name__} {count} {options} {change.__name__}"
            expect_equal(gradients(module), want, what, 1e-6)
            record = backend.stats().last
            in_rows = i == 0 and change is not nothing
            expect(in_rows == (record.wire_bytes < record.bytes), f"{what}, step {i}: {record.wire_bytes} bytes")


def test_the_whole_table(pool: Pool) -> None:
    pool.run(whole, timeout=120)


def different(rank: int, world: int) -> None:
    """Ranks that are at other steps: other tables, another graph, no inputs any more."""
    module = seeded(0, Chooses)
    model, backend = compiled(module, find_unused_parameters=True)
    for i, others in enumerate(([False, True], [False, False], [True, False], [True, True])):
        module.zero_grad()
        x, other = indices(i, 5), others[rank]
        local = local_gradients(module, loss_of(x, other=other))
        unused = ["table.weight"] * all(others) + ["other.weight"] * (not any(others))
        there: Gradients = {
            name: torch.zeros_like(module.get_parameter(name)) if gradient is None else gradient
            for name, gradient in local.items()
        }
        want = average(there) | dict.fromkeys(unused)
        loss_of(x, other=other)(model).backward()
        expect_equal(gradients(module), want, f"unused on one rank, step {i}")
        record = backend.stats().last
        expect((record.wire_bytes < record.bytes) == (others[0] == others[1]), f"{record.wire_bytes} bytes in step {i}")

    for kind, static in ((Breaks, False), (OneHot, False), (OneHot, True)):
        differs: Any = seeded(0, kind)
        differs.broken = differs.dense = rank == 1
        model, backend = compiled(differs, static_graph=static)
        for i in range(3):
            differs.zero_grad()
            want = expected(differs, x := indices(i, 5))
            loss_of(x)(model).backward()
            expect_equal(gradients(differs), want, f"{kind.__name__}, static_graph={static}, step {i}")


def test_ranks_at_different_steps(pool: Pool) -> None:
    pool.run(different, timeout=120)


def joins(rank: int, world: int) -> None:
    """The last ranks with inputs send rows only while all have some."""
    module = seeded(0, Lookup)
    model = fxddp.DistributedDataParallel(module, inner="aot_eager")
    with model.join():
        for i in range(2 + rank):
            module.zero_grad()
            local = local_gradients(module, loss_of(x := indices(i, 5)))
            loss_of(x)(model).backward()
            if i == 2:
                expect_equal(
                    gradients(module), {name: g / world for name, g in local.items() if g is not None}, "alone"
                )
            record = model.backend.stats().last
            expect((record.wire_bytes < record.bytes) == (i < 2), f"{record.wire_bytes} bytes in step {i}")


def test_join(pool: Pool) -> None:
    pool.run(joins)


def fails(rank: int, world: int) -> None:
    """A backward that fails after a table has left leaves nothing behind, and the next one is right."""
    module = seeded(0, Lookup)
    backend = fxddp.backend(25, inner="aot_eager")
    model = torch.compile(module, backend=backend)
    x = indices(0, 5)

    def fail(_: Tensor) -> None:
        raise RuntimeError("on purpose")

    start = torch.zeros((), requires_grad=True)
    bad = start * 1
    bad.register_hook(fail)
    error = error_of(lambda: (loss_of(x)(lambda x: model(x) + 0 * bad)).backward())
    expect("on purpose" in str(error), f"{error}")
    expect(all(p.grad is None for p in module.parameters()), "a gradient was left")
    step(model, backend, indices(1, 5), "after an error")


def test_a_failed_backward(pool: Pool) -> None:
    pool.run(fails)
