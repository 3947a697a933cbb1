"""Step time of data-parallel modes, side by side in one run, on networks of several rates.

    python -m benchmarks.step_time --models transformer,convnet,mlp,tiny --rates none,2gbit,1gbit --rounds 15
    python -m benchmarks.step_time --models mlp --rates none,1gbit --modes local,fxddp_auto,fxddp@1,fxddp@8

The driver opens the network (`network.py`) and, for each model, starts two ranks on a core each. The ranks build and
check every mode once, then time it at every rate: the driver changes the rate under the living ranks, so one
compilation serves all rates.

    driver ──pipe: build mode / measure──► rank 0 ═══ shaped network ═══ rank 1 ◄──pipe── driver
           ◄──────── samples ────────────         (rendezvous by file)

Commands and results travel through pipes and the rendezvous through a file: nothing but the modes' own traffic, and one
barrier before each step, touches the shaped network.

Note [sweep]
`bucket_mb="auto"` and `overlap="next_forward"` are planned for the network they find when they are built, so these are
built again at every rate, on a new process group. "auto" is compared in turns with the fixed sizes asked for, such as
`fxddp@0.5` and `fxddp@64`.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    check_mode,
    name_of,
)
from benchmarks.network import BURST_BYTES, UNSHAPED, Network, bits_per_second, open_network
from benchmarks.ranks import Ranks
from benchmarks.tables import render, summarise

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def settle_seconds(rate: str) -> float:
    """How long the token bucket takes to fill up again, twice: no step starts on what the one before it left over."""
    bits = bits_per_second(rate)
    return 0.0 if bits is None else 2 * BURST_BYTES * 8 / bits


class BuildError(BenchmarkError):
    """A mode could not be built, or computes wrong gradients; `mode` says which."""

    def __init__(self, mode: str, message: str) -> None:
        super().__init__(message)
        self.mode = mode


def measure_model(
    model: str,
    network: Network,
    scratch: Path,
    *,
    modes: Sequence[str],
    rates: Mapping[str, int],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Builds and checks the modes once, then yields a result per rate.

    Args:
        model: of `MODELS`.
        network: between the ranks.
        scratch: a folder to make; beside it lie the compile caches of this run.
        modes: in the order in which they are built and take turns.
        rates: with the number of rounds at each.
        options: of the command.

    Raises:
        BuildError: a mode could not be built.
        BenchmarkError: ranks could not be started, or a measurement failed.
    """
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
                try:
                    answers = ranks.ask("build", mode=mode)
                except BenchmarkError as error:
                    raise BuildError(mode, str(error)) from error
                built[mode] = answers[0] | {"difference": max(a["difference"] for a in answers)}
                note(f"{model}: {mode} built and checked in {built[mode]['warm_up_s']:.1f} s")

        build_all([mode for mode in modes if name_of(mode) not in MEASURING])
        for rate, rounds in rates.items():
            network.set_rate(rate)
            build_all([mode for mode in modes if name_of(mode) in MEASURING])
            load = os.getloadavg()
            note(f"{model}: measuring at rate {rate}")
            settle_s = settle_seconds(rate)
            measured = ranks.ask(
                "measure", rounds=rounds, settle_s=settle_s, streak=options.streak, ideal=options.ideal
            )
            result = {"model": model, "rate": rate, **facts, "load_before": load, "load_after": os.getloadavg()}
            result |= summarise(measured, nbytes=facts["bytes"])
            for mode, row in result["modes"].items():
                row["built"] = dict(built[mode])
            yield result


@contextmanager
def opened_network(rates: Sequence[str], *, namespaces: bool) -> Iterator[tuple[Network, list[str]]]:
    """The network between the ranks, and which of the rates it can have; closed in the end, whatever signals come."""
    network, fallback = open_network(namespaces=namespaces)
    try:
        if fallback is not None:
            skipped = [rate for rate in rates if rate != UNSHAPED]
            note(
                f"plain loopback instead of a shaped network: {fallback}"
                + (f"; not measured: {skipped}" if skipped else "")
            )
            rates = [UNSHAPED]
        yield network, list(rates)
    finally:
        for number in ENDING_SIGNALS:  # a second Ctrl-C must not leave namespaces behind
            signal.signal(number, signal.SIG_IGN)
        network.close()


