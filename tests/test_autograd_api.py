"""What is not a plain `loss.backward()`: asking autograd directly, retained graphs, hooks, unused outputs."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.live.lab import (
    Gradients,
    Mlp,
    average,
    buckets,
    compiled,
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
    total,
)
from tests.live.pool import Pool
from tests.test_find_unused import union_average

SPLITS = pytest.mark.parametrize("split", [True, False])


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def directly(rank: int, world: int, split: bool) -> None:
    """autograd.grad and backward(inputs=[x]) give local values and start nothing, so one rank may do them alone."""
    module = seeded(0, Mlp)
    model, backend = compiled(module, split=split)
    loss_of(model, 0).backward()
    module.zero_grad()
    for pending in (False, True):
        if pending:
            with backend.no_sync():
                loss_of(model, 1).backward()
        before = gradients(module)
        backwards = backend.stats().total
        wanted = local(module, 2)
        if rank == 0:
            with counted_collectives() as started:
                found = torch.autograd.grad(loss_of(model, 2), list(module.parameters()))
                expect_equal(dict(zip(wanted, found, strict=True)), wanted, "of all parameters")
                (one,) = torch.autograd.grad(loss_of(model, 2), [module.middle.bias])
                expect_equal({"middle.bias": one}, {"middle.bias": wanted["middle.bias"]}, "of one parameter")
                x = data(2, 6, 8).requires_grad_()
                (expected,) = torch.autograd.grad(square(module(x)), [x])
                (one, two) = torch.autograd.grad(square(model(x)), [x, module.first.weight])
                expect_equal({"x": one, "first": two}, {"x": expected, "first": wanted["first.weight"]}, "of both")
                square(model(x)).backward(inputs=[x])
                expect_equal({"x": x.grad}, {"x": expected}, "backward(inputs=[x])")
                y = model(x)
                (of_y,) = torch.autograd.grad(square(y), [y])
                (expected_y,) = torch.autograd.grad(square(detached := y.detach().requires_grad_()), [detached])
                expect_equal({"y": of_y}, {"y": expected_y}, "of the output")
            expect(not started, f"started {started}")
        expect_equal(gradients(module), before, ".grad")
        expect(backend.stats().total == backwards, "a backward is on record")
    loss_of(model, 3).backward()
    expect_equal(gradients(module), average(local(module, 1, 3)), "the step after")


@SPLITS
def test_gradients_asked_for_directly(pool: Pool, split: bool):
    pool.run(directly, split)


def some_parameters(rank: int, world: int, split: bool) -> None:
    """backward(inputs=[parameters]) averages those and leaves the others alone."""
    module = seeded(0, Mlp)
    model, backend = compiled(module, split=split)
    loss_of(model, 0).backward()
    chosen = {"first.weight", "last.bias"}
    inputs = [p for name, p in module.named_parameters() if name in chosen]

    def only_chosen(values: Gradients, others: Gradients) -> Gradients:
        return {name: value if name in chosen else others[name] for name, value in values.items()}

    nothing: Gradients = dict.fromkeys(local(module, 0))
    module.zero_grad()
    loss_of(model, 1).backward(inputs=inputs)
    expect_equal(gradients(module), only_chosen(average(local(module, 1)), nothing), "some parameters")
    x = data(2, 6, 8).requires_grad_()
    module.zero_grad()
    square(model(x)).backward(inputs=[x, *inputs])
    expect_equal(gradients(module), only_chosen(average(local(module, 2)), nothing), "some parameters and x")
    (expected,) = torch.autograd.grad(square(module(x)), [x])
    expect_equal({"x": x.grad}, {"x": expected}, "x stays local")

    module.zero_grad()
    with counted_collectives() as started:
        with backend.no_sync():
            loss = loss_of(model, 3)
        loss.backward(inputs=inputs)
    expect(not started, f"forward under no_sync: {started}")
    expect_equal(gradients(module), only_chosen(local(module, 3), nothing), "forward under no_sync")
    loss = loss_of(model, 4)
    with backend.no_sync():
        loss.backward(inputs=inputs)
    expect_equal(gradients(module), only_chosen(average(local(module, 3, 4)), nothing), "backward under no_sync")

    module.zero_grad()
    with backend.no_sync():
        loss_of(model, 5).backward()
    loss_of(model, 6).backward(inputs=inputs)
    pending = local(module, 5)
    expected_now = only_chosen(average(local(module, 5, 6)), average(pending))
    expect_equal(gradients(module), expected_now, "with something pending")
    module.zero_grad()
    loss_of(model, 7).backward()
    expect_equal(gradients(module), average(local(module, 7)), "the step after")


@SPLITS
def test_backward_into_some_parameters(pool: Pool, split: bool):
    pool.run(some_parameters, split)


def second_order(rank: int, world: int, split: bool) -> list[str]:
    """AOTAutograd does not do double backward; it says so, and nothing is lost in silence."""
    module = seeded(0, Mlp)
    model, _ = compiled(module, split=split)
    loss_of(model, 0).backward()
    module.zero_grad()
    messages = []
    x = data(1, 6, 8).requires_grad_()
    (of_x,) = torch.autograd.grad(square(model(x)), [x], create_graph=True)
    messages.append(str(error_of(lambda: of_x.square().sum().backward(), "a penalty on an input's gradient")))
    loss_of(model, 1).backward(create_graph=True)
    expect_equal(
        {n: g.detach() for n, g in gradients(module).items() if g is not None}, average(local(module, 1)), "average"
    )
    penalty = loss_of(module, 2) + sum(p.grad.square().sum() for p in module.parameters())
    messages.append(str(error_of(penalty.backward, "a penalty on the parameters' gradients")))
    module.zero_grad()
    loss_of(model, 3).backward()
    expect_equal(gradients(module), average(local(module, 3)), "the step after")
    return messages


@SPLITS
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_double_backward_is_refused(pool: Pool, split: bool):
    for messages in pool.run(second_order, split):
        for message in messages:
            assert "torch.compile with aot_autograd does not currently support double backward" in message


def retained(rank: int, world: int, split: bool) -> None:
    module = seeded(0, Mlp)
    model, backend = compiled(module, split=split)
    loss_of(model, 0).backward()
    module.zero_grad()
    loss = loss_of(model, 1)
    once = average(local(module, 1))
    for times in range(1, 4):
        loss.backward(retain_graph=times < 3)
        expect_equal(gradients(module), total(*[once] * times), f"after {times} backwards", tol=1e-6)
        expect(backend.stats().last.launches == buckets(backend), f"{backend.stats().last.launches} launches")
    module.zero_grad()
    with backend.no_sync():
        loss = loss_of(model, 2)
    for times in (1, 2):
        loss.backward(retain_graph=times < 2)
        expect_equal(gradients(module), total(*[local(module, 2)] * times), f"local, {times} backwards", tol=1e-6)
    y = model(data(3, 6, 8))
    torch.autograd.backward([square(y), y.sum()])
    both = total(
        local(module, 2), local(module, 2), local_gradients(module, lambda m: square(z := m(data(3, 6, 8))) + z.sum())
    )
    expect_equal(gradients(module), average(both), "two losses at once", tol=1e-6)
    module.zero_grad()
    y = model(data(4, 6, 8))
    weight = torch.full_like(y, 0.5 + rank)
    y.backward(weight)
    expect_equal(
        gradients(module), average(local_gradients(module, lambda m: (m(data(4, 6, 8)) * weight).sum())), "of a tensor"
    )


@SPLITS
def test_retained_graphs(pool: Pool, split: bool):
    pool.run(retained, split)


def tensor_hooks(rank: int, world: int, split: bool) -> None:
    """Tensor hooks see and may change the local gradient, whenever they were registered."""
    module = seeded(0, Mlp)
    seen: dict[str, Tensor] = {}

    def hook(name: str, gradient: Tensor) -> Tensor:
        seen[name] = gradient.clone()
        return gradient.clamp(-0.001, 0.001) * (1 + rank)

    def check(i: int, hooked: set[str], what: str, model: Any) -> None:
        module.zero_grad()
        seen.clear()
        plain = local(module, i)
        loss_of(model, i).backward()
        expect_equal(seen, {name: plain[name] for name in hooked}, f"{what}: what the hooks saw")
        changed = {
            n: g.clamp(-0.001, 0.001) * (1 + rank) if n in hooked and g is not None else g for n, g in plain.items()
        }
        expect_equal(gradients(module), average(changed), f"{what}: gradients")

    module.first.weight.register_hook(partial(hook, "first.weight"))
    model, _ = compiled(module, split=split)
    check(0, {"first.weight"}, "before compiling", model)
    handle = module.last.bias.register_hook(partial(hook, "last.bias"))
    check(1, {"first.weight", "last.bias"}, "after compiling", model)
    handle.remove()
    check(2, {"first.weight"}, "one removed", model)
    frozen = module.middle.weight.register_hook(lambda gradient: None)
    check(3, {"first.weight"}, "one that returns nothing", model)
    frozen.remove()


@SPLITS
def test_tensor_hooks(pool: Pool, split: bool):
    pool.run(tensor_hooks, split)


def accumulation_hooks(rank: int, world: int, split: bool) -> None:
    """Hooks on a parameter's accumulation see the average, whenever they were registered, and may take it away."""
    module = seeded(0, Mlp)
    seen: dict[str, Tensor] = {}

    def hook(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen[name] = parameter.grad.clone()

    def take(name: str, parameter: Tensor) -> None:
        hook(name, parameter)
        parameter.grad = None

    module.first.weight.register_post_accumulate_grad_hook(partial(hook, "first.weight"))
    model, backend = compiled(module, split=split)
    for i in range(4):
        if i == 1:
            module.last.bias.register_post_accumulate_grad_hook(partial(hook, "last.bias"))
        if i == 2:
            module.middle.weight.register_post_accumulate_grad_hook(partial(take, "middle.weight"))
        hooked = {"first.weight", *(["last.bias"] if i >= 1 else []), *(["middle.weight"] if i >= 2 else [])}
        module.zero_grad()
        seen.clear()
        loss_of(model, i).backward()
        expected = average(local(module, i))
        expect_equal(seen, {name: expected[name] for name in hooked}, f"step {i}: what the hooks saw")
        if i >= 2:
            expected["middle.weight"] = None
        expect_equal(gradients(module), expected, f"step {i}: gradients")
        expect(backend.stats().last.launches == buckets(backend), f"step {i}: {backend.stats().last.launches} launches")
    module.zero_grad()
    for i in (5, 6):
        with backend.no_sync():
            loss_of(model, i).backward()
    seen.clear()
    loss_of(model, 7).backward()
    expected = average(local(module, 5, 6, 7))
    expected["middle.weight"] = average(local(module, 7))["middle.weight"]  # its hook had taken the others
    expect_equal(seen, {name: expected[name] for name in seen}, "after accumulation: what the hooks saw")
    expect(set(seen) == {"first.weight", "last.bias", "middle.weight"}, f"hooks ran for {set(seen)}")


@SPLITS
def test_accumulation_hooks(pool: Pool, split: bool):
    pool.run(accumulation_hooks, split)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 24), nn.Linear(24, 4), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.trunk(x).relu()
        return self.left(x), self.right(x), x


