"""Exceptions in a step, interrupts, ranks that die: nothing is lost, nothing hangs, the next step is right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxddp
from fxddp.backward import Backward
from fxddp.compiler import Compilation
from fxddp.ending import Ending
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
    launches,
    local,
    local_gradients,
    loss_of,
    seeded,
    small_backend,
)
from tests.live.pool import Pool


class Accident(Exception):
    """What these tests raise."""


Kind = type[BaseException]
KINDS = pytest.mark.parametrize("kind", [Accident, KeyboardInterrupt])


class Fuse:
    """Raises when it is passed for the `after`th time, once."""

    def __init__(self, kind: Kind = Accident) -> None:
        self.kind = kind
        self.after = -1

    def light(self, after: int = 0) -> None:
        self.after = after

    def burn(self, *_: object) -> None:
        self.after -= 1
        if self.after == -1:
            raise self.kind("an accident")

    def inner(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph to code that passes it first."""

        def run(*arguments: Any) -> Any:
            self.burn()
            return gm(*arguments)

        return run


def check_accident(
    module: nn.Module,
    backend: fxddp.Backend,
    what: str,
    accident: Callable[[], object],
    *,
    step: Callable[[int], Tensor],
    expected: Callable[..., Gradients],
    kind: Kind = Accident,
    pending: bool = True,
) -> None:
    """After an accident in a step `.grad` is what it was before, and the next step is right."""
    module.zero_grad()
    if pending:
        with backend.no_sync():
            step(1).backward()
    before = gradients(module)
    error = error_of(accident, what)
    expect(isinstance(error, kind), f"{what}: {type(error).__name__}: {error}")
    expect_equal(gradients(module), before, f"{what}: .grad after it")
    expect(not backend._running, f"{what}: the backward that failed is still running")
    total = backend.stats().total
    step(3).backward()
    expect_equal(gradients(module), average(expected(*([1, 3] if pending else [3]))), f"{what}: the next step")
    expect(backend.stats().total == total + 1, f"{what}: the record of the next step")


# ---- in a compiled piece ---------------------------------------------------------------------------------------------


def in_a_piece(rank: int, world: int, kind: Kind, split: bool) -> None:
    fuse = Fuse(kind)

    module = seeded(0, Mlp)
    model, backend = compiled(module, inner=fuse.inner, split=split)
    loss_of(model, 0).backward()
    pieces = backend.stats().last.pieces
    expect(pieces > 2 or not split, f"{pieces} pieces only")

    def accident(number: int) -> None:
        loss = loss_of(model, 2)
        fuse.light(number)
        loss.backward()

    for pending in (True, False):
        count = pieces if split or not pending else buckets(backend)
        for number in range(count):
            check_accident(
                module,
                backend,
                f"piece {number} of {count}, {pending=}",
                partial(accident, number),
                step=partial(loss_of, model),
                expected=partial(local, module),
                kind=kind,
                pending=pending,
            )


@KINDS
@pytest.mark.parametrize("split", [True, False])
def test_an_exception_in_a_compiled_piece(pool: Pool, kind: Kind, split: bool):
    pool.run(in_a_piece, kind, split)


def in_the_forward(rank: int, world: int) -> None:
    fuse = Fuse()

    module = seeded(0, Mlp)
    model, backend = compiled(module, inner=fuse.inner)

    def accident(scope: Any) -> None:
        fuse.light()
        with scope:
            loss_of(model, 2)

    def first() -> None:
        fuse.light()
        loss_of(model, 0)

    expect(isinstance(error_of(first, "the first forward"), Accident), "the first forward")
    for scope in (torch.enable_grad(), torch.no_grad(), backend.no_sync(), backend.no_sync()):
        check_accident(
            module,
            backend,
            f"a forward under {scope}",
            partial(accident, scope),
            step=partial(loss_of, model),
            expected=partial(local, module),
        )


def test_an_exception_in_the_forward(pool: Pool):
    pool.run(in_the_forward)


