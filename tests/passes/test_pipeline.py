"""The passes one after the other, over graphs of real models; what they leave behind and what they leave alone."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxddp.passes import pipeline
from fxddp.passes.allreduce import SCALE_META, is_send
from fxddp.passes.gradients import graph_outputs
from fxddp.passes.pipeline import Rewritten
from fxddp.passes.plan import check_plan
from fxddp.passes.split import split
from tests.passes.graphs import (
    WAY,
    Builder,
    Captured,
    assert_same,
    aten,
    capture,
    on_cuda,
    plan_of,
    run_program,
    sends,
    text,
)


class Transformer(nn.Module):
    """A block of attention and a feed-forward network, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8)
        self.feed = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        q, k, v = self.inner(self.norm(h)).view(2, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.outer(y.transpose(1, 2).reshape(2, -1, 8))
        return (h + self.feed(h)) @ self.table.weight.t()


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 3)
    )


class Mixed(nn.Module):
    """Parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.c = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).bfloat16()).double() * self.c


Model = tuple[nn.Module, Tensor]

MODELS: dict[str, Callable[[], Model]] = {
    "transformer": lambda: (Transformer(), torch.randint(0, 11, (2, 5))),
    "network": lambda: (network(), torch.randn(2, 3, 6, 6)),
    "mixed": lambda: (Mixed(), torch.randn(3, 4)),
}


@pytest.fixture(scope="module", params=MODELS)
def captured(request: pytest.FixtureRequest) -> Captured:
    model, example = MODELS[request.param]()
    return capture(model, example)


@pytest.mark.parametrize(("cap", "first_cap"), [(1, 1), (300, 100), (1 << 20, 1 << 20)])
def test_what_comes_out_of_a_real_backward(captured: Captured, cap: int, first_cap: int) -> None:
    rewritten = captured.rewrite(cap, first_cap)
    grads = list(captured.grads().values())
    check_plan(rewritten.plan, grads)
    assert (rewritten.plan.cap, rewritten.plan.first_cap) == (cap, first_cap)
    assert {captured.names[grad.input] for grad in rewritten.plan.grads} == set(captured.names.values())
    assert sends(rewritten.gm) == list(range(len(rewritten.plan.buckets)))
    assert rewritten.program.plan == rewritten.plan
    with torch.no_grad():
        expected = captured.backward(*captured.arguments)
        found = run_program(rewritten.program, rewritten.pieces, captured.arguments)
    assert_same(found, expected)
    for grad in grads:
        assert found[grad.output].stride() == captured.parameters[grad.input].stride()


def test_small_buckets_overlap(captured: Captured) -> None:
    """All but the last bucket leave before the backward is done."""
    rewritten = captured.rewrite(cap=1)
    order = list(rewritten.gm.graph.nodes)
    launches = [order.index(node) for node in order if is_send(node)]
    computed = max(order.index(node) for node in order if node.target in (aten.mm.default, aten.sum.dim_IntList))
    assert launches[0] < computed


def meta_of(gm: fx.GraphModule) -> list[dict[str, Any]]:
    return [dict(node.meta) for node in gm.graph.nodes]


def test_the_graph_that_was_copied_is_untouched(captured: Captured) -> None:
    """AOTAutograd may come with the same graph again."""
    before, code, meta = text(captured.backward), captured.backward.code, meta_of(captured.backward)
    captured.rewrite(cap=100)
    assert (text(captured.backward), captured.backward.code) == (before, code)
    assert [set(m) for m in meta_of(captured.backward)] == [set(m) for m in meta]
    for now, then in zip(meta_of(captured.backward), meta, strict=True):
        assert now.get("val") is then.get("val")
        assert now.get("desc") == then.get("desc")


def everything(rewritten: Rewritten) -> Any:
    return rewritten.program, text(rewritten.gm), [text(piece) for piece in rewritten.pieces]


def test_the_same_graph_gives_the_same_program(captured: Captured) -> None:
    first, second = captured.rewrite(cap=100), captured.rewrite(cap=100)
    assert everything(first) == everything(second)
    assert hash(first.program) == hash(second.program)
    assert first.plan.digest() == second.plan.digest()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_gives_the_same_program(name: str) -> None:
    """Traced twice, as on two ranks."""
    programs = []
    for _ in range(2):
        torch.manual_seed(0)
        model, example = MODELS[name]()
        programs.append(everything(capture(model, example).rewrite(cap=100)))
    assert programs[0] == programs[1]


def test_a_program_is_data(captured: Captured) -> None:
    """A compile cache holds it."""
    program = captured.rewrite(cap=100).program
    assert pickle.loads(pickle.dumps(program)) == program


def test_ready_counts_in_the_nodes_that_came(captured: Captured) -> None:
    rewritten = captured.rewrite()
    nodes = [node.name for node in captured.backward.graph.nodes]
    assert rewritten.outline.nodes == len(nodes)
    for grad in rewritten.plan.grads:
        assert rewritten.outline.grads[grad.output].node == nodes[grad.ready]
    assert len(rewritten.outline.pieces) == len(rewritten.program.steps)


# History

NAMES = ["plan", "insert_allreduce", "schedule", "bind_symbols", "split"]


def test_the_history_names_each_pass(captured: Captured) -> None:
    history = captured.rewrite(cap=100).history
    assert [record.name for record in history] == NAMES
    assert all(record.seconds >= 0 for record in history)
    assert all(record.code is None for record in history)


def test_graphs_are_kept_on_request(captured: Captured) -> None:
    rewritten = captured.rewrite(cap=100, keep=True)
    codes = {record.name: record.code for record in rewritten.history}
    assert all(codes.values())
    assert codes["plan"] == captured.backward.print_readable(print_output=False)
    assert "all_reduce" not in str(codes["plan"])
    assert str(codes["insert_allreduce"]).count("all_reduce.default(") == len(rewritten.plan.buckets)
    assert codes["schedule"] != codes["insert_allreduce"]
    assert codes["split"] == rewritten.gm.print_readable(print_output=False)
    assert everything(rewritten) == everything(captured.rewrite(cap=100))


def test_no_parameters_no_buckets() -> None:
    captured = capture(nn.Linear(4, 2).requires_grad_(False), torch.randn(3, 4, requires_grad=True))
    before = text(captured.backward)
    rewritten = captured.rewrite(cap=100)
    assert rewritten.plan.buckets == ()
    assert text(rewritten.gm) == before
    (piece,) = rewritten.pieces
    expected = [value for value in captured.backward(*captured.arguments) if value is not None]
    assert_same(piece(*captured.arguments), expected)


@pytest.mark.parametrize("broken", ["insert_allreduce", "schedule", "bind_symbols"])
def test_each_pass_is_checked(broken: str, captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(pipeline, broken)

    def spoil(gm: fx.GraphModule, **options: Any) -> fx.GraphModule:
        gm = right(gm, **options)
        outputs = list(graph_outputs(gm.graph))
        gm.graph.output_node().args = (tuple(reversed(outputs)),)
        return gm

    monkeypatch.setattr(pipeline, broken, spoil)
    with pytest.raises(AssertionError, match="output 0"):
        captured.rewrite()


def test_the_program_is_checked(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(gm: fx.GraphModule, **options: Any) -> Any:
        program, pieces = split(gm, **options)
        object.__setattr__(program, "steps", program.steps[::-1])
        return program, pieces

    monkeypatch.setattr(pipeline, "split", spoil)
    with pytest.raises(AssertionError, match="launches"):
        captured.rewrite()


def test_strides_that_only_the_inputs_tell() -> None:
    model, example = MODELS["network"]()
    captured = capture(model, example)
    traced = [node.meta["val"] for node in captured.backward.graph.find_nodes(op="placeholder")]
    with traced[0].fake_mode:
        inputs = [v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v for v in traced]
    rewritten = captured.rewrite(cap=100, inputs=inputs)
    found = {
        tuple(node.meta["val"].stride())
        for piece in rewritten.pieces
        for node in piece.graph.find_nodes(op="placeholder")
        if node.meta["val"].dim() == 4
    }
    assert found <= {v.contiguous(memory_format=torch.channels_last).stride() for v in inputs if v.dim() == 4}
    assert {g.stride for g in rewritten.plan.grads} == {g.stride for g in captured.rewrite(cap=100).plan.grads}


# CUDA, without a GPU


def test_a_cuda_model_gets_the_same_plan(captured: Captured) -> None:
    """The layout of its buckets is that of the model on the CPU; only the device differs."""
    cuda = torch.device("cuda", 0)
    here, there = captured.rewrite(cap=300, first_cap=100), on_cuda(captured).rewrite(cap=300, first_cap=100)
    assert len(there.plan.buckets) > 1
    assert {bucket.device for bucket in there.plan.buckets} == {cuda}
    assert there.plan.buckets == tuple(
        replace(bucket, grads=tuple(replace(grad, device=cuda) for grad in bucket.grads))
        for bucket in here.plan.buckets
    )
    assert there.program.steps == here.program.steps
    assert there.program.outputs == here.program.outputs
    assert there.plan.digest() != here.plan.digest()


def test_a_cuda_graph_computes_on_the_device(captured: Captured) -> None:
    """All but the factors, which are scalars on the CPU: no copy to the device waits in a kernel's way."""
    gm = on_cuda(captured).rewrite(cap=300).gm
    for node in gm.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else [values]:
            if isinstance(value, Tensor):
                assert value.device.type == ("cpu" if SCALE_META in node.meta else "cuda"), node


def test_each_device_has_buckets_of_its_own() -> None:
    """A model spread over two devices."""
    builder = Builder()
    tangents = [builder.tangent(4, device=device) for device in ("cuda:0", "cuda:1", "cuda:0", "cpu")]
    gm = builder.finish([builder.call(aten.neg.default, tangent) for tangent in tangents])
    plan = plan_of(gm, cap=1000)
    assert [[grad.output for grad in bucket.grads] for bucket in plan.buckets] == [[1], [0, 2], [3]]
    with builder.mode:
        parameters = {i: torch.empty(4, device=tangent.meta["val"].device) for i, tangent in enumerate(tangents)}
    rewritten = pipeline.rewrite_backward(
        gm, parameters=parameters, forward_outputs=(), cap=1000, first_cap=1000, way=WAY
    )
    flats = [node.meta["val"] for node in rewritten.gm.graph.nodes if is_send(node)]
    assert [(flat.device.type, flat.device.index, flat.numel()) for flat in flats] == [
        ("cuda", 1, 4),
        ("cuda", 0, 8),
        ("cpu", None, 4),
    ]
