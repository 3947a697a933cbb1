"""Turns what a backend compiled into an `Explanation`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from fxddp.artifact import SplitBackward
from fxddp.backend import Backend
from fxddp.comm_hook import CommHook
from fxddp.config import AUTO, MIB, Settings
from fxddp.packing import packs
from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.cost import Machine, Network, Speeds
from fxddp.passes.outline import Outline, Source, innermost
from fxddp.passes.plan import Bucket as Planned
from fxddp.passes.plan import BucketPlan, GradSpec
from fxddp.passes.sizing import choose_ends
from fxddp.site import Site
from fxddp.speeds import assumed
from fxddp.stats import BackwardRecord
from fxddp.transport import describe

from . import advice, timeline
from .diff import changes
from .dry import Tried
from .report import ASSUMED, MEASURED, Break, Bucket, Explanation, Gradient, Graph, Parameter, Pass, Piece, Size
from .timeline import Gradients, Span, Steps, simulate

TRIED_SIZES = (0.1, 0.25, 0.5, 1, 2, 5, 10, 25, 50, 100)
"""Bucket sizes in MiB that are compared with the one in use."""


def gather(
    backend: Backend,
    *,
    model: str,
    settings: Settings,
    network: Network | None,
    machine: Machine,
    device: str | None = None,
    origins: Mapping[str, str],
    notes: Sequence[str] = (),
    tried: Tried | None = None,
    trained: Backend | None = None,
) -> Explanation:
    """The report on a backend's graphs.

    Args:
        backend: what compiled them.
        model: name of what was compiled.
        settings: what the user asked for.
        network: what to predict all-reduces with.
        machine: what to predict computation with.
        device: report this device in place of the one that was traced on.
        origins: where the figures of "machine" and "network" come from.
        notes: what to keep in mind.
        tried: what a dry run showed; None for a backend that trains.
        trained: the backend that trains the model, if one does.
    """
    numbered = [(n, site) for n, site in enumerate(backend.sites) if site.compilation.backward is not None]
    world_size = 1 if network is None else network.world_size
    view = _View(machine, device, tried, _Sending(settings, world_size, _runs(settings, trained)))
    graphs = _numbered([_graph(i, n, site, view) for i, (n, site) in enumerate(numbered)], view.sending)
    breaks = _breaks(backend, tried)
    parameters = _parameters(backend, graphs, breaks, tried)
    eager = {parameter.name for parameter in parameters if parameter.state == "eager"}
    late = [tensor for name, tensor in backend.known_tensors() if name in eager]
    spans = simulate([_steps(graph) for graph in graphs], network, list(view.sending.late(late, settings.cap)))
    recorded = _recorded(backend, graphs)
    graphs = [_timed(graph, spans, recorded) for graph in graphs]
    gradients = [_gradients(site, machine, graph) for (_, site), graph in zip(numbered, graphs, strict=True)]
    speeds = None if network is None else Speeds(machine, network)
    found = Explanation(
        model=model,
        graphs=tuple(graphs),
        parameters=tuple(parameters),
        settings=_described(settings, view.sending),
        machine=machine,
        network=network,
        device=device or (graphs[0].buckets[0].device if graphs and graphs[0].buckets else "cpu"),
        assumed=tuple(name for name, origin in origins.items() if origin == ASSUMED),
        measured=tuple(name for name, origin in origins.items() if origin == MEASURED),
        breaks=tuple(breaks),
        timeline=spans,
        recorded=recorded,
        sizes=_sizes([site for _, site in numbered], gradients, speeds, view.sending, late),
        notes=(*notes, *_unmodelled(settings, view.sending)),
        versions={"fxddp": _version(), "torch": torch.__version__},
    )
    return replace(found, advice=tuple(advice.advise(found)))


def _version() -> str:
    from fxddp import __version__

    return __version__


def _described(settings: Settings, sending: "_Sending") -> dict[str, Any]:
    """The arguments of `fxddp.backend`, as numbers and text."""
    inner = settings.inner if isinstance(settings.inner, str) else getattr(settings.inner, "__name__", "a callable")
    mesh = settings.mesh
    return {
        "bucket_mb": AUTO if settings.auto else settings.cap / MIB,
        "first_bucket_mb": AUTO if settings.auto else min(settings.first_cap, settings.cap) / MIB,
        "inner": inner,
        "split": settings.split,
        "find_unused_parameters": settings.find_unused_parameters,
        "static_graph": settings.static_graph,
        "comm_hook": sending.runs.hook,
        "codec": None if settings.codec is None else str(settings.codec),
        "optimizer": sending.runs.optimizer,
        "algorithm": settings.algorithm,
        "process_groups": len(settings.lanes) or 1,
        "device_mesh": None if mesh is None else [mesh.size(0), mesh.size(1)],
        "options": {key: str(value) for key, value in settings.options.items()},
    }


def _unmodelled(settings: Settings, sending: "_Sending") -> Iterator[str]:
    """What the predicted times leave out."""
    if settings.mesh is not None:
        yield "sending is predicted as one ring over all ranks, as if links inside a node were no faster than across"
    if sending.runs.hook is not None:
        yield f"sending is predicted as an all-reduce of every bucket, whatever {sending.runs.hook} makes of it"
    if sending.runs.optimizer is not None:
        yield f"the updates of {sending.runs.optimizer} are not in the predicted step"


# --- what travels -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Runs:
    """Names of what runs on every bucket: a communication hook in place of the all-reduce, an optimizer after it."""

    hook: str | None = None
    optimizer: str | None = None


def _runs(settings: Settings, trained: Backend | None) -> _Runs:
    """What the settings ask for, or else what was registered on a backend later."""
    hook = None if settings.comm_hook is None else CommHook(None, settings.comm_hook).name
    optimizer = None if settings.optimizer is None else type(settings.optimizer).__qualname__
    if trained is not None:
        if hook is None and settings.codec is None and trained.comm_hook is not None:
            hook = trained.comm_hook.name
        if optimizer is None and trained.optimizer is not None:
            optimizer = trained.optimizer.name
    return _Runs(hook, optimizer)


@dataclass(frozen=True)
class _Sending:
    """How buckets travel."""

    settings: Settings
    world_size: int = 1
    runs: _Runs = _Runs()

    def wire_bytes(self, bucket: Planned) -> int:
        """Bytes that travel for a bucket of a plan."""
        return self.settings.wire_bytes(bucket, self.world_size)

    def late(self, tensors: Sequence[Tensor], cap: int) -> Iterator[int]:
        """Bytes that travel for each bucket of what leaves after the backward, because no graph packs it."""
        codec = self.settings.codec
        for members in packs(tensors, cap):
            if codec is None:
                yield sum(tensor.nbytes for tensor in members)
            else:
                yield codec.nbytes([tensor.shape for tensor in members], members[0].dtype, self.world_size)

    def route(self, bucket: Bucket, index: int | None) -> str:
        """By what a bucket travels, and what becomes of it; `index`: its number in the backward, if known."""
        codec, runs = self.settings.codec, self.runs
        steps = describe(self.settings, index)
        if codec is not None and codec.steps and bucket.wire_bytes < bucket.nbytes:
            steps = codec.steps
        if runs.hook is not None:
            steps = f"hook {runs.hook}"
        return steps if runs.optimizer is None else f"{steps}, then {runs.optimizer}"


def _numbered(graphs: Sequence[Graph], sending: _Sending) -> list[Graph]:
    """Adds to the buckets by what they travel; they are numbered in the order in which they are launched."""
    found, count = [], 0
    for graph in reversed(graphs):
        buckets = [replace(bucket, route=sending.route(bucket, count + i)) for i, bucket in enumerate(graph.buckets)]
        count += len(buckets)
        found.append(replace(graph, buckets=tuple(buckets)))
    return found[::-1]


# --- graphs -----------------------------------------------------------------------------------------


def graph_of(site: Site) -> Graph:
    """What is told of one graph, on its own; times are those of an assumed machine."""
    backend = site.backend
    sending = _Sending(backend.settings, runs=_runs(backend.settings, backend))
    return _graph(0, 0, site, _View(assumed("cpu", 1).machine, None, None, sending))


@dataclass(frozen=True)
class _View:
    """How graphs are looked at: what times are predicted with, the device to speak of, what was tried, what travels."""

    machine: Machine
    device: str | None
    tried: Tried | None
    sending: _Sending


def _graph(index: int, number: int, site: Site, view: _View) -> Graph:
    backward = _backward(site)
    program, told, kept = backward.program, backward.outline, backward.rewritten
    assert told is not None
    plan = program.plan
    planned = {grad.input for grad in plan.grads}
    after = {step.bucket: k for k, step in enumerate(program.steps) if step.bucket is not None}
    codes = [_code(piece) for piece in kept.pieces] if kept else [""] * len(program.steps)
    times = view.tried.pieces if view.tried else {}
    pieces = tuple(
        replace(
            _piece(told, k, view.machine), graph=index, bucket=step.bucket, measured=times.get((number, k)), code=code
        )
        for k, (step, code) in enumerate(zip(program.steps, codes, strict=True))
    )
    share = _shares(told, view.machine)
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
        measured=view.tried.forwards.get(number) if view.tried else None,
        dynamo=_code(site.graph),
        forward=_code(site.compilation.forward_graph),
        backward=_code(kept.gm if kept else None),
        broken_by=_break(site),
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


def _shares(told: Outline, machine: Machine) -> Callable[[GradSpec], float]:
    """Which share of the backward's time has passed when a gradient is ready, by the predicted work."""
    seconds = {output: float(machine.seconds(note.before.at(told.values))) for output, note in told.grads.items()}
    total = float(machine.seconds(told.work.at(told.values))) or 1.0
    return lambda grad: min(1.0, seconds[grad.output] / total)


