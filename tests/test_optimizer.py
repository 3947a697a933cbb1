"""Optimizer in backward: the weights of `step()` after the backward, updated while other buckets travel."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import fxddp
from fxddp.optimizer import OptimizerInBackward
from tests.live.lab import (
    SMALL,
    Mlp,
    average,
    buckets,
    compiled,
    data,
    error_of,
    expect,
    expect_equal,
    gradients,
    local,
    loss_of,
    seeded,
    small_backend,
)
from tests.live.pool import Pool

Stock = nn.parallel.DistributedDataParallel
Make = Callable[[Any], Optimizer]


def optimizer_of(kind: str, module: nn.Module) -> Optimizer:
    """A new optimizer over a module, with two groups."""
    biases = [p for p in module.parameters() if p.ndim == 1]
    rest = [p for p in module.parameters() if p.ndim != 1]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}]
    makers: dict[str, Make] = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
        "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    }
    return makers[kind](groups)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def trained(rank: int, world: int, kind: str, wraps: bool, inner: str) -> None:
    """Against the same optimizer stepped after the backward, under stock DDP; schedule, accumulation, checkpoint."""
    module, reference = seeded(0, Mlp), seeded(0, Mlp)
    optimizer = optimizer_of(kind, module)
    options: dict[str, Any] = {"optimizer": optimizer, "inner": inner}
    model: Any
    if wraps:
        model = fxddp.DistributedDataParallel(module, bucket_cap_mb=SMALL, first_bucket_mb=SMALL, **options)
        backend = model.backend
    else:
        model, backend = compiled(module, **options)
    stock = Stock(reference, bucket_cap_mb=SMALL)
    stepped = optimizer_of(kind, reference)
    schedules = [lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, stepped)]
    tol = 0.0 if inner == "aot_eager" else 1e-5
    for step in range(6):
        for accumulated in range(2 if step % 3 == 1 else 0):
            local = fxddp.no_sync(model) if not wraps else model.no_sync()
            with local, stock.no_sync():
                loss_of(model, 100 + accumulated).backward()
                loss_of(stock, 100 + accumulated).backward()
        loss_of(model, step).backward()
        expect(all(p.grad is None for p in module.parameters()), f"step {step}: a gradient is left")
        optimizer.step()  # a training loop may stay as it is
        optimizer.zero_grad()
        loss_of(stock, step).backward()
        stepped.step()
        stepped.zero_grad()
        for schedule in schedules:
            schedule.step()
        expect_equal(weights(module), weights(reference), f"{kind}, step {step}", tol=tol)
        if step == 3:
            stepped.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expect(buckets(backend) >= 3, "several buckets")


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "fused", "Adagrad"])
def test_the_weights_of_a_step_after_the_backward(pool: Pool, kind: str, wraps: bool):
    pool.run(trained, kind, wraps, "aot_eager")


def compiled_updates(rank: int, world: int) -> None:
    trained(rank, world, "AdamW", False, "inductor")
    module = seeded(0, Mlp)
    optimizer = optimizer_of("SGD", module)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, _ = compiled(module, inner="inductor", optimizer=optimizer)
    for step in range(12):
        if step == 2:
            counters.clear()
        loss_of(model, step).backward()
        schedule.step()
    expect(not counters["stats"]["unique_graphs"], f"recompiled: {counters['stats']}")


def test_compiled_updates_are_not_compiled_again(pool: Pool):
    pool.run(compiled_updates)


def test_every_update_is_compiled_however_many_there_are(monkeypatch: pytest.MonkeyPatch):
    """Where torch compiles `Optimizer.step` for eight sets of parameters; and none of these eight is used up."""
    graphs = 0

    def counting(gm: torch.fx.GraphModule, _: Any, **options: Any) -> Any:
        def run(*arguments: Tensor) -> Any:
            nonlocal graphs
            graphs += 1
            return gm(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    buckets = [nn.Parameter(torch.ones(2, 3)) for _ in range(20)]
    update = OptimizerInBackward(torch.optim.SGD(buckets, lr=0.1, momentum=0.9), compiles=True)
    for step in range(3):
        update.begin(step)
        graphs = 0
        for parameter in buckets:
            parameter.grad = torch.ones(2, 3)
            update.update([parameter])
        assert graphs == (len(buckets) if step else 0)  # the first makes the optimizer's state
    for parameter in buckets:
        assert torch.allclose(parameter, torch.full((2, 3), 1 - 0.1 * (1 + 1.9 + 2.71)))
    assert not _debug_get_cache_entry_list(inspect.unwrap(torch.optim.SGD.step).__code__)


def test_compiled_updates_round_as_those_that_are_not():
    """Muon iterates in bfloat16, where one rounding decides about the fourth digit of a weight: few differ."""
    found: list[list[Tensor]] = []
    for compiles in (True, False):
        weights = [nn.Parameter(data(i, 32, 24)) for i in range(4)]
        update = OptimizerInBackward(torch.optim.Muon(weights, lr=0.02), compiles=compiles)
        for step in range(3):
            update.begin(step)
            for i, weight in enumerate(weights):
                weight.grad = data(10 * i + step + 1, 32, 24)
                update.update([weight])
        found.append([weight.detach() for weight in weights])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)  # of 0.06 that weights have moved
    assert sum(map(torch.equal, *found)) >= 2


def communicating(rank: int, world: int) -> tuple[str, ...]:
    """Their steps average or send weights: given to the constructor, later, and made by `_register_fused_optim`."""
    module = Mlp()
    given = PostLocalSGDOptimizer(optimizer_of("SGD", module), PeriodicModelAverager(period=2))
    model = fxddp.DistributedDataParallel(module, inner="aot_eager")
    backend = fxddp.backend()
    return tuple(
        str(error_of(call))
        for call in (
            lambda: fxddp.backend(optimizer=given),
            lambda: backend.register_optimizer(given),
            lambda: model._register_fused_optim(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, lr=0.1),
        )
    )


def test_optimizers_that_communicate_are_refused(pool: Pool):
    for messages in pool.run(communicating):
        for name, message in zip(("PostLocalSGD", "PostLocalSGD", "ZeroRedundancy"), messages, strict=True):
            assert f"optimizer={name}Optimizer holds another optimizer (SGD)" in message
            assert "call its step yourself" in message


def overlapped(rank: int, world: int) -> None:
    """The last bucket only comes back when the first one's parameters are new: forever, if updates waited for all."""
    module = seeded(0, Mlp)
    model, backend = compiled(module, optimizer=optimizer_of("SGD", module))
    first: list[tuple[Tensor, Tensor]] = []

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            first[:] = [(p, p.detach().clone()) for p in bucket.parameters()]
        averaged = dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future()
        if not bucket.is_last():
            return averaged.then(lambda done: done.value()[0])
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def give() -> None:
            averaged.wait()
            while any(torch.equal(p, old) for p, old in first):
                time.sleep(0.001)
            future.set_result(bucket.buffer())

        threading.Thread(target=give).start()
        return future

    backend.register_comm_hook(None, hook)
    for step in range(2):
        loss_of(model, step).backward()
    expect(buckets(backend) >= 2, "several buckets")


