"""Tells plans while a training compiles: in the log, and in torch's own trace of its compilations.

    FXDDP_LOGS=plan python train.py                plans on stderr; TORCH_LOGS=fxddp does the same in torch's format
    TORCH_TRACE=folder python train.py             then tlparse shows `fxddp_plan` beside torch's own artifacts

A recompile says which guard failed, and what that changed in the buckets.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from . import _compat
from .passes.plan import BucketPlan
from .units import count, size

if TYPE_CHECKING:
    from .site import Site

log = logging.getLogger("fxddp.plan")
NAMES = ("plan", "all")


def switch_on(wanted: str) -> None:
    """Has plans written to stderr if the text, that of `FXDDP_LOGS`, names them.

    Raises:
        ValueError: it names something else.
    """
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise ValueError(f"FXDDP_LOGS={wanted}: there is no {', '.join(unknown)}; there is: {', '.join(NAMES)}")
    if names and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[fxddp] %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


switch_on(os.environ.get("FXDDP_LOGS", ""))


class PlanLog:
    """Remembers the last plan of each frame, so that a recompile can be compared with it."""

    def __init__(self) -> None:
        self._last: dict[object, tuple[BucketPlan, Mapping[int, str]]] = {}

    def tell(self, site: "Site") -> None:
        """Tells of a graph that was just compiled, if anybody listens."""
        backward = site.compilation.backward
        if backward is None:
            return
        frame = site.frame
        before = self._last.get(frame)
        if frame is not None:
            self._last[frame] = backward.program.plan, site.names
        logs, traces = log.isEnabledFor(logging.INFO), _compat.traces_compilation()
        if not (logs or traces):
            return
        from .explain.graphs import graph_of
        from .explain.text import graph_lines

        graph = graph_of(site)
        again = None
        if before is not None:
            again = {
                "reason": _reason() or "another graph of the same code",
                "changes": list(changes(*before, backward.program.plan, site.names)),
            }
        where = f"{frame[2]} ({frame[0]}:{frame[1]})" if frame is not None else "a graph"
        if logs:
            lines = [f"{where}: {count(len(graph.buckets), 'bucket')}, {size(graph.nbytes)}", *graph_lines(graph)]
            if again is not None:
                lines.append(f"  compiled again, as {again['reason']}")
                lines += [f"  {change}" for change in again["changes"]]
            log.info("\n".join(lines))
        if traces:
            told: dict[str, Any] = {"frame": frame, "graph": _slim(asdict(graph)), "recompile": again}
            _compat.trace_artifact("fxddp_plan", json.dumps(told, indent=1))


def _reason() -> str:
    return " ".join(_compat.recompile_reason().partition("\n")[0].split())


def _slim(graph: dict[str, Any]) -> dict[str, Any]:
    """Without code, which torch's trace holds already."""
    for piece in graph["pieces"]:
        del piece["code"]
    return {name: value for name, value in graph.items() if name not in ("passes", "dynamo", "forward", "backward")}


def changes(before: BucketPlan, names: Mapping[int, str], after: BucketPlan, new_names: Mapping[int, str]) -> list[str]:
    """What became different between the plans of two compilations of the same code, as sentences.

    Args:
        before: the earlier plan.
        names: by position, its parameters.
        after: the later plan.
        new_names: by position, its parameters.
    """
    old = {names.get(grad.input, ""): bucket.index for bucket in before.buckets for grad in bucket.grads}
    new = {new_names.get(grad.input, ""): bucket.index for bucket in after.buckets for grad in bucket.grads}
    found = []
    if len(before.buckets) != len(after.buckets):
        found.append(f"buckets: {len(before.buckets)} → {len(after.buckets)}")
    if before.nbytes != after.nbytes:
        found.append(f"gradients: {size(before.nbytes)} → {size(after.nbytes)}")
    for what, members in (
        ("came", [name for name in new if name not in old]),
        ("went", [name for name in old if name not in new]),
        ("moved to another bucket", [name for name in new if name in old and old[name] != new[name]]),
    ):
        if members:
            more = f", … ({len(members)} in all)" if len(members) > 6 else ""
            found.append(f"{what}: {', '.join(members[:6])}{more}")
    order = [name for name in old if name in new] != [name for name in new if name in old]
    if order and not found:
        found.append("the order in which gradients become ready")
    return found or ["nothing in the buckets"]
