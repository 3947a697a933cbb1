"""Scale on paper: the step of a model on 8 … 4,096 ranks, `bucket_mb="auto"` against DDP's fixed 25 MiB.

    python -m benchmarks.scaling                 a GPT on ranks and bandwidths that are not there: table and scaling.svg
    python -m benchmarks.scaling --check         before that, predicted against measured steps on 2, 3 and 4 ranks

The step is that of `passes/step.py`: gradients become ready as the arithmetic of the backward graph says, and a
network sends one bucket after the other, each in 2(N-1)/N · bytes / bandwidth plus the latency of N ranks: 2(N-1)
messages one after the other for a ring, 2 log2 N for a tree, as NCCL takes where messages are small or ranks many
(double binary trees: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
and scan", Parallel Computing 35(12), 2009). DDP's buckets are taken to fill in the true order, as after its first step.

The check measures the network (`fxddp/speeds.py`) and the step without communication on real gloo ranks, over the
shaped pair of namespaces of `network.py` where these can be had, and predicts the step with communication from them.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fxddp
from benchmarks.models import MODELS, Transformer
from benchmarks.modes import fresh_models
from benchmarks.network import Network as Link
from benchmarks.network import bits_per_second, open_network
from benchmarks.processes import join
from fxddp import units
from fxddp.explain import Explanation
from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.cost import Network
from fxddp.passes.plan import BucketPlan, GradSpec
from fxddp.passes.sizing import Stretch

MIB = 1 << 20
DDP_MIB, DDP_FIRST_MIB = 25, 1
AUTO = "auto"


# ---- a training on paper ----


@dataclass(frozen=True, slots=True)
class Training:
    """What a step computes: seconds of the forward and the backward, and its gradients.

    Attributes:
        grads: in ready order.
        shares: of the backward's time, until each is ready.
        found: outputs of the gradients that end a bucket of the plan it was made from.
    """

    forward: float
    backward: float
    grads: tuple[GradSpec, ...]
    shares: tuple[float, ...]
    found: frozenset[int]

    @property
    def nbytes(self) -> int:
        return sum(grad.nbytes for grad in self.grads)

    def on(self, network: Network) -> Stretch:
        """Its backward on a network."""
        when = {grad.output: share * self.backward for grad, share in zip(self.grads, self.shares, strict=True)}
        return Stretch.of(self.grads, when, self.backward, network)


def training_of(found: Explanation) -> Training:
    """The training of an explained model of one graph."""
    (graph,) = found.graphs
    grads: list[GradSpec] = []
    shares: list[float] = []
    ends: list[int] = []
    for bucket in graph.buckets:
        dtype = getattr(torch, bucket.dtype)
        for gradient in bucket.gradients:
            index = len(grads)
            shape, device = gradient.shape, torch.device(bucket.device)
            grads.append(GradSpec(index, index, gradient.ready, shape, (), dtype, device, frozenset()))
            shares.append(gradient.before)
        ends.append(len(grads) - 1)
    return Training(graph.forward_seconds, graph.seconds, tuple(grads), tuple(shares), frozenset(ends))


@dataclass(frozen=True, slots=True)
class Step:
    """A predicted step: seconds, how many of them nothing hides, buckets and the bytes of the largest."""

    seconds: float
    exposed: float
    buckets: int
    largest: int


def predicted(training: Training, network: Network, plan: BucketPlan) -> Step:
    """The step with these buckets."""
    seconds = training.forward + training.on(network).finish(plan)
    exposed = seconds - training.forward - training.backward
    return Step(seconds, exposed, len(plan.buckets), max(bucket.nbytes for bucket in plan.buckets))


def planned(training: Training, ends: frozenset[int]) -> BucketPlan:
    return plan_buckets(training.grads, cap=1, first_cap=1, ends=ends)


def both(training: Training, network: Network) -> tuple[Step, Step]:
    """The step with DDP's buckets, and with those that `bucket_mb="auto"` chooses."""
    fixed = plan_buckets(training.grads, cap=DDP_MIB * MIB, first_cap=DDP_FIRST_MIB * MIB)
    auto = training.on(network).plan()
    return predicted(training, network, fixed), predicted(training, network, auto)


def link(ranks: int, bandwidth: float, latency: float, shape: str) -> Network:
    """A network on which an all-reduce has the latency of a ring or of a tree."""
    messages = 2 * math.log2(ranks) if shape == "tree" else 2 * (ranks - 1)
    return Network(ranks, bandwidth, latency * messages / (2 * (ranks - 1)))


def large(*, small: bool) -> Training:
    """A GPT of 1.2 GB on a data centre GPU; or one of 13 MiB, for trying this out."""
    size: dict[str, int] = {"vocabulary": 32000, "width": 1024, "layers": 20, "heads": 16, "length": 1024}
    if small:
        size = {"vocabulary": 512, "width": 256, "layers": 4, "heads": 4, "length": 64}
    with torch.device("meta"):
        model = Transformer(**size)
        tokens = torch.zeros(8, size["length"], dtype=torch.int64)
    return training_of(fxddp.explain(model, tokens, device="cuda", world_size=8, bucket_mb=DDP_MIB))


