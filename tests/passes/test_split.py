"""Pieces and their program compute what the whole graph computes, and know no more than they need."""

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.attention.flex_attention as flex
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from fxddp.passes.allreduce import ALL_REDUCE, WAIT, insert_allreduce, is_send, is_wait
from fxddp.passes.pieces import SIZE
from fxddp.passes.plan import BucketPlan
from fxddp.passes.schedule import schedule
from fxddp.passes.split import Program, bind_symbols, split
from fxddp.passes.verify import snapshot, verify, verify_program
from tests.passes.graphs import (
    GROUP,
    WAY,
    Builder,
    Captured,
    Drawn,
    assert_same,
    aten,
    backwards,
    calls,
    capture,
    compile_piece,
    plan_by_hand,
    plan_of,
    random_inputs,
    run_graph,
    run_program,
    specs_of,
    text,
    train_with_inductor,
)
from tests.passes.test_layout import symbolic

Pieces = tuple[fx.GraphModule, ...]


def cut(gm: fx.GraphModule, plan: BucketPlan) -> tuple[Program, Pieces]:
    """All passes up to the pieces."""
    before = snapshot(gm)
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    schedule(gm)
    bind_symbols(gm)
    verify(gm, plan=plan, before=before, way=WAY)
    code = text(gm)
    program, pieces = split(gm, plan=plan)
    assert text(gm) == code, "the graph is left as it is"
    verify_program(program, outputs=len(before))
    check_pieces(program, pieces)
    return program, pieces


def check_pieces(program: Program, pieces: Pieces) -> None:
    assert len(pieces) == len(program.steps)
    assert [step.bucket for step in program.steps if step.bucket is not None] == list(range(len(program.plan.buckets)))
    for k, (step, piece) in enumerate(zip(program.steps, pieces, strict=True)):
        inputs = piece.graph.find_nodes(op="placeholder")
        assert (len(inputs), len(piece.graph.output_node().args[0])) == (len(step.inputs), len(step.outputs))  # type: ignore[arg-type]
        assert not any(is_send(node) or is_wait(node) for node in piece.graph.nodes)
        assert all("val" in node.meta for node in inputs)
        assert not any(isinstance(node.meta["val"], (tuple, list)) for node in inputs), "single values cross pieces"
        assert all(node.users for node in inputs if isinstance(node.meta["val"], Tensor)), "reads what it does not need"
        assert len(set(step.inputs)) == len(step.inputs)
        assert set(step.outputs).isdisjoint(range(program.inputs + len(program.scales)))
        for later in program.steps[k + 1 :]:
            assert set(later.inputs).isdisjoint(step.dead)
        assert set(step.dead).isdisjoint(i for i in program.outputs if isinstance(i, int))


@settings(max_examples=200)
@given(backwards() | backwards(writes=True), st.sampled_from([1, 8, 20, 40, 1000]), st.sampled_from([1.0, 0.5]))
def test_any_graph(drawn: Drawn, cap: int, scale: float) -> None:
    """Liveness is checked by the interpreter, which fails on a slot that is read after its death or kept for nobody."""
    gm, strides = drawn
    inputs = random_inputs(gm)
    expected = run_graph(gm, *inputs)
    plan = plan_of(gm, cap, strides)
    for grad in plan.grads:
        expected[grad.output] = expected[grad.output] * scale
    program, pieces = cut(gm, plan)
    found = run_program(program, pieces, inputs, scale)
    assert_same(found, expected)
    assert all(found[grad.output].stride() == grad.stride for grad in plan.grads)


def test_without_buckets_there_is_one_piece() -> None:
    builder = Builder()
    x = builder.tangent(4)
    gm = builder.finish([builder.call(aten.neg.default, x), x, None])
    program, (piece,) = cut(gm, plan_by_hand(()))
    assert program == Program(
        inputs=1, scales=(), slots=2, steps=program.steps, outputs=(1, 0, None), plan=plan_by_hand(())
    )
    assert (program.steps[0].bucket, program.steps[0].flat) == (None, -1)
    assert [node.target for node in calls(piece)] == [aten.neg.default]


