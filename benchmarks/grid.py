"""The full comparison: fxddp with torch's ways to train, each at the best of several bucket sizes, model by rate.

    python -m benchmarks.grid FILE             measures what FILE lacks; started again, it goes on where it was
    python -m benchmarks.grid --report FILE    a line for each model and rate, and which of `JUDGED` pass

Points are measured as by `step_time.py`: the ranks of a model build every mode once, then the rate changes under them.
FILE gets a line of JSON for each point, with every sample, as soon as it is there, and one for each mode that could not
be built: the model then starts over without that mode, and the report says so.

Note [best of]
The best peer, and the best size of fxddp, are those with the least median over the rounds that then make the ratio.
That is selection: of several that are equally fast it takes the one that was lucky, which looks a little faster than
it would in another run. It favours the peers against "auto", of which there is one; where two best ones are compared
it favours both.

Note [judged]
At each point that `JUDGED` names, fxddp has to show that it is not slower: the median of the ratios within the rounds
no higher than 1.00, and the upper end of their 95 % interval no higher than 1.02. What varies too much to tell is
missed. So these points are measured once more, by those alone that were fastest (`contenders`), in more rounds: the
intervals are narrow, and who was only lucky is not so twice. Those are the fastest at any of the model's judged rates,
so one build of them serves all: name all rates at once.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.modes import AUTO, BASELINE, EAGER_BASELINE, FIXED, STOCK, TORCH_BUCKET_MB, BenchmarkError, name_of
from benchmarks.network import UNSHAPED, Network, bits_per_second
from benchmarks.step_time import BuildError, end_on_signals, measure_model, names, note, opened_network
from benchmarks.tables import Interval, markdown_table, median_interval

RATES = (UNSHAPED, "5gbit", "2gbit", "1gbit", "200mbit")
SLOW, SLOWER = ("200mbit",), 4
"""Rates at which steps take long, and how many times fewer rounds are made there."""


def modes_of(sizes: Sequence[float], cut: Sequence[float]) -> tuple[str, ...]:
    """The modes of a model.

    Args:
        sizes: MiB of buckets, of eager DDP and of fxddp.
        cut: of torch.compile(DDP), at least 1 MiB, below which DDPOptimizer raises.
    """
    found = [BASELINE, EAGER_BASELINE, *(f"ddp@{size:g}" for size in sizes)]
    found += [f"{mode}@{TORCH_BUCKET_MB}" for mode in ("ddp_copies", "ddp_static")]
    found += [f"{mode}@{size:g}" for mode in ("ddp_compile", "ddp_uncut") for size in cut]
    return *found, *(f"{FIXED}@{size:g}" for size in sizes), AUTO


@dataclass(frozen=True, slots=True)
class Row:
    """What is measured of a model: its modes, and the rounds: of all points, and of those that are judged."""

    modes: tuple[str, ...]
    rounds: int
    judged_rounds: int

    def rounds_at(self, rate: str, *, judged: bool = False) -> int:
        rounds = self.judged_rounds if judged else self.rounds
        return max(6 if judged else 3, rounds // SLOWER) if rate in SLOW else rounds


# Comes last, for what it leaves behind in its process: Dynamo traces into DDP from then on.
REDUCER = f"ddp_python_reducer@{TORCH_BUCKET_MB}"
MANY_MODES = ("ddp", "ddp_copies", "ddp_static", "ddp_compile", FIXED)
MANY = (BASELINE, EAGER_BASELINE, *(f"{mode}@{TORCH_BUCKET_MB}" for mode in MANY_MODES))
GRID = {
    "transformer": Row((*modes_of((5, 25), (5, 25)), REDUCER), rounds=6, judged_rounds=31),
    "convnet": Row((*modes_of((2, 5, 25), (2, 25)), REDUCER), rounds=9, judged_rounds=41),
    "mlp": Row((*modes_of((5, 25), (5, 25)), REDUCER), rounds=6, judged_rounds=31),
    "tiny": Row((*modes_of((0.1, 25), (25,)), REDUCER), rounds=60, judged_rounds=200),
    "embedding": Row((*modes_of((2, 25), (2, 25)), REDUCER), rounds=6, judged_rounds=31),
    # Without what would compile for minutes at every rate, or trace 10,000 all-reduces.
    "many": Row(MANY, rounds=30, judged_rounds=60),
    "smoke": Row((*modes_of((1, 25), (1,)), REDUCER), rounds=6, judged_rounds=9),
}
USUAL_MODELS = [model for model in GRID if model != "smoke"]
JUDGED = {
    ("transformer", UNSHAPED): "nothing can hide: what fxddp costs by itself",
    ("transformer", "2gbit"): "as much communication as there is backward to hide it",
    ("transformer", "1gbit"): "more communication than can hide: how much of it does",
    ("convnet", UNSHAPED): "buffers to send before each forward",
    ("convnet", "2gbit"): "most bytes are ready first, so that all but the last can hide",
    ("mlp", "2gbit"): "the network decides: the first bucket has to leave early",
    ("mlp", "1gbit"): "the same with twice the communication",
    ("mlp", "200mbit"): "nothing but the network counts, so that nobody should be ahead",
    ("tiny", UNSHAPED): "the cost per parameter and per call",
    ("tiny", "1gbit"): "the same, and the latency of messages",
    ("embedding", "1gbit"): "one gradient larger than any bucket, ready last",
    ("many", UNSHAPED): "the cost per parameter of a step with 10,000",
}
"""Points to judge by, and what each stands for; see Note [judged]."""
HIGHEST_MEDIAN, HIGHEST_END, COVERAGE = 1.00, 1.02, 0.95

Line = Mapping[str, Any]


# ---- the file ----


def read_lines(path: Path) -> list[Line]:
    """The lines of the file, if there is one, without a last one that a killed run left unfinished."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def append(path: Path, line: Line) -> None:
    """Adds a line, in place of one that a killed run left unfinished."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")


def points(lines: Sequence[Line], *, judged: bool = False) -> dict[tuple[str, str], Line]:
    """What was measured, by model and rate; of each the latest. With `judged`, of the points that are judged."""
    return {
        (line["model"], line["rate"]): line for line in lines if "rate" in line and line.get("judged", False) == judged
    }


def failures(lines: Sequence[Line]) -> dict[tuple[str, str], str]:
    """Why modes could not be built, by model and mode."""
    return {(line["model"], line["failed"]): line["error"] for line in lines if "failed" in line}


def missing_rates(
    model: str, asked: Sequence[str], rates: Sequence[str], lines: Sequence[Line], *, judged: bool
) -> list[str]:
    """At which of these rates the model was not measured in the modes that are asked for now."""
    there = points(lines, judged=judged)
    return [rate for rate in rates if (model, rate) not in there or there[model, rate]["asked"] != list(asked)]


def judged_rates(model: str, lines: Sequence[Line]) -> list[str]:
    """At which rates the model is judged, of those that were measured."""
    return [rate for of, rate in JUDGED if of == model and (of, rate) in points(lines)]


def contenders(model: str, lines: Sequence[Line]) -> tuple[str, ...]:
    """Who is judged: at each rate the two of torch's ways that were fastest and fxddp's best size; and "auto"."""
    found = {BASELINE, EAGER_BASELINE, AUTO}
    for rate in judged_rates(model, lines):
        point = points(lines)[model, rate]
        found |= {*ranking(point, STOCK)[:2], *ranking(point, [FIXED])[:1]}
    return tuple(mode for mode in GRID[model].modes if mode in found)


# ---- measuring ----


def code_digest() -> str:
    """Changes with fxddp and with these benchmarks: one file tells of one version, and of failures of that alone."""
    from fxddp.compiler import source_digest

    digest = hashlib.sha256(source_digest().encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def measure(
    model: str,
    asked: Sequence[str],
    rates: Mapping[str, int],
    network: Network,
    scratch: Path,
    *,
    failed: Collection[str],
    options: argparse.Namespace,
) -> Iterator[Line]:
    """Lines of a model: one for each rate, and before it one for each mode, beside the `failed` ones, that fails.

    Args:
        model: of `GRID`.
        asked: the modes.
        rates: and the rounds at each.
        network: whose rate is changed.
        scratch: a folder, where what is compiled once is found again.
        failed: modes that are known not to work.
        options: of the command.
    """
    failed, left = set(failed), dict(rates)
    while left:
        modes = [mode for mode in asked if mode not in failed]
        folder = scratch / f"{model}-{len(list(scratch.iterdir()))}"
        try:
            for result in measure_model(model, network, folder, modes=modes, rates=dict(left), options=options):
                del left[result["rate"]]
                yield {**result, "asked": list(asked)}
        except BuildError as error:
            if error.mode == BASELINE:
                raise
            note(f"{model}: goes on without {error.mode}: {error}")
            failed.add(error.mode)
            yield {"model": model, "failed": error.mode, "error": str(error)}


def run(options: argparse.Namespace) -> int:
    """Adds to the file what it lacks, then prints the report."""
    with opened_network(options.rates, namespaces=options.namespaces) as (network, rates):
        conditions = {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "cores": os.cpu_count(),
            "network": network.kind,
            "rounds": options.rounds,
            "code": code_digest(),
        }
        lines = read_lines(options.file)
        for line in lines:
            if line["conditions"] != conditions:
                raise SystemExit(
                    f"{options.file} was begun with {line['conditions']}, now it would be {conditions}: "
                    "name another file, or go on as it was begun"
                )

        def add(model: str, rates: Sequence[str], *, judged: bool) -> None:
            """Adds the points of a model that the file lacks, of all or of those that are judged."""
            lines = read_lines(options.file)
            asked = contenders(model, lines) if judged else GRID[model].modes
            rates = [rate for rate in rates if not judged or rate in judged_rates(model, lines)]
            missing = missing_rates(model, asked, rates, lines, judged=judged)
            rounds = {rate: options.rounds or GRID[model].rounds_at(rate, judged=judged) for rate in missing}
            failed = [mode for of, mode in failures(lines) if of == model]
            for line in measure(model, asked, rounds, network, Path(scratch), failed=failed, options=options):
                append(options.file, {"conditions": conditions, **line, "judged": judged})

        complete = True
        with tempfile.TemporaryDirectory(prefix="fxb-") as scratch:
            for model, judged in itertools.product(options.models, (False, True)):
                try:
                    add(model, rates, judged=judged)
                except BenchmarkError as error:
                    complete = False
                    note(f"{model}: FAILED: {error}")
        print("\n".join(report(read_lines(options.file))))
        return int(not complete)


# ---- the report ----

COLUMNS = (
    "point",
    "local",
    "eager",
    "best peer",
    '"auto"',
    "best size",
    '"auto" ÷ peer',
    "size ÷ peer",
    '"auto" ÷ size',
    "exposed",
    "÷ limit",
    "core busy",
)
DASH = "–"


def ranking(point: Line, among: Collection[str]) -> list[str]:
    """The modes with these names, that with the least median first; see Note [best of]."""
    there = [mode for mode in point["modes"] if name_of(mode) in among]
    return sorted(there, key=lambda mode: point["modes"][mode]["median_ms"])


def fastest(point: Line, among: Collection[str]) -> str | None:
    """The first of the `ranking`."""
    return next(iter(ranking(point, among)), None)


def ratio(point: Line, mode: str | None, other: str | None) -> Interval | None:
    """One mode to another within the rounds; None where the point lacks one."""
    if mode not in point["modes"] or other not in point["modes"]:
        return None
    pairs = zip(point["modes"][mode]["samples_ms"], point["modes"][other]["samples_ms"], strict=True)
    return median_interval([mine / its for mine, its in pairs], COVERAGE)


def passes(found: Interval) -> bool:
    """See Note [judged]."""
    return found.coverage >= COVERAGE and found.median <= HIGHEST_MEDIAN and found.high <= HIGHEST_END


def against_peer(point: Line) -> tuple[Interval | None, Interval | None]:
    """The ratios to the best peer: of "auto", and of fxddp's best size."""
    peer = fastest(point, STOCK)
    return ratio(point, AUTO, peer), ratio(point, fastest(point, [FIXED]), peer)


