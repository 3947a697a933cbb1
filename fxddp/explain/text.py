"""The report for a terminal."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from fxddp.config import AUTO
from fxddp.units import count, duration, figures, mib, rate, share, size

from .parts import Bucket, Graph, Parameter
from .report import ASSUMED, GIVEN, MEASURED, Explanation

ROWS = 24
NAMES = 6
BESIDE = 30
"""Characters that names need beside a bucket's figures; they have a line of their own where there are fewer."""

PLAIN = "all-reduce"
"""The route that need not be told."""


def text(found: Explanation, width: int | None = None) -> str:
    """All of a report that fits; lines are at most `width` characters, by default the terminal's width."""
    if width is None:
        width = min(max(shutil.get_terminal_size((120, 40)).columns, 80), 160)
    lines = [line for sentence in _head(found) for line in _wrapped(sentence, width, "", "  ")]
    for graph in found.graphs:
        lines += ["", *graph_lines(graph, width)]
    lines += _parameters(found, width)
    if found.sizes:
        lines += ["", *_sizes(found, width)]
    if found.advice:
        lines += ["", "advice"]
        lines += [line for sentence in found.advice for line in _wrapped(sentence, width, "  · ", "    ")]
    if found.notes:
        lines += [""]
        lines += [line for note in found.notes for line in _wrapped(note, width, "note: ", "      ")]
    return "\n".join(_cut(line.rstrip(), width) for line in lines)


def _head(found: Explanation) -> Iterator[str]:
    settings = found.settings
    ranks = f" on {count(found.world_size, 'rank')}" if found.world_size else ""
    packed = f"{count(len(found.buckets), 'bucket')}, {size(found.nbytes)} of gradients"
    yield f"{found.model}{ranks}: {count(len(found.graphs), 'graph')} with a backward, {packed}"
    yield (
        f"{_buckets(found)}, inner={settings['inner']}, {'split' if settings['split'] else 'unsplit'}, {found.device}"
    )
    yield from _travel(found)
    network, machine = found.network, found.machine
    if not found.timeline:
        return
    computes = "computation as measured"
    if not found.clocked:
        flops, memory = f"{figures(machine.flops / 1e12)} TFLOP/s", f"{figures(machine.memory / 1e9)} GB/s of memory"
        computes = _with_origins(found, {"flops": flops, "memory_bandwidth": memory})
    if network is None or network.world_size == 1:
        yield f"with {computes}:"
        yield f"step: {duration(found.computing)} of computation"
        yield "one rank sends nothing" if network else "give world_size, a number of ranks, to see what is sent"
        return
    what = "gradients" if settings["codec"] is None else "compressed gradients"
    in_rows = any(gradient.rows is not None for bucket in found.buckets for gradient in bucket.gradients)
    ring = "a ring all-reduce" + ", and rows in place of tables" * in_rows
    hook = settings["comm_hook"]
    sends = "each rank sends at least" if hook is None else f"each rank would send, without {hook},"
    yield f"{sends} {size(network.sent(found.wire_bytes))} a step (2(N-1)/N of the {what}, by {ring})"
    if settings["bucket_mb"] == AUTO and network.cpu_per_byte:
        call, of_mib = duration(network.cpu_per_call), duration(network.taken(1 << 20))
        costs = f"{call} a bucket and {of_mib} a MiB from the processor"
        yield f'"auto" knows sending takes {costs}; predicted times do not'
    link = {"bandwidth": rate(network.bandwidth), "latency": f"{duration(network.latency)} a message"}
    yield f"with {_with_origins(found, link)}; {computes}:"
    hidden = "" if found.overlap is None else f"; {share(found.overlap)} of the sending is hidden"
    late = any(bucket.needed is not None for bucket in found.buckets)
    step = "step, from a backward through the next forward" if late else "step"
    yield (
        f"{step}: {duration(found.seconds)} = {duration(found.computing)} of computation + {duration(found.exposed)} "
        f"of exposed sending{hidden}"
    )