def test_a_graph_without_calls() -> None:
    builder = Builder()
    x = builder.tangent(4)
    gm = builder.finish([x, x])
    inputs = random_inputs(gm)
    program, pieces = cut(gm, plan_by_hand(()))
    assert_same(run_program(program, pieces, inputs), [inputs[0], inputs[0]])


def test_as_drawn_in_the_module() -> None:
    builder = Builder()
    x, saved = builder.tangent(4), builder.saved(4)
    a = builder.call(aten.neg.default, x)
    b = builder.call(aten.mul.Tensor, a, saved)
    local = builder.call(aten.exp.default, b)
    program, pieces = cut(builder.finish([local, a, b], {1: 0, 2: 1}), plan_by_hand(specs_of_inner(builder), [1], [2]))
    assert [[node.target for node in calls(piece)] for piece in pieces] == [
        [aten.neg.default, aten.mul.Tensor],
        [aten.mul.Tensor, aten.mul.Tensor],
        [aten.exp.default],
    ]
    assert (program.inputs, program.scales, program.outputs) == (2, (torch.float32,), (7, (0, 0), (1, 0)))
    x_slot, saved_slot, scale_slot, a_slot, flat_a, b_slot = 0, 1, 2, 3, 4, 5
    first, second, third = program.steps
    assert (set(first.inputs), first.dead, first.bucket) == ({x_slot, scale_slot}, (x_slot,), 0)
    assert (set(first.outputs), first.flat) == ({a_slot, flat_a}, flat_a)
    assert set(second.inputs) == {a_slot, saved_slot, scale_slot}
    assert set(second.dead) == {a_slot, saved_slot, scale_slot}
    assert second.outputs[0] == b_slot
    assert third.inputs == (b_slot,)


def specs_of_inner(builder: Builder) -> Any:
    return specs_of(fx.GraphModule(builder.root, builder.graph))


def test_an_input_nobody_reads_dies_at_once() -> None:
    builder = Builder()
    unread, x = builder.tangent(4), builder.tangent(4)
    gm = builder.finish([builder.call(aten.neg.default, x), x], {0: 0})
    assert unread.users == {}
    program, pieces = cut(gm, plan_of(gm))
    assert 0 in program.steps[0].dead
    assert 1 not in program.steps[0].dead
    run_program(program, pieces, random_inputs(gm)[:2])


def test_constants_go_with_each_piece_that_reads_them() -> None:
    builder = Builder()
    x = builder.tangent(4)
    constant = builder.constant("constant", torch.arange(4.0))
    nodes = [builder.call(aten.mul.Tensor, x, constant) for _ in range(3)]
    gm = builder.finish([*nodes, constant], {0: 0, 1: 1})
    inputs = random_inputs(gm)
    expected = run_graph(gm, *inputs)
    program, pieces = cut(gm, plan_of(gm))
    assert [len(piece.graph.find_nodes(op="get_attr")) for piece in pieces] == [1, 1, 1]
    assert_same(run_program(program, pieces, inputs), expected)


@pytest.mark.parametrize("mine", [True, False])
def test_a_constant_may_be_an_output(mine: bool) -> None:
    builder = Builder()
    x = builder.tangent(4)
    constant = builder.constant("constant", torch.arange(4.0))
    gm = builder.finish([builder.call(aten.neg.default, x), constant], {0: 0, 1: 1} if mine else {0: 0})
    inputs = random_inputs(gm)
    expected = run_graph(gm, *inputs)
    program, pieces = cut(gm, plan_of(gm))
    assert_same(run_program(program, pieces, inputs), expected)


