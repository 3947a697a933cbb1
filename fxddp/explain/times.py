"""When buckets travel in the predicted step: as they are, and with other sizes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from torch import Tensor

from fxddp.artifact import SplitBackward
from fxddp.config import AUTO, MIB, Settings, in_mib
from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.choosing import choose_plan
from fxddp.passes.cost import Machine, Network, Speeds
from fxddp.passes.forward import first_needed, piece_of_each
from fxddp.passes.launching import CAUTION, plan_launches
from fxddp.passes.outline import Outline
from fxddp.passes.plan import Bucket, BucketPlan, GradSpec
from fxddp.site import Site
from fxddp.units import count, duration, rate

from . import timeline
from .graphs import shares
from .parts import Graph, Size
from .sending import Sending
from .timeline import AFTER, Span, Steps

TRIED_SIZES = (0.1, 0.25, 0.5, 1, 2, 5, 10, 25, 50, 100)
"""Bucket sizes in MiB that are compared with the one in use."""


@dataclass(frozen=True)
class Timed:
    """One graph, with what other plans need of it.

    Attributes:
        site: what was compiled.
        graph: the same, as data.
        machine: what its times are predicted with.
        network: what sends its buckets, or None.
        sending: how they travel.
        shared: positions of parameters that another graph uses, too.
    """

    site: Site
    graph: Graph
    machine: Machine
    network: Network | None
    sending: Sending
    shared: frozenset[int]

    def steps(self) -> Steps:
        """What takes time as it is."""
        graph, program = self.graph, _compiled(self.site).program
        launches = program.launches or [(bucket,) for bucket in range(len(program.plan.buckets))]
        launched = [() if step.bucket is None else launches[step.bucket] for step in program.steps]
        pieces = tuple((piece.seconds, after) for piece, after in zip(graph.pieces, launched, strict=True))
        return self._steps(program.plan, pieces, self.sending.settings.forward_size)

    def steps_with(self, plan: BucketPlan, size: int) -> Steps:
        """What would take time with other buckets.

        Args:
            plan: of the buckets.
            size: bytes that a piece of the forward is the first to read.
        """
        total = self.graph.seconds
        ready = list(accumulate((max(map(self._share, bucket.grads)) * total for bucket in plan.buckets), max))
        launched: Sequence[tuple[int, ...]] = [(bucket.index,) for bucket in plan.buckets]
        if self._late and self.network is not None:
            sending = [float(self.network.all_reduce(self.sending.wire_bytes(bucket))) for bucket in plan.buckets]
            needed = first_needed(plan, _outline(self.site).reads)
            launched = plan_launches([CAUTION * seconds for seconds in ready], sending, needed)
        pieces = [(end - start, after) for (start, end), after in zip(pairwise((0.0, *ready)), launched, strict=True)]
        return self._steps(plan, (*pieces, (total - (ready[-1] if ready else 0.0), ())), size)

    @cached_property
    def _share(self) -> Callable[[GradSpec], float]:
        return shares(_outline(self.site), self.machine)

    @property
    def _late(self) -> bool:
        """Whether the next forward waits."""
        sends = self.network is not None and self.network.world_size > 1
        return sends and self.sending.settings.overlap is not None

    def _steps(self, plan: BucketPlan, pieces: tuple[tuple[float, tuple[int, ...]], ...], size: int) -> Steps:
        sent = tuple(map(self.sending.wire_bytes, plan.buckets))
        whole = self.graph.forward_seconds
        if not self._late:
            return Steps((whole,), pieces, sent)
        told = _outline(self.site)
        piece_of = piece_of_each(told.reads, size)
        starts = {piece: each.before for each, piece in zip(reversed(told.reads), reversed(piece_of), strict=True)}
        total = float(self.machine.seconds(told.forward.at(told.values))) or 1.0
        at = [whole * float(self.machine.seconds(starts[piece].at(told.values))) / total for piece in sorted(starts)]
        ends = [0.0, *at[1:], whole]
        forward = tuple(end - start for start, end in pairwise(ends))
        reads = {position: k for each, k in zip(told.reads, piece_of, strict=True) for position in each.positions}
        unread = AFTER if told.reads else 0
        needed = {
            bucket.index: min((reads[grad.input] for grad in bucket.grads if grad.input in reads), default=unread)
            for bucket in plan.buckets
            if self.shared.isdisjoint(grad.input for grad in bucket.grads)
        }
        return Steps(forward, pieces, sent, needed)


def with_times(
    sites: Sequence[Site], graphs: Sequence[Graph], machine: Machine, network: Network | None, sending: Sending
) -> list[Timed]:
    """The graphs, with what their steps and those of other plans are made of."""
    often = Counter(
        (grad.name, grad.shape) for graph in graphs for bucket in graph.buckets for grad in bucket.gradients
    )
    found = []
    for site, graph in zip(sites, graphs, strict=True):
        told = (gradient for bucket in graph.buckets for gradient in bucket.gradients)
        packed = (grad.input for bucket in _plan(site).buckets for grad in bucket.grads)
        shared = frozenset(k for k, each in zip(packed, told, strict=True) if often[each.name, each.shape] > 1)
        found.append(Timed(site, graph, machine, network, sending, shared))
    return found


def timed(graph: Graph, steps: Steps, spans: Sequence[Span], recorded: Sequence[Span]) -> Graph:
    """Adds to the buckets when they travel."""
    sent = {span.index: span for span in spans if span.kind == "bucket" and span.graph == graph.index}
    ran = {span.index: span for span in recorded if span.kind == "bucket" and span.graph == graph.index}
    waits = timeline.waits(spans)
    buckets = []
    for bucket in graph.buckets:
        span = sent.get(bucket.index)
        measured = ran[bucket.index].seconds if bucket.index in ran else None
        if span is None:
            buckets.append(replace(bucket, measured=measured))
            continue
        buckets.append(
            replace(
                bucket,
                predicted=span.seconds,
                start=span.start,
                end=span.end,
                exposed=waits.get((graph.index, bucket.index), 0.0),
                needed=steps.needed.get(bucket.index),
                measured=measured,
            )
        )
    return replace(graph, buckets=tuple(buckets))


def other_sizes(
    graphs: Sequence[Timed], step: Sequence[Span], speeds: Speeds | None, sending: Sending, late: Sequence[Tensor]
) -> tuple[Size, ...]:
    """What buckets of other sizes would give; nothing where their sizes are given one by one, or nothing is sent.

    Args:
        graphs: of one step.
        step: as it is predicted with the size in use.
        speeds: what it is predicted with, None without ranks.
        sending: how buckets travel.
        late: parameters that no graph packs.
    """
    settings = sending.settings
    if speeds is None or speeds.network.world_size == 1 or settings.caps or not any(g.graph.buckets for g in graphs):
        return ()
    network = speeds.network

    def size(mib: float | str, plans: Sequence[BucketPlan], cap: int) -> Size:
        cut = replace(settings, cap=cap).forward_size
        steps = [graph.steps_with(plan, cut) for graph, plan in zip(graphs, plans, strict=True)]
        spans = timeline.simulate(steps, network, list(sending.late(late, cap)))
        return summed(mib, plans, spans)

    def summed(mib: float | str, plans: Sequence[BucketPlan], spans: Sequence[Span]) -> Size:
        return Size(mib, sum(len(plan.buckets) for plan in plans), sum(timeline.waits(spans).values()))

    own = [_plan(graph.site) for graph in graphs]
    found = [] if settings.auto else [size(AUTO, [_auto(g.site, speeds, sending) for g in graphs], settings.cap)]
    now = summed(AUTO if settings.auto else in_mib(settings.cap), own, step)
    for mib in sorted({*TRIED_SIZES} - {now.bucket_mb}):
        cap = int(mib * MIB)
        first = min(settings.first_cap, cap)
        plans = [plan_buckets(plan.grads, cap=cap, first_cap=first) for plan in own]
        found.append(size(mib, plans, cap))
    return tuple(sorted((*found, now), key=lambda each: (each.bucket_mb != AUTO, each.bucket_mb)))


def _auto(site: Site, speeds: Speeds, sending: Sending) -> BucketPlan:
    """The plan that `bucket_mb="auto"` would make."""

    def sent(grad: GradSpec) -> int:
        return sending.wire_bytes(Bucket(0, (grad,)))

    return choose_plan(_plan(site).grads, _outline(site), speeds=speeds, sent=sent)


def _compiled(site: Site) -> SplitBackward:
    assert site.compilation.backward is not None
    return site.compilation.backward


def _plan(site: Site) -> BucketPlan:
    return _compiled(site).program.plan


def _outline(site: Site) -> Outline:
    outline = _compiled(site).outline
    assert outline is not None
    return outline


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
