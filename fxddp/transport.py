"""How a packed bucket is summed over the ranks: over which process groups, and in which steps.

one group         all-reduce
several groups    bucket i over group i modulo their number: the remedy of "PyTorch Distributed: Experiences on
                  Accelerating Data Parallel Training" (Li et al., VLDB 2020, arXiv:2006.15704) where one group cannot
                  fill the link
ring              reduce-scatter, then all-gather: 2(N-1)/N of a bucket's bytes each way per rank (Patarasuk and Yuan,
                  "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009)
two-dimensional   reduce-scatter inside a node, all-reduce across nodes of what a rank got, all-gather inside (as Jia
mesh              et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", arXiv:1807.11205)

Note [stages]: what has several steps is a line of stages, each on a process group of its own. A bucket enters a stage
when it has left the one before and the bucket ahead of it has entered: so every process group sees the buckets in the
order of their launches, on every rank, whatever finishes when. A graph that was not split takes the same steps on the
same groups (`passes/stages.py`). Buckets move on whenever this thread launches or waits;
on NCCL all at once, on a stream for each stage.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import _compat, ranges
from .group import GroupReference, alive
from .passes.stages import Stage, Way
from .units import count

if TYPE_CHECKING:
    from .config import Settings
    from .group import Group

ALGORITHMS = ("all_reduce", "ring", "hierarchical")


class Transport(Protocol):
    """Sums buckets over the ranks."""

    def start(self, tensor: Tensor, index: int, *, counts: bool = True) -> Any:
        """Starts summing a tensor, in place; returns the work.

        Args:
            tensor: the bucket, or what a codec made of it.
            index: how many were launched before it in this backward; the same on all ranks.
            counts: whether what ranks announce says that it was started.
        """


class Lanes:
    """An all-reduce; of several groups of the same ranks, buckets take the next one in turns."""

    def __init__(self, group: "Group", lanes: Sequence[GroupReference]) -> None:
        self._group = group
        self._lanes = lanes

    def start(self, tensor: Tensor, index: int, *, counts: bool = True) -> Any:
        """As in `Transport`."""
        return self._group.all_reduce(tensor, alive(self._lanes[index % len(self._lanes)]), counts=counts)


Start = Callable[["Staged"], Any]
"""Starts a step for a bucket; returns the work."""


class Staged:
    """A bucket on its way through the stages; waits as the work of a collective does.

    Attributes:
        tensor: the bucket; with zeros behind it if its parts would not be of one size.
        part: this rank's part of it.
        entered: stages entered so far.
        work: of the stage entered last, until it was left.
        range: its range in a profile.
    """

    def __init__(self, line: "Stages", flat: Tensor, parts: int) -> None:
        self._line = line
        self._flat = flat
        short = -flat.numel() % parts
        self.tensor = torch.cat([flat, flat.new_zeros(short)]) if short else flat
        self.part = self.tensor.new_empty(self.tensor.numel() // parts)
        self.entered = 0
        self.work: Any = None
        self.range = ranges.current()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits until the bucket holds the sum.

        Raises:
            RuntimeError: a step failed, or "timed out".
        """
        self._line.arrive(self, timeout)

    def is_completed(self) -> bool:
        """Whether it has left the last stage."""
        return not self._line.holds(self)

    def finish(self) -> None:
        """Puts the sum into the bucket."""
        if self.tensor is not self._flat:
            self._flat.copy_(self.tensor[: self._flat.numel()])


class Stages:
    """Sums buckets step by step; see Note [stages].

    Args:
        group: all ranks.
        parts: into how many parts a bucket is scattered.
        stages: names of the steps, and what starts them.
    """

    def __init__(self, group: "Group", parts: int, stages: Mapping[str, Start]) -> None:
        self._group = group
        self._parts = parts
        self._names = tuple(stages)
        self._stages = tuple(stages.values())
        self._line: list[Staged] = []
        self._streams: list[Any] = []
        group.lines.add(self)

    def start(self, tensor: Tensor, index: int, *, counts: bool = True) -> Any:
        """As in `Transport`."""
        if counts:
            self._group.count()
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
        bucket = Staged(self, flat, self._parts)
        if tensor.device.type == "cuda":
            return self._start_on_streams(bucket)
        self._line.append(bucket)
        self._move()
        return bucket

    def holds(self, bucket: Staged) -> bool:
        """Whether a bucket is still on its way."""
        return bucket in self._line

    def arrive(self, bucket: Staged, timeout: timedelta | None) -> None:
        """Waits until a bucket has left the last stage."""
        while bucket in self._line:
            work = self._line[0].work  # nothing is ahead of the first one, so that it is in a stage
            work.wait() if timeout is None else work.wait(timeout)
            self._move()

    def enter_all(self, timeout: timedelta | None = None) -> None:
        """Has every bucket enter its last stage."""
        while waiting := next((b for b in self._line if b.entered < len(self._stages)), None):
            work = waiting.work  # all ahead of it have entered their last, so that it is in a stage
            work.wait() if timeout is None else work.wait(timeout)
            self._move()

    def _move(self) -> None:
        """Has every bucket go as far as it can."""
        last = len(self._stages)
        limit = last
        for bucket in list(self._line):
            while bucket.work is None or bucket.work.is_completed():
                if bucket.work is not None:
                    bucket.work.wait()  # raises if it failed
                    bucket.work = None
                if bucket.entered == last:
                    bucket.finish()
                    self._line.remove(bucket)
                if bucket.entered >= limit:
                    break
                with ranges.step(bucket.range, self._names[bucket.entered]):
                    bucket.work = self._stages[bucket.entered](bucket)
                bucket.entered += 1
            limit = bucket.entered

    def _start_on_streams(self, bucket: Staged) -> "OnStream":
        before = torch.cuda.current_stream()
        if not self._streams:
            self._streams = [torch.cuda.Stream() for _ in self._stages]
        for name, stage, stream in zip(self._names, self._stages, self._streams, strict=True):
            stream.wait_stream(before)
            with torch.cuda.stream(stream), ranges.step(bucket.range, name):
                stage(bucket).wait()
            before = stream
        return OnStream(bucket, before.record_event())