def test_results_of_one_call_never_cross_as_a_tuple() -> None:
    """The first result is packed in piece 0, the others are wanted later; and one is nested."""
    builder = Builder()
    x = builder.tangent(2, 2)
    norm = builder.call(aten.var_mean.correction, x, [0])
    variance = builder.call(operator.getitem, norm, 0)
    mean = builder.call(operator.getitem, norm, 1)
    late = builder.call(aten.exp.default, mean)
    gm = builder.finish([variance, late, mean], {0: 0, 1: 1})
    inputs = random_inputs(gm)
    expected = run_graph(gm, *inputs)
    program, pieces = cut(gm, plan_of(gm))
    assert len(pieces) == 2
    assert operator.getitem not in [node.target for node in calls(pieces[1])]
    assert_same(run_program(program, pieces, inputs), expected)


def test_collectives_of_the_model_stay_in_their_piece() -> None:
    builder = Builder()
    x = builder.tangent(4)
    mine = builder.call(WAIT, builder.call(ALL_REDUCE, x, "sum", "tensor-parallel"))
    a = builder.call(aten.neg.default, mine)
    b = builder.call(aten.sin.default, a)
    gm = builder.finish([a, b])
    plan = plan_of(gm)
    program, pieces = cut(gm, plan)
    assert len(program.steps) == 2
    assert [node.target for node in calls(pieces[0])][:3] == [ALL_REDUCE, WAIT, aten.neg.default]


def test_what_was_lost_on_the_way_is_noticed() -> None:
    """The interpreter that these tests trust does notice a slot that dies too early or too late."""
    builder = Builder()
    x = builder.tangent(4)
    nodes = [builder.call(aten.neg.default, x), builder.call(aten.sin.default, x)]
    gm = builder.finish(nodes)
    program, pieces = cut(gm, plan_of(gm))
    inputs = random_inputs(gm)[:1]
    first, second = program.steps
    early = replace(program, steps=(replace(first, dead=(0,)), second))
    with pytest.raises(AssertionError, match="empty slot"):
        run_program(early, pieces, inputs)
    late = replace(program, steps=(first, replace(second, dead=())))
    with pytest.raises(AssertionError, match="kept for nobody"):
        run_program(late, pieces, inputs)


# Symbolic sizes


def symbols(piece: fx.GraphModule) -> list[str]:
    """Symbols that a piece gets as integers, before anything else."""
    values = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    known = [isinstance(value, torch.SymInt) and value.node.expr.is_symbol for value in values]
    assert known == sorted(known, reverse=True)
    return [str(value) for value in values[: sum(known)]]


def sizes_in(piece: fx.GraphModule) -> set[str]:
    found: set[str] = set()
    for node in piece.graph.nodes:
        value = node.meta.get("val")
        for size in (*value.shape, *value.stride()) if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt):
                found |= {str(symbol) for symbol in size.node.expr.free_symbols}
    return found


def dynamic(*shape: int) -> Tensor:
    value = torch.randn(shape)
    torch._dynamo.mark_dynamic(value, 0)
    return value


