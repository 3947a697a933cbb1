"""`fxddp.DistributedDataParallel` in the place of torch's: numbers, copies, buffers, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import pickle
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fxddp
from fxddp import ddp_arguments
from tests.live.lab import (
    SMALL,
    Mlp,
    average,
    buckets,
    counted_collectives,
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
    total,
)
from tests.live.pool import Pool

Stock = nn.parallel.DistributedDataParallel


def wrapped(module: nn.Module, **options: Any) -> fxddp.DistributedDataParallel:
    """The module in our wrapper, with buckets so small that there are several, run operator by operator."""
    usual: dict[str, Any] = {"bucket_cap_mb": SMALL, "inner": "aot_eager"}
    return fxddp.DistributedDataParallel(module, **usual | options)


class Normed(nn.Module):
    """A model with floating point and integer buffers that change, and a boolean one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.register_buffer("mask", torch.rand(12) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu() * self.mask)


# ---- the same numbers as torch's -------------------------------------------------------------------------------------


def training(rank: int, world: int, options: dict[str, Any]) -> None:
    ours = wrapped(seeded(rank, Normed), **{"bucket_cap_mb": SMALL / 4} | options)
    stock = Stock(seeded(rank, Normed))
    expect(isinstance(ours, Stock), "frameworks unwrap by isinstance")
    expect(list(ours.state_dict()) == list(stock.state_dict()), "names of the state")
    expect_equal(ours.state_dict(), stock.state_dict(), "rank 0's state after construction")
    tol = 1e-4 if "inner" in options else 0.0  # inductor computes in another order
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, stock)]
    for step in range(4):
        for model, optimizer in zip((ours, stock), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
        expect_equal(gradients(ours), gradients(stock), f"gradients of step {step}", tol)
        for optimizer in optimizers:
            optimizer.step()
        expect_equal(
            dict(ours.named_parameters()), dict(stock.named_parameters()), f"parameters after step {step}", tol
        )
    if rank == 0:
        expect_equal(ours.state_dict(), stock.state_dict(), "all state in the end", tol)
    last = ours.backend.stats().last
    if options.get("compile", True):
        expect(len(ours.backend.plans) == 1 and not last.uncovered, f"the graph covers all, not {last.uncovered}")
        expect(last.launches == buckets(ours.backend) > 1, f"{last.launches} launches")
    else:
        expect(not ours.backend.sites and len(last.uncovered) == 6, "nothing is compiled, all is averaged")
    fresh = Normed()
    fresh.load_state_dict({name.removeprefix("module."): value for name, value in stock.state_dict().items()})
    ours.load_state_dict(stock.state_dict())
    plain = {name: value + 1 for name, value in fresh.state_dict().items() if value.is_floating_point()}
    ours.load_state_dict(fresh.state_dict() | plain)  # of the plain module
    expect_equal(dict(ours.state_dict()), {f"module.{n}": v for n, v in (fresh.state_dict() | plain).items()}, "plain")
    error = str(error_of(lambda: ours.load_state_dict(plain | {"other": plain.popitem()[1]})))
    expect("Missing key" in error and "other" in error, error)
    ours.load_state_dict(stock.state_dict())
    expect_equal(ours.module.state_dict(), fresh.state_dict(), "state loaded from torch's wrapper")


class Holder(nn.Module):
    """One whose own names are those of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Normed()


def saved(rank: int, world: int) -> None:
    """A wrapper's state has DistributedDataParallel's names, and goes into whatever module has them or those inside."""
    ours, stock = wrapped(seeded(rank, Normed)), Stock(seeded(rank, Normed))
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    expect(list(state) == list(stock.state_dict()), "DistributedDataParallel's names")
    plain, holder, copied = Normed(), Holder(), copy.deepcopy(ours)
    for each in (plain, holder, stock, copied):
        each.load_state_dict(state)
    expect_equal(plain.state_dict(), ours.module.state_dict(), "the plain module")
    for each in (holder, stock, copied):
        expect_equal(each.state_dict(), ours.state_dict(), type(each).__name__)
    nn.Sequential(Normed()).load_state_dict(nn.Sequential(copied.module).state_dict())
    Normed().load_state_dict(copied.state_dict())
    fewer = {name: value for name, value in ours.module.state_dict().items() if "norm" not in name}
    for wrong in (stock.state_dict(), dict(state), fewer):
        expect("Missing key" in str(error_of(lambda: Normed().load_state_dict(wrong))), "a state that says nothing")  # noqa: B023


def test_a_state_dict_goes_into_the_plain_module(pool: Pool):
    pool.run(saved)


@pytest.mark.parametrize("options", [{}, {"split": False}, {"compile": False}, {"inner": "inductor"}], ids=str)
def test_trains_as_stock(pool: Pool, options: dict[str, Any]):
    pool.run(training, options, timeout=180)


def test_arguments_are_torchs():
    ours = inspect.signature(fxddp.DistributedDataParallel).parameters
    theirs = inspect.signature(Stock).parameters
    defaults = {name: parameter.default for name, parameter in theirs.items()}
    if "forward_sync_buffers" not in theirs:  # before torch 2.13
        defaults |= {"broadcast_buffers": None, "batched_grad_copy": False, "forward_sync_buffers": None}
    assert list(ours)[: len(defaults)] == list(defaults)
    assert {name: ours[name].default for name in defaults} == defaults
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(defaults) :])


# ---- inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: Tensor
    aux: Any
    label: str = "kept"


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 4), nn.Linear(8, 5), nn.Linear(8, 6)

    def forward(self, batch: dict[str, Any], /, *, module: float, extra: Any = None) -> Output:
        x, (scale, nothing) = batch["x"], batch["rest"]
        assert nothing is None
        return Output(self.a(x) * scale, [{"b": self.b(x)}, (None, self.c(x) * module)])


def structures(rank: int, world: int, compiles: bool) -> None:
    def loss(model: Any, *, only: bool = False) -> Tensor:
        out = model({"x": data(0, 3, 8), "rest": (2.0, None)}, module=3.0)
        expect(type(out) is Output and out.label == "kept" and out.aux[1][0] is None, f"output {out}")
        total = out.logits.square().mean()
        return total if only else total + out.aux[0]["b"].square().mean() + out.aux[1][1].sum()

    module = seeded(0, Structured)
    model = wrapped(module, compile=compiles)
    loss(model).backward()
    expect_equal(gradients(module), average(local_gradients(module, loss)), "all outputs")
    module.zero_grad()
    loss(model, only=True).backward()
    expected = average(local_gradients(module, lambda m: loss(m, only=True)))
    expect_equal(gradients(module), expected, "some outputs: the others' parameters keep None")


@pytest.mark.parametrize("compiles", [True, False])
def test_structured_inputs_and_outputs(pool: Pool, compiles: bool):
    pool.run(structures, compiles)


# ---- no_sync ---------------------------------------------------------------------------------------------------------


def accumulation(rank: int, world: int, compiles: bool) -> None:
    module = seeded(0, Mlp)
    model = wrapped(module, compile=compiles)
    loss_of(model, 0).backward()
    for position in ("both inside", "forward inside", "the attribute", "fxddp.no_sync"):
        module.zero_grad()
        with counted_collectives() as started:
            if position == "the attribute":
                model.require_backward_grad_sync = False
                loss_of(model, 1).backward()
                model.require_backward_grad_sync = True
            else:
                with fxddp.no_sync(model) if position == "fxddp.no_sync" else model.no_sync():
                    loss = loss_of(model, 1)
                    if position == "both inside":
                        loss.backward()
                if position != "both inside":
                    loss.backward()
        expect(not started, f"{position}: {started}")
        expect_equal(gradients(module), local(module, 1), position)
        loss_of(model, 2).backward()
        expect_equal(gradients(module), average(local(module, 1, 2)), f"{position}, then a synchronised step")
    module.zero_grad()
    loss = loss_of(model, 3)
    with model.no_sync():
        loss.backward()
    expect_equal(gradients(module), average(local(module, 3)), "forward outside, backward inside")
    expect(model.require_backward_grad_sync, "what no_sync changed, it changes back")


@pytest.mark.parametrize("compiles", [True, False])
def test_the_place_of_the_forward_decides(pool: Pool, compiles: bool):
    pool.run(accumulation, compiles)


def gathered(rank: int, world: int, compiles: bool) -> None:
    """What `no_sync` left is averaged once the reducer was asked to prepare, at the end of that very backward."""
    for options in ({}, {"static_graph": True}):
        module = seeded(0, Mlp)
        model = wrapped(module, compile=compiles, **options)
        for step in range(3):
            module.zero_grad()
            with model.no_sync():
                losses = [loss_of(model, i) for i in range(step, step + 3)]
            for loss in losses[:2]:
                loss.backward()
            expect_equal(gradients(module), local(module, step, step + 1), f"local, {options}, step {step}", tol=1e-6)
            model.reducer.prepare_for_backward([losses[2]])
            losses[2].backward()
            wanted = average(local(module, *range(step, step + 3)))
            expect_equal(gradients(module), wanted, f"gathered, {options}, step {step}", tol=1e-6)
            with model.no_sync():
                loss_of(model, 9).backward()
            expect_equal(gradients(module), total(wanted, local(module, 9)), "once only", tol=1e-6)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_backward_that_gathers_what_forwards_left(pool: Pool, compiles: bool):
    pool.run(gathered, compiles)


def staged(rank: int, world: int) -> None:
    """A pipeline schedule of torch's, one stage on each rank, whose replicas are this rank alone."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    alone = [dist.new_group([each]) for each in range(world)][rank]
    layers = [seeded(each, lambda: nn.Linear(8, 8)) for each in range(world)]
    model = wrapped(layers[rank], process_group=alone)
    arrives, leaves = torch.zeros(2, 8, requires_grad=rank > 0), torch.zeros(2, 8, requires_grad=True)
    stage = PipelineStage(model, rank, world, torch.device("cpu"), input_args=arrives, output_args=leaves)
    schedule = ScheduleGPipe(stage, 3, loss_fn=lambda output, target: (output - target).square().mean())
    inputs, targets = data(0, 6, 8, rank=0), data(1, 6, 8, rank=0)
    for _ in range(2):
        model.zero_grad()
        schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == world - 1 else None)
    whole = nn.Sequential(*layers)
    mean = local_gradients(whole, lambda plain: (plain(inputs) - targets).square().mean())
    own = {name: mean[f"{rank}.{name}"] for name, _ in layers[rank].named_parameters()}
    expect_equal(gradients(layers[rank]), own, "of a stage", tol=1e-5)


