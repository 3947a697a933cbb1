"""The processes that time modes, and what starts, asks and ends them.

    python -m benchmarks.ranks READ,WRITE

serves commands that come through one pipe, and answers through another.
"""

import contextlib
import gc
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.ideal import packed_after
from benchmarks.modes import (
    AUTO,
    CHECKED_RATE,
    COMPILED,
    FIXED,
    HOOKED,
    IN_BACKWARD,
    LEARNING_RATE,
    LOCAL,
    MEASURING,
    MIB,
    NODES,
    WARM_UP_STEPS,
    BenchmarkError,
    Run,
    averaged_gradients,
    build,
    check_gradients,
    name_of,
)
from benchmarks.network import Network
from benchmarks.processes import join

IDEAL_STEPS = 5
"""Of which the medians make the ideal."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one step. `cpu` is what the process got of its core meanwhile."""

    step: float
    forward: float
    backward: float
    cpu: float


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
        name = name_of(mode)
        hook = HOOKED.get(name, self.comm_hook)
        run = build(mode, self.model, rank=self.rank, bucket_mb=self.bucket_mb, comm_hook=hook)
        differences = []
        for step in range(WARM_UP_STEPS):
            if name in IN_BACKWARD:
                found = self._updated_gradients(run)
            else:
                self._warm_up_step(run)
                found = averaged_gradients(run, by_hand=name in LOCAL)
            if step in (0, WARM_UP_STEPS - 1):
                compressed = None if name in LOCAL or (hook == "powersgd" and step == 0) else hook
                differences.append(check_gradients(mode, found, self.reference, compressed))
        seconds = time.perf_counter() - begin
        graphs, compiles = counters["stats"]["unique_graphs"] - graphs, counters["aot_autograd"]["total"] - compiles
        if (graphs > 0) != (name in COMPILED):
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
        if name in MEASURING:
            built["speeds"] = asdict(run.backend.lookup().speeds)
        return built

    def measure(self, *, rounds: int, settle_s: float, streak: int, ideal: bool) -> Any:
        """Samples of every mode, in turns; see Note [turns]. With `ideal`, also what fxddp's ideal is made of."""
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
        return {
            "modes": {mode: [asdict(s) for s in taken] for mode, taken in samples.items()},
            "comm": communication,
            "ideal": {mode: self._ideal(run) for mode, run in self.runs.items() if ideal and self._has_ideal(mode)},
        }

    def _warm_up_step(self, run: Run) -> None:
        """A step that leaves the weights alone, so that its gradients can be compared."""
        run.optimizer.zero_grad(set_to_none=True)
        with run.surroundings():
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
        with run.surroundings():
            loss = run.call(*run.inputs)
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
        if self.with_optimizer:
            run.optimizer.step()
        end = time.perf_counter()
        return Sample(end - begin, forward - begin, backward - forward, time.process_time() - cpu)

    def _has_ideal(self, mode: str) -> bool:
        """Whether buckets travel as they are, by one all-reduce each."""
        return name_of(mode) in (FIXED, AUTO) and self.comm_hook is None

    def _ideal(self, run: Run) -> Any:
        """Seconds until each bucket is packed and until all is computed, without sending; those each travels alone."""
        self._streak(run, 0.0, 1)
        sent = run.backend.stats().backwards[-1]
        steps = []
        for _ in range(IDEAL_STEPS):
            dist.barrier()
            with run.backend.no_sync():
                self._warm_up_step(run)
            steps.append(packed_after(run.backend.stats().backwards[-1], sent))
        self._streak(run, 0.0, 1)  # none of that is left
        *ready, computed = map(statistics.median, zip(*steps, strict=True))
        travels = partial(run.backend.settings.wire_bytes, world_size=dist.get_world_size())
        buckets = [torch.zeros(travels(bucket) // 4) for plan in run.backend.plans for bucket in plan.buckets]
        taken = [[self._communicate([bucket], 0.0)[0] for bucket in buckets] for _ in range(IDEAL_STEPS)]
        return {"ready": ready, "computed": computed, "sending": list(map(statistics.median, zip(*taken, strict=True)))}

    def _communicate(self, buckets: Sequence[Tensor], settle_s: float) -> tuple[float, float]:
        """All-reduces the model's bytes in buckets, all under way at once, with nothing else to do.

        Returns:
            Seconds, and seconds of this process's core.
        """
        time.sleep(settle_s)
        dist.barrier()
        cpu, begin = time.process_time(), time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        return time.perf_counter() - begin, time.process_time() - cpu


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
        rank_command = [sys.executable, "-m", "benchmarks.ranks", f"{command_read},{answer_write}"]
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


if __name__ == "__main__":
    rank_main(*map(int, sys.argv[1].split(",")))