class Reshaping(nn.Module):
    """Its activations have sizes that are expressions of two symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(torch.cat([x, y])).view(-1, 3) * self.scale
        return self.b(h.reshape(-1, 6)) * x.shape[0]


def check_captured(captured: Captured, cap: int = 1) -> tuple[Program, Pieces]:
    rewritten = captured.rewrite(cap)
    check_pieces(rewritten.program, rewritten.pieces)
    with torch.no_grad():
        expected = captured.backward(*captured.arguments)
        assert_same(run_program(rewritten.program, rewritten.pieces, captured.arguments), expected)
    return rewritten.program, rewritten.pieces


def test_pieces_get_the_symbols_of_their_sizes() -> None:
    captured = capture(Reshaping(), dynamic(5, 4), dynamic(7, 4))
    _, pieces = check_captured(captured)
    assert len(pieces) == 5
    for piece in pieces:
        assert sizes_in(piece) <= set(symbols(piece))
    assert any(map(sizes_in, pieces))


def test_a_piece_without_symbolic_sizes_gets_no_symbols() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), dynamic(5, 4))
    _, pieces = check_captured(captured)
    for piece in pieces:
        assert set(symbols(piece)) == sizes_in(piece)
    assert [] in map(symbols, pieces)


def test_a_size_that_the_data_decides() -> None:
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            chosen = torch.nonzero(x[:, 0] > 0).squeeze(1)
            return self.b(self.a(x)[chosen]).sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        captured = capture(Selecting(), torch.randn(9, 4))
    _, pieces = check_captured(captured)
    for piece in pieces:
        assert sizes_in(piece) <= set(symbols(piece))


def with_a_symbol_in_a_size_only() -> fx.GraphModule:
    """The second piece reads nothing but a tensor of twice the size of an input."""
    env = ShapeEnv()
    builder = Builder(env)
    size = symbolic(env, "a", 5)
    x = builder.tangent(size, 2)
    double = builder.call(aten.cat.default, [x, x])
    a = builder.call(aten.sum.dim_IntList, double, [0])
    b = builder.call(aten.sum.dim_IntList, builder.call(aten.sin.default, double), [0])
    return builder.finish([a, b])


def test_a_symbol_that_only_a_size_tells_is_asked_for() -> None:
    gm = with_a_symbol_in_a_size_only()
    (x,) = gm.graph.find_nodes(op="placeholder")
    (name,) = x.meta["val"].shape[0].node.expr.free_symbols
    inputs = random_inputs(gm, **{str(name): 5})
    expected = run_graph(gm, *inputs)
    program, pieces = cut(gm, plan_of(gm))
    assert [node.target for node in calls(pieces[0])].count(SIZE) == 1
    assert symbols(pieces[1]) == [str(name)]
    assert_same(run_program(program, pieces, inputs), expected)


def test_symbols_are_bound_once() -> None:
    gm = with_a_symbol_in_a_size_only()
    assert bind_symbols(gm) is gm
    gm.graph.lint()
    once = text(gm)
    assert once.count("sym_size") > 0
    assert "sym_size" in gm.code
    assert text(bind_symbols(gm)) == once


def test_known_symbols_are_left_alone() -> None:
    captured = capture(Reshaping(), dynamic(5, 4), dynamic(7, 4))
    before = text(captured.backward)
    bind_symbols(captured.backward)
    assert text(captured.backward) == before


def test_a_symbol_that_arises_in_the_backward() -> None:
    """`nonzero` in piece 0 decides a size; piece 1 sees it only doubled."""
    builder = Builder(ShapeEnv())
    x = builder.tangent(4)
    where = builder.call(aten.nonzero.default, x)
    double = builder.call(aten.cat.default, [where, where])
    a = builder.call(aten._to_copy.default, builder.call(aten.sum.default, double), dtype=torch.float32)
    more = builder.call(aten.mul.Tensor, double, double)
    b = builder.call(aten._to_copy.default, builder.call(aten.sum.default, more), dtype=torch.float32)
    gm = builder.finish([a, b])
    inputs = random_inputs(gm)
    expected = run_graph(gm, *inputs)
    program, pieces = cut(gm, plan_of(gm))
    assert len(symbols(pieces[1])) == 1
    assert_same(run_program(program, pieces, inputs), expected)


# Side effects


class Counting(torch.autograd.Function):
    """Counts its backwards in a buffer that the gradient depends on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.count = count
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scaled = grad * ctx.count
        ctx.count.add_(1)
        return scaled, None


class Counted(nn.Module):
    """Its backward writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.b(Counting.apply(self.a(x), self.count))


def test_a_backward_that_writes_to_a_buffer() -> None:
    model = Counted()
    captured = capture(model, torch.randn(3, 4))
    assert aten.copy_.default in [node.target for node in calls(captured.backward)]
    rewritten = captured.rewrite()
    apart = [value.clone() for value in captured.arguments]
    expected = captured.backward(*apart)
    assert_same(run_program(rewritten.program, rewritten.pieces, captured.arguments), expected)
    assert_same([model.count], [torch.full((4,), 3.0)])


# Higher-order operators


class Blocks(nn.Module):
    """Two checkpointed blocks, the second with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)


