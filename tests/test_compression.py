"""Compressed gradients on live ranks: their numbers against plain references, their bytes, and all ways of a step.

With error feedback nothing is lost, only late: what arrived so far, and what all ranks still owe, add up to the exact
averages. That holds for every codec on every way, and is what most of these tests look at.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision

import fxddp
from fxddp.adaptive import LEVELS
from fxddp.compression import Codec
from fxddp.remembered import ERROR
from tests.live.lab import (
    SMALL,
    Gradients,
    Mlp,
    average,
    compiled,
    data,
    error_of,
    expect,
    expect_equal,
    gradients,
    local,
    local_gradients,
    loss_of,
    seeded,
    small_backend,
)
from tests.live.pool import Pool
from tests.test_agreement import Experts, eager_expert, expert, square

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}

CODECS: dict[str, Callable[[], Codec]] = {
    "PowerSGD": lambda: fxddp.PowerSGD(2, start_iter=1, min_compression_rate=0.5),
    "cold PowerSGD": lambda: fxddp.PowerSGD(2, start_iter=0, min_compression_rate=0.5, warm_start=False),
    "Int8": lambda: fxddp.Int8(block=16),
    "Adaptive": lambda: fxddp.Adaptive(0.006, start_iter=1, every=2, block=16),
}

ALL = pytest.mark.parametrize("kind", CODECS)


# ---- casts -----------------------------------------------------------------------------------------------------------


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


def casts_on_every_way(rank: int, world: int, kind: str, split: bool) -> None:
    """What changes a bucket after it was packed changes what travels; what stays local stays exact."""
    wire = CASTS[kind]
    module = seeded(0, Mlp)
    model, backend = compiled(module, comm_hook=kind, split=split)
    with backend.no_sync():
        loss_of(model, 10).backward()
    expect_equal(gradients(module), local(module, 10), "under no_sync")
    loss_of(model, 0).backward()
    expect_equal(gradients(module), cast_average(local(module, 10, 0), wire), "accumulated", tol=1e-6)
    loss = loss_of(model, 1)
    mine = torch.autograd.grad(loss, list(module.parameters()))
    expect_equal(dict(zip(local(module, 1), mine, strict=True)), local(module, 1), "autograd.grad")
    module.first.weight.register_hook(lambda gradient: gradient * 2)
    seen: dict[str, Tensor] = {}
    module.last.weight.register_post_accumulate_grad_hook(lambda p: seen.update(last=p.grad.clone()))
    module.zero_grad()
    loss_of(model, 5).backward()
    own = {n: g * 2 if n == "first.weight" and g is not None else g for n, g in local(module, 5).items()}
    expect_equal(gradients(module), cast_average(own, wire), "with hooks", tol=1e-6)
    expect_equal(seen, {"last": cast_average(own, wire)["last.weight"]}, "what the accumulation hook saw", tol=1e-6)

    several = seeded(1, Mixed)
    model, backend = compiled(several, comm_hook=kind, split=split)
    square(model(data(3, 6, 8))).backward()
    own = local_gradients(several, lambda m: square(m(data(3, 6, 8))))
    wanted = {n: average({n: g})[n] if g is None or g.dtype == wire else cast_average({n: g}, wire)[n]
              for n, g in own.items() if g is None or g.dtype.itemsize > 2 or g.dtype == wire}  # fmt: skip
    got = gradients(several)
    expect_equal({n: got[n] for n in wanted}, wanted, "several dtypes", tol=1e-6)
    bytes_each = {n: p.numel() * 2 for n, p in several.named_parameters()}
    expect(backend.stats().last.wire_bytes == sum(bytes_each.values()), "bytes of several dtypes")


class Mixed(nn.Module):
    """Parameters of float32, float64 and bfloat16, one of them channels-last, and one of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, (2, 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wide = nn.Linear(18, 10, dtype=torch.float64)
        self.narrow = nn.Linear(10, 12, dtype=torch.bfloat16)
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.reshape(-1, 1, 2, 4)).flatten(1) * self.factor
        return self.narrow(self.wide(x.double()).bfloat16()).float()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", CASTS)
def test_casts_on_every_way(pool: Pool, kind: str, split: bool):
    pool.run(casts_on_every_way, kind, split)


# ---- PowerSGD --------------------------------------------------------------------------------------------------------


def orthonormal(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix).Q


class PlainPowerSGD:
    """Algorithms 1 and 2 of the paper, one matrix after the other."""

    def __init__(self, start: dict[str, Tensor]) -> None:
        self.q = dict(start)
        self.errors: dict[str, Tensor] = {}

    def average(self, gradients: Gradients) -> Gradients:
        out: Gradients = {}
        for name, gradient in gradients.items():
            assert gradient is not None
            if name not in self.q:
                out[name] = average({name: gradient})[name]
                continue
            matrix = gradient / dist.get_world_size() + self.errors.get(name, 0)
            p = matrix @ orthonormal(self.q[name])
            dist.all_reduce(p)
            p = orthonormal(p)
            q = matrix.T @ p
            self.errors[name] = matrix - p @ q.T
            dist.all_reduce(q)
            self.q[name] = q
            out[name] = p @ q.T
        return out


