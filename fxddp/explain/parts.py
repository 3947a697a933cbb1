"""The parts of a report, as plain data: no graph, tensor or process group is held."""

from dataclasses import dataclass

from fxddp.passes.outline import Source


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model and what becomes of its gradient.

    Attributes:
        name: qualified name.
        state: "bucket" (a graph packs its gradient), "eager" (used outside of the graphs: reduced after the backward),
            "unused", "frozen", "left out" (a graph has no gradient of it that can be packed) or "unknown".
        reason: why it is in no bucket; "" if it is.
        source: the line behind the reason, such as that of a graph break.
        graph, bucket: which bucket; -1 if none.
        tied: its further names.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    state: str
    reason: str = ""
    source: Source | None = None
    graph: int = -1
    bucket: int = -1
    tied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient in a bucket.

    Attributes:
        ready: position of the node that computes it among the backward's nodes.
        node: that node's name.
        source: the line of the model whose backward that node is.
        before: share of the backward's time until then.
        rows: how many rows travel in its place, if it is a table that has few; None if all of it does.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    ready: int
    node: str
    source: Source | None
    before: float
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        graph, index: which one, in the order in which they are packed.
        nbytes: as gradients.
        wire_bytes: that travel, after compression and with rows in place of tables: those of an all-reduce, of which
            each rank sends 2(N-1)/N by a ring.
        gradients: in the order in which they become ready; it is packed when the last one is.
        piece: after which piece of the backward it is launched: that which packs it, or with overlap="next_forward" a
            later one.
        route: the process group and the steps by which it is reduced, in words.
        predicted: seconds of its all-reduce, None without a network.
        start, end: when it travels, in seconds since the step began.
        exposed: for how long it is waited for.
        needed: the piece of its graph's next forward that waits for it, with overlap="next_forward"; -1 for what comes
            after the last one, None where the backward waits.
        measured: seconds from launch to the end of its all-reduce in the last recorded backward.
    """

    graph: int
    index: int
    nbytes: int
    wire_bytes: int
    dtype: str
    device: str
    gradients: tuple[Gradient, ...]
    piece: int
    route: str
    predicted: float | None = None
    start: float | None = None
    end: float | None = None
    exposed: float | None = None
    needed: int | None = None
    measured: float | None = None

    @property
    def last(self) -> Gradient:
        """The gradient it waits for."""
        return max(self.gradients, key=lambda gradient: gradient.ready)

    @property
    def names(self) -> tuple[str, ...]:
        """Qualified names of its parameters."""
        return tuple(gradient.name for gradient in self.gradients)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the backward between two launches.

    Attributes:
        nodes: operations.
        flops, moved, kernels: its work, with the sizes it was traced with.
        cost: the work as an expression of the dynamic sizes; "" if there are none.
        bucket: packed at its end, or None.
        predicted, measured: seconds.
        code: readable.
    """

    graph: int
    index: int
    nodes: int
    flops: int
    moved: int
    kernels: int
    cost: str
    bucket: int | None
    predicted: float
    measured: float | None = None
    code: str = ""

    @property
    def seconds(self) -> float:
        """Measured, or else predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass made of the backward: the readable graph after it, what it changed, and in how many seconds.

    Attributes:
        added, removed: lines of the printed graph.
    """

    name: str
    seconds: float
    added: int = 0
    removed: int = 0
    code: str = ""
    diff: str = ""


@dataclass(frozen=True, slots=True)
class Break:
    """Where Dynamo ended a graph before the end of its frame, and why."""

    reason: str
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """One compiled graph with a backward.

    Attributes:
        nodes: nodes of the backward, as AOTAutograd made it.
        digest: names the layout of the buckets; ranks with the same one can share collectives.
        unused: parameters that are inputs of the graph and get no gradient from it that can be packed.
        predicted, measured: seconds of the forward.
        dynamo, forward, backward: readable code; "" unless graphs are kept. `backward` is after all passes.
        broken_by: what ended it.
    """

    index: int
    nodes: int
    digest: str
    buckets: tuple[Bucket, ...]
    pieces: tuple[Piece, ...]
    passes: tuple[Pass, ...] = ()
    unused: tuple[str, ...] = ()
    predicted: float = 0.0
    measured: float | None = None
    dynamo: str = ""
    forward: str = ""
    backward: str = ""
    broken_by: Break | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def seconds(self) -> float:
        """Of its backward."""
        return sum(piece.seconds for piece in self.pieces)

    @property
    def forward_seconds(self) -> float:
        """Measured, or else predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class Size:
    """What another `bucket_mb` would give: how many buckets there are, and predicted seconds of exposed sending."""

    bucket_mb: float | str
    buckets: int
    exposed: float