def test_a_stage_of_a_pipeline(pool: Pool):
    pool.run(staged, discard=True)


class Adapters(nn.Module):
    """Everything that trains lies in re-entrant checkpoints: all gradients come from backwards inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x).requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return x


class LastCheckpointed(Adapters):
    """The first gradients of a backward come from one inside it, the rest from itself."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.frozen(x)).tanh()
        return checkpoint(self.layers[1], x, use_reentrant=True)


def backwards_inside(rank: int, world: int, compiles: bool) -> None:
    for make in (Adapters, LastCheckpointed):
        for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            module = seeded(0, make)
            model = wrapped(module, compile=compiles, **options)
            for step in range(3):
                module.zero_grad()
                awaited = loss_of(model, step + 5)
                with model.no_sync():
                    loss_of(model, step).backward()
                what = f"{make.__name__}, {options}, step {step}"
                expect_equal(gradients(module), local(module, step), f"local, {what}", tol=1e-6)
                awaited.backward()
                wanted = average(local(module, step, step + 5))
                expect_equal(gradients(module), wanted, what, tol=1e-6)
        module, reference = seeded(0, make), seeded(0, make)
        model = wrapped(module, compile=compiles, optimizer=torch.optim.SGD(module.parameters(), lr=0.5))
        stepped = torch.optim.SGD(reference.parameters(), lr=0.5)
        for step in range(3):
            loss_of(model, step).backward()
            for name, gradient in average(local(reference, step)).items():
                reference.get_parameter(name).grad = gradient
            stepped.step()
            expect_equal(module.state_dict(), reference.state_dict(), f"{make.__name__}, updated {step}", tol=1e-5)


def asked_on_one_rank(rank: int, world: int, compiles: bool) -> None:
    """Gradients of an input alone launch nothing, so that one rank may ask for them."""
    module = seeded(0, Mlp)
    model = wrapped(module, compile=compiles)
    for step in range(3):
        x = data(step, 6, 8).requires_grad_()
        if rank == 0 and step == 1:
            torch.autograd.grad(model(x).sum(), x)
        if rank == 0 and step == 2:
            model(x).sum().backward(inputs=[x])
        module.zero_grad()
        loss_of(model, step).backward()
        expect_equal(gradients(module), average(local(module, step)), f"step {step}")


def kept_loss(rank: int, world: int) -> None:
    """The model is gone before the backward."""
    module = seeded(0, Mlp)
    wanted, kept = average(local(module, 0)), dict(module.named_parameters())
    loss = loss_of(wrapped(module), 0)
    del module
    gc.collect()
    loss.backward()
    expect_equal({name: parameter.grad for name, parameter in kept.items()}, wanted, "of a model that is gone")


def test_a_loss_that_outlives_its_model(pool: Pool):
    pool.run(kept_loss)


@pytest.mark.parametrize("compiles", [True, False])
def test_gradients_of_an_input_asked_for_on_one_rank(pool: Pool, compiles: bool):
    pool.run(asked_on_one_rank, compiles)


@pytest.mark.parametrize("compiles", [True, False])
def test_backwards_inside_a_backward_that_has_not_begun(pool: Pool, compiles: bool):
    pool.run(backwards_inside, compiles)


# ---- buffers ---------------------------------------------------------------------------------------------------------


def buffers(rank: int, world: int) -> None:
    module = seeded(rank, Normed)
    model = wrapped(module)
    state = [b.clone() for b in module.buffers()]

    def spoil() -> None:
        with torch.no_grad():
            for buffer in module.buffers():
                buffer.copy_(buffer.logical_not() if buffer.dtype == torch.bool else buffer + rank)

    def spoiled() -> bool:
        return not torch.equal(module.norm.running_mean, state[0])

    if rank == 0:
        module.norm.running_mean = module.norm.running_mean.clone()  # another tensor, on one rank alone
    loss_of(model, 0).backward()
    batches = module.norm.num_batches_tracked.item()
    expect(batches == 1, f"{batches} batches")
    group = model.backend.lookup()
    assert group is not None
    seen: list[int] = []
    for train, grad, local_only in (
        (True, True, False),
        (False, True, False),
        (True, False, False),
        (True, True, True),
    ):
        model.train(train)
        scope = model.no_sync() if local_only else contextlib.nullcontext()
        before_it = group.channel.step
        with scope, torch.set_grad_enabled(grad):
            model(data(1, 6, 8))
        seen.append(group.channel.step - before_it)
    expect(seen == [1, 0, 0, 0], f"buffers go out in training alone: {seen} records")
    model.train()
    spoil()
    expect(spoiled(), "the buffers are spoiled")
    before = module.mask.clone()
    loss_of(model, 2).backward()
    theirs = [torch.empty_like(module.norm.running_var) for _ in range(world)]
    dist.all_gather(theirs, module.mask.float().clone())
    expect(torch.equal(theirs[0], theirs[1]), f"mask {before} became {module.mask}")
    if rank == 0:
        module.mask = module.mask.logical_not()  # and again, after the graph is compiled
    loss_of(model, 3).backward()
    dist.all_gather(theirs, module.mask.float().clone())
    expect(torch.equal(theirs[0], theirs[1]), "a buffer that was replaced")


def test_buffers_go_out_before_a_forward_that_synchronises(pool: Pool):
    pool.run(buffers)


