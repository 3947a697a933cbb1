"""Ranks, steps and parameters that leave the usual path: each is averaged all the same, or refused on every rank."""

import copy
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxddp
from tests.live.lab import compiled, data, error_of, expect, register_name, seeded, small_backend
from tests.live.pool import Pool


def _expect_average(module: nn.Module, twin: nn.Module, loss: Any, what: str) -> None:
    """Trains `twin` by hand and compares: `loss(model)` runs forward; gradients of `module` are there already."""
    twin.zero_grad()
    loss(twin).backward()
    for (name, got), want in zip(module.named_parameters(), twin.parameters(), strict=True):
        if want.grad is None:
            expect(got.grad is None, f"{what}: {name} has no gradient")
            continue
        total = want.grad / dist.get_world_size()
        dist.all_reduce(total)
        expect(got.grad is not None and torch.allclose(got.grad, total, atol=1e-5), f"{what}: {name} is averaged")


def _other_strides(rank: int, world: int) -> str:
    module = nn.Conv2d(3, 4, 3)
    if rank == 1:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model, _ = compiled(module)
    return str(error_of(lambda: model(data(0, 2, 3, 8, 8))))


def test_weights_in_another_memory_order_are_refused(pool: Pool) -> None:
    for message in pool.run(_other_strides):
        assert "rank 1 has weight" in message
        assert "strides" in message


