"""Step time of data-parallel modes, side by side in one run, on networks of several rates.

    python -m benchmarks.step_time --models transformer,convnet,mlp,tiny --rates none,2gbit,1gbit --rounds 15
    python -m benchmarks.step_time --models mlp --rates none,1gbit --modes local,fxddp_auto,fxddp_1mib,fxddp_8mib

The driver opens the network (`network.py`) and, for each model, starts two ranks on a core each. The ranks build and
check every mode once, then time it at every rate: the driver changes the rate under the living ranks, so one
compilation serves all rates.

    driver ──pipe: build mode / measure──► rank 0 ═══ shaped network ═══ rank 1 ◄──pipe── driver
           ◄──────── samples ────────────         (rendezvous by file)

Commands and results travel through pipes and the rendezvous through a file: nothing but the modes' own traffic, and one
barrier before each step, touches the shaped network.

Note [one copy of the models per mode]
Dynamo caches compiled code per code object. Were `torch.compile(m)` measured first and `torch.compile(DDP(m2))` of the
same class after it, the second would be served the first's graph, uncut, and DDPOptimizer would never run. Each mode
therefore executes `models.py` anew: equal weights and inputs, code objects of its own.

Note [sweep]
`bucket_mb="auto"` and `overlap="next_forward"` are planned for the network they find when they are built, so these are
built again at every rate, on a new process group. "auto" is compared in turns with the fixed sizes `fxddp_0.5mib` …
`fxddp_64mib`.

Note [turns]
A round steps every mode once, then all-reduces the same bytes alone: A B C comm, A B C comm, … A machine that drifts
hits all alike, and ratios are taken within a round, before the median. A step lasts as long as on its slower rank.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import comb
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import MODELS
from benchmarks.network import BURST_BYTES, UNSHAPED, Network, bits_per_second, open_network
from benchmarks.ranks import join

MODES = {
    "local": "torch.compile, no communication",
    "ddp": "DDP, eager",
    "ddp_compile": "torch.compile(DDP)",
    "fxddp": "fxddp",
    "fxddp_unsplit": "fxddp, backward not split",
}
USUAL_MODES = tuple(MODES)
TORCH_HOOKS = ("fp16", "powersgd")  # what torch has a hook for that runs on a CPU
HOOKED = {f"fxddp_{name}": name for name in ("fp16", "bf16", "int8", "powersgd")}
MODES |= {mode: f"fxddp, {name}" for mode, name in HOOKED.items()}
for _hook in TORCH_HOOKS:
    MODES |= {f"ddp_{_hook}": f"DDP, torch's {_hook} hook", f"fxddp_hook_{_hook}": f"fxddp, torch's {_hook} hook"}
    HOOKED |= {f"ddp_{_hook}": _hook, f"fxddp_hook_{_hook}": _hook}
MODES |= {"fxddp_ring": "fxddp, reduce-scatter and all-gather", "fxddp_lanes": "fxddp, two groups in turns"}
MODES |= {"fxddp_hierarchical": "fxddp, inside and across nodes", "fxddp_optimizer": "fxddp, optimizer in backward"}
NEXT_FORWARD = "fxddp_next_forward"
MODES |= {NEXT_FORWARD: "fxddp, waits in the next forward"}
IN_BACKWARD = ("fxddp_optimizer", NEXT_FORWARD)
SIZED = {f"fxddp_{mib:g}mib": mib for mib in (0.5, 1, 2, 4, 8, 16, 25, 32, 64)}
MODES |= {mode: f"fxddp, {mib:g} MiB" for mode, mib in SIZED.items()}
AUTO = "fxddp_auto"
MODES |= {AUTO: 'fxddp, "auto"'}
MEASURING = (AUTO, NEXT_FORWARD)
"""Modes that are planned for the network they find; see Note [sweep]."""
EAGER = frozenset(mode for mode in MODES if mode == "ddp" or (mode.startswith("ddp_") and mode in HOOKED))
COMPILED = frozenset(MODES) - EAGER
BASELINE, RIVAL = "local", "ddp_compile"
NODES = 2
LEARNING_RATE = 1e-4
CHECKED_RATE = 1024.0  # of the warm-up of `fxddp_optimizer`: so large that the weights show the gradients
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MIB = 2**20
WARM_UP_STEPS = 3
# Per tensor, largest difference over largest gradient. Another order of fp32 sums makes about 1e-5, a wrong mode 1.
GRADIENT_TOLERANCE = 1e-3
# What travels, for fxddp's modes; for DDP's torch's hooks, where it has one that runs on a CPU. Such gradients are
# compared with exact ones: difference over size of the whole gradient. PowerSGD's only before it starts.
COMM_HOOKS = {"fp16": 2e-3, "bf16": 1e-2, "int8": 3e-2, "powersgd": math.inf}


class BenchmarkError(Exception):
    """A rank failed, stalled or computed wrong gradients; the message holds what it said."""


# ---- a rank ----


@dataclass(frozen=True, slots=True)
class Run:
    """One mode, ready to step: the plain module that owns the parameters, and the callable that is timed."""

    module: nn.Module
    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    optimizer: torch.optim.Optimizer
    backend: Any  # the fxddp.Backend of the fxddp modes, else None


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one step. `cpu` is what the process got of its core meanwhile."""

    step: float
    forward: float
    backward: float
    cpu: float


