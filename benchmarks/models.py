"""Models to measure: random weights, synthetic inputs, each ``forward`` returns its loss.

`modes.py` executes this file once per mode, so every mode compiles code objects of its own (see `Note [one copy of the
models per mode]` there). Keep the file free of state, and let it import nothing that is compiled.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rows import stack


class TransformerBlock(nn.Module):
    """Pre-norm causal attention, then a feed-forward layer of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        projected = self.attention_in(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in projected.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.attention_out(mixed)
        return hidden + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))


class Transformer(nn.Module):
    """A decoder-only language model, 53 MiB: large and small parameters mixed, much arithmetic per byte."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut that is projected where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels_out))

    def forward(self, image: Tensor) -> Tensor:
        inner = F.silu(self.norm1(self.conv1(image)))
        return F.silu(self.norm2(self.conv2(inner)) + self.shortcut(image))


class ConvNet(nn.Module):
    """A residual network with BatchNorm, 11 MiB: buffers to synchronise, most bytes in the last layers.

    SiLU rather than ReLU: where an input of ReLU rounds across zero, a gradient jumps. Seen here: compiled and eager
    fp32 gradients up to 1e-1 apart with ReLU, 1e-5 with SiLU, so only the latter can be compared between modes.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        channels = width
        for stage in range(4):
            channels_out = width * 2**stage
            stages.append(ResidualBlock(channels, channels_out, 1 if stage == 0 else 2))
            stages.append(ResidualBlock(channels_out, channels_out, 1))
            channels = channels_out
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        hidden = F.silu(self.stem_norm(self.stem(image)))
        for stage in self.stages:
            hidden = stage(hidden)
        return F.cross_entropy(self.head(hidden.mean((2, 3))), label)


class ResidualMLP(nn.Module):
    """Equal square layers with shortcuts, so that gradients of any depth keep a size worth comparing."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = layers**-0.5

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + self.scale * torch.tanh(layer(hidden))
        return hidden.square().mean()


class Units(nn.Module):
    """A hidden layer that reads and writes by the same weights, those of each unit a parameter of their own."""

    def __init__(self, units: int, width: int) -> None:
        super().__init__()
        for i in range(units):
            self.register_parameter(f"unit{i}", nn.Parameter(torch.randn(width) * width**-0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        weights = stack(list(self.parameters()))
        return torch.tanh(hidden @ weights.T) @ weights / len(weights)


class ManyUnits(nn.Module):
    """Layers of 100 small parameters each: the cost per parameter decides, of guards, hooks and packing."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Units(100, width) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden.square().mean()


class BigTable(nn.Module):
    """An embedding table of 32 MiB under a body of 8 MiB: most bytes in one dense gradient, which is ready last."""

    def __init__(self, entries: int, width: int, layers: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(entries, width, sparse=sparse)
        self.body = ResidualMLP(width, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.table(tokens).mean(1))


def _transformer(draw: torch.Generator) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = Transformer(vocabulary=4096, width=384, layers=6, heads=6, length=64)
    return model, (torch.randint(0, 4096, (4, 64), generator=draw),)


def _transformer12(draw: torch.Generator) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = Transformer(vocabulary=4096, width=384, layers=12, heads=6, length=64)
    return model, (torch.randint(0, 4096, (4, 64), generator=draw),)


def _convnet(draw: torch.Generator) -> tuple[nn.Module, tuple[Tensor, ...]]:
    image = torch.randn(8, 3, 32, 32, generator=draw)
    return ConvNet(width=32, classes=100), (image, torch.randint(0, 100, (8,), generator=draw))


def _mlp(draw: torch.Generator) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ResidualMLP(width=1024, layers=16), (torch.randn(128, 1024, generator=draw),)


def _tiny(draw: torch.Generator) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ResidualMLP(width=32, layers=100), (torch.randn(16, 32, generator=draw),)


def _thin(draw: torch.Generator) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ResidualMLP(width=70, layers=2), (torch.randn(16, 70, generator=draw),)


def _embedding(draw: torch.Generator, *, sparse: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = BigTable(entries=16384, width=512, layers=8, sparse=sparse)
    return model, (torch.randint(0, 16384, (128, 4), generator=draw),)


def _many(draw: torch.Generator) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ManyUnits(layers=100, width=16), (torch.randn(16, 16, generator=draw),)


def _smoke(draw: torch.Generator) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ResidualMLP(width=512, layers=3), (torch.randn(4, 512, generator=draw),)


MODELS: dict[str, Callable[[torch.Generator], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "transformer": _transformer,
    "transformer12": _transformer12,  # twice the blocks: what compiling costs per block
    "convnet": _convnet,
    "mlp": _mlp,  # 64 MiB, little arithmetic per byte: the network decides
    "tiny": _tiny,  # 200 parameters of a few KiB: the cost per parameter and per call decides
    "embedding": _embedding,  # 40 MiB, 32 of them one gradient: nothing left to hide it behind
    "sparse": partial(_embedding, sparse=True),  # the same with a sparse gradient, which DDP's user may ask for
    "many": _many,  # 10,000 parameters of 64 bytes
    "thin": _thin,  # 10,000 parameters in 4: what compiling costs at the least
    "smoke": _smoke,  # compiles in a moment; for trying the benchmark itself, its figures mean nothing
}


def make(name: str, rank: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model with the same weights on every rank, and inputs that differ from rank to rank."""
    torch.manual_seed(0)
    return MODELS[name](torch.Generator().manual_seed(1000 + rank))
