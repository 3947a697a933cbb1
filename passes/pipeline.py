"""Runs the passes over one backward graph, checks after each, and remembers what each did."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .allreduce import insert_allreduce
from .bucketing import plan_buckets
from .compress import compress
from .folding import fold_scale
from .gradients import find_gradients
from .layout import lay_out
from .outline import Outline, outline, with_pieces
from .plan import BucketPlan, GradSpec
from .schedule import schedule
from .split import Program, bind_symbols, split
from .stages import Way, take_stages
from .tables import find_tables, with_rows
from .verify import snapshot, verify, verify_program

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did: its name, how long it took in seconds, and the readable graph after it if graphs are kept."""

    name: str
    seconds: float
    code: str | None = None


@dataclass(slots=True)
class Rewritten:
    """A backward graph after the passes: the whole graph, and the split form with its pieces.

    Attributes:
        outline: what is worth telling about both.
    """

    gm: fx.GraphModule
    plan: BucketPlan
    program: Program
    pieces: tuple[fx.GraphModule, ...]
    outline: Outline
    history: list[PassRecord] = field(default_factory=list)


def rewrite_backward(
    gm: fx.GraphModule,
    *,
    parameters: Mapping[int, torch.Tensor],
    forward_outputs: Sequence[Any],
    cap: int,
    first_cap: int,
    way: Way,
    caps: tuple[int, ...] = (),
    choose: Callable[[Sequence[GradSpec], Outline], BucketPlan] | None = None,
    wire: torch.dtype | None = None,
    launch: Callable[[BucketPlan, Outline], tuple[tuple[int, ...], ...]] | None = None,
    inputs: Sequence[Any] | None = None,
    fold: bool = False,
    keep: bool = False,
) -> Rewritten:
    """Plans the buckets of a backward graph and rewrites it for them.

    Args:
        gm: backward graph of AOTAutograd, edited in place.
        parameters: (fake) parameters by position among the Dynamo graph's placeholders.
        forward_outputs: descriptors of the forward graph's outputs.
        cap: size of a bucket in bytes.
        first_cap: size of the first bucket in bytes.
        way: the groups, and the steps, in which the whole graph sums its buckets.
        caps: sizes of the buckets one by one, in bytes, in place of `cap` and `first_cap`.
        choose: makes the plan, in place of all sizes.
        wire: the dtype in which wider buckets travel, None for their own.
        launch: says which buckets are launched when one has been packed; None for each by itself.
        inputs: the (fake) values that the graph will be called with, if they may differ from the traced ones.
        fold: fold the factors of buckets into what computes gradients.
        keep: keep the readable code after each pass.
    """
    history: list[PassRecord] = []
    printed: list[fx.Node] = []

    def record(name: str, start: float) -> None:
        nonlocal printed
        seconds = time.perf_counter() - start
        code = None
        if keep:
            nodes = list(gm.graph.nodes)
            # every pass that changes a graph adds or moves nodes: otherwise the text of the last one stands
            code = history[-1].code if nodes == printed else gm.print_readable(print_output=False)
            printed = nodes
        history.append(PassRecord(name, seconds, code))
        log.debug("%s: %.1f ms", name, seconds * 1e3)

    if inputs is not None:
        lay_out(gm, inputs)
    start = time.perf_counter()
    before = snapshot(gm)
    grads = find_gradients(gm, parameters=parameters, forward_outputs=forward_outputs)
    tables = find_tables(gm, grads)
    grads = with_rows(grads, tables)
    told = outline(gm, grads)
    plan = plan_buckets(grads, cap=cap, first_cap=first_cap, caps=caps) if choose is None else choose(grads, told)
    record("plan", start)
    rewrites: list[tuple[str, Callable[[fx.GraphModule], fx.GraphModule]]] = [
        ("insert_allreduce", lambda g: insert_allreduce(g, plan=plan, groups=way.groups)),
        *([("compress", lambda g: compress(g, wire=wire))] if wire is not None else []),
        *([("fold_scale", fold_scale)] if fold else []),
        *([("take_stages", lambda g: take_stages(g, stages=way.stages))] if way.stages else []),
        ("schedule", schedule),
        ("bind_symbols", bind_symbols),
    ]
    done: set[str] = set()
    for name, rewrite in rewrites:
        start = time.perf_counter()
        gm = rewrite(gm)
        done.add(name)
        so_far = way if "take_stages" in done else replace(way, stages=())
        verify(gm, plan=plan, before=before, way=so_far, wire=wire if "compress" in done else None)
        record(name, start)
    start = time.perf_counter()
    program, pieces = split(gm, plan=plan, tables=tables)
    told = with_pieces(told, pieces)
    if launch is not None and not any(step.collectives for step in program.steps):  # the model's own keep their place
        program = replace(program, launches=launch(plan, told))
    verify_program(program, outputs=len(before))
    record("split", start)
    return Rewritten(gm, plan, program, pieces, told, history)