def under_no_sync(rank: int, world: int) -> None:
    """A backward that accumulates and fails leaves each gradient as it was or complete, as eager code does."""
    fuse = Fuse()

    module = seeded(0, Mlp)
    model, backend = compiled(module, inner=fuse.inner)
    loss_of(model, 0).backward()
    for number in range(backend.stats().last.pieces):
        module.zero_grad()
        with backend.no_sync():
            loss_of(model, 1).backward()
            before, both = local(module, 1), local(module, 1, 2)
            loss = loss_of(model, 2)
        fuse.light(number)
        expect(isinstance(error_of(loss.backward), Accident), f"piece {number}")
        after = gradients(module)
        whole = {n for n in after if torch.equal(after[n], both[n])}  # type: ignore[arg-type]
        untouched = {n for n in after if torch.equal(after[n], before[n])}  # type: ignore[arg-type]
        expect(whole | untouched == set(after), f"piece {number}: {set(after) - whole - untouched} is neither")
        expect(bool(untouched) and bool(whole) == (number > 0), f"piece {number}: {whole} were complete")
        expect(not backend._running, "the backward that failed is still running")
        loss_of(model, 3).backward()
        expected = local(module, 1, 3)
        expected |= {name: gradient for name, gradient in local(module, 1, 2, 3).items() if name in whole}
        expect_equal(gradients(module), average(expected), f"piece {number}: the next step", tol=1e-6)


def test_an_exception_under_no_sync(pool: Pool):
    pool.run(under_no_sync)


# ---- around the pieces -----------------------------------------------------------------------------------------------


class Interrupted(nn.Module):
    """Two compiled parts; a hook between them may raise once the second part's buckets are under way."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.first, self.gap, self.second = nn.Linear(8, 8), nn.Linear(8, 8), Mlp()
        self.fuse = fuse

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))

    @torch._dynamo.disable
    def between(self, x: Tensor) -> Tensor:
        x = x + self.gap(x)
        if x.requires_grad:
            x.register_hook(self.fuse.burn)
        return x


def in_a_hook(rank: int, world: int, kind: Kind, split: bool) -> None:
    fuse = Fuse(kind)
    module = seeded(0, lambda: Interrupted(fuse))
    model, backend = compiled(module, split=split)
    loss_of(model, 0).backward()
    expect(len(backend.plans) == 2, f"{len(backend.plans)} graphs")
    normal = buckets(backend)

    def accident() -> None:
        loss = loss_of(model, 2)
        fuse.light()
        with counted_collectives() as started:
            try:
                loss.backward()
            finally:
                expect(1 < len(started) < normal or not split, f"{len(started)} launches before the hook")

    for pending in (True, False):
        check_accident(
            module,
            backend,
            f"a hook after launches, {pending=}",
            accident,
            step=partial(loss_of, model),
            expected=partial(local, module),
            kind=kind,
            pending=pending,
        )


@KINDS
@pytest.mark.parametrize("split", [True, False])
def test_an_exception_in_a_hook_after_launches(pool: Pool, kind: Kind, split: bool):
    pool.run(in_a_hook, kind, split)


def while_waiting(rank: int, world: int, kind: Kind) -> None:
    """An interrupt between launch and wait: nothing is written before all buckets have arrived."""
    module = seeded(0, Mlp)
    model, backend = compiled(module)
    loss_of(model, 0).backward()
    fuse = Fuse(kind)
    original = Backward.wait

    def wait(self: Backward, launched: Any) -> None:
        fuse.burn()
        original(self, launched)

    Backward.wait = wait  # type: ignore[method-assign]
    try:
        for pending in (True, False):
            for number in range(buckets(backend)):
                module.zero_grad()
                if pending:
                    with backend.no_sync():
                        loss_of(model, 1).backward()
                before = gradients(module)
                loss = loss_of(model, 2)
                fuse.light(number)
                what = f"wait {number}, {pending=}"
                expect(type(error_of(loss.backward, what)) is kind, what)
                expect_equal(gradients(module), before, f"{what}: nothing was written")
                expect(not backend._running, f"{what}: the backward that failed is still running")
                module.zero_grad()
                loss_of(model, 3).backward()
                expect_equal(gradients(module), average(local(module, 3)), f"{what}: the next step")
    finally:
        Backward.wait = original  # type: ignore[method-assign]


@KINDS
def test_an_interrupt_while_waiting(pool: Pool, kind: Kind):
    pool.run(while_waiting, kind)


class Tied(nn.Module):
    """A weight in two graphs and in the eager code between them."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.shared, self.fuse = nn.Linear(8, 8), fuse

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.between(self.shared(self.between(self.shared(x)).relu()).relu())).relu()

    @torch._dynamo.disable
    def between(self, x: Tensor) -> Tensor:
        x = x * self.shared.weight.sum()
        if x.requires_grad:
            x.register_hook(self.fuse.burn)
        return x


