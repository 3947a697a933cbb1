"""A step as a Chrome trace: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

Names are those of the ranges that a torch profile of the training holds, so that both can be laid side by side.
"""

from collections.abc import Sequence
from typing import Any

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
    for span in spans:
        about: dict[str, Any] = {"graph": span.graph}
        bucket = buckets.get((span.graph, span.index)) if span.kind in ("bucket", "wait") else None
        if bucket is not None:
            about |= {"bytes": bucket.nbytes, "wire_bytes": bucket.wire_bytes, "dtype": bucket.dtype}
            about |= {"route": bucket.route, "parameters": list(bucket.names)}
        events.append(
            {
                "ph": "X",
                "name": range_name(span.kind, span.index),
                "cat": span.kind,
                "pid": pid,
                "tid": LANES[span.lane],
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "args": about,
            }
        )
    return events


def range_name(kind: str, index: int) -> str:
    """The name of something's range in a profile."""
    names = {"bucket": f"bucket{index}.allreduce", "wait": f"bucket{index}.wait", "piece": f"piece{index}"}
    return f"fxddp.{names.get(kind, f'{kind}{index}')}"
