"""Tables: which gradients are zero but for some rows, which rows these are, and how much they are to send."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fxddp.passes.cost import Network
from fxddp.passes.pipeline import rewrite_backward
from fxddp.passes.plan import GradSpec
from fxddp.passes.tables import INDEX, find_tables, traffic
from tests.passes.graphs import (
    WAY,
    Builder,
    Captured,
    assert_same,
    aten,
    capture,
    random_inputs,
    run_graph,
    run_program,
    specs_of,
    train_with_inductor,
)

Read = Callable[["Model", Tensor], Tensor]
ENTRIES, WIDTH = 50, 4


class Model(nn.Module):
    """A table, read in some way, and a layer after it."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read
        self.table = nn.Parameter(torch.randn(ENTRIES, WIDTH))
        self.embedding = nn.Embedding(ENTRIES, WIDTH, padding_idx=3)
        self.bag = nn.EmbeddingBag(ENTRIES, WIDTH, mode="mean")
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.read(self, x)).tanh()


def autocast(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (model.layer(F.embedding(x, model.table)) @ model.layer.weight).float()


TABLES: dict[str, tuple[Read, int]] = {
    "embedding": (lambda m, x: m.embedding(x), 12),
    "index": (lambda m, x: m.table[x], 12),
    "negative index": (lambda m, x: m.table[-x], 12),
    "index of int32": (lambda m, x: F.embedding(x.int(), m.table), 12),
    "computed index": (lambda m, x: m.table[x * 7 % ENTRIES], 12),
    "frequency": (lambda m, x: F.embedding(x, m.table, scale_grad_by_freq=True), 12),
    "bag": (lambda m, x: m.bag(x), 12),
    "select": (lambda m, x: m.table.index_select(0, x[0]), 3),
    "row by row": (lambda m, x: m.table.index_select(0, x[0]) + m.table[x[1]], 6),
    "twice": (lambda m, x: m.embedding(x) + m.embedding(x.flip(0)), 24),
    "in half precision": (lambda m, x: F.embedding(x, m.table.half()).float(), 12),
    "autocast": (autocast, 12),
}

OTHERS: dict[str, Read] = {
    "mask": lambda m, x: m.table[torch.zeros(ENTRIES, dtype=torch.bool).index_fill(0, x[0], True)],
    "elements": lambda m, x: m.table[x, x % WIDTH].unsqueeze(-1).expand(-1, -1, WIDTH),
    "columns": lambda m, x: m.table[:, x[0] % WIDTH].sum(0).unsqueeze(-1).expand(-1, WIDTH),
    "tied": lambda m, x: F.embedding(x, m.table) @ m.table.T @ m.table,
    "everything": lambda m, x: m.table * x.sum(),
    "range": lambda m, x: m.table[: x.shape[1]] * x.sum(),
    "stored by columns": lambda m, x: m.table.T[x % WIDTH][..., :WIDTH],
    "also penalised": lambda m, x: m.table[x] + m.table.square().sum(),
    "by value": lambda m, x: m.table.gather(0, x[:, :1].expand(-1, WIDTH)),
    "one-hot": lambda m, x: F.one_hot(x, ENTRIES).float() @ m.table,
}


def indices_of(captured: Captured) -> dict[str, Tensor]:
    """What the indices found for each table are in the run that was captured, by the parameter's name."""
    grads = captured.grads()
    nodes = find_tables(captured.backward, grads.values())
    interpreter = fx.Interpreter(captured.backward, garbage_collect_values=False)
    interpreter.run(*captured.arguments)
    return {
        name: torch.cat([interpreter.env[node].flatten() for node in nodes[grad.output]])
        for name, grad in grads.items()
        if grad.output in nodes
    }


def read(read: Read) -> tuple[Captured, dict[str, Tensor]]:
    """The backward of a model that reads some rows, and its gradients in eager mode."""
    torch.manual_seed(0)
    model = Model(read)
    x = torch.randint(1, ENTRIES, (4, 3), generator=torch.Generator().manual_seed(1))
    captured = capture(model, x)
    model.zero_grad()
    model(x).sum().backward()
    return captured, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_has_no_other_rows(kind: str) -> None:
    captured, gradients = read(TABLES[kind][0])
    found = indices_of(captured)
    assert [name.partition(".")[0] for name in found] in (["table"], ["embedding"], ["bag"])
    for name, indices in found.items():
        rows = set((indices % ENTRIES).tolist())
        assert rows.issuperset(gradients[name].abs().sum(1).nonzero().flatten().tolist())
        assert indices.numel() == TABLES[kind][1]
    (grad,) = (grad for grad in captured.rewrite().plan.grads if grad.rows is not None)
    assert grad.rows == TABLES[kind][1]


@pytest.mark.parametrize("kind", OTHERS)
def test_what_has_other_rows_is_no_table(kind: str) -> None:
    captured, _ = read(OTHERS[kind])
    assert indices_of(captured) == {}
    assert not captured.rewrite().program.tables


@pytest.mark.parametrize("kind", ["embedding", "index", "bag", "select", "row by row", "frequency", "twice"])
def test_as_inductor_writes_it(kind: str) -> None:
    """Its decompositions make other operators of a lookup."""
    make, rows = TABLES[kind]
    (rewritten,) = train_with_inductor(Model(make), torch.randint(1, ENTRIES, (4, 3)))
    (table,) = rewritten.program.tables
    assert table.count(()) == rows


def test_dynamic_numbers_are_those_of_an_input() -> None:
    """Of the index, if it is one, or of what it was computed from."""
    for read, inputs in ((lambda m, x: m.table[x], 1), (lambda m, x: m.table[x * 7 % ENTRIES], 1)):
        model = Model(read)
        captured = capture(model, torch.randint(1, ENTRIES, (6, 3)), dynamic=True)
        (table,) = captured.rewrite().program.tables
        assert (table.rows, len(table.alike)) == (0, inputs)
        (grad,) = (grad for grad in captured.rewrite().plan.grads if grad.rows is not None)
        assert (table.count(captured.arguments), grad.rows) == (18, 18)


def put(builder: Builder, index: fx.Node, rows: fx.Node, table: Any = None, *, accumulate: bool = True) -> fx.Node:
    """A table with rows put into it."""
    table = table or builder.call(aten.full.default, [20, 2], 0.0)
    return builder.call(aten.index_put.default, table, [index], rows, accumulate)


def test_by_hand() -> None:
    """Tables on tables, values in place of sums, and what looks like either and is not."""
    builder = Builder()
    one, other = (builder.saved(6, dtype=torch.int64) for _ in range(2))
    rows, dense = builder.tangent(6, 2), builder.tangent(20, 2)
    first = put(builder, one, rows)
    ones = builder.call(aten.full.default, [20, 2], 1.0)
    columns, mask = builder.saved(2, dtype=torch.int64), builder.saved(20, dtype=torch.bool)
    zeros, added = builder.call(aten.full.default, [20, 2], 0.0), builder.call(aten.mul.Tensor, dense, 2)
    outputs = [
        first,
        put(builder, other, rows, first),
        put(builder, one, rows, accumulate=False),
        builder.call(aten.add.Tensor, first, put(builder, one, rows)),
        put(builder, one, rows, ones),
        put(builder, one, rows, dense),
        builder.call(aten.add.Tensor, first, dense),
        builder.call(aten.add.Tensor, first, 1.0),
        builder.call(aten.mul.Tensor, first, dense),
        builder.call(aten.index_add.default, zeros, 1, columns, added),
        put(builder, mask, builder.call(aten.select.int, rows, 0, 0)),
    ]
    gm = builder.finish(outputs)
    assert find_tables(gm, specs_of(gm)) == {0: (one,), 1: (other, one), 2: (one,), 3: (one,)}


def test_a_table_that_is_read_in_every_step_of_a_long_loop() -> None:
    builder = Builder()
    index, rows = builder.saved(6, dtype=torch.int64), builder.tangent(6, 2)
    total = put(builder, index, rows)
    for _ in range(1500):
        total = builder.call(aten.add.Tensor, total, total)
    gm = builder.finish([total])
    assert find_tables(gm, specs_of(gm)) == {0: (index,)}


@pytest.mark.parametrize(("device", "rows"), [("cuda", 6), ("cpu", None)])
def test_indices_lie_beside_their_table(device: str, rows: int | None) -> None:
    """Torch takes those of the host for a table on a GPU; they would have to be copied there to be sent."""
    builder = Builder()
    index, tangent = builder.saved(6, dtype=torch.int64, device=device), builder.tangent(6, 2, device="cuda")
    zeros = builder.call(aten.full.default, [20, 2], 0.0, device=torch.device("cuda", 0))
    gm = builder.finish([put(builder, index, tangent, zeros)])
    assert bool(find_tables(gm, specs_of(gm))) == (rows is not None)


def test_what_is_stored_in_another_order_is_no_table() -> None:
    builder = Builder()
    gm = builder.finish([put(builder, builder.saved(6, dtype=torch.int64), builder.tangent(6, 2))])
    assert find_tables(gm, specs_of(gm))
    assert not find_tables(gm, specs_of(gm, {0: (1, 20)}))


def test_indices_stay_until_their_bucket_leaves() -> None:
    """They may be computed in an earlier piece, serve two tables, or be read by nobody else."""
    builder = Builder()
    saved, rows, dense = builder.saved(6, dtype=torch.int64), builder.tangent(6, 2), builder.tangent(20, 2)
    index = builder.call(aten.remainder.Scalar, builder.call(aten.add.Tensor, saved, 3), 20)
    first = builder.call(aten.embedding.default, dense, index)
    gm = builder.finish([first, *(put(builder, each, rows) for each in (index, index, saved))])
    inputs = [value.abs() % 20 if value.dtype == torch.int64 else value for value in random_inputs(gm)]
    expected = run_graph(gm, *inputs)
    parameters = {grad.input: torch.empty(grad.shape) for grad in specs_of(gm)}
    done = rewrite_backward(gm, parameters=parameters, forward_outputs=(), cap=1, first_cap=1, way=WAY)
    assert [(table.bucket, table.rows) for table in done.program.tables] == [(1, 6), (2, 6), (3, 6)]
    assert [len(step.outputs) for step in done.program.steps] == [2, 1, 1, 1], (
        "an index is handed on by whoever reads it"
    )
    assert_same(run_program(done.program, done.pieces, inputs), expected)


@example(world=2, rows=5, entries=20, width=2, itemsize=4)
@given(st.integers(2, 64), st.integers(0, 5000), st.integers(1, 3000), st.integers(1, 64), st.sampled_from([2, 4]))
def test_rows_travel_where_they_halve_what_does(world: int, rows: int, entries: int, width: int, itemsize: int) -> None:
    grad = GradSpec(0, 0, 0, (entries, width), (width, 1), torch.float32, torch.device("cpu"), frozenset(), rows)
    gathered = (world - 1) * rows * (INDEX + width * itemsize)  # what a rank sends of an all-gather
    summed = Network(world, 1.0, 0.0).sent(entries * width * itemsize)
    found = traffic(rows, grad, world, itemsize)
    assert (found is not None) == (gathered <= summed / 2 * (1 + 1e-12))
    if found is not None:
        assert Network(world, 1.0, 0.0).sent(found) == pytest.approx(gathered, abs=2 * world)