class Masked(nn.Module):
    """Saves a buffer for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def kept_buffers(rank: int, world: int, compiles: bool) -> None:
    module = seeded(0, Masked)
    model = wrapped(module, compile=compiles)
    (loss_of(model, 0) + loss_of(model, 1)).backward()  # the second forward writes to what the first has saved
    expect_equal(gradients(module), average(local(module, 0, 1)), "two forwards", tol=1e-6)
    for options in ({"forward_sync_buffers": False}, {}):
        other = seeded(0, Masked)
        with torch.no_grad():
            other.scale += rank
        model = wrapped(other, compile=compiles, **options)
        expect(other.scale[0] == 1, "buffers are sent at construction whatever forward_sync_buffers says")
        other.scale += rank
        loss_of(model, 0).backward()
        expect(other.scale[0] == 1 + (rank if options else 0), f"{options}: {other.scale}")
    other = seeded(rank, Masked)
    other.scale += rank
    with pytest.warns(FutureWarning, match="broadcast_buffers` is deprecated"):
        model = wrapped(other, broadcast_buffers=False, compile=compiles)
    loss_of(model, 0).backward()
    expect(other.scale[0] == 1 + rank, "broadcast_buffers=False sends none at construction either")
    with pytest.warns(FutureWarning, match="Both"):
        expect(
            wrapped(Mlp(), broadcast_buffers=False, forward_sync_buffers=True).forward_sync_buffers, "the new one wins"
        )


@pytest.mark.parametrize("compiles", [True, False])
def test_buffers_that_stay(pool: Pool, compiles: bool):
    pool.run(kept_buffers, compiles)


def buffer_hook(rank: int, world: int) -> None:
    module = seeded(0, Masked)
    model = wrapped(module)

    def averages(group: Any, named: dict[str, Tensor]) -> list[Any]:
        return [dist.all_reduce(b.div_(world), group=group, async_op=True).get_future() for b in named.values()]

    model._register_buffer_comm_hook(None, averages)
    module.scale += rank
    loss_of(model, 0).backward()
    expect(module.scale[0] == 1.5, f"after the forward: {module.scale}")


def test_a_hook_for_buffers(pool: Pool):
    pool.run(buffer_hook)


# ---- what is left alone ----------------------------------------------------------------------------------------------


def ignored(rank: int, world: int, compiles: bool) -> None:
    names = ["first.weight", "norm.running_mean", "mask"]
    module = seeded(rank, Normed)
    before = copy.deepcopy(module.state_dict())
    fxddp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    model = wrapped(module, compile=compiles)
    for name in names:
        expect(torch.equal(module.state_dict()[name], before[name]), f"{name} was sent")
    reference = copy.deepcopy(module)
    loss_of(reference, 0).backward()
    loss_of(model, 0).backward()
    alone = gradients(reference)
    together = average(alone)
    expected = {name: alone[name] if name in names else together[name] for name in alone}
    expect_equal(gradients(module), expected, "what is ignored stays local")
    sent = module.norm.running_var.clone()
    dist.broadcast(sent, 0)
    loss_of(model, 1).backward()
    expect(torch.equal(module.mask, before["mask"]), "an ignored buffer was sent before a forward")


@pytest.mark.parametrize("compiles", [True, False])
def test_ignored_parameters_and_buffers(pool: Pool, compiles: bool):
    pool.run(ignored, compiles)


class Borrowing(nn.Module):
    """Computes with its own layer, with one that it keeps where torch does not see it, and with what it is given."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.own = nn.Linear(8, 4)
        self.hidden = [seeded(rank + 5, lambda: nn.Linear(8, 4))]

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        return self.own(x + prompt) + self.hidden[0](x)


def not_its_own(rank: int, world: int, compiles: bool) -> None:
    """Parameters of each rank alone before, in and behind the module stay as they are, and their gradients local."""

    def train(wrap: Callable[[nn.Module], Any]) -> dict[str, Tensor | None]:
        shard = seeded(rank + 5, lambda: nn.Embedding(10 + rank, 8))  # of another shape on each rank
        head, prompt = seeded(rank + 5, lambda: nn.Linear(4, 2)), nn.Parameter(torch.full((8,), float(rank)))
        module = seeded(0, lambda: Borrowing(rank))
        model, parts = wrap(module), nn.ModuleList([module, *module.hidden, shard, head])
        parts.prompt = prompt
        optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            head(model(shard(torch.arange(4) + rank), prompt)).square().mean().backward()
            optimizer.step()
        return gradients(parts) | {f"{name} itself": p.detach() for name, p in parts.named_parameters()}

    expect_equal(train(lambda m: wrapped(m, compile=compiles)), train(Stock), f"{compiles=}", tol=1e-6)


@pytest.mark.parametrize("compiles", [True, False])
def test_parameters_of_others_stay_local(pool: Pool, compiles: bool):
    pool.run(not_its_own, compiles)


def behind_its_back(rank: int, world: int, compiles: bool) -> None:
    """The plain module's own forwards are local, on one rank or on all; and accumulate, as under `no_sync`."""
    module = seeded(0, Mlp)
    model = wrapped(module, compile=compiles)
    for i in range(3):
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), f"step {i}")
        with counted_collectives() as started:
            if rank == 0 or i == 1:
                x = data(20, 6, 8).requires_grad_()
                module.zero_grad()
                model.module(x).square().mean().backward()
                expect_equal(gradients(module), local(module, 20), f"plain module after step {i}")
        expect(not started, f"{started}")
    module.zero_grad()
    if rank == 0:
        loss_of(module, 7).backward()
    loss_of(model, 8).backward()
    mine = total(local(module, 7), local(module, 8)) if rank == 0 else local(module, 8)
    expect_equal(gradients(module), average(mine), "accumulated before", tol=1e-6)


@pytest.mark.parametrize("compiles", [True, False])
def test_the_plain_module_trains_alone(pool: Pool, compiles: bool):
    pool.run(behind_its_back, compiles)


class Silent(nn.Module):
    """Keeps its loss, and returns what no one can look into, or nothing."""

    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.returns = Mlp(), returns

    def forward(self, x: Tensor) -> Any:
        self.loss = self.layers(x).square().mean()
        return self.returns(self.loss)


def silent(rank: int, world: int, compiles: bool) -> None:
    returns: list[Callable[[Tensor], Any]] = [lambda _: None, lambda loss: partial(int, loss), lambda loss: loss * 2]
    for i, back in enumerate(returns):
        module = seeded(0, lambda back=back: Silent(back))  # type: ignore[misc]
        model = wrapped(module, compile=compiles)
        for n in range(2):
            module.zero_grad()
            model(data(n, 6, 8))
            first = module.loss
            model(data(n + 5, 6, 8))
            first.backward()
            module.loss.backward()
            each = (average(local(module.layers, j)) for j in (n, n + 5))
            expect_equal(gradients(module.layers), total(*each), f"{i}, step {n}", tol=1e-6)


@pytest.mark.parametrize("compiles", [True, False])
def test_losses_that_are_not_returned(pool: Pool, compiles: bool):
    pool.run(silent, compiles)


def wrapped_twice(rank: int, world: int, compiles: bool) -> None:
    """Each wrapper averages what its own forwards accumulate, also when the one that came last is gone."""
    module = seeded(0, Mlp)
    models = [wrapped(module, compile=compiles) for _ in range(2)]
    for i, model in enumerate([*models, *models]):
        module.zero_grad()
        with model.no_sync():
            loss_of(model, i).backward()
        expect_equal(gradients(module), local(module, i), f"local, {i}")
        (loss_of(model, i + 5) + module.first.weight.square().sum() * (rank + 1)).backward()
        regularised: Any = lambda m, i=i: loss_of(m, i + 5) + m.first.weight.square().sum() * (rank + 1)  # noqa: E731
        both = local_gradients(module, partial(loss_of, i=i), regularised)
        expect_equal(gradients(module), average(both), f"synchronised, {i}", tol=1e-6)
    del models[1:], model
    module.zero_grad()
    (loss_of(models[0], 3) + module.first.weight.sum() * rank).backward()
    regularised = lambda m: loss_of(m, 3) + m.first.weight.sum() * rank  # noqa: E731
    alone = local_gradients(module, regularised)
    expect_equal(gradients(module), average(alone), "the first is left", tol=1e-6)


