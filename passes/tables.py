"""Finds gradients that are tables of zeros but for a few rows: those of embeddings, and of weights read by index.

    grad = index_put(zeros, indices, rows, accumulate)       only the rows at `indices` can differ from zero
    grad = embedding_dense_backward(rows, indices, …)

So ranks need not send the table: they send each other the rows, and where they belong. That is the all-gather that
Horovod makes of TensorFlow's IndexedSlices (A. Sergeev, M. Del Balso, arXiv:1802.05799), here of dense gradients: they
stay as dense as they were. Whether it is less depends on the batch and on the number of ranks, as everybody receives
everybody's rows (`traffic`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .cost import power_of_two
from .gradients import graph_outputs
from .layout import contiguous_strides
from .plan import BucketPlan, GradSpec

__all__ = ["INDEX", "Table", "find_tables", "message_bytes", "roughly", "tables_of", "traffic", "with_rows"]

INDEX = 8
"""Bytes that tell where a row belongs."""

_ZEROS = ("aten.full", "aten.zeros", "aten.new_zeros", "aten.zeros_like")
"""What may make a table of zeros; `full` only if that is its value."""
_SAME = {"aten.add": 2, "prims.convert_element_type": 1, "aten._to_copy": 1}
"""What has no other rows than the tables it is given, which are its first arguments, so many."""
_ROWS = {
    "aten.index_add": 2,
    "aten.index_put": 1,
    "aten._unsafe_index_put": 1,
    "aten._unsafe_masked_index_put_accumulate": 2,
    "aten.embedding_dense_backward": 1,
    "aten._embedding_bag_backward": 1,
}
"""What puts rows into a table, and which argument tells where; the table is the first one."""
_NEW = ("aten.embedding_dense_backward", "aten._embedding_bag_backward")
"""Those that put them into a new one."""


@dataclass(frozen=True, slots=True)
class Table:
    """A gradient in a bucket of which only some rows can differ from zero.

    Attributes:
        bucket, position: the gradient.
        slots: where the program has the indices of those rows.
        rows: how many indices there are, without those whose number is dynamic.
        alike: for each of the latter, an input of the backward that has as many elements.
    """

    bucket: int
    position: int
    slots: tuple[int, ...]
    rows: int
    alike: tuple[int, ...] = ()

    def count(self, inputs: Sequence[Any]) -> int:
        """How many rows there are in a backward that is called with these values."""
        return self.rows + sum(int(inputs[slot].numel()) for slot in self.alike)


def message_bytes(rows: int, width: int, itemsize: int) -> int:
    """Bytes of rows of so many elements, and of what tells where they belong."""
    return rows * (INDEX + width * itemsize)


def traffic(rows: int, grad: GradSpec, world_size: int, itemsize: int) -> int | None:
    """Bytes of the all-reduce that is as much to send as the rows of a table, gathered by all ranks; None if not less.

    Rows must halve what travels: taking them out of the table and adding them up costs memory traffic of its own.

    Args:
        rows: how many each rank has.
        grad: the table.
        world_size: the number of ranks, N: each sends (N-1) times its rows, or 2(N-1)/N of an all-reduce.
        itemsize: bytes of an element that travels.
    """
    width = grad.numel // max(1, grad.shape[0])
    nbytes = world_size * message_bytes(rows, width, itemsize)
    return nbytes // 2 if nbytes <= grad.numel * itemsize else None


def roughly(grad: GradSpec) -> GradSpec:
    """A gradient with as many rows as the nearest power of two, so that ranks with other batches plan the same."""
    return grad if grad.rows is None else replace(grad, rows=power_of_two(grad.rows))


def find_tables(gm: fx.GraphModule, grads: Iterable[GradSpec]) -> dict[int, tuple[fx.Node, ...]]:
    """Finds the gradients that are tables of a few rows, and the nodes that give the indices of these.

    Args:
        gm: a backward graph before it is rewritten.
        grads: its gradients.

    Returns:
        By output of the backward.
    """
    results = graph_outputs(gm.graph)
    found = {}
    for grad in grads:
        lies_by_rows = grad.shape and grad.stride == contiguous_strides(grad.shape)
        if not (lies_by_rows and grad.numel and grad.dtype.is_floating_point):
            continue
        indices = _indices(results[grad.output], grad)
        if indices:
            found[grad.output] = tuple(dict.fromkeys(indices))
    return found


def with_rows(grads: Iterable[GradSpec], tables: Mapping[int, Sequence[fx.Node]]) -> tuple[GradSpec, ...]:
    """The gradients with the number of rows that was found for them; a dynamic one as it was traced."""
    return tuple(
        replace(grad, rows=sum(map(_traced_rows, tables[grad.output]))) if grad.output in tables else grad
        for grad in grads
    )


def tables_of(
    plan: BucketPlan, tables: Mapping[int, Sequence[fx.Node]], slot: Mapping[fx.Node, int]
) -> tuple[Table, ...]:
    """The tables of a plan whose indices a program keeps in these slots."""
    return tuple(
        Table(
            bucket.index,
            i,
            slots=tuple(slot[node] for node in nodes),
            rows=sum(numel for node in nodes if isinstance(numel := _numel(node), int)),
            alike=tuple(slot[like] for node in nodes if (like := _alike(node)) is not None),
        )
        for bucket in plan.buckets
        for i, grad in enumerate(bucket.grads)
        if (nodes := tables.get(grad.output))
    )


def _indices(table: Any, grad: GradSpec) -> list[fx.Node]:
    """The indices of all rows of a value that can differ from zero; [] if that is not known."""
    found: list[Any] = []
    seen: set[Any] = set()
    stack = [table]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        parts = _parts(node, grad)
        if parts is None:
            return []
        stack += parts[0]
        found += parts[1]
    return found if all(_tells_rows(index, grad) for index in found) else []


def _parts(node: Any, grad: GradSpec) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """The tables that a value is made of, and the indices of rows that are added to them; None if it is no table."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or tuple(node.meta["val"].shape) != grad.shape:
        return None
    name = str(node.target).rpartition(".")[0]
    where: Any = node.args[_ROWS[name]] if name in _ROWS else ()
    indices = where if isinstance(where, (list, tuple)) else [where]
    if name in _ZEROS and (name != "aten.full" or node.args[1] == 0):
        return (), ()
    if name in _SAME:
        return node.args[: _SAME[name]], ()
    if name in _ROWS and len(indices) == 1 and (name != "aten.index_add" or node.args[1] == 0):
        return (() if name in _NEW else node.args[:1]), indices
    return None


def _tells_rows(index: Any, grad: GradSpec) -> bool:
    """Whether a value is a tensor of whole numbers, and known when the program runs; a mask is something else."""
    value = index.meta.get("val") if isinstance(index, fx.Node) and index.op != "get_attr" else None
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
        return False
    return value.device == grad.device and (isinstance(value.numel(), int) or _alike(index) is not None)


def _numel(node: fx.Node) -> Any:
    """How many elements a tensor has; None for what is none."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else None


def _alike(node: fx.Node) -> fx.Node | None:
    """An input of the graph that has as many elements as this node, if their number is dynamic."""
    numel = _numel(node)
    if isinstance(numel, int):
        return None
    same = (each for each in node.graph.find_nodes(op="placeholder") if str(_numel(each)) == str(numel))
    return next(same, None)  # as text: comparing symbols would guard on them


def _traced_rows(node: fx.Node) -> int:
    numel = _numel(node)
    return numel if isinstance(numel, int) else int(numel.node.hint or 0)
