"""How fast ranks compute and send, for `bucket_mb="auto"`: measured once for a process group, the same on all ranks.

Note [measuring]: a plan is needed when a backward is compiled, and nothing is sent while compiling, for ranks compile
at different times or not at all. There is one exception: each rank compiles its first graph that trains, or wraps a
module, on the way to first contact (`replica.py`), which waits for all ranks in any case. So the measurement is the
step before first contact, announced like every other (`agreement.py`): a rank that comes with something else is named,
and no collective is mismatched. What is compiled later uses what is there.

All ranks draw the same figures from what all of them measured: an all-reduce takes as long as on the slowest rank, and
the slowest processor counts. They go into the key of the compile caches, so a second process must not come to slightly
others: rank 0 keeps them in the folder of these caches, and what it measures later counts only if it is another
network or machine (`ALIKE`).
"""

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import _compat
from .decision import MEASURE, Event
from .passes.cost import Machine, Network, Speeds

if TYPE_CHECKING:
    from .backend import Backend
    from .group import Group

MACHINES = {
    "cpu": Machine(flops=1e11, memory=2e10, launch=6e-6),
    "cuda": Machine(flops=1e14, memory=2e12, launch=4e-6),
}
"""What is assumed of a device that nobody described: a few cores of a server; a data centre GPU with tensor cores."""

BANDWIDTH = 100e9 / 8
LATENCY = 10e-6
"""What is assumed of a network that nobody described: one adapter of 100 Gbit/s, 10 µs for an empty message."""