def test_updates_while_other_buckets_travel(pool: Pool):
    pool.run(overlapped)


class Broken(nn.Module):
    """Two graphs and an eager part between them share a weight; one head is for other losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head, self.other = (nn.Linear(8, 8) for _ in range(4))
        self.again = 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(x).relu()).relu()
        torch._dynamo.graph_break()
        x = self._eager(x)
        return self.head(self.shared(x)) if self.again else self.other(x)

    @torch.compiler.disable
    def _eager(self, x: Tensor) -> Tensor:
        return self.shared(x).tanh()


class Again(torch.autograd.Function):
    """Computes a block again in backward, as a re-entrant checkpoint does, but lets it be compiled."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *_: Tensor) -> Any:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.block(x)
        torch.autograd.backward(result, gradient)
        return None, x.grad, None, None


class Block(nn.Module):
    """One layer, in a module of ours: torch does not compile one of its own alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Checkpointed(nn.Module):
    """One block twice, each time with a backward of its own inside the backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.block, self.head = Block(), Block(), Block()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        twice = self._twice if self.kind == "function" else torch.compiler.disable(self._twice)
        return self.head(twice(self.first(x)))

    def _twice(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.kind == "checkpoint":
                x = checkpoint(self.block, x, use_reentrant=True).tanh()
            else:
                x = Again.apply(self.block, x, *self.block.parameters()).tanh()
        return x


def shared_weights(rank: int, world: int, kind: str) -> None:
    make = Broken if kind == "graphs" else partial(Checkpointed, kind)
    module, reference = seeded(0, make), seeded(0, make)
    optimizer, stepped = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (module, reference))
    schedules = [lr_scheduler.StepLR(each, 2) for each in (optimizer, stepped)]  # it replaces their `step`
    backend = small_backend(optimizer=optimizer)
    model = module
    if kind == "function":
        for each in (module, reference):  # so that nothing compiled runs before the inner backwards
            each.head.requires_grad_(False)
        module.first.compile(backend=backend)
        module.block.compile(backend=backend)
    else:
        model = torch.compile(module, backend=backend)
    for step in range(4):
        loss_of(model, step).backward()
        losses = [loss_at(reference, step, r) for r in range(world)]
        (sum(losses[1:], losses[0]) / world).backward()
        stepped.step()
        stepped.zero_grad()
        for schedule in schedules:
            schedule.step()
        expect_equal(weights(module), weights(reference), f"{kind}, step {step}", tol=1e-5)


