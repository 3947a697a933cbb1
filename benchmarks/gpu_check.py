"""Checks fxddp on a machine with one NVIDIA GPU, and measures what one GPU can show.

    python -m benchmarks.gpu_check [--quick] [--checks gradients,streams] [--json out.json]

gradients   NCCL, one rank: gradients equal eager's (transformer, BatchNorm channels-last, mixed dtypes; split and not;
            accumulated, zeroed in place, under no_sync; loaded from the compile cache by a second process)
ranks       two ranks share the GPU over gloo, and over NCCL where NCCL can: averages, no_sync, first contact
streams     from a profiler's trace: all-reduces run on another stream than the model, they are launched between the
            pieces' kernels, and the host never waits for the device inside a backward
memory      peak of a step, beside torch.compile(DDP) and plain torch.compile
time        step time in turns beside the same two, on NCCL with one rank and on a stand-in network

Exit status: 0 if nothing failed, 1 if something did, 2 without a GPU. "not shown" in the report is neither good nor
bad: this machine could not show it, and the line says why.

Note [one rank of NCCL]
NCCL sums nothing for one rank: an all-reduce in place launches no kernel, so a plain trace shows no all-reduce on the
device. Averaging over one rank gives the same numbers, but NCCL does launch a kernel for it, on the stream that all its
kernels run on. The trace is therefore taken twice: once as fxddp runs, once with the group's operation set to AVG.

Note [stand-in network]
A kernel that only spins, as long as a bucket would travel, on a stream of its own, in place of the all-reduce. It takes
one of the GPU's multiprocessors, not its memory. It shows what the order of launches and waits can hide; it says
nothing about a real network, where communication also takes multiprocessors and memory bandwidth.
"""

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.modes import fresh_models
from benchmarks.tables import median_interval

CHECKS = ("gradients", "ranks", "streams", "memory", "time")
OK, FAILED, NOT_SHOWN = "ok", "FAILED", "not shown"
NO_GPU = 2
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    what: str
    status: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"[{self.status:^9}] {self.check:<9} {self.what}: {self.text}"


# ---- what a trace shows ----