def power_reference(rank: int, world: int, split: bool) -> None:
    module = seeded(0, Mlp)
    codec = fxddp.PowerSGD(2, start_iter=1, min_compression_rate=0.5)
    names = [name for name, p in module.named_parameters() if p.dim() == 2]
    torch.manual_seed(3)
    start = {name: torch.randn(module.get_parameter(name).shape[1], 2) for name in names}
    codec.load_state_dict({"codec": str(codec), "parameters": {n: {"q": q, "steps": 1} for n, q in start.items()}})
    reference = PlainPowerSGD(start)
    model, backend = compiled(module, comm_hook=codec, split=split)
    for i in range(4):
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), reference.average(local(module, i)), f"step {i}", tol=2e-5)
        kept = codec.state_dict()["parameters"]
        errors = {name: kept[name][ERROR] for name in names}
        expect_equal(errors, reference.errors, f"errors of step {i}", tol=2e-4)
        sizes = {n: p.numel() if n not in names else 2 * sum(p.shape) for n, p in module.named_parameters()}
        expect(backend.stats().last.wire_bytes == 4 * sum(sizes.values()), f"{backend.stats().last.wire_bytes} bytes")
    expect(backend.stats().last.launches > 1, "one bucket: this tests nothing")


@pytest.mark.parametrize("split", [True, False])
def test_powersgd_is_that_of_the_paper(pool: Pool, split: bool):
    pool.run(power_reference, split)


def power_like_torch(rank: int, world: int) -> None:
    """On one batch, power iteration finds the best approximation of the average, whatever it started from."""
    options: dict[str, Any] = {"start_iter": 2, "min_compression_rate": 0.5, "use_error_feedback": False}
    module, reference = seeded(0, Mlp), seeded(0, Mlp)
    model, _ = compiled(module, comm_hook=fxddp.PowerSGD(2, **options), bucket_mb=25)
    stock = Stock(reference)
    options["start_powerSGD_iter"] = options.pop("start_iter")
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, **options)
    stock.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for i in range(100):
        module.zero_grad()
        reference.zero_grad()
        loss_of(model, 0).backward()
        loss_of(stock, 0).backward()
        if i < 2:
            expect_equal(gradients(module), gradients(reference), f"not compressed yet, step {i}", tol=1e-6)
    for name, exact in average(local(module, 0)).items():
        got, theirs = module.get_parameter(name).grad, reference.get_parameter(name).grad
        assert got is not None and theirs is not None and exact is not None
        best = exact
        if exact.dim() == 2:
            u, s, v = torch.linalg.svd(exact)
            best = u[:, :2] * s[:2] @ v[:2]
        for what, found in (("ours", got), ("torch's", theirs)):
            expect((found - best).norm() <= 0.02 * best.norm(), f"{what} of {name} is not the best one")


def test_powersgd_is_that_of_torch(pool: Pool):
    pool.run(power_like_torch)


# ---- Int8 ------------------------------------------------------------------------------------------------------------


def rounded(values: Tensor, block: int) -> Tensor:
    """Values as bytes with a scale for each block, block by block."""
    parts = []
    for part in values.split(block):
        scale = part.abs().max() / 127
        parts.append(torch.round(part / scale) * scale if scale else part * 0)
    return torch.cat(parts)