def head_not_in_the_loss(rank: int, world: int, split: bool) -> None:
    """Parameters that no loss reaches keep None as under eager, so weight decay leaves them alone."""
    module = seeded(0, Heads)
    model, _ = compiled(module, split=split)
    opt = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)

    def loss(m: Any, i: int, used: tuple[int, ...]) -> Tensor:
        outputs = m(data(i, 6, 8))
        return sum((square(outputs[k]) for k in used), torch.zeros(()))

    for i, used in enumerate([(0,), (0,), (0, 1), (1,), (2,), (0,)]):
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        opt.zero_grad()
        loss(model, i, used).backward()
        expected = average(local_gradients(module, lambda m: loss(m, i, used)))  # noqa: B023 (called at once)
        unused = {name for name, gradient in expected.items() if gradient is None}
        expect(len(unused) == {(0, 1): 0, (2,): 4}.get(used, 2), f"this tests nothing: {unused}")
        expect_equal(gradients(module), expected, f"outputs {used}")
        if i == 0:
            opt.step()
            still = {name for name, p in module.named_parameters() if torch.equal(p, before[name])}
            expect(still == unused, f"weight decay: {still} did not change, expected {unused}")
    # What an unused head accumulated before stays, and is averaged if it was local.
    opt.zero_grad()
    loss(model, 7, (0, 1)).backward()
    loss(model, 8, (0,)).backward()
    several = [average(local_gradients(module, lambda m: loss(m, i, used))) for i, used in ((7, (0, 1)), (8, (0,)))]  # noqa: B023
    expect_equal(gradients(module), total(*several), "accumulated", tol=1e-6)