SMALL = 64
LARGE = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of the all-reduces that are timed. Bandwidth is the slope between the last two: shaped links let a burst by."""

BUDGET = 0.1
"""Seconds: a larger all-reduce is tried if two of it will probably take less."""

ALIKE = {
    "latency": 2.0,
    "bandwidth": 1.3,
    "cpu_per_call": 3.0,
    "cpu_per_byte": 3.0,
    "flops": 1.3,
    "memory": 1.3,
}
"""Factors up to which a figure that was measured again counts as the same."""

LEAST = {"cpu_per_call": 20e-6, "cpu_per_byte": 1e-10}
"""What these are taken for where it is less, or where other cores send: too little to make a difference to a plan."""

COSTS = ("latency", "cpu_per_call", "cpu_per_byte")
"""Figures of which the slowest rank has the largest."""

WORKLOADS = {"cpu": (512, 16 << 20), "cuda": (4096, 256 << 20)}
"""Rows of the square matrices that are multiplied, and bytes that are copied, to measure a processor."""

WHAT = "measure the network"


def assumed(kind: str, world_size: int) -> Speeds:
    """For a device and a network that nobody measured."""
    return Speeds(MACHINES.get(kind, MACHINES["cpu"]), Network(world_size, BANDWIDTH, LATENCY))


def speeds_of(backend: "Backend", group: "Group", tensor: torch.Tensor) -> Speeds:
    """Those of a group; a collective the first time. See Note [measuring].

    Args:
        backend: announces the measurement.
        group: the ranks.
        tensor: a parameter, for its device and dtype.

    Raises:
        RanksDisagree: another rank is at another step.
    """
    if group.speeds is None and group.size == 1:
        group.speeds = assumed(tensor.device.type, 1)
    if group.speeds is None:
        backend.agreement.announce(Event(MEASURE), group).decision()
        with _compat.real_tensors():
            group.speeds = _measure(group, tensor.device, tensor.dtype)
    return group.speeds


def _measure(group: "Group", device: torch.device, dtype: torch.dtype) -> Speeds:
    flops, memory = _machine(device, dtype)
    key = (dist.get_process_group_ranks(group.process_group), group.backend_name, device.type, str(dtype))
    file = _compat.cache_folder() / f"fxddp-speeds-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"
    mine = _network(group, device) | {"flops": flops, "memory": memory}
    told = group.channel.gather([mine, _read(file, mine) if group.rank == 0 else None], lambda: WHAT)
    names = [name for name in mine if all(name in figures for figures, _ in told)]  # devices may differ
    worst = {name: (max if name in COSTS else min)(figures[name] for figures, _ in told) for name in names}
    found = {name: max(float(f"{value:.2g}"), LEAST.get(name, 0.0)) for name, value in worst.items()}
    kept = told[0][1]
    if kept is not None and all(1 / ALIKE[name] <= kept[name] / found[name] <= ALIKE[name] for name in found):
        found = kept
    elif group.rank == 0:
        _write(file, found)
    machine = Machine(found.pop("flops"), found.pop("memory"), assumed(device.type, group.size).machine.launch)
    return Speeds(machine, Network(group.size, **found))


def _network(group: "Group", device: torch.device) -> dict[str, float]:
    """The figures of a `Network`; those of the processor, if it computes too. All ranks stop at the same size."""
    sent = Network(group.size, 1.0, 0.0).sent

    def timed(nbytes: int, times: int) -> tuple[float, float]:
        """Seconds of the fastest all-reduce, on the slowest rank; and what one takes from this rank's processor."""
        flat, taken = torch.zeros(nbytes // 4, device=device), []

        def once() -> None:
            begin = time.process_time()
            group.wait(group.all_reduce(flat), lambda: WHAT)
            taken.append(time.process_time() - begin)

        mine = min(_timed(once, times, device))
        return max(group.channel.gather(mine, lambda: WHAT)), median(taken)

    timed(SMALL, 2)  # the first one may open connections
    sizes, found = [SMALL], [timed(SMALL, 20)]
    for nbytes in LARGE:
        sizes.append(nbytes)
        found.append(timed(nbytes, 2))
        if 2 * 4 * found[-1][0] > BUDGET:
            break
    times, cpu = zip(*found, strict=True)
    seconds, nbytes = times[-1] - times[-2], sent(sizes[-1] - sizes[-2])
    if seconds <= 0:
        seconds, nbytes = times[-1], sent(sizes[-1])
    figures = {"latency": times[0] / (2 * (group.size - 1)), "bandwidth": nbytes / seconds}
    if device.type != "cpu":
        return figures
    mine = [platform.node(), _cores(), torch.get_num_threads()]
    if has_spare_cores(group.channel.gather(mine, lambda: WHAT), platform.node()):
        return figures | LEAST
    return figures | {"cpu_per_call": cpu[0], "cpu_per_byte": (cpu[-1] - cpu[0]) / sent(sizes[-1])}


def _cores() -> list[int]:
    """Those that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def has_spare_cores(told: Sequence[Sequence[Any]], host: str) -> bool:
    """Whether ranks on a host have a core each to send with, beside those of the threads that compute.

    Args:
        told: of each rank its host, the cores it may run on, and how many threads it computes with.
        host: the one to answer for.
    """
    here = [(own, threads) for its, own, threads in told if its == host]
    cores: set[int] = set().union(*(own for own, _ in here))
    return len(cores) >= sum(int(threads) + 1 for _, threads in here)


def _machine(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Floating point operations per second in matrix products, and bytes per second of memory, of this rank."""
    rows, nbytes = WORKLOADS.get(device.type, WORKLOADS["cpu"])
    matrix = torch.ones(rows, rows, device=device, dtype=dtype if dtype.is_floating_point else torch.float32)
    source, target = torch.zeros(2, nbytes // 4, device=device)
    product = min(_timed(lambda: matrix @ matrix, 4, device))
    copy = min(_timed(lambda: target.copy_(source), 4, device))
    return 2 * rows**3 / product, 2 * nbytes / copy


def _timed(action: Callable[[], Any], times: int, device: torch.device) -> list[float]:
    found = []
    for _ in range(times):
        _synchronize(device)
        begin = time.perf_counter()
        action()
        _synchronize(device)
        found.append(time.perf_counter() - begin)
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read(file: Path, names: Iterable[str]) -> dict[str, float] | None:
    """What was measured by an earlier process, if it can be read and has these figures."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(file.read_text())
        kept = {name: float(found[name]) for name in names}
        return kept if min(kept.values()) > 0 else None
    return None


def _write(file: Path, found: dict[str, float]) -> None:
    """At once or not at all: other processes may share the folder."""
    with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
        part.write(json.dumps(found))
        part.close()
        Path(part.name).replace(file)
