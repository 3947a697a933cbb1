"""Cuts a forward graph where it first reads parameters, so that each piece can wait for those it reads, and no others.

    graph:    a(p0) ─ b(p1) ─ t(p2) ─ c(p3) ─ d(t)
    pieces:   [a, b]  reads p0, p1          [c]  reads p3          [t, d]  reads p2

A parameter's views and casts belong to the piece that computes with them: before that they would see, or name, a value
that is still to be updated. All else keeps its order.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from .cost import Work, node_work
from .gradients import graph_outputs
from .pieces import SIZE, Slots, cut
from .plan import BucketPlan
from .schedule import is_impure
from .split import bind_symbols

MOST = 16
"""Pieces of one forward, about: each costs some fusion and a call."""


@dataclass(frozen=True, slots=True)
class ForwardStep(Slots):
    """Runs one piece of a forward.

    Attributes:
        reads: positions, among the Dynamo graph's inputs, of those that no earlier piece has read.
    """

    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reads:
    """The parameters that one node of a forward is the first to compute with.

    Attributes:
        place: the node's, in the graph.
        positions: theirs, among the Dynamo graph's inputs.
        nbytes: of all of them.
        before: work of the forward until then.
    """

    place: int
    positions: tuple[int, ...]
    nbytes: int
    before: Work = field(default_factory=Work)


@dataclass(frozen=True, slots=True)
class ForwardProgram:
    """What a forward in pieces does, as data.

    Attributes:
        slots: how many slots there are; the graph's inputs are the first.
        steps: the pieces in order.
        outputs: for each output of the forward its slot, or None.
        constants: by position, outputs that are no value of the graph.
    """

    slots: int
    steps: tuple[ForwardStep, ...]
    outputs: tuple[int | None, ...]
    constants: Mapping[int, object]


def first_reads(gm: fx.GraphModule) -> dict[int, int]:
    """By position among the Dynamo graph's inputs, the place in the forward graph where each is first computed with.

    What is only returned, or not read at all, is not among them.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    light = _light(gm.graph, set(gm.graph.find_nodes(op="placeholder")))
    found: dict[int, int] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or node in light:
            continue
        for source in _sources(node, light):
            position = _position(source)
            if position is not None:
                found.setdefault(position, place[node])
    return found


