"""Hypothesis strategies shared by the tests."""

import itertools
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from fxddp.passes.plan import GradSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
DEVICES = (torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1))  # as data: nothing is allocated


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dimension `order[0]` is the outermost in memory; row-major by default."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of parameters: mostly small, some empty, some large."""
    small = st.lists(st.integers(0, 6), max_size=4).map(tuple)
    notable = st.sampled_from([(), (0,), (1,), (2,), (5, 0, 3), (64, 3, 7, 7), (1000,), (4096, 4096), (1 << 31, 3)])
    return small | notable


def kinds() -> st.SearchStrategy[tuple[torch.dtype, torch.device]]:
    """What gradients of one bucket share."""
    return st.tuples(st.sampled_from(DTYPES), st.sampled_from(DEVICES))


@st.composite
def grad_lists(draw: st.DrawFn, *, min_size: int = 0, max_size: int = 16) -> list[GradSpec]:
    """Gradients of one backward graph, as a graph could have them: in ready order, with outputs in any order.

    Few kinds occur in one list, so that buckets of one kind meet; `ready` has gaps and ties.
    """
    some_kinds = draw(st.lists(kinds(), min_size=1, max_size=3))
    rows = draw(
        st.lists(
            st.tuples(shapes(), st.sampled_from(some_kinds), st.integers(0, 2), st.integers(0, 23)),
            min_size=min_size,
            max_size=max_size,
        )
    )
    outputs = draw(st.permutations(range(len(rows))))
    shift = draw(st.integers(0, 2))  # placeholders that are no parameters come first
    grads, ready = [], 0
    for output, (shape, (dtype, device), gap, layout) in zip(outputs, rows, strict=True):
        ready += gap
        orders = list(itertools.permutations(range(len(shape))))
        stride = dense_strides(shape, orders[layout % len(orders)])
        tangents = frozenset(bit for bit in range(3) if layout >> bit & 1)
        grads.append(GradSpec(output, output + shift, ready, shape, stride, dtype, device, tangents))
    return grads


@st.composite
def caps(draw: st.DrawFn, grads: Sequence[GradSpec] = ()) -> int:
    """A size limit in bytes, from 1 to more than all gradients, often exactly what some of them take."""
    total = sum(grad.nbytes for grad in grads)
    choice = draw(st.sampled_from(["few", "run", "any", "mib"]))
    if choice == "few":
        return draw(st.integers(1, 64))
    if choice == "run" and grads:
        start = draw(st.integers(0, len(grads) - 1))
        run = grads[start : draw(st.integers(start, len(grads) - 1)) + 1]
        return max(1, sum(grad.nbytes for grad in run if grad.dtype is run[0].dtype) + draw(st.integers(-1, 1)))
    if choice == "mib":
        return draw(st.integers(1, 25)) << 20
    return draw(st.integers(1, max(total, 64) + 1))


@st.composite
def planning_inputs(draw: st.DrawFn, *, min_size: int = 0, max_size: int = 16) -> tuple[list[GradSpec], int, int]:
    """Gradients with the `cap` and `first_cap` to plan them under."""
    grads = draw(grad_lists(min_size=min_size, max_size=max_size))
    return grads, draw(caps(grads)), draw(caps(grads))


def some_grad(output: int, *shape: int, ready: int | None = None, dtype: torch.dtype = torch.float32) -> GradSpec:
    """A gradient with the fields a test does not name filled in; ready in order of outputs unless said otherwise."""
    return GradSpec(
        output=output,
        input=output,
        ready=output if ready is None else ready,
        shape=shape,
        stride=dense_strides(shape),
        dtype=dtype,
        device=torch.device("cpu"),
        tangents=frozenset({0}),
    )
