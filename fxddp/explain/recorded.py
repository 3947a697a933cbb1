"""The last backward that ran: which graphs took part, and when their pieces and buckets did what."""

from collections import Counter
from collections.abc import Iterator, Sequence

from fxddp.artifact import SplitBackward
from fxddp.backend import Backend
from fxddp.site import Site
from fxddp.stats import BackwardRecord
from fxddp.units import count

from .parts import Graph
from .timeline import Span


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
        if backend.settings.overlap is not None and not all(bucket.waits for bucket in record.buckets):
            continue  # some are still under way
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
    ends = [when for _, _, when in events[1:]] + [max(record.end - record.begin, events[-1][2])]
    only = pieces[0][0] if len({graph for graph, _ in pieces}) == 1 else None  # of several, a forward's is not known
    for (kind, index, when), end in zip(events, ends, strict=True):
        if kind == "piece":
            spans.append(Span("compute", "piece", *pieces[index], when, end))
        elif kind == "forward" and only is not None:
            spans.append(Span("compute", "forward", only, index, when, end))
    for where, bucket in zip(buckets, record.buckets, strict=True):
        waits, launched = bucket.waits - record.begin, bucket.launched - record.begin
        over = waits + bucket.waited if bucket.waits else record.end - record.begin
        if bucket.waits:
            spans.append(Span("compute", "wait", *where, waits, over))
        arrived = over if bucket.arrived is None else bucket.arrived - record.begin
        spans.append(Span("network", "bucket", *where, launched, arrived))
    return tuple(spans)