def cells(point: Line) -> tuple[str, ...]:
    """The cells of a point, as `COLUMNS` names them. Exposed share, limit and busy core are those of "auto"."""
    modes, size = point["modes"], fastest(point, [FIXED])

    def figure(mode: str | None, form: str, field: str = "median_ms") -> str:
        found = modes.get(mode, {}).get(field)  # files of older versions have fewer
        return DASH if found is None else form.format(found, mode)

    ratios = (*against_peer(point), ratio(point, AUTO, size))
    return (
        name_of_point(point["model"], point["rate"]),
        figure(BASELINE, "{:.1f}"),
        figure(EAGER_BASELINE, "{:.1f}"),
        figure(fastest(point, STOCK), "{1} {0:.1f}"),
        figure(AUTO, "{:.1f}"),
        figure(size, "{1} {0:.1f}"),
        *(DASH if found is None else str(found) for found in ratios),
        figure(AUTO, "{:.0%}", "exposed"),
        figure(AUTO, "{:.3f}", "vs_limit"),
        figure(AUTO, "{:.0%}", "busy"),
    )


def verdicts(point: Line) -> str:
    """Whether "auto" and the best size pass."""
    return " / ".join(
        DASH if found is None else "passed" if passes(found) else "missed" for found in against_peer(point)
    )