def loss_at(module: nn.Module, i: int, rank: int) -> Tensor:
    """`loss_of` another rank's batch."""
    return module(data(i, 6, 8, rank=rank)).square().mean()


@pytest.mark.parametrize("kind", ["graphs", "checkpoint", "function"])
def test_weights_used_several_times_are_updated_once(pool: Pool, kind: str):
    pool.run(shared_weights, kind)


class Around(nn.Module):
    """A layer in two graphs, with another bucket between its two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.shared = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.shared(self.first(x)))
        torch._dynamo.graph_break()
        return self.shared(x)


def around(rank: int, world: int, scheduled: bool) -> None:
    module, reference = seeded(0, Around), seeded(0, Around)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, reference)]
    schedules = [lr_scheduler.StepLR(each, 1000) for each in optimizers] if scheduled else []
    model, backend = compiled(module, optimizer=optimizers[0], bucket_mb=SMALL / 4, first_bucket_mb=SMALL / 4)
    for step in range(2):
        loss_of(model, step).backward()
        losses = [loss_at(reference, step, r) for r in range(world)]
        (sum(losses[1:], losses[0]) / world).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        for schedule in schedules:
            schedule.step()
        expect_equal(weights(module), weights(reference), f"{scheduled=}, step {step}", tol=1e-5)
    expect(buckets(backend) >= 4, "several buckets")


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_weight_with_another_bucket_between(pool: Pool, scheduled: bool):
    pool.run(around, scheduled)


def routed(rank: int, world: int) -> None:
    """With find_unused_parameters: what no rank uses stays as it is; parameters without optimizer keep `.grad`."""
    module = seeded(0, Broken)
    known = [p for name, p in module.named_parameters() if not name.startswith("first")]
    optimizer = torch.optim.SGD(known, lr=0.1, weight_decay=0.5)
    model = fxddp.DistributedDataParallel(
        module, inner="aot_eager", find_unused_parameters=True, optimizer=optimizer, bucket_cap_mb=SMALL
    )
    for again in ((0, 2)[rank], 2, 0):
        module.again = again
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        module.zero_grad()
        loss_of(model, 0).backward()
        used = [0] * world
        dist.all_gather_object(used, again)
        changed = {name.split(".")[0] for name, p in module.named_parameters() if not torch.equal(p, before[name])}
        heads = {"head" if each else "other" for each in used}
        expect(changed == {"shared", *heads}, f"{changed} changed where ranks used {heads}")
        expect(module.first.weight.grad is not None, "first has no optimizer")
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {name: p.sum().item() for name, p in module.named_parameters()})
    expect(everyone[0] == everyone[-1], "equal weights on all ranks")


def test_different_parameters_on_ranks(pool: Pool):
    pool.run(routed)


def failed(rank: int, world: int) -> None:
    """A backward that raises updates nothing."""
    module = seeded(0, Mlp)
    model, _ = compiled(module, optimizer=optimizer_of("SGD", module))
    loss_of(model, 0).backward()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    x = data(1, 6, 8).requires_grad_()

    def interrupt(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    hidden = x * 1.0
    hidden.register_hook(interrupt)
    error_of(lambda: model(hidden).sum().backward())
    expect_equal(weights(module), before, "after an error")
    loss_of(model, 2).backward()


def test_a_backward_that_fails(pool: Pool):
    pool.run(failed)


def differing(rank: int, world: int, late: bool) -> str:
    module = seeded(0, Mlp)
    kind = ("SGD", "AdamW")[rank]
    model, backend = compiled(module, **({} if late else {"optimizer": optimizer_of(kind, module)}))
    if late:
        loss_of(model, 0).backward()
        backend.register_optimizer(optimizer_of(kind, module))
    return str(error_of(lambda: loss_of(model, 1).backward()))


@pytest.mark.parametrize("late", [False, True])
def test_ranks_with_different_optimizers(pool: Pool, late: bool):
    for message in pool.run(differing, late):
        assert "the optimizer in backward differs between ranks: AdamW on rank 1, SGD on rank 0" in message


CLIPPING: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "clip_grads_with_norm_": lambda model: clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(2.0)),
    "clip_grad_value_": lambda model: clip_grad_value_(model.parameters(), 1.0),
    "clip_grad_value_, compiled": lambda model: torch.compile(clip_grad_value_, backend="eager")(
        model.parameters(), 1.0
    ),
}


def clipped(rank: int, world: int) -> dict[str, str]:
    module = seeded(0, Mlp)
    model = fxddp.DistributedDataParallel(module, inner="aot_eager")
    model._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.5)
    for unknown in (int, nn.Linear, "SGD"):
        message = str(error_of(partial(model._register_fused_optim, unknown)))  # type: ignore[arg-type]
        expect("must be a class" in message, message)
    loss_of(model, 0).backward()
    return {how: str(error_of(partial(clip, model), how)) for how, clip in CLIPPING.items()}


def test_clipping_after_the_update_is_refused(pool: Pool):
    for messages in pool.run(clipped):
        for how, message in messages.items():
            assert "to be clipped, but the last backward has updated 6 of these parameters already" in message, how


def test_clipping_elsewhere_goes_on():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 10.0)
    clip_grad_norm_([parameter, nn.Parameter(torch.ones(2))], 1.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-4)
    clip_grad_value_(parameter, 0.1)
    assert parameter.grad.tolist() == pytest.approx([0.1] * 4)


class Chained(Optimizer):
    """One after the other, as in a program of a user's."""

    def __init__(self, chain: list[Optimizer]) -> None:
        self.chain = {"all": chain[0]}
        self.param_groups = chain[0].param_groups

    def step(self) -> None:  # type: ignore[override]
        self.chain["all"].step()


