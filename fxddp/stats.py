"""What happened in the last backwards: a log of events that costs little enough to be always on."""

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

KEPT_BACKWARDS = 64


@dataclass(slots=True)
class BackwardRecord:
    """One backward, from its first compiled graph to its end.

    Attributes:
        sync: whether gradients were reduced.
        launches: all-reduces launched for buckets.
        pieces: compiled pieces run.
        bytes: bytes of those buckets, as gradients.
        wire_bytes: bytes that travelled for all buckets, in graphs and outside, after compression: those of an
            all-reduce, of which each rank sends 2(N-1)/N by a ring.
        uncovered: names of the parameters that were reduced outside of the graphs, after the backward.
        uncovered_bytes: bytes of their gradients.
        uncovered_launches: all-reduces launched for them.
        events: (what, index, seconds of `time.perf_counter`), in order: "piece", "launch" and "wait", and for buckets
            outside of the graphs "launch outside" and "wait outside". Each kind is numbered through the whole backward.
        begin: when it began, in seconds of `time.perf_counter`.
        end: when every `.grad` was there.
    """

    sync: bool = False
    launches: int = 0
    pieces: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    uncovered: tuple[str, ...] = ()
    uncovered_bytes: int = 0
    uncovered_launches: int = 0
    events: list[tuple[str, int, float]] = field(default_factory=list)
    begin: float = field(default_factory=perf_counter)
    end: float = 0.0

    def piece(self) -> None:
        """Notes that a piece starts."""
        self.events.append(("piece", self.pieces, perf_counter()))
        self.pieces += 1

    def launch(self, nbytes: int) -> int:
        """Notes that a bucket was launched; returns its number."""
        index = self.launches
        self.events.append(("launch", index, perf_counter()))
        self.launches += 1
        self.bytes += nbytes
        return index

    def travels(self, nbytes: int) -> None:
        """Notes that a collective carries this many bytes for a bucket."""
        self.wire_bytes += nbytes

    def launch_outside(self) -> int:
        """Notes that a bucket was launched that no graph packed; returns its number."""
        index = self.uncovered_launches
        self.events.append(("launch outside", index, perf_counter()))
        self.uncovered_launches += 1
        return index

    def wait(self, index: int, *, outside: bool = False) -> None:
        """Notes that the wait for a bucket starts."""
        self.events.append(("wait outside" if outside else "wait", index, perf_counter()))


@dataclass(frozen=True, slots=True)
class Stats:
    """What a backend did: its last backwards, newest last, and how many there were."""

    backwards: tuple[BackwardRecord, ...]
    total: int

    @property
    def last(self) -> BackwardRecord:
        """The newest backward."""
        if not self.backwards:
            raise RuntimeError("no backward has run through this backend yet")
        return self.backwards[-1]


class EventLog:
    """Collects the records of a backend."""

    def __init__(self) -> None:
        self._records: deque[BackwardRecord] = deque(maxlen=KEPT_BACKWARDS)
        self._total = 0
        self.synchronised = 0

    def add(self, record: BackwardRecord) -> None:
        """Keeps a backward that is over."""
        record.end = perf_counter()
        self._records.append(record)
        self._total += 1
        self.synchronised += record.sync

    def stats(self) -> Stats:
        """What was kept."""
        return Stats(tuple(self._records), self._total)