@pytest.mark.parametrize("compiles", [True, False])
def test_two_wrappers_of_one_module(pool: Pool, compiles: bool):
    pool.run(wrapped_twice, compiles)


def restructured(rank: int, world: int, compiles: bool) -> None:
    """Modules and parameters that come or are replaced between steps, in ways of which torch tells nobody."""

    def converted(module: nn.Module) -> None:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            module.to(torch.float32).to(torch.float64).to(torch.float32)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)

    def replaced(module: Any) -> None:
        module[1]._parameters["bias"] = nn.Parameter(torch.ones(6))

    early = seeded(3, lambda: nn.Linear(5, 5))  # made before the wrapper
    changes: list[Callable[[Any], None]] = [converted, replaced, lambda m: m.insert(1, early)]
    module = seeded(0, lambda: nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 6)))
    model = wrapped(module, compile=compiles)
    for i, change in enumerate(changes):
        loss_of(model, i).backward()
        change(module)
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), f"after change {i}")
        module.zero_grad()
    expect(not model.will_sync_module_buffers(), "no buffers yet")
    module[0].register_buffer("late", torch.full((2,), float(rank)))
    loss_of(model, 5)
    expect(module[0].late.sum() == 0, "a buffer that came late is rank 0's")


@pytest.mark.parametrize("compiles", [True, False])
def test_modules_that_change(pool: Pool, compiles: bool):
    pool.run(restructured, compiles)


# ---- copies ----------------------------------------------------------------------------------------------------------


def copies(rank: int, world: int, compiles: bool) -> None:
    module = seeded(0, Normed)
    model = wrapped(module, compile=compiles)
    loss_of(model, 0).backward()
    pickled = io.BytesIO()
    torch.save(model, pickled)
    pickled.seek(0)
    for how, other in {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(pickled, weights_only=False),
    }.items():
        expect(type(other) is fxddp.DistributedDataParallel and other.backend is not model.backend, how)
        expect_equal(other.state_dict(), model.state_dict(), how)
        other.zero_grad()
        with counted_collectives() as started, torch.no_grad():
            other.eval()(data(0, 2, 8))
        expect(not started, f"{how}: evaluation starts {started}")
        other.train()
        expected = average(local(other.module, 1))
        loss_of(other, 1).backward()
        expect_equal(gradients(other.module), expected, how)
        expect(bool(other.backend.plans) == compiles, how)
    module.zero_grad()
    loss_of(model, 2).backward()
    expect_equal(gradients(module), average(local(module, 2)), "the original goes on")
    subgroup = dist.new_group(list(range(world)))
    other = wrapped(seeded(0, Mlp), process_group=subgroup, compile=compiles)
    expect("default process group" in str(error_of(lambda: pickle.dumps(other))), "a group cannot be pickled")
    twin = copy.deepcopy(other)
    loss_of(twin, 0).backward()
    expect_equal(gradients(twin.module), average(local(twin.module, 0)), "a copy on the same group")
    dist.destroy_process_group(subgroup)


@pytest.mark.parametrize("compiles", [True, False])
def test_copies_are_independent(pool: Pool, compiles: bool):
    pool.run(copies, compiles)


# ---- modules ---------------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """A graph break in the middle, a disabled part, and an LSTM, which Dynamo skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.rnn = nn.Linear(8, 8), nn.Linear(8, 8), nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.rnn(self.disabled(x))[0]

    @torch.compiler.disable
    def disabled(self, x: Tensor) -> Tensor:
        return self.hidden(x).relu()


def modules(rank: int, world: int) -> None:
    for make in (
        Broken,
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        lambda: nn.Linear(8, 2),
        lambda: torch.compile(Mlp(), backend="eager"),
    ):
        module = seeded(0, make)
        model = wrapped(module)
        for i in range(2):
            module.zero_grad()
            loss_of(model, i).backward()
            expect_equal(gradients(module), average(local(module, i)), f"{type(module).__name__} {i}")
        expect(model.backend.plans, f"nothing of {type(module).__name__} is compiled")


def test_what_can_be_compiled_is(pool: Pool):
    pool.run(modules, timeout=120)


def compiled_steps(rank: int, world: int, wrap: Callable[[nn.Module], Any]) -> None:
    """Forward, backward and update in one compiled function: Dynamo is there when autograd calls the hooks."""
    module = seeded(rank, Mlp)
    expected = seeded(0, Mlp)
    model = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def whole(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = torch.compile(whole, backend=small_backend())
    torch._dynamo.utils.clear_compilation_metrics()
    for i in range(3):
        run(data(i, 6, 8))
        averages = average(local(expected, i))
        with torch.no_grad():
            for name, gradient in averages.items():
                expected.get_parameter(name).sub_(gradient, alpha=0.1)
        expect_equal(module.state_dict(), expected.state_dict(), f"step {i}", 1e-5)
    own = Path(fxddp.__file__).parent
    traced = {
        metrics.co_name
        for metrics in torch._dynamo.utils.get_compilation_metrics()
        if metrics.co_filename
        and Path(metrics.co_filename).is_relative_to(own)
        and not str(metrics.co_name).startswith("forward_")  # the module's, by a name of the wrapper's
    }
    expect(not traced, f"Dynamo traced {traced}")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend=small_backend())
    return module


@pytest.mark.parametrize("wrap", [wrapped, compiled_in_place])
def test_a_whole_step_is_compiled(pool: Pool, wrap: Callable[[nn.Module], Any]):
    pool.run(compiled_steps, wrap, timeout=120)


def many(rank: int, world: int) -> None:
    models = [wrapped(nn.Sequential(nn.Linear(8, 2 + i))) for i in range(12)]
    for i, model in enumerate(models):
        loss_of(model, i).backward()
        expect(len(model.backend.plans) == 1, f"model {i} has {len(model.backend.plans)} graphs")


def test_wrappers_do_not_share_a_recompile_limit(pool: Pool):
    pool.run(many, timeout=120)