def reading(gm: fx.GraphModule, *, parameters: Collection[int]) -> tuple[Reads, ...]:
    """In what order a forward comes to its parameters; empty if it has an input that nobody can name.

    Args:
        gm: the graph.
        parameters: positions of the parameters among the Dynamo graph's inputs.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if any(_position(node) is None and isinstance(node.meta.get("val"), torch.Tensor) for node in placeholders):
        return ()
    nbytes = {_position(node): _nbytes(node) for node in placeholders}
    at: dict[int, list[int]] = {}
    for position, place in first_reads(gm).items():
        if position in parameters:
            at.setdefault(place, []).append(position)
    return tuple(Reads(place, tuple(read), sum(nbytes[each] for each in read)) for place, read in at.items())


def with_work(gm: fx.GraphModule, found: Sequence[Reads]) -> tuple[Reads, ...]:
    """Adds the work before each."""
    before = list(accumulate(node_work(gm).values(), initial=Work()))
    return tuple(replace(each, before=before[each.place]) for each in found)


def first_needed(plan: BucketPlan, found: Sequence[Reads]) -> list[int]:
    """By bucket, the place in a forward that first computes with a parameter of it; 0 if one is not computed with."""
    place = {position: each.place for each in found for position in each.positions}
    return [min(place.get(grad.input, 0) for grad in bucket.grads) for bucket in plan.buckets]


def piece_of_each(found: Sequence[Reads], size: int) -> tuple[int, ...]:
    """The piece of a forward that reads each of these first, if pieces read `size` bytes first, about."""
    size = max(size, sum(each.nbytes for each in found) // MOST)
    pieces = []
    last = held = 0
    for each in found:
        if held >= size:
            last, held = last + 1, 0
        held += each.nbytes
        pieces.append(last)
    return tuple(pieces)


def cut_forward(
    gm: fx.GraphModule, *, parameters: Collection[int], size: int
) -> tuple[ForwardProgram, tuple[fx.GraphModule, ...]] | None:
    """Cuts a forward graph of AOTAutograd.

    Args:
        gm: the graph; symbols of dynamic shapes may be added.
        parameters: positions of the parameters among the Dynamo graph's inputs.
        size: bytes of parameters that a piece reads first, about; more where that would be too many pieces.

    Returns:
        The program and its pieces; None if there is nothing to cut, or an input that nobody can name.
    """
    bind_symbols(gm)
    found = reading(gm, parameters=parameters)
    starts = dict(zip((each.place for each in found), piece_of_each(found, size), strict=True))
    if not starts or max(starts.values()) == 0:
        return None
    placeholders = gm.graph.find_nodes(op="placeholder")
    weights = {node for node in placeholders if _position(node) in parameters}
    pieces = _assign(gm.graph, weights, starts)
    results = list(graph_outputs(gm.graph))
    returned = {value for value in results if isinstance(value, fx.Node)}
    slots, slot, modules = cut(gm, pieces, returned=returned)
    position_of = {slot[node]: _position(node) for node in placeholders}
    read: set[int] = set()
    steps = []
    for each in slots:
        news = [position_of[k] for k in each.inputs if position_of.get(k) is not None and position_of[k] not in read]
        reads = tuple(position for position in news if position is not None)
        read.update(reads)
        steps.append(ForwardStep(each.inputs, each.outputs, each.dead, each.spent, reads))
    constants = {i: value for i, value in enumerate(results) if not isinstance(value, fx.Node) and value is not None}
    outputs = tuple(slot[value] if isinstance(value, fx.Node) else None for value in results)
    return ForwardProgram(len(slot), tuple(steps), outputs, constants), tuple(modules)


def _assign(graph: fx.Graph, weights: set[fx.Node], starts: Mapping[int, int]) -> list[list[fx.Node]]:
    """The nodes of each piece; `starts`: by place, the piece of a node that reads a parameter first."""
    light = _light(graph, weights)
    piece_of: dict[fx.Node, int] = {}
    last = 0
    for place, node in enumerate(graph.nodes):
        if node.op in ("placeholder", "output", "get_attr") or node in light:
            continue
        last = starts.get(place, last)
        inside = node.target in (operator.getitem, SIZE) and node.args[0] in piece_of
        piece_of[node] = piece_of[node.args[0]] if inside else last  # only single values cross, with their sizes
    for node in reversed(graph.nodes):
        if node in light:
            users = [piece_of[user] for user in node.users if user in piece_of]
            piece_of[node] = min(users, default=last)
    pieces: list[list[fx.Node]] = [[] for _ in range(last + 1)]
    for node in graph.nodes:
        if node in piece_of:
            pieces[piece_of[node]].append(node)
    return pieces


def _light(graph: fx.Graph, weights: set[fx.Node]) -> set[fx.Node]:
    """What makes one value of one of these alone, as a view or a cast does: it belongs to whoever reads the result."""
    light: set[fx.Node] = set()
    for node in graph.nodes:
        parents = node.all_input_nodes
        if (
            node.op == "call_function"
            and len(parents) == 1
            and (parents[0] in weights or parents[0] in light)
            and not isinstance(node.meta.get("val"), (tuple, list))
            and not is_impure(node)
        ):
            light.add(node)
    return light


def _sources(node: fx.Node, light: set[fx.Node]) -> list[fx.Node]:
    """The graph's inputs that a node reads, itself or through what is light."""
    found = []
    for parent in node.all_input_nodes:
        while parent in light:
            (parent,) = parent.all_input_nodes  # noqa: PLW2901 (down to what it looks at)
        if parent.op == "placeholder":
            found.append(parent)
    return found


def _position(node: fx.Node) -> int | None:
    """A placeholder's position among the Dynamo graph's inputs, if it is one of these."""
    desc: Any = node.meta.get("desc")
    return int(desc.idx) if type(desc).__name__ == "PlainAOTInput" else None


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
