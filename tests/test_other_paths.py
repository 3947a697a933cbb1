"""Ranks, steps and parameters that leave the usual path: each is averaged all the same, or refused on every rank."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.live.lab import compiled, data, error_of, expect, seeded, small_backend
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
    for size in (8, 5):
        model(data(size, size, 4)).square().sum().backward()
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
    for rank, message in enumerate(pool.run(_a_new_set_on_one_rank, discard=True)):
        assert message.startswith("RanksDisagree"), message
        assert f"rank {rank}" in message
        assert "0.weight" in message