def games(rank: int, world: int, compiles: bool) -> None:
    """A generator and a discriminator, taking turns."""

    def play(wrap: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
        maker, judge = seeded(0, lambda: nn.Linear(8, 8)), seeded(1, lambda: nn.Sequential(nn.Linear(8, 9), nn.Tanh()))
        make, judging = wrap(maker), wrap(judge)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge)]
        for i in range(3):
            optimizers[1].zero_grad()
            (judging(data(i, 4, 8)).mean() - judging(make(data(i + 9, 4, 8)).detach()).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            judging(make(data(i + 5, 4, 8))).mean().backward()
            optimizers[0].step()
        return {**maker.state_dict(prefix="maker."), **judge.state_dict(prefix="judge.")}

    expect_equal(play(lambda m: wrapped(m, compile=compiles)), play(Stock), "after three rounds", tol=1e-6)


@pytest.mark.parametrize("compiles", [True, False])
def test_two_models_that_take_turns(pool: Pool, compiles: bool):
    pool.run(games, compiles)


def outside(rank: int, world: int, compiles: bool) -> None:
    def losses(model: Any, module: Any) -> list[Tensor]:
        tied = loss_of(model, 0) + (data(1, 3, 24) @ module.first.weight).square().mean()
        decayed = loss_of(model, 2) + sum(p.square().sum() for p in module.parameters())
        return [tied, decayed, loss_of(model, 3) + loss_of(model, 4)]

    module = seeded(0, Mlp)
    model = wrapped(module, compile=compiles)
    for i in range(3):
        module.zero_grad()
        losses(model, module)[i].backward()
        expected = average(local_gradients(module, lambda m, i=i: losses(m, m)[i]))  # type: ignore[misc]
        expect_equal(gradients(module), expected, f"{i}", tol=1e-6)
    module.zero_grad()
    loss = loss_of(model, 5)
    loss.backward(retain_graph=True)
    loss.backward()
    once = average(local(module, 5))
    expect_equal(gradients(module), total(once, once), "one forward, two backwards", tol=1e-6)


@pytest.mark.parametrize("compiles", [True, False])
def test_parameters_used_outside_of_forward(pool: Pool, compiles: bool):
    pool.run(outside, compiles)


def doubled(_: Any, __: Any, output: Tensor) -> Tensor:
    return output * 2


def hooked_later(rank: int, world: int, breaks: bool) -> None:
    """Dynamo has no guards for the first hook of a module; modules hooked before and after are compiled with them."""
    module = seeded(0, Mlp)
    if breaks:  # in the middle of the forward, so that code of the module's own is compiled
        module.middle.register_full_backward_hook(lambda *_: None)
    model = wrapped(module)
    everywhere = nn.modules.module.register_module_forward_hook
    kinds: list[Callable[[], Any]] = [
        lambda: module.last.register_forward_hook(doubled),
        lambda: module.first.register_forward_pre_hook(lambda _, x: (x[0] + 1,)),
        lambda: module.last.register_full_backward_pre_hook(lambda _, g: (g[0] * 3,)),
        lambda: module.first.register_full_backward_hook(lambda _, g, __: g),
        lambda: everywhere(lambda m, _, y: y + 1 if isinstance(m, nn.Linear) else None),
    ]
    for i in range(3 * len(kinds)):  # without, with, without, …
        handle = kinds[i // 3]() if i % 3 == 1 else None
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), f"step {i}", tol=1e-6)
        if handle is not None:
            handle.remove()
    graphs = len(model.backend.plans)
    handle = module.last.register_forward_hook(doubled)
    module.zero_grad()
    loss_of(model, 99).backward()
    expect_equal(gradients(module), average(local(module, 99)), "the first hook again", tol=1e-6)
    expect(breaks or len(model.backend.plans) == graphs, "compiled again for hooks that it was compiled for")


@pytest.mark.parametrize("breaks", [False, True])
def test_hooks_that_come_after_the_first_step(pool: Pool, breaks: bool):
    pool.run(hooked_later, breaks)


# ---- unused parameters -----------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """One trunk and three heads, one of which runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 2 + i) for i in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x))


def unused(rank: int, world: int, options: dict[str, Any]) -> None:
    models = wrapped(seeded(0, Heads), **options), Stock(seeded(0, Heads), find_unused_parameters=True)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step, heads in enumerate([(0, 1), (1, 1), (2, 0), (0, 1)]):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(data(step, 4, 8), heads[rank]).square().mean().backward()
            optimizer.step()
        expect_equal(gradients(models[0]), gradients(models[1]), f"gradients of step {step}")
    expect_equal(models[0].state_dict(), models[1].state_dict(), "in the end")


@pytest.mark.parametrize("compiles", [True, False])
def test_ranks_may_use_different_parameters(pool: Pool, compiles: bool):
    pool.run(unused, {"compile": compiles, "find_unused_parameters": True}, timeout=120)


def static(rank: int, world: int, compiles: bool) -> None:
    models = wrapped(seeded(0, Heads), compile=compiles, static_graph=True), Stock(seeded(0, Heads), static_graph=True)
    for step in range(3):
        for model in models:
            model.zero_grad()
            model(data(step, 4, 8), rank).square().mean().backward()
        expect_equal(gradients(models[0]), gradients(models[1]), f"gradients of step {step}")
    error = error_of(lambda: models[0](data(9, 4, 8), 2).sum().backward(), "a changed graph")
    expect("static_graph=True" in str(error) and "heads.2" in str(error), f"{error}")


class Repeated(nn.Module):
    """One block twice, each time computed again in the backward, and an output that is not used."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self.last, self.side = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant).tanh()
        return self.last(x), self.side(x)


def static_and_repeated(rank: int, world: int, compiles: bool) -> None:
    """By hand: from the second step on stock DDP's static graph is wrong for this module, or raises."""

    def loss(model: Any, i: int) -> Tensor:
        return model(data(i, 4, 8).requires_grad_())[0].square().mean()

    for reentrant in (True, False):
        module = seeded(0, partial(Repeated, reentrant=reentrant))
        model = wrapped(module, compile=compiles, static_graph=True)
        for step in range(3):
            module.zero_grad()
            loss(model, step).backward()
            expected = average(local_gradients(module, partial(loss, i=step)))
            expect_equal(gradients(module), expected, f"{reentrant=}, step {step}", tol=1e-6)
        expect(module.side.weight.grad is None, "a gradient of what is not in the loss")
        for step in range(2):
            module.zero_grad()
            with model.no_sync():
                loss(model, 5 + step).backward()
            loss(model, 7 + step).backward()
            expected = average(local_gradients(module, *(partial(loss, i=i + step) for i in (5, 7))))
            expect_equal(gradients(module), expected, f"{reentrant=}, accumulated {step}", tol=1e-6)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_static_graph_with_checkpoints(pool: Pool, compiles: bool):
    pool.run(static_and_repeated, compiles)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_static_graph_may_differ_between_ranks(pool: Pool, compiles: bool):
    pool.run(static, compiles, discard=True)


def freed(rank: int, world: int, compiles: bool) -> None:
    import gc
    import weakref

    model = wrapped(seeded(0, Mlp), compile=compiles)
    loss_of(model, 0).backward()
    gone = [weakref.ref(model), weakref.ref(model.module), weakref.ref(model.module.first.weight)]
    del model
    gc.collect()
    expect([ref() for ref in gone] == [None] * 3, f"{[ref() is None for ref in gone]}")


@pytest.mark.parametrize("compiles", [True, False])
def test_nothing_keeps_a_model_alive(pool: Pool, compiles: bool):
    pool.run(freed, compiles)


# ---- compositions ----------------------------------------------------------------------------------------------------


def compositions(rank: int, world: int) -> None:
    from torch._dynamo.backends.distributed import DDPOptimizer

    original = DDPOptimizer.compile_fn
    DDPOptimizer.compile_fn = error_of  # type: ignore[method-assign, assignment]
    try:
        module = seeded(0, Mlp)
        model = wrapped(module)
        outer = torch.compile(model, backend="eager")
        step = torch.compile(lambda i: loss_of(outer, i), backend="eager")
        for i, run in enumerate((lambda i: loss_of(outer, i), step)):
            module.zero_grad()
            run(i).backward()
            expect_equal(gradients(module), average(local(module, i)), f"compiled from outside: {i}")
        expect(len(model.backend.plans) == 1, f"{len(model.backend.plans)} graphs")
        around = wrapped(model)
        module.zero_grad()
        loss_of(around, 4).backward()
        expect_equal(gradients(module), average(local(module, 4)), "a wrapper in a wrapper")
    finally:
        DDPOptimizer.compile_fn = original  # type: ignore[method-assign]
    expect(fxddp.backend_of(model) is model.backend, "backend_of")
    torch._dynamo.reset()
    compiled: Any = torch.compile(Mlp(), backend=fxddp.backend(inner="aot_eager"))
    in_place = Mlp()
    in_place.compile(backend=fxddp.backend(inner="aot_eager"))
    for what, wrap in {
        "ours around compiled": lambda: wrapped(compiled),
        "ours around compiled in place": lambda: wrapped(nn.Sequential(in_place)),
        "torch's around compiled": lambda: Stock(compiled),
        "torch's around ours": lambda: Stock(nn.Sequential(model)),
    }.items():
        expect("averages its gradients with fxddp already" in str(error_of(wrap, what)), what)


def test_compositions(pool: Pool):
    pool.run(compositions, timeout=120)


