"""Orders a backward graph so that each bucket leaves as early as it can and is waited for as late as possible.

    before:  a ─ b ─ unrelated ─ pack0 ─ send0 ─ wait0 ─ view0 ─ c ─ pack1 ─ send1 ─ wait1 ─ view1
    after:   a ─ b ─ pack0 ─ send0 ─ c ─ pack1 ─ send1 ─ unrelated ─ wait0 ─ view0 ─ wait1 ─ view1

What a bucket needs runs before what it does not need; within that, nodes keep their order, and so do nodes with side
effects among each other (Note [side effects]). Of buckets that travel in several steps, one takes its next step when
the bucket behind it has left: so its wait for the step before has something under way to wait with.

Note [side effects]: a node that writes to an argument or draws from a random generator must not pass another such node,
nor a reader of what it writes. AOTAutograd's graphs have few of them; each becomes a link in one chain, and a writer
also depends on the earlier users of what it writes, through views too, and is depended on by the later ones.
"""

import operator
from typing import Any

import torch
from torch import fx

from .allreduce import is_send, is_wait, stage_of
from .compress import packed_bucket


def schedule(gm: fx.GraphModule) -> fx.GraphModule:
    """Reorders `gm` in place; returns it untouched if it has no all-reduce or is in order already."""
    graph = gm.graph
    starts, later = _starts(graph)
    if not starts:
        return gm
    late = _after_waits(graph)
    needs = _dependencies(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    order: dict[fx.Node, None] = dict.fromkeys(graph.find_nodes(op="placeholder"))
    for goal in starts:
        order |= dict.fromkeys(sorted(_missing(goal, needs, order), key=place.__getitem__))
    order |= dict.fromkeys(node for node in graph.nodes if node not in late)
    for goal in later:
        order |= dict.fromkeys(sorted(_missing(goal, needs, order), key=place.__getitem__))
    order |= dict.fromkeys(graph.nodes)
    if list(order) == list(graph.nodes):
        return gm
    _reorder(list(order))
    graph.lint()
    gm.recompile()
    return gm


def _starts(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The collectives of buckets in the order in which they start: up to the last bucket's first one, and the rest."""
    stages = {node: stage for node in graph.nodes if (stage := stage_of(node)) is not None}
    starts = sorted(stages, key=lambda node: (sum(stages[node]), stages[node][1]))
    last = max((i for i, node in enumerate(starts) if is_send(node)), default=-1)
    return starts[: last + 1], starts[last + 1 :]


def _after_waits(graph: fx.Graph) -> set[fx.Node]:
    """The waits and everything that needs one."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if is_wait(node) or any(parent in late for parent in node.all_input_nodes):
            late.add(node)
    return late


def is_impure(node: fx.Node) -> bool:
    """Whether a node writes to an argument or draws from a random generator; see Note [side effects]."""
    target: Any = node.target
    if is_send(node) or is_wait(node):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
    return node.op == "call_function" and node.is_impure()


def _written(node: fx.Node) -> list[fx.Node]:
    """The nodes a call writes to, by its schema."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    written: list[fx.Node] = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            fx.node.map_arg(value, written.append)
    return written


def _dependencies(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    needs: dict[fx.Node, list[fx.Node]] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}
    last_impure: fx.Node | None = None
    writers: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        needs[node] = list(node.all_input_nodes)
        if is_send(node):
            needs[node].append(packed_bucket(node)[0])  # handed out with it, if it was cast
        if node.op in ("placeholder", "get_attr", "output") or not is_impure(node):
            continue
        if last_impure is not None:
            needs[node].append(last_impure)
        last_impure = node
        writers += [(node, value) for value in _written(node)]
    for writer, value in writers:
        for user in _readers(value):
            if place[user] < place[writer]:
                needs[writer].append(user)
            elif user is not writer:
                needs[user].append(writer)
    return needs


def _readers(value: fx.Node) -> set[fx.Node]:
    """The nodes that use a tensor, itself or through views of it or of what it is a view of."""
    while (base := _viewed(value)) is not None:
        value = base
    readers: set[fx.Node] = set()
    stack = [value]
    while stack:
        for user in stack.pop().users:
            if user not in readers:
                readers.add(user)
                stack += [user] if _viewed(user) is not None else []
    return readers


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a node's result may share memory with: its first argument, if it is a view or an element, or written to."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    alias = target is operator.getitem or (schema is not None and any(r.alias_info is not None for r in schema.returns))
    return node.args[0] if alias and node.args and isinstance(node.args[0], fx.Node) else None


def _missing(goal: fx.Node, needs: dict[fx.Node, list[fx.Node]], done: dict[fx.Node, None]) -> set[fx.Node]:
    """`goal` and all it needs that is not done yet."""
    missing: set[fx.Node] = set()
    stack = [goal]
    while stack:
        node = stack.pop()
        if node not in done and node not in missing:
            missing.add(node)
            stack += needs[node]
    return missing


def _reorder(order: list[fx.Node]) -> None:
    last = order[0]
    for node in order[1:]:
        if last.next is not node:
            last.append(node)
        last = node