def _buckets(found: Explanation) -> str:
    settings = found.settings
    if settings["bucket_mb"] != AUTO:
        several = settings["bucket_cap_mb_list"]
        if several:
            return f"buckets of {', '.join(map(mib, several))} MiB, one after the other"
        return f"buckets of {mib(settings['bucket_mb'])} MiB (the first of {mib(settings['first_bucket_mb'])} MiB)"
    sizes = sorted(bucket.nbytes for bucket in found.buckets) or [0]
    between = " to ".join(dict.fromkeys(map(size, (sizes[0], sizes[-1]))))
    return f'buckets of {between}, chosen by bucket_mb="auto"'


def _travel(found: Explanation) -> Iterator[str]:
    """What becomes of buckets, where that is more than an all-reduce of the gradients."""
    settings = found.settings
    if settings["codec"] is not None:
        yield f"compressed by {settings['codec']} to {size(found.wire_bytes)}"
    parts = []
    if settings["algorithm"] != "all_reduce":
        mesh = settings["device_mesh"]
        parts.append(
            f"algorithm={settings['algorithm']}"
            + (f" on {count(mesh[0], 'node')} of {count(mesh[1], 'rank')}" if mesh else "")
        )
    if settings["process_groups"] > 1:
        parts.append(f"{settings['process_groups']} process groups in turns")
    if settings["comm_hook"] is not None:
        parts.append(f"comm_hook={settings['comm_hook']}")
    if settings["optimizer"] is not None:
        parts.append(f"parameters updated by {settings['optimizer']} when their bucket has arrived")
    if parts:
        yield ", ".join(parts)


def _with_origins(found: Explanation, told: Mapping[str, str]) -> str:
    """Figures, and where they come from, by name: said once where that is the same, not at all where all are given."""
    origins = [ASSUMED if n in found.assumed else MEASURED if n in found.measured else GIVEN for n in told]
    if len(set(origins)) > 1:
        return " and ".join(f"{text} ({origin})" for text, origin in zip(told.values(), origins, strict=True))
    return " and ".join(told.values()) + f" ({origins[0]})" * (origins[0] != GIVEN)


def graph_lines(graph: Graph, width: int = 160) -> Iterator[str]:
    """One graph's table, with as many names as fit."""
    measured = ", measured" if any(piece.measured is not None for piece in graph.pieces) else ""
    yield (
        f"graph {graph.index}: forward {duration(graph.forward_seconds)}, backward {duration(graph.seconds)} in "
        f"{count(len(graph.pieces), 'piece')} of {count(graph.nodes, 'node')}{measured}"
    )
    if not graph.buckets:
        yield "  no gradients of parameters"
        return
    sent = any(bucket.predicted is not None for bucket in graph.buckets)
    recorded = any(bucket.measured is not None for bucket in graph.buckets)
    shown = _some(graph.buckets)
    late = any(bucket.needed is not None for bucket in graph.buckets)
    rows = [["bucket", "bytes", "dtype", "after", "ready", *["sent in", "exposed"] * sent]]
    rows[0] += ["awaited by"] * late + ["measured"] * recorded
    for each in filter(None, shown):
        rows.append([str(each.index), size(each.nbytes), each.dtype, f"piece {each.piece}", share(each.last.before)])
        rows[-1] += [duration(each.predicted), duration(each.exposed)] * sent
        rows[-1] += [_awaited(each)] * late + [duration(each.measured)] * recorded
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) + "  " for row in rows]
    indent = " " * (4 + widths[0])
    beside = width - len(table[0]) >= BESIDE
    yield table.pop(0) + "parameters" * beside
    for bucket in shown:
        if bucket is None:
            yield f"  {'…':>{widths[0]}}  ({len(graph.buckets) - ROWS} more)"
            continue
        figures_of_it = table.pop(0)
        yield figures_of_it + (fitting(bucket.names, width - len(figures_of_it)) if beside else "")
        if not beside:
            yield indent + fitting(bucket.names, width - len(indent))
        yield indent + _waits(bucket, width - len(indent))
        if bucket.route != PLAIN:
            yield from _wrapped(f"travels by {bucket.route}", width, indent, f"{indent}  ")
    if graph.unused:
        yield f"  no gradient in this graph: {names(graph.unused, NAMES)}"