class Twice(Optimizer):
    """Looks at the loss at two places in a step."""

    def step(self, loss: Callable[[], float], *, again: bool = True, **_: Any) -> None:  # type: ignore[override]
        loss()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: "SGD", "optimizer must be a torch.optim.Optimizer"),
        (
            lambda module: torch.optim.LBFGS(module.parameters()),
            "LBFGS takes closure in its step, as one does that evaluates the loss several",
        ),
        (lambda module: _with_hook(optimizer_of("SGD", module)), "has hooks around its step"),
        (lambda module: Chained([optimizer_of("AdamW", module)]), r"Chained holds another optimizer \(AdamW\)"),
        (lambda module: Twice(module.parameters(), {}), "Twice takes loss in its step"),
    ],
)
def test_what_is_no_optimizer_for_a_backward(make: Callable[[nn.Module], Any], message: str):
    with pytest.raises(ValueError, match=message):
        fxddp.backend(optimizer=make(Mlp()))


def asked(rank: int, world: int) -> None:
    """`autograd.grad` through a checkpoint on one rank only: nothing is updated, nobody is waited for."""
    block, head = seeded(0, lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())), seeded(1, lambda: nn.Linear(8, 4))
    both = nn.ModuleList([block, head])
    backend = small_backend(optimizer=torch.optim.SGD(both.parameters(), lr=0.1))
    first, last = torch.compile(block, backend=backend), torch.compile(head, backend=backend)

    def loss(x: Tensor) -> Tensor:
        return last(checkpoint(first, x, use_reentrant=False)).square().mean()

    loss(data(0, 6, 8)).backward()
    if rank == 0:
        before = {name: p.detach().clone() for name, p in both.named_parameters()}
        x = data(5, 6, 8).requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x), x)
        expect(gradient.abs().sum() > 0, "a gradient")
        expect_equal(weights(both), before, "after autograd.grad")
    loss(data(1, 6, 8)).backward()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {name: p.sum().item() for name, p in both.named_parameters()})
    expect(everyone[0] == everyone[-1], "equal weights on all ranks")


