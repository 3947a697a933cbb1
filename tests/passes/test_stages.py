"""Sums in several steps: the numbers of an all-reduce, the order of the steps, and pieces that know nothing of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxddp.passes.allreduce import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    STAGE_META,
    WAIT,
    insert_allreduce,
    is_send,
    scale_dtypes,
    stage_of,
)
from fxddp.passes.compress import compress
from fxddp.passes.gradients import graph_outputs
from fxddp.passes.plan import BucketPlan
from fxddp.passes.schedule import schedule
from fxddp.passes.split import split
from fxddp.passes.stages import Stage, Way, take_stages
from fxddp.passes.verify import snapshot, verify
from tests.passes.graphs import (
    GROUP,
    Builder,
    aten,
    calls,
    plan_by_hand,
    random_inputs,
    scales_for,
    specs_of,
    text,
)

Members = Mapping[str, Sequence[Sequence[int]]]


def ring(size: int, kind: str = "reduce_scatter") -> tuple[Way, Members]:
    everyone = [list(range(size))]
    stages = (Stage("scatter", kind, "a", size), Stage("gather", "all_gather", "b", size))
    return Way((GROUP,), size, stages), {"a": everyone, "b": everyone}


def nodes_of(nodes: int, node: int, kind: str = "reduce_scatter") -> tuple[Way, Members]:
    inside = [[n * node + i for i in range(node)] for n in range(nodes)]
    across = [[n * node + i for n in range(nodes)] for i in range(node)]
    stages = (
        Stage("scatter", kind, "inside", node),
        Stage("sum", "all_reduce", "across", nodes),
        Stage("gather", "all_gather", "back", node),
    )
    return Way((GROUP,), nodes * node, stages), {"inside": inside, "across": across, "back": inside}


def exchanged(values: list[Tensor], target: Any) -> list[Tensor]:
    """What each of these ranks gets of a collective."""
    ranks = range(len(values))
    if target is ALL_GATHER:
        return [torch.cat(values) for _ in ranks]
    if target is ALL_TO_ALL:
        return [torch.cat([value.chunk(len(values))[r] for value in values]) for r in ranks]
    total = torch.stack(values).sum(0)
    return [total.chunk(len(values))[r].clone() if target is REDUCE_SCATTER else total.clone() for r in ranks]


def run_ranks(gm: fx.GraphModule, inputs: list[list[Any]], members: Members) -> list[list[Any]]:
    """The outputs of a graph on several ranks at once, given each one's inputs."""
    found: list[dict[fx.Node, Any]] = [{} for _ in inputs]
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        for values, given in zip(found, inputs, strict=True):
            values[node] = given[i]
    for node in calls(gm):
        if stage_of(node) is not None:
            for ranks in members[str(node.args[-1])]:
                sent: Any = node.args[0]
                for rank, value in zip(ranks, exchanged([found[r][sent] for r in ranks], node.target), strict=True):
                    found[rank][node] = value
            continue
        for values in found:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            values[node] = args[0] if target is WAIT else target(*args, **kwargs)
    outputs = graph_outputs(gm.graph)
    return [[fx.map_arg(value, values.__getitem__) for value in outputs] for values in found]


def three_buckets(dtype: torch.dtype = torch.float32) -> tuple[fx.GraphModule, BucketPlan]:
    """Buckets of 17, 4 and 4 elements, in their parameters' strides, and an output that is no gradient."""
    builder = Builder()
    x, y, z, w = (builder.tangent(*shape, dtype=dtype) for shape in ((4, 3), (5,), (4,), (4,)))
    a = builder.call(aten.neg.default, x)
    b, c, d = (builder.call(aten.mul.Tensor, value, 2) for value in (y, z, w))
    gm = builder.finish([a, b, c, d, builder.call(aten.sin.default, a)], {0: 0, 1: 1, 2: 2, 3: 3})
    return gm, plan_by_hand(specs_of(gm, {0: (1, 4)}), [0, 1], [2], [3])


WAYS = {
    "ring of 2": ring(2),
    "ring of 3": ring(3),
    "ring of 3, exchanging": ring(3, "exchange"),
    "2 nodes of 2": nodes_of(2, 2),
    "2 nodes of 3, exchanging": nodes_of(2, 3, "exchange"),
    "1 node of 2": nodes_of(1, 2),
    "3 nodes of 1": nodes_of(3, 1),
}


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_every_rank_gets_the_sum(name: str, dtype: torch.dtype, wire: torch.dtype | None) -> None:
    way, members = WAYS[name]
    gm, plan = three_buckets(dtype)
    original = fx.GraphModule(gm, gm.graph)
    before = snapshot(gm)
    inputs = [random_inputs(original) for _ in range(way.size)]
    locals_ = [original(*each) for each in inputs]
    insert_allreduce(gm, plan=plan, groups=way.groups)
    compress(gm, wire=wire)
    for step in (lambda g: take_stages(g, stages=way.stages), schedule):
        step(gm)
        verify(gm, plan=plan, before=before, way=way, wire=wire)
    scales = scales_for(scale_dtypes(plan), 1 / way.size)
    results = run_ranks(gm, [[*each, *scales] for each in inputs], members)
    for output in range(4):
        expected = sum(each[output] for each in locals_) / way.size
        tolerance = 0.05 if wire is not None and not dtype.is_complex else 1e-6
        for found in results:
            torch.testing.assert_close(found[output], expected, rtol=tolerance, atol=tolerance)
        assert results[0][output].stride() == plan.grads[output].stride
    assert all(torch.equal(found[4], each[4]) for found, each in zip(results, locals_, strict=True))