def _one_rank_recompiles(rank: int, world: int) -> None:
    module = seeded(0, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = torch.compile(module, backend=small_backend(), dynamic=False)
    for size in ((8, 8), (8, 7), (8, 8)):
        module.zero_grad()
        model(data(size[rank], size[rank], 4)).square().sum().backward()
        both = [torch.empty_like(module[0].weight) for _ in range(world)]
        assert module[0].weight.grad is not None
        dist.all_gather(both, module[0].weight.grad)
        expect(torch.equal(*both), f"gradients agree with {size} samples")


def test_buffers_are_sent_by_a_rank_that_recompiles_too(pool: Pool) -> None:
    pool.run(_one_rank_recompiles)


def _hooked_in_a_graph_and_a_gap(rank: int, world: int) -> None:
    weight = nn.Parameter(seeded(0, lambda: torch.randn(4, 4)))
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model = torch.compile(lambda h: (h @ weight).relu(), backend=small_backend())
    for i in range(2):
        weight.grad = None
        x = data(i, 3, 4)
        model(x @ weight).square().sum().backward()
        (own,) = torch.autograd.grad(((x @ weight) @ weight).relu().square().sum(), weight)
        dist.all_reduce(own)
        expect(torch.allclose(seen[-1], own / world, atol=1e-5), f"step {i}: the hook sees the average")
        expect(weight.grad is not None and torch.equal(weight.grad, seen[-1]), f"step {i}: it stays")


def test_a_hook_sees_the_average_of_a_graph_and_an_eager_gap(pool: Pool) -> None:
    pool.run(_hooked_in_a_graph_and_a_gap)


class Blocks(nn.Module):
    """Blocks of torch's own classes between an eager embedding and an eager head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList([layer, nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.GRU(8, 8, batch_first=True)])
        self.head = nn.Linear(8, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


def _builtin_blocks(rank: int, world: int) -> None:
    module = seeded(0, Blocks)
    twin = copy.deepcopy(module)
    backend = small_backend()
    for block in module.blocks:
        block.compile(backend=backend)
    for i in range(2):
        tokens = torch.randint(0, 30, (2, 5), generator=torch.Generator().manual_seed(10 * i + rank))

        def loss(model: nn.Module, tokens: Tensor = tokens) -> Tensor:
            return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

        module.zero_grad()
        loss(module).backward()
        _expect_average(module, twin, loss, f"step {i}")


def test_blocks_of_torch_that_nothing_is_compiled_of(pool: Pool) -> None:
    pool.run(_builtin_blocks)


def sequence() -> nn.Module:
    """A class of torch's own, of which Dynamo compiles nothing when it is compiled in place."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


class Recurrent(nn.Module):
    """Dynamo compiles nothing of a model with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def in_place(module: nn.Module, options: dict[str, Any]) -> Any:
    module.compile(**options)
    return module


def wrapped(module: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(module, **options)


def as_a_decorator(module: nn.Module, options: dict[str, Any]) -> Any:
    @torch.compile(**options)
    def run(x: Tensor) -> Tensor:
        return module(x)

    return run


def as_a_method(module: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(module.forward, **options)


def as_the_default(module: nn.Module, options: dict[str, Any]) -> Any:
    registry: Any = torch._dynamo.backends.registry
    registry.set_default_backend(options["backend"])
    try:
        return torch.compile(module, **{key: value for key, value in options.items() if key != "backend"})
    finally:
        registry.set_default_backend(None)


def disabled(module: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(module, disable=True, **options)


def within_another(module: nn.Module, options: dict[str, Any]) -> Any:
    def build(x: Tensor) -> Any:
        x = x + 1
        torch._dynamo.graph_break()
        return torch.compile(module, **options), x

    return torch.compile(build, backend="eager")(torch.ones(1))[0]


def past_the_limit(module: nn.Module, options: dict[str, Any]) -> Any:
    """Dynamo has compiled this code as often as it may, for models of other shapes."""
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data = parameter.data.double()
    with torch._dynamo.config.patch(recompile_limit=1):
        torch.compile(other, **options)(data(0, 3, 4).double()).sum().backward()
    return torch.compile(module, **options)


def _noticed(
    rank: int, world: int, by: str, way: Callable[[nn.Module, dict[str, Any]], Any], make: Callable[[], nn.Module]
) -> None:
    register_name()
    module = seeded(0, make)
    twin = copy.deepcopy(module)
    options: dict[str, Any] = {"backend": small_backend()} if by == "object" else {"backend": "fxddp"}
    if by == "options":
        options["options"] = {"bucket_mb": 0.001, "first_bucket_mb": 0.001, "inner": "aot_eager"}
    limit: dict[str, Any] = {"recompile_limit": 1} if way is past_the_limit else {}
    torch._dynamo.reset()
    model = way(module, options)
    for i in range(2):
        x = data(i, 5, 4)
        module.zero_grad()
        with torch._dynamo.config.patch(**limit):
            model(x).square().sum().backward()
        _expect_average(module, twin, lambda m, x=x: m(x).square().sum(), f"step {i}")


@pytest.mark.parametrize("by", ["object", "name", "options"])
@pytest.mark.parametrize("make", [sequence, Recurrent])
@pytest.mark.parametrize(
    "way",
    [in_place, wrapped, as_a_decorator, as_a_method, as_the_default, disabled, within_another, past_the_limit],
)
def test_every_way_to_compile_is_noticed(pool: Pool, by: str, way: Any, make: Any) -> None:
    if way is as_the_default and not hasattr(torch._dynamo.backends.registry, "set_default_backend"):
        pytest.skip("this torch has no default backend to set")
    pool.run(_noticed, by, way, make)


def _after_resets(rank: int, world: int, by: str, resets: int) -> None:
    """The function does not show its model, so that only the frame that Dynamo starts on does."""
    register_name()
    current: dict[str, dict[str, nn.Module]] = {"now": {}}

    @torch.compile(backend="fxddp" if by == "name" else small_backend())
    def run(x: Tensor) -> Tensor:
        return current["now"]["model"](x)

    for i in range(3):
        module = current["now"]["model"] = seeded(i, Recurrent)
        twin = copy.deepcopy(module)
        x = data(i, 3, 4)
        run(x).square().sum().backward()
        _expect_average(module, twin, lambda m, x=x: m(x).square().sum(), f"model {i}")
        for _ in range(resets):
            torch._dynamo.reset()


@pytest.mark.parametrize("by", ["object", "name"])
@pytest.mark.parametrize("resets", [1, 2])
def test_models_after_resets_are_noticed(pool: Pool, by: str, resets: int) -> None:
    pool.run(_after_resets, by, resets)


def _compiled_loss(rank: int, world: int) -> None:
    module = seeded(0, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    twin = copy.deepcopy(module)
    loss = torch.compile(lambda y: y.square().mean(), backend=small_backend())
    for i in range(2):
        x = data(i, 6, 4)
        module.zero_grad()
        loss(module(x)).backward()
        _expect_average(module, twin, lambda m, x=x: m(x).square().mean(), f"step {i}")


def test_only_the_loss_is_compiled(pool: Pool) -> None:
    pool.run(_compiled_loss)


def _a_layer_made_later(rank: int, world: int) -> None:
    lazy = nn.LazyLinear(3)  # not initialised: alive, and nobody's business
    module = seeded(0, lambda: nn.Linear(4, 4))
    model = torch.compile(lambda x: module(x).relu(), backend=small_backend())
    model(data(0, 2, 4)).sum().backward()
    late = seeded(1, lambda: nn.Linear(4, 1))
    twin = copy.deepcopy(late)
    x = data(1, 2, 4)
    late(model(x)).square().sum().backward()
    with torch.no_grad():
        h = module(x).relu()
    _expect_average(late, twin, lambda m: m(h).square().sum(), "the new layer")
    assert lazy.weight is not None


def test_a_layer_made_after_the_first_step(pool: Pool) -> None:
    pool.run(_a_layer_made_later)


class TwoGraphs(nn.Module):
    """A weight in two graphs of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        torch._dynamo.graph_break()
        return self.b(x)


def _static_with_two_graphs(rank: int, world: int) -> None:
    module = seeded(0, TwoGraphs)
    twin = copy.deepcopy(module)
    model, _ = compiled(module, static_graph=True)
    for i in range(3):
        module.zero_grad()
        x = data(i, 5, 4)
        model(x).square().sum().backward()
        _expect_average(module, twin, lambda m, x=x: m(x).square().sum(), f"step {i}")


def test_a_static_graph_may_break(pool: Pool) -> None:
    pool.run(_static_with_two_graphs)


class Around(nn.Module):
    """A module of one rank around a part of the model, with a buffer of its own."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.count


def _evaluation_of_a_part(rank: int, world: int) -> None:
    part = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module = seeded(0, lambda: nn.Sequential(part, nn.Linear(4, 2)))
    backend = small_backend()

    def evaluate() -> None:
        if rank == 0:
            with torch.no_grad():
                torch.compile(Around(part), backend=backend)(torch.ones(3, 4))

    evaluate()
    model = torch.compile(module, backend=backend, dynamic=False)
    twin = copy.deepcopy(module)
    for size in (8, 5):
        module.zero_grad()
        x = data(size, size, 4)
        model(x).square().sum().backward()
        _expect_average(module, twin, lambda m, x=x: m(x).square().sum(), f"{size} samples")
        evaluate()


def test_one_rank_evaluates_a_part_of_the_model(pool: Pool) -> None:
    pool.run(_evaluation_of_a_part)


def _a_new_set_on_one_rank(rank: int, world: int) -> str:
    module = seeded(0, lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    model, _ = compiled(module)
    model(data(0, 3, 4)).sum().backward()
    if rank == 1:
        module[0].weight.requires_grad_(False)
    return f"{type(error := error_of(lambda: model(data(1, 3, 4)).sum().backward())).__name__}: {error}"


def test_a_set_that_is_new_on_one_rank_is_refused_on_both(pool: Pool) -> None:
    for message in pool.run(_a_new_set_on_one_rank, discard=True):
        assert message.startswith("RanksDisagree"), message
        assert "only rank 0 has gradients of 0.weight" in message


class Weighed(nn.Module):
    """Computes with a weight of any kind, and with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.randn(2, 3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.square() * x.mean().to(self.weight.dtype)).sum() + (self.scale * x.sum()).sum()


CONVERSIONS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "other bytes": (torch.float32, Tensor.double),
    "another dtype of as many bytes": (torch.bfloat16, Tensor.half),
    "another memory order": (torch.float32, lambda w: w.to(memory_format=torch.channels_last)),
    "another shape": (torch.float32, lambda w: w.reshape(3, 2, 4, 4)),
}


