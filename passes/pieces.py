"""Pieces of a graph: graphs of their own, which know nothing of each other but the values that cross between them.

Values cross through numbered slots; slots 0 … n-1 are the whole graph's own inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True, slots=True)
class Slots:
    """Where one piece finds and leaves its values.

    Attributes:
        inputs: slots handed to the piece, in order.
        outputs: slots its results go to, in order.
        dead: slots nobody reads afterwards.
        spent: slots nobody reads after what is handed over was taken.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    spent: tuple[int, ...]


def cut(
    gm: fx.GraphModule,
    pieces: Sequence[Sequence[fx.Node]],
    *,
    returned: Iterable[fx.Node],
    handed: Mapping[int, Sequence[fx.Node]] | None = None,
    left_out: Iterable[fx.Node] = (),
) -> tuple[list[Slots], dict[fx.Node, int], list[fx.GraphModule]]:
    """Makes a graph of each piece.

    Args:
        gm: the whole graph; left as it is.
        pieces: the nodes of each, in an order in which they can run.
        returned: values that are read when all pieces have run.
        handed: by piece, values that are taken right after it.
        left_out: nodes of pieces that only stand for what is done after them.

    Returns:
        Slots of each piece, slots by node, and the pieces.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    where = {node: k for k, nodes in enumerate(pieces) for node in nodes if node.op != "get_attr"}
    symbols = symbols_of(gm.graph)
    last_use: dict[fx.Node, int] = {node: len(pieces) for node in returned}
    wanted = [_piece_inputs(nodes, k, where, symbols) for k, nodes in enumerate(pieces)]
    for k, inputs in enumerate(wanted):
        for node in inputs:
            last_use[node] = max(last_use.get(node, -1), k)
    for k, taken in (handed or {}).items():
        for node in taken:
            last_use[node] = max(last_use.get(node, -1), k)
    left_out = set(left_out)
    slot: dict[fx.Node, int] = {node: i for i, node in enumerate(placeholders)}
    slots, modules = [], []
    for k, (nodes, inputs) in enumerate(zip(pieces, wanted, strict=True)):
        taken = (handed or {}).get(k, ())
        body = [node for node in nodes if node not in left_out]
        outputs = [node for node in body if last_use.get(node, k) > k]
        outputs += [node for node in taken if node not in outputs and where.get(node) == k]
        for node in outputs:
            slot.setdefault(node, len(slot))
        unread = [node for node in placeholders if node not in last_use] if k == 0 else []
        dead = [n for n in {*inputs, *outputs, *unread} if last_use.get(n, k) <= k and n not in taken]
        slots.append(
            Slots(
                inputs=tuple(slot[node] for node in inputs),
                outputs=tuple(slot[node] for node in outputs),
                dead=tuple(sorted(slot[node] for node in dead)),
                spent=tuple(sorted(slot[node] for node in taken if last_use[node] <= k)),
            )
        )
        modules.append(_build(gm, body, inputs, outputs))
    return slots, slot, modules


def symbols_of(graph: fx.Graph) -> dict[str, fx.Node]:
    """By name, the symbols of dynamic shapes that some node gives as an integer."""
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        name = symbol_of(node.meta.get("val"))
        if name is not None:
            found.setdefault(name, node)
    return found


def symbol_of(value: object) -> str | None:
    """The name of the symbol that a size is, if it is one and not an expression."""
    return str(value.node.expr) if isinstance(value, torch.SymInt) and value.node.expr.is_symbol else None


def _free_symbols(value: object) -> set[str]:
    symbols: set[str] = set()
    if isinstance(value, torch.Tensor):
        for size in (*value.shape, *value.stride(), value.storage_offset()):
            symbols |= _free_symbols(size)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        symbols |= {str(symbol) for symbol in value.node.expr.free_symbols}
    elif isinstance(value, (tuple, list)):
        for item in value:
            symbols |= _free_symbols(item)
    return symbols


def _piece_inputs(
    nodes: Sequence[fx.Node], k: int, where: dict[fx.Node, int], symbols: dict[str, fx.Node]
) -> list[fx.Node]:
    """What a piece reads from outside. Symbols come first, so that the inner compiler can name every size."""
    inputs: dict[fx.Node, None] = {}
    sizes: set[str] = set()
    for node in nodes:
        sizes |= _free_symbols(node.meta.get("val"))
        for parent in node.all_input_nodes:
            if parent.op == "get_attr" or where.get(parent) == k:
                continue
            inputs[parent] = None
            sizes |= _free_symbols(parent.meta.get("val"))
    first = [symbols[name] for name in sorted(sizes) if name in symbols]
    return list(dict.fromkeys([*(node for node in first if where.get(node, -1) < k), *inputs]))


def _build(gm: fx.GraphModule, body: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copy: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copy[node] = graph.placeholder(node.name)
        copy[node].meta = dict(node.meta)
    read = [*(parent for node in body for parent in node.all_input_nodes), *outputs]
    needed = list(dict.fromkeys(node for node in read if node.op == "get_attr"))
    for node in [*needed, *(node for node in body if node.op != "get_attr")]:
        copy[node] = graph.node_copy(node, copy.__getitem__)
    graph.output(tuple(copy[node] for node in outputs))
    graph.lint()
    kind: Any = type(gm).__base__  # each has a class of its own; one whose code is made late has pieces of that kind
    return kind(gm, graph)  # type: ignore[no-any-return]