def _awaited(bucket: Bucket) -> str:
    """What waits for a bucket: a piece of the next forward, its end, or the backward."""
    if bucket.needed is None:
        return "backward"
    return "forward's end" if bucket.needed < 0 else f"forward {bucket.needed}"


def _some(buckets: Sequence[Bucket]) -> list[Bucket | None]:
    if len(buckets) <= ROWS:
        return list(buckets)
    return [*buckets[: ROWS // 2], None, *buckets[-ROWS // 2 :]]


def _waits(bucket: Bucket, room: int) -> str:
    last = bucket.last
    where = f"node {last.ready}, {last.node}" if last.source is None else str(last.source)
    at = where.partition("  ")[0]  # the line of the source is cut before the name is, the name before its place
    return f"waits for {_end(last.name, room - len('waits for   ◂ ') - len(at))}  ◂ {where}"


def _parameters(found: Explanation, width: int) -> Iterator[str]:
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
        yield f"{title}: {count(len(members), 'parameter')}, {total}"
        for (reason, source), same in groupby(members, key=lambda p: (p.reason, p.source)):
            yield from _wrapped(names([parameter.name for parameter in same], NAMES), width, "  ", "  ")
            if state not in ("frozen", "unused"):
                yield from _wrapped(reason, width, "    ", "    ")
            if source is not None:
                yield f"    {source}"
    if found.tied:
        yield ""
        more = f"; … ({len(found.tied)} in all)" * (len(found.tied) > NAMES)
        same_ones = [f"{name} = {' = '.join(others)}" for name, others in list(found.tied.items())[:NAMES]]
        yield from _wrapped("; ".join(same_ones) + more, width, "tied: ", "  ")
    loose = [each for each in found.breaks if not _blamed(each.source, found.parameters)]
    for each in loose[:NAMES]:
        yield ""
        yield from _wrapped(each.reason, width, "graph break: ", "  ")
        if each.source is not None:
            yield f"  {each.source}"


def _blamed(source: object, parameters: Iterable[Parameter]) -> bool:
    return any(parameter.source is not None and parameter.source == source for parameter in parameters)


def _sizes(found: Explanation, width: int) -> Iterator[str]:
    yield "bucket_mb, the sending it would expose, and how many buckets there would be:"
    now = found.settings["bucket_mb"]
    cells = [
        f"{'▸' * (each.bucket_mb == now)}{mib(each.bucket_mb)}: {duration(each.exposed)} ({each.buckets})"
        for each in found.sizes
    ]
    widest = max(map(len, cells))
    columns = max(1, min(5, (width - 2 + 3) // (widest + 3)))
    for start in range(0, len(cells), columns):
        yield "  " + "   ".join(f"{cell:<{widest}}" for cell in cells[start : start + columns])


def names(all_names: Iterable[str], limit: int) -> str:
    """The first of these, and how many there are."""
    found = list(all_names)
    return ", ".join(found[:limit]) + (f", … ({len(found)} in all)" if len(found) > limit else "")


def fitting(all_names: Sequence[str], room: int, most: int = 3) -> str:
    """As many of these names as there is room for, and how many there are; of the first at least the end."""
    told = [names(all_names, shown) for shown in range(most, 0, -1)]
    rest = told[-1][len(all_names[0]) :]
    return next((text for text in told if len(text) <= room), _end(all_names[0], room - len(rest)) + rest)


def _end(name: str, room: int) -> str:
    """The end of a name, which tells more than its beginning."""
    return name if len(name) <= max(room, 8) else f"…{name[1 - max(room, 8) :]}"


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