def fresh_models(tag: str) -> ModuleType:
    """`models.py` executed anew; see Note [one copy of the models per mode]."""
    name = f"benchmarks_models_{tag}"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("models.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo imports by name what compiled code refers to
    spec.loader.exec_module(module)
    return module


def codec(name: str | None) -> Any:
    """The `comm_hook` of fxddp's modes."""
    import fxddp

    objects: dict[str | None, Callable[[], Any]] = {
        "int8": fxddp.Int8,
        "powersgd": lambda: fxddp.PowerSGD(4, start_iter=WARM_UP_STEPS - 1),
    }
    return objects[name]() if name in objects else name


def register_hook(on: Any, name: str | None) -> None:
    """torch's own hook of that name, if there is one."""
    if name == "fp16":
        on.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=WARM_UP_STEPS - 1)
        on.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def build(mode: str, model: str, *, rank: int, bucket_mb: float, comm_hook: str | None = None) -> Run:
    """The model in one mode; weights are the same for all modes and ranks, inputs differ between ranks."""
    module, inputs = fresh_models(mode).make(model, rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    backend = None
    call: Any
    if mode == "local":
        call = torch.compile(module)
    elif mode in EAGER or mode in ("ddp_compile", "reference"):
        call = DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        register_hook(call, comm_hook)
        if mode == "ddp_compile":
            call = torch.compile(call)
    else:
        import fxddp  # here, so that the other modes can be measured without it

        hooks = mode.startswith("fxddp_hook_")
        options: dict[str, Any] = {"split": mode != "fxddp_unsplit", "comm_hook": None if hooks else codec(comm_hook)}
        if mode == "fxddp_ring":
            options["algorithm"] = "ring"
        if mode == "fxddp_lanes":
            options["process_group"] = [dist.new_group() for _ in range(2)]
        if mode == "fxddp_hierarchical":
            options["device_mesh"] = init_device_mesh("cpu", (NODES, dist.get_world_size() // NODES))
        if mode in IN_BACKWARD:
            options["optimizer"] = optimizer
        if mode == NEXT_FORWARD:
            options["overlap"] = "next_forward"
        if mode in MEASURING:
            options["process_group"] = dist.new_group()
        backend = fxddp.backend("auto" if mode == AUTO else SIZED.get(mode, bucket_mb), **options)
        if hooks:
            register_hook(backend, comm_hook)
        call = torch.compile(module, backend=backend)
    return Run(module, call, inputs, optimizer, backend)


def averaged_gradients(run: Run, *, by_hand: bool) -> dict[str, Tensor]:
    """Copies of the gradients; `by_hand` averages them over the ranks first, for the mode that does not communicate."""
    found = {}
    for name, parameter in run.module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.detach().clone()
        if by_hand:
            dist.all_reduce(found[name])
            found[name] /= dist.get_world_size()
    return found


def check_gradients(
    mode: str, found: dict[str, Tensor], reference: dict[str, Tensor], comm_hook: str | None = None
) -> float:
    """The largest relative difference from DDP's gradients; BenchmarkError where it is no rounding."""
    worst = 0.0
    if comm_hook is not None:
        exact = torch.cat([expected.flatten() for expected in reference.values()])
        worst = ((torch.cat([found[name].flatten() for name in reference]) - exact).norm() / exact.norm()).item()
        if not worst <= COMM_HOOKS[comm_hook]:
            raise BenchmarkError(
                f"mode {mode}: gradients differ from exact ones by {worst:.1e} of their size, expected at most "
                f"{COMM_HOOKS[comm_hook]:.0e} with {comm_hook}; a wrong mode is not measured"
            )
        return worst
    for name, expected in reference.items():
        difference = ((found[name] - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()
        if not difference <= GRADIENT_TOLERANCE:
            raise BenchmarkError(
                f"mode {mode}: gradient of {name} differs from DDP's by {difference:.1e} of its largest element, "
                f"expected at most {GRADIENT_TOLERANCE:.0e}; a wrong mode is not measured"
            )
        worst = max(worst, difference)
    return worst


class Rank:
    """Answers the driver's commands one after another: `start`, `build`, `measure`."""

    def start(
        self,
        *,
        rank: int,
        ranks: int,
        model: str,
        bucket_mb: float,
        optimizer: bool,
        comm_hook: str | None,
        rendezvous: str,
        timeout: float,
    ) -> Any:
        join(rank, ranks, rendezvous, timedelta(seconds=timeout))
        self.rank, self.model, self.bucket_mb, self.with_optimizer = rank, model, bucket_mb, optimizer
        self.comm_hook = comm_hook
        self.runs: dict[str, Run] = {}
        reference = build("reference", model, rank=rank, bucket_mb=bucket_mb)
        self._warm_up_step(reference)
        self.reference = averaged_gradients(reference, by_hand=False)
        self.sizes = [p.numel() * p.element_size() for p in reference.module.parameters()]
        return {"parameters": len(self.sizes), "bytes": sum(self.sizes)}

    def build(self, *, mode: str) -> Any:
        """Compiles the mode; compares its gradients with DDP's at the first and at the last step of the warm-up."""
        graphs, compiles = counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]
        begin = time.perf_counter()
        hook = HOOKED.get(mode, self.comm_hook)
        run = build(mode, self.model, rank=self.rank, bucket_mb=self.bucket_mb, comm_hook=hook)
        differences = []
        for step in range(WARM_UP_STEPS):
            if mode in IN_BACKWARD:
                found = self._updated_gradients(run)
            else:
                self._warm_up_step(run)
                found = averaged_gradients(run, by_hand=mode == "local")
            if step in (0, WARM_UP_STEPS - 1):
                compressed = None if mode == "local" or (hook == "powersgd" and step == 0) else hook
                differences.append(check_gradients(mode, found, self.reference, compressed))
        seconds = time.perf_counter() - begin
        graphs, compiles = counters["stats"]["unique_graphs"] - graphs, counters["aot_autograd"]["total"] - compiles
        if (graphs > 0) != (mode in COMPILED):
            raise BenchmarkError(f"mode {mode}: Dynamo captured {graphs} graphs; the mode is not what its name says")
        self.runs[mode] = run
        built: dict[str, Any] = {
            "warm_up_s": seconds,
            "graphs": graphs,
            "aot_compiles": compiles,
            "difference": max(differences),
        }
        if run.backend is not None:
            last = run.backend.stats().backwards[-1]
            if not last.sync or last.launches == 0 or last.uncovered:
                raise BenchmarkError(f"mode {mode}: expected a backward whose graphs reduce every gradient, got {last}")
            built |= {"launches": last.launches, "pieces": last.pieces}
            built["buckets"] = [bucket.nbytes for plan in run.backend.plans for bucket in plan.buckets]
        if mode in MEASURING:
            built["speeds"] = asdict(run.backend.lookup().speeds)
        return built

    def measure(self, *, rounds: int, settle_s: float, streak: int) -> Any:
        """Samples of every mode, in turns; see Note [turns]."""
        for run in self.runs.values():
            for _ in range(2):  # connections, buffers and congestion windows get used to the new rate
                self._streak(run, 0.0, 1)
        bucket = max(1, int(self.bucket_mb * MIB) // 4)
        flat = torch.zeros(sum(self.sizes) // 4)
        first = min(bucket, MIB // 4, flat.numel())  # DDP's first bucket is 1 MiB
        buckets = [flat[:first], *flat[first:].split(bucket)] if flat.numel() > first else [flat]
        self._communicate(buckets, 0.0)
        samples: dict[str, list[Sample]] = {mode: [] for mode in self.runs}
        communication = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(rounds):
                for mode, run in self.runs.items():
                    samples[mode].append(self._streak(run, settle_s, streak))
                communication.append(self._communicate(buckets, settle_s))
        finally:
            gc.enable()
        return {"modes": {mode: [asdict(s) for s in taken] for mode, taken in samples.items()}, "comm": communication}

    def _warm_up_step(self, run: Run) -> None:
        """A step that leaves the weights alone, so that its gradients can be compared."""
        run.optimizer.zero_grad(set_to_none=True)
        run.call(*run.inputs).backward()

    def _updated_gradients(self, run: Run) -> dict[str, Tensor]:
        """The gradients with which a step in backward has changed the weights, which are put back."""
        (group,) = run.optimizer.param_groups
        before = {name: p.detach().clone() for name, p in run.module.named_parameters()}
        group["lr"] = CHECKED_RATE
        self._warm_up_step(run)
        group["lr"] = LEARNING_RATE
        run.backend.synchronize()
        found = {}
        with torch.no_grad():
            for name, parameter in run.module.named_parameters():
                assert parameter.grad is None, f"{name} was not updated in the backward"
                found[name] = (before[name] - parameter) / CHECKED_RATE
                parameter.copy_(before[name])
        return found

    def _streak(self, run: Run, settle_s: float, steps: int) -> Sample:
        """The mean of several steps in a row; see Note [streaks]."""
        time.sleep(settle_s)
        dist.barrier()
        if steps > 1:
            self._step(run)
        samples = [self._step(run) for _ in range(steps)]
        if run.backend is not None:
            run.backend.synchronize()
        return Sample(*(statistics.fmean(getattr(s, name) for s in samples) for name in Sample.__slots__))

    def _step(self, run: Run) -> Sample:
        cpu, begin = time.process_time(), time.perf_counter()
        run.optimizer.zero_grad(set_to_none=True)
        loss = run.call(*run.inputs)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        if self.with_optimizer:
            run.optimizer.step()
        end = time.perf_counter()
        return Sample(end - begin, forward - begin, backward - forward, time.process_time() - cpu)

    def _communicate(self, buckets: Sequence[Tensor], settle_s: float) -> float:
        """Seconds to all-reduce the model's bytes in buckets, all under way at once, with nothing else to do."""
        time.sleep(settle_s)
        dist.barrier()
        begin = time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        return time.perf_counter() - begin


def rank_main(read_fd: int, write_fd: int) -> None:
    """Serves commands until the driver closes the pipe, so a killed driver leaves no rank behind."""
    rank = Rank()
    with os.fdopen(read_fd) as commands, os.fdopen(write_fd, "w") as answers:
        for line in commands:
            command, arguments = json.loads(line)
            try:
                answer = {"ok": getattr(rank, command)(**arguments)}
            except BenchmarkError as error:
                answer = {"error": str(error)}
            except Exception:  # noqa: BLE001 - whatever it is, the driver prints it and ends the run
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # no goodbye between the ranks: the other one may have failed and never answer


# ---- the driver ----


class Ranks:
    """The rank processes of one model; leaving the `with` block ends them."""

    def __init__(self, network: Network, scratch: Path, timeout: float, ranks: int) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[tuple[int, int]] = []
        self._logs = [scratch / f"rank{rank}.log" for rank in range(ranks)]
        self._network = network
        self._scratch = scratch

    def __enter__(self) -> Self:
        try:
            for rank in range(self._ranks):
                self._launch(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _launch(self, rank: int) -> None:
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        self._pipes.append((answer_read, command_write))
        node = rank * NODES // self._ranks
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self._network.interface(node)}
        # A cache of this run alone, so that nothing compiled elsewhere is served; no pool of idle compile processes.
        # Set, not defaulted: importing torch has already written the user-wide folder into this process's environment.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self._scratch.parent / "cache")
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        rank_command = [sys.executable, "-m", "benchmarks.step_time", "--rank-pipes", f"{command_read},{answer_write}"]
        try:
            with self._logs[rank].open("wb") as log:
                process = subprocess.Popen(
                    [*self._network.command_prefix(node), *rank_command],
                    pass_fds=(command_read, answer_write),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=Path(__file__).parents[1],
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the driver alone, which ends the ranks in order
                )
        finally:
            os.close(command_read)
            os.close(answer_write)
        self._processes.append(process)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in self._pipes:
            for descriptor in pipe:
                os.close(descriptor)

    def ask(self, command: str, *own: dict[str, Any], **arguments: Any) -> list[Any]:
        """Sends the command to all ranks (`own[rank]` to that rank alone); returns their answers in order of rank."""
        for rank, (_, write) in enumerate(self._pipes):
            message = json.dumps([command, arguments | (own[rank] if own else {})])
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported below, with its log
                os.write(write, message.encode() + b"\n")
        deadline = time.monotonic() + self._timeout
        received = [b""] * self._ranks
        waiting = set(range(self._ranks))
        while waiting:
            readable, _, _ = select.select([self._pipes[r][0] for r in waiting], [], [], deadline - time.monotonic())
            if not readable:
                raise BenchmarkError(f"{command}: no answer from rank {min(waiting)} within {self._timeout:.0f} s")
            for rank in [r for r in sorted(waiting) if self._pipes[r][0] in readable]:
                chunk = os.read(self._pipes[rank][0], 1 << 16)
                received[rank] += chunk
                if not chunk:
                    tail = "\n".join(self._logs[rank].read_text(errors="replace").splitlines()[-20:])
                    raise BenchmarkError(f"{command}: rank {rank} died; the end of its output:\n{tail}")
                if chunk.endswith(b"\n"):
                    waiting.discard(rank)
                    answer = json.loads(received[rank])
                    if "error" in answer:  # at once: the other rank may wait for this one for ever
                        raise BenchmarkError(f"{command}: rank {rank}: {answer['error'].rstrip()}")
        return [json.loads(line)["ok"] for line in received]


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and an interval that covers the true one with probability `coverage`, whatever the distribution."""

    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median between the narrowest symmetric pair of order statistics that reaches `confidence`.

    The pair cut off by k values on each side covers the median with probability 1 - 2 P(Binomial(n, 1/2) <= k). Below
    six values not even the extremes reach 95 %: they are returned, with the coverage they have.
    """
    ordered, count = sorted(values), len(values)

    def coverage(cut: int) -> float:
        return 1 - 2 * sum(comb(count, i) for i in range(cut + 1)) / 2**count

    cut = max((k for k in range((count + 1) // 2) if coverage(k) >= confidence), default=0)
    return Interval(statistics.median(ordered), ordered[cut], ordered[-1 - cut], max(0.0, coverage(cut)))


def summarise(measured: Sequence[Any], *, nbytes: int) -> dict[str, Any]:
    """One model at one rate: what the ranks sampled, made into the figures of a table. Times in milliseconds."""

    def slower(mode: str, field: str) -> list[float]:
        return [1e3 * max(pair) for pair in zip(*([s[field] for s in m["modes"][mode]] for m in measured), strict=True)]

    steps = {mode: slower(mode, "step") for mode in measured[0]["modes"]}
    communication = [1e3 * max(pair) for pair in zip(*(m["comm"] for m in measured), strict=True)]
    comm = statistics.median(communication)
    result: dict[str, Any] = {"comm_ms": comm, "comm_gbit": nbytes * 8 / (comm * 1e6)}
    if BASELINE in steps:
        step, forward, backward = (
            statistics.median(slower(BASELINE, field)) for field in ("step", "forward", "backward")
        )
        rest = max(0.0, step - forward - backward)
        cpu = min(s["cpu"] / s["step"] for m in measured for s in m["modes"][BASELINE])
        result |= {"forward_ms": forward, "backward_ms": backward, "limit_ms": forward + max(backward, comm) + rest}
        result["limits_ms"] = [forward + max(backward + rest, comm), max(forward + backward + rest, comm)]
        result |= {"lowest_core_share": cpu}
    modes: dict[str, dict[str, Any]] = {}
    for mode, times in steps.items():
        row: dict[str, Any] = {"median_ms": statistics.median(times), "min_ms": min(times)}
        for other in (BASELINE, RIVAL):
            if other in steps:
                pairs = zip(times, steps[other], strict=True)
                row[f"vs_{other}"] = asdict(median_interval([t / o for t, o in pairs]))
        if BASELINE in steps:
            rounds = zip(times, steps[BASELINE], communication, strict=True)
            row["exposed"] = statistics.median((t - local) / alone for t, local, alone in rounds)
            row["vs_limit"] = row["median_ms"] / result["limit_ms"]
        modes[mode] = row | {"samples_ms": times}
    if AUTO in steps:
        fixed = [mode for mode in SIZED if mode in steps]
        ratios = {
            mode: median_interval([a / f for a, f in zip(steps[AUTO], steps[mode], strict=True)]) for mode in fixed
        }
        result["auto"] = {mode: asdict(interval) for mode, interval in ratios.items()}
    return result | {"modes": modes, "comm_samples_ms": communication}


COLUMNS = ("mode", "step ms", "÷ local", "÷ torch.compile(DDP)", "exposed", "÷ limit")


def table_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of one result's table, a row per mode, as `COLUMNS` names them."""

    def ratio(row: dict[str, Any], other: str) -> str:
        return str(Interval(**row[f"vs_{other}"])) if f"vs_{other}" in row else "–"

    return [
        (
            MODES[mode],
            f"{row['median_ms']:.1f}",
            ratio(row, BASELINE) if mode != BASELINE else "1",
            ratio(row, RIVAL) if mode != RIVAL else "1",
            f"{100 * row['exposed']:.1f} %" if "exposed" in row and mode != BASELINE else "–",
            f"{row['vs_limit']:.3f}" if "vs_limit" in row and mode != BASELINE else "–",
        )
        for mode, row in result["modes"].items()
    ]


def render(result: dict[str, Any], *, markdown: bool) -> str:
    """A heading, a line of what holds for the whole table, and the table, as text or as Markdown."""
    rows = [COLUMNS, *table_rows(result)]
    rate = "unshaped" if result["rate"] == UNSHAPED else result["rate"]
    title = f"{result['model']}, {result['bytes'] / MIB:.1f} MiB in {result['parameters']} parameters, {rate}"
    facts = f"communication alone {result['comm_ms']:.1f} ms ({result['comm_gbit']:.2f} Gbit/s)"
    if "limit_ms" in result:
        facts += f"; forward {result['forward_ms']:.1f} ms, backward {result['backward_ms']:.1f} ms"
        facts += f"; limit {result['limit_ms']:.1f} ms"
        if NEXT_FORWARD in result["modes"]:
            first, second = result["limits_ms"]
            reached = (first - result["modes"][NEXT_FORWARD]["median_ms"]) / max(first - second, 1e-9)
            facts += f"; forward + max(rest, communication) {first:.1f} ms, max(all computation, communication) "
            facts += f"{second:.1f} ms, of that way {100 * reached:.0f} %"
        facts += f"; lowest core share {result['lowest_core_share']:.2f}"
    facts += _auto(result)
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    aligned = [
        [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    if not markdown:
        return "\n".join([f"== {title}", f"   {facts}", *("   " + "  ".join(row) for row in aligned), ""])
    rule = "|".join("-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths))
    lines = [f"| {' | '.join(row)} |" for row in aligned]
    return "\n".join([f"### {title}", "", f"{facts[0].upper()}{facts[1:]}.", "", lines[0], f"|{rule}|", *lines[1:], ""])


def _auto(result: dict[str, Any]) -> str:
    """What `bucket_mb="auto"` measured and chose, and how it does against the best of the fixed sizes."""
    if not result.get("auto"):
        return ""
    best = min((mode for mode in result["auto"]), key=lambda mode: result["modes"][mode]["median_ms"])
    found = f'; "auto" ÷ {MODES[best]} {Interval(**result["auto"][best])}'
    built = result["modes"][AUTO].get("built", {})
    if "speeds" in built:
        network, machine = built["speeds"]["network"], built["speeds"]["machine"]
        sizes = " ".join(f"{nbytes / MIB:.2g}" for nbytes in built["buckets"])
        found += (
            f"; it measured {network['bandwidth'] * 8e-9:.2g} Gbit/s, {network['latency'] * 1e6:.0f} µs a message, "
        )
        found += f"{machine['flops'] * 1e-9:.0f} GFLOP/s, {machine['memory'] * 1e-9:.0f} GB/s; buckets of {sizes} MiB"
    return found


def settle_seconds(rate: str) -> float:
    """How long the token bucket takes to fill up again, twice: no step starts on what the one before it left over."""
    bits = bits_per_second(rate)
    return 0.0 if bits is None else 2 * BURST_BYTES * 8 / bits


def measure_model(model: str, network: Network, scratch: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Builds and checks the modes once, then yields a result per rate."""
    scratch.mkdir()
    with Ranks(network, scratch, options.timeout, options.ranks) as ranks:
        network.set_rate(UNSHAPED)
        each = [{"rank": rank, "ranks": options.ranks} for rank in range(options.ranks)]
        common = {"model": model, "bucket_mb": options.bucket_mb, "optimizer": options.optimizer}
        common["comm_hook"] = options.comm_hook
        start = {"rendezvous": str(scratch / "rendezvous"), "timeout": options.timeout}
        facts = ranks.ask("start", *each, **common, **start)[0]
        built = {}

        def build_all(modes: Sequence[str]) -> None:
            for mode in modes:
                answers = ranks.ask("build", mode=mode)
                built[mode] = answers[0] | {"difference": max(a["difference"] for a in answers)}
                _note(f"{model}: {mode} built and checked in {built[mode]['warm_up_s']:.1f} s")

        build_all([mode for mode in options.modes if mode not in MEASURING])
        for rate in options.rates:
            network.set_rate(rate)
            build_all([mode for mode in options.modes if mode in MEASURING])
            load = os.getloadavg()
            _note(f"{model}: measuring at rate {rate}")
            settle_s = settle_seconds(rate)
            measured = ranks.ask("measure", rounds=options.rounds, settle_s=settle_s, streak=options.streak)
            result = {"model": model, "rate": rate, **facts, "load_before": load, "load_after": os.getloadavg()}
            result |= summarise(measured, nbytes=facts["bytes"])
            for mode, row in result["modes"].items():
                row["built"] = dict(built[mode])
            yield result


def run(options: argparse.Namespace) -> int:
    """Measures what was asked for and prints it as it comes; the JSON file holds all tables printed so far."""
    network, fallback = open_network(namespaces=options.namespaces)
    try:
        if fallback is not None:
            skipped = [rate for rate in options.rates if rate != UNSHAPED]
            _note(
                f"plain loopback instead of a shaped network: {fallback}"
                + (f"; not measured: {skipped}" if skipped else "")
            )
            options.rates = [UNSHAPED]
        report: dict[str, Any] = {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "cores": os.cpu_count(),
            "network": network.kind,
            "ranks": options.ranks,
            "bucket_mb": options.bucket_mb,
            "rounds": options.rounds,
            "optimizer": options.optimizer,
            "comm_hook": options.comm_hook,
            "load_before": os.getloadavg(),
            "results": [],
        }
        head = (
            f"torch {report['torch']}, Python {report['python']}, {report['cores']} cores, {options.ranks} ranks"
            f"{' on a core each' if options.ranks <= (report['cores'] or 1) else ''}"
        )
        head += f", gloo over {network.kind}, buckets of {options.bucket_mb:g} MiB, {options.rounds} rounds"
        head += (
            f", step {'with' if options.optimizer else 'without'} optimizer; load before {_load(report['load_before'])}"
        )
        head += f"; compressed by {options.comm_hook}" if options.comm_hook else ""
        print(head, end="\n\n", flush=True)
        failed = False
        with tempfile.TemporaryDirectory(prefix="fxb-") as scratch:
            for model in options.models:
                try:
                    for result in measure_model(model, network, Path(scratch) / model, options):
                        report["results"].append(result)
                        report["load_after"] = os.getloadavg()
                        print(render(result, markdown=options.markdown), flush=True)
                        if options.json is not None:
                            options.json.write_text(json.dumps(report, indent=1) + "\n")
                except BenchmarkError as error:
                    failed = True
                    _note(f"{model}: FAILED: {error}")
        if options.rounds < 6:
            print("Intervals are minimum and maximum: fewer than 6 rounds give no 95 % interval.")
        print(f"load after {_load(os.getloadavg())}")
        return int(failed)
    finally:
        for number in ENDING_SIGNALS:  # a second Ctrl-C must not leave namespaces behind
            signal.signal(number, signal.SIG_IGN)
        network.close()


def _note(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def _load(load: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in load)


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected different ones out of {', '.join(known)}")
        return names

    return parse


def _rates(text: str) -> list[str]:
    rates = text.split(",")
    try:
        for rate in rates:
            bits_per_second(rate)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return rates


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time", description=(__doc__ or "").partition("\n")[0]
    )
    models = [name for name in MODELS if name != "smoke"]
    parser.add_argument("--models", type=_names(list(MODELS)), default=models, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", type=_names(list(MODES)), default=list(USUAL_MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--rates", type=_rates, default=[UNSHAPED, "2gbit", "1gbit"], help="none, 2gbit, 500mbit, …")
    parser.add_argument("--bucket-mb", type=float, default=5.0, help="bucket size of every mode, in MiB (default 5)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of every mode per rate (default 15)")
    parser.add_argument("--streak", type=int, default=1, help="steps in a row that are timed together (default 1)")
    parser.add_argument("--ranks", type=int, default=2, help="processes, half of them on each of two nodes (default 2)")
    parser.add_argument("--comm-hook", choices=list(COMM_HOOKS), help="compress; DDP does with fp16 and powersgd")
    parser.add_argument("--optimizer", action="store_true", help="include an SGD step in the timed step")
    parser.add_argument("--no-namespaces", dest="namespaces", action="store_false", help="plain loopback, unshaped")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a build or a measurement may take")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--rank-pipes", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("rounds", "bucket_mb", "timeout", "streak"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be > 0, got {getattr(options, name)}")
    if NEXT_FORWARD in options.modes and options.streak < 2:
        parser.error(f"{NEXT_FORWARD} leaves communication to the next step: give --streak, to time several in a row")
    if options.ranks < NODES or options.ranks % NODES:
        parser.error(f"--ranks must be a multiple of {NODES}, the number of nodes, got {options.ranks}")
    if not options.optimizer and (early := [mode for mode in IN_BACKWARD if mode in options.modes]):
        parser.error(f"{early[0]} makes a step in its backward: give --optimizer, so that the others make one too")
    return options


def main() -> int:
    options = parse_arguments()
    if options.rank_pipes is not None:
        rank_main(*map(int, options.rank_pipes.split(",")))
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda received, _: sys.exit(128 + received))
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
