"""Inserts one functional all-reduce for each bucket of a backward graph.

Before, for a bucket of two gradients `a`, `b`:          After:

    a = mm(…)          output: a, b                          a = mm(…)
    b = sum(…)                                               b = sum(…)
                                                             flat = cat([reshape(a * scale), reshape(b * scale)])
                                                             sent = all_reduce(flat, "sum", group)
                                                             done = wait_tensor(sent)
                                                             output: as_strided(done, …), as_strided(done, …)

The arithmetic is DistributedDataParallel's: divide, pack, sum; two float16 gradients of 40,000 average to 40,000. The
factor is an input of the graph (a 0-d tensor on the CPU: 1/world size to synchronise, 1 to stay local), so one compiled
graph serves every world size and both kinds of backward. The flat bucket stores each gradient in its parameter's own
memory order, so the returned gradients are views of it. Afterwards the graph has new trailing placeholders (`scale`
of float32 and, if a bucket needs it, of float64), and gradients must not be read from any node but the views.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .gradients import graph_outputs
from .layout import storage_order
from .plan import Bucket, BucketPlan

aten = torch.ops.aten
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
SENDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL)

SCALE_META = "fxddp_scale"
BUCKET_META = "fxddp_bucket"
STAGE_META = "fxddp_stage"
GRADIENT_META = "fxddp_gradient"


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a collective, whoever put it there."""
    name = getattr(node.target, "namespace", "")
    return "c10d_functional" in name and not is_wait(node) and "wait_tensor" not in str(node.target)


def is_send(node: fx.Node) -> bool:
    """Whether a node is the first collective of a bucket; a model may have collectives of its own in its backward."""
    return node.target in SENDS and BUCKET_META in node.meta


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective of a bucket."""
    sent = node.args[0] if node.target is WAIT else None
    return isinstance(sent, fx.Node) and (is_send(sent) or STAGE_META in sent.meta)


def stage_of(node: fx.Node) -> tuple[int, int] | None:
    """The bucket and the number of the step that a collective is, if it is one of a bucket."""
    if is_send(node):
        return node.meta[BUCKET_META], 0
    return node.meta[STAGE_META] if STAGE_META in node.meta and is_collective(node) else None


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of the factor for gradients of `dtype`: wide enough that 1/world size loses nothing to it."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def scale_dtypes(plan: BucketPlan) -> tuple[torch.dtype, ...]:
    """dtypes of the factors that a rewritten graph takes as its last inputs, in order."""
    wanted = {scale_dtype(bucket.dtype) for bucket in plan.buckets}
    return tuple(dtype for dtype in (torch.float32, torch.float64) if dtype in wanted)


def insert_allreduce(gm: fx.GraphModule, *, plan: BucketPlan, groups: Sequence[str]) -> fx.GraphModule:
    """Rewrites a backward graph so that its gradients come back reduced, bucket by bucket.

    Args:
        gm: a backward graph whose placeholders carry `meta["val"]`; edited in place.
        plan: the buckets; positions are those of the graph's outputs.
        groups: names of process groups; bucket i is summed over group i modulo their number.

    Returns:
        `gm`; untouched if the plan has no bucket.
    """
    if not plan.buckets:
        return gm
    graph = gm.graph
    outputs = list(graph_outputs(graph))
    position = {node: i for i, node in enumerate(graph.nodes)}
    call = caller(graph, fake_mode(graph))
    scales = _add_scales(graph, scale_dtypes(plan), fake_mode(graph))
    for bucket in plan.buckets:
        last = max((outputs[grad.output] for grad in bucket.grads), key=position.__getitem__)
        if last.op == "placeholder":  # a gradient that is an input as it stands: pack after all placeholders
            last = next(reversed(graph.find_nodes(op="placeholder")))
        with graph.inserting_before(last.next):
            group = groups[bucket.index % len(groups)]
            views = _reduce_bucket(call, bucket, outputs, scales[scale_dtype(bucket.dtype)], group)
        for grad, view in zip(bucket.grads, views, strict=True):
            outputs[grad.output] = view
    graph.output_node().args = (tuple(outputs),)
    graph.lint()
    gm.recompile()
    return gm


def _reduce_bucket(
    call: Callable[..., fx.Node], bucket: Bucket, outputs: list[Any], scale: fx.Node, group: str
) -> list[fx.Node]:
    parts = []
    for grad in bucket.grads:
        part = outputs[grad.output]
        if not grad.shape:  # two 0-d operands would give the wider dtype, the factor's
            part = call(aten.reshape.default, part, [-1])
        part = call(aten.mul.Tensor, part, scale)
        order = storage_order(grad.shape, grad.stride)
        if order != tuple(range(len(order))):
            part = call(aten.permute.default, part, list(order))
        parts.append(call(aten.reshape.default, part, [-1]) if len(grad.shape) > 1 else part)
    flat = parts[0] if len(parts) == 1 else call(aten.cat.default, parts)
    sent = call(ALL_REDUCE, flat, "sum", group)
    sent.meta[BUCKET_META] = bucket.index
    done = call(WAIT, sent)
    views = []
    for i, (grad, offset) in enumerate(zip(bucket.grads, bucket.offsets, strict=True)):
        view = call(aten.as_strided.default, done, list(grad.shape), list(grad.stride), offset)
        view.meta[GRADIENT_META] = (bucket.index, i)
        views.append(view)
    return views


def fake_mode(graph: fx.Graph) -> Any:
    """The fake mode of the graph's values."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode([node.meta.get("val") for node in graph.nodes])


def caller(graph: fx.Graph, mode: Any) -> Callable[..., fx.Node]:
    """A function that adds a call to the graph and records what it returns in `meta["val"]`."""

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = target(*values)
        return node

    return call


def _add_scales(graph: fx.Graph, dtypes: tuple[torch.dtype, ...], mode: Any) -> dict[torch.dtype, fx.Node]:
    placeholders = graph.find_nodes(op="placeholder")
    before = placeholders[-1].next if placeholders else next(iter(graph.nodes))
    added = {}
    for dtype in dtypes:
        with graph.inserting_before(before):
            node = graph.placeholder(f"scale_{str(dtype).removeprefix('torch.')}")
        with mode:
            node.meta["val"] = torch.empty((), dtype=dtype)
        node.meta[SCALE_META] = dtype
        added[dtype] = node
    return added
