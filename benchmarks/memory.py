"""Peak memory of a training step: bytes of tensors that are alive at the same time, mode by mode.

    python -m benchmarks.memory --models mlp,transformer --bucket-mb 5

Two ranks train over loopback with gloo, each pair of processes in one mode, and print what one step of rank 0 needs at
its peak, weights and inputs included. The ways to train:

    none         zero_grad(set_to_none=True), forward, backward, SGD step
    zero         the same with set_to_none=False
    accumulate   set_to_none=True, two batches under `no_sync`, one that synchronises, SGD step
    accumulate0  the same with set_to_none=False

Note [bytes]: counted is what torch's CPU allocator hands out and takes back, as its profiler sees it: every tensor of
Python, of compiled code and of DDP's C++ reducer. The profiler runs from before the model is made, so that it knows
each block it sees freed. It does not see what gloo's threads free; such a block ends when its memory is handed out
again, and the least of several steps counts. Scratch memory of gloo and of the BLAS library is not counted.
"""

import argparse
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.models import MODELS
from benchmarks.modes import MODES, Run, build, title
from benchmarks.processes import on_ranks

MIB = 2**20
USUAL_MODES = ("local", "ddp_compile", "fxddp", "fxddp_unsplit")
WAYS = ("none", "zero", "accumulate", "accumulate0")
LOCAL_BATCHES = 2
WARM_UP_STEPS = 3
MEASURED_STEPS = 3
STEP = "benchmark.step"


def peaks(recorded: Any, name: str = STEP) -> list[int]:
    """Most bytes alive during each range of this name, in order.

    Args:
        recorded: a profile with `profile_memory=True`, which began before anything to be counted was made.
        name: of the ranges.
    """
    events = recorded.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.end_ns()) for e in events if e.name() == name)
    memory = _Alive()
    found = [0] * len(steps)
    for when, address, size in sorted(_allocations(recorded), key=itemgetter(0)):
        before = memory.total
        memory.note(address, size)
        for i, (begin, end) in enumerate(steps):
            if begin <= when <= end:
                found[i] = max(found[i], before, memory.total)
    return found


class _Alive:
    """The blocks that are handed out, by address."""

    def __init__(self) -> None:
        self.total = 0
        self._addresses: list[int] = []
        self._sizes: dict[int, int] = {}

    def note(self, address: int, size: int) -> None:
        """A block was handed out, or taken back if the size is negative."""
        if size < 0:
            self._forget(address)
            return
        at = bisect_left(self._addresses, address)
        if at and self._addresses[at - 1] + self._sizes[self._addresses[at - 1]] > address:
            self._forget(self._addresses[at - 1])
        while (at := bisect_left(self._addresses, address)) < len(self._addresses) and (
            self._addresses[at] < address + size
        ):
            self._forget(self._addresses[at])
        self._addresses.insert(at, address)
        self._sizes[address] = size
        self.total += size

    def _forget(self, address: int) -> None:
        if address in self._sizes:
            self.total -= self._sizes.pop(address)
            del self._addresses[bisect_left(self._addresses, address)]


def _allocations(recorded: Any) -> Iterator[tuple[int, int, int]]:
    """When, where and how many bytes were handed out, or taken back (negative)."""
    stack = list(recorded.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            yield event.start_time_ns, fields.ptr, fields.alloc_size


def unsynchronised(run: Run) -> Callable[[], AbstractContextManager[Any]]:
    """The mode's `no_sync`."""
    owner = run.backend if run.backend is not None else run.call
    return getattr(owner, "no_sync", nullcontext)


def step(run: Run, way: str) -> None:
    """One step of training."""
    run.optimizer.zero_grad(set_to_none=not way.endswith(("zero", "0")))
    with run.surroundings():
        if way.startswith("accumulate"):
            with unsynchronised(run)():
                for _ in range(LOCAL_BATCHES):
                    run.call(*run.inputs).backward()
        run.call(*run.inputs).backward()
    run.optimizer.step()


def least_peaks(rank: int, model: str, mode: str, bucket_mb: float) -> dict[str, int]:
    """Peak bytes of this rank in each way of training."""
    with (
        tempfile.TemporaryDirectory(prefix="fxddp-memory-") as cache,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        run = build(mode, model, rank=rank, bucket_mb=bucket_mb)
        for way in WAYS:
            for _ in range(WARM_UP_STEPS):
                step(run, way)
            dist.barrier()
            for _ in range(MEASURED_STEPS):
                with record_function(STEP):
                    step(run, way)
    found = peaks(recorded)
    return {way: min(found[i * MEASURED_STEPS :][:MEASURED_STEPS]) for i, way in enumerate(WAYS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,transformer", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", default=",".join(USUAL_MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--bucket-mb", type=float, default=5)
    arguments = parser.parse_args()
    for model in arguments.models.split(","):
        print(f"\n{model}, buckets of {arguments.bucket_mb:g} MiB, MiB of tensors at the peak of a step:\n")
        print(f"| | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
        for mode in arguments.modes.split(","):
            found = on_ranks(least_peaks, model, mode, arguments.bucket_mb)
            print(f"| {title(mode)} | {' | '.join(f'{found[way] / MIB:.1f}' for way in WAYS)} |", flush=True)


if __name__ == "__main__":
    main()
