"""A step as a Chrome trace: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

Names are those of the ranges that a torch profile of the training holds, so that both can be laid side by side.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

from fxddp.ranges import OUTSIDE

from .report import Explanation
from .timeline import Span

LANES = {"compute": 0, "network": 1}


def trace(found: Explanation) -> dict[str, Any]:
    """The predicted step as one process with two threads, and the recorded backward as another, if there is one."""
    events: list[dict[str, Any]] = []
    for pid, (title, spans) in enumerate((("predicted", found.timeline), ("recorded", found.recorded))):
        if spans:
            events += [_name("process_name", pid, 0, f"fxddp: {title}")]
            events += [_name("thread_name", pid, tid, lane) for lane, tid in LANES.items()]
            events += _events(found, spans, pid)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": found.model, **found.versions}}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _events(found: Explanation, spans: Sequence[Span], pid: int) -> list[dict[str, Any]]:
    buckets = {(bucket.graph, bucket.index): bucket for bucket in found.buckets}
    events = []
    for span, name in zip(spans, range_names(spans), strict=True):
        about: dict[str, Any] = {"graph": span.graph}
        bucket = buckets.get((span.graph, span.index)) if span.kind in ("bucket", "wait") else None
        if bucket is not None:
            about |= {"bucket": bucket.index, "bytes": bucket.nbytes, "wire_bytes": bucket.wire_bytes}
            about |= {"dtype": bucket.dtype, "route": bucket.route, "parameters": list(bucket.names)}
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": span.kind,
                "pid": pid,
                "tid": LANES[span.lane],
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "args": about,
            }
        )
    return events


def range_names(spans: Sequence[Span]) -> list[str]:
    """The names of their ranges in a profile, where pieces and buckets are numbered through a whole backward."""
    pieces = count()
    numbers: dict[tuple[int, int], int] = {}
    for span in spans:
        if span.kind == "bucket":
            numbers[span.graph, span.index] = len(numbers)
    found = []
    for span in spans:
        bucket = numbers.get((span.graph, span.index), OUTSIDE)
        names = {"bucket": f"bucket{bucket}.allreduce", "uncovered": f"bucket{OUTSIDE}.allreduce"}
        names |= {"wait": f"bucket{bucket}.wait", "forward": f"forward{span.index}"}
        found.append(f"fxddp.{names[span.kind] if span.kind != 'piece' else f'piece{next(pieces)}'}")
    return found