def _converted(rank: int, world: int, kind: str, compiles: bool, who: tuple[int, ...]) -> str:
    dtype, convert = CONVERSIONS[kind]
    module = seeded(0, Weighed)
    module.weight.data = module.weight.data.to(dtype)
    model = fxddp.DistributedDataParallel(module, compile=compiles, inner="aot_eager")
    for i, converted in enumerate((False, True, False)):
        twin = copy.deepcopy(module)
        if rank in who:
            weight = module.weight.data.to(dtype).contiguous().reshape(2, 3, 4, 4)
            module.weight.data = twin.weight.data = convert(weight) if converted else weight
        module.zero_grad()
        loss = methodcaller("__call__", data(i, 3, 4))
        if converted and len(who) < world:
            return f"{type(error := error_of(lambda: loss(model).backward())).__name__}: {error}"  # noqa: B023
        loss(model).backward()
        _expect_average(module, twin, loss, f"step {i}")
    return ""


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_weight_converted_on_one_rank_is_refused_on_both(pool: Pool, kind: str, compiles: bool) -> None:
    for message in pool.run(_converted, kind, compiles, (1,), discard=True):
        assert message.startswith("RanksDisagree"), message
        assert "weight" in message
        assert "on all ranks" in message


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_weights_converted_on_all_ranks(pool: Pool, kind: str, compiles: bool) -> None:
    """To another kind and back."""
    pool.run(_converted, kind, compiles, (0, 1))