BACKWARD = "gpu_check backward"
NETWORK = "gpu_check stand-in network"
REDUCTIONS = frozenset({"c10d::allreduce_", NETWORK})
HOST_SYNCS = frozenset(
    {
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
    }
)
COMMUNICATION_KERNELS = ("nccl", "onerankreduce", "spin_kernel")

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened on account of one backward; times in microseconds.

    Attributes:
        reductions: all-reduces that the host called.
        between: kernels of the model launched before the first call, between the calls, and after the last.
        compute_streams: the streams of those kernels.
        communication_streams: streams of what the all-reduces launched.
        communication: kernels and copies that the all-reduces launched.
        communication_us: how long at least one of them ran.
        hidden_us: how long of that a kernel of the model ran, too.
        syncs: where the host waited for the device.
    """

    reductions: int
    between: tuple[int, ...]
    compute_streams: frozenset[int]
    communication_streams: frozenset[int]
    communication: int
    communication_us: float
    hidden_us: float
    syncs: tuple[str, ...]


def analyse(events: Sequence[Mapping[str, Any]]) -> Trace:
    """Reads the events of a Chrome trace of `torch.profiler`, with one backward inside `record_function(BACKWARD)`.

    A kernel belongs to the call that launched it, which has the same correlation number: it counts if that call stands
    inside the backward, whenever the kernel itself runs. It is communication if that call stands inside an all-reduce,
    in the same thread, or if its name says so (NCCL may launch from a thread of its own).

    Raises:
        ValueError: the trace does not hold exactly one backward.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    windows = [_span(event) for event in timed if event.get("cat") == "user_annotation" and event["name"] == BACKWARD]
    if len(windows) != 1:
        raise ValueError(f"the trace holds {len(windows)} ranges named {BACKWARD!r}, expected 1")
    begin, end = windows[0]
    host = [event for event in timed if begin <= event["ts"] <= end]
    annotated = [event for event in host if event.get("cat") in ("cpu_op", "user_annotation")]
    calls = [event for event in host if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    reductions = sorted((event for event in annotated if event["name"] in REDUCTIONS), key=lambda event: event["ts"])
    launched_by = {_argument(call, "correlation"): call for call in calls}
    launched_by.pop(None, None)

    between = [0] * (len(reductions) + 1)
    computing: list[Span] = []
    communicating: list[Span] = []
    compute_streams, communication_streams = set(), set()
    for event in timed:
        call = launched_by.get(_argument(event, "correlation"))
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or call is None:
            continue
        name = event["name"].lower()
        if any(part in name for part in COMMUNICATION_KERNELS) or any(_encloses(r, call) for r in reductions):
            communicating.append(_span(event))
            communication_streams.add(_argument(event, "stream"))
        elif event["cat"] == "kernel":
            computing.append(_span(event))
            compute_streams.add(_argument(event, "stream"))
            between[sum(reduction["ts"] < call["ts"] for reduction in reductions)] += 1

    syncs = []
    for call in calls:
        if call["name"] in HOST_SYNCS:
            inside = [event for event in annotated if _encloses(event, call)]
            under = f", inside {min(inside, key=lambda event: event['dur'])['name']}" if inside else ""
            syncs.append(
                f"{call['name']} {call['ts'] - begin:.0f} us into the backward for {call['dur']:.0f} us{under}"
            )
    return Trace(
        reductions=len(reductions),
        between=tuple(between),
        compute_streams=frozenset(compute_streams),
        communication_streams=frozenset(communication_streams),
        communication=len(communicating),
        communication_us=sum(stop - start for start, stop in _union(communicating)),
        hidden_us=_common(_union(communicating), _union(computing)),
        syncs=tuple(syncs),
    )


def order_problems(trace: Trace, *, launches: int) -> list[str]:
    """What is wrong with how the host drove the backward, in words; `launches` is what fxddp says it launched."""
    found = []
    if trace.reductions != launches:
        found.append(f"the trace shows {trace.reductions} all-reduces, fxddp recorded {launches}")
    if launches < 2:
        found.append(f"{launches} all-reduces cannot lie between anything: use smaller buckets")
    empty = [i for i, count in enumerate(trace.between[:-1]) if not count]
    if empty and trace.compute_streams:
        found.append(
            f"no kernel of the model was launched before all-reduce {empty[0]} and after the one before it: kernels "
            f"launched in turn with the all-reduces were {list(trace.between)}"
        )
    found += [f"the host waited for the device: {sync}" for sync in trace.syncs]
    return found


def stream_problems(trace: Trace) -> list[str]:
    """What is wrong with where all-reduces ran on the device, in words; only for a trace that shows some there."""
    shared = trace.communication_streams & trace.compute_streams
    if shared:
        return [f"all-reduces ran on stream {sorted(shared)}, where the model computes: nothing can overlap"]
    return []


def _argument(event: Mapping[str, Any], name: str) -> Any:
    return event.get("args", {}).get(name)


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _encloses(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    same = (outer.get("pid"), outer.get("tid")) == (inner.get("pid"), inner.get("tid"))
    return same and outer["ts"] <= inner["ts"] and _span(inner)[1] <= _span(outer)[1]


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not overlap, in order."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _common(first: Sequence[Span], second: Sequence[Span]) -> float:
    """How much time two unions share."""
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        shared += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return shared


# ---- a worker: one process, one rank ----


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is to do. `part` names one of `PARTS`."""

    part: str
    backend: str
    rank: int
    world: int
    device: str
    quick: bool
    checks: Sequence[str]
    rendezvous: str
    result: str


class Worker:
    """Collects what one process found; a part that raises becomes a failed finding, not a lost report."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.device = torch.device(task.device)
        self.findings: list[Finding] = []

    def report(self, check: str, what: str, status: str, text: str, **figures: Any) -> None:
        self.findings.append(Finding(check, what, status, text, figures))

    @contextmanager
    def trying(self, check: str, what: str) -> Iterator[None]:
        """Reports an exception inside as a failure, and goes on after it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            self.report(check, what, FAILED, f"{type(error).__name__}: {error}")

    @property
    def failed(self) -> bool:
        return any(finding.status == FAILED for finding in self.findings)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Mixed(nn.Module):
    """float32, bfloat16 and float64 parameters, a 0-d one, a transposed one and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter((0.1 * torch.randn(96, 128)).t())
        self.narrow = nn.Linear(96, 96).to(torch.bfloat16)
        self.wide = nn.Linear(96, 64, dtype=torch.float64)

    def forward(self, value: Tensor) -> Tensor:
        hidden = torch.tanh(self.gain * self.first(value)) @ self.turned
        hidden = self.narrow(torch.tanh(self.narrow(hidden.to(torch.bfloat16))))
        return self.wide(hidden.double()).square().mean()


@dataclass(frozen=True, slots=True)
class Case:
    """A small model to compare with eager.

    Attributes:
        tolerance: largest difference in a gradient, relative to its largest element. Another order of float32 sums
            gives 1e-5 to 1e-4, bfloat16 1e-2, a wrong factor or place 1e-1 and more.
    """

    name: str
    make: Callable[[torch.device], nn.Module]
    draw: Callable[[torch.Generator, torch.device], tuple[Tensor, ...]]
    tolerance: float


VOCABULARY = 2048
"""Of the transformer: so large that a batch on two ranks reads less than half of its table."""


def _transformer(device: torch.device) -> nn.Module:
    models = fresh_models("gpu_check")
    module: nn.Module = models.Transformer(vocabulary=VOCABULARY, width=128, layers=2, heads=4, length=64)
    return module.to(device)


def _convnet(device: torch.device) -> nn.Module:
    module: nn.Module = fresh_models("gpu_check").ConvNet(width=16, classes=10)
    module.to(device)
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # not in the stubs


def _tokens(draw: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (4, 64), generator=draw).to(device),)


def _images(draw: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    images = torch.randn(8, 3, 32, 32, generator=draw).to(device, memory_format=torch.channels_last)
    return images, torch.randint(0, 10, (8,), generator=draw).to(device)


def _vectors(draw: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.randn(32, 64, generator=draw).to(device),)


TRANSFORMER = Case("transformer", _transformer, _tokens, 2e-3)
CONVNET = Case("ConvNet with BatchNorm, channels-last", _convnet, _images, 2e-3)
MIXED = Case("mixed dtypes and strides", lambda device: Mixed().to(device), _vectors, 5e-2)

Gradients = dict[str, Tensor]


def gradients_of(module: nn.Module) -> Gradients:
    """Copies of the gradients, in their own strides."""
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def eager_gradients(module: nn.Module, inputs: tuple[Tensor, ...]) -> Gradients:
    """Gradients of one eager backward; the module's own `.grad`s stay as they are."""
    named = dict(module.named_parameters())
    return dict(zip(named, torch.autograd.grad(module(*inputs), list(named.values())), strict=True))


def averaged(gradients: Gradients) -> Gradients:
    """The average over the ranks, by hand."""
    found = {}
    for name, gradient in gradients.items():
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        found[name] = total / dist.get_world_size()
    return found


def difference(found: Gradients, expected: Gradients, tolerance: float) -> float:
    """The largest relative difference; AssertionError, naming the parameter, where it is more than rounding."""
    assert found.keys() == expected.keys(), f"gradients of {sorted(found)}, expected {sorted(expected)}"
    worst = 0.0
    for name, right in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (right.dtype, right.shape), f"{name}: {got.dtype} {tuple(got.shape)}"
        relative = ((got - right).abs().max() / right.abs().max().clamp_min(1e-12)).item()
        assert relative <= tolerance, f"{name} is off by {relative:.1e} of its largest element, allowed {tolerance:.0e}"
        worst = max(worst, relative)
    return worst


def added(*parts: Gradients) -> Gradients:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def small_backend(*, split: bool) -> Any:
    """A backend whose buckets are small enough for these models to have several."""
    import fxddp

    return fxddp.backend(bucket_mb=0.25, first_bucket_mb=0.125, split=split)


def expect_covered(backend: Any, *, split: bool) -> str:
    """Says in a few words what the last backward did; AssertionError if its graphs did not reduce everything."""
    last = backend.stats().last
    assert last.sync and last.launches > 1, f"expected several launches of a synchronised backward, got {last}"
    assert not last.uncovered, f"reduced outside of the graphs: {last.uncovered}"
    assert (last.pieces > 1) == split, f"{last.pieces} pieces with split={split}"
    return f"{last.launches} all-reduces, {last.pieces} pieces"


def check_gradients(worker: Worker) -> None:
    """One rank: every way a step can go, against eager."""
    runs = [(TRANSFORMER, True), (CONVNET, True), (MIXED, False)]
    if not worker.task.quick:
        runs += [(TRANSFORMER, False), (CONVNET, False), (MIXED, True)]
    for case, split in runs:
        what = f"{case.name}, {'split' if split else 'not split'}"
        with worker.trying("gradients", what):
            worker.report("gradients", what, OK, _one_rank(case, worker.device, split=split))


def _one_rank(case: Case, device: torch.device, *, split: bool) -> str:
    torch.manual_seed(0)
    module = case.make(device)
    inputs = case.draw(torch.Generator().manual_seed(1), device)
    once = eager_gradients(copy.deepcopy(module), inputs)
    twice = added(once, once)
    backend = small_backend(split=split)
    model = torch.compile(module, backend=backend)
    differences = []

    def step(expected: Gradients) -> None:
        model(*inputs).backward()
        differences.append(difference(gradients_of(module), expected, case.tolerance))

    step(once)
    did = expect_covered(backend, split=split)
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        assert grad is not None
        assert grad.stride() == parameter.stride(), f"{name}: strides {grad.stride()}, expected {parameter.stride()}"
    step(twice)  # into what is there
    module.zero_grad(set_to_none=False)
    step(once)
    module.zero_grad(set_to_none=True)
    with backend.no_sync():
        step(once)
    step(twice)
    return f"equal eager's within {max(differences):.0e}; {did}"


def check_cache(worker: Worker) -> None:
    """The second process: the transformer's backward comes from the folder that `check_gradients` compiled into."""
    what = "transformer, split, from the compile cache"
    with worker.trying("gradients", what):
        text = _one_rank(TRANSFORMER, worker.device, split=True)
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        assert hits > 0, f"compiled anew: {dict(counters['aot_autograd'])}"
        worker.report("gradients", what, OK, f"{hits} hit(s); {text}")


def check_ranks(worker: Worker) -> None:
    """Two ranks on one device: gradients are the average over ranks that started from different weights."""
    runs = [(TRANSFORMER, True)]
    if not worker.task.quick and worker.task.backend == "gloo":
        runs += [(CONVNET, True), (TRANSFORMER, False)]
    for case, split in runs:
        what = f"{case.name}, {'split' if split else 'not split'}, {worker.task.backend}"
        with worker.trying("ranks", what):
            worker.report("ranks", what, OK, _two_ranks(case, worker, split=split))
        if worker.failed:  # the ranks are no longer at the same point
            return


def _two_ranks(case: Case, worker: Worker, *, split: bool) -> str:
    rank, device = worker.task.rank, worker.device
    torch.manual_seed(0)
    module = case.make(device)
    reference = copy.deepcopy(module)  # has rank 0's weights on every rank
    if rank:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)  # first contact must send rank 0's
    draw = torch.Generator().manual_seed(100 + rank)
    backend = small_backend(split=split)
    model = torch.compile(module, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (module, reference)]
    differences = []
    did = ""
    for _ in range(3):
        inputs = case.draw(draw, device)
        expected = averaged(eager_gradients(reference, inputs))
        model(*inputs).backward()
        found = gradients_of(module)
        differences.append(difference(found, expected, case.tolerance))
        did = expect_covered(backend, split=split)
        last = backend.stats().last
        in_rows = case is TRANSFORMER and split
        assert (last.wire_bytes < last.bytes) == in_rows, f"{last.wire_bytes} bytes travel of {last.bytes}"
        for name, gradient in found.items():
            lowest, highest = gradient.contiguous(), gradient.contiguous().clone()
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            assert torch.equal(lowest, highest), f"the gradient of {name} is not the same on all ranks"
        for parameter, other in zip(module.parameters(), reference.parameters(), strict=True):
            other.grad = expected[_name(module, parameter)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    first, second = case.draw(draw, device), case.draw(draw, device)
    local = [eager_gradients(reference, inputs) for inputs in (first, second)]
    with backend.no_sync():
        model(*first).backward()
    differences.append(difference(gradients_of(module), local[0], case.tolerance))
    launched = backend.stats().last.launches
    assert launched == 0, f"{launched} all-reduces under no_sync"
    model(*second).backward()
    differences.append(difference(gradients_of(module), averaged(added(*local)), case.tolerance))
    return f"3 steps and no_sync equal the average by hand within {max(differences):.0e}; {did}"


def _name(module: nn.Module, parameter: Tensor) -> str:
    return next(name for name, other in module.named_parameters() if other is parameter)


# ---- a worker that measures: streams, memory, time ----

MODES = {"local": "torch.compile, alone", "ddp": "torch.compile(DDP)", "fxddp": "fxddp"}
NETWORK_SHARE = 0.7  # the stand-in network's time as a share of the local backward's


@dataclass(frozen=True, slots=True)
class Size:
    """The transformer that is measured: large enough for the GPU, not the host, to set the pace."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int
    batch: int
    bucket_mb: float


FULL = Size(vocabulary=8192, width=1024, layers=6, heads=16, length=512, batch=16, bucket_mb=25)
QUICK = Size(vocabulary=4096, width=512, layers=3, heads=8, length=256, batch=64, bucket_mb=6)
REHEARSAL = Size(vocabulary=2048, width=128, layers=2, heads=2, length=8, batch=2, bucket_mb=1)


@dataclass(slots=True)
class Built:
    """One mode, compiled and warm."""

    module: nn.Module
    call: Any
    inputs: tuple[Tensor, ...]
    backend: Any  # the fxddp.Backend of mode "fxddp"

    def step(self, *, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none=set_to_none)
        self.call(*self.inputs).backward()


class Pending:
    """The stand-in network's work: waiting makes the current stream wait, as NCCL's does."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> None:
        torch.cuda.current_stream().wait_event(self._done)


class StandIn:
    """See Note [stand-in network]."""

    def __init__(self, cycles_per_byte: float) -> None:
        self.stream = torch.cuda.Stream()
        self._cycles_per_byte = cycles_per_byte

    def all_reduce(self, tensor: Tensor) -> Pending:
        with record_function(NETWORK):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(max(1, int(tensor.nbytes * self._cycles_per_byte)))  # noqa: SLF001 - no public one
            return Pending(self.stream.record_event())

    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DistributedDataParallel's communication hook for the same network."""
        self.all_reduce(bucket.buffer())
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[bucket.buffer().device])
        with torch.cuda.stream(self.stream):  # whoever waits for the future waits for what this stream has to do
            future.set_result(bucket.buffer())
        return future


class Bench:
    """Builds each mode once, when it is first needed."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.device = worker.device
        self.cuda = worker.device.type == "cuda"
        self.size = REHEARSAL if not self.cuda else QUICK if worker.task.quick else FULL
        self.peaks: dict[str, dict[bool, float]] = {}
        self._built: dict[str, Built] = {}
        layer = nn.Linear(64, 64, device=self.device)  # workspaces of cuBLAS are not to be counted for the first mode
        layer(torch.randn(64, 64, device=self.device)).sum().backward()

    def __getitem__(self, mode: str) -> Built:
        if mode not in self._built:
            self._built[mode] = self._build(mode)
        return self._built[mode]

    def _build(self, mode: str, hook: Callable[..., Any] | None = None) -> Built:
        gc.collect()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        size = self.size
        torch.manual_seed(0)
        # code objects of its own, or Dynamo would serve this mode what it compiled for another
        transformer = fresh_models(f"gpu_check_{mode}").Transformer
        module: nn.Module = transformer(size.vocabulary, size.width, size.layers, size.heads, size.length)
        module.to(self.device)
        inputs = (torch.randint(0, size.vocabulary, (size.batch, size.length), device=self.device),)
        backend = None
        call: Any
        if mode == "local":
            call = torch.compile(module)
        elif mode == "fxddp":
            import fxddp

            backend = fxddp.backend(bucket_mb=size.bucket_mb)
            call = torch.compile(module, backend=backend)
        else:
            ddp = DistributedDataParallel(module, bucket_cap_mb=size.bucket_mb, gradient_as_bucket_view=True)
            if hook is not None:
                ddp.register_comm_hook(None, hook)
            call = torch.compile(ddp)
        built = Built(module, call, inputs, backend)
        for _ in range(3):
            built.step()
        if self.cuda:
            self.peaks[mode] = {set_to_none: self._peak(built, before, set_to_none) for set_to_none in (True, False)}
        return built

    def _peak(self, built: Built, before: int, set_to_none: bool) -> float:
        """MiB at the peak of a step, beyond what was allocated before the mode was built."""
        built.step(set_to_none=set_to_none)
        self.worker.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        built.step(set_to_none=set_to_none)
        self.worker.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def seconds(self, built: Built) -> tuple[float, float]:
        """Of one step: until the device is done, and until the host is."""
        self.worker.synchronize()
        begin = time.perf_counter()
        built.step()
        host = time.perf_counter()
        self.worker.synchronize()
        return time.perf_counter() - begin, host - begin

    def network(self) -> StandIn:
        """A stand-in network that needs `NETWORK_SHARE` of the local backward for all gradients."""
        local = self["local"]
        loss = local.call(*local.inputs)
        self.worker.synchronize()
        begin = time.perf_counter()
        loss.backward()
        self.worker.synchronize()
        backward = time.perf_counter() - begin
        cycles = 20_000_000
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)  # noqa: SLF001 - see StandIn
        start.record()
        torch.cuda._sleep(cycles)  # noqa: SLF001
        stop.record()
        self.worker.synchronize()
        per_second = cycles / (start.elapsed_time(stop) / 1e3)
        nbytes = sum(parameter.nbytes for parameter in local.module.parameters())
        return StandIn(NETWORK_SHARE * backward * per_second / nbytes)

    def build_on(self, network: StandIn) -> Built:
        """torch.compile(DDP) on the stand-in network; a hook cannot be taken off again, so it is a mode of its own."""
        return self._build("ddp_network", network.hook)


@contextmanager
def on_network(built: Built, network: StandIn) -> Iterator[None]:
    """fxddp's all-reduces go over the stand-in network inside."""
    group = built.backend.lookup()
    vars(group)["all_reduce"] = network.all_reduce  # hides the class's method
    try:
        yield
    finally:
        del vars(group)["all_reduce"]


@contextmanager
def averaging(built: Built) -> Iterator[None]:
    """The group averages instead of summing, which is the same for one rank; see Note [one rank of NCCL]."""
    options = vars(built.backend.lookup())["_sum"]
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    try:
        yield
    finally:
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)


