"""The report for a terminal."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from fxddp.config import AUTO

from .report import Bucket, Explanation, Graph, Parameter
from .units import duration, number, rate, size

ROWS = 24
NAMES = 6
PLAIN = "all-reduce"
"""The route that need not be told."""


def text(found: Explanation, width: int | None = None) -> str:
    """All of a report that fits; lines are at most `width` characters, by default the terminal's width."""
    if width is None:
        width = min(max(shutil.get_terminal_size((120, 40)).columns, 80), 160)
    lines = [line for sentence in _head(found) for line in _wrapped(sentence, width, "", "  ")]
    for graph in found.graphs:
        lines += ["", *graph_lines(graph)]
    lines += _parameters(found)
    if found.sizes:
        lines += ["", *_sizes(found)]
    if found.advice:
        lines += ["", "advice"]
        lines += [line for sentence in found.advice for line in _wrapped(sentence, width, "  · ", "    ")]
    if found.notes:
        lines += [""]
        lines += [line for note in found.notes for line in _wrapped(note, width, "note: ", "      ")]
    return "\n".join(_cut(line.rstrip(), width) for line in lines)


def _head(found: Explanation) -> Iterator[str]:
    settings = found.settings
    ranks = f" on {found.world_size} rank{'s' * (found.world_size != 1)}" if found.world_size else ""
    graphs = f"{len(found.graphs)} graph{'s' * (len(found.graphs) != 1)} with a backward"
    yield f"{found.model}{ranks}: {graphs}, {len(found.buckets)} buckets, {size(found.nbytes)} of gradients"
    yield (
        f"{_buckets(found)}, inner={settings['inner']}, {'split' if settings['split'] else 'unsplit'}, {found.device}"
    )
    yield from _travel(found)
    if found.network is None:
        yield "no number of ranks is known: give world_size to see what is sent"
        yield f"step: {duration(found.computing)} of computation"
        return
    network = found.network
    what = "gradients" if settings["codec"] is None else "compressed gradients"
    yield (
        f"each rank sends at least {size(network.sent(found.wire_bytes))} a step (2(N-1)/N of the {what}, by a ring "
        f"all-reduce)"
    )
    memory = f"{found.machine.memory / 1e9:.4g} GB/s of memory{_assumed(found, 'machine')}"
    given = [
        f"{rate(network.bandwidth)} and {duration(network.latency)} a message{_assumed(found, 'network')}",
        f"{found.machine.flops / 1e12:.3g} TFLOP/s and {memory}",
    ]
    yield f"with {'; '.join(given)}:"
    hidden = "" if found.overlap is None else f"; {found.overlap:.0%} of the sending is hidden"
    yield (
        f"step: {duration(found.seconds)} = {duration(found.computing)} of computation + {duration(found.exposed)} of "
        f"exposed sending{hidden}"
    )


def _buckets(found: Explanation) -> str:
    settings = found.settings
    if settings["bucket_mb"] != AUTO:
        return f"buckets of {settings['bucket_mb']:g} MiB (the first of {settings['first_bucket_mb']:g} MiB)"
    sizes = sorted(bucket.nbytes for bucket in found.buckets) or [0]
    return f'buckets of {size(sizes[0])} to {size(sizes[-1])}, chosen by bucket_mb="auto"'


def _travel(found: Explanation) -> Iterator[str]:
    """What becomes of buckets, where that is more than an all-reduce of the gradients."""
    settings = found.settings
    if settings["codec"] is not None:
        yield f"compressed by {settings['codec']} to {size(found.wire_bytes)}"
    parts = []
    if settings["algorithm"] != "all_reduce":
        mesh = settings["device_mesh"]
        parts.append(f"algorithm={settings['algorithm']}" + (f" on {mesh[0]} nodes of {mesh[1]} ranks" if mesh else ""))
    if settings["process_groups"] > 1:
        parts.append(f"{settings['process_groups']} process groups in turns")
    if settings["comm_hook"] is not None:
        parts.append(f"comm_hook={settings['comm_hook']}")
    if settings["optimizer"] is not None:
        parts.append(f"parameters updated by {settings['optimizer']} when their bucket has arrived")
    if parts:
        yield ", ".join(parts)


def _assumed(found: Explanation, what: str) -> str:
    return (
        f" ({'assumed' if what in found.assumed else 'measured'})" if what in (*found.assumed, *found.measured) else ""
    )