def name_of_point(model: str, rate: str) -> str:
    return f"{model}, {'unshaped' if rate == UNSHAPED else rate}"


def report(lines: Sequence[Line]) -> Iterator[str]:
    """Lines of Markdown: all points, the modes that could not be built, the judged points, and how many pass."""
    found, judged = ({at: p for at, p in points(lines, judged=kind).items() if at[0] in GRID} for kind in (False, True))
    if not found:
        yield "nothing was measured"
        return
    conditions = next(iter(found.values()))["conditions"]
    yield ", ".join(f"{name} {value}" for name, value in conditions.items() if value is not None)
    every = [*found.values(), *judged.values()]
    for when in ("before", "after"):
        loads = [point[f"load_{when}"][0] for point in every]
        yield f"load average {when} a point: {min(loads):.1f} to {max(loads):.1f}"
    yield f"lowest share of its core that the local step had: {min(point['lowest_core_share'] for point in every):.2f}"
    yield ""
    yield from markdown_table([COLUMNS, *(cells(found[at]) for at in in_order(found))])
    yield ""
    for (model, mode), error in failures(lines).items():
        yield f"{model} without {mode}, which failed: {error.strip().splitlines()[-1]}"
    if judged:
        yield "those that are judged, once more, in more rounds:"
        yield ""
        rows = ((*cells(judged[at]), verdicts(judged[at])) for at in in_order(judged))
        yield from markdown_table([(*COLUMNS, "judged"), *rows])
        yield ""
    for place, (what, kind) in enumerate((('"auto"', AUTO), ("the best size", FIXED))):
        asked = [point for point in judged.values() if kind in map(name_of, point["asked"])]
        passed = sum(ratio is not None and passes(ratio) for point in asked for ratio in [against_peer(point)[place]])
        yield f"{what}: {passed} of {len(asked)} judged points passed"
    if absent := [name_of_point(*at) for at in JUDGED if at not in judged]:
        yield f"not judged yet: {'; '.join(absent)}"


