"""Training programs that data parallelism must get right, each a tiny model and its step.

Every scenario runs under the adapters of `yardstick`, from weights that differ per rank (rank 0's win) and on data that
differs per rank. What cannot be run, or cannot be compared bit by bit, says why where it is declared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.live.yardstick import Adapter, Context, Fxddp, Manual, Run, Stock, compare, differences_between_ranks, train

Step = Callable[[Context, int], None]
# From the non-empty buckets of each plan, the launches that a synchronised backward may show.
Launches = Callable[[list[int]], set[int]]


def all_plans(buckets: list[int]) -> set[int]:
    """Every graph runs once in each backward."""
    return {sum(buckets)}


def one_plan(buckets: list[int]) -> set[int]:
    """Each backward runs one of several compiled variants."""
    return set(buckets)


def all_plans_twice(buckets: list[int]) -> set[int]:
    return {2 * sum(buckets)}


@dataclass(frozen=True)
class Scenario:
    """A program, how to run it and what holds for it."""

    name: str
    model: Callable[[int], nn.Module]  # of the rank
    step: Step
    steps: int = 3
    wrap: Callable[[Context], Any] = lambda ctx: ctx.wrap(ctx.raw)
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    bucket_mb: float = 0.004  # several buckets even in these models
    same_weights: bool = False  # where the parameters cannot be known before the first forward
    bitwise: bool = True  # under aot_eager: whether the arithmetic is, in order, that of the eager model
    tol: float = 1e-4  # elsewhere
    ddp_options: dict[str, Any] = field(default_factory=dict)
    no_ddp: str = ""  # why stock DistributedDataParallel cannot run it
    fxddp_options: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""  # the error that fxddp may raise instead, on every rank
    graphs_do_the_work: bool = False  # every gradient must be reduced by a graph
    launches: Launches = all_plans
    repacked: bool = False  # a later compile orders gradients otherwise: copied into the agreed buckets at the end
    left_out: dict[str, str] = field(default_factory=dict)  # "inductor", "inductor-split", ... -> why it is not run
    dynamo_config: dict[str, Any] = field(default_factory=dict)
    functorch_config: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        """The compiler's settings that this program is run with."""
        with (
            torch._dynamo.config.patch(self.dynamo_config),
            torch._functorch.config.patch(self.functorch_config),
        ):
            yield


SCENARIOS: dict[str, Scenario] = {}

# What happens between the graphs needs only one of the two forms of a backward under the compiler that takes longer.
BETWEEN_GRAPHS = {"inductor-unsplit": "compiles the graphs of mlp; aot_eager-unsplit shows what is between them"}


def add(name: str, model: Callable[[int], nn.Module], step: Step, **options: Any) -> None:
    """Register a scenario."""
    assert name not in SCENARIOS, f"two scenarios are named {name}"
    SCENARIOS[name] = Scenario(name, model, step, **options)


def scenario(model: Callable[[int], nn.Module], **options: Any) -> Callable[[Step], None]:
    """Register the decorated step, under its name."""
    return lambda step: add(step.__name__, model, step, **options)


