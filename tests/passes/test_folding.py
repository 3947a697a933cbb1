"""The factor of a bucket, folded into what computes a gradient: which ones, and that the values stay the same."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxddp._compat import calls_products
from fxddp.passes.allreduce import SCALE_META, insert_allreduce, scale_dtypes
from fxddp.passes.compress import CONVERT, compress
from fxddp.passes.cost import graph_work, node_work
from fxddp.passes.folding import FOLDED_META, SCALED_MM, WORTHWHILE, fold_scale
from fxddp.passes.outline import outline
from fxddp.passes.schedule import schedule
from fxddp.passes.split import bind_symbols, split
from fxddp.passes.verify import snapshot, verify
from tests.passes.graphs import (
    GROUP,
    WAY,
    Builder,
    Drawn,
    assert_same,
    aten,
    backwards,
    calls,
    capture,
    plan_by_hand,
    plan_of,
    random_inputs,
    run_graph,
    run_program,
    scales_for,
    specs_of,
    text,
    train_with_inductor,
)

Chain = Callable[[Builder, fx.Node], fx.Node]


def product(chain: Chain, *, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """The gradients of a weight, which is `chain` of a product of shape (3, 4), and of a bias."""
    builder = Builder()
    x, tangent = builder.saved(5, 3, dtype=dtype), builder.tangent(5, 4, dtype=dtype)
    weight = builder.call(aten.mm.default, builder.call(aten.permute.default, x, [1, 0]), tangent)
    return builder.finish([chain(builder, weight), builder.call(aten.sum.dim_IntList, tangent, [0])])


def products(gm: fx.GraphModule) -> int:
    return sum(node.target is SCALED_MM for node in calls(gm))


def check(
    gm: fx.GraphModule, expected: int, strides: dict[int, Sequence[int]] | None = None, wire: Any = None
) -> fx.GraphModule:
    """Rewrites a graph with both gradients in one bucket; its values, whole and in pieces, are those of before."""
    inputs, before = random_inputs(gm), snapshot(gm)
    multiplied = sum(node.target is aten.mm.default for node in calls(gm))
    exact = run_graph(gm, *inputs)
    plan = plan_by_hand(specs_of(gm, strides), list(range(len(before))))
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    compress(gm, wire=wire)
    assert fold_scale(gm, worthwhile=0) is gm
    assert products(gm) == expected
    assert sum(node.target is aten.mm.default for node in calls(gm)) == multiplied - expected
    schedule(gm)
    bind_symbols(gm)
    verify(gm, plan=plan, before=before, way=WAY, wire=wire)
    for scale in (1.0, 0.5):
        scaled = [value * scale for value in exact]
        program, pieces = split(gm, plan=plan)
        assert_same(run_program(program, pieces, inputs, scale), scaled)
        whole = run_graph(gm, *inputs, *scales_for(scale_dtypes(plan), scale))
        assert_same(whole, scaled if wire is None else [value.to(wire).to(value.dtype) for value in scaled])
    return gm


def plain(_: Builder, node: fx.Node) -> fx.Node:
    return node


def transposed(builder: Builder, node: fx.Node) -> fx.Node:
    return builder.call(aten.permute.default, node, [1, 0])


def there_and_back(builder: Builder, node: fx.Node) -> fx.Node:
    return transposed(builder, builder.call(aten.t.default, node))


def reshaped(builder: Builder, node: fx.Node) -> fx.Node:
    return builder.call(aten.view.default, node, [3, 2, 2])


def flat(builder: Builder, node: fx.Node) -> fx.Node:
    return builder.call(aten.reshape.default, node, [-1])


@pytest.mark.parametrize("chain", [plain, transposed, there_and_back, reshaped, flat])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_views_of_a_product(chain: Chain, dtype: torch.dtype) -> None:
    check(product(chain, dtype=dtype), 1)


def test_in_the_strides_of_the_parameter() -> None:
    check(product(plain), 1, {0: (1, 3)})
    check(product(transposed), 1, {0: (1, 4)})
    check(product(reshaped), 1, {0: (1, 6, 3)})


def test_parts_of_a_product_that_lie_apart_are_copied() -> None:
    """As channels-last weights: no product writes in that order."""
    check(product(lambda b, n: b.call(aten.permute.default, reshaped(b, n), [1, 0, 2])), 0, {0: (6, 2, 1)})
    check(product(reshaped), 0, {0: (2, 6, 1)})


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_what_travels_is_cast_from_it(wire: torch.dtype) -> None:
    check(product(transposed), 1, wire=wire)


def test_alone_in_its_bucket() -> None:
    builder = Builder()
    gm = builder.finish([builder.call(aten.mm.default, builder.saved(3, 5), builder.tangent(5, 4))])
    check(gm, 1)


def test_a_product_that_is_read_elsewhere_stays() -> None:
    builder = Builder()
    weight = builder.call(aten.mm.default, builder.saved(3, 5), builder.tangent(5, 4))
    gm = builder.finish([weight, builder.call(aten.sin.default, weight)])
    check(gm, 0)


def test_what_is_no_product_by_itself_stays() -> None:
    check(product(lambda b, n: b.call(aten.add.Tensor, n, n)), 0)
    check(product(lambda b, n: b.call(aten.mul.Tensor, n, 2.0)), 0)
    check(product(lambda b, n: b.call(aten.mul.Tensor, n, b.saved(3, 4))), 0)
    builder = Builder()
    x, tangent = builder.saved(3, 5, dtype=torch.complex64), builder.tangent(5, 4, dtype=torch.complex64)
    check(builder.finish([builder.call(aten.mm.default, x, tangent)]), 0)


@settings(max_examples=60)
@given(backwards(writes=True) | backwards())
def test_any_graph(drawn: Drawn) -> None:
    gm, turned = drawn
    inputs, before = random_inputs(gm), snapshot(gm)
    exact = run_graph(gm, *inputs)
    plan = plan_of(gm, cap=40, strides=turned)
    planned = {grad.output for grad in plan.grads}
    insert_allreduce(gm, plan=plan, groups=[GROUP])
    fold_scale(gm, worthwhile=0)
    schedule(gm)
    bind_symbols(gm)
    verify(gm, plan=plan, before=before, way=WAY)
    program, pieces = split(gm, plan=plan)
    halves = [value * 0.5 if i in planned else value for i, value in enumerate(exact)]
    assert_same(run_program(program, pieces, inputs, 0.5), halves)


def table(*, accumulate: bool = True, zeros: float = 0, again: bool = False) -> fx.GraphModule:
    """The gradients of a table of (7, 2), of which rows were picked, and of what they were multiplied with."""
    builder = Builder()
    indices = builder.constant("indices", torch.tensor([1, 3, 1]))
    rows, tangent = builder.tangent(3, 2), builder.tangent(4)
    start = builder.call(aten.full.default, [7, 2], float(zeros))
    gradient = builder.call(aten.index_put.default, start, [indices], rows, accumulate)
    outputs = [builder.call(aten.view.default, gradient, [2, 7]), builder.call(aten.sin.default, tangent)]
    return builder.finish([*outputs, builder.call(aten.cos.default, gradient)] if again else outputs)


def scaled_sums(gm: fx.GraphModule) -> int:
    """How often the factor multiplies what has the size of the table."""
    return sum(node.target is aten.mul.Tensor and node.meta["val"].numel() == 14 for node in calls(gm))


@pytest.mark.parametrize("make", [lambda: product(plain), table])
def test_a_wrong_factor_or_gradient_is_noticed(make: Callable[[], fx.GraphModule]) -> None:
    for spoil in ("factor", "gradient", "nothing"):
        gm = make()
        before, plan = snapshot(gm), plan_by_hand(specs_of(gm), [0, 1])
        insert_allreduce(gm, plan=plan, groups=[GROUP])
        fold_scale(gm, worthwhile=0)
        folded = [node for node in calls(gm) if FOLDED_META in node.meta]
        assert len(folded) == 1
        if spoil == "gradient":
            folded[0].meta[FOLDED_META] = before[1]
        if spoil == "factor":
            (factor,) = (node for node in gm.graph.find_nodes(op="placeholder") if SCALE_META in node.meta)
            other = gm.graph.find_nodes(op="placeholder")[0]
            first = next(user for user in factor.users if user.meta["val"].dim() != 1 or user.target is SCALED_MM)
            first.args = (*first.args[:-1], other)
        with nullcontext() if spoil == "nothing" else pytest.raises(AssertionError, match="sends"):
            verify(gm, plan=plan, before=before, way=WAY)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_rows_of_a_table(wire: Any) -> None:
    assert scaled_sums(check(table(), 0, wire=wire)) == 0


def test_the_outline_knows_tables() -> None:
    gm = table()
    assert [note.rows for note in outline(gm, specs_of(gm)).grads.values()] == [True, False]


def test_other_tables_stay() -> None:
    """One that is no sum of what is put into it, or that something else reads."""
    for gm in (table(accumulate=False), table(zeros=1), table(again=True)):
        before = sum(node.target is aten.cos.default for node in calls(gm))
        assert scaled_sums(check(gm, 0)) == 1 + before


def test_small_products_stay() -> None:
    def rewritten(rows: int) -> fx.GraphModule:
        builder = Builder()
        gm = builder.finish([builder.call(aten.mm.default, builder.saved(rows, 2), builder.tangent(2, 64))])
        insert_allreduce(gm, plan=plan_by_hand(specs_of(gm), [0]), groups=[GROUP])
        before = text(gm)
        assert (text(fold_scale(gm)) == before) == (rows * 64 * 4 < WORTHWHILE)
        return gm

    enough = WORTHWHILE // 256
    assert [products(rewritten(rows)) for rows in (enough - 1, enough)] == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sums_are_scaled_before_they_are_rounded(dtype: torch.dtype) -> None:
    """Two gradients of 40,000 average to 40,000; a sum of 80,000 halves to 40,000 even in float16."""
    a, b = torch.full((2, 2), 200.0, dtype=dtype), torch.full((2, 2), 200.0, dtype=dtype)
    found = SCALED_MM(a, b, torch.tensor(0.5))
    assert torch.equal(found, torch.full((4,), 40_000.0, dtype=dtype))


def test_work_of_a_cast_product() -> None:
    """What is cast from its place is read there."""
    gm = product(plain)
    insert_allreduce(gm, plan=plan_by_hand(specs_of(gm), [0, 1]), groups=[GROUP])
    compress(gm, wire=torch.bfloat16)
    fold_scale(gm, worthwhile=0)
    work = node_work(gm)
    casts = [work[node].nbytes for node in calls(gm) if node.target is CONVERT and SCALED_MM in reads(node)]
    assert casts == [3 * 4 * 4]
    assert all(each.nbytes >= 0 for each in work.values())


def reads(node: fx.Node) -> list[Any]:
    return [source.target for source in node.all_input_nodes]


def test_work_of_a_product() -> None:
    gm = product(plain)
    insert_allreduce(gm, plan=plan_by_hand(specs_of(gm), [0, 1]), groups=[GROUP])
    before = graph_work(gm)
    fold_scale(gm, worthwhile=0)
    after = graph_work(gm)
    assert before.flops - 3 * 4 == after.flops, "the product counts as one, and the multiplication is not there"
    assert before.nbytes - 2 * 3 * 4 * 4 == after.nbytes, "nor is it read and written once more"


class Weights(nn.Module):
    """Weights used as they are and transposed, in one dtype and in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(96, 192), nn.Linear(160, 256, bias=False, dtype=torch.bfloat16)
        self.plain = nn.Parameter(torch.randn(192, 160) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(torch.tanh(self.first(x)) @ self.plain).bfloat16())