def test_autograd_grad_on_one_rank(pool: Pool):
    pool.run(asked, timeout=30)


def copied(rank: int, world: int, given: bool) -> None:
    """A copy's backward updates the copy, as the original's the original."""
    module = seeded(0, Mlp)
    made = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5) if given else None
    model = fxddp.DistributedDataParallel(module, inner="aot_eager", bucket_cap_mb=SMALL, optimizer=made)
    if not given:
        model._register_fused_optim(torch.optim.SGD, lr=0.1, momentum=0.5)
    loss_of(model, 0).backward()
    twin = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    loss_of(twin, 1).backward()
    expect(all(p.grad is None for p in twin.parameters()), "the copy has an optimizer")
    expect_equal(weights(module), before, "the original")
    loss_of(model, 1).backward()
    expect(not torch.equal(module.last.bias, before["last.bias"]), "the original goes on")
    expect_equal(weights(twin.module), weights(module), "the copy")


@pytest.mark.parametrize("given", [True, False])
def test_copies_train_themselves(pool: Pool, given: bool):
    pool.run(copied, given)


def test_clipping_what_an_earlier_backward_updated():
    module = seeded(0, Mlp)
    model, _ = compiled(module, optimizer=torch.optim.SGD(module.last.parameters(), lr=0.1))
    loss_of(model, 0).backward()
    module.zero_grad()
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="has updated 2 of these"):
        clip_grad_norm_(module.parameters(), 1e-3)
    module.last.requires_grad_(False)
    loss_of(model, 2).backward()
    clip_grad_norm_(module.parameters(), 1e-3)
    total = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
    assert total.item() == pytest.approx(1e-3, rel=1e-2)


def test_clipping_without_the_optimizer_in_backward():
    module = seeded(0, Mlp)
    model, backend = compiled(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    loss_of(model, 0).backward()
    del model, backend
    torch._dynamo.reset()
    gc.collect()
    module.last.requires_grad_(False)
    loss_of(module, 1).backward()
    clip_grad_norm_(module.parameters(), 1e-3)
    norms = [p.grad.norm() for p in module.parameters() if p.grad is not None]
    assert len(norms) == 4
    assert torch.stack(norms).norm() <= 1e-3


def test_hooks_put_around_the_step_later():
    module = seeded(0, Mlp)
    optimizer = optimizer_of("SGD", module)
    model, _ = compiled(module, optimizer=optimizer)
    loss_of(model, 0).backward()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for register in (optimizer.register_step_post_hook, register_optimizer_step_pre_hook):  # the latter for all of them
        hook = register(lambda *_: None)
        with pytest.raises(RuntimeError, match="has hooks around its step"):
            loss_of(model, 1).backward()
        expect_equal(weights(module), before, "a backward that was refused")
        hook.remove()
        module.zero_grad()
    loss_of(model, 2).backward()
    assert not torch.equal(module.last.bias, before["last.bias"])


def test_a_parameter_in_the_place_of_another():
    module = seeded(0, Mlp)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, _ = compiled(module, optimizer=optimizer)
    loss_of(model, 0).backward()
    module.last.bias = optimizer.param_groups[0]["params"][-1] = nn.Parameter(torch.zeros(4))
    loss_of(model, 1).backward()
    assert module.last.bias.abs().sum() > 0
    assert module.last.bias.grad is None


def test_a_parameter_outside_the_model_is_left_alone():
    module, other = seeded(0, Mlp), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*module.parameters(), other], lr=0.1)
    lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, _ = compiled(module, optimizer=optimizer)
    other.grad = torch.ones(3)
    loss_of(model, 0).backward()
    assert torch.equal(other, torch.ones(3))
    assert other.grad is not None


def _with_hook(optimizer: Optimizer) -> Optimizer:
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def test_two_optimizers_are_refused():
    module = Mlp()
    backend = fxddp.backend(optimizer=optimizer_of("SGD", module))
    with pytest.raises(RuntimeError, match="with SGD already: use parameter groups"):
        backend.register_optimizer(optimizer_of("SGD", module))


