"""Random small models and training programs on two live ranks, against gradients averaged by hand.

What is drawn covers what planner and runtime see in combination: ties, skips, frozen parts, dtypes, graph breaks,
outputs that are not in the loss, bucket sizes, accumulation, weights that differ at first.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxddp
from tests.live.lab import data
from tests.live.pool import Pool

WIDTH = 6
KINDS = ("linear", "no bias", "norm", "scale", "bottleneck", "transposed")
BUCKETS = (1e-6, 0.0002, 0.0005, 25.0)  # MiB: one gradient each, a few, more, all


@dataclass(frozen=True)
class Part:
    kind: str
    dtype: torch.dtype
    hidden: int
    frozen: str  # "", "all" or "bias"
    skip: bool
    breaks: bool  # the compiled graph ends after it
    like: int  # shares its parameters with this part, if that is of the same kind; -1: with none


@dataclass(frozen=True)
class Step:
    micro_batches: int  # under no_sync, before the one that synchronises
    outputs: str  # "out", "side" or "both" are in the loss
    zero: str  # "none", "zeros", or "keep" what was accumulated


@dataclass(frozen=True)
class Program:
    parts: tuple[Part, ...]
    side: int  # the part whose result the second head sees
    bucket_mb: float
    first_bucket_mb: float
    split: bool
    same_weights: bool
    steps: tuple[Step, ...]

    @property
    def other_weights(self) -> bool:
        """Whether ranks start from other weights; refused if a graph in which nothing trains may run first."""
        frozen_first = any(part.breaks for part in self.parts) and any(part.frozen for part in self.parts)
        return not self.same_weights and not frozen_first

    @property
    def bitwise(self) -> bool:
        """Whether the gradients of a parameter are added in one order only, in precise arithmetic."""
        return all(part.like < 0 and part.dtype is not torch.bfloat16 for part in self.parts)


PARTS = st.builds(
    Part,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
    hidden=st.integers(1, 9),
    frozen=st.sampled_from(["", "", "", "bias", "all"]),
    skip=st.booleans(),
    breaks=st.sampled_from([False, False, False, True]),
    like=st.sampled_from([-1, -1, 0, 1, 2]),
)
STEPS = st.builds(
    Step,
    micro_batches=st.integers(0, 2),
    outputs=st.sampled_from(["out", "both", "side"]),
    zero=st.sampled_from(["none", "zeros", "keep"]),
)
PROGRAMS = st.builds(
    Program,
    parts=st.lists(PARTS, min_size=1, max_size=5).map(tuple),
    side=st.integers(0, 4),
    bucket_mb=st.sampled_from(BUCKETS),
    first_bucket_mb=st.sampled_from(BUCKETS),
    split=st.booleans(),
    same_weights=st.booleans(),
    steps=st.lists(STEPS, min_size=1, max_size=4).map(tuple),
)


class Layer(nn.Module):
    """One part."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        if part.kind in ("linear", "no bias"):
            self.linear = nn.Linear(WIDTH, WIDTH, bias=part.kind == "linear")
        elif part.kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif part.kind == "scale":
            self.weight = nn.Parameter(torch.randn(WIDTH))
        elif part.kind == "bottleneck":
            self.down, self.up = nn.Linear(WIDTH, part.hidden), nn.Linear(part.hidden, WIDTH)
        else:  # a parameter that is not contiguous
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.to(part.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.part.dtype)
        kind = self.part.kind
        if kind in ("linear", "no bias"):
            y = self.linear(y)
        elif kind == "norm":
            y = self.norm(y)
        elif kind == "scale":
            y = y * self.weight
        elif kind == "bottleneck":
            y = self.up(self.down(y))
        else:
            y = y @ self.weight
        y = y.to(x.dtype).tanh()
        return x + y if self.part.skip else y


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        layers: list[Layer] = []
        for part in program.parts:
            other = layers[part.like] if 0 <= part.like < len(layers) else None
            same = other is not None and (other.part.kind, other.part.dtype) == (part.kind, part.dtype)
            same = same and (part.kind != "bottleneck" or other.part.hidden == part.hidden)  # type: ignore[union-attr]
            layers.append(other if other is not None and same else Layer(part))
        self.layers = nn.ModuleList(layers)
        self.breaks = [part.breaks for part in program.parts]
        self.side = min(program.side, len(layers) - 1)
        self.head, self.second = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 5)
        self.unused = nn.Linear(WIDTH, WIDTH)
        for layer in self.layers:
            frozen = layer.part.frozen  # type: ignore[union-attr]
            for name, parameter in layer.named_parameters():
                if frozen == "all" or (frozen == "bias" and name.endswith("bias")):
                    parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side = x
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if k == self.side:
                side = self.second(x)
            if self.breaks[k]:
                torch._dynamo.graph_break()
        return self.head(x), side