def _bucket(bucket: Planned, site: Site, told: Outline, share: Callable[[GradSpec], float], view: _View) -> Bucket:
    gradients = tuple(
        Gradient(
            name=site.names.get(grad.input, f"input {grad.input}"),
            shape=grad.shape,
            nbytes=grad.nbytes,
            ready=grad.ready,
            node=told.grads[grad.output].node,
            source=told.grads[grad.output].source,
            before=share(grad),
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


# --- parameters -------------------------------------------------------------------------------------


def _break(site: Site) -> Break | None:
    return None if site.broken_by is None else Break(_plain(site.broken_by[0]), site.broken_by[1])


def _plain(reason: str) -> str:
    """Dynamo's explanation of a graph break in one line, without addresses and without the hints below it."""
    lines = [re.sub(r" at 0x[0-9a-f]+", "", line).strip() for line in reason.strip().splitlines()]
    explained = (line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: "))
    return next(explained, lines[0] if lines else "")


def _breaks(backend: Backend, tried: Tried | None) -> list[Break]:
    """Each place once; a dry run hears of those before any graph, too."""
    found = [each for site in backend.sites if (each := _break(site)) is not None]
    found += [Break(_plain(reason), innermost(trace)) for reason, trace in (tried.breaks if tried else ())]
    places: dict[object, Break] = {}
    for each in found:
        places.setdefault((each.source.file, each.source.line) if each.source else each.reason, each)
    return list(places.values())


def _parameters(
    backend: Backend, graphs: Sequence[Graph], breaks: Sequence[Break], tried: Tried | None
) -> list[Parameter]:
    packed: dict[str, Parameter] = {}
    for bucket in (bucket for graph in graphs for bucket in graph.buckets):
        for each in bucket.gradients:
            where = Parameter(each.name, each.shape, bucket.dtype, each.nbytes, "bucket")
            packed.setdefault(each.name, replace(where, graph=bucket.graph, bucket=bucket.index))
    left_out = {name for graph in graphs for name in graph.unused}
    tied = backend.modules.tied()
    found: dict[str, Parameter] = {}
    for name, tensor in backend.known_tensors():
        if not isinstance(tensor, nn.Parameter):
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        about = Parameter(name, tuple(tensor.shape), dtype, tensor.nbytes, "", tied=tied.get(name, ()))
        if not tensor.requires_grad:
            found[name] = replace(about, state="frozen", reason="does not require grad")
        elif name in packed:
            found[name] = replace(packed[name], tied=about.tied)
        elif name in left_out:
            found[name] = replace(about, state="left out", reason=LEFT_OUT)
        else:
            state, reason, source = _outside(name, tensor, breaks, tried)
            found[name] = replace(about, state=state, reason=reason, source=source)
    return list({**found, **{name: each for name, each in packed.items() if name not in found}}.values())


LEFT_OUT = "an input of a graph, but its gradient is always zero, sparse, or of another dtype"


def _outside(
    name: str, parameter: Tensor, breaks: Sequence[Break], tried: Tried | None
) -> tuple[str, str, Source | None]:
    """What becomes of a parameter that no graph has."""
    if tried is None:
        return "unknown", "in no compiled graph so far; if eager code uses it, it is reduced after the backward", None
    if id(parameter) in tried.used:
        reason = "used in eager code (a graph break or a disabled part); reduced after the backward, not overlapped"
        found = _break_of(name, breaks)
        return "eager", f"{reason}: {found.reason}" if found else reason, found.source if found else None
    return "unused", "not used by this forward", None


def _break_of(name: str, breaks: Sequence[Break]) -> Break | None:
    """The graph break whose line speaks of a part that this parameter belongs to, or the only one there is."""
    parts = [part for part in name.split(".")[:-1] if not part.isdigit()]
    for part in reversed(parts):
        for each in breaks:
            if each.source is not None and f".{part}" in each.source.text:
                return each
    return breaks[0] if len(breaks) == 1 else None


# --- times ------------------------------------------------------------------------------------------


def _steps(graph: Graph) -> Steps:
    nbytes = {bucket.index: bucket.wire_bytes for bucket in graph.buckets}
    pieces = tuple(
        (piece.seconds, piece.bucket, 0 if piece.bucket is None else nbytes[piece.bucket]) for piece in graph.pieces
    )
    return Steps(graph.forward_seconds, pieces)


def _timed(graph: Graph, spans: Sequence[Span], recorded: Sequence[Span]) -> Graph:
    """Adds to the buckets when they travel."""
    computed = timeline.computed(spans)
    sent = {span.index: span for span in spans if span.kind == "bucket" and span.graph == graph.index}
    ran = {span.index: span for span in recorded if span.kind == "bucket" and span.graph == graph.index}
    buckets = []
    for bucket in graph.buckets:
        span = sent.get(bucket.index)
        measured = ran[bucket.index].seconds if bucket.index in ran else None
        if span is None:
            buckets.append(replace(bucket, measured=measured))
            continue
        hidden = timeline.exposed(span, computed)
        buckets.append(
            replace(
                bucket,
                predicted=span.seconds,
                start=span.start,
                end=span.end,
                exposed=hidden,
                measured=measured,
            )
        )
    return replace(graph, buckets=tuple(buckets))


def _gradients(site: Site, machine: Machine, graph: Graph) -> Gradients:
    backward = _backward(site)
    assert backward.outline is not None
    share = _shares(backward.outline, machine)
    grads = backward.program.plan.grads
    return Gradients(grads, tuple(share(grad) * graph.seconds for grad in grads), graph.seconds)


def _sizes(
    sites: Sequence[Site], graphs: Sequence[Gradients], speeds: Speeds | None, sending: _Sending, late: Sequence[Tensor]
) -> tuple[Size, ...]:
    settings = sending.settings
    if speeds is None or settings.caps or not any(graph.grads for graph in graphs):
        return ()
    network = speeds.network

    def size(mib: float | str, plans: Sequence[BucketPlan], cap: int) -> Size:
        rest = sum(map(network.all_reduce, sending.late(late, cap)))
        exposed = timeline.exposed_with(graphs, plans, network, sending.wire_bytes, rest=rest)
        return Size(mib, sum(len(plan.buckets) for plan in plans), exposed)

    now = [_backward(site).program.plan for site in sites]
    auto = [_auto(site, plan, speeds, sending) for site, plan in zip(sites, now, strict=True)]
    found = [size(AUTO, now if settings.auto else auto, settings.cap)]
    for mib in sorted({*TRIED_SIZES, *(() if settings.auto else (settings.cap / MIB,))}):
        cap = int(mib * MIB)
        first = min(settings.first_cap, cap)
        found.append(size(mib, [plan_buckets(graph.grads, cap=cap, first_cap=first) for graph in graphs], cap))
    return tuple(found)


def _auto(site: Site, plan: BucketPlan, speeds: Speeds, sending: _Sending) -> BucketPlan:
    """The plan that `bucket_mb="auto"` would make."""
    told = _backward(site).outline
    assert told is not None

    def sent(grad: GradSpec) -> int:
        return sending.wire_bytes(Planned(0, (grad,)))

    ends = choose_ends(plan.grads, told, speeds=speeds, sent=sent)
    return plan_buckets(plan.grads, cap=plan.cap, first_cap=plan.first_cap, ends=ends)


def _backward(site: Site) -> SplitBackward:
    backward = site.compilation.backward
    assert backward is not None
    return backward


def _recorded(backend: Backend, graphs: Sequence[Graph]) -> tuple[Span, ...]:
    """The last synchronised backward of these graphs, as spans."""
    records = [record for record in backend.stats().backwards if record.sync and record.launches]
    buckets = [(graph.index, bucket.index) for graph in reversed(graphs) for bucket in graph.buckets]
    pieces = [(graph.index, piece.index) for graph in reversed(graphs) for piece in graph.pieces]
    for record in reversed(records):
        if (record.launches, record.pieces) == (len(buckets), len(pieces)):
            return _spans(record, pieces, buckets)
    return ()


def _spans(
    record: BackwardRecord, pieces: Sequence[tuple[int, int]], buckets: Sequence[tuple[int, int]]
) -> tuple[Span, ...]:
    spans = []
    events = [(kind, index, when - record.begin) for kind, index, when in record.events]
    ends = [when for _, _, when in events[1:]] + [record.end - record.begin]
    for (kind, index, when), end in zip(events, ends, strict=True):
        if kind == "piece":
            spans.append(Span("compute", "piece", *pieces[index], when, end))
    for where, bucket in zip(buckets, record.buckets, strict=True):
        waits, launched = bucket.waits - record.begin, bucket.launched - record.begin
        over = waits + bucket.waited if bucket.waits else record.end - record.begin
        if bucket.waits:
            spans.append(Span("compute", "wait", *where, waits, over))
        arrived = over if bucket.arrived is None else bucket.arrived - record.begin
        spans.append(Span("network", "bucket", *where, launched, arrived))
    return tuple(spans)


def name_of(model: Any) -> str:
    """What to call a model or a function in a report."""
    if isinstance(model, nn.Module):
        return type(model).__name__
    return str(getattr(model, "__qualname__", type(model).__name__))