class PlainInt8:
    """Everybody's gradients, in the order of the one bucket; all ranks' work done on each of them."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.errors: list[Tensor] | None = None

    def owe(self, mine: Tensor) -> None:
        """Takes over the errors of this rank and of the others."""
        assert self.errors is not None
        everyone = [torch.empty_like(mine) for _ in self.errors]
        dist.all_gather(everyone, mine)
        for error, theirs in zip(self.errors, everyone, strict=True):
            error[: theirs.numel()] = theirs

    def average(self, gradients: Gradients, order: list[str]) -> Gradients:
        world = dist.get_world_size()
        flat = torch.cat([g.reshape(-1) for n in order if (g := gradients[n]) is not None]) / world
        numel = flat.numel()
        part = math.ceil(numel / (world * self.block)) * self.block
        everyone = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(everyone, flat)
        padded = [torch.cat([each, each.new_zeros(world * part - numel)]) for each in everyone]
        if self.errors is not None:
            padded = [each + error for each, error in zip(padded, self.errors, strict=True)]
        sent = [rounded(each, self.block) for each in padded]
        self.errors = [each - what for each, what in zip(padded, sent, strict=True)]
        answers = []
        for k in range(world):
            here = slice(k * part, (k + 1) * part)
            summed = torch.stack([what[here] for what in sent]).sum(0)
            answers.append(rounded(summed, self.block))
            self.errors[k][here] += summed - answers[-1]
        result = torch.cat(answers)[:numel]
        pieces = result.split([g.numel() for n in order if (g := gradients[n]) is not None])
        return {n: piece.view(g.shape) for n, piece in zip(order, pieces, strict=True)
                if (g := gradients[n]) is not None}  # fmt: skip


def int8_reference(rank: int, world: int, split: bool) -> None:
    module = seeded(0, Mlp)
    codec = fxddp.Int8(block=16)
    model, backend = compiled(module, comm_hook=codec, bucket_mb=25, first_bucket_mb=25, split=split)
    reference = PlainInt8(16)
    for i in range(4):
        module.zero_grad()
        loss_of(model, i).backward()
        (told,) = fxddp.explain(model).buckets
        order = list(told.names)
        expected = reference.average(local(module, i), order)
        got = {name: gradients(module)[name] for name in expected}
        # a value between two levels may be rounded either way
        scale = max(float(g.abs().max()) for g in expected.values() if g is not None) / 127
        for name, want in expected.items():
            have = got[name]
            assert have is not None and want is not None
            wrong = (have - want).abs() > 1e-4 * scale
            expect(int(wrong.sum()) <= 2, f"{name}, step {i}: {int(wrong.sum())} values differ")
            expect(bool(((have - want).abs() <= 3 * scale).all()), f"{name}, step {i}")
        kept = codec.state_dict()["parameters"]
        errors = torch.cat([kept[name][ERROR].flatten() for name in order])
        assert reference.errors is not None
        wrong = (errors - reference.errors[rank][: errors.numel()]).abs() > 1e-4 * scale
        expect(int(wrong.sum()) <= 4, f"step {i}: {int(wrong.sum())} errors differ")
        reference.owe(errors)  # what was rounded the other way here stays so
        numel = sum(p.numel() for p in module.parameters())
        blocks = world * math.ceil(numel / (world * 16))
        expect(backend.stats().last.wire_bytes == blocks * (16 + 4), f"{backend.stats().last.wire_bytes} bytes")


@pytest.mark.parametrize("split", [True, False])
def test_int8_is_what_it_says(pool: Pool, split: bool):
    pool.run(int8_reference, split)


def test_int8_of_three_ranks(pool3: Pool):
    pool3.run(int8_reference, True)


# ---- Adaptive --------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """One matrix whose gradient is even, and one whose gradient has a few large values."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.uneven = nn.Parameter(torch.ones(64, 8)), nn.Parameter(torch.ones(64, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.even * x).sum() + (self.uneven * y).sum()


def adaptive_reference(rank: int, world: int, tolerance: float) -> dict[str, str]:
    """Each bucket follows its own measured error, by the rule."""
    codec = fxddp.Adaptive(tolerance, start_iter=1, every=3, use_error_feedback=False)
    module = Two()
    model, backend = compiled(module, comm_hook=codec, bucket_mb=0.0001)
    x = data(0, 64, 8)
    y = data(1, 64, 8) * 1e-4
    y[::16] *= 1e6
    travelled = []
    for _ in range(6):
        module.zero_grad()
        model(x, y).backward()
        travelled.append(backend.stats().last.wire_bytes)
        exact = average({"even": x, "uneven": y})
        for name, want in exact.items():
            got = module.get_parameter(name).grad
            assert want is not None and got is not None
            expect((got - want).norm() <= 2 * tolerance * want.norm(), f"{name} is off by more than allowed")
    levels = codec.levels()
    sizes = {"full": 512 * 4, "bf16": 512 * 2, "fp16": 512 * 2, "int8": 2 * (256 + 4)}
    expected = sum(sizes[level] for level in levels.values())
    whole = 2 * sizes["full"]
    figures = 2 * 4 * 8
    expect(travelled == [whole, whole + figures, expected, expected, expected + figures, expected], f"{travelled}")
    return levels


def test_adaptive_follows_its_rule(pool: Pool):
    for tolerance, expected in (
        (0.05, {"even": "int8", "uneven": "int8"}),
        (0.008, {"even": "int8", "uneven": "int8"}),
        (0.001, {"even": "fp16", "uneven": "fp16"}),
        (1e-6, {"even": "full", "uneven": "full"}),
    ):
        first, second = pool.run(adaptive_reference, tolerance)
        assert first == second
        assert first == expected, tolerance


def adaptive_range(rank: int, world: int) -> dict[str, str]:
    """Too small for float16: bfloat16 has the smaller error."""
    codec = fxddp.Adaptive(0.004, start_iter=0)
    model, _ = compiled(Two(), comm_hook=codec, bucket_mb=0.0001)
    for _ in range(2):
        model(data(0, 64, 8) * 1e-9, data(1, 64, 8)).backward()
    return codec.levels()


def test_adaptive_minds_the_range(pool: Pool):
    assert pool.run(adaptive_range) == [{"even": "bf16", "uneven": "fp16"}] * 2


# ---- nothing is lost, on any way -------------------------------------------------------------------------------------