def traced(worker: Worker, built: Built) -> list[dict[str, Any]]:
    """The Chrome trace of one step; the profiler's own first use is thrown away."""
    events: list[dict[str, Any]] = []
    for _ in range(2):
        built.module.zero_grad()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if worker.device.type == "cuda" else [])]
        with profile(activities=activities) as profiler:
            loss = built.call(*built.inputs)
            with record_function(BACKWARD):
                loss.backward()
            worker.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
    return events


def check_streams(worker: Worker, bench: Bench) -> None:
    """Three traces: as fxddp runs on NCCL, with a kernel for NCCL to launch, and on a stand-in network."""
    plain = None
    with worker.trying("streams", "as fxddp runs"):
        plain = _look(worker, bench["fxddp"], "order on the host")
        if plain.communication:
            _judge_streams(worker, plain, "NCCL with SUM")
        elif bench.cuda:
            text = "NCCL launched nothing on the device: it need not, for one rank in place"
            worker.report("streams", "NCCL with SUM", NOT_SHOWN, text)
    if bench.cuda and plain is not None and not plain.communication:
        with worker.trying("streams", "NCCL with AVG"), averaging(bench["fxddp"]):
            trace = _look(worker, bench["fxddp"], "order on the host, NCCL with AVG")
            if trace.communication:
                _judge_streams(worker, trace, "NCCL with AVG")
            else:
                worker.report("streams", "NCCL with AVG", NOT_SHOWN, "NCCL launched nothing on the device")
    if bench.cuda:
        with worker.trying("streams", "stand-in network"), on_network(bench["fxddp"], bench.network()):
            trace = _look(worker, bench["fxddp"], "order on the host, stand-in network")
            _judge_streams(worker, trace, "stand-in network", least_hidden=0.5)
    else:
        worker.report("streams", "stand-in network", NOT_SHOWN, "the stand-in is a kernel: it needs a GPU")


