"""Writes the sum of a bucket as the steps that it takes, where that is more than one all-reduce.

Before:                                    After, inside nodes of two ranks and across them:

    sent = all_reduce(flat)                    even = constant_pad_nd(flat, …)  if it has no two equal parts
    done = wait_tensor(sent)                   part = wait_tensor(reduce_scatter_tensor(even, "sum", 2, inside))
    output: as_strided(done, …)                part = wait_tensor(all_reduce(part, "sum", across))
                                               done = wait_tensor(all_gather_into_tensor(part, 2, back))
                                               output: as_strided(slice(done, …), …)

Which steps these are is data, `Way`; `fxddp/transport.py` has the papers, and takes the same steps for buckets that no
graph sends. The first collective of a bucket is what `is_send` finds: where it stands the graph is cut. Every step has
a process group of its own, on which buckets follow one another in their order, here as there: ranks may mix. Complex
buckets travel as pairs of numbers. Gloo has no reduce-scatter of its own that would send each part once: there ranks
exchange the parts and add up theirs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .allreduce import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BUCKET_META,
    REDUCE_SCATTER,
    STAGE_META,
    WAIT,
    caller,
    fake_mode,
    is_send,
    is_wait,
)

aten = torch.ops.aten

KINDS = ("reduce_scatter", "exchange", "all_reduce", "all_gather")


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the sum of a bucket.

    Attributes:
        name: in words.
        kind: one of `KINDS`; "exchange" is a reduce-scatter made of an all-to-all and a sum.
        group: the name of its process group.
        ranks: how many that has.
    """

    name: str
    kind: str
    group: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Way:
    """How a graph sums its buckets.

    Attributes:
        groups: names of process groups; bucket i is all-reduced over group i modulo their number.
        size: how many ranks there are.
        stages: the steps in place of an all-reduce; () for none. The first one scatters, the last one gathers.
    """

    groups: tuple[str, ...]
    size: int
    stages: tuple[Stage, ...] = ()


def take_stages(gm: fx.GraphModule, *, stages: tuple[Stage, ...]) -> fx.GraphModule:
    """Puts these steps in the place of each bucket's all-reduce.

    Args:
        gm: a backward graph after `insert_allreduce` and `compress`; edited in place.
        stages: the steps; () leaves `gm` untouched.

    Returns:
        `gm`.
    """
    graph = gm.graph
    sends = [node for node in graph.nodes if is_send(node)]
    if not stages or not sends:
        return gm
    call = caller(graph, fake_mode(graph))
    for send in sends:
        (done,) = (user for user in send.users if is_wait(user))
        with graph.inserting_before(send):
            result = _in_steps(call, send, stages)
        done.replace_all_uses_with(result)
        graph.erase_node(done)
        graph.erase_node(send)
    graph.lint()
    gm.recompile()
    return gm


def _in_steps(call: Any, send: fx.Node, stages: tuple[Stage, ...]) -> fx.Node:
    flat: Any = send.args[0]
    bucket, parts = send.meta[BUCKET_META], stages[0].ranks
    made: list[fx.Node] = []

    def add(*arguments: Any) -> fx.Node:
        made.append(call(*arguments))
        return made[-1]

    is_complex = flat.meta["val"].is_complex()
    value = add(aten.reshape.default, add(aten.view_as_real.default, flat), [-1]) if is_complex else flat
    numel = value.meta["val"].numel()
    short = -numel % parts
    if short:
        value = add(aten.constant_pad_nd.default, value, [0, short])
    for k, stage in enumerate(stages):
        collective = add(*_collective(stage, value))
        if k == 0:
            collective.meta[BUCKET_META] = bucket
        value = add(WAIT, collective)
        if stage.kind == "exchange":
            value = add(aten.sum.dim_IntList, add(aten.reshape.default, value, [parts, -1]), [0])
        for node in made:
            node.meta[STAGE_META] = (bucket, k)
        made.clear()
    if short:
        value = call(aten.slice.Tensor, value, 0, 0, numel)
    return call(aten.view_as_complex.default, call(aten.reshape.default, value, [-1, 2])) if is_complex else value


def _collective(stage: Stage, value: fx.Node) -> tuple[Any, ...]:
    """The operator of a step, and what it is called with."""
    if stage.kind == "all_reduce":
        return ALL_REDUCE, value, "sum", stage.group
    if stage.kind == "reduce_scatter":
        return REDUCE_SCATTER, value, "sum", stage.ranks, stage.group
    if stage.kind == "all_gather":
        return ALL_GATHER, value, stage.ranks, stage.group
    part = value.meta["val"].numel() // stage.ranks
    return ALL_TO_ALL, value, [part] * stage.ranks, [part] * stage.ranks, stage.group
