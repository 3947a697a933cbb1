"""One compiled graph as data: its buckets, pieces and passes, and the code of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx

from fxddp.passes.cost import Machine
from fxddp.passes.outline import Outline
from fxddp.passes.plan import Bucket as Planned
from fxddp.passes.plan import GradSpec
from fxddp.site import Site
from fxddp.speeds import assumed

from .breaks import break_of
from .diff import changes
from .dry import Tried
from .parts import Bucket, Gradient, Graph, Pass, Piece
from .sending import Sending, runs_of


def graph_of(site: Site) -> Graph:
    """What is told of one graph, on its own; times are those of an assumed machine."""
    backend = site.backend
    sending = Sending(backend.settings, runs=runs_of(backend.settings, backend))
    return graph_at(0, site, View(assumed("cpu", 1).machine, None, None, sending))


@dataclass(frozen=True)
class View:
    """How graphs are looked at: what times are predicted with, the device to speak of, what was tried, what travels."""

    machine: Machine
    device: str | None
    tried: Tried | None
    sending: Sending


def graph_at(index: int, site: Site, view: View) -> Graph:
    """What is told of one graph among several.

    Args:
        index: its number among those with a backward.
        site: the graph.
        view: how to look at it.
    """
    backward = site.compilation.backward
    assert backward is not None
    program, told, kept = backward.program, backward.outline, backward.rewritten
    assert told is not None
    plan = program.plan
    planned = {grad.input for grad in plan.grads}
    packed = {step.bucket: k for k, step in enumerate(program.steps) if step.bucket is not None}
    launches = program.launches or [(bucket,) for bucket in range(len(plan.buckets))]
    after = {each: packed[bucket] for bucket, several in enumerate(launches) for each in several}
    codes = [_code(piece) for piece in kept.pieces] if kept else [""] * len(program.steps)
    times = view.tried.pieces if view.tried else {}
    pieces = tuple(
        replace(
            _piece(told, k, view.machine),
            graph=index,
            bucket=step.bucket,
            measured=times.get((site.number, k)),
            code=code,
        )
        for k, (step, code) in enumerate(zip(program.steps, codes, strict=True))
    )
    share = shares(told, view.machine)
    buckets = [_bucket(bucket, site, told, share, view) for bucket in plan.buckets]
    return Graph(
        index=index,
        nodes=told.nodes,
        digest=plan.digest(),
        buckets=tuple(replace(bucket, graph=index, piece=after[bucket.index]) for bucket in buckets),
        pieces=pieces,
        passes=_passes(kept.history) if kept else (),
        unused=tuple(site.names[position] for position in site.trained if position not in planned),
        predicted=float(view.machine.seconds(told.forward.at(told.values))),
        measured=view.tried.forwards.get(site.number) if view.tried else None,
        dynamo=_code(site.graph),
        forward=_code(site.compilation.forward_graph),
        backward=_code(kept.gm if kept else None),
        broken_by=break_of(site),
    )


def _code(gm: fx.GraphModule | None) -> str:
    return "" if gm is None else str(gm.print_readable(print_output=False)).strip()


def _piece(told: Outline, index: int, machine: Machine) -> Piece:
    note = told.pieces[index]
    work = note.work.at(told.values)
    dynamic = [
        f"{what} {size}" for what, size in (("flops", note.work.flops), ("bytes", note.work.nbytes)) if _moves(size)
    ]
    return Piece(
        graph=0,
        index=index,
        nodes=note.nodes,
        flops=int(work.flops),
        moved=int(work.nbytes),
        kernels=work.kernels,
        cost=", ".join(dynamic),
        bucket=None,
        predicted=float(machine.seconds(work)),
    )


def _moves(size: Any) -> bool:
    return isinstance(size, sympy.Expr) and bool(size.free_symbols)


def shares(told: Outline, machine: Machine) -> Callable[[GradSpec], float]:
    """Which share of the backward's time has passed when a gradient is ready, by the predicted work."""
    seconds = {output: float(machine.seconds(note.before.at(told.values))) for output, note in told.grads.items()}
    total = float(machine.seconds(told.work.at(told.values))) or 1.0
    return lambda grad: min(1.0, seconds[grad.output] / total)


def _bucket(bucket: Planned, site: Site, told: Outline, share: Callable[[GradSpec], float], view: View) -> Bucket:
    gradients = tuple(
        Gradient(
            name=site.names.get(grad.input, f"input {grad.input}"),
            shape=grad.shape,
            nbytes=grad.nbytes,
            ready=grad.ready,
            node=told.grads[grad.output].node,
            source=told.grads[grad.output].source,
            before=share(grad),
            rows=view.sending.rows(grad),
        )
        for grad in bucket.grads
    )
    dtype = str(bucket.dtype).removeprefix("torch.")
    device, travels = view.device or str(bucket.device), view.sending.wire_bytes(bucket)
    found = Bucket(0, bucket.index, bucket.nbytes, travels, dtype, device, gradients, piece=0, route="")
    return replace(found, route=view.sending.route(found, None))


def _passes(history: Sequence[Any]) -> tuple[Pass, ...]:
    found = []
    before = ""
    for record in history:
        code = (record.code or "").strip()
        diff = changes(before, code) if before else ""
        added, removed = (sum(line.startswith(mark) for line in diff.splitlines()) for mark in "+-")
        found.append(Pass(record.name, record.seconds, added, removed, code, diff))
        before = code
    return tuple(found)
