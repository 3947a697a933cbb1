"""Time of the first training steps, compilation included: cold, and in a second process that finds filled caches.

    python -m benchmarks.compile_time --models transformer,transformer12,convnet,thin --rounds 2

Every figure is of fresh processes: two ranks with gloo over loopback, a core each, which build the model, wait for each
other and then make two steps. Modes are taken in turns, round by round; every mode and round has a cache folder of its
own, which its warm run finds filled. `local` is plain `torch.compile` without communication.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch._inductor.compile_fx  # not a matter of modes: imported before the clock starts
import torch.distributed as dist

from benchmarks.models import MODELS
from benchmarks.modes import BASELINE, MODES, USUAL_MODES, build, title
from benchmarks.processes import on_ranks

STEPS = 2


def first_steps(rank: int, caches: str, model: str, mode: str, bucket_mb: float) -> float:
    """Seconds of the first steps on the slower rank."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/rank{rank}"
    run = build(mode, model, rank=rank, bucket_mb=bucket_mb)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        with run.surroundings():
            run.call(*run.inputs).backward()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def cold_and_warm(model: str, mode: str, bucket_mb: float) -> tuple[float, float]:
    """What the slower of two ranks took, cold and then warm."""
    with tempfile.TemporaryDirectory(prefix="fxddp-compile-") as caches:
        cold, warm = (on_ranks(first_steps, caches, model, mode, bucket_mb) for _ in range(2))
        return cold, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="transformer", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--modes", default=",".join(m for m in USUAL_MODES if m != "ddp"), help=f"of {', '.join(MODES)}"
    )
    parser.add_argument("--bucket-mb", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    modes = arguments.modes.split(",")
    if BASELINE not in modes:
        parser.error(f"--modes must name {BASELINE}, which the others are compared with")
    for model in arguments.models.split(","):
        taken: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
        for _ in range(arguments.rounds):
            for mode in modes:
                taken[mode].append(cold_and_warm(model, mode, arguments.bucket_mb))
        print(f"\n{model}, buckets of {arguments.bucket_mb:g} MiB, {STEPS} steps:\n")
        print("| | cold | ÷ local | warm | ÷ local |\n|---|---|---|---|---|")
        base = [statistics.median(pair[i] for pair in taken[BASELINE]) for i in (0, 1)]
        for mode, pairs in taken.items():
            cells = []
            for i in (0, 1):
                seconds = statistics.median(pair[i] for pair in pairs)
                cells.append(f"{seconds:.2f} s | {seconds / base[i]:.2f}")
            print(f"| {title(mode)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