# ---- models -------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Some layers in a module of the user's own class."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def mlp(_: int = 0) -> nn.Module:
    return Layers(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 16))


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Attention(nn.Module):
    """Causal attention with two heads."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, size // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, size))


class Transformer(nn.Module):
    """Attention and feed-forward blocks after an embedding, whose weight may be the head's as well."""

    def __init__(self, *, words: int = 40, size: int = 16, depth: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size)
        self.layers = nn.ModuleList([layer for _ in range(depth) for layer in (Attention(size), Block(size))])
        self.head = nn.Linear(size, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---- steps --------------------------------------------------------------------------------------------------------


def mean_square(x: Tensor) -> Tensor:
    return x.float().square().mean()


def usual(ctx: Context, i: int) -> None:
    """One step of a model that takes 16 features."""
    ctx.step(mean_square(ctx.model(ctx.normal(i, 8, 16))))


def language(ctx: Context, i: int, batch: int = 3, length: int = 6) -> None:
    """One step of predicting the next token."""
    tokens = ctx.integers(i, 40, batch, length + 1)
    ctx.step(F.cross_entropy(ctx.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


def accumulate(ctx: Context, i: int, micro_batches: int = 3) -> None:
    """Some micro-batches under no_sync, and one that synchronises."""
    for k in range(micro_batches - 1):
        with ctx.no_sync():
            ctx.backward(mean_square(ctx.model(ctx.normal(100 * (k + 1) + i, 8, 16))))
    ctx.backward(mean_square(ctx.model(ctx.normal(i, 8, 16))))


# ---- kinds of models ----------------------------------------------------------------------------------------------

add("mlp", mlp, usual, graphs_do_the_work=True)
add(
    "sequential",
    lambda rank: nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48)),
    usual,
    graphs_do_the_work=True,
)


class Wide(nn.Module):
    """Weights of more than 64 KiB, as they are, transposed and row by row: their gradients are computed scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 1100), nn.Parameter(torch.randn(1100, 16) / 32)
        self.rows = nn.Embedding(1100, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu() @ self.down + self.rows((100 * x[:, :2].abs()).long()).sum(1)


add(
    "wide",
    lambda rank: Wide(),
    accumulate,
    graphs_do_the_work=True,
    bucket_mb=0.1,
    left_out={"aot_eager": "only under inductor gradients are computed scaled"},
)
add("transformer", lambda rank: Transformer(), language, graphs_do_the_work=True)
add(
    "tied_weights",
    lambda rank: Transformer(tied=True),
    language,
    graphs_do_the_work=True,
    bitwise=False,  # a weight's two gradients are added in another order
)


@scenario(
    lambda rank: Layers(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 4),
    ),
    graphs_do_the_work=True,
)
def convnet(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 4, 3, 8, 8))))


class Recurrent(nn.Module):
    """An LSTM between linear layers. Dynamo leaves the whole model eager unless told to allow RNNs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.first(x).relu())[0][:, -1])


@scenario(lambda rank: Recurrent(), same_weights=True)
def lstm(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 4, 5, 16))))


class Casting(nn.Module):
    """Layers of three floating-point types."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 48), nn.Linear(48, 48), nn.Linear(48, 24), nn.Linear(24, 16)])
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
        for layer, dtype in zip(self.layers, dtypes, strict=True):
            layer.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).dtype)).relu()
        return x


add("dtypes", lambda rank: Casting(), usual, graphs_do_the_work=True, tol=2e-2)


class Overflowing(nn.Module):
    """A float16 parameter whose gradient fits its type, but the sum over two ranks does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.weight = nn.Parameter(torch.randn(64, dtype=torch.float16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), (self.weight.float() * 40_000).sum()


@scenario(lambda rank: Overflowing(), graphs_do_the_work=True)
def half_precision_sums_that_overflow(ctx: Context, i: int) -> None:
    y, total = ctx.model(ctx.normal(i, 8, 16))
    ctx.step(mean_square(y) + total)
    gradient = ctx.raw.get_parameter("weight").grad
    assert gradient is not None
    ctx.expect(gradient.eq(40_000).all(), f"the average of 40,000 and 40,000 came out as {gradient[0].item()}")


class Spectral(nn.Module):
    """A filter with complex weights, and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 48)
        self.filter = nn.Parameter(torch.randn(25, dtype=torch.complex64))
        self.register_buffer("phase", torch.polar(torch.ones(25), torch.rand(25)))
        self.last = nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.filter * self.phase, n=48))


add("complex_parameters", lambda rank: Spectral(), usual, graphs_do_the_work=True)


class Small(nn.Module):
    """Parameters of no elements and of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.empty = nn.Parameter(torch.randn(0, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.body(x) * self.scale, self.empty * 2])


add("empty_and_scalar_parameters", lambda rank: Small(), usual, graphs_do_the_work=True)


def channels_last_convolutions(_: int) -> nn.Module:
    model = Layers(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 1), nn.ReLU(), nn.Conv2d(24, 8, 3))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@scenario(channels_last_convolutions, graphs_do_the_work=True)