def graph_lines(graph: Graph) -> Iterator[str]:
    """One graph's table."""
    measured = ", measured" if any(piece.measured is not None for piece in graph.pieces) else ""
    yield (
        f"graph {graph.index}: forward {duration(graph.forward_seconds)}, backward {duration(graph.seconds)} in "
        f"{len(graph.pieces)} pieces of {graph.nodes} nodes{measured}"
    )
    if not graph.buckets:
        yield "  no gradients of parameters"
        return
    recorded = any(bucket.measured is not None for bucket in graph.buckets)
    head = ["bucket", "bytes", "dtype", "after", "ready", "sent in", "exposed"] + ["measured"] * recorded
    rows = [[*head, "parameters"]]
    below: list[list[str]] = [[]]
    for bucket in _some(graph.buckets):
        if bucket is None:
            rows.append([])
            below.append([])
            continue
        row = [
            str(bucket.index),
            size(bucket.nbytes),
            bucket.dtype,
            f"piece {bucket.piece}",
            f"{bucket.last.before:.0%}",
            duration(bucket.predicted),
            duration(bucket.exposed),
        ]
        rows.append([*row, *[duration(bucket.measured)] * recorded, names(bucket.names, 3)])
        below.append([_waits(bucket)] + [f"travels by {bucket.route}"] * (bucket.route != PLAIN))
    widths = [max(len(row[i]) for row in rows if row) for i in range(len(head))]
    for row, under in zip(rows, below, strict=True):
        if not row:
            yield f"  {'…':>{widths[0]}}  ({len(graph.buckets) - ROWS} more)"
            continue
        cells = [f"{cell:>{width}}" for cell, width in zip(row[:-1], widths, strict=True)]
        yield "  " + "  ".join([*cells, row[-1]])
        for line in under:
            yield " " * (4 + widths[0]) + line
    if graph.unused:
        yield f"  no gradient in this graph: {names(graph.unused, NAMES)}"


def _some(buckets: Sequence[Bucket]) -> list[Bucket | None]:
    if len(buckets) <= ROWS:
        return list(buckets)
    return [*buckets[: ROWS // 2], None, *buckets[-ROWS // 2 :]]


def _waits(bucket: Bucket) -> str:
    last = bucket.last
    where = f"node {last.ready}, {last.node}" if last.source is None else str(last.source)
    return f"waits for {last.name}  ◂ {where}"


def _parameters(found: Explanation) -> Iterator[str]:
    titles = {
        "eager": "outside of the graphs",
        "left out": "without a gradient that can be packed",
        "unknown": "in no graph so far",
        "unused": "not used by this forward",
        "frozen": "frozen",
    }
    for state, title in titles.items():
        members = [parameter for parameter in found.parameters if parameter.state == state]
        if not members:
            continue
        yield ""
        total = size(sum(parameter.nbytes for parameter in members))
        yield f"{title}: {len(members)} parameters, {total}"
        for (reason, source), same in groupby(members, key=lambda p: (p.reason, p.source)):
            yield f"  {names([parameter.name for parameter in same], NAMES)}"
            if state not in ("frozen", "unused"):
                yield f"    {reason}"
            if source is not None:
                yield f"    {source}"
    if found.tied:
        yield ""
        yield "tied: " + "; ".join(
            f"{name} = {' = '.join(others)}" for name, others in list(found.tied.items())[:NAMES]
        )
    loose = [each for each in found.breaks if not _blamed(each.source, found.parameters)]
    for each in loose[:NAMES]:
        yield ""
        yield f"graph break: {each.reason}"
        if each.source is not None:
            yield f"  {each.source}"


def _blamed(source: object, parameters: Iterable[Parameter]) -> bool:
    return any(parameter.source is not None and parameter.source == source for parameter in parameters)


def _sizes(found: Explanation) -> Iterator[str]:
    yield "bucket_mb and the sending it would expose:"
    now = found.settings["bucket_mb"]
    cells = [
        f"{'▸' * (each.bucket_mb == now)}{number(each.bucket_mb)}: {duration(each.exposed)} ({each.buckets})"
        for each in found.sizes
    ]
    for start in range(0, len(cells), 5):
        yield "  " + "   ".join(f"{cell:<20}" for cell in cells[start : start + 5])


def names(all_names: Iterable[str], limit: int) -> str:
    """The first of these, and how many there are."""
    found = list(all_names)
    return ", ".join(found[:limit]) + (f", … ({len(found)} in all)" if len(found) > limit else "")


def _wrapped(sentence: str, width: int, first: str, other: str) -> Iterator[str]:
    line = first
    for word in sentence.split():
        if len(line) + len(word) > width and line.strip():
            yield line
            line = other
        line += word + " "
    yield line


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
