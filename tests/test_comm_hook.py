"""Communication hooks of DistributedDataParallel, as they are: the numbers of stock DDP with the same hook.

torch's quantisation hooks read the result of an all-gather as NCCL gives it and fail on gloo under stock DDP too; so
does batched PowerSGD anywhere, whose matrices its own check refuses (torch 2.13).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim.functional_sgd import _FunctionalSGD
from torch.nn.parallel import DistributedDataParallel as Stock

import fxddp
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
)
from tests.live.pool import Pool
from tests.test_agreement import Experts, expert


def power(state_class: Any = powerSGD_hook.PowerSGDState, **options: Any) -> Any:
    return state_class(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5, **options)


def with_then(state, bucket):
    """A collective, and another one when that is done."""
    first = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def again(future: Any) -> Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor)
        return tensor / 4

    return first.then(again)


HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "fp16 wrapper": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "PowerSGD": (power, powerSGD_hook.powerSGD_hook),
    "fp16 and PowerSGD": (power, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "post-local SGD": (
        lambda: post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "noop": (lambda: None, debugging_hooks.noop_hook),
    "then optimizer": (
        lambda: None,
        optimizer_overlap_hooks._hook_then_optimizer(
            default_hooks.allreduce_hook,
            optimizer_overlap_hooks._OptimizerHookState(_FunctionalSGD([], lr=0.1, _allow_empty_param_list=True)),
        ),
    ),
    "with then": (lambda: None, with_then),
}


class Turned(Mlp):
    """Has a complex parameter: its bucket is real for a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.view_as_real(x * self.turn).sum(-1))


REAL = ("PowerSGD", "fp16 and PowerSGD", "then optimizer", "with then")
"""Hooks that take gradients one by one, where torch gives half of a complex one, or that torch orders in one bucket."""


def one_bucket(rank: int, world: int, kind: str, compiles: bool) -> None:
    """A bucket for each dtype, in the order of both libraries, so that what is compressed together is the same."""
    make_state, hook = HOOKS[kind]
    make_module = Mlp if kind in REAL else Turned
    module, reference = seeded(0, make_module), seeded(0, make_module)
    model = fxddp.DistributedDataParallel(module, inner="aot_eager", first_bucket_mb=25, compile=compiles)
    stock = Stock(reference)
    for wrapper in (model, stock):
        torch.manual_seed(7)  # PowerSGD draws
        wrapper.register_comm_hook(make_state(), hook)
    for i in range(5):
        module.zero_grad()
        reference.zero_grad()
        loss_of(model, i).backward()
        loss_of(stock, i).backward()
        sums = [g.abs().sum() for g in gradients(reference).values() if g is not None]
        expect(all(bool(s > 0) for s in sums), "no gradients: this tests nothing")
        if "PowerSGD" in kind:
            close(gradients(module), gradients(reference), local(module, i), kind, i)
        else:
            expect_equal(gradients(module), gradients(reference), f"{kind}, step {i}", tol=1e-6)
        if "PowerSGD" not in kind:
            weights, others = (dict(each.named_parameters()) for each in (module, reference))
            expect_equal(weights, others, f"weights, {kind}, step {i}", tol=1e-6)
    expect(model._get_ddp_logging_data()["comm_hook"] == hook.__qualname__, "not on record")


def close(got: Gradients, want: Gradients, own: Gradients, kind: str, i: int) -> None:
    """What is compressed together depends on the order in the bucket: compared as approximations of one average."""
    exact = average(own)
    for name, reference in exact.items():
        assert reference is not None
        mine, theirs = got[name], want[name]
        assert mine is not None
        assert theirs is not None
        size = reference.norm() + 1e-6
        expect((mine - reference).norm() <= 1.5 * (theirs - reference).norm() + 0.6 * size, f"{kind}, {i}: {name}")


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_torch(pool: Pool, kind: str, compiles: bool):
    pool.run(one_bucket, kind, compiles)


