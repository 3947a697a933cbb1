"""When buckets travel: in the predicted step, with buckets of other sizes, and in the last backward that ran."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from fxddp.artifact import SplitBackward
from fxddp.backend import Backend
from fxddp.config import AUTO, MIB, Settings, in_mib
from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.cost import Machine, Network, Speeds
from fxddp.passes.outline import Outline
from fxddp.passes.plan import Bucket, BucketPlan, GradSpec
from fxddp.passes.sizing import choose_plan
from fxddp.site import Site
from fxddp.stats import BackwardRecord
from fxddp.units import count, duration, rate

from . import timeline
from .graphs import shares
from .report import Graph, Size
from .sending import Sending
from .timeline import Gradients, Span, Steps

TRIED_SIZES = (0.1, 0.25, 0.5, 1, 2, 5, 10, 25, 50, 100)
"""Bucket sizes in MiB that are compared with the one in use."""


def steps(graph: Graph) -> Steps:
    """What `simulate` needs of a graph."""
    nbytes = {bucket.index: bucket.wire_bytes for bucket in graph.buckets}
    pieces = tuple(
        (piece.seconds, piece.bucket, 0 if piece.bucket is None else nbytes[piece.bucket]) for piece in graph.pieces
    )
    return Steps(graph.forward_seconds, pieces)


def timed(graph: Graph, spans: Sequence[Span], recorded: Sequence[Span]) -> Graph:
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


def gradients(site: Site, machine: Machine, graph: Graph) -> Gradients:
    """What other plans need of a graph."""
    plan, outline = _planned(site)
    share, grads = shares(outline, machine), plan.grads
    return Gradients(grads, tuple(share(grad) * graph.seconds for grad in grads), graph.seconds)


def other_sizes(
    sites: Sequence[Site], graphs: Sequence[Gradients], speeds: Speeds | None, sending: Sending, late: Sequence[Tensor]
) -> tuple[Size, ...]:
    """What buckets of other sizes would give; nothing where their sizes are given one by one, or nothing is sent."""
    settings = sending.settings
    if speeds is None or speeds.network.world_size == 1 or settings.caps or not any(graph.grads for graph in graphs):
        return ()
    network = speeds.network

    def size(mib: float | str, plans: Sequence[BucketPlan], cap: int) -> Size:
        rest = sum(map(network.all_reduce, sending.late(late, cap)))
        exposed = timeline.exposed_with(graphs, plans, network, sending.wire_bytes, rest=rest)
        return Size(mib, sum(len(plan.buckets) for plan in plans), exposed)

    auto = [_planned(site)[0] if settings.auto else _auto(site, speeds, sending) for site in sites]
    found = [size(AUTO, auto, settings.cap)]
    for mib in sorted({*TRIED_SIZES, *(() if settings.auto else (in_mib(settings.cap),))}):
        cap = int(mib * MIB)
        first = min(settings.first_cap, cap)
        found.append(size(mib, [plan_buckets(graph.grads, cap=cap, first_cap=first) for graph in graphs], cap))
    return tuple(found)


def _auto(site: Site, speeds: Speeds, sending: Sending) -> BucketPlan:
    """The plan that `bucket_mb="auto"` would make."""
    plan, outline = _planned(site)

    def sent(grad: GradSpec) -> int:
        return sending.wire_bytes(Bucket(0, (grad,)))

    return choose_plan(plan.grads, outline, speeds=speeds, sent=sent)


def _planned(site: Site) -> tuple[BucketPlan, Outline]:
    backward = site.compilation.backward
    assert backward is not None and backward.outline is not None
    return backward.program.plan, backward.outline


def superseded(backend: Backend, sites: Sequence[Site]) -> list[Site]:
    """The graphs that did not run in the last synchronised backward, while another graph of the same code did.

    Dynamo compiles code again for other inputs; a step runs one of those graphs.
    """
    ran = _last_graphs(backend)
    frames = {site.frame for site in sites if site.number in ran} - {None}
    return [site for site in sites if site.number not in ran and site.frame in frames]


def unlike_the_last(backend: Backend, sites: Sequence[Site], replaced: int) -> Iterator[str]:
    """Where the last synchronised backward ran other graphs, or some more than once."""
    if replaced:
        what = f"{count(replaced, 'graph')} left out"
        yield f"{what}: Dynamo compiled the same code again, and the last backward ran another graph of it"
    often = Counter(_last_graphs(backend))
    for index, site in enumerate(sites):
        if often[site.number] > 1:
            yield f"graph {index} ran {often[site.number]} times in the last backward, and is counted once"


def planned_for(sites: Sequence[Site], settings: Settings, network: Network | None) -> Iterator[str]:
    """What `bucket_mb="auto"` chose buckets for, where the report does not say so already."""
    if not settings.auto:
        return
    what = f'bucket_mb="{AUTO}"'
    if len(sites) > 1:
        yield f"{what} planned each of the {len(sites)} graphs alone, as if no other were computed or sent in the step"
    for other in {site.compilation.speeds.network for site in sites if site.compilation.speeds} - {network}:
        link = f" with {rate(other.bandwidth)} and {duration(other.latency)} a message"
        sends = link if other.world_size > 1 else ", which sends nothing"
        yield f"{what} chose these buckets for {count(other.world_size, 'rank')}{sends}"


def _last_graphs(backend: Backend) -> Sequence[int]:
    return next(
        (record.graphs for record in reversed(backend.stats().backwards) if record.sync and record.launches), ()
    )


def recorded_spans(backend: Backend, sites: Sequence[Site], graphs: Sequence[Graph]) -> tuple[Span, ...]:
    """The last synchronised backward of these graphs, each once, as spans."""
    at = {site.number: graph for site, graph in zip(sites, graphs, strict=True)}
    orders = {site.number: site.compilation.backward for site in sites}
    for record in reversed(backend.stats().backwards):
        if not (record.sync and record.launches and sorted(record.graphs) == sorted(at)):
            continue
        ran = [at[number] for number in record.graphs]
        buckets = [(at[number].index, index) for number in record.graphs for index in _launched(orders[number])]
        pieces = [(graph.index, piece.index) for graph in ran for piece in graph.pieces]
        if (record.launches, record.pieces) == (len(buckets), len(pieces)):
            return _spans(record, pieces, buckets)
    return ()


def _launched(backward: SplitBackward | None) -> Sequence[int]:
    """The buckets of a graph, as all ranks launch them where they agree."""
    assert backward is not None
    return backward.program.order or range(len(backward.program.plan.buckets))


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