@SPLITS
def test_a_head_that_is_not_in_the_loss(pool: Pool, split: bool):
    pool.run(head_not_in_the_loss, split)


def hooked_head(rank: int, world: int, local_step: bool, find_unused: bool) -> None:
    """A tensor hook is not called for a head that is not in the loss, as in eager; those that wait for all are."""
    module, plain = seeded(0, Heads), seeded(0, Heads)
    model, backend = compiled(module, find_unused_parameters=find_unused)
    seen: dict[int, list[Any]] = {}

    def watch(m: Any) -> list[Any]:
        def note(what: str, gradient: Tensor) -> Tensor:
            seen[id(m)].append((what, gradient.shape))
            return gradient * 2

        handles = [head.weight.register_hook(partial(note, name)) for name, head in m.named_children()]
        weights = [m.left.weight, m.right.weight]
        in_all = torch.autograd.graph.register_multi_grad_hook(
            weights, lambda gs: seen[id(m)].append([g is not None for g in gs])
        )
        in_any = torch.autograd.graph.register_multi_grad_hook(
            [m.right.weight], lambda g: seen[id(m)].append(("any", g.shape)), mode="any"
        )
        return [*handles, in_all, in_any]

    def loss(m: Any, i: int, used: tuple[int, ...]) -> Tensor:
        outputs = m(data(i, 6, 8))
        return sum((square(outputs[k]) for k in used), torch.zeros(()))

    watch(plain)
    handles = watch(module)
    right_only = (1,) if find_unused and rank == 1 else (0,)
    for i, used in enumerate([(0, 1), (0,), right_only, (1,), (0, 1)]):
        module.zero_grad()
        plain.zero_grad()
        seen.update({id(module): [], id(plain): []})
        with backend.no_sync() if local_step else contextlib.nullcontext():
            loss(model, i, used).backward()
        loss(plain, i, used).backward()
        expect(sorted(map(str, seen[id(module)])) == sorted(map(str, seen[id(plain)])), f"outputs {used}: {seen}")
        if not local_step:
            expect_equal(gradients(module), union_average(gradients(plain), module), f"outputs {used}")
    for handle in handles:
        handle.remove()
    expect(not any(p._backward_hooks for p in module.parameters()), "a hook stayed")


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("local_step", [False, True])
def test_hooks_of_a_head_that_is_not_in_the_loss(pool: Pool, local_step: bool, find_unused: bool):
    pool.run(hooked_head, local_step, find_unused)


