"""What compression costs in loss: the same training with every codec, over several seeds.

    python -m benchmarks.convergence --seeds 5

Each run is data-parallel over gloo processes of this machine. Runs of one seed start from the same weights and see the
same batches in the same order, so they are compared in pairs: the table shows the validation loss at the end, and how
far it is from the uncompressed run of the same seed, as the mean over the seeds with its standard error. A mean beyond
the codec's margin ends the command with an error.

    digits   the 1797 images of 8 × 8 pixels that scikit-learn ships; a network of three layers; SGD with momentum
    gpt      the GPT of examples/train_gpt.py in small, on Python's manual; AdamW, gradients clipped
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxddp
from benchmarks.processes import on_ranks
from examples.train_gpt import GPT, Sequences

BUCKET_MB = 0.05  # several buckets in these small models


@dataclass(frozen=True)
class Way:
    """What travels, and how far the mean final loss may be above the uncompressed one, relative to it."""

    make: Callable[[], Any]
    margin: float


WAYS = {
    "none": Way(lambda: None, 0.0),
    "fp16": Way(lambda: "fp16", 0.01),
    "bf16": Way(lambda: "bf16", 0.01),
    "PowerSGD(4)": Way(lambda: fxddp.PowerSGD(4, start_iter=10, min_compression_rate=1), 0.1),
    "Int8": Way(fxddp.Int8, 0.01),
    "Adaptive": Way(lambda: fxddp.Adaptive(start_iter=5, every=20), 0.01),
}


@dataclass(frozen=True)
class Outcome:
    """One run: losses, the mean over ranks, and bytes that travelled for all its gradients and uncompressed."""

    first_loss: float
    training_loss: float  # mean of the last tenth
    validation_loss: float
    wire_bytes: int
    plain_bytes: int


def mean(values: Sequence[Tensor] | Tensor) -> float:
    total = torch.stack(list(values)).mean()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()


def run(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, int], Tensor],
    validate: Callable[[nn.Module], Tensor],
    *,
    steps: int,
    way: str,
    inner: str,
) -> Outcome:
    backend = fxddp.backend(BUCKET_MB, first_bucket_mb=BUCKET_MB, inner=inner, comm_hook=WAYS[way].make())
    model = torch.compile(module, backend=backend)
    losses = []
    wire = plain = 0
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(value.detach())
        wire += backend.stats().last.wire_bytes
        plain += backend.stats().last.bytes
    with torch.no_grad():
        validation = mean([validate(module)])
    return Outcome(mean(losses[:1]), mean(losses[-max(1, steps // 10) :]), validation, wire, plain)


def digits(rank: int, world: int, way: str, seed: int, *, inner: str = "aot_eager", steps: int = 300) -> Outcome:
    """A step has 32 images on each rank; 300 images are kept for validation."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    training, validation = order[300:], order[:300]
    draws = torch.Generator().manual_seed(100 + seed)
    batches = torch.randint(len(training), (steps, world, 32), generator=draws)[:, rank]
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))

    def loss(model: Any, step: int) -> Tensor:
        rows = training[batches[step]]
        return F.cross_entropy(model(images[rows]), labels[rows])

    return run(
        module,
        torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
        loss,
        lambda m: F.cross_entropy(m(images[validation]), labels[validation]),
        steps=steps,
        way=way,
        inner=inner,
    )


def gpt(rank: int, world: int, way: str, seed: int, *, inner: str = "aot_eager", steps: int = 300) -> Outcome:
    """A step has 8 sequences of 64 bytes on each rank."""
    text = "\n".join(topics[name] for name in sorted(topics))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    split = len(data) * 9 // 10
    training = Sequences(data[:split], 64, seed, torch.device("cpu"))
    validation = Sequences(data[split:], 64, seed, torch.device("cpu"))
    torch.manual_seed(seed)
    module = GPT(64, layers=2, width=64, heads=2)

    def loss(model: Any, step: int) -> Tensor:
        (rows,) = training.micro_batches(step, 8 * world, 1, rank, world)
        return model(training.inputs[rows], training.targets[rows])

    return run(
        module,
        torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.01),
        loss,
        lambda m: m(validation.inputs[:400], validation.targets[:400]),
        steps=steps,
        way=way,
        inner=inner,
    )


TASKS: dict[str, Callable[..., Outcome]] = {"digits": digits, "gpt": gpt}

Outcomes = dict[str, dict[str, list[Outcome]]]
"""By task and way, those of each seed."""


def train_all(rank: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs, on one rank: plain data of `Outcomes`."""
    found: Outcomes = {}
    for task in arguments.tasks:
        found[task] = {way: [] for way in arguments.ways}
        for seed in range(arguments.seeds):
            for way, outcomes in found[task].items():
                torch.compiler.reset()
                options = {"inner": arguments.inner, "steps": arguments.steps}
                outcomes.append(TASKS[task](rank, arguments.ranks, way, seed, **options))
                if rank == 0:
                    print(f"{task}, seed {seed}, {way}: {outcomes[-1].validation_loss:.4f}", file=sys.stderr)
    return {
        task: {way: [asdict(outcome) for outcome in outcomes] for way, outcomes in ways.items()}
        for task, ways in found.items()
    }


def difference(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> list[float]:
    """How far each seed's validation loss is from the uncompressed one, relative to it."""
    return [o.validation_loss / p.validation_loss - 1 for o, p in zip(outcomes, plain, strict=True)]


def table(ways: dict[str, list[Outcome]]) -> list[str]:
    lines = [
        "| what travels | bytes | training loss | validation loss | against none | margin |",
        "|---|---|---|---|---|---|",
    ]
    for way, outcomes in ways.items():
        apart = difference(outcomes, ways["none"])
        spread = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        size = sum(o.wire_bytes for o in outcomes) / sum(o.plain_bytes for o in outcomes)
        losses = [statistics.mean(getattr(o, key) for o in outcomes) for key in ("training_loss", "validation_loss")]
        against = "" if way == "none" else f"{100 * statistics.mean(apart):+.2f} ± {100 * spread:.2f} %"
        margin = "" if way == "none" else f"{100 * WAYS[way].margin:g} %"
        lines.append(f"| {way} | {100 * size:.1f} % | {losses[0]:.4f} | {losses[1]:.4f} | {against} | {margin} |")
    return lines


def beyond(ways: dict[str, list[Outcome]]) -> list[str]:
    """The ways whose mean loss is further above the uncompressed one than their margin."""
    return [w for w, found in ways.items() if statistics.mean(difference(found, ways["none"])) > WAYS[w].margin]


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"{unknown} are not among {list(known)}")
        return names

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description="What compression costs in loss.")
    parser.add_argument("--tasks", type=_names(list(TASKS)), default=list(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--ways", type=_names(list(WAYS)), default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--inner", choices=["inductor", "aot_eager"], default="aot_eager", help="compiles the graphs")
    parser.add_argument("--json", type=Path, help="also write every outcome to this file")
    arguments = parser.parse_args()
    if "none" not in arguments.ways:
        arguments.ways = ["none", *arguments.ways]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    report = on_ranks(train_all, arguments, ranks=arguments.ranks)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report))
    failed = []
    for task, found in report.items():
        ways = {way: [Outcome(**outcome) for outcome in outcomes] for way, outcomes in found.items()}
        print(f"\n### {task}, {arguments.steps} steps on {arguments.ranks} ranks, {arguments.seeds} seeds\n")
        print("\n".join(table(ways)))
        failed += [f"{task} with {way}" for way in beyond(ways)]
    if failed:
        raise SystemExit(f"beyond the margin: {', '.join(failed)}")


if __name__ == "__main__":
    main()