def _look(worker: Worker, built: Built, what: str) -> Trace:
    """Traces a step, reports how the host drove it, and returns what the trace shows."""
    trace = analyse(traced(worker, built))
    record = built.backend.stats().last
    problems = order_problems(trace, launches=record.launches)
    figures = {**asdict(trace), "launches": record.launches, "pieces": record.pieces, "bytes": record.bytes}
    for name in ("compute_streams", "communication_streams"):
        figures[name] = sorted(figures[name])
    text = (
        f"{trace.reductions} all-reduces of {record.bytes / MIB:.0f} MiB, kernels launched in turn with them "
        f"{list(trace.between)}, {len(trace.syncs)} waits for the device"
    )
    status = FAILED if problems else OK if trace.compute_streams else NOT_SHOWN
    if status == NOT_SHOWN:
        text += "; no kernels in the trace"
    worker.report("streams", what, status, "; ".join(problems) if problems else text, **figures)
    return trace


def _judge_streams(worker: Worker, trace: Trace, what: str, least_hidden: float | None = None) -> None:
    """Reports where all-reduces ran, and how much of them ran beside a kernel of the model."""
    problems = stream_problems(trace)
    hidden = trace.hidden_us / trace.communication_us if trace.communication_us else 0.0
    if least_hidden is not None and hidden < least_hidden:
        problems.append(f"only {hidden:.0%} of the communication ran beside the model, expected {least_hidden:.0%}")
    text = (
        f"{trace.communication} kernels or copies on stream {sorted(trace.communication_streams)}, the model on "
        f"{sorted(trace.compute_streams)}; {trace.hidden_us:.0f} of {trace.communication_us:.0f} us ({hidden:.0%}) "
        "beside a kernel of the model"
    )
    worker.report("streams", what, FAILED if problems else OK, "; ".join([*problems, text]))


