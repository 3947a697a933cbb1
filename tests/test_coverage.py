"""Parameters whose gradients graphs pack go without hooks, and nothing goes unnoticed all the same."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxddp
from fxddp._compat import engine
from fxddp.watchers import PATIENCE, Watchers
from tests.live.lab import (
    Gradients,
    Mlp,
    average,
    compiled,
    data,
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


def _hooks(module: nn.Module) -> int:
    return sum(bool(p._post_accumulate_grad_hooks) for p in module.parameters())


def _norm(module: Any, i: int = 0) -> Tensor:
    """A loss of the parameters themselves, another one on each rank."""
    module = getattr(module, "_orig_mod", module)
    return data(i, 1).abs().sum() * (module.first.weight.square().sum() + module.last.bias.sum())


def _regularised(model: Any, i: int = 0) -> Tensor:
    return loss_of(model, i) + _norm(model, i)


Model = tuple[Any, Mlp, fxddp.Backend]


def _in_the_same_backward(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    for i in range(2):
        module.zero_grad()
        _regularised(model, i).backward()
    expect(_hooks(module) == 0, "the end of a backward sees it")
    return average(local_gradients(module, lambda m: _regularised(m, 1)))


def _nothing_compiled(_: Any, module: Mlp, __: fxddp.Backend) -> Gradients:
    _norm(module).backward()
    expect(_hooks(module) == 6, "hooks saw it")
    return average(local_gradients(module, _norm))


def _a_forward_left_over(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    left = loss_of(model, 1)
    _norm(module).backward()
    del left
    return average(local_gradients(module, _norm))


def _from_a_leaf(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    torch.autograd.backward([loss_of(model, 1), module.last.bias], [None, data(3, 4)])
    by_hand = local(module, 1)
    assert by_hand["last.bias"] is not None
    by_hand["last.bias"] += data(3, 4)
    return average(by_hand)


def _from_a_leaf_alone(_: Any, module: Mlp, __: fxddp.Backend) -> Gradients:
    torch.autograd.backward([module.last.bias], [data(3, 4)])
    by_hand: Gradients = dict.fromkeys(gradients(module))
    return average(by_hand | {"last.bias": data(3, 4)})


def _two_roots(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    torch.autograd.backward([_norm(module, 1), loss_of(model, 1)])
    return average(local_gradients(module, lambda m: _regularised(m, 1)))


def _twice_through_one_forward(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    loss = loss_of(model, 1)
    (alone,) = torch.autograd.grad(loss, module.last.bias, retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    expect(_hooks(module) == 0, "both took the usual way")
    own = local(module, 1)
    expect_equal({"bias": alone}, {"bias": own["last.bias"]}, "autograd.grad stays local")
    return average(total(own, own))


def _into_one_parameter(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    loss_of(model, 1).backward(inputs=[module.last.bias])
    by_hand = local(module, 1)
    return {name: average({name: g})[name] if name == "last.bias" else None for name, g in by_hand.items()}


def _under_no_sync(model: Any, module: Mlp, backend: fxddp.Backend) -> Gradients:
    with backend.no_sync():
        _regularised(model, 0).backward()
    return local_gradients(module, _regularised)


def _accumulated(model: Any, module: Mlp, backend: fxddp.Backend) -> Gradients:
    with backend.no_sync():
        _regularised(model, 0).backward()
    _regularised(model, 1).backward()
    return average(local_gradients(module, _regularised, lambda m: _regularised(m, 1)))


def _reentrant_checkpoint(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    def loss(model: Any, x: Tensor) -> Tensor:
        bias = getattr(model, "_orig_mod", model).last.bias
        return checkpoint(lambda x: model(x) @ bias, x, use_reentrant=True).sum() + _norm(model)

    x = data(5, 6, 8).requires_grad_()
    loss(model, x).backward()
    return average(local_gradients(module, lambda m: loss(m, x)))


def _users_hook(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    seen: list[Tensor] = []
    weight = module.first.weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    loss_of(model, 1).backward()
    by_hand = average(local(module, 1))
    expect_equal({"seen": seen[-1]}, {"seen": by_hand["first.weight"]}, "a hook sees the average", tol=1e-6)
    module.zero_grad()
    _norm(module).backward()
    expect_equal({"seen": seen[-1]}, {"seen": weight.grad}, "a hook sees what nothing compiled took part in")
    return average(local_gradients(module, _norm))


def _users_tensor_hook(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    module.first.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    _regularised(model, 1).backward()
    by_hand = local_gradients(module, lambda m: _regularised(m, 1))
    assert by_hand["first.weight"] is not None
    by_hand["first.weight"].clamp_(-1e-3, 1e-3)
    return average(by_hand)


def _frozen_and_thawed(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    module.first.weight.requires_grad_(False)
    _regularised(model, 1).backward()
    expect(module.first.weight.grad is None, "frozen")
    module.first.weight.requires_grad_(True)
    module.zero_grad()
    _norm(module).backward()
    return average(local_gradients(module, _norm))


def _other_graphs(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    def loss(m: Any) -> Tensor:
        return m(data(1, 5, 8)).square().mean() + _norm(m)

    torch._dynamo.reset()
    for rows in (6, 5, 7, 5):
        module.zero_grad()
        model(data(1, rows, 8)).square().mean().backward()
    left = model(data(1, 7, 8))
    module.zero_grad()
    loss(model).backward()
    del left
    expect(_hooks(module) == 0, "no hooks: each packs what the others pack")
    return average(local_gradients(module, loss))


def _another_backend(model: Any, module: Mlp, _: fxddp.Backend) -> Gradients:
    def loss(m: Any, product: Any) -> Tensor:
        return loss_of(m, 1) + loss_of(product, 2) + _norm(m)

    weight: Any = module.first.weight
    second = torch.compile(lambda x: x @ weight.T, backend=small_backend())
    loss(model, second).backward()
    return average(local_gradients(module, lambda m: loss(m, lambda x: x @ m.get_parameter("first.weight").T)))


def _bare(options: dict[str, Any]) -> Model:
    """A compiled module that was trained in the usual way; no gradients by hand before, they are backwards too."""
    torch._dynamo.reset()  # its limit is eight of them
    module = seeded(0, Mlp)
    model, backend = compiled(module, **options)
    for i in range(2):
        module.zero_grad()
        loss_of(model, i).backward()
        expect(_hooks(module) == 0, "no hooks")
    module.zero_grad()
    return model, module, backend


UNUSUAL: tuple[Callable[[Any, Mlp, fxddp.Backend], Gradients], ...] = (
    _in_the_same_backward,
    _nothing_compiled,
    _a_forward_left_over,
    _from_a_leaf,
    _from_a_leaf_alone,
    _two_roots,
    _twice_through_one_forward,
    _into_one_parameter,
    _under_no_sync,
    _accumulated,
    _reentrant_checkpoint,
    _users_hook,
    _users_tensor_hook,
    _frozen_and_thawed,
    _other_graphs,
    _another_backend,
)


def _unusual(rank: int, world: int, options: dict[str, Any]) -> None:
    for backward in UNUSUAL:
        model, module, backend = _bare(options)
        expected = backward(model, module, backend)
        expect_equal(gradients(module), expected, backward.__name__, tol=1e-6)
        module.zero_grad()
        loss_of(model, 3).backward()
        if backward is not _users_tensor_hook:
            expect_equal(gradients(module), average(local(module, 3)), f"a step after {backward.__name__}", tol=1e-6)


@pytest.mark.parametrize("options", [{}, {"split": False}], ids=["split", "whole"])
def test_what_autograd_accumulates_is_averaged_where_there_are_no_hooks(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(_unusual, options)


def _leaf_alone(leaf: Tensor, _: nn.Module) -> None:
    leaf.backward(data(3, 4))


def _leaf_beside_another_model(leaf: Tensor, other: nn.Module) -> None:
    torch.autograd.backward([loss_of(other, 1), leaf], [None, data(3, 4)])


def _leaf_inside(leaf: Tensor, other: nn.Module) -> None:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            torch.autograd.backward([leaf], [data(3, 4)])
            return gradient

    apply: Any = Inner.apply
    apply(loss_of(other, 1)).backward()


def _other_models(rank: int, world: int) -> None:
    model, module, _ = _bare({})
    plain = seeded(1, Mlp)
    loss_of(plain, 1).backward()
    expect_equal(gradients(plain), local(plain, 1), "another model stays local")
    expect(_hooks(module) == 0, "no graph of its holds these parameters")
    left = _norm(module)
    loss_of(plain, 1).backward()
    expect(_hooks(module) == 6, "its backward might have used these parameters")
    del left
    loss_of(model, 2).backward()
    expect_equal(gradients(module), average(local(module, 2)), "with hooks")

    module = seeded(2, Mlp)
    model, _ = compiled(module)
    loss_of(plain, 1).backward()
    expect(_hooks(module) == 0, "nor before the first step")
    for i in range(2):
        module.zero_grad()
        loss_of(model, i).backward()
    expect(_hooks(module) == 0, "so they never need hooks")
    second = seeded(2, Mlp)
    torch.compile(second, backend=small_backend())
    (loss_of(plain, 1) + _norm(second)).backward()
    expect_equal(gradients(second), average(local_gradients(second, _norm)), "a step before anything is compiled")

    for ran in (False, True):
        for start in (_leaf_alone, _leaf_beside_another_model, _leaf_inside):
            module = seeded(2, Mlp)
            model, _ = compiled(module)
            if ran:
                loss_of(model, 0)
            start(module.last.bias, plain)
            expected = average({"bias": data(3, 4)})
            expect_equal({"bias": module.last.bias.grad}, expected, f"{start.__name__}, after a forward: {ran}")

    module = seeded(2, Mlp)
    torch.compile(module, backend=small_backend())
    for _ in range(PATIENCE + 1):
        expect(_hooks(module) == 0, "nothing came to it")
        loss_of(plain, 1).backward()
    expect(_hooks(module) == 6, "it is not asked for ever")

    model, module, _ = _bare({})
    part = nn.Linear(8, 8)

    def both(m: Any) -> Tensor:
        return (part(data(6, 2, 8)) @ getattr(m, "_orig_mod", m).first.weight.T).sum()

    both(model).backward()
    expect(_hooks(module) == 6, "a backward that begins elsewhere comes to one of them")
    expect_equal(gradients(module), average(local_gradients(module, both)), "which is averaged")

    model, module, _ = _bare({})
    parameters = [weakref.ref(p) for p in module.parameters()]
    del model, module
    torch._dynamo.reset()
    gc.collect()
    expect(not any(reference() is not None for reference in parameters), "nothing keeps the parameters")
    loss_of(plain, 1).backward()


def test_hooks_come_with_another_backward_while_a_graph_holds_a_parameter(pool: Pool) -> None:
    pool.run(_other_models)


class Partly(nn.Module):
    """A parameter of the graph that gets no gradient there, and one that trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.scale = nn.Linear(8, 4), nn.Parameter(torch.ones(4))
        self.fast = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * self.scale.detach()