def test_alone_without_a_process_group():
    module, reference = seeded(0, Mlp), seeded(0, Mlp)
    optimizer, stepped = optimizer_of("AdamW", module), optimizer_of("AdamW", reference)
    module.last.bias.register_post_accumulate_grad_hook(lambda _: None)  # accumulated one by one
    model, backend = compiled(module, optimizer=optimizer)
    for step in range(3):
        with backend.no_sync() if step == 1 else contextlib.nullcontext():
            loss_of(model, step).backward()
        loss_of(reference, step).backward()
        if step != 1:
            stepped.step()
            stepped.zero_grad()
        expect_equal(weights(module), weights(reference), f"step {step}", tol=1e-6)


def scaled(rank: int, world: int) -> list[str]:
    """A scaler's gradients are never used; a scaler of another model's loss is nobody's business."""
    module, other = seeded(0, Mlp), seeded(1, Mlp)
    optimizer, others = optimizer_of("fused", module), optimizer_of("SGD", other)  # whose `step` a scaler calls itself
    model, _ = compiled(module, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss_of(model, 0).backward()
    scaler.scale(loss_of(other, 0)).backward()
    scaler.step(others)
    loss_of(model, 1).backward()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    messages = [str(error_of(lambda: scaler.scale(loss_of(model, 2)).backward()))]
    expect_equal(weights(module), before, "after the error")
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(model, 3)).backward()
    off.unscale_(optimizer)
    off.step(optimizer)
    (loss_of(model, 4) * scaler.get_scale()).backward()  # which nobody can tell from any other loss
    return messages + [str(error_of(partial(use, optimizer))) for use in (scaler.unscale_, scaler.step)]


def test_a_scaler_is_refused(pool: Pool):
    for first, *later in pool.run(scaled):
        assert "a GradScaler scaled this loss, and an optimizer in backward (AdamW) would update with scaled" in first
        for message in later:
            assert "to unscale gradients, but the last backward has updated 6 of these parameters already" in message


def hooked(rank: int, world: int, kind: str) -> str:
    """Optimizers that torch hooked to parameters step with averages, each of its own; others' gradients stay."""
    module, reference = seeded(0, Mlp), seeded(0, Mlp)
    rates = {"first": 0.3, "middle": 0.1}
    give = partial(_apply_optimizer_in_backward, torch.optim.SGD)
    give(module.first.parameters(), {"lr": rates["first"]})
    give(module.middle.parameters(), {"lr": rates["middle"]}, register_hook=False)
    steppers = [torch.optim.SGD(reference.get_submodule(name).parameters(), lr=rate) for name, rate in rates.items()]
    model: Any
    owner: Any
    if kind == "backend":
        model, owner = compiled(module)
    else:
        options: dict[str, Any] = {"compile": kind == "compiled", "inner": "aot_eager", "bucket_cap_mb": SMALL}
        model = owner = fxddp.DistributedDataParallel(module, **options)
    for step in range(4):
        if step == 1:  # steps after the other one, of a model that trains already
            give(module.first.parameters(), {"lr": 0.01})
            steppers.append(torch.optim.SGD(reference.first.parameters(), lr=0.01))
        with owner.no_sync():
            loss_of(model, step + 5).backward()
        loss_of(model, step).backward()
        for name, gradient in average(local(reference, step + 5, step)).items():
            reference.get_parameter(name).grad = gradient
        expect_equal(gradients(module.last), gradients(reference.last), f"of the others, step {step}", tol=1e-5)
        for stepper in steppers:
            stepper.step()
        expect(all(p.grad is None for name in rates for p in module.get_submodule(name).parameters()), "taken")
        module.last.zero_grad()
        expect_equal(weights(module), weights(reference), f"weights after step {step}", tol=1e-5)
    alone = seeded(0, Mlp)
    give(alone.first.parameters(), {"lr": 0.3})
    other, _ = compiled(alone, optimizer=torch.optim.SGD(alone.last.parameters(), lr=0.1))
    return str(error_of(lambda: loss_of(other, 0).backward()))


@pytest.mark.parametrize("kind", ["backend", "compiled", "uncompiled"])
def test_optimizers_that_torch_hooked_to_parameters(pool: Pool, kind: str) -> None:
    for error in pool.run(hooked, kind):
        assert "_apply_optimizer_in_backward gave first.weight an optimizer of its own" in error