def run(options: argparse.Namespace) -> int:
    """Measures what was asked for and prints it as it comes; the JSON file holds all tables printed so far."""
    with opened_network(options.rates, namespaces=options.namespaces) as (network, possible):
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
                    rates = dict.fromkeys(possible, options.rounds)
                    for result in measure_model(
                        model, network, Path(scratch) / model, modes=options.modes, rates=rates, options=options
                    ):
                        report["results"].append(result)
                        report["load_after"] = os.getloadavg()
                        print(render(result, markdown=options.markdown), flush=True)
                        if options.json is not None:
                            options.json.write_text(json.dumps(report, indent=1) + "\n")
                except BenchmarkError as error:
                    failed = True
                    note(f"{model}: FAILED: {error}")
        if options.rounds < 6:
            print("Intervals are minimum and maximum: fewer than 6 rounds give no 95 % interval.")
        print(f"load after {_load(os.getloadavg())}")
        return int(failed)


def note(text: str) -> None:
    """Tells people who watch, apart from the results."""
    print(f"# {text}", file=sys.stderr, flush=True)


def end_on_signals() -> None:
    """Has a signal that ends the program run its `finally` blocks."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda received, _: sys.exit(128 + received))


def _load(load: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in load)


def names(check: Callable[[str], Any]) -> Callable[[str], list[str]]:
    """Parses a list of different names; `check` raises ValueError for a wrong one."""

    def parse(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",")]
        try:
            for name in found:
                check(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected different ones")
        return found

    return parse


def check_model(model: str) -> None:
    """ValueError for what is no model."""
    if model not in MODELS:
        raise ValueError(f"got model {model!r}, expected one of {', '.join(MODELS)}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time", description=(__doc__ or "").partition("\n")[0]
    )
    models = [name for name in MODELS if name != "smoke"]
    parser.add_argument("--models", type=names(check_model), default=models, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", type=names(check_mode), default=list(USUAL_MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument(
        "--rates", type=names(bits_per_second), default=[UNSHAPED, "2gbit", "1gbit"], help="none, 2gbit, 500mbit, …"
    )
    parser.add_argument("--bucket-mb", type=float, default=5.0, help="MiB of a bucket, in modes without @ (default 5)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of every mode per rate (default 15)")
    parser.add_argument("--streak", type=int, default=1, help="steps in a row that are timed together (default 1)")
    parser.add_argument("--ranks", type=int, default=2, help="processes, half of them on each of two nodes (default 2)")
    parser.add_argument("--comm-hook", choices=list(COMM_HOOKS), help="compress; DDP does with fp16 and powersgd")
    parser.add_argument("--optimizer", action="store_true", help="include an SGD step in the timed step")
    parser.add_argument("--no-namespaces", dest="namespaces", action="store_false", help="plain loopback, unshaped")
    parser.add_argument("--no-ideal", dest="ideal", action="store_false", help="do not measure what ÷ ideal needs")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a build or a measurement may take")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    options = parser.parse_args(arguments)
    for name in ("rounds", "bucket_mb", "timeout", "streak"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be > 0, got {getattr(options, name)}")
    asked = [name_of(mode) for mode in options.modes]
    if NEXT_FORWARD in asked and options.streak < 2:
        parser.error(f"{NEXT_FORWARD} leaves communication to the next step: give --streak, to time several in a row")
    if options.ranks < NODES or options.ranks % NODES:
        parser.error(f"--ranks must be a multiple of {NODES}, the number of nodes, got {options.ranks}")
    if not options.optimizer and (early := [mode for mode in IN_BACKWARD if mode in asked]):
        parser.error(f"{early[0]} makes a step in its backward: give --optimizer, so that the others make one too")
    return options


def main() -> int:
    options = parse_arguments()
    end_on_signals()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
