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

Note [sweep]
`bucket_mb="auto"` and `overlap="next_forward"` are planned for the network they find when they are built, so these are
built again at every rate, on a new process group. "auto" is compared in turns with the fixed sizes `fxddp_0.5mib` …
`fxddp_64mib`.

Note [turns]
A round steps every mode once, then all-reduces the same bytes alone: A B C comm, A B C comm, … A machine that drifts
hits all alike, and ratios are taken within a round, before the median. A step lasts as long as on its slower rank.

Note [streaks]
What a step leaves to the next one shows only in several steps in a row. With `--streak 5` a mode's turn is one step
that is not timed, then five whose mean counts. What the last of them leaves under way is waited for outside of the
time; the first of them waits for what the one before it left.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import MODELS
from benchmarks.modes import (
    COMM_HOOKS,
    IN_BACKWARD,
    MEASURING,
    MODES,
    NEXT_FORWARD,
    NODES,
    USUAL_MODES,
    BenchmarkError,
)
from benchmarks.network import BURST_BYTES, UNSHAPED, Network, bits_per_second, open_network
from benchmarks.ranks import Ranks
from benchmarks.tables import render, summarise

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda received, _: sys.exit(128 + received))
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
