"""How long planning takes: the fixed-size planner's and `bucket_mb="auto"`'s plans for 1,000 to 100,000 gradients.

    python -m benchmarks.planner

Gradients are those of a deep network: weights over four decades of bytes, ready evenly over a backward in which the
network is the bottleneck. Each count is planned several times by both planners in turns, in this process, and the
fastest of each is shown, with its growth from the count before: n log n grows by slightly more than n does.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fxddp import units
from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.cost import Network
from fxddp.passes.plan import BucketPlan, GradSpec
from fxddp.passes.sizing import Stretch

COUNTS = (1_000, 3_000, 10_000, 30_000, 100_000)
CAP, FIRST = 25 << 20, 1 << 20
SECONDS_PER_GRADIENT = 50e-6
NETWORK = Network(world_size=64, bandwidth=1e9, latency=10e-6)


@dataclass(frozen=True)
class Row:
    """Planning so many gradients.

    Attributes:
        gradients: how many.
        planner: "fixed" or "auto".
        buckets: in the plan.
        samples: seconds of each run.
    """

    gradients: int
    planner: str
    buckets: int
    samples: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of the fastest run."""
        return min(self.samples)


def some_gradients(count: int) -> list[GradSpec]:
    """Gradients of 64 bytes to 4 MiB, ready one after the other; the same in every run."""
    sizes = random.Random(count)
    shapes = [(int(2 ** sizes.uniform(4, 20)),) for _ in range(count)]
    cpu, float32 = torch.device("cpu"), torch.float32
    return [GradSpec(i, i, i, shape, (1,), float32, cpu, frozenset()) for i, shape in enumerate(shapes)]


def planners(count: int) -> dict[str, Callable[[], BucketPlan]]:
    """What plans these gradients, by name."""
    grads = some_gradients(count)
    total = count * SECONDS_PER_GRADIENT
    when = {grad.output: (grad.ready + 1) * SECONDS_PER_GRADIENT for grad in grads}
    return {
        "fixed": lambda: plan_buckets(grads, cap=CAP, first_cap=FIRST),
        "auto": lambda: Stretch.of(grads, when, total, NETWORK).plan(),
    }


def measure(counts: tuple[int, ...], rounds: int) -> list[Row]:
    """Times of both planners in turns."""
    rows = []
    for count in counts:
        samples: dict[str, list[float]] = {}
        buckets = {}
        for _ in range(rounds):
            for name, plan in planners(count).items():  # afresh: a Stretch keeps what it computed
                begin = time.perf_counter()
                buckets[name] = len(plan().buckets)
                samples.setdefault(name, []).append(time.perf_counter() - begin)
        rows += [Row(count, name, buckets[name], tuple(times)) for name, times in samples.items()]
    return rows


def growth(rows: list[Row], row: Row) -> float | None:
    """The exponent of growth since the next smaller count: 1 if time grows as the gradients do; None for the first."""
    smaller = [each for each in rows if each.planner == row.planner and each.gradients < row.gradients]
    if not smaller:
        return None
    before = max(smaller, key=lambda each: each.gradients)
    return math.log(row.seconds / before.seconds) / math.log(row.gradients / before.gradients)


def table(rows: list[Row]) -> str:
    """Both planners side by side, in Markdown."""
    lines = [
        "| gradients | fixed: fastest | median | growth | buckets | auto: fastest | median | growth | buckets |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for count in dict.fromkeys(row.gradients for row in rows):
        cells = [f"{count:,}"]
        for row in (row for row in rows if row.gradients == count):
            exponent = growth(rows, row)
            cells += [units.duration(row.seconds), units.duration(statistics.median(row.samples))]
            cells += ["" if exponent is None else f"n^{exponent:.2f}", f"{row.buckets:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how long plans take.")
    parser.add_argument("--counts", type=lambda text: tuple(map(int, text.split(","))), default=COUNTS)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is planned")
    parser.add_argument("--json", type=Path, help="write every sample here")
    arguments = parser.parse_args()
    rows = measure(arguments.counts, arguments.rounds)
    facts = {"python": sys.version.split()[0], "torch": torch.__version__, "cores": os.cpu_count()}
    print(
        f"Python {facts['python']}, torch {facts['torch']}, {facts['cores']} cores; {arguments.rounds} runs of each\n"
    )
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
