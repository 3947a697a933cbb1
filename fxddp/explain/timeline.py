"""When everything happens in one step: a model of one rank with one processor and one network.

    compute   forward 0 ─ forward 1 ─ piece 0 ─ piece 1 ─ piece 2 ─ wait 0 ─ wait 1
    network                              ╰──── bucket 0 ────────────────╯╰─ bucket 1 ─╯

All-reduces run one after the other, in the order in which they are launched. What the processor waits for them is
*exposed*: the step is longer for it. It waits at the end of the backward, or with overlap="next_forward" where the
next forward first reads a parameter of the bucket. Then a step is drawn from its backward to the end of the forward
after it, by when everything has arrived, so that one step is as long as any other:

    compute   piece 0 ─ piece 1 ─ piece 2 ─ wait 1 ─ forward 0 ─ wait 0 ─ forward 1
    network       ╰──── bucket 1 ─────────────────╯╰──── bucket 0 ─────╯
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fxddp.passes.cost import Network

UNCOVERED = -1
"""In place of a graph: what no graph packs."""

AFTER = -1
"""In place of a piece of the forward: what comes after all of them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time.

    Attributes:
        lane: "compute" or "network".
        kind: "forward" (a piece of it, or all), "piece" (of the backward), "bucket", "uncovered" (an all-reduce of what
            no graph packs) or "wait" (for a bucket, or for what no graph packs).
        graph, index: which one; graph -1: what no graph packs.
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
        """Such as `bucket 3`."""
        return self.kind if self.kind in ("uncovered", "wait") else f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one graph, what takes time.

    Attributes:
        forward: seconds of each piece of the forward.
        pieces: seconds of each piece of the backward, and the buckets that are launched after it.
        sent: bytes that travel for each bucket.
        needed: by bucket, the piece of the next forward that waits for it, or `AFTER`; those left out are waited for at
            the end of the backward.
    """

    forward: tuple[float, ...]
    pieces: tuple[tuple[float, tuple[int, ...]], ...]
    sent: tuple[int, ...] = ()
    needed: Mapping[int, int] = field(default_factory=dict)


class _Rank:
    """One processor and one network, what they did, and when what is under way arrives, by graph and index."""

    def __init__(self, network: Network | None) -> None:
        self.spans: list[Span] = []
        self._network = network
        self._now = self._free = 0.0
        self.under_way: dict[tuple[int, int], float] = {}

    def compute(self, kind: str, graph: int, index: int, seconds: float) -> None:
        self.spans.append(Span("compute", kind, graph, index, self._now, self._now + seconds))
        self._now += seconds

    def send(self, kind: str, graph: int, index: int, nbytes: int) -> None:
        if self._network is None:
            return
        start = max(self._now, self._free)
        self._free = start + self._network.all_reduce(nbytes)
        self.under_way[graph, index] = self._free
        self.spans.append(Span("network", kind, graph, index, start, self._free))

    def wait(self, wanted: Collection[tuple[int, int]]) -> None:
        """Waits for those of these that are under way."""
        for each in [each for each in self.under_way if each in wanted]:
            arrived = self.under_way.pop(each)
            if arrived > self._now:
                self.spans.append(Span("compute", "wait", *each, self._now, arrived))
                self._now = arrived


def simulate(graphs: Sequence[Steps], network: Network | None, uncovered: Sequence[int] = ()) -> tuple[Span, ...]:
    """The step of these graphs; graphs run backward in the reverse order.

    Args:
        graphs: in the order of their forwards.
        network: None if nothing is sent.
        uncovered: bytes that travel for each bucket that leaves after the backward.
    """
    rank = _Rank(network)
    phases = [_forward, _backward]
    if any(graph.needed for graph in graphs):
        phases.reverse()
    for phase in phases:
        phase(rank, graphs, uncovered)
    return tuple(rank.spans)


def _forward(rank: _Rank, graphs: Sequence[Steps], _: Sequence[int]) -> None:
    for number, graph in enumerate(graphs):
        for index, seconds in enumerate(graph.forward):
            rank.wait({(number, bucket) for bucket, piece in graph.needed.items() if piece == index})
            rank.compute("forward", number, index, seconds)
    rank.wait(tuple(rank.under_way))


def _backward(rank: _Rank, graphs: Sequence[Steps], uncovered: Sequence[int]) -> None:
    for number in reversed(range(len(graphs))):
        graph = graphs[number]
        for index, (seconds, launched) in enumerate(graph.pieces):
            rank.compute("piece", number, index, seconds)
            for bucket in launched:
                rank.send("bucket", number, bucket, graph.sent[bucket])
    for index, nbytes in enumerate(uncovered):
        rank.send("uncovered", UNCOVERED, index, nbytes)
    late = {(number, bucket) for number, graph in enumerate(graphs) for bucket in graph.needed}
    rank.wait(rank.under_way.keys() - late)


def waits(spans: Sequence[Span]) -> dict[tuple[int, int], float]:
    """Seconds for which each bucket is waited for, by graph and index; none for those that computation hides."""
    return {(span.graph, span.index): span.seconds for span in spans if span.kind == "wait"}


def computed(spans: Sequence[Span]) -> float:
    """Seconds in which something is computed."""
    return sum(span.seconds for span in spans if span.lane == "compute" and span.kind != "wait")


def length(spans: Sequence[Span]) -> float:
    """Seconds of the whole step."""
    return max((span.end for span in spans), default=0.0)
