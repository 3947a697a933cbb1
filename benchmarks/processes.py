"""Processes of a benchmark on one machine: a core each, joined in a gloo group over a file."""

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def take_core(rank: int) -> None:
    """Keeps this process, with the threads it will start, on one core: its own as far as there are enough."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)


def join(rank: int, ranks: int, meeting: str | Path, timeout: timedelta | None = None) -> None:
    """Makes this process a rank of the default group.

    Args:
        rank: of this process.
        ranks: how many there are.
        meeting: a file that all of them name and nobody used before.
        timeout: of collectives; torch's own without.
    """
    take_core(rank)  # before any thread exists, so that gloo's share the core
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timeout)


def on_ranks(job: Callable[..., Any], *arguments: Any, ranks: int = 2) -> Any:
    """Runs `job(rank, *arguments)`, a function of a module, in fresh processes.

    Returns:
        What it returned on rank 0, as it comes out of JSON.
    """
    with tempfile.TemporaryDirectory(prefix="fxddp-benchmark-") as folder:
        spawn(_rank_main, (ranks, folder, job, arguments), nprocs=ranks)
        return json.loads(Path(folder, "found").read_text())


def _rank_main(rank: int, ranks: int, folder: str, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    join(rank, ranks, f"{folder}/meeting")
    found = job(rank, *arguments)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