def check_memory(worker: Worker, bench: Bench) -> None:
    """Peak of a step per mode; fxddp must not need more than DDP where gradients are dropped between steps."""
    if not bench.cuda:
        worker.report("memory", "peak of a step", NOT_SHOWN, "only CUDA counts what is allocated")
        return
    with worker.trying("memory", "peak of a step"):
        for mode, name in MODES.items():
            bench[mode]  # building it measures
            dropped, kept = bench.peaks[mode][True], bench.peaks[mode][False]
            text = f"{dropped:.0f} MiB, {kept:.0f} MiB with set_to_none=False"
            worker.report("memory", name, OK, text, set_to_none=dropped, zeroed=kept)
        ratio = bench.peaks["fxddp"][True] / bench.peaks["ddp"][True]
        status = OK if ratio <= 1.05 else FAILED
        worker.report("memory", "fxddp ÷ torch.compile(DDP)", status, f"{ratio:.3f}, allowed 1.05", ratio=ratio)


def check_time(worker: Worker, bench: Bench) -> None:
    """Step times in turns: A B C, A B C, …; ratios are taken within a round. Reported, not judged."""
    rounds = 3 if not bench.cuda else 15 if worker.task.quick else 40
    with worker.trying("time", "one rank"):
        _in_turns(worker, bench, {mode: bench[mode] for mode in MODES}, rounds, "")
    if bench.cuda and not worker.task.quick:
        with worker.trying("time", "stand-in network"):
            network = bench.network()
            runs = {"local": bench["local"], "ddp": bench.build_on(network), "fxddp": bench["fxddp"]}
            with on_network(bench["fxddp"], network):
                where = f"stand-in network of {NETWORK_SHARE:.0%} of a backward, "
                _in_turns(worker, bench, runs, rounds, where)