def strangers(rank: int, world: int) -> None:
    from torch.distributed._shard.sharded_tensor import ones as shards_of_ones
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    mesh = init_device_mesh("cpu", (world,))
    expect("DTensor" in str(error_of(lambda: wrapped(distribute_module(Mlp(), mesh)))), "DTensor")
    error = str(error_of(lambda: wrapped(cast("nn.Module", fully_shard(Mlp(), mesh=mesh)))))
    expect("FSDP" in error or "DTensor" in error, error)
    sharded = seeded(0, Mlp)
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    sharded.shards = nn.Parameter(shards_of_ones(spec, 4, 2), requires_grad=False)
    expect("ShardedTensor" in str(error_of(lambda: wrapped(sharded))), "ShardedTensor")
    Stock._set_params_and_buffers_to_ignore_for_model(sharded, ["shards"])
    loss_of(wrapped(sharded), 0).backward()
    del sharded.shards
    expect_equal(gradients(sharded), average(local(sharded, 0)), "beside what is left alone")
    module = seeded(0, Mlp)
    model = wrapped(module, device_mesh=mesh)
    expect(model.device_mesh is mesh and model.process_group is mesh.get_group(), "the mesh's group")
    loss_of(model, 0).backward()
    expect_equal(gradients(module), average(local(module, 0)), "on a mesh")
    error = str(error_of(lambda: wrapped(Mlp(), device_mesh=mesh, process_group=dist.group.WORLD)))
    expect("both process_group and device_mesh" in error, error)
    error = str(error_of(lambda: wrapped(Mlp(), device_mesh=init_device_mesh("cpu", (1, world)))))
    expect("1D device mesh" in error, error)


def test_meshes_and_sharded_parameters(pool: Pool):
    pool.run(strangers, discard=True)


def through_rpc(rank: int, world: int, port: int) -> list[str]:
    from torch.distributed import autograd as distributed
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    messages = []
    for model in (wrapped(Mlp()), wrapped(Mlp(), compile=False), torch.compile(Mlp(), backend=small_backend())):
        with distributed.context() as context:
            loss = loss_of(model, 0)
            backward = partial(distributed.backward, context, [loss])  # type: ignore[attr-defined]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                error_of(backward)
            messages.append("; ".join(str(warning.message) for warning in caught))
    rpc.shutdown()
    return messages


def test_distributed_autograd_is_refused(pool: Pool):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for messages in pool.run(through_rpc, port, discard=True):
        assert all("does not work with torch.distributed.autograd" in message for message in messages), messages


# ---- sparse gradients ------------------------------------------------------------------------------------------------


