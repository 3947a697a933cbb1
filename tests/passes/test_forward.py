"""A forward in pieces computes what the whole computes, and reads each parameter no earlier than it must."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fxddp import _compat
from fxddp.passes.forward import ForwardProgram, cut_forward, first_reads
from fxddp.passes.verify import verify_forward


def forward_of(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """AOTAutograd's forward graph of a function of tensors."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        found.append(_compat.copy_graph(gm))
        return _compat.mark_boxed(lambda values: gm(*values))

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        other: Any = lambda gm, _: _compat.mark_boxed(lambda values: gm(*values))  # noqa: E731
        return _compat.aot_compile(gm, examples, forward=keep, backward=other, inference=other)

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (gm,) = found
    return gm


def run(program: ForwardProgram, pieces: Sequence[fx.GraphModule], inputs: Sequence[Any]) -> list[Any]:
    values: list[Any] = [*inputs, *[None] * (program.slots - len(inputs))]
    for piece, step in zip(pieces, program.steps, strict=True):
        results = piece(*(values[slot] for slot in step.inputs))
        for slot in step.dead:
            values[slot] = None
        for slot, result in zip(step.outputs, results, strict=True):
            values[slot] = result
    found = [None if slot is None else values[slot] for slot in program.outputs]
    for position, constant in program.constants.items():
        found[position] = constant
    return found


def chain(weights: Sequence[Tensor], x: Tensor, kinds: Sequence[int]) -> Tensor:
    for weight, kind in zip(weights, kinds, strict=True):
        if kind == 0:
            x = x @ weight.t()
        elif kind == 1:
            x = (x.half() @ weight.half()).float().tanh()
        elif kind == 2:
            x = F.dropout(x + weight[0], 0.5)
        else:
            x = x + weight.view(2, -1).sum()
    return x


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 200), st.data())
def test_pieces_compute_the_same(kinds: list[int], size: int, data: st.DataObject):
    several = [torch.randn(4, 4, requires_grad=True) for _ in kinds]
    order = data.draw(st.permutations(range(len(kinds))))
    gm = forward_of(lambda x, *ws: chain([ws[i] for i in order], x, kinds), torch.randn(3, 4), *several)
    names = [node.meta["desc"].idx for node in gm.graph.find_nodes(op="placeholder")]
    parameters = {idx for idx, node in zip(names, gm.graph.find_nodes(op="placeholder"), strict=True)
                  if tuple(node.meta["val"].shape) == (4, 4)}  # fmt: skip
    reads = first_reads(gm)
    inputs = [torch.randn(tuple(node.meta["val"].shape)) for node in gm.graph.find_nodes(op="placeholder")]
    found = cut_forward(_compat.copy_graph(gm), parameters=parameters, size=size)
    if found is None:
        return
    program, pieces = found
    verify_forward(program, inputs=len(inputs))
    read = [position for step in program.steps for position in step.reads if position in parameters]
    assert set(read) == parameters
    assert [reads[p] for p in read] == sorted(reads[p] for p in read), "in the order of first use"
    for step in program.steps[:-1]:
        assert sum(position in parameters for position in step.reads) * 64 >= min(size, 64), "none is smaller"
    torch.manual_seed(0)
    whole = gm(*inputs)
    torch.manual_seed(0)
    for got, expected in zip(run(program, pieces, inputs), whole, strict=True):
        assert torch.equal(got, expected) if isinstance(expected, Tensor) else got == expected


def test_views_and_casts_wait_for_whoever_computes_with_them():
    def function(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        later = second.t().half()
        return (x @ first).half() @ later

    gm = forward_of(function, torch.randn(3, 4), *(torch.randn(4, 4, requires_grad=True) for _ in range(2)))
    found = cut_forward(gm, parameters={0, 2}, size=64)  # as Dynamo has them: second, x, first
    assert found is not None
    program, pieces = found
    assert [tuple(p for p in step.reads if p != 1) for step in program.steps] == [(2,), (0,)]
    targets = [str(node.target) for node in pieces[0].graph.nodes if node.op == "call_function"]
    assert sum("convert" in target or "to_copy" in target for target in targets) == 1, targets