def channels_last(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 4, 3, 8, 8).to(memory_format=torch.channels_last))))


class Transposed(nn.Module):
    """Weights that lie in memory the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(48, 16).t())
        self.cube = nn.Parameter(torch.randn(6, 48, 4).permute(1, 2, 0))
        self.last = nn.Parameter(torch.randn(16, 48).t())

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.first) * self.cube.mean((1, 2))).tanh() @ self.last


add("transposed_parameters", lambda rank: Transposed(), usual, graphs_do_the_work=True)


# ---- which parameters get a gradient ------------------------------------------------------------------------------


def with_frozen_layer(_: int) -> nn.Module:
    model = mlp()
    model.get_submodule("layers.2").requires_grad_(False)
    return model


def decaying(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


add("frozen_parameters", with_frozen_layer, usual, optimizer=decaying, graphs_do_the_work=True)


@scenario(
    mlp,
    steps=5,
    optimizer=decaying,
    ddp_options={"find_unused_parameters": True},
    graphs_do_the_work=True,
    launches=one_plan,
)
def freezing_and_unfreezing(ctx: Context, i: int) -> None:
    for k, name in enumerate(("layers.0", "layers.2")):
        ctx.raw.get_submodule(name).requires_grad_(i not in (1 + k, 2 + k))
    usual(ctx, i)


class Unused(nn.Module):
    """A layer that forward never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


add(
    "unused_parameters",
    lambda rank: Unused(),
    usual,
    optimizer=decaying,
    ddp_options={"find_unused_parameters": True},
    graphs_do_the_work=True,
    left_out=BETWEEN_GRAPHS,
)


class Experts(nn.Module):
    """One of two layers, chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 48)
        self.experts = nn.ModuleList([nn.Linear(48, 48), nn.Linear(48, 48)])
        self.last = nn.Linear(48, 16)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.last(self.experts[expert](self.trunk(x).relu()).relu())


@scenario(
    lambda rank: Experts(),
    steps=4,
    optimizer=decaying,
    ddp_options={"find_unused_parameters": True},
    graphs_do_the_work=True,
    launches=one_plan,
)
def experts_that_alternate(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 8, 16), i % 2)))


@scenario(
    lambda rank: Experts(),
    steps=4,
    optimizer=decaying,
    ddp_options={"find_unused_parameters": True},
    fxddp_options={"find_unused_parameters": True},
    refusal="RanksDisagree",
)
def experts_that_differ_by_rank(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 8, 16), (i // 2 + ctx.rank) % 2 if i != 3 else 0)))


class TwoHeads(nn.Module):
    """Two heads on one trunk, both returned."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 48)
        self.heads = nn.ModuleList([nn.Linear(48, 48), nn.Linear(48, 48)])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.trunk(x).relu()
        return [head(x) for head in self.heads]


@scenario(
    lambda rank: TwoHeads(),
    optimizer=decaying,
    no_ddp="takes every parameter behind a returned output as used, and waits for its gradient",
)
def head_that_is_not_in_the_loss(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 8, 16))[0]))


class NoGradientFor(torch.autograd.Function):
    """x * weight, without a gradient for the second weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight + other.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0), None


class CustomFunction(nn.Module):
    """A custom autograd.Function in the middle, whose backward returns None for a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 48), nn.Linear(48, 48)
        self.weight, self.other = nn.Parameter(torch.randn(48)), nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(NoGradientFor.apply(self.first(x), self.weight, self.other).relu())


add(
    "custom_function_without_a_gradient",
    lambda rank: CustomFunction(),
    usual,
    optimizer=decaying,
    no_ddp="gives the parameter zeros, and weight decay moves it",
)


# ---- what is compiled, and what is not ----------------------------------------------------------------------------


