"""Cuts a scheduled backward graph at its bucket boundaries into pieces and a program that runs them.

    graph:    … pack0 ─ send0 ─ … ─ pack1 ─ send1 ─ … ─ wait0 ─ view0 ─ wait1 ─ view1 ─ output
    pieces:   [ … pack0 ]      [ … pack1 ]      [ … ]
    program:  run 0, launch bucket 0, run 1, launch bucket 1, run 2; outputs: gradients by bucket and position

Sends, waits and views leave the graph: what is launched, waited for and handed out is decided by whoever runs the
program, so one set of pieces serves synchronised and local backwards. Afterwards a piece knows nothing of the others
but its inputs and outputs. Values cross pieces through numbered slots; slots 0 … n-1 are the backward's own inputs.
"""

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from .allreduce import BUCKET_META, GRADIENT_META, SCALE_META, is_collective, is_send, is_wait
from .compress import packed_bucket
from .gradients import graph_outputs
from .plan import BucketPlan

SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True, slots=True)
class Step:
    """Runs one piece, then launches one bucket.

    Attributes:
        inputs: slots handed to the piece, in order.
        outputs: slots its results go to, in order.
        dead: slots nobody reads afterwards.
        bucket: index of the bucket to launch, or None.
        flat: slot of the packed bucket.
        wire: slot of the same bucket in the dtype in which it travels, -1 if that is its own.
        collectives: how many collectives of the model itself the piece starts, such as those of SyncBatchNorm.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    bucket: int | None
    flat: int
    wire: int = -1
    collectives: int = 0


@dataclass(frozen=True)
class Program:
    """What a split backward does, as data.

    Attributes:
        inputs: how many inputs AOTAutograd passes (slots 0 … inputs-1); the factors follow.
        scales: dtypes of the factors, in slot order.
        slots: how many slots there are.
        steps: the pieces in order.
        outputs: for each output of the backward a slot, None, or the gradient's (bucket, position).
        plan: the buckets.
    """

    inputs: int
    scales: tuple[torch.dtype, ...]
    slots: int
    steps: tuple[Step, ...]
    outputs: tuple[int | tuple[int, int] | None, ...]
    plan: BucketPlan

    @cached_property
    def results(self) -> tuple[tuple[int, int], ...]:
        """The outputs that are no gradients of the plan: position and slot."""
        return tuple((i, ref) for i, ref in enumerate(self.outputs) if isinstance(ref, int))


def split(gm: fx.GraphModule, *, plan: BucketPlan) -> tuple[Program, tuple[fx.GraphModule, ...]]:
    """Cuts `gm` after each packed bucket.

    Args:
        gm: a backward graph after `insert_allreduce` and `schedule`; left as it is.
        plan: the buckets it was rewritten for.

    Returns:
        The program and its pieces. A graph without buckets gives one piece.
    """
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    pieces = _assign(graph)
    where = {node: k for k, nodes in enumerate(pieces) for node in nodes if node.op != "get_attr"}
    symbols = _symbols(graph)
    results = list(graph_outputs(graph))
    kept = {value for value in results if isinstance(value, fx.Node) and GRADIENT_META not in value.meta}
    last_use: dict[fx.Node, int] = {node: len(pieces) for node in kept}
    wanted = [_piece_inputs(nodes, k, where, symbols) for k, nodes in enumerate(pieces)]
    for k, inputs in enumerate(wanted):
        for node in inputs:
            last_use[node] = max(last_use.get(node, -1), k)
    slot: dict[fx.Node, int] = {node: i for i, node in enumerate(placeholders)}
    steps, modules = [], []
    for k, (nodes, inputs) in enumerate(zip(pieces, wanted, strict=True)):
        send = next((node for node in nodes if is_send(node)), None)
        flat, wire = (None, None) if send is None else packed_bucket(send)
        body = [node for node in nodes if node is not send]
        outputs = [node for node in body if last_use.get(node, k) > k]
        outputs += [node for node in (flat, wire) if isinstance(node, fx.Node) and node not in outputs]
        for node in outputs:
            slot.setdefault(node, len(slot))
        unread = [node for node in placeholders if node not in last_use] if k == 0 else []
        packed = (flat, wire)
        dead = [n for n in {*inputs, *outputs, *unread} if last_use.get(n, k) <= k and n not in packed]
        steps.append(
            Step(
                inputs=tuple(slot[node] for node in inputs),
                outputs=tuple(slot[node] for node in outputs),
                dead=tuple(sorted(slot[node] for node in dead)),
                bucket=None if send is None else send.meta[BUCKET_META],
                flat=slot[flat] if isinstance(flat, fx.Node) else -1,
                wire=slot[wire] if isinstance(wire, fx.Node) else -1,
                collectives=sum(map(is_collective, body)),
            )
        )
        modules.append(_build(gm, body, inputs, outputs))
    program = Program(
        inputs=sum(SCALE_META not in node.meta for node in placeholders),
        scales=tuple(node.meta[SCALE_META] for node in placeholders if SCALE_META in node.meta),
        slots=len(slot),
        steps=tuple(steps),
        outputs=tuple(
            value.meta.get(GRADIENT_META, slot.get(value)) if isinstance(value, fx.Node) else None for value in results
        ),
        plan=plan,
    )
    return program, tuple(modules)


def _assign(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each piece; a new one begins after each all-reduce. Waits and views belong to none.

    A node that picks one of several results stays with the call that gives them: only single values cross pieces. So
    does a node that asks a tensor for its size: later pieces find the size known.
    """
    pieces: list[list[fx.Node]] = [[]]
    piece_of: dict[Any, int] = {}
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_wait(node) or any(parent in late for parent in node.all_input_nodes):
            late.add(node)
            continue
        last = len(pieces) - 1
        piece_of[node] = last
        if node.target in (operator.getitem, SIZE):
            piece_of[node] = piece_of.get(node.args[0], 0)
        pieces[piece_of[node]].append(node)
        if is_send(node):
            pieces.append([])
    returned = graph.output_node().all_input_nodes
    if len(pieces) > 1 and all(node.op == "get_attr" and node not in returned for node in pieces[-1]):
        pieces.pop()
    return pieces


def bind_symbols(gm: fx.GraphModule) -> fx.GraphModule:
    """Adds a node for each symbol of dynamic shapes that only a tensor's size tells; edits `gm` in place.

    A piece may read nothing but tensors whose sizes are expressions of a symbol; the inner compiler must be given the
    symbol itself then. AOTAutograd passes symbols as integers, but not those that the backward itself brings up.
    """
    graph = gm.graph
    known = set(_symbols(graph))
    changed = False
    body = next((node for node in graph.nodes if node.op != "placeholder"), graph.output_node())
    for node in list(graph.nodes):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            symbol = _symbol(size)
            if symbol is None or symbol in known:
                continue
            known.add(symbol)
            with graph.inserting_before(body if node.op == "placeholder" else node.next):
                graph.call_function(SIZE, (node, dim)).meta["val"] = size
            changed = True
    if changed:
        gm.recompile()
    return gm


def _symbols(graph: fx.Graph) -> dict[str, fx.Node]:
    """By name, the symbols of dynamic shapes that some node gives as an integer."""
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        name = _symbol(node.meta.get("val"))
        if name is not None:
            found.setdefault(name, node)
    return found


def _symbol(value: object) -> str | None:
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
    nodes: list[fx.Node], k: int, where: dict[fx.Node, int], symbols: dict[str, fx.Node]
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
