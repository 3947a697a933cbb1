"""What becomes of each parameter, with the reason where it is in no bucket."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from fxddp.backend import Backend
from fxddp.passes.outline import Source

from .dry import Tried
from .parts import Break, Graph, Parameter
from .text import names

LEFT_OUT = "an input of a graph, but its gradient is always zero, sparse, or of another dtype"


def parameters_of(
    backend: Backend, graphs: Sequence[Graph], breaks: Sequence[Break], tried: Tried | None
) -> list[Parameter]:
    """All parameters that a backend knows, in the model's order."""
    packed: dict[tuple[str, tuple[int, ...]], Parameter] = {}  # models on one backend may have the same names
    for bucket in (bucket for graph in graphs for bucket in graph.buckets):
        for each in bucket.gradients:
            where = Parameter(each.name, each.shape, bucket.dtype, each.nbytes, "bucket")
            packed.setdefault((each.name, each.shape), replace(where, graph=bucket.graph, bucket=bucket.index))
    left_out = {name for graph in graphs for name in graph.unused}
    tied = backend.modules.tied()
    found: list[Parameter] = []
    for name, tensor in backend.known_tensors():
        if not isinstance(tensor, nn.Parameter):
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        about = Parameter(name, tuple(tensor.shape), dtype, tensor.nbytes, "", tied=tied.get(name, ()))
        if not tensor.requires_grad:
            found.append(replace(about, state="frozen", reason="does not require grad"))
        elif (name, about.shape) in packed:
            found.append(replace(packed[name, about.shape], tied=about.tied))
        elif name in left_out:
            found.append(replace(about, state="left out", reason=LEFT_OUT))
        else:
            state, reason, source = _outside(name, tensor, breaks, tried)
            found.append(replace(about, state=state, reason=reason, source=source))
    known = {(parameter.name, parameter.shape) for parameter in found}
    return [*found, *(each for key, each in packed.items() if key not in known)]


def sent_twice(graphs: Sequence[Graph], parameters: Sequence[Parameter]) -> Iterator[str]:
    """Says which parameters several graphs use: each of them sends a gradient."""
    sent = Counter((each.name, each.shape) for g in graphs for bucket in g.buckets for each in bucket.gradients)
    known = Counter((parameter.name, parameter.shape) for parameter in parameters)
    often = [name for (name, shape), times in sent.items() if times > known[name, shape]]
    if often:
        yield f"used in several graphs, each of which sends a gradient: {names(often, 6)}"


def _outside(
    name: str, parameter: Tensor, breaks: Sequence[Break], tried: Tried | None
) -> tuple[str, str, Source | None]:
    """What becomes of a parameter that no graph has."""
    if tried is None:
        return "unknown", "in no compiled graph so far; if eager code uses it, it is reduced after the backward", None
    if id(parameter) in tried.used:
        reason = "used in eager code (a graph break or a disabled part); reduced after the backward, not overlapped"
        found = _break_of(name, breaks)
        return "eager", f"{reason}: {found.reason}" if found else reason, found.source if found else None
    return "unused", "not used by this forward", None


def _break_of(name: str, breaks: Sequence[Break]) -> Break | None:
    """The graph break whose line speaks of a part that this parameter belongs to, or the only one there is."""
    parts = [part for part in name.split(".")[:-1] if not part.isdigit()]
    for part in reversed(parts):
        for each in breaks:
            if each.source is not None and f".{part}" in each.source.text:
                return each
    return breaks[0] if len(breaks) == 1 else None