class OnStream:
    """A bucket whose steps were all enqueued."""

    def __init__(self, bucket: Staged, done: Any) -> None:
        self._bucket = bucket
        self._done = done

    def wait(self) -> None:
        """Has the current stream wait until the bucket holds the sum."""
        torch.cuda.current_stream().wait_event(self._done)
        self._bucket.finish()

    def is_completed(self) -> bool:
        """Whether the last step is over."""
        return bool(self._done.query())


def _starts(stage: Stage, group: "Group", over: GroupReference) -> Start:
    if stage.kind == "all_reduce":
        return lambda b: group.all_reduce(b.part, alive(over), counts=False)
    if stage.kind == "all_gather":
        return lambda b: _compat.all_gather(alive(over), b.tensor, b.part)
    return lambda b: _compat.reduce_scatter(alive(over), b.part, b.tensor)


def _ranks(settings: "Settings", group: "Group") -> list[dist.ProcessGroup]:
    """For each step a group of the ranks that take it together."""
    if settings.mesh is None:
        return [group.process_group] * 2
    inside, across = settings.mesh.get_group(1), settings.mesh.get_group(0)
    return [inside, across, inside]


def introduce(settings: "Settings", group: "Group", way: Way) -> None:
    """Gives the names of a way groups of the same ranks, as long as its own are not made: compilers ask for sizes."""
    for stage, ranks in zip(way.stages, _ranks(settings, group), strict=False):
        if not _compat.finds_group(stage.group):
            _compat.call_group(ranks, stage.group)


def make_transport(settings: "Settings", group: "Group", way: Way) -> Transport:
    """What a backend with these settings sends its buckets by.

    A collective for what has several stages, as these need groups of their own. Graphs find these under the names that
    they have in `way`.
    """
    if not way.stages:
        return Lanes(group, settings.lanes or (group.reference,))
    first, *rest = _ranks(settings, group)
    made = [first, *map(_compat.twin, rest)]
    for stage, over in zip(way.stages, made, strict=True):
        _compat.call_group(over, stage.group)
    groups = map(GroupReference, made)
    starts = {stage.name: _starts(stage, group, over) for stage, over in zip(way.stages, groups, strict=True)}
    return Stages(group, way.stages[0].ranks, starts)


def way_of(settings: "Settings", group: "Group | None", prefix: str, size: int) -> Way:
    """How graphs of a backend with these settings sum their buckets.

    Args:
        settings: of the backend.
        group: the ranks; None if there is no group yet.
        prefix: of the names under which graphs know the process groups of stages; no other backend's.
        size: the number of ranks.
    """
    if settings.lanes:
        return Way(tuple(str(alive(lane).group_name) for lane in settings.lanes), size)
    names = ("" if group is None else group.name,)
    if size == 1 or settings.algorithm == "all_reduce":
        return Way(names, size)
    mesh = settings.mesh
    scatters = group is None or _compat.has_reduce_scatter(group.process_group if mesh is None else mesh.get_group(1))
    scatter = "reduce_scatter" if scatters else "exchange"
    if mesh is None:
        steps = [("reduce-scatter", scatter, size), ("all-gather", "all_gather", size)]
    else:
        nodes, node = mesh.size(0), mesh.size(1)
        steps = [
            ("reduce-scatter inside", scatter, node),
            ("all-reduce across", "all_reduce", nodes),
            ("all-gather inside", "all_gather", node),
        ]
    return Way(names, size, tuple(Stage(name, kind, f"{prefix}.{name}", ranks) for name, kind, ranks in steps))


def describe(settings: "Settings", index: int | None = None) -> str:
    """The groups and steps of a bucket, in words; needs no group.

    Args:
        settings: of the backend.
        index: as `Transport.start` takes it; None for any bucket.
    """
    if settings.algorithm == "ring":
        return "reduce-scatter, all-gather"
    if settings.mesh is not None:
        nodes, node = settings.mesh.size(0), settings.mesh.size(1)
        inside, across = f"inside ({count(node, 'rank')})", f"across ({count(nodes, 'rank')})"
        return f"reduce-scatter {inside}, all-reduce {across}, all-gather {inside}"
    if settings.lanes:
        lanes = len(settings.lanes)
        return f"all-reduce over group {'0 to ' * (index is None)}{lanes - 1 if index is None else index % lanes}"
    return "all-reduce"