def _in_turns(worker: Worker, bench: Bench, runs: Mapping[str, Built], rounds: int, where: str) -> None:
    gc.collect()
    taken: dict[str, list[tuple[float, float]]] = {mode: [] for mode in runs}
    for _ in range(2):
        for built in runs.values():
            bench.seconds(built)
    for _ in range(rounds):
        for mode, built in runs.items():
            taken[mode].append(bench.seconds(built))
    steps = {mode: [step for step, _ in samples] for mode, samples in taken.items()}
    for mode in runs:
        text = f"{1e3 * statistics.median(steps[mode]):.2f} ms"
        text += f" (host {1e3 * statistics.median(host for _, host in taken[mode]):.2f} ms)"
        ratios = {}
        for other in ("local", "ddp"):
            if other != mode:
                interval = median_interval([a / b for a, b in zip(steps[mode], steps[other], strict=True)])
                ratios[other] = asdict(interval)
                text += f", ÷ {MODES[other]} {interval}"
        worker.report("time", where + MODES[mode], OK, text, samples=steps[mode], ratios=ratios)


def measure(worker: Worker) -> None:
    """The checks that share the compiled modes."""
    torch.set_float32_matmul_precision("high")
    bench = Bench(worker)
    for name, check in {"streams": check_streams, "memory": check_memory, "time": check_time}.items():
        if name in worker.task.checks:
            check(worker, bench)