class Broken(nn.Module):
    """One layer before and after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.last = nn.Linear(16, 16), nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(x).relu()
        torch._dynamo.graph_break()
        return self.last(self.twice(x).relu())


add("parameter_in_two_graphs", lambda rank: Broken(), usual, bitwise=False)  # averages are added, not gradients


@torch.compiler.disable
def eager_matmul(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


class Gap(nn.Module):
    """A weight used by the graphs and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gap, self.last = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.first(x) @ self.gap).relu()
        x = eager_matmul(eager_matmul(x, self.gap), self.first.weight)
        return self.last(x)


add("parameter_in_an_eager_gap", lambda rank: Gap(), usual, bitwise=False)


class Disabled(nn.Linear):
    """A layer that is never compiled."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class AroundDisabled(nn.Module):
    """Compiled layers around one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.disabled, self.last = nn.Linear(16, 48), Disabled(48, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.disabled(self.first(x).relu()).relu())


add("disabled_submodule", lambda rank: AroundDisabled(), usual)
add(
    "disabled_submodule_in_a_sequential",
    lambda rank: Layers(nn.Linear(16, 48), nn.ReLU(), Disabled(48, 48), nn.ReLU(), nn.Linear(48, 16)),
    usual,
    same_weights=True,  # Dynamo does not break in the forward of torch's own classes: all of it stays eager
)


class Repeating(nn.Module):
    """Python numbers that enter the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, scale: float, times: int) -> Tensor:
        for _ in range(times):
            x = x + self.body(x * scale)
        return x


@scenario(lambda rank: Repeating(), steps=4, dynamo_config={"recompile_limit": 1}, bitwise=False)
def recompile_limit_reached(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 8, 16), 0.5, 1 + i % 3)))


@scenario(lambda rank: Repeating(), steps=5, graphs_do_the_work=True, launches=one_plan, bitwise=False, repacked=True)
def python_numbers(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 8, 16), 0.5 + 0.1 * i, 1 + i // 3)))


class Regional(nn.Module):
    """Repeated blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compile_blocks(ctx: Context) -> Any:
    """Regional compilation: the blocks are compiled, what is around them stays eager."""
    blocks = ctx.raw.get_submodule("blocks")
    model = ctx.adapter.share(ctx.raw)
    for block in blocks.children():
        ctx.adapter.compile_in_place(block)
    return model


add("regional_compile", lambda rank: Regional(), language, wrap=compile_blocks, same_weights=True)


def compile_loss(ctx: Context) -> Any:
    model = ctx.adapter.share(ctx.raw)
    return ctx.adapter.compile(lambda x, y: F.mse_loss(model(x), y))


@scenario(mlp, wrap=compile_loss, graphs_do_the_work=True)
def compiled_loss_function(ctx: Context, i: int) -> None:
    ctx.step(ctx.model(ctx.normal(i, 8, 16), ctx.normal(i + 50, 8, 16)))


add(
    "fullgraph",
    mlp,
    usual,
    wrap=lambda ctx: ctx.wrap(ctx.raw, fullgraph=True),
    graphs_do_the_work=True,
    left_out=BETWEEN_GRAPHS,
)


def products_are_kept(_: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    keeps = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """Activation checkpointing of each block; in the middle one the products may be kept."""

    def __init__(self, *, reentrant: bool, keeps: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.reentrant = reentrant
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.keeps and block is self.blocks[1]:
                selective = partial(create_selective_checkpoint_contexts, products_are_kept)
                x = checkpoint(block, x, use_reentrant=False, context_fn=selective)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def from_input_with_gradient(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 8, 16).requires_grad_())))


add("checkpoint", lambda rank: Checkpointed(reentrant=False, keeps=True), usual, graphs_do_the_work=True)
add("checkpoint_reentrant", lambda rank: Checkpointed(reentrant=True), from_input_with_gradient)
add(
    "checkpoint_around_compiled_blocks",
    lambda rank: Checkpointed(reentrant=False),
    usual,
    wrap=compile_blocks,
)
add(
    "checkpoint_reentrant_around_compiled_blocks",
    lambda rank: Checkpointed(reentrant=True),
    from_input_with_gradient,
    wrap=compile_blocks,
    same_weights=True,  # the blocks' first forward is without gradients
)


