"""What happened in the last backwards: a log of events that costs little enough to be always on."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from time import perf_counter
from typing import Any, Protocol

from .units import count, duration, rate, share, size

KEPT_BACKWARDS = 64


@dataclass(slots=True)
class BucketRecord:
    """One all-reduce of one bucket; times in seconds of `time.perf_counter`.

    Attributes:
        nbytes: bytes of the bucket, as gradients.
        launched: when it was launched.
        arrived: when it was first seen to be complete, which is looked for at each piece, launch and wait; None if it
            was not seen, as where the processor runs ahead of a GPU.
        waits: when the wait for it began.
        waited: how long that took: what nothing hid.
    """

    nbytes: int
    launched: float
    arrived: float | None = None
    waits: float = 0.0
    waited: float = 0.0


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
        graphs: which compiled graphs ran, in that order, numbered as they were compiled.
        events: (what, index, seconds of `time.perf_counter`), in order: "piece", "launch" and "wait", and for buckets
            outside of the graphs "launch outside" and "wait outside". Each kind is numbered through the whole backward.
            With overlap="next_forward" waits after `end`, and "forward" for each piece of a forward that starts while
            buckets are under way.
        buckets: when each bucket of a graph travelled.
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
    graphs: list[int] = field(default_factory=list)
    events: list[tuple[str, int, float]] = field(default_factory=list)
    buckets: list[BucketRecord] = field(default_factory=list)
    begin: float = field(default_factory=perf_counter)
    end: float = 0.0
    _travelling: deque[tuple[BucketRecord, Callable[[], bool]]] = field(
        default_factory=deque, repr=False, compare=False
    )

    def piece(self) -> int:
        """Notes that a piece starts; returns its number."""
        now = perf_counter()
        self.events.append(("piece", self.pieces, now))
        self.look(now)
        self.pieces += 1
        return self.pieces - 1

    def launch(self, nbytes: int, work: Any = None) -> int:
        """Notes that a bucket was launched, and the work to watch; returns its number."""
        index = self.launches
        now = perf_counter()
        self.events.append(("launch", index, now))
        self.look(now)
        bucket = BucketRecord(nbytes, now)
        self.buckets.append(bucket)
        is_completed = getattr(work, "is_completed", None)
        if is_completed is not None:
            self._travelling.append((bucket, is_completed))
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
        now = perf_counter()
        self.events.append(("wait outside" if outside else "wait", index, now))
        self.look(now)
        if not outside:
            self.buckets[index].waits = now

    def waited(self, index: int) -> None:
        """Notes that the wait for a bucket is over."""
        now = perf_counter()
        bucket = self.buckets[index]
        bucket.waited = now - bucket.waits
        if bucket.arrived is None:
            travelling = next((each for each in self._travelling if each[0] is bucket), None)
            if travelling is not None:
                if travelling[1]():
                    bucket.arrived = now
                self._travelling.remove(travelling)

    def forward_piece(self, number: int) -> None:
        """Notes that a piece of a forward starts while buckets of this backward are under way."""
        now = perf_counter()
        self.events.append(("forward", number, now))
        self.look(now)

    def close(self) -> None:
        """Notes the end."""
        self.end = perf_counter()
        self.look(self.end)

    def stop_looking(self) -> None:
        """Keeps no work alive: everything was waited for."""
        self._travelling.clear()

    def look(self, now: float) -> None:
        """Notes which buckets have arrived; they do so in the order in which they were launched."""
        while self._travelling and self._travelling[0][1]():
            self._travelling.popleft()[0].arrived = now


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

    @property
    def buckets(self) -> "tuple[BucketStats, ...]":
        """Means over the newest synchronised backwards that launched the same buckets as the last of them."""
        records = self._alike()
        return tuple(_bucket_stats(i, same) for i, same in enumerate(zip(*(r.buckets for r in records), strict=True)))

    @property
    def waited(self) -> float:
        """Mean seconds that a backward waited for its buckets: what nothing hid."""
        return sum(bucket.waited for bucket in self.buckets)

    @property
    def overlap(self) -> float | None:
        """Share of the time buckets travelled in which something was computed; None if none was seen to arrive."""
        travelled = sum(map(_travelled, self._alike()))
        waited = sum(bucket.waited for record in self._alike() for bucket in record.buckets)
        return max(0.0, 1 - waited / travelled) if travelled else None

    def _alike(self) -> list[BackwardRecord]:
        records = [record for record in self.backwards if record.sync and record.buckets]
        layout = [bucket.nbytes for bucket in records[-1].buckets] if records else []
        return [record for record in records if [bucket.nbytes for bucket in record.buckets] == layout]

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Figures by name, for a dashboard."""
        yield "fxddp/waited_seconds", self.waited
        if self.overlap is not None:
            yield "fxddp/overlap", self.overlap
        for bucket in self.buckets:
            yield f"fxddp/bucket{bucket.index}/waited_seconds", bucket.waited
            if bucket.seconds is not None:
                yield f"fxddp/bucket{bucket.index}/seconds", bucket.seconds
            if bucket.bandwidth is not None:
                yield f"fxddp/bucket{bucket.index}/bytes_per_second", bucket.bandwidth
        if self.backwards:
            yield "fxddp/uncovered_bytes", self.last.uncovered_bytes

    def write(self, writer: "Writer", step: int) -> None:
        """Hands `scalars` to a `torch.utils.tensorboard.SummaryWriter`, or whatever has its `add_scalar`."""
        for name, value in self.scalars():
            writer.add_scalar(name, value, step)

    def __str__(self) -> str:
        lines = [f"{count(self.total, 'backward')}; {duration(self.waited)} waited in each"]
        if self.overlap is not None:
            lines[0] += f", {share(self.overlap)} of the sending overlapped"
        for b in self.buckets:
            speed = "–" if b.bandwidth is None else rate(b.bandwidth)
            lines.append(
                f"  bucket {b.index}: {size(b.nbytes)} in {duration(b.seconds)}, {speed}, waited {duration(b.waited)}"
            )
        return "\n".join(lines)