def in_order(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """By model, the fastest network first."""
    return sorted(found, key=lambda at: (list(GRID).index(at[0]), -(bits_per_second(at[1]) or float("inf"))))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def check_model(model: str) -> None:
        if model not in GRID:
            raise ValueError(f"got model {model!r}, expected one of {', '.join(GRID)}")

    parser = argparse.ArgumentParser(prog="python -m benchmarks.grid", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="lines of JSON: a point each, which is not measured again")
    parser.add_argument("--report", action="store_true", help="print what the file says, and measure nothing")
    parser.add_argument("--models", type=names(check_model), default=USUAL_MODELS, help=f"of {', '.join(GRID)}")
    parser.add_argument("--rates", type=names(bits_per_second), default=RATES, help=f"(default {','.join(RATES)})")
    parser.add_argument("--rounds", type=int, help="at every point, in place of what `GRID` says")
    parser.add_argument("--no-namespaces", dest="namespaces", action="store_false", help="plain loopback, unshaped")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds a build or a measurement may take")
    # What step_time asks for and the grid does not vary.
    parser.set_defaults(bucket_mb=TORCH_BUCKET_MB, ranks=2, streak=1, optimizer=False, comm_hook=None, ideal=False)
    options = parser.parse_args(arguments)
    for name in ("rounds", "timeout"):
        if (value := getattr(options, name)) is not None and value <= 0:
            parser.error(f"--{name} must be > 0, got {value}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.report:
        print("\n".join(report(read_lines(options.file))))
        return 0
    end_on_signals()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