class Written(TorchDispatchMode):
    """Collects where products are written: which part of how many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fxddp.scaled_mm.out:
            out = kwargs["out"]
            start, whole = out.storage_offset(), out.untyped_storage().nbytes() // out.itemsize
            self.found.append((start, start + out.numel(), whole))
        return func(*args, **kwargs or {})


def test_inductor_writes_them_to_their_places() -> None:
    torch.manual_seed(0)
    model, x = Weights(), torch.randn(7, 96)
    written = Written()

    def backward(result: Tensor) -> None:
        with written:
            result.float().square().sum().backward()

    with torch._inductor.config.patch(fx_graph_cache=False):  # how it lowers products is no part of a graph
        (rewritten,) = train_with_inductor(model, x, cap=1 << 20, backward=backward)
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).float().square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    last, first = rewritten.plan.buckets
    assert [len(bucket.grads) for bucket in (last, first)] == [1, 3]
    places = {grad.numel: offset for grad, offset in zip(first.grads, first.offsets, strict=True)}
    parts = [(places[n], places[n] + n, first.numel) for n in (192 * 160, 192 * 96)]
    assert written.found == [(0, last.numel, last.numel), *parts]
    assert products(capture(model, x).rewrite().gm) == 0


@pytest.mark.parametrize("setting", ["cpp_wrapper", "max_autotune", "max_autotune_gemm"])
def test_inductor_settings_that_do_not_call_products_as_they_are(setting: str) -> None:
    assert calls_products()
    with torch._inductor.config.patch({setting: True}):
        assert not calls_products()