def loss(model: Any, i: int, outputs: str) -> Tensor:
    out, side = model(data(i, 5, WIDTH))
    first, second = out.square().mean(), side.sin().mean()
    return {"out": first, "side": second, "both": first + second}[outputs]


def run(rank: int, world: int, program: Program) -> list[str]:
    """What is wrong, in words: nothing is raised, so that a failing example does not cost fresh workers."""
    torch.manual_seed(rank if program.other_weights else 0)
    module = Model(program)
    reference = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in reference.parameters():
            dist.broadcast(value := parameter.contiguous(), 0)
            parameter.copy_(value)
    backend = fxddp.backend(
        program.bucket_mb, first_bucket_mb=program.first_bucket_mb, inner="aot_eager", split=program.split
    )
    model = torch.compile(module, backend=backend)
    found: list[str] = []
    for number, step in enumerate(program.steps):
        if step.zero != "keep":
            for one in (module, reference):
                one.zero_grad(set_to_none=step.zero == "none")
        for k in range(step.micro_batches):
            with backend.no_sync():
                loss(model, 10 * number + k, step.outputs).backward()
            loss(reference, 10 * number + k, step.outputs).backward()
            found += compare(module, reference, program, f"step {number}, micro-batch {k}")
        loss(model, 10 * number + 9, step.outputs).backward()
        loss(reference, 10 * number + 9, step.outputs).backward()
        average(reference, world)
        found += compare(module, reference, program, f"step {number}")
        found += account(module, backend, program, number)
        with torch.no_grad():
            for one in (module, reference):
                for parameter in one.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
    return found


def average(module: nn.Module, world: int) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                value = (parameter.grad * (1 / world)).contiguous()
                dist.all_reduce(value)
                parameter.grad.copy_(value)


def compare(module: nn.Module, reference: nn.Module, program: Program, what: str) -> list[str]:
    found = []
    for (name, got), wanted in zip(module.named_parameters(), reference.parameters(), strict=True):
        for kind, a, b in (("weight", got.detach(), wanted.detach()), ("gradient", got.grad, wanted.grad)):
            if a is None or b is None:
                if a is not b:
                    found.append(f"{what}: {kind} of {name} is {'None' if a is None else 'not None'}")
            elif a.dtype != b.dtype or a.shape != b.shape or a.stride() != got.stride():
                found.append(
                    f"{what}: {kind} of {name}: {a.dtype} {tuple(a.shape)} {a.stride()}, expected {got.stride()}"
                )
            elif not (torch.equal(a, b) if program.bitwise else torch.allclose(a, b, *tolerance(a.dtype))):
                error = (a - b).abs().max().item()
                found.append(f"{what}: {kind} of {name} is off by {error:.3g} of {b.abs().max().item():.3g}")
    return found


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    return (0.1, 0.02) if dtype is torch.bfloat16 else (1e-3, 1e-4)  # what comes before a bf16 part is as imprecise


def account(module: nn.Module, backend: fxddp.Backend, program: Program, number: int) -> list[str]:
    """What the backend says it did in a step whose gradients all come from one graph."""
    step, record = program.steps[number], backend.stats().last
    found = [] if record.sync else [f"step {number}: not on record as synchronised"]
    if any(part.breaks for part in program.parts):
        return found
    if record.uncovered and {s.outputs for s in program.steps[: number + 1]} == {step.outputs}:
        found.append(f"step {number}: outside of the graph: {record.uncovered}")
    buckets = sum(bool(bucket.nbytes) for plan in backend.plans for bucket in plan.buckets)
    if record.launches != buckets:
        found.append(f"step {number}: {record.launches} launches for {buckets} buckets")
    return found


PLAIN = Part("linear", torch.float32, 1, "", False, False, -1)


@settings(
    max_examples=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(program=PROGRAMS)
@example(
    program=Program((PLAIN, PLAIN), 0, 1e-6, 1e-6, True, False, (Step(1, "both", "none"), Step(0, "out", "zeros")))
)
def test_random_models(pool: Pool, program: Program) -> None:
    for rank, found in enumerate(pool.run(run, program)):
        assert not found, f"rank {rank}: {found}"