PARTS: dict[str, Callable[[Worker], None]] = {
    "gradients": check_gradients,
    "cache": check_cache,
    "ranks": check_ranks,
    "measure": measure,
}


def worker_main(task: Task) -> None:
    """Does a task and writes what it found."""
    worker = Worker(task)
    torch.backends.cudnn.allow_tf32 = False  # eager and compiled convolutions may round differently
    bound: dict[str, Any] = {}
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
        if task.backend == "nccl":
            bound["device_id"] = worker.device
    dist.init_process_group(
        task.backend,
        init_method=f"file://{task.rendezvous}",
        rank=task.rank,
        world_size=task.world,
        timeout=timedelta(seconds=120),
        **bound,
    )
    PARTS[task.part](worker)
    path = Path(task.result)
    path.with_suffix(".new").write_text(json.dumps([asdict(finding) for finding in worker.findings]))
    path.with_suffix(".new").rename(path)  # what the driver sees is complete
    if worker.failed and task.world > 1:
        os._exit(1)  # no goodbye: the other rank may be stuck, and is ended by the driver
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()


# ---- the driver ----


class Phase:
    """The processes of one part; leaving the `with` block ends them."""

    def __init__(self, name: str, tasks: Sequence[Task], logs: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.tasks = tasks
        self._logs = [logs / f"{name}.{task.rank}.log" for task in tasks]
        self._environment = {**os.environ, **environment}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for task, log in zip(self.tasks, self._logs, strict=True):
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.gpu_check", "--worker", json.dumps(asdict(task))],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=Path(__file__).parents[1],
                    env=self._environment,
                )
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def findings(self, deadline: float) -> list[Finding]:
        """What the workers found; one that died or did not come back is a finding of its own."""
        found = []
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            if any(process.poll() for process in self._processes):  # a rank failed; the others may wait for it for ever
                deadline = min(deadline, time.monotonic() + 15)
            time.sleep(0.1)
        for task, process, log in zip(self.tasks, self._processes, self._logs, strict=True):
            code = process.poll()
            if Path(task.result).exists():
                found += [Finding(**line) for line in json.loads(Path(task.result).read_text())]
            if code != 0:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                how = "did not come back in time" if code is None else f"ended with status {code}"
                found.append(Finding(self.name, f"rank {task.rank}", FAILED, f"{how}; the end of its output:\n{tail}"))
        return found


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """One line for what all ranks looked at: the worst one's, and of two failures the one that is not a consequence."""
    severity = {FAILED: 2, NOT_SHOWN: 1, OK: 0}
    worst: dict[tuple[str, str], Finding] = {}
    for finding in sorted(findings, key=lambda f: (severity[f.status], is_wrong_result(f))):
        worst[finding.check, finding.what] = finding
    return list(worst.values())


def is_wrong_result(finding: Finding) -> bool:
    """Whether a check looked and found something wrong, rather than not getting that far."""
    return finding.status == FAILED and finding.text.startswith(AssertionError.__name__)