class Books:
    """What arrived, and what should have."""

    def __init__(self, module: nn.Module, codec: Codec) -> None:
        self.module = module
        self.codec = codec
        self.arrived: dict[str, Tensor] = {}
        self.exact: dict[str, Tensor] = {}

    def step(self, own: Gradients, *, arrived: Gradients | None = None) -> None:
        for name, parameter in self.module.named_parameters():
            mine = own[name]
            flat = torch.zeros_like(parameter) if mine is None else mine / dist.get_world_size()
            dist.all_reduce(flat)
            self.exact[name] = self.exact.get(name, torch.zeros_like(flat)) + flat
            got = parameter.grad if arrived is None else arrived[name]
            if got is not None:
                self.arrived[name] = self.arrived.get(name, torch.zeros_like(got)) + got

    def balance(self, what: str, *, missed: bool = True) -> None:
        tol = 2e-3 if isinstance(self.codec, fxddp.Adaptive) else 1e-4  # sums of 16-bit values are rounded once more
        lost = 0.0
        for name, parameter in self.module.named_parameters():
            owed = self.codec.memory.of(parameter, lambda _: "never travelled").get(ERROR)
            flat = torch.zeros_like(parameter) if owed is None else owed.clone()
            dist.all_reduce(flat)
            lost += float(flat.abs().sum())
            have = self.arrived.get(name, torch.zeros_like(flat)) + flat
            size = self.exact[name].abs().max()
            off = (have - self.exact[name]).abs().max()
            bound = tol if parameter.dtype.itemsize > 2 else 0.1
            expect(off <= bound * size + 1e-7, f"{what}: {name} is off by {off:.3g} of {size:.3g}")
        expect(lost > 0 or not missed, f"{what}: nothing was compressed, this tests nothing")


def plain_steps(rank: int, world: int, kind: str, split: bool, inner: str) -> None:
    module = seeded(0, Mlp)
    codec = CODECS[kind]()
    model, backend = compiled(module, comm_hook=codec, split=split, inner=inner)
    books = Books(module, codec)
    for i in range(6):
        module.zero_grad()
        loss_of(model, i).backward()
        books.step(local(module, i))
    books.balance(kind)
    record = backend.stats().last
    expect(record.launches > 1 and record.wire_bytes < record.bytes, "not compressed")
    if kind == "Adaptive":
        expect(set(codec.levels().values()) != {"full"}, "all full: this tests nothing")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("split", "inner"), [(True, "aot_eager"), (False, "aot_eager"), (True, "inductor")])
@ALL
def test_nothing_is_lost(pool: Pool, kind: str, split: bool, inner: str):
    pool.run(plain_steps, kind, split, inner, timeout=180)


def accumulated_steps(rank: int, world: int, kind: str) -> None:
    """Under no_sync, with tensor hooks and accumulation hooks, in a gap of the graph, and two forwards at once."""
    module = seeded(0, Mlp)
    codec = CODECS[kind]()
    model, backend = compiled(module, comm_hook=codec)
    books = Books(module, codec)
    for i in range(4):
        module.zero_grad()
        before = codec.state_dict()
        with backend.no_sync():
            loss_of(model, 10 + i).backward()
        expect_equal(gradients(module), local(module, 10 + i), "under no_sync")
        expect(repr(codec.state_dict()) == repr(before), "a local backward changed the codec")
        loss_of(model, i).backward()
        books.step(local(module, 10 + i, i))
    books.balance(f"{kind}, accumulated")
    for i in range(4):  # each parameter travels twice in one backward
        module.zero_grad()
        (loss_of(model, i) + loss_of(model, 20 + i)).backward()
        books.step(local(module, i, 20 + i))
    books.balance(f"{kind}, two forwards")
    seen: dict[str, Tensor] = {}
    module.first.weight.register_hook(lambda gradient: gradient * 2)
    module.last.weight.register_post_accumulate_grad_hook(lambda p: seen.update(last=p.grad.clone()))
    for i in range(4):
        module.zero_grad()
        loss_of(model, i).backward()
        own = {n: g * 2 if n == "first.weight" and g is not None else g for n, g in local(module, i).items()}
        books.step(own)
        assert module.last.weight.grad is not None
        expect(torch.equal(seen["last"], module.last.weight.grad), "the accumulation hook saw something else")
    books.balance(f"{kind}, with hooks")


@ALL
def test_nothing_is_lost_when_accumulating(pool: Pool, kind: str):
    pool.run(accumulated_steps, kind)


def several_dtypes(rank: int, world: int, kind: str, compiles: bool) -> None:
    module = seeded(0, Mixed)
    codec = CODECS[kind]()
    model = fxddp.DistributedDataParallel(
        module, bucket_cap_mb=SMALL, inner="aot_eager", comm_hook=codec, compile=compiles
    )
    books = Books(module, codec)
    for i in range(5):
        model.zero_grad()
        square(model(data(i, 6, 8))).backward()
        books.step(local_gradients(module, lambda m: square(m(data(i, 6, 8)))))  # noqa: B023
    books.balance(f"{kind}, {compiles=}", missed=False)
    for name, p in module.named_parameters():
        assert p.grad is not None
        expect(p.grad.dtype == p.dtype, f"{name} came back as {p.grad.dtype}")


@pytest.mark.parametrize("compiles", [True, False])
@ALL
def test_nothing_is_lost_of_several_dtypes(pool: Pool, kind: str, compiles: bool):
    pool.run(several_dtypes, kind, compiles)


