"""Cuts a scheduled backward graph at its bucket boundaries into pieces and a program that runs them.

    graph:    … pack0 ─ send0 ─ … ─ pack1 ─ send1 ─ … ─ wait0 ─ view0 ─ wait1 ─ view1 ─ output
    pieces:   [ … pack0 ]      [ … pack1 ]      [ … ]
    program:  run 0, launch bucket 0, run 1, launch bucket 1, run 2; outputs: gradients by bucket and position

Sends, their later steps, waits and views leave the graph: what is launched, waited for and handed out is decided by
whoever runs the program, so one set of pieces serves synchronised and local backwards, and any number of ranks.
Afterwards a piece knows nothing of the others but its inputs and outputs. Values cross pieces through numbered slots;
slots 0 … n-1 are the backward's own inputs.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import fx

from .allreduce import BUCKET_META, GRADIENT_META, SCALE_META, STAGE_META, is_collective, is_send, is_wait
from .compress import packed_bucket
from .gradients import graph_outputs
from .pieces import SIZE, Slots, cut, symbol_of, symbols_of
from .plan import BucketPlan
from .tables import Table, tables_of


@dataclass(frozen=True, slots=True)
class Step(Slots):
    """Runs one piece, then launches one bucket.

    Attributes:
        bucket: index of the bucket to launch, or None.
        flat: slot of the packed bucket.
        wire: slot of the same bucket in the dtype in which it travels, -1 if that is its own.
        collectives: how many collectives of the model itself the piece starts, such as those of SyncBatchNorm.
    """

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
        launches: by bucket, those to launch once it is packed; () for each by itself, in order.
        tables: gradients of which rows may travel; what tells which is handed over with their buckets.
    """

    inputs: int
    scales: tuple[torch.dtype, ...]
    slots: int
    steps: tuple[Step, ...]
    outputs: tuple[int | tuple[int, int] | None, ...]
    plan: BucketPlan
    launches: tuple[tuple[int, ...], ...] = ()
    tables: tuple[Table, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """The buckets as they are launched; () for the order in which they are packed."""
        order = tuple(chain.from_iterable(self.launches))
        return () if order == tuple(range(len(order))) else order

    @cached_property
    def tables_in(self) -> dict[int, tuple[Table, ...]]:
        """The tables by their bucket."""
        found: dict[int, tuple[Table, ...]] = {}
        for table in self.tables:
            found[table.bucket] = (*found.get(table.bucket, ()), table)
        return found

    @cached_property
    def results(self) -> tuple[tuple[int, int], ...]:
        """The outputs that are no gradients of the plan: position and slot."""
        return tuple((i, ref) for i, ref in enumerate(self.outputs) if isinstance(ref, int))


def split(
    gm: fx.GraphModule, *, plan: BucketPlan, tables: Mapping[int, Sequence[fx.Node]] | None = None
) -> tuple[Program, tuple[fx.GraphModule, ...]]:
    """Cuts `gm` after each packed bucket.

    Args:
        gm: a backward graph after `insert_allreduce` and `schedule`; left as it is.
        plan: the buckets it was rewritten for.
        tables: by output, what gives the indices of the rows of gradients of which those may travel.

    Returns:
        The program and its pieces. A graph without buckets gives one piece.
    """
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    pieces = _assign(graph)
    results = list(graph_outputs(graph))
    kept = {value for value in results if isinstance(value, fx.Node) and GRADIENT_META not in value.meta}
    sends = [next((node for node in nodes if is_send(node)), None) for nodes in pieces]
    packed = [(None, None) if send is None else packed_bucket(send) for send in sends]
    handed = {k: [node for node in pair if isinstance(node, fx.Node)] for k, pair in enumerate(packed)}
    tables = tables or {}
    for k, send in enumerate(sends):
        grads = () if send is None else plan.buckets[send.meta[BUCKET_META]].grads
        handed[k] += dict.fromkeys(node for grad in grads for node in tables.get(grad.output, ()))
    left_out = [node for node in chain.from_iterable(pieces) if is_send(node) or STAGE_META in node.meta]
    slots, slot, modules = cut(gm, pieces, returned=kept, handed=handed, left_out=left_out)
    steps = [
        Step(
            inputs=each.inputs,
            outputs=each.outputs,
            dead=each.dead,
            spent=each.spent,
            bucket=None if send is None else send.meta[BUCKET_META],
            flat=slot[flat] if isinstance(flat, fx.Node) else -1,
            wire=slot[wire] if isinstance(wire, fx.Node) else -1,
            collectives=sum(is_collective(node) for node in nodes if node is not send),
        )
        for each, nodes, send, (flat, wire) in zip(slots, pieces, sends, packed, strict=True)
    ]
    program = Program(
        inputs=sum(SCALE_META not in node.meta for node in placeholders),
        scales=tuple(node.meta[SCALE_META] for node in placeholders if SCALE_META in node.meta),
        slots=len(slot),
        steps=tuple(steps),
        outputs=tuple(
            value.meta.get(GRADIENT_META, slot.get(value)) if isinstance(value, fx.Node) else None for value in results
        ),
        plan=plan,
        tables=tables_of(plan, tables, slot),
    )
    return program, tuple(modules)


def _assign(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each piece; a new one begins after each bucket's first collective. Waits and later belong to none.

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
    known = set(symbols_of(graph))
    changed = False
    body = next((node for node in graph.nodes if node.op != "placeholder"), graph.output_node())
    for node in list(graph.nodes):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            symbol = symbol_of(size)
            if symbol is None or symbol in known:
                continue
            known.add(symbol)
            with graph.inserting_before(body if node.op == "placeholder" else node.next):
                graph.call_function(SIZE, (node, dim)).meta["val"] = size
            changed = True
    if changed:
        gm.recompile()
    return gm