# ---- shapes and modes that change ---------------------------------------------------------------------------------

# By rank: the first change of a size compiles a variant with symbolic sizes, on each rank at another step.
BATCHES = ((8, 8, 12, 5), (8, 6, 9, 2))
LENGTHS = ((6, 6, 9, 4), (6, 8, 5, 10))


@scenario(mlp, steps=4, graphs_do_the_work=True, launches=one_plan)
def batch_sizes_that_change(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, BATCHES[ctx.rank % 2][i], 16))))


@scenario(lambda rank: Transformer(depth=1), steps=4, graphs_do_the_work=True, launches=one_plan)
def lengths_that_change(ctx: Context, i: int) -> None:
    language(ctx, i, length=LENGTHS[ctx.rank % 2][i])


@scenario(
    lambda rank: Transformer(depth=1),
    steps=3,
    wrap=lambda ctx: ctx.wrap(ctx.raw, dynamic=True),
    graphs_do_the_work=True,
    launches=one_plan,
)
def dynamic_shapes_from_the_start(ctx: Context, i: int) -> None:
    language(ctx, i, batch=BATCHES[ctx.rank % 2][i], length=LENGTHS[ctx.rank % 2][i])


class Moded(nn.Module):
    """A model that does something else in evaluation mode."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 48), norm, nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last(x) if self.training else self.last(x) * 2


def train_and_evaluate(ctx: Context, i: int) -> None:
    """A step in training mode, inference in evaluation mode, and once a step in evaluation mode."""
    usual(ctx, i)
    ctx.model.eval()
    with torch.no_grad():
        ctx.watch("inference", ctx.model(ctx.normal(i + 50, 8, 16)))
    if i == 1:
        usual(ctx, i + 50)
    ctx.model.train()


add(
    "training_and_evaluation_mode",
    lambda rank: Moded(nn.LayerNorm(48)),
    train_and_evaluate,
    graphs_do_the_work=True,
    launches=one_plan,
)


@scenario(mlp, graphs_do_the_work=True, left_out=BETWEEN_GRAPHS)
def inference_first(ctx: Context, i: int) -> None:
    with torch.no_grad():
        ctx.model(ctx.normal(i + 50, 8, 16))
    usual(ctx, i)


@scenario(mlp, graphs_do_the_work=True, left_out=BETWEEN_GRAPHS)
def inference_on_rank_0_only(ctx: Context, i: int) -> None:
    usual(ctx, i)
    if ctx.rank == 0:
        with torch.no_grad():
            ctx.model(ctx.normal(i + 50, 5, 16))


def with_scaler(ctx: Context) -> Any:
    return ctx.wrap(ctx.raw), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


@scenario(lambda rank: Transformer(depth=1), steps=5, wrap=with_scaler, tol=2e-2, left_out=BETWEEN_GRAPHS)
def autocast_and_gradient_scaling(ctx: Context, i: int) -> None:
    """A step that all ranks skip, because of an infinite loss on one of them."""
    model, scaler = ctx.model
    overflows = i == 1
    tokens = ctx.integers(i, 40, 3, 7)
    with torch.autocast("cpu", dtype=torch.float16 if i == 3 else torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    ctx.opt.zero_grad()
    ctx.backward(scaler.scale(loss * (torch.inf if overflows and ctx.rank == 1 else 1)))
    scaler.step(ctx.opt)
    scaler.update()
    ctx.watch("scale", torch.tensor(scaler.get_scale()))
    finite = {name: None if g is None else g.isfinite().all() for name, g in ctx.run.gradients[-1].items()}
    ctx.expect(all(finite.values()) is not overflows, f"step {i}: finite gradients: {finite}")
    if overflows:  # which of them are infinite, and which no numbers, is a matter of the order of operations
        ctx.run.gradients[-1] = finite


# ---- several forwards, backwards and models -----------------------------------------------------------------------


@scenario(mlp, graphs_do_the_work=True, launches=all_plans_twice, bitwise=False, left_out=BETWEEN_GRAPHS)
def two_forwards_before_one_backward(ctx: Context, i: int) -> None:
    ctx.step(mean_square(ctx.model(ctx.normal(i, 8, 16))) + mean_square(ctx.model(ctx.normal(i + 50, 8, 16))))


@scenario(mlp, bitwise=False)
def output_fed_back_as_input(ctx: Context, i: int) -> None:
    x = ctx.normal(i, 8, 16)
    for _ in range(3):
        x = x + ctx.model(x)
    ctx.step(mean_square(x))


class Shared(nn.Module):
    """One trunk in two models."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 48)
        self.first = Layers(self.trunk, nn.ReLU(), nn.Linear(48, 48))
        self.second = Layers(self.trunk, nn.Tanh(), nn.Linear(48, 48))