def routed(rank: int, world: int, kind: str, eager: bool) -> None:
    """Ranks use different experts; the third is used by none for a while: its `.grad` and its error stay."""
    module = seeded(0, Experts)
    codec = CODECS[kind]()
    model, _ = compiled(module, comm_hook=codec, find_unused_parameters=True)
    loss = eager_expert if eager else expert
    books = Books(module, codec)
    for i in range(8):
        module.zero_grad()
        which = (rank + i) % 3 if i < 4 else (rank + i) % 2
        before = codec.state_dict()["parameters"].get("experts.2.weight")
        loss(model, which, i).backward()
        books.step(local_gradients(module, partial(loss, which=which, i=i)))
        if i >= 4:
            expect(module.experts[2].weight.grad is None, "a gradient from nowhere")
            after = codec.state_dict()["parameters"].get("experts.2.weight")
            expect(repr(before) == repr(after), "the state of what no rank used has changed")
    books.balance(f"{kind}, {eager=}")


@pytest.mark.parametrize("eager", [True, False])
@ALL
def test_nothing_is_lost_over_the_union(pool: Pool, kind: str, eager: bool):
    pool.run(routed, kind, eager)


def test_nothing_is_lost_over_the_union_of_three(pool3: Pool):
    for kind in CODECS:
        pool3.run(routed, kind, False)


def joined(rank: int, world: int, kind: str) -> None:
    """A rank without inputs sends zeros and what it owes, and goes on in step with the others."""
    module = seeded(0, Mlp)
    codec = CODECS[kind]() if kind in CODECS else None
    model = fxddp.DistributedDataParallel(
        module, bucket_cap_mb=SMALL, inner="aot_eager", comm_hook=codec if codec is not None else kind
    )
    steps = {0: 3, 1: 6}
    arrived: list[Gradients] = []
    with model.join():
        for i in range(steps.get(rank, 1)):
            module.zero_grad()
            loss_of(model, i).backward()
            arrived.append(gradients(module))
    last = steps[1]
    here = [arrived[i] if i < len(arrived) else dict.fromkeys(gradients(module)) for i in range(last)]
    exact: list[Gradients] = []
    for i in range(last):
        own: Gradients = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
        if i < len(arrived):
            own = local(module, i)
        exact.append(average(own) if codec is not None else cast_average(own, CASTS[kind]))
    for i, got in enumerate(here):
        for name in got:  # what arrived on the rank that had inputs to the end
            value = got[name]
            flat = torch.zeros_like(module.get_parameter(name)) if value is None or rank != 1 else value.clone()
            dist.all_reduce(flat)
            got[name] = flat
            if codec is None:
                expect_equal({name: flat}, {name: exact[i][name]}, f"{kind}, step {i}", tol=1e-5)
    if codec is None:
        return
    books = Books(module, codec)
    books.arrived = {n: torch.stack([got[n] for got in here]).sum(0) for n in gradients(module)}  # type: ignore[misc]
    books.exact = {n: torch.stack([e[n] for e in exact]).sum(0) for n in gradients(module)}  # type: ignore[misc]
    books.balance(f"{kind}, join")
    for i in range(2):
        module.zero_grad()
        loss_of(model, 30 + i).backward()
        books.step(local(module, 30 + i))
    books.balance(f"{kind}, after join")
    same_on_all_ranks(codec, world)


def same_on_all_ranks(codec: Codec, world: int) -> None:
    state = codec.state_dict()["parameters"]
    shared = repr({n: {k: v for k, v in kept.items() if k != ERROR} for n, kept in sorted(state.items())})
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, shared)
    expect(len(set(everyone)) == 1, "the shared state differs")


def joined_before_it_began(rank: int, world: int, kind: str) -> None:
    """A rank without inputs in the first round has confirmed the codec with the others, and trains in the second."""
    module = seeded(0, Mlp)
    codec = CODECS[kind]()
    model = fxddp.DistributedDataParallel(module, bucket_cap_mb=SMALL, inner="aot_eager", comm_hook=codec)
    for epoch in range(2):
        with model.join():
            for i in range(3 * max(rank, epoch)):
                module.zero_grad()
                loss_of(model, i).backward()
    same_on_all_ranks(codec, world)
    module.zero_grad()
    loss_of(model, 3).backward()
    got = gradients(module)
    expect_equal(got, average(got), "the same on all ranks")
    expect(all(g is not None and g.any() for g in got.values()), "gradients of all parameters")


@pytest.mark.parametrize("kind", ["PowerSGD", "Int8"])
def test_join_before_the_first_step(pool: Pool, kind: str):
    pool.run(joined_before_it_began, kind)


@pytest.mark.parametrize("kind", [*CODECS, *CASTS])
def test_join(pool: Pool, kind: str):
    pool.run(joined, kind)


def test_join_of_three(pool3: Pool):
    for kind in CODECS:
        pool3.run(joined, kind)