class Bags(nn.Module):
    """Embeddings with sparse gradients, of which one may be left out, and one that is used densely as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(30, 4, sparse=True), nn.EmbeddingBag(20, 4, sparse=True)
        self.tied, self.last = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor, *, tagged: bool) -> Tensor:
        y = self.words(x).sum(1) + (self.tags(x % 20) if tagged else 0)
        return self.last(y + self.tied(x % 6).mean(1)) @ self.last.weight @ self.tied.weight.T


def bag_loss(model: Any, i: int, *, tagged: bool) -> Tensor:
    x = torch.randint(30, (4, 3), generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
    return model(x, tagged=tagged).square().mean()


def sparse(rank: int, world: int, compiles: bool, unused: bool) -> None:
    """Averages stay sparse, also where a rank has no gradient or a dense one, which stock DDP refuses."""
    module = seeded(0, Bags)
    model = wrapped(module, compile=compiles, find_unused_parameters=unused)
    tagged = not unused or rank == 1
    step = partial(bag_loss, tagged=tagged)

    def dense(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {name: None if g is None else g.to_dense() for name, g in gradients.items()}

    def check(what: str, *numbers: int) -> None:
        mine = dense(local_gradients(module, *(partial(step, i=i) for i in numbers)))
        zeros = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        mine = {name: zeros[name] if g is None else g for name, g in mine.items()}
        expect_equal(dense(gradients(module)), average(mine), what, tol=1e-6)
        for name in ("words.weight", "tags.weight"):
            expect(dict(module.named_parameters())[name].grad.is_sparse, f"{what}: {name}")

    optimizer = torch.optim.SparseAdam([module.words.weight, module.tags.weight])
    for i in range(2):
        model.zero_grad()
        step(model, i).backward()
        check(f"step {i}", i)
        optimizer.step()
    step(model, 3).backward()
    model.zero_grad()
    with model.no_sync():
        step(model, 4).backward()
    step(model, 5).backward()
    check("accumulated", 4, 5)
    with model.join():
        for i in range(3 - rank):
            model.zero_grad()
            step(model, i).backward()
            if i == 2:  # the other rank takes part with zeros
                alone = {n: g for n, g in dense(local_gradients(module, partial(step, i=2))).items() if g is not None}
                found = dense(gradients(module))
                expect_equal({n: found[n] for n in alone}, {n: g / world for n, g in alone.items()}, "joined", tol=1e-6)


def sparse_like_stock(rank: int, world: int) -> None:
    modules = [seeded(0, lambda: nn.EmbeddingBag(30, 4, sparse=True)) for _ in range(2)]
    for i in range(3):
        for module, model in zip(modules, (wrapped(modules[0]), Stock(modules[1])), strict=True):
            module.zero_grad()
            model(
                torch.randint(30, (4, 3), generator=torch.Generator().manual_seed(10 * i + rank))
            ).square().mean().backward()
        ours, theirs = (module.weight.grad.coalesce() for module in modules)
        expect_equal(
            {"rows": ours.indices(), "values": ours.values()},
            {"rows": theirs.indices(), "values": theirs.values()},
            f"step {i}",
        )


def test_sparse_gradients_like_stock(pool: Pool):
    pool.run(sparse_like_stock)


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("unused", [False, True])
def test_sparse_gradients(pool: Pool, unused: bool, compiles: bool):
    pool.run(sparse, compiles, unused)


def other_order(rank: int, world: int, compiles: bool) -> str:
    models = [wrapped(seeded(width, partial(Mlp, width)), compile=compiles) for width in (24, 30)]
    first = models[rank]
    return str(error_of(lambda: loss_of(first, 0).backward()))


@pytest.mark.parametrize("compiles", [True, False])
def test_models_that_train_in_another_order_are_named(pool: Pool, compiles: bool):
    for message in pool.run(other_order, compiles, discard=True):
        assert "backwards of different models" in message
        assert "only rank 0 has gradients of first.weight (24, 8)" in message
        assert "only rank 1 has gradients of first.weight (30, 8)" in message


# ---- settings --------------------------------------------------------------------------------------------------------


def refused(rank: int, world: int) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    frozen = Mlp().requires_grad_(False)
    precision = _MixedPrecision(reduce_dtype=torch.bfloat16)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("device_ids can only be None or contain a single", lambda: wrapped(Mlp(), device_ids=[0, 1])),
        ("device_ids and output_device arguments", lambda: wrapped(Mlp(), device_ids=[0])),
        ("device_ids and output_device arguments", lambda: wrapped(Mlp(), output_device=1)),
        ("doesn't have any parameter that requires a gradient", lambda: wrapped(frozen)),
        ("uninitialized parameters", lambda: wrapped(nn.LazyLinear(3))),
        (
            "SyncBatchNorm layers only work with GPU",
            lambda: wrapped(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))),
        ),
        ("need to be set at the same time", lambda: wrapped(Mlp(), delay_all_reduce_named_params=[])),
        ("process_group must be", lambda: wrapped(Mlp(), process_group="gloo")),
        ("static_graph must be True or False", lambda: wrapped(Mlp(), static_graph=1)),
        ("bucket_cap_mb must be a positive", lambda: wrapped(Mlp(), bucket_cap_mb=0)),
        ("module must be a torch.nn", lambda: wrapped(Mlp)),  # type: ignore[arg-type]
        ("device_mesh must be a torch.distributed", lambda: wrapped(Mlp(), device_mesh="replicas")),
        ("mixed_precision must be a torch.nn", lambda: wrapped(Mlp(), mixed_precision=torch.bfloat16)),
        ("bucket_cap_mb_list", lambda: wrapped(Mlp(), bucket_cap_mb_list=[1, 2])),
        ("inner must be one of", lambda: wrapped(Mlp(), inner="tvm")),
        ("comm_hook must be one of", lambda: wrapped(Mlp(), comm_hook="int4")),
        ("starts its own collectives", lambda: wrapped(Mlp(), mixed_precision=precision, algorithm="ring")),
        ("greater than 1", lambda: wrapped(Mlp())._set_ddp_runtime_logging_sample_rate(0)),
    ]
    for text, call in cases:
        error = error_of(call, text)
        expect(text in str(error) and isinstance(error, ValueError | RuntimeError), f"{text}: {error!r}")
    expect(isinstance(error_of(lambda: wrapped(Mlp(), nonsense=1)), TypeError), "an unknown argument")
    with pytest.warns(FutureWarning, match="check_reduction"):
        wrapped(Mlp(), check_reduction=True)


def test_refusals_name_the_argument(pool: Pool):
    pool.run(refused)


def on_devices(*devices: str) -> list[tuple[str, nn.Parameter]]:
    """Named fake parameters on devices that need not be there."""
    with FakeTensorMode():
        return [(f"{i}.weight", nn.Parameter(torch.empty_strided((2,), (1,), device=d))) for i, d in enumerate(devices)]


def test_devices_of_the_module():
    """A module on several devices of one kind takes no device_ids, one on several kinds is refused, as by torch."""
    one, several = on_devices("cuda:1", "cuda:1"), on_devices("cuda:0", "cuda:1")
    assert ddp_arguments.devices([1], None, [p for _, p in one]) == ([1], 1)
    assert ddp_arguments.devices(None, None, [p for _, p in one]) == (None, None)
    ddp_arguments.module(Mlp(), several)
    assert ddp_arguments.devices(None, None, [p for _, p in several]) == (None, None)
    for ids, output in (([0], None), (None, 1)):
        with pytest.raises(ValueError, match=r"module parameters \['cuda:0', 'cuda:1'\]. Leave both out"):
            ddp_arguments.devices(ids, output, [p for _, p in several])
    with pytest.raises(ValueError, match=r"same type of devices.*\['cpu', 'cuda'\]"):
        ddp_arguments.module(Mlp(), on_devices("cpu", "cuda:0"))


def different(rank: int, world: int) -> None:
    wrapped(Mlp(width=20 + rank))


def test_different_models_are_refused_at_construction(pool: Pool):
    for error in pool.run(different, expect_error=True):
        assert "first.weight" in str(error)


def sizes(rank: int, world: int) -> None:
    def plan(**options: Any) -> Any:
        model = fxddp.DistributedDataParallel(seeded(0, Mlp), inner="aot_eager", **options)
        loss_of(model, 0).backward()
        (plan,) = model.backend.plans
        return plan

    expect((plan().cap, plan().first_cap) == (25 << 20, 1 << 20), "torch's default")
    given = plan(bucket_cap_mb=0.25)
    expect((given.cap, given.first_cap) == (1 << 18, 1 << 18), "a given size is the first bucket's too")
    expect(plan(bucket_cap_mb=1, first_bucket_mb=0.5).first_cap == 1 << 19, "unless that is given as well")
    several = plan(bucket_cap_mb_list=[SMALL, 3 * SMALL, 2 * SMALL])
    unit = int(SMALL * (1 << 20))
    expect(several.caps == (unit, int(3 * SMALL * (1 << 20)), int(2 * SMALL * (1 << 20))), f"{several.caps}")
    grouped = [[len(b.grads) for b in each.buckets] for each in (several, plan(bucket_cap_mb=SMALL))]
    expect(grouped == [[3, 2, 1], [1, 4, 1]], f"{grouped}")


def test_bucket_sizes(pool: Pool):
    pool.run(sizes)


def views(rank: int, world: int, as_view: bool, set_to_none: bool) -> None:
    ours, stock = seeded(0, Mlp), seeded(0, Mlp)
    model = wrapped(ours, gradient_as_bucket_view=as_view, bucket_cap_mb=1)
    reference = Stock(stock, gradient_as_bucket_view=as_view)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, stock)]
    for i in range(3):
        for optimizer, each in zip(optimizers, (model, reference), strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(each, i).backward()
            optimizer.step()
        expect_equal(gradients(ours), gradients(stock), f"step {i}")
    storages = {p.grad.untyped_storage().data_ptr() for p in ours.parameters() if p.grad is not None}
    expect(len(storages) == 1, "every gradient is a view of the one bucket")


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
def test_gradient_as_bucket_view(pool: Pool, as_view: bool, set_to_none: bool):
    pool.run(views, as_view, set_to_none)


def other_settings(rank: int, world: int) -> None:
    module = seeded(0, Mlp)
    named = list(module.named_parameters())
    model = wrapped(
        module,
        delay_all_reduce_named_params=named[:2],
        param_to_hook_all_reduce=named[-1][1],
        skip_all_reduce_unused_params=True,
        find_unused_parameters=True,
        batched_grad_copy=True,
        init_sync=False,
    )
    loss_of(model, 0).backward()
    expect_equal(gradients(module), average(local(module, 0)), "delayed ones are averaged like all others")
    own = {
        "delay_all_reduce_named_params": [("own", nn.Parameter(torch.ones(1)))],
        "param_to_hook_all_reduce": named[0][1],
    }
    refused = str(error_of(partial(wrapped, module, **own)))
    expect("own would stay local. Register them in the module" in refused, refused)
    skipping = wrapped(seeded(0, Heads), skip_all_reduce_unused_params=True, find_unused_parameters=True)
    stock = Stock(seeded(0, Heads), skip_all_reduce_unused_params=True, find_unused_parameters=True)
    for i in range(3):
        for each in (skipping, stock):
            each.zero_grad()
            each(data(i, 4, 8), 1).square().mean().backward()
        expect_equal(gradients(skipping), gradients(stock), f"step {i} of one head")
    expect(not model.backend.settings.find_unused_parameters, "skipping needs no exchange")
    expect("before training starts" in str(error_of(model._set_static_graph)), "too late to be static")
    model = wrapped(seeded(0, Mlp))
    model._set_static_graph()
    expect(model.static_graph and model.backend.settings.static_graph, "static from now on")
    with pytest.warns(UserWarning, match="no need to set it again"):
        model._set_static_graph()
    with counted_collectives() as started:
        unequal = wrapped(seeded(rank, Mlp), init_sync=False)
    expect(not started, f"init_sync=False starts {started}")
    weights = unequal.module.first.weight.clone()
    loss_of(unequal, 0).backward()
    expect(torch.equal(unequal.module.first.weight, weights), "init_sync=False sends nothing later either")


def test_settings_without_effect_on_numbers(pool: Pool):
    pool.run(other_settings)


def regrouped(rank: int, world: int) -> None:
    module = seeded(0, Mlp)
    model = wrapped(module)
    loss_of(model, 0).backward()
    alone = [dist.new_group([each]) for each in range(world)]
    model._update_process_group(alone[rank])
    module.zero_grad()
    loss_of(model, 1).backward()
    expect_equal(gradients(module), local(module, 1), "on a group of one")
    everyone: Any = dist.group.WORLD
    model._update_process_group(everyone)
    module.zero_grad()
    loss_of(model, 2).backward()
    expect_equal(gradients(module), average(local(module, 2)), "on all ranks again")


def test_another_group_later(pool: Pool):
    pool.run(regrouped, discard=True)


# ---- mixed precision -------------------------------------------------------------------------------------------------


class Precise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.tensor(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden) * self.scale


def reduced(rank: int, world: int, compiles: bool) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    module = seeded(0, Precise)
    plain = copy.deepcopy(module)
    model = wrapped(
        module,
        mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
        compile=compiles,
    )
    expect(module.scale.dtype == torch.bfloat16 and module.count.dtype == torch.int64, "buffers")
    out = model(data(0, 6, 8))
    expect(out.dtype == torch.bfloat16, f"computed in {out.dtype}")
    out.float().square().mean().backward()

    def loss(reference: nn.Module) -> Tensor:
        half = copy.deepcopy(reference).bfloat16()
        halves = {name: p.bfloat16() for name, p in reference.named_parameters()}
        return torch.func.functional_call(half, halves, (data(0, 6, 8).bfloat16(),)).float().square().mean()

    expect(all(p.dtype == p.grad.dtype == torch.float32 for p in module.parameters() if p.grad is not None), "float32")
    expect_equal(gradients(module), average(local_gradients(plain, loss)), "averaged", tol=1e-2)
    expect(all(v.dtype != torch.bfloat16 for v in model.module.parameters()), "parameters stay")


@pytest.mark.parametrize("compiles", [True, False])
def test_mixed_precision(pool: Pool, compiles: bool):
    pool.run(reduced, compiles)


def average_in(dtype: torch.dtype, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """As torch's hook does it: sums in this dtype, then divides."""
    found: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        if gradient is None:
            found[name] = None
            continue
        wire = gradient.to(dtype) if gradient.is_floating_point() else gradient.clone()
        dist.all_reduce(torch.view_as_real(wire) if wire.is_complex() else wire)
        found[name] = wire.div_(dist.get_world_size()).to(gradient.dtype)
    return found


