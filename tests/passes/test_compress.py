"""Casts around all-reduces: what travels, what comes back, what both forms of a graph still compute."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import fx, nn

from fxddp.passes import pipeline
from fxddp.passes.allreduce import SCALE_META, insert_allreduce, is_send, is_wait, scale_dtypes
from fxddp.passes.compress import CONVERT, compress, narrows, packed_bucket
from fxddp.passes.schedule import schedule
from fxddp.passes.split import bind_symbols, split
from fxddp.passes.verify import snapshot, verify, verify_program
from tests.passes.graphs import (
    GROUP,
    WAY,
    Builder,
    Drawn,
    assert_same,
    aten,
    backwards,
    capture,
    plan_by_hand,
    plan_of,
    random_inputs,
    run_graph,
    run_program,
    scales_for,
    specs_of,
    text,
)

WIRES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_cast(wire: torch.dtype):
    for dtype in (torch.float32, torch.float64):
        assert narrows(dtype, wire)
        assert not narrows(dtype, None)
    others = (torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64, torch.bool)
    assert not any(narrows(dtype, wire) for dtype in others)


def check(gm: fx.GraphModule, plan: Any, inputs: list[Any], wire: torch.dtype) -> None:
    """Rewrites a graph: whole, each gradient comes back rounded; in pieces, it is exact and its cast beside it."""
    before = snapshot(gm)
    exact = run_graph(gm, *inputs)
    planned = {grad.output for grad in plan.grads}
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    assert compress(gm, wire=wire) is gm
    schedule(gm)
    bind_symbols(gm)
    verify(gm, plan=plan, before=before, way=WAY, wire=wire)
    for scale in (1.0, 1 / 3):
        expected = [
            (old.reshape(-1) * scale).reshape(old.shape) if i in planned else old for i, old in enumerate(exact)
        ]
        rounded = [
            value.to(wire).to(value.dtype) if i in planned and narrows(value.dtype, wire) else value
            for i, value in enumerate(expected)
        ]
        assert_same(run_graph(gm, *inputs, *scales_for(scale_dtypes(plan), scale)), rounded)
        program, pieces = split(gm, plan=plan)
        verify_program(program, outputs=len(before))
        cast = [narrows(bucket.dtype, wire) for bucket in plan.buckets]
        assert [step.wire >= 0 for step in program.steps if step.bucket is not None] == cast
        assert_same(run_program(program, pieces, inputs, scale), expected)


@settings(max_examples=60)
@given(backwards(writes=True))
def test_any_graph(drawn: Drawn):
    gm, turned = drawn
    plan = plan_of(gm, cap=40, strides=turned)
    check(gm, plan, random_inputs(gm), torch.float16)


def mixed() -> fx.GraphModule:
    """Gradients of float32, float64, bfloat16 and complex64, and a second one of float32 without dimensions."""
    builder = Builder()
    x = builder.tangent(2, 3)
    outputs = [builder.call(aten.sin.default, x), builder.call(aten.sum.default, x)]
    outputs += [builder.call(CONVERT, outputs[0], d) for d in (torch.float64, torch.bfloat16, torch.complex64)]
    return builder.finish(outputs, {i: i for i in range(len(outputs))})


@pytest.mark.parametrize("wire", WIRES)
def test_several_dtypes(wire: torch.dtype):
    gm = mixed()
    plan = plan_by_hand(specs_of(gm, {0: (1, 2)}), [0, 1], [2], [3], [4])
    check(gm, plan, random_inputs(gm), wire)


def test_each_gradient_is_cast_by_itself():
    """So that the loop that packs it casts it too."""
    gm = mixed()
    plan = plan_by_hand(specs_of(gm), [0, 1], [2], [3], [4])
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    compress(gm, wire=torch.float16)
    sends = [node for node in gm.graph.nodes if is_send(node)]
    flat, wire = packed_bucket(sends[0])
    assert [part.target for part in wire.args[0]] == [CONVERT] * 2
    assert [part.args[0] for part in wire.args[0]] == list(flat.args[0])
    flat, wire = packed_bucket(sends[1])
    assert wire.target is CONVERT and wire.args[0] is flat
    assert [packed_bucket(send)[1] for send in sends[2:]] == [None, None]


def test_nothing_to_cast_leaves_the_graph_alone():
    gm = mixed()
    insert_allreduce(gm, plan=plan_by_hand(specs_of(gm), [0, 1], [2], [3], [4]), groups=[GROUP])
    before = text(gm)
    assert text(compress(gm, wire=None)) == before
    half = Builder()
    gm = half.finish([half.call(CONVERT, half.tangent(3), torch.bfloat16)], {0: 0})
    insert_allreduce(gm, plan=plan_by_hand(specs_of(gm), [0]), groups=[GROUP])
    before = text(gm)
    assert text(compress(gm, wire=torch.float16)) == before


@pytest.mark.parametrize("model", [nn.Linear(4, 3), nn.Conv2d(2, 3, 2)])
def test_real_backwards(model: nn.Module):
    if isinstance(model, nn.Conv2d):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    captured = capture(model, torch.randn(2, 4) if isinstance(model, nn.Linear) else torch.randn(2, 2, 4, 4))
    rewritten = captured.rewrite(cap=1000, wire=torch.bfloat16)
    assert [record.name for record in rewritten.history][:3] == ["plan", "insert_allreduce", "compress"]
    assert "compress" not in [record.name for record in captured.rewrite().history]
    exact = run_program(rewritten.program, rewritten.pieces, captured.arguments)
    whole = run_graph(rewritten.gm, *captured.arguments, *scales_for(rewritten.program.scales, 1.0))
    planned = {grad.output for grad in rewritten.plan.grads}
    assert planned
    for i, (value, old) in enumerate(zip(whole, exact, strict=True)):
        assert_same([value], [old.to(torch.bfloat16).to(old.dtype) if i in planned else old])


def spoil_wire(gm: fx.GraphModule, send: fx.Node) -> None:
    send.args = (packed_bucket(send)[0], *send.args[1:])
    send.meta["val"] = packed_bucket(send)[0].meta["val"]


def spoil_part(gm: fx.GraphModule, send: fx.Node) -> None:
    flat, wire = packed_bucket(send)
    parts = list(wire.args[0])
    wire.args = ([parts[1], parts[1]],)
    flat.args = ([flat.args[0][1], flat.args[0][1]],)


def spoil_back(gm: fx.GraphModule, send: fx.Node) -> None:
    (done,) = (user for user in send.users if is_wait(user))
    (back,) = done.users
    back.meta["val"] = back.meta["val"].to(torch.float64)


def spoil_scale(gm: fx.GraphModule, send: fx.Node) -> None:
    flat, _ = packed_bucket(send)
    part = flat.args[0][0]
    while SCALE_META not in getattr(part.args[1], "meta", {}):
        part = part.args[0]
    part.args = (part.args[0], part.args[0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_wire, "sends torch.float32, expected torch.float16"),
        (spoil_part, "sends"),
        (spoil_back, "comes back as torch.float64"),
        (spoil_scale, "sends"),
    ],
)
def test_a_spoilt_graph_is_found(spoil: Any, message: str):
    gm = mixed()
    before = snapshot(gm)
    plan = plan_by_hand(specs_of(gm), [0, 1], [2], [3], [4])
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    compress(gm, wire=torch.float16)
    verify(gm, plan=plan, before=before, way=WAY, wire=torch.float16)
    with pytest.raises(AssertionError, match=r"expected torch\.float32"):
        verify(gm, plan=plan, before=before, way=WAY)
    spoil(gm, next(node for node in gm.graph.nodes if is_send(node)))
    with pytest.raises(AssertionError, match=message):
        verify(gm, plan=plan, before=before, way=WAY, wire=torch.float16)


def test_the_pass_is_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipeline, "compress", lambda gm, wire: gm)
    with pytest.raises(AssertionError, match=r"expected torch\.float16"):
        capture(nn.Linear(4, 3), torch.randn(2, 4)).rewrite(wire=torch.float16)