def wrap_each(ctx: Context, *, own_backend: bool) -> list[Any]:
    models = []
    for module in ctx.raw.children():
        if not isinstance(module, nn.Linear):
            models.append(ctx.wrap(module))
            if own_backend:
                ctx.new_backend()
    return models


@scenario(lambda rank: Shared(), wrap=lambda ctx: wrap_each(ctx, own_backend=True), bitwise=False)
def module_inside_two_models(ctx: Context, i: int) -> None:
    first, second = ctx.model
    ctx.step(mean_square(first(ctx.normal(i, 8, 16))) + mean_square(second(ctx.normal(i + 50, 8, 16))))


@scenario(
    lambda rank: nn.ModuleDict({"generator": mlp(), "critic": mlp()}),
    wrap=lambda ctx: wrap_each(ctx, own_backend=False),
    bitwise=False,
)
def two_models_with_one_backend(ctx: Context, i: int) -> None:
    generator, critic = ctx.model
    fake = generator(ctx.normal(i, 8, 16))
    ctx.opt.zero_grad()
    ctx.backward(mean_square(critic(fake.detach())) - mean_square(critic(ctx.normal(i + 50, 8, 16))) * 0.1)
    ctx.raw.get_submodule("critic").requires_grad_(False)
    ctx.backward(mean_square(critic(fake)))
    ctx.raw.get_submodule("critic").requires_grad_(True)
    ctx.opt.step()


@scenario(
    mlp,
    bitwise=False,
    functorch_config={"donated_buffer": False},  # what torch.compile asks of users who retain graphs
    no_ddp="reduces only the first backward of a forward",
)
def second_backward_through_a_retained_graph(ctx: Context, i: int) -> None:
    # A batch size of its own: torch's cache of kernels ignores that setting, another scenario's would be wrong here.
    loss = mean_square(ctx.model(ctx.normal(i, 7, 16)))
    ctx.opt.zero_grad()
    ctx.backward(loss, retain_graph=True)
    ctx.backward(loss)
    ctx.opt.step()


@scenario(mlp, graphs_do_the_work=True, left_out=BETWEEN_GRAPHS)
def gradients_asked_for_directly(ctx: Context, i: int) -> None:
    loss = mean_square(ctx.model(ctx.normal(i + 50, 8, 16)))
    for k, gradient in enumerate(torch.autograd.grad(loss, list(ctx.raw.parameters()))):
        ctx.watch(f"local gradient {k}", gradient)
    usual(ctx, i)


@scenario(mlp, graphs_do_the_work=True)
def input_gradients_stay_local(ctx: Context, i: int) -> None:
    x = ctx.normal(i, 8, 16).requires_grad_()
    ctx.step(mean_square(ctx.model(x)))
    ctx.watch("gradient of the input", x.grad)


# ---- accumulation -------------------------------------------------------------------------------------------------


@scenario(mlp, graphs_do_the_work=True, left_out=BETWEEN_GRAPHS)
def accumulation_under_no_sync(ctx: Context, i: int) -> None:
    ctx.opt.zero_grad()
    accumulate(ctx, i, micro_batches=3 if i == 1 else 1)
    ctx.opt.step()