def staged(way: Way) -> tuple[fx.GraphModule, BucketPlan, tuple[Any, ...]]:
    gm, plan = three_buckets()
    before = snapshot(gm)
    return take_stages(insert_allreduce(gm, plan=plan, groups=way.groups), stages=way.stages), plan, before


def test_a_bucket_of_the_right_size_is_not_padded() -> None:
    gm, _, _ = staged(ring(2)[0])
    counts = [sum(node.target is target for node in calls(gm)) for target in (aten.constant_pad_nd.default, ALL_REDUCE)]
    assert counts == [1, 0]  # of 17, 4 and 4 elements
    (send, _, _) = (node for node in gm.graph.nodes if is_send(node))
    assert send.target is REDUCE_SCATTER
    assert send.args[1:] == ("sum", 2, "a")
    gather = next(node for node in gm.graph.nodes if node.target is ALL_GATHER)
    assert gather.args[1:] == (2, "b")


def test_a_bucket_goes_on_when_the_one_behind_it_has_left() -> None:
    gm, _, _ = staged(nodes_of(2, 2)[0])
    tail = next(node for node in gm.graph.nodes if node.target is aten.sin.default)
    schedule(gm)
    order = list(gm.graph.nodes)
    steps = [stage for node in order if (stage := stage_of(node)) is not None]
    assert steps == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]
    last_send = max(i for i, node in enumerate(order) if is_send(node))
    assert order[last_send + 1] is tail  # what is left to compute comes before further waits


@pytest.mark.parametrize("wire", [None, torch.float16])
@pytest.mark.parametrize("name", WAYS)
def test_pieces_are_those_of_an_all_reduce(name: str, wire: torch.dtype | None) -> None:
    """So one compiled split backward serves every way."""
    results = []
    for stages in ((), WAYS[name][0].stages):
        gm, plan = three_buckets()
        insert_allreduce(gm, plan=plan, groups=[GROUP])
        schedule(take_stages(compress(gm, wire=wire), stages=stages))
        results.append(split(gm, plan=plan))
    (program, pieces), (other, others) = results
    assert program == other
    assert list(map(text, pieces)) == list(map(text, others))


def collective(gm: fx.GraphModule, bucket: int, step: int) -> fx.Node:
    return next(node for node in gm.graph.nodes if stage_of(node) == (bucket, step))


def over_another_group(gm: fx.GraphModule) -> None:
    gather = collective(gm, 1, 2)
    gather.args = (*gather.args[:-1], "inside")


def leave_out_the_middle(gm: fx.GraphModule) -> None:
    middle = collective(gm, 0, 1)
    (wait,) = middle.users
    wait.replace_all_uses_with(middle.args[0])  # type: ignore[arg-type]


def gather_too_early(gm: fx.GraphModule) -> None:
    """The last step takes what the first one gave, before that is there."""
    gather, first = collective(gm, 0, 2), collective(gm, 0, 0)
    gather.args = (first, *gather.args[1:])


def take_another_bucket(gm: fx.GraphModule) -> None:
    """Of the same size, so that nothing else tells."""
    ours, theirs = collective(gm, 1, 1), collective(gm, 2, 1)
    ours.args, theirs.args = theirs.args, ours.args


def mistake_the_step(gm: fx.GraphModule) -> None:
    node = collective(gm, 0, 1)
    node.meta[STAGE_META] = (0, 2)


def as_plain_all_reduce(gm: fx.GraphModule) -> None:
    send = collective(gm, 0, 0)
    send.target, send.args = ALL_REDUCE, (send.args[0], "sum", "inside")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (over_another_group, "is not Stage"),
        (leave_out_the_middle, "is not Stage"),
        (gather_too_early, "users"),
        (take_another_bucket, "expected 0 of 1"),
        (mistake_the_step, "is step 2 of bucket 0, expected 1 of 0"),
        (as_plain_all_reduce, "is not Stage"),
    ],
)
def test_spoilt_steps_are_found(spoil: Callable[[fx.GraphModule], None], message: str) -> None:
    way, _ = nodes_of(2, 2)
    gm, plan, before = staged(way)
    schedule(gm)
    verify(gm, plan=plan, before=before, way=way)
    spoil(gm)
    with pytest.raises(AssertionError, match=message):
        verify(gm, plan=plan, before=before, way=way)


def test_all_reduces_take_groups_in_turns() -> None:
    gm, plan = three_buckets()
    before = snapshot(gm)
    insert_allreduce(gm, plan=plan, groups=["x", "y"])
    assert [node.args[-1] for node in calls(gm) if is_send(node)] == ["x", "y", "x"]
    verify(gm, plan=plan, before=before, way=Way(("x", "y"), 2))
    with pytest.raises(AssertionError, match="expected"):
        verify(gm, plan=plan, before=before, way=Way(("y", "x"), 2))