class Tied(nn.Module):
    """Two heads of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).relu()
        return self.one(x), self.two(x)


def _tied_later(rank: int, world: int, wraps: bool, split: bool, one_bucket: bool) -> None:
    """Dynamo does not compile anew: from then on one parameter stands at two inputs of the graph."""
    module = seeded(0, Tied)
    usual: dict[str, Any] = {"split": split, "find_unused_parameters": True, "inner": "aot_eager"}
    size = 25 if one_bucket else 1e-4
    if wraps:
        model: Any = fxddp.DistributedDataParallel(module, bucket_cap_mb=size, **usual)
    else:
        model = torch.compile(module, backend=fxddp.backend(size, first_bucket_mb=size, **usual))
    steps = [(0, 1), (0, 1), (0,), (1,), (rank,)]
    for i, heads in enumerate(steps):
        if i == 1:
            module.two.weight = module.one.weight
        twin = copy.deepcopy(module)
        for keeps in (False, True):  # what is there is filled again
            module.zero_grad(set_to_none=not keeps)

            def loss(m: Any, i: int = i, heads: tuple[int, ...] = heads) -> Tensor:
                outputs = m(data(i, 5, 4))
                return sum((outputs[head].square().sum() for head in heads), torch.zeros(()))

            loss(model).backward()
            twin.zero_grad()
            loss(twin).backward()
            for (name, got), want in zip(module.named_parameters(), twin.parameters(), strict=True):
                total = torch.zeros_like(got) if want.grad is None else want.grad / world
                dist.all_reduce(total)
                found = torch.zeros_like(got) if got.grad is None else got.grad
                expect(torch.allclose(found, total, atol=1e-5), f"step {i}, {keeps}: {name} is averaged")


@pytest.mark.parametrize("wraps", [True, False])
def test_weights_tied_after_the_first_step(pool: Pool, wraps: bool) -> None:
    for split, one_bucket in ((True, True), (True, False), (False, True)):
        pool.run(_tied_later, wraps, split, one_bucket)


def _stand_ins(rank: int, world: int) -> None:
    """What `functional_call` puts in a parameter's place is this rank's own: neither sent nor compared."""
    module = seeded(0, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    model, _ = compiled(module)
    for i, (names, trains) in enumerate([(["2.weight"], True), (["2.weight", "2.bias"], False), (None, True)] * 2):
        chosen = [name for name, _ in module.named_parameters() if names is None or name in names]
        noise = {name: data(i, *module.get_parameter(name).shape) for name in chosen}

        def loss(m: Any, noise: dict[str, Tensor] = noise, trains: bool = trains, i: int = i) -> Tensor:
            own = dict(m.named_parameters())
            inner = "_orig_mod." if m is model else ""
            fast = {inner + n: own[inner + n] * 2 + v if trains else v.clone() for n, v in noise.items()}
            found: Tensor = torch.func.functional_call(m, fast, (data(i, 5, 4),)).square().sum()
            for n, v in noise.items():
                expect(trains or torch.equal(fast[inner + n], v), f"step {i}: {n} stays this rank's")
            return found

        twin = copy.deepcopy(module)
        module.zero_grad()
        loss(model).backward()
        _expect_average(module, twin, loss, f"step {i}")


def test_tensors_in_place_of_parameters_stay_local(pool: Pool) -> None:
    pool.run(_stand_ins)
