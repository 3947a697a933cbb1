"""From samples to figures and tables."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

from benchmarks.ideal import list_schedule
from benchmarks.modes import AUTO, BASELINE, FIXED, MIB, NEXT_FORWARD, RIVAL, name_of, title
from benchmarks.network import UNSHAPED


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and an interval that covers the true one with probability `coverage`, whatever the distribution."""

    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median between the narrowest symmetric pair of order statistics that reaches `confidence`.

    The pair cut off by k values on each side covers the median with probability 1 - 2 P(Binomial(n, 1/2) <= k). Below
    six values not even the extremes reach 95 %: they are returned, with the coverage they have.
    """
    ordered, count = sorted(values), len(values)

    def coverage(cut: int) -> float:
        return 1 - 2 * sum(comb(count, i) for i in range(cut + 1)) / 2**count

    cut = max((k for k in range((count + 1) // 2) if coverage(k) >= confidence), default=0)
    return Interval(statistics.median(ordered), ordered[cut], ordered[-1 - cut], max(0.0, coverage(cut)))


def summarise(measured: Sequence[Any], *, nbytes: int) -> dict[str, Any]:
    """One model at one rate: what the ranks sampled, made into the figures of a table. Times in milliseconds."""

    def slower(mode: str, field: str) -> list[float]:
        return [1e3 * max(pair) for pair in zip(*([s[field] for s in m["modes"][mode]] for m in measured), strict=True)]

    steps = {mode: slower(mode, "step") for mode in measured[0]["modes"]}
    alone = zip(*(m["comm"] for m in measured), strict=True)
    communication, sending = zip(
        *([1e3 * max(each) for each in zip(*ranks, strict=True)] for ranks in alone), strict=True
    )
    comm = statistics.median(communication)
    result: dict[str, Any] = {"comm_ms": comm, "comm_gbit": nbytes * 8 / (comm * 1e6)}
    result["comm_cpu_ms"] = statistics.median(sending)
    if BASELINE in steps:
        step, forward, backward = (
            statistics.median(slower(BASELINE, field)) for field in ("step", "forward", "backward")
        )
        rest = max(0.0, step - forward - backward)
        cpu = min(s["cpu"] / s["step"] for m in measured for s in m["modes"][BASELINE])
        result |= {"forward_ms": forward, "backward_ms": backward, "limit_ms": forward + max(backward, comm) + rest}
        result["limits_ms"] = [forward + max(backward + rest, comm), max(forward + backward + rest, comm)]
        result |= {"lowest_core_share": cpu, "local_cpu_ms": statistics.median(slower(BASELINE, "cpu"))}
    modes: dict[str, dict[str, Any]] = {}
    for mode, times in steps.items():
        row: dict[str, Any] = {"median_ms": statistics.median(times), "min_ms": min(times)}
        for other in (BASELINE, RIVAL):
            if other in steps:
                pairs = zip(times, steps[other], strict=True)
                row[f"vs_{other}"] = asdict(median_interval([t / o for t, o in pairs]))
        if BASELINE in steps:
            rounds = zip(times, steps[BASELINE], communication, strict=True)
            row["exposed"] = statistics.median((t - local) / alone for t, local, alone in rounds)
            row["vs_limit"] = row["median_ms"] / result["limit_ms"]
            if mode in measured[0].get("ideal", ()):
                row["ideal_ms"] = result["forward_ms"] + _ideal([m["ideal"][mode] for m in measured])
        busy = zip(slower(mode, "cpu"), times, strict=True)
        row["busy"] = statistics.median(cpu / step for cpu, step in busy)
        modes[mode] = row | {"samples_ms": times}
    if AUTO in steps:
        fixed = [mode for mode in steps if name_of(mode) == FIXED]
        ratios = {
            mode: median_interval([a / f for a, f in zip(steps[AUTO], steps[mode], strict=True)]) for mode in fixed
        }
        result["auto"] = {mode: asdict(interval) for mode, interval in ratios.items()}
    return result | {"modes": modes, "comm_samples_ms": communication}


def _ideal(measured: Sequence[Any]) -> float:
    """Milliseconds of an ideal backward, in which each piece and each bucket takes as long as on the slower rank."""

    def slowest(part: str) -> list[float]:
        return [max(ranks) for ranks in zip(*(m[part] for m in measured), strict=True)]

    return 1e3 * list_schedule(slowest("ready"), slowest("sending"), max(m["computed"] for m in measured))


COLUMNS = ("mode", "step ms", "÷ local", "÷ torch.compile(DDP)", "exposed", "÷ limit", "÷ ideal", "core busy")


def table_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of one result's table, a row per mode, as `COLUMNS` names them."""

    def ratio(row: dict[str, Any], other: str) -> str:
        return str(Interval(**row[f"vs_{other}"])) if f"vs_{other}" in row else "–"

    return [
        (
            title(mode),
            f"{row['median_ms']:.1f}",
            ratio(row, BASELINE) if mode != BASELINE else "1",
            ratio(row, RIVAL) if mode != RIVAL else "1",
            f"{100 * row['exposed']:.1f} %" if "exposed" in row and mode != BASELINE else "–",
            f"{row['vs_limit']:.3f}" if "vs_limit" in row and mode != BASELINE else "–",
            f"{row['median_ms'] / row['ideal_ms']:.3f}" if "ideal_ms" in row else "–",
            f"{row['busy']:.0%}",
        )
        for mode, row in result["modes"].items()
    ]


