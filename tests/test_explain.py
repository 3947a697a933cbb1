"""`fxddp.explain`: what it says about a model, before and while it trains, without a process group."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxddp


class Odd(nn.Module):
    """Not compiled: a graph break in the middle of the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 64)
        self.norm = nn.BatchNorm1d(64)
        self.odd = Odd(64)
        self.outer = nn.Linear(64, 4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(self.outer(self.odd(self.norm(self.inner(x)))))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def explain(model: nn.Module, world_size: int | None = None) -> fxddp.Explanation:
    return fxddp.explain(model, torch.randn(6, 8), world_size=world_size, bucket_mb=0.001, inner="aot_eager")


def test_every_parameter_is_accounted_for_once() -> None:
    model = Net()
    found = explain(model, world_size=64)
    packed = [row.name for graph in found.graphs for bucket in graph.plan.buckets for row in graph.rows(bucket)]
    names = [name for name, _ in model.named_parameters()]
    assert sorted([*packed, *found.frozen, *found.uncovered]) == sorted(names)
    assert set(packed) == {f"{m}.{p}" for m in ("inner", "norm", "outer") for p in ("weight", "bias")}
    assert found.frozen == ("fixed.weight", "fixed.bias")
    assert "eager" in found.uncovered["odd.linear.weight"]
    assert "not used" in found.uncovered["idle.bias"]


def test_the_report_shows_the_numbers_of_the_plan() -> None:
    found = explain(Net(), world_size=64)
    text = str(found)
    assert "64 ranks" in text
    assert len(re.findall(r"^ +\d+ .*float32 +cpu", text, re.MULTILINE)) == sum(
        len(g.plan.buckets) for g in found.graphs
    )
    sent = 2 * 63 * found.nbytes // 64
    assert f"{sent / 1024:.4g} KiB a step" in text
    for name in ("inner.weight", "odd.linear.weight", "fixed.bias", "idle.weight"):
        assert name in text


@pytest.mark.parametrize(
    ("hook", "wire_bytes"),
    [
        (None, lambda shapes, world: sum(4 * math.prod(s) for s in shapes)),
        ("fp16", lambda shapes, world: sum(2 * math.prod(s) for s in shapes)),
        ("bf16", lambda shapes, world: sum(2 * math.prod(s) for s in shapes)),
        (
            fxddp.PowerSGD(2, min_compression_rate=0.5),
            lambda shapes, world: sum(4 * (2 * sum(s) if len(s) == 2 else math.prod(s)) for s in shapes),
        ),
        (
            fxddp.Int8(block=8),
            lambda shapes, world: world * math.ceil(sum(map(math.prod, shapes)) / (world * 8)) * (8 + 4),
        ),
        (fxddp.Adaptive(), lambda shapes, world: sum(4 * math.prod(s) for s in shapes)),
    ],
)
def test_it_shows_what_travels(hook: Any, wire_bytes: Callable[..., int]) -> None:
    found = fxddp.explain(Net(), torch.randn(6, 8), world_size=3, inner="aot_eager", comm_hook=hook)
    shapes = [[grad.shape for grad in bucket.grads] for graph in found.graphs for bucket in graph.plan.buckets]
    expected = sum(wire_bytes(bucket, 3) for bucket in shapes)
    assert found.wire_bytes == expected
    assert f"{2 * 2 * expected // 3 / 1024:.4g} KiB a step" in str(found)
    assert (f"compressed by {hook} to {expected / 1024:.4g} KiB" in str(found)) is (hook is not None)


def test_it_holds_the_graphs_and_what_each_pass_did() -> None:
    graph = explain(Net()).graphs[0]
    assert graph.dynamo is not None
    assert graph.forward is not None
    assert graph.backward is not None
    assert [entry.name for entry in graph.passes[:3]] == ["plan", "insert_allreduce", "schedule"]
    assert "all_reduce" not in str(graph.passes[0].code)
    assert str(graph.passes[1].code).count("_c10d_functional.all_reduce.default") == len(graph.plan.buckets)
    assert len(graph.pieces) >= len(graph.plan.buckets)
    assert not any("all_reduce" in piece.code for piece in graph.pieces)
    rows = [row for bucket in graph.plan.buckets for row in graph.rows(bucket)]
    assert all(graph.nodes[row.ready] == row.node for row in rows)


def test_it_leaves_the_model_as_it_was() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    x = torch.ones(6, 8)
    fxddp.explain(model, x, inner="aot_eager")
    assert torch.rand(()) == expected
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_it_plans_as_training_does() -> None:
    model = Net()
    planned = explain(model)
    backend = fxddp.backend(0.001, inner="aot_eager")
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(6, 8)).sum().backward()
    trained = fxddp.explain(compiled)
    assert [g.plan.digest() for g in trained.graphs] == [g.plan.digest() for g in planned.graphs]
    assert str(fxddp.explain(backend)) == str(trained)
    assert backend.plans == tuple(g.plan for g in trained.graphs)
    assert "no compiled graph so far" in trained.uncovered["odd.linear.weight"]


def test_a_compiled_model_with_inputs_keeps_its_own_settings() -> None:
    compiled = torch.compile(Net(), backend=fxddp.backend(0.002, first_bucket_mb=0.0005, inner="aot_eager"))
    found = fxddp.explain(compiled, torch.randn(6, 8), first_bucket_mb=0.001)
    assert (found.settings.cap, found.settings.first_cap) == (int(0.002 * 2**20), int(0.001 * 2**20))
    assert fxddp.backend_of(compiled).sites == []


def test_inductor_plans_without_compiling_the_pieces() -> None:
    found = fxddp.explain(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4), world_size=8)
    assert found.graphs[0].plan.nbytes == 4 * (16 + 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "not compiled with fxddp"), (({"bucket_mb": 1},), "needs the inputs")],
)
def test_what_cannot_be_explained_is_refused(arguments: tuple[dict[str, int], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fxddp.explain(nn.Linear(2, 2), **(arguments[0] if arguments else {}))


def test_inputs_for_a_backend_are_refused() -> None:
    with pytest.raises(ValueError, match="pass the model and its inputs"):
        fxddp.explain(fxddp.backend(), torch.ones(1))
