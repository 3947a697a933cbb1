"""First contact: rank 0's weights win before a graph first runs, or ranks say by name how they differ."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxddp
from fxddp import replica
from tests.live.lab import (
    Mlp,
    average,
    compiled,
    counted_collectives,
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


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def from_rank_0(module: nn.Module) -> Any:
    """An eager copy with rank 0's state."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, 0)
    return module


def state(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def step(
    module: nn.Module,
    model: Any,
    what: str,
    loss: Callable[[Any], Tensor] = lambda model: loss_of(model, 0),
    *,
    tol: float = 0.0,
) -> None:
    """One backward from weights that differ per rank: the average of what rank 0's weights give on each rank's data."""
    yardstick = from_rank_0(module)
    local = local_gradients(yardstick, loss)
    module.zero_grad()
    got = loss(model)
    expect(torch.allclose(got, loss(yardstick), atol=1e-6), f"{what}: the first forward did not use rank 0's weights")
    got.backward()
    expect_equal(gradients(module), average(local), what, tol)


@contextmanager
def compiles_watched(backend: fxddp.Backend, started: list[str]) -> Iterator[list[int]]:
    """Counts the collectives that start while the backend compiles, one number for each compilation."""
    during: list[int] = []
    original = fxddp.Backend.__call__

    def watched(self: fxddp.Backend, *arguments: Any, **options: Any) -> Any:
        before = len(started)
        result = original(self, *arguments, **options)
        during.append(len(started) - before)
        return result

    fxddp.Backend.__call__ = watched  # type: ignore[method-assign]
    try:
        yield during
    finally:
        fxddp.Backend.__call__ = original  # type: ignore[method-assign]


# ---- different weights, one after the other --------------------------------------------------------------------------


def models_of_one_class(rank: int, world: int) -> None:
    first = seeded(rank, Mlp)
    model, backend = compiled(first)
    with counted_collectives() as started, compiles_watched(backend, started) as during:
        if rank == 0:  # alone, and before anything was met
            with torch.no_grad():
                loss_of(model, 5)
        expect(not started, f"evaluation started {started}")
        step(first, model, "first model")
        second = seeded(10 + rank, Mlp)
        step(second, torch.compile(second, backend=backend), "second model, other weights")
        third = copy.deepcopy(second)
        with torch.no_grad():
            for parameter in third.parameters():
                parameter.mul_(1 + rank)
        step(third, torch.compile(third, backend=backend), "third model, a copy")
        step(first, model, "first model again")
    expect(len(during) == (2 if rank == 0 else 1), f"{len(during)} compilations")
    expect(not any(during), f"collectives while compiling: {during}")
    expect("broadcast" in started and "allreduce" in started, f"only {set(started)} were counted")


def test_models_of_one_class_on_one_backend(pool: Pool):
    pool.run(models_of_one_class)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def blocks_that_share_code(rank: int, world: int) -> None:
    module = seeded(rank, lambda: nn.Sequential(*[Block() for _ in range(4)]))
    backend = small_backend()
    for block in module:
        block.compile(backend=backend)
    step(module, module, "blocks")
    expect(len(backend.plans) == 2, f"{len(backend.plans)} graphs for four blocks: this tests nothing")
    step(module, module, "blocks again")
    expect(not backend.stats().last.uncovered, f"outside of the graphs: {backend.stats().last.uncovered}")


def test_a_block_that_another_ones_code_serves(pool: Pool):
    pool.run(blocks_that_share_code)


def two_models_in_one_function(rank: int, world: int) -> None:
    """Two models of one class; rank 0 has met the second one first."""
    raw = seeded(rank, lambda: nn.ModuleList([Mlp(), Mlp()]))
    first, second = raw
    backend = small_backend()
    if rank == 0:
        with torch.no_grad():
            loss_of(torch.compile(second, backend=backend), 0)
    x = data(0, 6, 8)
    expected: Any = from_rank_0(raw)
    (square(expected[0](x)) + square(expected[1](x)) * 2).backward()
    torch.compile(lambda: square(first(x)) + square(second(x)) * 2, backend=backend)().backward()
    expect_equal(dict(raw.named_parameters()), dict(expected.named_parameters()), "weights")
    expect_equal(gradients(raw), average(gradients(expected)), "gradients", tol=1e-6)


def test_two_models_of_one_class_in_one_function(pool: Pool):
    pool.run(two_models_in_one_function)


class WithState(nn.Module):
    """Parameters that train or not, buffers that change or not, some outside of any graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm, self.frozen = nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scale", torch.rand(24))
        self.register_buffer("count", torch.randint(100, (3,)))
        self.register_buffer("mask", torch.rand(24) > 0.5)
        self.register_buffer("unknown", torch.rand(2), persistent=False)
        self.phase = nn.Parameter(torch.randn(24, dtype=torch.complex64))
        self.narrow = nn.Parameter(torch.randn(24, dtype=torch.bfloat16))
        with torch.no_grad():
            self.norm.running_mean.normal_()  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inside(x)) * self.scale * self.mask
        return self.frozen(x) * self.phase.abs() * self.narrow.float()


def state_of_every_kind(rank: int, world: int) -> None:
    module = seeded(rank, WithState)
    model, _ = compiled(module)
    expected = from_rank_0(module)
    step(module, model, "first step")
    loss_of(expected, 0)
    for name in ("norm.running_mean", "norm.running_var"):  # those of each rank's own batch, from rank 0's
        expected.get_buffer(name).copy_(module.get_buffer(name))
    expect_equal(state(module), state(expected), "state after the first step")
    unknown = module.get_buffer("unknown").clone()
    dist.broadcast(unknown, 0)
    expect(torch.equal(unknown, module.get_buffer("unknown")), "a buffer that is not in the state dict was not sent")


def test_parameters_and_buffers_of_every_kind(pool: Pool):
    pool.run(state_of_every_kind)


def without_init_sync(rank: int, world: int) -> str:
    module = seeded(rank, Mlp)
    model, _ = compiled(module, init_sync=False)
    before = state(module)
    loss_of(model, 0).backward()
    expect_equal(state(module), before, "weights")
    expect_equal(gradients(module), average(local_gradients(module, partial(loss_of, i=0))), "gradients")
    odd, _ = compiled(Mlp(24 + rank), init_sync=False)
    return str(error_of(lambda: loss_of(odd, 0)))


def test_without_init_sync_weights_stay_and_shapes_are_compared(pool: Pool):
    for message in pool.run(without_init_sync):
        assert "rank 1 has first.weight (25, 8) torch.float32 where rank 0 has first.weight (24, 8)" in message


# ---- ranks that do not have the same model ---------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "shape": (
        lambda: Layers(a=nn.Linear(8, 4), b=nn.Linear(4, 4)),
        lambda: Layers(a=nn.Linear(8, 5), b=nn.Linear(5, 4)),
        "rank 1 has a.weight (5, 8) torch.float32 where rank 0 has a.weight (4, 8) torch.float32",
    ),
    "transposed": (  # as many elements
        lambda: Layers(a=nn.Linear(8, 8), b=nn.Linear(8, 4), c=nn.Linear(4, 8)),
        lambda: Layers(a=nn.Linear(8, 4), b=nn.Linear(4, 8), c=nn.Linear(8, 8)),
        "rank 1 has a.weight (4, 8) torch.float32 where rank 0 has a.weight (8, 8)",
    ),
    "more": (
        lambda: Layers(a=nn.Linear(8, 4)),
        lambda: Layers(a=nn.Linear(8, 4), b=nn.Linear(4, 4)),
        "rank 1 has 4 parameters and buffers, rank 0 has 2; only rank 1 has b.weight (4, 4)",
    ),
    "fewer": (
        lambda: Layers(a=nn.Linear(8, 4), b=nn.Linear(4, 4)),
        lambda: Layers(a=nn.Linear(8, 4)),
        "rank 1 has 2 parameters and buffers, rank 0 has 4; only rank 0 has b.weight (4, 4)",
    ),
    "name": (
        lambda: Layers(a=nn.Linear(8, 8)),
        lambda: Layers(z=nn.Linear(8, 8)),
        "rank 1 has z.weight (8, 8) torch.float32 where rank 0 has a.weight (8, 8)",
    ),
    "order": (
        lambda: Layers(a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
        lambda: Layers(b=nn.Linear(8, 8), a=nn.Linear(8, 8)),
        "rank 1 has b.weight (8, 8) torch.float32 where rank 0 has a.weight (8, 8)",
    ),
    "dtype": (
        lambda: Layers(a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
        lambda: Layers(a=nn.Linear(8, 8), b=nn.Linear(8, 8)).double(),
        "rank 1 has a.weight (8, 8) torch.float64 where rank 0 has a.weight (8, 8) torch.float32",
    ),
    "frozen": (
        lambda: Layers(a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
        lambda: Layers(a=nn.Linear(8, 8), b=frozen(nn.Linear(8, 8))),
        "rank 1 has b.weight (8, 8) torch.float32 (frozen) where rank 0 has b.weight (8, 8) torch.float32",
    ),
    "buffer": (
        lambda: Layers(a=nn.Linear(8, 8), b=nn.BatchNorm1d(8)),
        lambda: Layers(a=nn.Linear(8, 8), b=nn.BatchNorm1d(8, affine=True, track_running_stats=False)),
        "only rank 0 has b.running_mean (8,)",
    ),
}


def run_different(rank: int, world: int, odd: int) -> list[tuple[str, str]]:
    found = []
    for kind, (usual, different, _) in DIFFERENT.items():
        torch._dynamo.reset()
        module = (different if rank == odd else usual)()
        model, _ = compiled(module)
        before = state(module)
        x = data(0, 6, 8).to(next(module.parameters()).dtype)
        error = error_of(lambda x=x, model=model: model(x), f"models that differ in {kind}")  # type: ignore[misc]
        expect_equal(state(module), before, "weights after the refusal")
        found.append((type(error).__name__, str(error)))
    module = Mlp()
    step(module, compiled(module)[0], "the same model everywhere, after all this")
    return found


def check_different(results: list[list[tuple[str, str]]], odd: int) -> None:
    for rank, errors in enumerate(results):
        for (kind, (_, _, expected)), (error, message) in zip(DIFFERENT.items(), errors, strict=True):
            assert error == "RanksDisagree", f"{kind} on rank {rank}: {error}: {message}"
            assert expected.replace("rank 1", f"rank {odd}") in message, f"{kind} on rank {rank}: {message}"


def test_different_models_are_refused_on_every_rank(pool: Pool):
    check_different(pool.run(run_different, 1, timeout=120), 1)


def test_one_rank_of_three_has_another_model(pool3: Pool):
    check_different(pool3.run(run_different, 2, timeout=120), 2)


def run_in_turns(rank: int, world: int) -> str:
    """Two models that look alike, each on a backend of its own: ranks begin with another one."""
    modules = [seeded(i + 2 * rank, Mlp) for i in range(2)]
    models = [compiled(module)[0] for module in modules]
    before = [state(module) for module in modules]
    error = str(error_of(lambda: loss_of(models[rank], 0), "the other model first"))
    for module, values in zip(modules, before, strict=True):
        expect_equal(state(module), values, "weights after the refusal")
    if rank == 0:  # a rank may have backends that others have not
        fxddp.backend()
    for module, model in zip(modules, models, strict=True):
        step(module, model, "the same order")
    return error


def test_models_that_look_alike_are_not_taken_for_each_other(pool: Pool):
    for message in pool.run(run_in_turns):
        assert "rank 1 begins to train with the backend that it made as number" in message, message
        assert "Make the backends, and train with each for the first time, in the same order" in message


# ---- weights that were used before the first graph ran ---------------------------------------------------------------


class EagerStart(nn.Module):
    """A module that Dynamo is told to leave alone stands before the first graph."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.rest = nn.Linear(8, 8), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.begin(x))

    @torch._dynamo.disable
    def begin(self, x: Tensor) -> Tensor:
        return self.start(x)


def eager_start(rank: int, world: int, *, seed: str) -> tuple[str, str]:
    module = seeded(rank if seed == "differs" else 0, EagerStart)
    if seed == "rest differs":
        with torch.no_grad():
            for parameter in module.rest.parameters():
                parameter.add_(rank)
    model, backend = compiled(module)
    if seed == "differs":
        before = state(module.start)
        error = error_of(lambda: loss_of(model, 0))
        expect_equal(state(module.start), before, "the weights in question")
        return type(error).__name__, str(error)
    for i in range(2):
        step(module, model, f"{seed}, step {i}", partial(loss_of, i=i))
    expect(set(backend.stats().last.uncovered) == {"start.weight", "start.bias"}, f"{backend.stats().last.uncovered}")
    return "", ""


def test_different_weights_in_an_eager_start_are_refused(pool: Pool):
    for kind, message in pool.run(eager_start, seed="differs"):
        assert kind == "RanksDisagree"
        assert "start.weight on rank 1 differs from rank 0's" in message
        assert "already computed with it outside of the compiled graphs" in message
        assert "the same seed" in message


@pytest.mark.parametrize("seed", ["equal", "rest differs"])
def test_equal_weights_in_an_eager_start(pool: Pool, seed: str):
    pool.run(eager_start, seed=seed)


class FrozenAround(nn.Module):
    """What is frozen is used by eager code, before the first graph or after it; a loop makes Dynamo give up."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.frozen, self.rest = nn.Linear(8, 8).requires_grad_(False), Block()
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 if self.where == "loop" else 0):
            x = self.eager(x)
        if self.where == "before":
            x = self.eager(x)
        x = self.rest(x)
        return self.eager(x) if self.where == "after" else x

    @torch._dynamo.disable
    def eager(self, x: Tensor) -> Tensor:
        return self.frozen(x) * self.scale


def as_module(module: nn.Module) -> Any:
    return torch.compile(module, backend=small_backend())


def as_function(module: nn.Module) -> Any:
    return torch.compile(lambda x: module(x) + 0, backend=small_backend())


def in_blocks(module: nn.Module) -> Any:
    """Two modules of one class: the second runs code that was compiled for another."""
    backend = small_backend()
    for block in (module, other := copy.deepcopy(module)):
        block.compile(backend=backend)
    other(data(0, 6, 8)).sum().backward()
    return module


def frozen_around(rank: int, world: int, where: str, odd: str, compile_it: Callable[[nn.Module], Any]) -> str:
    torch._dynamo.reset()
    module = seeded(0, lambda: FrozenAround(where))
    model = compile_it(module)
    if odd:
        with torch.no_grad():
            module.state_dict()[odd].add_(rank)
    if odd and where != "after":
        error = error_of(lambda: loss_of(model, 0))
        return f"{type(error).__name__}: {error}"
    step(module, model, f"frozen {where}")
    expect_equal(state(module), state(from_rank_0(module)), "state")
    return ""


@pytest.mark.parametrize("compile_it", [as_module, as_function, in_blocks])
@pytest.mark.parametrize("odd", ["frozen.weight", "scale"])
@pytest.mark.parametrize("where", ["before", "loop"])
def test_different_frozen_tensors_in_an_eager_start_are_refused(pool: Pool, where: str, odd: str, compile_it: Any):
    for message in pool.run(frozen_around, where, odd, compile_it):
        assert message.startswith("RanksDisagree"), message
        assert f"{odd} on rank 1 differs from rank 0's" in message


@pytest.mark.parametrize("compile_it", [as_module, as_function, in_blocks])
@pytest.mark.parametrize("odd", ["", "frozen.weight", "scale"])
def test_different_frozen_tensors_after_the_first_graph_are_sent(pool: Pool, odd: str, compile_it: Any):
    pool.run(frozen_around, "after", odd, compile_it)


@pytest.mark.parametrize("compile_it", [as_module, as_function, in_blocks])
@pytest.mark.parametrize("where", ["before", "loop"])
def test_equal_frozen_tensors_in_an_eager_start(pool: Pool, where: str, compile_it: Any):
    pool.run(frozen_around, where, "", compile_it)


class Normalised(nn.Module):
    """A normalisation before the first graph that trains: in eager code, or alone in a graph without parameters."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.norm = nn.BatchNorm1d(8, affine=where != "alone")
        self.rest = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.eager(x) if self.where == "disabled" else self.norm(x)
        torch._dynamo.graph_break()
        return self.rest(x)

    @torch._dynamo.disable
    def eager(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Renormalised(nn.BatchNorm1d):
    """Computes with its running statistics in training as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.get_buffer("running_mean")


class Scaled(nn.BatchNorm1d):
    """Torch's own forward, and a buffer beside its statistics that a hook computes with."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("scale", torch.ones(features))
        self.register_forward_hook(lambda norm, _, y: y * norm.scale)


def running_statistics(rank: int, world: int) -> None:
    for where in ("disabled", "alone"):
        module = seeded(0, partial(Normalised, where))
        model, _ = compiled(module)
        for i in range(2):
            step(module, model, f"{where}, step {i}", partial(loss_of, i=i))
            if i == 0:
                everyone: list[Any] = [None] * world
                dist.all_gather_object(everyone, module.norm.running_mean)
                expect(torch.equal(everyone[rank], everyone[0]), f"{where}: running statistics are not rank 0's")


def a_momentum_encoder(rank: int, world: int) -> None:
    """The other network runs under no_grad, in training mode, and nothing ever meets its statistics."""
    module, other = (seeded(0, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Block())) for _ in range(2))
    backend = small_backend()
    model, target = (torch.compile(each, backend=backend) for each in (module, other))
    for i in range(3):
        with torch.no_grad():
            target(data(i, 6, 8))
        step(module, model, f"step {i}", partial(loss_of, i=i))


def statistics_computed_with(rank: int, world: int, how: str) -> str:
    module = seeded(0, lambda: Normalised("disabled"))
    if how == "in evaluation":
        module.norm.eval()
    else:
        module.norm = Scaled(8) if how == "beside" else Renormalised(8)
    module.norm.get_buffer("scale" if how == "beside" else "running_mean").fill_(rank)
    return str(error_of(lambda: loss_of(compiled(module)[0], 0).backward()))


def test_running_statistics_of_eager_normalisations(pool: Pool):
    pool.run(running_statistics)
    pool.run(a_momentum_encoder)


@pytest.mark.parametrize("how", ["in evaluation", "in training", "beside"])
def test_different_statistics_that_were_computed_with_are_refused(pool: Pool, how: str):
    name = "scale" if how == "beside" else "running_mean"
    for message in pool.run(statistics_computed_with, how):
        assert f"norm.{name} on rank 1 differs from rank 0's" in message


class Regional(nn.Module):
    """Compiled blocks between eager modules of the same shapes, which nobody told the backend about."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(12, 8), nn.Embedding(12, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.late = nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor, *, late: bool = False) -> Tensor:
        x = self.blocks(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        return self.head(self.norm(self.late(x) if late else x))


def regional(module: Regional, **options: Any) -> fxddp.Backend:
    backend = small_backend(**options)
    for block in module.blocks:
        block.compile(backend=backend)
    return backend


def language(model: Any, i: int, **options: Any) -> Tensor:
    tokens = data(i, 3, 7).mul(100).long().remainder(12)
    return nn.functional.cross_entropy(model(tokens[:, :-1], **options).flatten(0, 1), tokens[:, 1:].flatten())


def regional_step(rank: int, world: int, odd: str) -> tuple[str, str]:
    module: Any = seeded(0, Regional)
    with torch.no_grad():
        if odd:
            module.get_parameter(odd).add_(rank)
    regional(module)
    error = error_of(lambda: language(module, 0).backward())
    return type(error).__name__, str(error)


@pytest.mark.parametrize("odd", ["words.weight", "places.weight", "head.bias", "norm.weight"])
def test_different_weights_around_compiled_blocks_are_refused(pool: Pool, odd: str):
    for kind, message in pool.run(regional_step, odd):
        assert kind == "RanksDisagree", message
        assert f"{odd} on rank 1 differs from rank 0's" in message


def regional_in_another_order(rank: int, world: int) -> None:
    """Ranks find the eager parameters in another order: a collection of garbage has moved some of them on."""
    torch.manual_seed(0)
    module: Any = Regional()
    if rank == 1:
        gc.collect()
    torch.manual_seed(1)
    for name in ("norm", "places") if rank else ("places", "norm"):
        setattr(module, name, nn.Embedding(12, 8) if name == "places" else nn.LayerNorm(8))
    with torch.no_grad():
        module.places.weight.copy_(torch.linspace(-1, 1, 96).view(12, 8))
        if rank == 1:
            gc.collect()
            module.words = copy.deepcopy(module.words)
    backend = regional(module)
    for i in range(3):
        module.zero_grad()
        language(module, i).backward()
        expected = average(local_gradients(module, partial(language, i=i)))
        expect_equal(gradients(module), expected, f"step {i}", tol=1e-6)
    outside = {name for name, _ in module.named_parameters() if "blocks" not in name and "late" not in name}
    got = set(backend.stats().last.uncovered)
    expect(got == outside, f"reduced outside of the graphs: {sorted(got)}, expected {sorted(outside)}")


def test_eager_parameters_that_ranks_find_in_another_order(pool: Pool):
    pool.run(regional_in_another_order)


def regional_later(rank: int, world: int, how: str) -> None:
    """A module beside the compiled blocks trains only from the second step on."""
    module: Any = seeded(0, Regional)
    regional(module)
    if how == "unfrozen":
        module.words.requires_grad_(False)
    for i in range(3):
        if i == 1 and how == "unfrozen":
            module.words.requires_grad_(True)
        late = {"late": i > 0} if how == "used" else {}
        module.zero_grad()
        language(module, i, **late).backward()
        expected = average(local_gradients(module, lambda m: language(m, i, **late)))  # noqa: B023 (called at once)
        expect_equal(gradients(module), expected, f"step {i}", tol=1e-6)


@pytest.mark.parametrize("how", ["unfrozen", "used"])
def test_eager_parameters_that_train_later(pool: Pool, how: str):
    pool.run(regional_later, how)


def regional_frozen_by_gc(rank: int, world: int) -> None:
    module: Any = seeded(0, Regional)
    gc.collect()
    gc.freeze()
    regional(module)
    language(module, 0).backward()
    expect_equal(gradients(module), average(local_gradients(module, lambda m: language(m, 0))), "gradients", tol=1e-6)
    expect(all(other is not module for other in gc.get_objects()), "the model is not frozen any more")
    gc.unfreeze()


def test_eager_parameters_that_the_garbage_collector_does_not_list(pool: Pool):
    pool.run(regional_frozen_by_gc)


class Recurrent(nn.Module):
    """Dynamo compiles nothing of a model with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def nothing_compiled(rank: int, world: int, *, differs: bool) -> tuple[str, str]:
    module = seeded(rank if differs else 0, Recurrent)
    model, backend = compiled(module)

    def loss(m: Any) -> Tensor:
        return m(data(0, 3, 5, 8)).square().mean()

    if differs:
        error = error_of(lambda: loss(model).backward())
        return type(error).__name__, str(error)
    for i in range(2):
        step(module, model, f"step {i}", loss)
    expect(not backend.plans, "this tests nothing: something was compiled")
    expect(len(backend.stats().last.uncovered) == 6, f"{backend.stats().last.uncovered}")
    return "", ""


def test_a_model_of_which_nothing_is_compiled(pool: Pool):
    pool.run(nothing_compiled, differs=False)
    for kind, message in pool.run(nothing_compiled, differs=True):
        assert kind == "RanksDisagree", message
        assert "on rank 1 differs from rank 0's" in message


def evaluated_on_rank_0_only(rank: int, world: int) -> None:
    """Rank 0 alone keeps and evaluates an averaged copy, a usual thing, while the model goes on."""
    module = seeded(rank, Mlp)
    model, backend = compiled(module)
    step(module, model, "first step")
    if rank == 0:
        averaged = copy.deepcopy(module)
        extra = Layers(a=nn.Linear(8, 3))
        with torch.no_grad():
            loss_of(torch.compile(averaged, backend=backend), 0)
            loss_of(torch.compile(extra, backend=backend), 0)
    for batch in (3, 5, 9):  # compiled anew
        step(module, model, f"batch of {batch}", lambda m: m(data(0, batch, 8)).square().mean())  # noqa: B023
    second = seeded(rank, Mlp)
    step(second, torch.compile(second, backend=backend), "another model")
    expect(launches(backend)[0] > 1, "one bucket only")


def test_a_model_evaluated_on_rank_0_only(pool: Pool):
    pool.run(evaluated_on_rank_0_only)


def stand_alone_loss(rank: int, world: int, *, differs: bool) -> tuple[str, str]:
    """A trained temperature that belongs to the loss, not to the model."""
    module = seeded(0, Mlp)
    model, backend = compiled(module)
    temperature = nn.Parameter(torch.tensor([2.0 + rank * differs]))
    if differs:
        error = error_of(lambda: (loss_of(model, 0) * temperature).sum().backward())
        return type(error).__name__, str(error)
    for i in range(2):
        module.zero_grad()
        temperature.grad = None
        (loss_of(model, i) * temperature).sum().backward()
        expected = loss_of(module, i).detach() / world
        dist.all_reduce(expected)
        expect(torch.allclose(temperature.grad, expected), f"step {i}: {temperature.grad}, expected {expected}")  # type: ignore[arg-type]
    expect(backend.stats().last.uncovered == ("<parameter of shape (1,)>",), f"{backend.stats().last.uncovered}")
    return "", ""


def stand_alone_weights(rank: int, world: int) -> None:
    """Parameters without a module have no name; ranks find them in another order, and tell them apart by value."""
    model, backend = compiled(seeded(0, Mlp))
    weights = []
    for k in range(4):
        weights.append(nn.Parameter(torch.full((2,), float(k))))
        if rank == 1 and k == 1:
            gc.collect()  # lists the first two after the others from now on
    for i in range(2):
        for weight in weights:
            weight.grad = None
        (loss_of(model, i) + sum((k + 1 + rank) * weight.sum() for k, weight in enumerate(weights))).backward()
        got = [0.0 if weight.grad is None else weight.grad[0].item() for weight in weights]
        expect(got == [1.5, 2.5, 3.5, 4.5], f"step {i}: {got}")
    expect(len(backend.stats().last.uncovered) == 4, f"{backend.stats().last.uncovered}")


def test_parameters_without_a_name(pool: Pool):
    pool.run(stand_alone_weights)


def test_a_parameter_of_the_loss(pool: Pool):
    pool.run(stand_alone_loss, differs=False)
    for kind, message in pool.run(stand_alone_loss, differs=True):
        assert kind == "RanksDisagree", message
        assert "<parameter of shape (1,)> on rank 1 differs from rank 0's" in message


class FrozenStart(nn.Module):
    """A frozen part in a graph of its own runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.rest = frozen(nn.Linear(8, 8)), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x).tanh()
        torch._dynamo.graph_break()
        return self.rest(x)


def frozen_start(rank: int, world: int, differs: bool) -> tuple[str, str]:
    module = seeded(0, FrozenStart)
    if differs:
        with torch.no_grad():
            module.frozen.weight.add_(rank)
    else:
        with torch.no_grad():
            module.rest.first.weight.add_(rank)
    model, backend = compiled(module)
    if rank == 0:
        with torch.no_grad():
            loss_of(model, 5)
    if differs:
        error = error_of(lambda: loss_of(model, 0))
        return type(error).__name__, str(error)
    for i in range(2):
        step(module, model, f"step {i}", partial(loss_of, i=i))
    expect(len(backend.sites) >= 2, f"{len(backend.sites)} graphs: this tests nothing")
    return "", ""


def frozen_apart(rank: int, world: int, differs: str) -> str:
    """A network that only runs under `no_grad` is compared at the end of a step: nothing else ever meets it."""
    teacher: Any
    teacher, module = frozen(seeded(0, Mlp)) if differs != "trainable" else seeded(0, Mlp), seeded(1, Mlp)
    if differs:
        with torch.no_grad():
            teacher.last.weight.add_(rank)
    model, backend = compiled(module)
    teacher_model = torch.compile(teacher, backend=backend)
    alone = torch.compile(frozen(seeded(2 + rank, lambda: Mlp(9))), backend=backend)

    def loss(model: Any, i: int) -> Tensor:
        with torch.no_grad():
            target = teacher_model(data(i, 6, 8))
            if rank == 0:
                alone(data(i, 6, 8))  # what one rank alone evaluates is nobody else's business
        return (model(data(i, 6, 8)) - target).square().mean()

    if differs:
        return str(error_of(lambda: loss(model, 0).backward()))
    for i in range(3):
        step(module, model, f"step {i}", partial(loss, i=i))
    return ""


@pytest.mark.parametrize("differs", ["", "frozen", "trainable"])
def test_a_network_that_only_runs_without_gradients(pool: Pool, differs: str):
    for message in pool.run(frozen_apart, differs):
        if differs:
            assert "last.weight on rank 1 differs from rank 0's" in message
            assert "Start from equal weights on all ranks" in message


SETTINGS: dict[str, Any] = {
    "bucket_mb": (0.001, 0.002),
    "find_unused_parameters": (False, True),
    "static_graph": (True, False),
    "forward_sync_buffers": (True, False),
}


def other_settings(rank: int, world: int, name: str) -> str:
    model, _ = compiled(seeded(0, Mlp), **{name: SETTINGS[name][rank]})
    return str(error_of(lambda: loss_of(model, 0)))


def other_versions(rank: int, world: int) -> list[str]:
    messages = []
    versions = ((torch, "__version__", f"2.13.{rank}+cpu"), (replica, "source_digest", lambda: f"{rank}0c4f1e"))
    for owner, name, version in versions:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, version)
            model, _ = compiled(seeded(0, Mlp))
            messages.append(str(error_of(lambda: loss_of(model, 0))))  # noqa: B023 (called at once)
    module = seeded(0, Mlp)
    step(module, compiled(module)[0], "the same versions")
    return messages


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_are_refused_on_every_rank(pool: Pool, name: str):
    for message in pool.run(other_settings, name):
        assert f"{name} differs between ranks" in message
        assert "on rank 1" in message


def test_other_versions_are_refused_on_every_rank(pool: Pool):
    for of_torch, of_fxddp in pool.run(other_versions):
        assert "the version of torch differs between ranks: '2.13.1' on rank 1, '2.13.0' on rank 0" in of_torch
        assert "the version of fxddp differs between ranks: '10c4f1e' on rank 1, '00c4f1e' on rank 0" in of_fxddp


def test_a_frozen_part_that_runs_before_anything_trains(pool: Pool):
    pool.run(frozen_start, False)
    for kind, message in pool.run(frozen_start, True):
        assert kind == "RanksDisagree", message
        assert "frozen.weight on rank 1 differs from rank 0's" in message


# ---- modules that torch.compile leaves alone without a word ----------------------------------------------------------


def left_alone(rank: int, world: int, how: str) -> None:
    def inner() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))

    backend = small_backend()
    module = seeded(0, inner)
    model: Any = module
    if how == "class of torch":  # module.compile() of such a class compiles nothing
        module.compile(backend=backend)
    else:  # Dynamo has had enough of this class
        for width in range(5, 15):
            model = torch.compile(module := seeded(0, lambda: Mlp(width)), backend=backend)  # noqa: B023
            loss_of(model, 0).backward()
            module.zero_grad()
        expect(len(backend.plans) == 8, f"{len(backend.plans)} graphs: this tests nothing")
    compiled_before = len(backend.plans)
    for i in range(2):
        step(module, model, f"step {i}", partial(loss_of, i=i))
        expect(
            backend.stats().last.uncovered_bytes == sum(p.nbytes for p in module.parameters()),
            f"{backend.stats().last}",
        )
    module.zero_grad()
    with fxddp.no_sync(model) if how == "class of torch" else backend.no_sync():
        loss_of(model, 5).backward()
    expect_equal(gradients(module), local_gradients(module, partial(loss_of, i=5)), "no_sync")
    expect(len(backend.plans) == compiled_before, "something was compiled: this tests nothing")


@pytest.mark.parametrize("how", ["class of torch", "too many compiled"])
def test_a_module_of_which_nothing_is_compiled_is_known(pool: Pool, how: str):
    pool.run(left_alone, how)
