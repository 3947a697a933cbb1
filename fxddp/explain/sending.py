"""How buckets travel: bytes, steps, and what runs on each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fxddp.backend import Backend
from fxddp.comm_hook import CommHook
from fxddp.config import Settings
from fxddp.packing import packs
from fxddp.passes.plan import Bucket as Planned
from fxddp.passes.plan import GradSpec
from fxddp.transport import describe

from .parts import Bucket, Graph


@dataclass(frozen=True)
class Runs:
    """Names of what runs on every bucket: a communication hook in place of the all-reduce, an optimizer after it."""

    hook: str | None = None
    optimizer: str | None = None


def runs_of(settings: Settings, trained: Backend | None) -> Runs:
    """What the settings ask for, or else what was registered on a backend later."""
    hook = None if settings.comm_hook is None else CommHook(None, settings.comm_hook).name
    optimizer = None if settings.optimizer is None else type(settings.optimizer).__qualname__
    if trained is not None:
        if settings.codec is None:
            hook = trained.registered.carrier.name
        if trained.registered.optimizer is not None:
            optimizer = trained.registered.optimizer.name
    return Runs(hook, optimizer)


@dataclass(frozen=True)
class Sending:
    """How buckets travel."""

    settings: Settings
    world_size: int = 1
    runs: Runs = Runs()

    def wire_bytes(self, bucket: Planned) -> int:
        """Bytes that travel for a bucket of a plan."""
        return bucket.nbytes if self.runs.hook else self.settings.wire_bytes(bucket, self.world_size)

    def rows(self, grad: GradSpec) -> int | None:
        """How many rows travel in place of a table; None for what travels as it is."""
        in_rows = not self.runs.hook and self.settings.row_bytes(grad, self.world_size) is not None
        return grad.rows if in_rows else None

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
        tables = [f"{g.rows:,} of {g.shape[0]:,} rows of {g.name}" for g in bucket.gradients if g.rows is not None]
        if tables:
            rest = f"{steps}, " if len(tables) < len(bucket.gradients) else ""
            steps = f"{rest}all-gather of {' and '.join(tables)}"
        return steps if runs.optimizer is None else f"{steps}, then {runs.optimizer}"


def numbered(graphs: Sequence[Graph], sending: Sending) -> list[Graph]:
    """Adds to the buckets by what they travel; they are numbered in the order in which they are launched."""
    found, count = [], 0
    for graph in reversed(graphs):
        buckets = [replace(bucket, route=sending.route(bucket, count + i)) for i, bucket in enumerate(graph.buckets)]
        count += len(buckets)
        found.append(replace(graph, buckets=tuple(buckets)))
    return found[::-1]


def unmodelled(settings: Settings, sending: Sending) -> Iterator[str]:
    """What the predicted times leave out."""
    if settings.mesh is not None:
        yield "sending is predicted as one ring over all ranks, as if links inside a node were no faster than across"
    if sending.runs.hook is not None:
        yield f"sending is predicted as an all-reduce of every bucket, whatever {sending.runs.hook} makes of it"
    codec = settings.codec
    if codec is not None and not codec.in_graphs:
        yield f"what {type(codec).__name__} computes to encode and decode is not in the predicted step"
    if codec is not None and codec.remark:
        yield codec.remark
    if settings.overlap is not None and sending.world_size > 1:
        yield f"waits in the next forward are predicted as if {sending.runs.optimizer} held every parameter"
    if sending.runs.optimizer is not None:
        yield f"the updates of {sending.runs.optimizer} are not in the predicted step"