def gradients_are_usable(rank: int, world: int, split: bool) -> None:
    """What users do to .grad works on ours: it may be a view of a bucket."""
    module = seeded(0, Mlp)
    model, _ = compiled(module, split=split)
    for i in range(3):
        module.zero_grad(set_to_none=i != 2)
        loss_of(model, i).backward()
        for p in module.parameters():
            assert p.grad is not None
            expect(p.grad.is_leaf and not p.grad.requires_grad, "a gradient has a graph")
            expect(p.grad.stride() == p.stride(), "other strides")
            p.grad.detach_()
            p.grad.mul_(2.0)
        expect_equal(gradients(module), total(*[average(local(module, i))] * 2), f"step {i}")
        module.first.weight.grad.zero_()
        doubled = total(*[average(local(module, i))] * 2)
        expect_equal({"last.weight": module.last.weight.grad}, {"last.weight": doubled["last.weight"]}, "another one")
        for p in module.parameters():
            p.grad.zero_()


@SPLITS
def test_gradients_are_ordinary_tensors(pool: Pool, split: bool):
    pool.run(gradients_are_usable, split)


def compiled_autograd(rank: int, world: int) -> list[str]:
    module = seeded(0, Mlp)
    model, _ = compiled(module)
    messages = []
    with torch._dynamo.config.patch(compiled_autograd=True):
        messages.append(str(error_of(lambda: loss_of(model, 0).backward(), "the setting")))
    loss_of(model, 0).backward()
    loss = loss_of(model, 1)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        messages.append(str(error_of(loss.backward, "a context around the backward")))
        messages.append(str(error_of(lambda: loss_of(model, 2), "a context around the forward")))
    torch._dynamo.reset()
    module.zero_grad()
    loss_of(model, 3).backward()
    expect_equal(gradients(module), average(local(module, 3)), "without it")
    return messages


def test_compiled_autograd_is_refused(pool: Pool):
    for messages in pool.run(compiled_autograd, discard=True):
        for message in messages:
            assert "does not work with compiled autograd" in message
            assert "torch._dynamo.config.compiled_autograd" in message