def in_a_tied_weight(rank: int, world: int) -> None:
    """What a weight held before is back even if several graphs and eager code had taken and added in turns."""
    fuse = Fuse()
    module = seeded(0, lambda: Tied(fuse))
    model, backend = compiled(module)
    loss_of(model, 0).backward()
    expect(len(backend.plans) == 3, f"{len(backend.plans)} graphs")
    for number in range(2):
        module.zero_grad()
        with backend.no_sync():
            loss_of(model, 1).backward()
        before = {name: p.grad for name, p in module.named_parameters()}
        values = gradients(module)
        loss = loss_of(model, 2)
        fuse.light(number)
        expect(isinstance(error_of(loss.backward), Accident), f"hook {number}")
        for name, p in module.named_parameters():
            expect(p.grad is before[name], f"hook {number}: .grad of {name} is another tensor")
        # Eager code has added its part, as it does without fxddp; what was there before is not lost.
        bias = {"shared.bias": gradients(module)["shared.bias"]}
        expect_equal(bias, {"shared.bias": values["shared.bias"]}, f"hook {number}")
        module.zero_grad()
        loss_of(model, 3).backward()
        expect_equal(gradients(module), average(local(module, 3)), f"hook {number}: the next step", tol=1e-5)


def test_an_exception_among_graphs_that_share_a_weight(pool: Pool):
    pool.run(in_a_tied_weight)


# ---- a rank that dies ------------------------------------------------------------------------------------------------


def die(rank: int, world: int, moment: str) -> None:
    module = seeded(0, lambda: Interrupted(Fuse()))
    model, _ = compiled(module)
    doomed = rank == 1

    def end(*_: object) -> None:
        os._exit(3)

    if moment == "first step":
        if doomed:
            end()
        loss_of(model, 0).backward()
        return
    loss_of(model, 0).backward()
    if doomed and moment == "between launches":
        module.fuse.burn = end
    if doomed and moment == "before the backward":
        loss_of(model, 1)
        end()
    if doomed and moment == "at the end":
        Ending.run = end  # type: ignore[method-assign, assignment]
    loss_of(model, 1).backward()
    raise AssertionError("the step went through without the other rank")


@pytest.mark.parametrize("moment", ["first step", "between launches", "before the backward", "at the end"])
def test_a_rank_that_dies(moment: str):
    with Pool(2, group_timeout=20) as pool:
        start = time.monotonic()
        left, dead = pool.run(die, moment, expect_error=True, timeout=90)
    assert dead.type == "Died"
    assert left.type in ("RuntimeError", "RanksDisagree", "DistBackendError"), left
    assert time.monotonic() - start < 60


# ---- a backward that is compiled twice -------------------------------------------------------------------------------