def other_waits(rank: int, world: int, kind: str) -> None:
    """One rank waits for the first graph's buckets before it comes to the second graph; the other one does not."""
    module = seeded(0, lambda: nn.Sequential(nn.Linear(8, 24), Mlp(), nn.Linear(4, 8), Mlp()))
    module[0] = nn.Linear(8, 8)
    codec = CODECS[kind]()
    backend = small_backend(comm_hook=codec, find_unused_parameters=True)
    for part in (module[1], module[3]):
        part.compile(backend=backend)
    books = Books(module, codec)
    seen: list[Tensor] = []
    if rank == 0:
        last = module[3].first.weight  # in the bucket that leaves last, of which there is more to start
        last.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for i in range(5):
        module.zero_grad()
        loss_of(module, i).backward()
        books.step(local(module, i))
    books.balance(kind)
    expect(bool(seen) == (rank == 0), "no hook ran: this tests nothing")
    same_on_all_ranks(codec, world)


@ALL
def test_ranks_that_wait_at_other_times(pool: Pool, kind: str):
    pool.run(other_waits, kind)


class Stop(Exception):
    pass


def given_up(rank: int, world: int, kind: str) -> None:
    """A backward that raises half-way leaves `.grad` and codec as they were, and the next ones go on."""
    module = seeded(0, Mlp)
    codec = CODECS[kind]()
    model, backend = compiled(module, comm_hook=codec)
    books = Books(module, codec)

    def stop(gradient: Tensor) -> Tensor:
        raise Stop

    for i in range(6):
        module.zero_grad()
        if i in (2, 4):
            before = codec.state_dict()
            x = data(50, 6, 8).requires_grad_()
            x.register_hook(stop)  # runs when all buckets were launched
            error = error_of(lambda: model(x).square().mean().backward())  # noqa: B023
            expect(isinstance(error, Stop), f"raised {error!r}")
            expect(repr(codec.state_dict()) == repr(before), "the codec has changed")
            expect(all(g is None for g in gradients(module).values()), "gradients of a backward that raised")
            expect(not backend._running, "still running")
            group = backend.lookup()
            assert group is not None
            expect(group.unsettled is None, "a bucket is still under way")
        loss_of(model, i).backward()
        books.step(local(module, i))
    books.balance(kind)


@ALL
def test_a_backward_that_raises(pool: Pool, kind: str):
    pool.run(given_up, kind, discard=True)


def given_up_alone(rank: int, world: int) -> list[str]:
    """A rank that gives up starts no second collective of what it launched, and the others hear of it."""
    module = seeded(0, Mlp)
    model, _ = compiled(module, comm_hook=CODECS["PowerSGD"](), bucket_mb=25, first_bucket_mb=25)

    def stop(gradient: Tensor) -> Tensor:
        raise Stop("on purpose")

    loss_of(model, 0).backward()
    loss_of(model, 0).backward()
    messages = []
    for _ in range(2):
        x = data(50, 6, 8).requires_grad_()
        if rank == 0:
            x.register_hook(stop)
        messages.append(str(error_of(lambda: model(x).square().mean().backward())))  # noqa: B023
    return messages


def test_a_rank_that_gives_up_alone(pool: Pool):
    (mine, later), (theirs, again) = pool.run(given_up_alone, discard=True)
    assert mine == "on purpose"
    assert "rank 0 gave up there: an exception outside of fxddp" in theirs
    assert "different steps" in later and "lost each other there" in again


def not_finite(rank: int, world: int, kind: str) -> None:
    """A step with an infinite gradient shows it, and the next ones are right."""
    module = seeded(0, Mlp)
    codec = CODECS[kind]()
    model, _ = compiled(module, comm_hook=codec)
    for i in range(4):
        module.zero_grad()
        loss = loss_of(model, i)
        (loss * (math.inf if i == 2 and rank == 0 else 1)).backward()
        finite = [bool(g.isfinite().all()) for g in gradients(module).values() if g is not None]
        if i == 2:
            expect(not any(finite), f"{finite.count(True)} gradients are finite")
        else:
            expect(all(finite), f"step {i}: {finite.count(False)} gradients are not finite")
    state = codec.state_dict()["parameters"]
    tensors = [v for kept in state.values() for v in kept.values() if isinstance(v, Tensor)]
    expect(tensors and all(bool(t.isfinite().all()) for t in tensors), "the state is not finite")


@ALL
def test_not_finite(pool: Pool, kind: str):
    pool.run(not_finite, kind)


def static(rank: int, world: int, kind: str) -> None:
    module = seeded(0, Mlp)
    codec = CODECS[kind]()
    model, _ = compiled(module, comm_hook=codec, static_graph=True)
    books = Books(module, codec)
    for i in range(5):
        module.zero_grad()
        loss_of(model, i).backward()
        books.step(local(module, i))
    books.balance(kind)


@ALL
def test_static_graph(pool: Pool, kind: str):
    pool.run(static, kind)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", [*CODECS, *CASTS])
def test_one_rank(kind: str, split: bool):
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain_steps(0, 1, kind, split, "aot_eager") if kind in CODECS else casts(0, 1, kind, split, "aot_eager")
    finally:
        dist.destroy_process_group()


def copied(rank: int, world: int) -> None:
    """A copy of a wrapper has a codec of its own, which owes what the first one owed when it was copied."""
    module = seeded(0, Mlp)
    codec = fxddp.Int8(block=16)
    model = fxddp.DistributedDataParallel(module, bucket_cap_mb=SMALL, inner="aot_eager", comm_hook=codec)
    loss_of(model, 0).backward()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.zero_grad()
        loss_of(each, 1).backward()
    expect_equal(gradients(twin.module), gradients(module), "the copy")
    other = twin.backend.registered.carrier
    assert isinstance(other, Codec)
    expect(other is not codec and repr(other.state_dict()) == repr(codec.state_dict()), "state of the copy")