@scenario(mlp, graphs_do_the_work=True, left_out=BETWEEN_GRAPHS)
def two_cycles_of_accumulation(ctx: Context, i: int) -> None:
    for cycle in range(2):
        ctx.opt.zero_grad()
        accumulate(ctx, 10 * cycle + i)
        ctx.opt.step()


@scenario(mlp, graphs_do_the_work=True, bitwise=False, left_out=BETWEEN_GRAPHS)
def two_cycles_of_accumulation_without_zero_grad(ctx: Context, i: int) -> None:
    ctx.opt.zero_grad()
    for cycle in range(2):
        accumulate(ctx, 10 * cycle + i)
    ctx.opt.step()


@scenario(mlp, graphs_do_the_work=True, bitwise=False, left_out=BETWEEN_GRAPHS)
def accumulation_that_synchronises_each_time(ctx: Context, i: int) -> None:
    ctx.opt.zero_grad()
    for k in range(3):
        ctx.backward(mean_square(ctx.model(ctx.normal(10 * k + i, 8, 16))))
    ctx.opt.step()


@scenario(mlp, graphs_do_the_work=True, left_out=BETWEEN_GRAPHS)
def forward_decides_about_no_sync(ctx: Context, i: int) -> None:
    ctx.opt.zero_grad()
    with ctx.no_sync():
        loss = mean_square(ctx.model(ctx.normal(i, 8, 16)))
    ctx.backward(loss, synchronised=False)
    loss = mean_square(ctx.model(ctx.normal(i + 50, 8, 16)))
    with ctx.no_sync():
        ctx.backward(loss, synchronised=True)
    ctx.opt.step()


@scenario(mlp, graphs_do_the_work=True, left_out=BETWEEN_GRAPHS)
def gradients_zeroed_in_place(ctx: Context, i: int) -> None:
    ctx.opt.zero_grad(set_to_none=False)
    ctx.backward(mean_square(ctx.model(ctx.normal(i, 8, 16))))
    ctx.opt.step()


@scenario(mlp, graphs_do_the_work=True, left_out=BETWEEN_GRAPHS)
def gradients_clipped(ctx: Context, i: int) -> None:
    ctx.opt.zero_grad()
    ctx.backward(mean_square(ctx.model(ctx.normal(i, 8, 16))))
    ctx.watch("norm", torch.nn.utils.clip_grad_norm_(ctx.raw.parameters(), 0.05))
    ctx.opt.step()


# ---- hooks, and use outside the graphs ----------------------------------------------------------------------------


def step_in_backward(ctx: Context) -> Any:
    model = ctx.wrap(ctx.raw)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05, momentum=0.9) for parameter in ctx.raw.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    ctx.on_gradient(step)
    return model


@scenario(mlp, wrap=step_in_backward, no_ddp="calls the user's hook with the local gradient", left_out=BETWEEN_GRAPHS)
def optimizer_in_backward(ctx: Context, i: int) -> None:
    ctx.backward(mean_square(ctx.model(ctx.normal(i, 8, 16))))
    for name, parameter in ctx.raw.named_parameters():
        ctx.watch(name, parameter)