class Mixed(Mlp):
    """A model with parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y.sum() * self.short.float()).sum() + (y.sum() * self.phase).abs().sum()


def reduced_on_the_way(rank: int, world: int, options: dict[str, Any]) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    low, high = torch.bfloat16, torch.float64
    for dtype in (low, high):
        module = seeded(0, Mixed)
        model = wrapped(module, mixed_precision=_MixedPrecision(reduce_dtype=dtype), **options)
        loss_of(model, 0).backward()
        expect_equal(gradients(module), average_in(dtype, local(module, 0)), f"first step in {dtype}")
        if dtype is low:
            usual, found = average(local(module, 0))["first.bias"], module.first.bias.grad
            expect(str(usual) != str(found), "averaged in float32: this tests nothing")
        module.zero_grad()
        with model.no_sync():
            loss_of(model, 1).backward()
        expect_equal(gradients(module), local(module, 1), "what stays local, in full precision")
        loss_of(model, 2).backward()
        expect_equal(gradients(module), average_in(dtype, local(module, 1, 2)), "accumulated")
        expect(model.backend.stats().last.launches + model.backend.stats().last.uncovered_launches > 3, "buckets")
        with model.join():
            for i in range(3 - rank):
                module.zero_grad()
                loss_of(model, i).backward()
        if rank == 0:
            alone = {n: None if g is None else g.to(dtype) / 2 for n, g in local(module, 2).items() if n != "phase"}
            shares = {n: None if g is None else g.to(dtype) for n, g in gradients(module).items() if n != "phase"}
            expect_equal(shares, alone, "joined by zeros")
        twin = copy.deepcopy(model)
        twin.zero_grad()
        loss_of(twin, 3).backward()
        expect_equal(gradients(twin.module), average_in(dtype, local(module, 3)), "a copy")
    refused = str(error_of(lambda: model.register_comm_hook(None, lambda state, bucket: None)))
    expect("has the average in torch.float64 already" in refused, refused)
    by_default = wrapped(seeded(0, Mlp), mixed_precision=_MixedPrecision(param_dtype=low), **options)
    expect(by_default.backend.registered.carrier.divides, "gradients travel in param_dtype by default")
    same = wrapped(seeded(0, Mlp), mixed_precision=_MixedPrecision(low, torch.float32), **options)
    expect(not same.backend.registered.carrier.divides, "the parameters' own dtype needs nothing")
    refused = str(error_of(lambda: wrapped(seeded(0, Mlp), mixed_precision=_MixedPrecision(reduce_dtype=torch.int32))))
    expect("cannot be averaged in torch.int32" in refused, refused)


@pytest.mark.parametrize("options", [{}, {"split": False}, {"compile": False}], ids=str)
def test_gradients_travel_in_another_precision(pool: Pool, options: dict[str, Any]):
    pool.run(reduced_on_the_way, options)


# ---- looking ---------------------------------------------------------------------------------------------------------


def logged(rank: int, world: int, compiles: bool) -> None:
    ours = wrapped(seeded(0, Mlp), compile=compiles, bucket_cap_mb=25)
    stock = Stock(seeded(0, Mlp), bucket_cap_mb=25)
    for i in range(3):
        for model in (ours, stock):
            loss_of(model, i).backward()
    mine, theirs = ours._get_ddp_logging_data(), stock._get_ddp_logging_data()
    expect(not set(theirs) - set(mine), f"missing: {sorted(set(theirs) - set(mine))}")
    own = ("num_buckets_reduced", "has_rebuilt_buckets")
    for key, value in theirs.items():
        expect(type(mine[key]) is type(value), f"{key} is {mine[key]!r}, not like {value!r}")
        if "time" not in key and "rebuilt" not in key and "indices" not in key and key not in own:
            expect(mine[key] == value, f"{key} is {mine[key]!r} and not {value!r}")
    ours.zero_grad()
    expect(ours._get_ddp_logging_data()["unused_parameter_size"] == 0, "zero_grad makes none unused")
    part = wrapped(seeded(0, Structured), compile=compiles)
    part({"x": data(0, 3, 8), "rest": (1.0, None)}, module=1.0).logits.sum().backward()
    known = part._get_ddp_logging_data()["unused_parameter_size"]
    expect(known == (0 if compiles else 4 * (8 + 1) * (5 + 6)), f"{known} bytes unused")
    expect(mine["num_unused_parameters"] == 0, f"{mine['num_unused_parameters']} unused")
    compute, comm, overlap = (mine[f"backward_{what}_time"] for what in ("compute", "comm", "compute_comm_overlap"))
    expect(compute > 0 and comm > 0 and 0 <= overlap <= min(compute, comm), f"times {compute}, {comm}, {overlap}")
    expect(mine["backward_compute_time_start"] > mine["forward_compute_time_start"] > 0, "backward is after forward")


@pytest.mark.parametrize("compiles", [True, False])
def test_logging_data(pool: Pool, compiles: bool):
    pool.run(logged, compiles)


def replaced(rank: int, world: int, compiles: bool) -> None:
    """All parameters are others than those that were wrapped, as after `load_state_dict(assign=True)`."""
    module = seeded(0, Mlp)
    model = wrapped(module, compile=compiles)
    loss_of(model, 0).backward()
    for i in range(1, 3):
        module.load_state_dict({n: v.clone() for n, v in module.state_dict().items()}, assign=True)
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), f"step {i}", tol=1e-6)


@pytest.mark.parametrize("compiles", [True, False])
def test_parameters_that_took_the_place_of_others(pool: Pool, compiles: bool):
    pool.run(replaced, compiles)


def given_up(rank: int, world: int) -> str:
    """Eager code raises in the backward of one rank, which goes on: the next steps are not those of the other."""
    module = seeded(0, Mlp)
    model = wrapped(module, compile=False)
    loss_of(model, 0).backward()
    fuse = [rank == 1]

    def burn(_: Any) -> None:
        if fuse.pop():
            raise ValueError("on one rank")
        fuse.append(False)

    module.middle.weight.register_hook(burn)
    messages = []
    for i in range(3):
        try:
            loss_of(model, i).backward()
        except (RuntimeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
            fuse.append(False)
    return " | ".join(messages)


def test_an_eager_backward_given_up_on_one_rank(pool: Pool):
    first, second = pool.run(given_up, discard=True)
    for message in (first, second.removeprefix("ValueError: on one rank | ")):
        assert message.startswith("RanksDisagree"), message
        assert "gave up" in message or "different steps" in message