def _partly(rank: int, world: int) -> None:
    module = seeded(0, Partly)
    model, _ = compiled(module)

    def loss(m: Any) -> Tensor:
        return loss_of(m, 1) + (getattr(m, "_orig_mod", m).scale * data(2, 4)).sum()

    for _ in range(2):
        module.zero_grad()
        result = loss(model)
        module.fast.copy_(data(3, 4).requires_grad_())  # no leaf now
        (result + module.fast.sum()).backward()
        module.fast.detach_()
    expect(bool(module.scale._post_accumulate_grad_hooks), "what the graph has no gradient for has a hook")
    expect(_hooks(module) == 1, "and nothing else has")
    expect_equal(gradients(module), average(local_gradients(module, loss)), "gradients")
    module.fast.requires_grad_()
    module.zero_grad()

    def last(m: Any) -> Tensor:
        return loss(m) + (getattr(m, "_orig_mod", m).fast * data(4, 4)).sum()

    last(model).backward()
    expect_equal(gradients(module), average(local_gradients(module, last)), "it is a leaf again")


def test_parameters_that_no_graph_answers_for(pool: Pool) -> None:
    pool.run(_partly)


def _never_trained(rank: int, world: int) -> None:
    def watchers() -> int:
        gc.collect()
        return sum(type(thing) is Watchers for thing in gc.get_objects())

    before = watchers()
    model, _ = compiled(seeded(0, Mlp))
    loss_of(model, 0)
    expect(watchers() > before, "parameters are watched")
    del model
    torch._dynamo.reset()
    expect(watchers() <= before, "nothing is left of a model that is gone")