class Driver:
    """Starts the workers, part by part, and prints what they found."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        self.device = "cpu" if options.rehearse else "cuda:0"
        self.alone = "gloo" if options.rehearse else "nccl"
        self.found: list[Finding] = []
        # Set, not defaulted: nothing compiled elsewhere is served.
        self._environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache"),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else ""),
        }
        if options.rehearse:
            self._environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._environment = {name: value for name, value in self._environment.items() if value}

    def phase(self, part: str, *, backend: str, world: int, name: str = "", **environment: str) -> Phase:
        name = name or part
        tasks = [
            Task(
                part=part,
                backend=backend,
                rank=rank,
                world=world,
                device=self.device,
                quick=self.options.quick,
                checks=self.options.checks,
                rendezvous=str(self.scratch / f"{name}.rendezvous"),
                result=str(self.scratch / f"{name}.{rank}.json"),
            )
            for rank in range(world)
        ]
        return Phase(name, tasks, self.scratch, self._environment | environment)

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.found.append(finding)
            print(finding, flush=True)

    def run(self) -> None:
        """Everything asked for: what compares runs side by side, what measures alone."""
        asked = self.options.checks
        deadline = time.monotonic() + self.options.timeout
        comparing = []
        if "gradients" in asked:
            comparing.append(self.phase("gradients", backend=self.alone, world=1))
        if "ranks" in asked:
            comparing.append(self.phase("ranks", backend="gloo", world=2))
        for phase in comparing:
            phase.__enter__()
        try:
            for phase in comparing:
                self.add(merged(phase.findings(deadline)))
        finally:
            for phase in comparing:
                phase.__exit__()
        if "gradients" in asked:
            with self.phase("cache", backend=self.alone, world=1) as phase:
                self.add(phase.findings(deadline))
        if "ranks" in asked and not self.options.quick:
            self._pair_on_nccl(deadline)
        if {"streams", "memory", "time"} & set(asked):
            with self.phase("measure", backend=self.alone, world=1) as phase:
                self.add(phase.findings(deadline))

    def _pair_on_nccl(self, deadline: float) -> None:
        """Two ranks of NCCL on one GPU: NCCL allows it from 2.30 on, when asked. Not getting there proves nothing."""
        what = "two ranks of NCCL on one GPU"
        if self.options.rehearse or torch.cuda.nccl.version() < (2, 30):
            self.add([Finding("ranks", what, NOT_SHOWN, "needs a GPU and NCCL 2.30 or later")])
            return
        allow = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
        with self.phase("ranks", backend="nccl", world=2, name="pair", **allow) as phase:
            found = merged(phase.findings(min(deadline, time.monotonic() + 45)))
        if any(map(is_wrong_result, found)) or all(finding.status == OK for finding in found):
            self.add(found)
        else:
            reasons = [finding.text.splitlines()[-1] for finding in found if finding.status == FAILED]
            self.add([Finding("ranks", what, NOT_SHOWN, f"it did not run: {'; '.join(reasons)}")])


def _checks(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or not set(names) <= set(CHECKS):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected different ones out of {', '.join(CHECKS)}")
    return names


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller and fewer models, no timing on the stand-in network"
    )
    parser.add_argument("--checks", type=_checks, default=list(CHECKS), help=f"of {', '.join(CHECKS)}; default all")
    parser.add_argument("--json", type=Path, help="also write the findings with their figures to this file")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything (default 600)")
    parser.add_argument("--rehearse", action="store_true", help="try the script itself on the CPU: checks no GPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.timeout <= 0:
        parser.error(f"--timeout must be > 0, got {options.timeout}")
    return options


def describe_machine() -> dict[str, Any]:
    """What is checked, for the head of the report."""
    facts = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = f"{properties.name}, {properties.total_memory >> 30} GiB"
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.worker is not None:
        worker_main(Task(**json.loads(options.worker)))
        return 0
    if not options.rehearse and not torch.cuda.is_available():
        print("no GPU: nothing checked")
        return NO_GPU
    machine = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    if options.rehearse:
        print("rehearsal on the CPU: says nothing about a GPU", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch:
        driver = Driver(options, Path(scratch))
        driver.run()
    seconds = time.monotonic() - begin
    counts = {status: sum(f.status == status for f in driver.found) for status in (OK, FAILED, NOT_SHOWN)}
    print(f"{', '.join(f'{count} {status}' for status, count in counts.items())} in {seconds:.0f} s")
    if options.json is not None:
        report = {**machine, "quick": options.quick, "rehearsal": options.rehearse, "seconds": seconds}
        report["findings"] = [asdict(finding) for finding in driver.found]
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(counts[FAILED] > 0 or not driver.found)


if __name__ == "__main__":
    sys.exit(main())