class Scaled(nn.Module):
    """A parameter whose local gradient the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.weight = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), (self.weight * factor).sum()


def clamp_gradient(ctx: Context) -> None:
    ctx.raw.get_parameter("weight").register_hook(lambda gradient: gradient.clamp(-1, 1))


def clamp_then_wrap(ctx: Context) -> Any:
    clamp_gradient(ctx)
    return ctx.wrap(ctx.raw)


def step_with_local_gradient(ctx: Context, i: int) -> None:
    y, total = ctx.model(ctx.normal(i, 8, 16), torch.tensor(-0.5 if ctx.rank % 2 else 4.0))
    ctx.step(mean_square(y) + total)


@scenario(lambda rank: Scaled(), wrap=clamp_then_wrap)
def tensor_hook_sees_the_local_gradient(ctx: Context, i: int) -> None:
    step_with_local_gradient(ctx, i)
    gradient = ctx.raw.get_parameter("weight").grad
    assert gradient is not None
    if ctx.world == 2:
        ctx.expect(gradient.eq(0.25).all(), f"4 clamped to 1, and -0.5, average to 0.25, got {gradient[0].item()}")


@scenario(lambda rank: Scaled())
def tensor_hook_registered_late(ctx: Context, i: int) -> None:
    if i == 1:
        clamp_gradient(ctx)
    step_with_local_gradient(ctx, i)


@scenario(mlp, bitwise=False, left_out=BETWEEN_GRAPHS)
def regulariser_outside_the_graph(ctx: Context, i: int) -> None:
    loss = mean_square(ctx.model(ctx.normal(i, 8, 16)))
    weights = [parameter for parameter in ctx.raw.parameters() if parameter.dim() > 1]
    ctx.step(loss + 0.1 * sum((weight * ctx.normal(i, 1)).square().mean() for weight in weights))


# ---- running one --------------------------------------------------------------------------------------------------

INNERS = ("aot_eager", "inductor")
FXDDP_KINDS = tuple(f"{inner}-{how}" for inner in INNERS for how in ("split", "unsplit"))


@dataclass(frozen=True)
class Backward:
    """What `Backend.stats()` says about one backward."""

    sync: bool
    launches: int
    pieces: int
    uncovered: tuple[str, ...]
    events: tuple[tuple[str, int, float], ...]


@dataclass(frozen=True)
class Outcome:
    """What came of a scenario on one rank."""

    differences: list[str]  # from the yardstick, and from rank 0
    synchronised: int  # backwards that had to synchronise
    backwards: list[Backward]
    buckets: list[int]  # non-empty ones, of each plan
    seconds: float


def adapter_for(scenario: Scenario, kind: str) -> Adapter:
    """The adapter called `kind`: "ddp", one of `FXDDP_KINDS`, a fault of `Manual`, or "plain-" and a compiler."""
    if kind == "ddp":
        return Stock(bucket_mb=scenario.bucket_mb, options=scenario.ddp_options)
    if kind in ("local", "unequal"):
        return Manual(fault=kind)
    inner, _, how = kind.partition("-")
    if inner == "plain":
        return Manual(inner=how)
    return Fxddp(bucket_mb=scenario.bucket_mb, inner=inner, split=how == "split", options=scenario.fxddp_options)


def run_scenario(rank: int, world: int, name: str, kind: str) -> Outcome:
    """Run the yardstick, then the adapter called `kind`, and say what differs. A job for the pool."""
    scenario = SCENARIOS[name]

    def run(adapter: Adapter) -> Run:
        return train(
            scenario.model,
            scenario.step,
            adapter=adapter,
            rank=rank,
            world=world,
            steps=scenario.steps,
            wrap=scenario.wrap,
            optimizer=scenario.optimizer,
            same_weights=scenario.same_weights,
        )

    with scenario.configured():
        reference = run(Manual())
        torch._dynamo.reset()
        adapter = adapter_for(scenario, kind)
        start = time.perf_counter()
        got = run(adapter)
        seconds = time.perf_counter() - start
    # With more than two ranks the order of a sum depends on where in a bucket the gradient lies.
    bitwise = world == 2 and (kind == "ddp" or ("aot_eager" in kind and scenario.bitwise))
    differences = compare(reference, got, bitwise=bitwise, tol=scenario.tol)
    for k, gradients in enumerate(got.gradients):
        differences += [f"backward {k}, gradient of {line}" for line in differences_between_ranks(gradients)]
    differences += [f"at the end, parameter {line}" for line in differences_between_ranks(got.parameters)]
    backends = adapter.backends if isinstance(adapter, Fxddp) else []
    return Outcome(
        differences=differences,
        synchronised=len(reference.gradients),
        backwards=[
            Backward(record.sync, record.launches, record.pieces, tuple(record.uncovered), tuple(record.events))
            for backend in backends
            for record in backend.stats().backwards
        ],
        buckets=[sum(bool(bucket.grads) for bucket in plan.buckets) for backend in backends for plan in backend.plans],
        seconds=seconds,
    )