def render(result: dict[str, Any], *, markdown: bool) -> str:
    """A heading, a line of what holds for the whole table, and the table, as text or as Markdown."""
    rows = [COLUMNS, *table_rows(result)]
    rate = "unshaped" if result["rate"] == UNSHAPED else result["rate"]
    heading = f"{result['model']}, {result['bytes'] / MIB:.1f} MiB in {result['parameters']} parameters, {rate}"
    facts = f"communication alone {result['comm_ms']:.1f} ms ({result['comm_gbit']:.2f} Gbit/s)"
    if "limit_ms" in result:
        facts += f"; forward {result['forward_ms']:.1f} ms, backward {result['backward_ms']:.1f} ms"
        facts += f"; limit {result['limit_ms']:.1f} ms; computing takes {result['local_cpu_ms']:.1f} ms of a core"
        facts += f" and sending {result['comm_cpu_ms']:.1f} ms"
        for mode in [mode for mode in result["modes"] if name_of(mode) == NEXT_FORWARD]:
            first, second = result["limits_ms"]
            reached = (first - result["modes"][mode]["median_ms"]) / max(first - second, 1e-9)
            facts += f"; forward + max(rest, communication) {first:.1f} ms, max(all computation, communication) "
            facts += f"{second:.1f} ms, of that way {100 * reached:.0f} %"
        facts += f"; lowest core share {result['lowest_core_share']:.2f}"
    facts += _auto(result)
    if not markdown:
        return "\n".join([f"== {heading}", f"   {facts}", *("   " + "  ".join(row) for row in aligned(rows)), ""])
    return "\n".join([f"### {heading}", "", f"{facts[0].upper()}{facts[1:]}.", "", *markdown_table(rows), ""])


def aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Cells as wide as their columns, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is its head."""
    cells = aligned(rows)
    rule = "|".join("-" * (len(cell) + 1) + ":" if i else "-" * (len(cell) + 2) for i, cell in enumerate(cells[0]))
    head, *rest = [f"| {' | '.join(row)} |" for row in cells]
    return [head, f"|{rule}|", *rest]


def _auto(result: dict[str, Any]) -> str:
    """What `bucket_mb="auto"` measured and chose, and how it does against the best of the fixed sizes."""
    if not result.get("auto"):
        return ""
    best = min((mode for mode in result["auto"]), key=lambda mode: result["modes"][mode]["median_ms"])
    found = f'; "auto" ÷ {title(best)} {Interval(**result["auto"][best])}'
    built = result["modes"][AUTO].get("built", {})
    if "speeds" in built:
        network, machine = built["speeds"]["network"], built["speeds"]["machine"]
        sizes = " ".join(f"{nbytes / MIB:.2g}" for nbytes in built["buckets"])
        found += (
            f"; it measured {network['bandwidth'] * 8e-9:.2g} Gbit/s, {network['latency'] * 1e6:.0f} µs a message, "
        )
        found += f"{machine['flops'] * 1e-9:.0f} GFLOP/s, {machine['memory'] * 1e-9:.0f} GB/s; buckets of {sizes} MiB"
    return found