def test_a_copied_wrapper(pool: Pool):
    pool.run(copied)


def zeros_for_a_while(rank: int, world: int) -> None:
    """Gradients of zero teach PowerSGD nothing: it does not go on from a Q of zeros, with which it would stay there."""
    module = seeded(0, Mlp)
    model, _ = compiled(module, comm_hook=fxddp.PowerSGD(4, start_iter=0, min_compression_rate=0.1))
    for i in range(6):
        module.zero_grad()
        (loss_of(model, i) * (0 if i in (1, 2) else 1)).backward()
        if i > 2:
            for name, p in module.named_parameters():
                assert p.grad is not None
                expect(float(p.grad.abs().max()) > 0, f"step {i}: nothing arrives of {name}")


def test_powersgd_after_zeros(pool: Pool):
    pool.run(zeros_for_a_while)


# ---- state -----------------------------------------------------------------------------------------------------------


def train(model: Any, module: nn.Module, steps: range) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for i in steps:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()


def resumed(rank: int, world: int, kind: str, pickled: bool) -> None:
    """Training that was saved and resumed ends, bit by bit, where training in one go ends."""
    whole = seeded(0, Mlp)
    codec = CODECS[kind]()
    train(compiled(whole, comm_hook=codec)[0], whole, range(7))

    first = seeded(0, Mlp)
    codec = CODECS[kind]()
    train(compiled(first, comm_hook=codec)[0], first, range(3))
    again: Codec
    if pickled:
        again = copy.deepcopy(pickle.loads(pickle.dumps(codec)))
    else:
        again = CODECS[kind]()
        again.load_state_dict(codec.state_dict())
    expect(repr(again.state_dict()) == repr(codec.state_dict()), "not what was saved")
    second = seeded(5, Mlp)
    second.load_state_dict(first.state_dict())
    train(compiled(second, comm_hook=again)[0], second, range(3, 7))
    expect_equal(dict(second.state_dict()), dict(whole.state_dict()), kind)


@pytest.mark.parametrize("pickled", [True, False])
@ALL
def test_resumed(pool: Pool, kind: str, pickled: bool):
    pool.run(resumed, kind, pickled)


def state_that_differs(rank: int, world: int) -> str:
    saved = fxddp.PowerSGD(start_iter=0)
    train(compiled(seeded(0, Mlp), comm_hook=saved)[0], seeded(0, Mlp), range(1))
    codec = fxddp.PowerSGD(start_iter=0)
    module = seeded(0, Mlp)
    model, _ = compiled(module, comm_hook=codec)
    loss_of(model, 0).backward()
    state = codec.state_dict()
    other = fxddp.PowerSGD(start_iter=0)
    if rank:
        state["parameters"]["first.weight"]["steps"] += 1
    other.load_state_dict(state)
    again = seeded(0, Mlp)
    return str(error_of(lambda: loss_of(compiled(again, comm_hook=other)[0], 0).backward()))


def test_state_that_differs_between_ranks_is_refused(pool: Pool):
    for message in pool.run(state_that_differs, discard=True):
        assert "the communication hook differs between ranks: PowerSGD(rank=1" in message
        assert "with state" in message


def test_state_that_does_not_fit_is_refused():
    codec = fxddp.Int8()
    with pytest.raises(ValueError, match=r"expected what Int8\.state_dict\(\) gave, got 3"):
        codec.load_state_dict(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"saved by Int8\(block=64.*this codec is Int8\(block=256"):
        codec.load_state_dict(fxddp.Int8(64).state_dict())
    codec.load_state_dict({"codec": str(codec), "parameters": {"w": {ERROR: torch.ones(3)}}})
    with pytest.raises(RuntimeError, match=r"state of w is of shape \(3,\), the parameter of \(2,\)"):
        codec.memory.of(torch.ones(2), lambda _: "w")