class Writer(Protocol):
    """What `Stats.write` writes to."""

    def add_scalar(self, name: str, value: float, step: int, /) -> Any:
        """Adds one value to a curve."""


@dataclass(frozen=True, slots=True)
class BucketStats:
    """Means of one bucket over several backwards.

    Attributes:
        index: its number in the backward.
        nbytes: bytes of the bucket, as gradients.
        seconds: from launch to arrival; None if it was never seen to arrive.
        waited: seconds in which the backward waited for it.
        bandwidth: bytes of the bucket per second of that; by a ring, 2(N-1)/N times as much crosses each link, or less,
            if they are compressed.
    """

    index: int
    nbytes: int
    seconds: float | None
    waited: float

    @property
    def bandwidth(self) -> float | None:
        """See the class."""
        return self.nbytes / self.seconds if self.seconds else None


def _bucket_stats(index: int, same: Sequence[BucketRecord]) -> BucketStats:
    seconds = [bucket.arrived - bucket.launched for bucket in same if bucket.arrived is not None]
    waited = mean(bucket.waited for bucket in same)
    return BucketStats(index, same[0].nbytes, mean(seconds) if seconds else None, waited)


def _travelled(record: BackwardRecord) -> float:
    """Seconds in which at least one bucket was under way."""
    total, until = 0.0, 0.0
    for bucket in record.buckets:
        if bucket.arrived is not None:
            total += max(0.0, bucket.arrived - max(until, bucket.launched))
            until = max(until, bucket.arrived)
    return total


class EventLog:
    """Collects the records of a backend."""

    def __init__(self) -> None:
        self._records: deque[BackwardRecord] = deque(maxlen=KEPT_BACKWARDS)
        self._total = 0
        self.synchronised = 0

    def add(self, record: BackwardRecord, *, under_way: bool = False) -> None:
        """Keeps a backward that is over.

        Args:
            record: the backward's.
            under_way: some of its buckets are still to be waited for.
        """
        record.close()
        if not under_way:
            record.stop_looking()
        self._records.append(record)
        self._total += 1
        self.synchronised += record.sync

    def stats(self) -> Stats:
        """What was kept."""
        return Stats(tuple(self._records), self._total)