def several_buckets(rank: int, world: int, split: bool) -> None:
    """Every way of a gradient: accumulated, of a tensor hook, reduced for an accumulation hook, bf16 on the CPU."""
    module = seeded(0, Mlp)
    model, backend = compiled(module, split=split)
    backend.register_comm_hook(None, default_hooks.allreduce_hook)
    for i in range(2):
        module.zero_grad()
        with backend.no_sync():
            loss_of(model, 10 + i).backward()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, 10 + i, i)), f"accumulated, step {i}", tol=1e-6)
    expect(backend.stats().last.launches > 1, "one bucket: this tests nothing")
    seen: dict[str, Tensor] = {}
    module.first.weight.register_hook(lambda gradient: gradient * 2)
    module.last.weight.register_post_accumulate_grad_hook(lambda p: seen.update(last=p.grad.clone()))
    module.zero_grad()
    loss_of(model, 5).backward()
    expected = average({n: g * 2 if n == "first.weight" and g is not None else g for n, g in local(module, 5).items()})
    expect_equal(gradients(module), expected, "with hooks", tol=1e-6)
    expect_equal(seen, {"last": expected["last.weight"]}, "what the accumulation hook saw", tol=1e-6)

    wrapper = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    for what, hook in (("bf16", default_hooks.bf16_compress_hook), ("bf16 wrapper", wrapper)):
        other = seeded(1, Mlp)
        model, backend = compiled(other, split=split)
        backend.register_comm_hook(None, hook)
        loss_of(model, 0).backward()
        half = {n: None if g is None else (g.bfloat16() / 2).float() for n, g in local(other, 0).items()}
        rounded: Gradients = {}
        for name, gradient in half.items():
            assert gradient is not None
            wire = gradient.bfloat16()
            dist.all_reduce(wire)
            rounded[name] = wire.float()
        expect_equal(gradients(other), rounded, what, tol=1e-6)


@pytest.mark.parametrize("split", [True, False])
def test_hooks_on_every_way(pool: Pool, split: bool):
    pool.run(several_buckets, split)


def routed(rank: int, world: int, kind: str) -> None:
    """Ranks that use different parameters; buckets of the union, in one order, for a hook that starts collectives."""
    module, reference = seeded(0, Experts), seeded(0, Experts)
    model, backend = compiled(module, find_unused_parameters=True)
    backend.register_comm_hook(None, HOOKS[kind][1])
    for i in range(4):
        module.zero_grad()
        which = (rank + i) % 3
        expert(model, which, i).backward()
        mine = local_gradients(reference, partial(expert, which=which, i=i))
        zeros = {n: torch.zeros_like(p) if mine[n] is None else mine[n] for n, p in reference.named_parameters()}
        nobodys = f"experts.{(world + i) % 3}."
        expected = {n: None if n.startswith(nobodys) else g for n, g in average(zeros).items()}
        expect_equal(gradients(module), expected, f"step {i}", tol=1e-6)


@pytest.mark.parametrize("kind", ["allreduce", "with then"])
def test_hooks_over_the_union(pool: Pool, kind: str):
    pool.run(routed, kind)


def joined(rank: int, world: int) -> None:
    found = []
    for wrap in (
        lambda m: Stock(m, bucket_cap_mb=SMALL),
        lambda m: fxddp.DistributedDataParallel(m, bucket_cap_mb=SMALL, inner="aot_eager"),
    ):
        module = seeded(0, Mlp)
        model = wrap(module)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with model.join():
            for i in range(3 * rank):  # the first has none at all
                optimizer.zero_grad()
                loss_of(model, i).backward()
                optimizer.step()
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    expect_equal(found[1], found[0], "with join", tol=1e-6)


def test_hooks_with_join(pool: Pool):
    pool.run(joined)


class Broken(Exception):
    pass