def _from_the_graph_itself(rank: int, world: int) -> None:
    module = seeded(0, Mlp)
    model = torch.compile(loss_of, backend=small_backend())
    for i in range(2):
        module.zero_grad()
        loss = model(module, i)
        expect("CompiledFunction" in type(loss.grad_fn).__name__, "the backward starts from the graph's node")
        loss.backward()
        del loss
        expect(_hooks(module) == 0, "that is the usual way too")
        expect_equal(gradients(module), average(local(module, i)), "gradients", tol=1e-6)


def test_models_that_return_their_loss(pool: Pool) -> None:
    pool.run(_from_the_graph_itself)


def test_a_model_without_a_backward_leaves_nothing_behind(pool: Pool) -> None:
    pool.run(_never_trained)


def test_compiled_autograd_of_other_models_traces_nothing_of_ours() -> None:
    model = nn.Linear(4, 4)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        model(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.weight.grad, torch.full((4, 4), 2.0))


def test_no_thread_of_a_backward_goes_on_before_hooks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where each has a thread and a backward may begin on several."""
    loss = torch.ones(2, requires_grad=True).sum()
    beginning = engine._Beginning([loss], restricted=False)
    other = threading.Thread(target=beginning)
    early: list[bool] = []

    def observer(_: bool) -> None:
        if not early:
            other.start()
            other.join(0.2)
            early.append(not other.is_alive())

    monkeypatch.setattr(engine, "_observers", [observer])
    loss.backward()
    other.join()
    beginning.over()
    assert early == [False]
