"""What is worth telling about a rewritten backward graph, as plain data: it outlives the graph, in caches too.

A gradient's source is the line of the model whose backward computes it: AOTAutograd hands the forward's stack traces on
to the nodes of the backward.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .cost import Work, graph_work, node_work, symbol_values
from .folding import adds_up_rows
from .forward import Reads
from .gradients import graph_outputs
from .plan import GradSpec

TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class Source:
    """A line of a program."""

    file: str
    line: int
    function: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}" + (f"  {self.text}" if self.text else "")


@dataclass(frozen=True, slots=True)
class GradNote:
    """Of one gradient: the node that computes it, the model's line behind it, and the work until it is ready.

    And whether its rows are added up to a table.

    That is the work of all that this gradient and those ready earlier need: what they do not need is scheduled later.
    """

    node: str
    source: Source | None
    before: Work
    rows: bool = False


@dataclass(frozen=True, slots=True)
class PieceNote:
    """Of one piece: how many nodes it has, and its work."""

    nodes: int
    work: Work


@dataclass(frozen=True, slots=True)
class Outline:
    """What a backward graph looked like.

    Attributes:
        nodes: how many nodes the graph had as AOTAutograd made it; `GradSpec.ready` counts in it.
        grads: by output of the backward.
        pieces: in order.
        values: the dynamic sizes, with the values they had when the graph was traced.
        work: of the whole graph, without the packing of buckets.
        forward: the work of the forward graph.
        reads: in what order that comes to its parameters, if waits are to move into it.
    """

    nodes: int
    grads: Mapping[int, GradNote]
    pieces: tuple[PieceNote, ...] = ()
    values: Mapping[Any, int] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    forward: Work = field(default_factory=Work)
    reads: tuple[Reads, ...] = ()


def outline(gm: fx.GraphModule, specs: Iterable[GradSpec]) -> Outline:
    """Looks at a backward graph before it is rewritten.

    Args:
        gm: the graph, as AOTAutograd made it.
        specs: its gradients.
    """
    costs = node_work(gm)
    results = graph_outputs(gm.graph)
    grads: dict[int, GradNote] = {}
    needed = Work()
    seen: set[fx.Node] = set()
    for grad in sorted(specs, key=lambda grad: (grad.ready, grad.output)):
        stack = [results[grad.output]]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                needed += costs[node]
                stack += node.all_input_nodes
        node = results[grad.output]
        grads[grad.output] = GradNote(node.name, source_of(node), needed, adds_up_rows(node))
    return Outline(len(costs), grads, values=symbol_values(gm), work=sum(costs.values(), Work()))


def with_pieces(found: Outline, pieces: tuple[fx.GraphModule, ...]) -> Outline:
    """Adds what the split gave."""
    notes = tuple(
        PieceNote(sum(node.op == "call_function" for node in piece.graph.nodes), graph_work(piece)) for piece in pieces
    )
    return replace(found, pieces=notes)


def source_of(node: fx.Node) -> Source | None:
    """The model's line behind a node, or behind what it was computed from."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack and len(seen) < 32:
        node = stack.pop(0)
        found = innermost(node.meta.get("stack_trace") or "")
        if found is not None:
            return found
        seen.add(node)
        stack += [parent for parent in node.all_input_nodes if parent not in seen]
    return None


def innermost(stack_trace: str) -> Source | None:
    """The last line of a stack trace that is not torch's own."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*([^\n]*)', stack_trace)
    users = [frame for frame in frames if not frame[0].startswith(TORCH)] or frames
    if not users:
        return None
    file, line, function, text = users[-1]
    return Source(file, int(line), function, text.strip())
