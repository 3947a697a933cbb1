"""When everything happens in one step: a model of one rank with one processor and one network.

    compute   forward 0 ─ forward 1 ─ piece 0 ─ piece 1 ─ piece 2 ┐
    network                              ╰─ bucket 0 ─╯ ╰── bucket 1 ──╯  uncovered

The processor never waits before the last piece. All-reduces run one after the other, each from the moment its bucket is
launched; whatever runs after the last piece is *exposed*: the step is longer for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxddp.passes.cost import Network
from fxddp.passes.plan import Bucket, BucketPlan, GradSpec


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time.

    Attributes:
        lane: "compute" or "network".
        kind: "forward", "piece", "bucket", "uncovered" (an all-reduce of what no graph packs) or "wait".
        graph, index: which one.
        start, end: seconds since the step began.
    """

    lane: str
    kind: str
    graph: int
    index: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """Such as `bucket 3`; also the name of its range in a profile, as `fxddp.bucket3.allreduce`."""
        return self.kind if self.kind in ("uncovered", "wait") else f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one graph: seconds of the forward, and of each piece with the bytes that travel for the bucket it launches."""

    forward: float
    pieces: tuple[tuple[float, int | None, int], ...]
    """(seconds, bucket or None, bytes)"""


def simulate(graphs: Sequence[Steps], network: Network | None, uncovered: Sequence[int] = ()) -> tuple[Span, ...]:
    """The step of these graphs; graphs run backward in the reverse order.

    Args:
        graphs: in the order of their forwards.
        network: None if nothing is sent.
        uncovered: bytes that travel for each bucket that leaves after the backward.
    """
    spans: list[Span] = []
    now = 0.0
    for number, graph in enumerate(graphs):
        spans.append(Span("compute", "forward", number, number, now, now + graph.forward))
        now += graph.forward
    free = now
    for number in reversed(range(len(graphs))):
        for index, (seconds, bucket, nbytes) in enumerate(graphs[number].pieces):
            spans.append(Span("compute", "piece", number, index, now, now + seconds))
            now += seconds
            if bucket is not None and network is not None:
                start = max(now, free)
                free = start + network.all_reduce(nbytes)
                spans.append(Span("network", "bucket", number, bucket, start, free))
    for index, nbytes in enumerate(uncovered if network is not None else ()):
        assert network is not None
        start = max(now, free)
        free = start + network.all_reduce(nbytes)
        spans.append(Span("network", "uncovered", -1, index, start, free))
    return tuple(spans)


def exposed(span: Span, computed: float) -> float:
    """Seconds of a span of the network after everything is computed."""
    return max(0.0, span.end - max(span.start, computed))


def computed(spans: Sequence[Span]) -> float:
    """When the last piece is over."""
    return max((span.end for span in spans if span.lane == "compute" and span.kind != "wait"), default=0.0)


def length(spans: Sequence[Span]) -> float:
    """Seconds of the whole step."""
    return max((span.end for span in spans), default=0.0)


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one graph, the seconds of its backward before each is ready, and in all."""

    grads: tuple[GradSpec, ...]
    ready: tuple[float, ...]
    total: float


def exposed_with(
    graphs: Sequence[Gradients],
    plans: Sequence[BucketPlan],
    network: Network,
    wire_bytes: Callable[[Bucket], int],
    *,
    rest: float = 0.0,
) -> float:
    """Seconds of communication that no computation hides, were the gradients packed otherwise.

    Args:
        graphs: in the order of their forwards.
        plans: of each.
        network: what sends them.
        wire_bytes: that travel for a bucket.
        rest: seconds that the network is busy after the last bucket.
    """
    now = free = 0.0
    for graph, plan in reversed(list(zip(graphs, plans, strict=True))):
        when = dict(zip((grad.output for grad in graph.grads), graph.ready, strict=True))
        for bucket in plan.buckets:
            launched = now + max(when[grad.output] for grad in bucket.grads)
            free = max(free, launched) + network.all_reduce(wire_bytes(bucket))
        now += graph.total
    return max(0.0, free - now) + rest