def failing(rank: int, world: int) -> list[str]:
    def at_once(state: Any, bucket: dist.GradBucket) -> Any:
        raise Broken("at once")

    def later(state: Any, bucket: dist.GradBucket) -> Any:
        def fail(_: Any) -> Any:
            time.sleep(2.5 * rank)  # until this rank has read that the other one gave up
            raise Broken("later")

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fail)

    def nothing(state: Any, bucket: dist.GradBucket) -> Any:
        future = torch.futures.Future()  # type: ignore[var-annotated]
        future.set_result(None)
        return future

    def number(state: Any, bucket: dist.GradBucket) -> Any:
        return 1

    messages = []
    for hook in (at_once, later, nothing, number):
        module = seeded(0, Mlp)
        model, backend = compiled(module)
        backend.register_comm_hook(None, hook)
        messages.append(str(error_of(lambda: loss_of(model, 0).backward(), hook.__name__)))  # noqa: B023
        expect(not backend._running, "still running")
        messages.append(str(error_of(lambda: backend.register_comm_hook(None, at_once))))  # noqa: B023
    backend = fxddp.backend()
    messages.append(str(error_of(lambda: backend.register_comm_hook(None, 3))))  # type: ignore[arg-type]

    def annotated(state: Any, bucket: int) -> Any: ...

    messages.append(str(error_of(lambda: backend.register_comm_hook(None, annotated))))
    module = seeded(0, Mlp)
    model, backend = compiled(module)
    backend.register_comm_hook(None, (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook)[rank])
    messages.append(str(error_of(lambda: loss_of(model, 0).backward())))
    return messages


def _broken_in_torch(rank: int, world: int) -> list[str]:
    """What hooks raise that torch ships and that do not run under its own wrapper here."""
    messages = []
    hooks: list[tuple[Any, Any]] = [
        (lambda: dist.group.WORLD, quantization_hooks.quantization_pertensor_hook),
        (lambda: dist.group.WORLD, quantization_hooks.quantization_perchannel_hook),
        (power, powerSGD_hook.batched_powerSGD_hook),
    ]
    for make_state, hook in hooks:
        for wrapper in (Stock, partial(fxddp.DistributedDataParallel, inner="aot_eager")):
            model = wrapper(seeded(0, Mlp))
            model.register_comm_hook(make_state(), hook)

            def train(model: Any = model) -> None:
                for i in range(3):
                    loss_of(model, i).backward()

            messages.append(str(error_of(train, hook.__name__)))
            dist.barrier()
    return messages


def test_hooks_that_fail_under_torchs_wrapper_name_the_bucket(pool: Pool) -> None:
    for messages in pool.run(_broken_in_torch, discard=True):
        for stock, ours in zip(messages[::2], messages[1::2], strict=True):
            assert "hook failed for bucket 0 (" in ours
            error = stock.partition("\n")[0].rpartition("callback: ")[2]  # the frames below depend on the thread
            assert error in ours


def test_errors_of_hooks(pool: Pool):
    for messages in pool.run(failing, discard=True):
        assert "must return a torch.futures.Future object, but got int" in messages[6]
        for what in ("at_once", "later", "nothing", "number"):
            message, again = messages.pop(0), messages.pop(0)
            assert f"{what} failed for bucket 0 (middle.weight" in message, message
            assert "can only be called once" in again
        assert "must be callable" in messages[0]
        assert "annotation should be dist.GradBucket" in messages[1]
        assert "the communication hook differs between ranks: fp16_compress_hook on rank 1" in messages[2]


class InTwo(nn.Module):
    """Two graphs with a bucket each, of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x)


def two_graphs(rank: int, world: int) -> None:
    """The hook of a graph's last bucket goes on in another thread, later on one rank, when the next graph starts."""

    def slower(state: Any, bucket: dist.GradBucket) -> Any:
        def again(future: Any) -> Tensor:
            time.sleep(0.2 * rank)
            tensor = future.value()[0]
            dist.all_reduce(tensor)
            return tensor / (world * world)

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    module = seeded(0, InTwo)
    model, backend = compiled(module)
    backend.register_comm_hook(None, slower)
    for step in range(2):
        module.zero_grad()
        model(data(step, 4, 16)).square().mean().backward()
        twin = copy.deepcopy(module)
        twin.zero_grad()
        twin(data(step, 4, 16)).square().mean().backward()
        expect_equal(gradients(module), average(gradients(twin)), f"step {step}", tol=1e-6)
    expect(backend.stats().last.graphs == [1, 0], f"two graphs: {backend.stats().last.graphs}")


def test_hooks_keep_their_order_from_graph_to_graph(pool: Pool):
    pool.run(two_graphs)
