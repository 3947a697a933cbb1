"""Peak memory and time of a training step with the optimizer after the backward, and in it.

    torchrun --nproc-per-node 2 -m benchmarks.optimizer_memory --model transformer --optimizer AdamW

Prints, for `optimizer.step()` after the backward and for `fxddp.backend(optimizer=…)`, how far the resident memory of
rank 0 rises above its level between steps, and the median time of a step, taken in turns. Linux only: the high-water
mark is the kernel's (`/proc/self/clear_refs`).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fxddp
from benchmarks.modes import fresh_models

MIB = 2**20
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
}


def resident(field: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def forget_peak() -> None:
    """Sets the high-water mark to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def step(model: Any, inputs: tuple[torch.Tensor, ...], optimizer: torch.optim.Optimizer) -> None:
    model(*inputs).backward()
    optimizer.step()  # finds no gradients where the backward has used them
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--optimizer", default="AdamW", choices=OPTIMIZERS)
    parser.add_argument("--bucket-mb", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps: dict[str, Callable[[], None]] = {}
    for name in ("after the backward", "in the backward"):
        module, inputs = fresh_models(name.split()[0]).make(arguments.model, rank)
        optimizer = OPTIMIZERS[arguments.optimizer](module.parameters())
        inside = name.startswith("in ")
        model = torch.compile(
            module, backend=fxddp.backend(arguments.bucket_mb, optimizer=optimizer if inside else None)
        )

        steps[name] = partial(step, model, inputs, optimizer)
        for _ in range(4):
            steps[name]()
    peaks: dict[str, list[float]] = {name: [] for name in steps}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, run in steps.items():
            dist.barrier()
            forget_peak()
            before, since = resident("VmRSS"), time.perf_counter()
            run()
            times[name].append(time.perf_counter() - since)
            peaks[name].append(resident("VmHWM") - before)
    if rank == 0:
        for name in steps:
            peak, seconds = statistics.median(peaks[name]), statistics.median(times[name])
            what = f"peak {peak:.1f} MiB above the level between steps, {seconds * 1e3:.1f} ms"
            print(f"{arguments.optimizer} {name}: {what}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