def test_parameters_of_one_name_are_numbered():
    codec = fxddp.Int8()
    parameters = [torch.ones(2) for _ in range(3)]
    for k, parameter in enumerate(parameters):
        codec.memory.of(parameter, lambda _: "w")[ERROR] = torch.full((2,), float(k))
    state = codec.state_dict()
    assert list(state["parameters"]) == ["w", "w (2)", "w (3)"]
    again = fxddp.Int8()
    again.load_state_dict(state)
    for parameter in parameters:
        assert torch.equal(
            again.memory.of(parameter, lambda _: "w")[ERROR], codec.memory.of(parameter, lambda _: "w")[ERROR]
        )
    del parameters[1:], parameter
    assert list(codec.state_dict()["parameters"]) == ["w"]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fxddp.PowerSGD(0), "rank must be a whole number, at least 1, got 0"),
        (lambda: fxddp.PowerSGD(1.5), r"rank must be a whole number, at least 1, got 1\.5"),  # type: ignore[arg-type]
        (lambda: fxddp.PowerSGD(start_iter=-1), "start_iter must be a whole number, at least 0, got -1"),
        (lambda: fxddp.PowerSGD(min_compression_rate=0), "min_compression_rate must be a positive, finite number"),
        (lambda: fxddp.PowerSGD(warm_start=1), "warm_start must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: fxddp.Int8(12), "block must be a multiple of 8, at least 8, got 12"),
        (lambda: fxddp.Int8(use_error_feedback=None), "use_error_feedback must be True or False"),  # type: ignore[arg-type]
        (lambda: fxddp.Adaptive(0), "tolerance must be a positive, finite number, got 0"),
        (lambda: fxddp.Adaptive(every=0), "every must be a whole number, at least 1, got 0"),
        (lambda: small_backend(comm_hook="int4"), r"comm_hook must be one of \('fp16', 'bf16'\), an object of fxddp\."),
        (lambda: small_backend(comm_hook=fxddp.Int8), r"comm_hook is the class Int8: give an object, Int8\(…\)"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", ["fp16", "Int8"])
def test_two_hooks_are_refused(kind: str):
    backend = small_backend(comm_hook=CODECS[kind]() if kind in CODECS else kind)
    with pytest.raises(RuntimeError, match=rf"can only be called once. This backend has {kind}"):
        backend.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(TypeError, match="must be callable"):
        small_backend().register_comm_hook(None, fxddp.Int8())  # type: ignore[arg-type]


def other_codecs(rank: int, world: int) -> str:
    module = seeded(0, Mlp)
    model, _ = compiled(module, comm_hook=fxddp.PowerSGD(1 + rank))
    return str(error_of(lambda: loss_of(model, 0).backward()))


def test_other_codecs_on_other_ranks_are_refused(pool: Pool):
    for message in pool.run(other_codecs, discard=True):
        assert "the communication hook differs between ranks: PowerSGD(rank=2" in message


class Failing(Codec):
    def __str__(self) -> str:
        return "Failing"

    def nbytes(self, shapes: Any, dtype: torch.dtype, world_size: int) -> int:
        return 0

    def rounds(self, parcel: Any) -> Any:
        raise Stop("on purpose")
        yield


def failing(rank: int, world: int) -> str:
    model, backend = compiled(seeded(0, Mlp), comm_hook=Failing())
    message = str(error_of(lambda: loss_of(model, 0).backward()))
    expect(not backend._running, "still running")
    return message


def test_errors_of_a_codec_name_bucket_and_parameters(pool: Pool):
    for message in pool.run(failing, discard=True):
        assert "Failing failed for bucket 0 (middle.weight" in message
        assert "on purpose" in message


def test_levels_are_ordered_by_care():
    assert LEVELS == ("full", "bf16", "fp16", "int8")


def foreign(rank: int, world: int) -> None:
    """What rank 0 owes is not what the others owe; without errors a state is anybody's."""
    codec = fxddp.Int8()
    module = seeded(0, Mlp)
    model, _ = compiled(module, comm_hook=codec)
    for i in range(2):
        loss_of(model, i).backward()
    states: list[Any] = [None] * world
    dist.all_gather_object(states, codec.state_dict())
    fresh = fxddp.Int8()
    if rank == 0:
        fresh.load_state_dict(states[0])
    else:
        message = str(error_of(lambda: fresh.load_state_dict(states[0])))
        expect(f"this is the state of rank 0, loaded on rank {rank}" in message, message)
    parameters = {
        name: {key: value for key, value in kept.items() if key != "error"}
        for name, kept in states[0]["parameters"].items()
    }
    fresh.load_state_dict({**states[0], "parameters": parameters})


def test_the_state_of_another_rank(pool: Pool):
    pool.run(foreign)


# ---- with another hook -----------------------------------------------------------------------------------------------


def beside_another(rank: int, world: int) -> None:
    """A codec of two rounds on one model, another precision on the next, and a rank that waits earlier."""
    outer, inner = seeded(0, lambda: nn.Linear(16, 16)), seeded(1, lambda: nn.Linear(8, 16))
    if rank == 0:
        outer.weight.register_post_accumulate_grad_hook(lambda _: None)
    last = fxddp.DistributedDataParallel(outer, inner="aot_eager", comm_hook=fxddp.PowerSGD(1, start_iter=0))
    first = fxddp.DistributedDataParallel(
        inner,
        inner="aot_eager",
        static_graph=True,
        mixed_precision=_MixedPrecision(reduce_dtype=torch.bfloat16),
    )
    for i in range(4):
        outer.zero_grad()
        inner.zero_grad()
        square(last(first(data(i, 6, 8)))).backward()
        both = nn.Sequential(inner, outer)
        found = {f"0.{name}": gradient for name, gradient in gradients(inner).items()}
        expected = average(local_gradients(both, lambda each, i=i: square(each(data(i, 6, 8)))))  # type: ignore[misc]
        expect_equal(found, {name: expected[name] for name in found}, f"step {i}", tol=2e-2)


def test_a_model_with_another_hook_beside(pool: Pool):
    pool.run(beside_another, timeout=30)