# ---- table and plot ----


@dataclass(frozen=True, slots=True)
class Row:
    """One point of the table."""

    shape: str
    bandwidth: float
    ranks: int
    ddp: Step
    auto: Step


def table(training: Training, rows: Sequence[Row], latency: float) -> Iterator[str]:
    """Lines of Markdown."""
    computing = training.forward + training.backward
    yield (
        f"{training.nbytes / MIB:.0f} MiB of gradients, {units.duration(computing)} of computation a step "
        f"({units.duration(training.backward)} backward), {units.duration(latency)} a message"
    )
    yield ""
    yield "| latency of | bandwidth | ranks | DDP | exposed | fxddp | exposed | buckets | largest | fxddp ÷ DDP |"
    yield "|---|---|" + "---:|" * 8
    for row in rows:
        cells = [row.shape, units.rate(row.bandwidth), f"{row.ranks:,}"]
        for step in (row.ddp, row.auto):
            cells += [units.duration(step.seconds), units.duration(step.exposed)]
        cells += [f"{row.ddp.buckets} → {row.auto.buckets}", units.size(row.auto.largest)]
        cells.append(f"{row.auto.seconds / row.ddp.seconds:.3f}")
        yield f"| {' | '.join(cells)} |"


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def plot(training: Training, rows: Sequence[Row], shape: str) -> str:
    """Step ÷ computation over ranks as SVG: a line for each bandwidth, dashed for DDP."""
    computing = training.forward + training.backward
    rows = [row for row in rows if row.shape == shape]
    ranks = sorted({row.ranks for row in rows})
    most = max(max(row.ddp.seconds, row.auto.seconds) for row in rows) / computing
    width, height, left, top = 640, 360, 60, 30
    across, down = width - left - 130, height - top - 50

    def place(row: Row, step: Step) -> tuple[float, float]:
        x = ranks.index(row.ranks) / max(1, len(ranks) - 1)
        y = math.log(step.seconds / computing) / (math.log(most) or 1.0)
        return left + across * x, top + down * (1 - y)

    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    parts.append(f'<text x="{left}" y="18">step ÷ computation, {shape} (solid: auto, dashed: DDP with 25 MiB)</text>')
    for number, each in enumerate(ranks):
        x = left + across * number / max(1, len(ranks) - 1)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + down}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + down + 18}" text-anchor="middle">{each}</text>')
    parts.append(f'<text x="{left + across / 2}" y="{height - 10}" text-anchor="middle">ranks</text>')
    for share in range(5):
        value, y = most ** (share / 4), top + down * (1 - share / 4)
        parts.append(f'<line x1="{left}" x2="{left + across}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for number, bandwidth in enumerate(dict.fromkeys(row.bandwidth for row in rows)):
        colour, line = COLOURS[number % len(COLOURS)], [row for row in rows if row.bandwidth == bandwidth]
        for dash, steps in (("5 4", [row.ddp for row in line]), ("none", [row.auto for row in line])):
            points = [place(row, step) for row, step in zip(line, steps, strict=True)]
            at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-dasharray="{dash}"/>')
        y = top + 16 * number + 8
        parts.append(f'<text x="{left + across + 10}" y="{y}" fill="{colour}">{units.rate(bandwidth)}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12">\n{body}\n</svg>\n'
    )


# ---- predicted against measured ----


def check_rank(rank: int, world: int, model: str, rounds: int, rendezvous: str) -> dict[str, Any]:
    """One rank of the check: steps with and without communication, in turns, for both ways to cut."""
    join(rank, world, rendezvous)
    answers: dict[str, Any] = {}
    for way in (AUTO, DDP_MIB):
        module, inputs = fresh_models(f"check_{way}").make(model, rank)
        backend = fxddp.backend(bucket_mb=way)
        compiled = torch.compile(module, backend=backend)
        local, synced = [], []
        for turn in range(rounds + 2):  # two to warm up
            with backend.no_sync():
                local.append(_timed(compiled, inputs))
            module.zero_grad()
            synced.append(sum(_timed(compiled, inputs)))
            module.zero_grad()
            if turn == 1:
                local, synced = [], []
        training = training_of(fxddp.explain(compiled))
        forward, backward = (statistics.median(each) for each in zip(*local, strict=True))
        training = replace(training, forward=forward, backward=backward)
        network = fxddp.explain(compiled).network
        assert network is not None
        step = predicted(training, network, planned(training, training.found))
        answers[str(way)] = {
            "predicted": step.seconds,
            "measured": statistics.median(synced),
            "computing": forward + backward,
            "buckets": step.buckets,
            "bandwidth": network.bandwidth,
            "latency": network.latency,
        }
    return answers


def _timed(model: Any, inputs: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Seconds of forward and backward."""
    dist.barrier()
    begin = time.perf_counter()
    loss = model(*inputs)
    middle = time.perf_counter()
    loss.backward()
    return middle - begin, time.perf_counter() - middle


def check(worlds: Sequence[int], model: str, network: Link, rounds: int, timeout: float) -> Iterator[str]:
    """Lines of Markdown: predicted and measured steps on real ranks."""
    yield f"{model}, gloo over {network.kind}, medians of {rounds} steps of the slowest rank"
    yield ""
    yield "| ranks | network | buckets | computation | predicted | measured | predicted ÷ measured |"
    yield "|---:|---|---|---:|---:|---:|---:|"
    for world in worlds:
        ranks = _run(world, model, network, rounds=rounds, timeout=timeout)
        for way in ranks[0]:
            worst = {name: max(rank[way][name] for rank in ranks) for name in ("predicted", "measured", "computing")}
            first = ranks[0][way]
            link_text = f"{units.rate(first['bandwidth'])}, {units.duration(first['latency'])}"
            title = f"{first['buckets']} ({way if way == AUTO else f'{way} MiB'})"
            cells = [str(world), link_text, title]
            cells += [units.duration(worst[name]) for name in ("computing", "predicted", "measured")]
            cells.append(f"{worst['predicted'] / worst['measured']:.2f}")
            yield f"| {' | '.join(cells)} |"


def _run(world: int, model: str, network: Link, *, rounds: int, timeout: float) -> list[Any]:
    processes = []
    scratch = tempfile.TemporaryDirectory(prefix="fxs-")
    folder = Path(scratch.name)
    try:
        for rank in range(world):
            at = rank % 2  # neighbours in the ring live on different sides of the shaped link
            own = {"GLOO_SOCKET_IFNAME": network.interface(at), "OMP_NUM_THREADS": "1"}
            own |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.scaling", "--model", model, "--rounds", str(rounds)]
            command += ["--rank", json.dumps([rank, world, str(folder / "rendezvous")])]
            processes.append(
                subprocess.Popen(
                    [*network.command_prefix(at), *command],
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=Path(__file__).parents[1],
                    env=os.environ | own,
                )
            )
        deadline = time.monotonic() + timeout
        found = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in processes]
        return [json.loads(text.splitlines()[-1]) for text in found]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        scratch.cleanup()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.rank:
        rank, world, rendezvous = json.loads(options.rank)
        print(json.dumps(check_rank(rank, world, options.model, options.rounds, rendezvous)), flush=True)
        os._exit(0)
    if options.check:
        network, fallback = open_network(namespaces=options.namespaces)
        try:
            if fallback is None:
                network.set_rate(options.rate)
            for line in check(options.worlds, options.model, network, options.rounds, options.timeout):
                print(line, flush=True)
        finally:
            network.close()
        print()
    training = large(small=options.small)
    rows = []
    for shape in ("ring", "tree"):
        for bandwidth in options.bandwidths:
            for ranks in options.ranks:
                network_ = link(ranks, bandwidth, options.latency, shape)
                rows.append(Row(shape, bandwidth, ranks, *both(training, network_)))
    print("\n".join(table(training, rows, options.latency)))
    options.plot.write_text(plot(training, rows, "tree"))
    print(f"\nplot: {options.plot}")
    return 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=(__doc__ or "").partition("\n")[0]
    )

    def rates(text: str) -> list[float]:
        return [units.bandwidth(each) for each in text.split(",")]

    def counts(text: str) -> list[int]:
        return list(map(int, text.split(",")))

    usual = "8,16,32,64,128,256,512,1024,2048,4096"
    parser.add_argument("--ranks", type=counts, default=counts(usual), help=f"(default {usual})")
    usual = "10Gbit/s,25Gbit/s,100Gbit/s,400Gbit/s"
    parser.add_argument("--bandwidths", type=rates, default=rates(usual), help=f"of each rank (default {usual})")
    parser.add_argument("--latency", type=units.seconds, default=10e-6, help="of a message (default 10us)")
    parser.add_argument("--plot", type=Path, default=Path("scaling.svg"), help="where the plot goes")
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--check", action="store_true", help="compare with measured steps first")
    parser.add_argument("--worlds", type=counts, default=[2, 3, 4], help="numbers of ranks of the check")
    parser.add_argument("--model", choices=list(MODELS), default="mlp", help="of the check")
    parser.add_argument("--rate", default="1gbit", help="of the check's network, if it can be shaped (default 1gbit)")
    parser.add_argument("--rounds", type=int, default=7, help="steps of the check")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one number of ranks may take")
    parser.add_argument("--no-namespaces", dest="namespaces", action="store_false", help="check on plain loopback")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    bits_per_second(options.rate)
    return options


if __name__ == "__main__":
    sys.exit(main())