class Branching(nn.Module):
    """The data decides which layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.c(x)
        return torch.cond(h.sum() > 0, lambda h: self.a(h).sin(), lambda h: self.b(h).cos(), (h,))


class Attention(nn.Module):
    """Attention with a learned bias: the backward has a higher-order operator with nested results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).view(2, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y: Any = flex.flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + self.bias[h])
        return self.outer(y.transpose(1, 2).reshape(2, -1, 16))


@pytest.mark.parametrize("cap", [1, 200])
def test_checkpointed_blocks(cap: int) -> None:
    captured = capture(Blocks(), torch.randn(5, 4))
    assert any("rng_state" in str(target) for target in (node.target for node in calls(captured.backward)))
    check_captured(captured, cap)


def test_conditional_branches() -> None:
    program, pieces = check_captured(capture(Branching(), torch.randn(5, 4)))
    assert torch.ops.higher_order.cond in [node.target for piece in pieces for node in calls(piece)]
    assert len(program.plan.grads) == 6


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets flex attention trace a backward on the CPU, where it runs its plain implementation."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_attention() -> None:
    captured = capture(Attention(), torch.randn(2, 32, 16))
    program, pieces = check_captured(captured)
    assert torch.ops.higher_order.flex_attention_backward in [node.target for piece in pieces for node in calls(piece)]
    assert len(program.plan.grads) == 5


# Inductor


@pytest.fixture
def no_compile_workers() -> Iterator[None]:
    with torch._inductor.config.patch(compile_threads=1):
        yield


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
        parameter.grad = None
    return found


def check_inductor(model: nn.Module, *inputs: Any, cap: int) -> list[Any]:
    model(*inputs).sum().backward()
    expected = gradients(model)
    done = train_with_inductor(model, *inputs, cap=cap)
    found = gradients(model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
        assert found[name].stride() == parameter.stride()
    return done


@pytest.mark.usefixtures("no_compile_workers")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_inductor_compiles_pieces_of_a_convolutional_network(memory_format: torch.memory_format) -> None:
    """Its forward saves activations channels-last whatever the weights are; buckets are in the weights' order."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten())
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    (rewritten,) = check_inductor(model, torch.randn(2, 3, 6, 6), cap=500)
    assert len(rewritten.pieces) > 1
    assert max(len(bucket.grads) for bucket in rewritten.plan.buckets) > 1


@pytest.mark.usefixtures("no_compile_workers")
def test_inductor_compiles_a_piece_that_knows_a_symbol_from_elsewhere() -> None:
    gm = with_a_symbol_in_a_size_only()
    program, pieces = cut(gm, plan_of(gm))
    compiled = [compile_piece(piece, {"is_backward": True}) for piece in pieces]
    x = torch.randn(5, 2)
    total, sines = run_program(program, compiled, [x])
    torch.testing.assert_close(total, 2 * x.sum(0))
    torch.testing.assert_close(sines, 2 * x.sin().sum(0))


@pytest.mark.usefixtures("no_compile_workers")
def test_inductor_compiles_pieces_with_symbolic_sizes() -> None:
    (rewritten,) = check_inductor(Reshaping(), dynamic(5, 4), dynamic(7, 4), cap=150)
    assert len(rewritten.pieces) > 1
    assert any(map(symbols, rewritten.pieces))


@pytest.mark.parametrize(("parts", "expected"), [(2, 64), (16, 64), (64, 16), (2000, 1)])
def test_wide_packs_are_compiled_with_fewer_tries_to_fuse(
    parts: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = torch._inductor.config
    assert config.max_fusion_buffer_group_pairwise_attempts == 64
    builder = Builder()
    tangent = builder.tangent(3)
    gm = builder.finish([builder.call(aten.mul.Tensor, tangent, i) for i in range(parts)])
    _, pieces = cut(gm, plan_by_hand(specs_of(gm), range(parts)))
    seen: list[int] = []
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx_inner",
        lambda *_, **__: seen.append(config.max_fusion_buffer_group_pairwise_attempts),
    )
    for piece in pieces:
        compile_piece(piece, {})
    assert seen == [expected]
    assert config.max_fusion_buffer_group_pairwise_attempts == 64