def compiled_twice(rank: int, world: int, inner: str, dynamic: bool) -> None:
    """AOTAutograd may come with the same backward graph again; the passes leave it as it was."""
    original = Compilation._backward
    graphs: list[str] = []

    def twice(self: Compilation, inner: Any, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        before = gm.code
        original(self, inner, gm, inputs)
        expect(gm.code == before, "the passes changed AOTAutograd's own graph")
        graphs.append(before)
        return original(self, inner, gm, inputs)

    Compilation._backward = twice  # type: ignore[method-assign]
    try:
        for split in (True, False):
            module = seeded(0, Mlp)
            backend = small_backend(inner=inner, split=split)
            model = torch.compile(module, backend=backend, dynamic=dynamic)
            for i, size in enumerate((6, 5)):
                module.zero_grad()
                model(data(i, size, 8)).square().mean().backward()
                expected = average(local_gradients(module, lambda m: m(data(i, size, 8)).square().mean()))  # noqa: B023
                expect_equal(
                    gradients(module), expected, f"{split=}, step {i}", tol=1e-5 if inner == "inductor" else 0.0
                )
                expect(
                    launches(backend)[-1] == sum(bool(b.nbytes) for b in backend.plans[-1].buckets),
                    f"{launches(backend)}",
                )
    finally:
        Compilation._backward = original  # type: ignore[method-assign]
    fewest = 2 if dynamic or inner == "inductor" else 4  # ranks share inductor's cache: one may be served by the other
    expect(fewest <= len(graphs) <= (2 if dynamic else 4), f"{len(graphs)} backward graphs")


@pytest.mark.parametrize(("inner", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)])
def test_a_backward_compiled_twice(pool: Pool, inner: str, dynamic: bool):
    pool.run(compiled_twice, inner, dynamic, timeout=180)


def compiled_again(rank: int, world: int, dynamic: bool) -> str:
    """The inner compiler fails the first time it is given a piece of the backward."""
    fuse = Fuse()

    def inner(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        fuse.burn()
        return gm

    module = seeded(0, Mlp)
    backend = small_backend(inner=inner)
    model = torch.compile(module, backend=backend, dynamic=dynamic)
    fuse.light(2)  # the forward, a piece, this one
    message = ""
    try:
        loss_of(model, 0)
    except Exception as error:  # noqa: BLE001 (compilers wrap what they meet)
        message = str(error)
    for i in range(2):
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), f"step {i}")
        expect(
            launches(backend)[-1] == buckets(backend), f"step {i}: {launches(backend)} for {buckets(backend)} buckets"
        )
    return message


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_whose_compilation_failed(pool: Pool, dynamic: bool):
    for message in pool.run(compiled_again, dynamic):
        assert "an accident" in message or (dynamic and not message)


# ---- an accident on one rank only ------------------------------------------------------------------------------------


class Even(nn.Module):
    """Layers of one shape, each in a bucket of its own: any of their all-reduces would fit any other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Speechless(Accident):
    """One without a message."""

    def __init__(self, _: str) -> None:
        super().__init__()


def on_one_rank(rank: int, world: int) -> None:
    """Rank 1 gives up a step half-way and goes on with the next, as loops do that skip a bad batch."""
    fuse = Fuse(Speechless)

    model, backend = compiled(seeded(0, Even), bucket_mb=1e-6, first_bucket_mb=1e-6, inner=fuse.inner)
    loss_of(model, 0).backward()
    expect(buckets(backend) == 5, f"{buckets(backend)} buckets")
    loss = loss_of(model, 1)
    if rank == 1:
        fuse.light(3)
        expect(isinstance(error_of(loss.backward), Accident), "no accident")
    else:
        loss.backward()
    for i in range(2, 5):
        loss_of(model, i).backward()
    raise AssertionError("gradients of different steps were averaged in silence")


def test_an_accident_on_one_rank_only():
    with Pool(2, group_timeout=60) as pool:
        errors = pool.run(on_one_rank, expect_error=True)
    assert [error and error.type for error in errors] == ["RanksDisagree", "RanksDisagree"], list(map(str, errors))
    assert errors[0] is not None
    assert "rank 1 gave up there: Speechless)" in errors[0].message
