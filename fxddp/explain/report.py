"""What `fxddp.explain` found, as plain data, with its figures and views.

Note [schema]: `to_dict()` is `Explanation` and the dataclasses in it (`parts.py`, `timeline.Span`) as nested dicts,
field by field, under the names they have there, with `"schema": 1` at the top. Bytes are ints, times are seconds,
shares lie between 0 and 1, what is unknown is null. Code (of graphs, passes, pieces and the differences between passes)
is left out unless it is asked for; then those fields hold text instead of "". Fields may be added within a schema
number; none changes its meaning or goes away.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from fxddp.passes.cost import Machine, Network

from . import timeline
from .parts import Break, Bucket, Graph, Parameter, Size
from .timeline import Span

SCHEMA = 1
GIVEN, ASSUMED, MEASURED = "given", "assumed", "measured"
"""Where a figure of the machine or the network comes from: the caller, nobody, or the ranks, for `bucket_mb="auto"`."""

CODE = ("code", "diff", "dynamo", "forward", "backward")
T = TypeVar("T")


@dataclass(frozen=True)
class Explanation:
    """What `fxddp.explain` found; `str()` is a report for a terminal.

    Attributes:
        model: what was explained.
        graphs: the compiled graphs that have a backward, in the order they were compiled.
        parameters: all that the backend knows, in the model's order.
        settings: arguments of `fxddp.backend`.
        machine: what piece times are predicted with.
        network: what all-reduce times are predicted with; None without ranks.
        device: of the model, or that it was explained for.
        assumed: which of the figures of machine and network nobody gave: "flops", "memory_bandwidth", "bandwidth" and
            "latency", as the arguments of `fxddp.explain`.
        measured: which of them the ranks measured, for `bucket_mb="auto"`.
        breaks: where Dynamo ended graphs early.
        timeline: the predicted step; with `measure=True` its computation is measured.
        recorded: the last backward that really ran, if one has.
        sizes: what other bucket sizes would give.
        advice: what would make it faster.
        notes: what to keep in mind when reading the figures.
        versions: of fxddp and torch.
    """

    model: str
    graphs: tuple[Graph, ...]
    parameters: tuple[Parameter, ...]
    settings: Mapping[str, Any]
    machine: Machine
    network: Network | None = None
    device: str = "cpu"
    assumed: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    breaks: tuple[Break, ...] = ()
    timeline: tuple[Span, ...] = ()
    recorded: tuple[Span, ...] = ()
    sizes: tuple[Size, ...] = ()
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    # --- figures ----------------------------------------------------------------------------------

    @property
    def world_size(self) -> int | None:
        """Number of ranks it is for; None if unknown."""
        return None if self.network is None else self.network.world_size

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, graph by graph."""
        return tuple(bucket for graph in self.graphs for bucket in graph.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def wire_bytes(self) -> int:
        """Bytes that travel for them: fewer, if they are compressed. `fxddp.Adaptive` is shown as it starts."""
        return sum(bucket.wire_bytes for bucket in self.buckets)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that do not require grad."""
        return tuple(parameter.name for parameter in self.parameters if parameter.state == "frozen")

    @property
    def tied(self) -> Mapping[str, tuple[str, ...]]:
        """Further names of parameters that have several."""
        return {parameter.name: parameter.tied for parameter in self.parameters if parameter.tied}

    @property
    def uncovered(self) -> Mapping[str, str]:
        """Parameters that require grad and get no gradient from any graph, with the reason."""
        return {p.name: p.reason for p in self.parameters if p.state not in ("bucket", "frozen")}

    @property
    def seconds(self) -> float:
        """Predicted length of forward and backward, the sending included."""
        return timeline.length(self.timeline)

    @property
    def computing(self) -> float:
        """Predicted seconds of computation in a step."""
        return timeline.computed(self.timeline)

    @property
    def sending(self) -> float:
        """Predicted seconds during which the network is busy."""
        return sum(span.seconds for span in self.timeline if span.lane == "network")

    @property
    def exposed(self) -> float:
        """Predicted seconds of sending that no computation hides: what the step is longer for it."""
        return self.seconds - self.computing

    @property
    def overlap(self) -> float | None:
        """Share of the sending that computation hides; None if nothing is sent."""
        return 1 - self.exposed / self.sending if self.sending else None

    @property
    def clocked(self) -> bool:
        """Whether the computation was measured, with `measure=True`."""
        return any(graph.measured is not None for graph in self.graphs)

    # --- views ------------------------------------------------------------------------------------

    def __str__(self) -> str:
        from .text import text

        return text(self)

    def to_dict(self, *, code: bool = False) -> dict[str, Any]:
        """Everything as dicts, lists, numbers and text; see Note [schema] in `fxddp/explain/report.py`.

        Args:
            code: with the code of all graphs and passes, which is most of it.
        """
        found = {"schema": SCHEMA, **asdict(self)}
        return found if code else _without_code(found)

    def to_json(self, *, code: bool = False) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(code=code), ensure_ascii=False)

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> "Explanation":
        """What `to_dict` gave, as an object.

        Raises:
            ValueError: it is no report, or one of another schema.
        """
        if not isinstance(found, Mapping) or found.get("schema") != SCHEMA:
            given = found.get("schema") if isinstance(found, Mapping) else type(found).__name__
            raise ValueError(f"not a saved report of fxddp.explain with schema {SCHEMA}: schema is {given!r}")
        try:
            return _build(Explanation, found)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a saved report of fxddp.explain: {error!r}") from None

    @staticmethod
    def load(path: str | Path) -> "Explanation":
        """Reads what `to_json` wrote, or the report inside a page that `save` wrote."""
        from .page import embedded

        try:
            return Explanation.from_dict(json.loads(embedded(Path(path).read_text(encoding="utf-8"))))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a saved report of fxddp.explain: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes one self-contained page of HTML: timeline, buckets, graphs, passes, parameters."""
        from .page import page

        Path(path).write_text(page(self), encoding="utf-8")

    def save_trace(self, path: str | Path) -> None:
        """Writes the predicted and the recorded step as a Chrome trace, for Perfetto or chrome://tracing."""
        from .trace import trace

        Path(path).write_text(json.dumps(trace(self)), encoding="utf-8")


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "" if key in CODE and isinstance(item, str) else _without_code(item) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_code(item) for item in value]
    return value


def _build(kind: type[T], found: Mapping[str, Any]) -> T:
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], value) for name, value in found.items() if name in known})


def _value(hint: Any, value: Any) -> Any:
    """A value of JSON as what a field's annotation says."""
    if value is None:
        return None
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return tuple(_value(arguments[0], item) for item in value)
    kinds = [kind for kind in (hint, *arguments) if hasattr(kind, "__dataclass_fields__")]
    return _build(kinds[0], value) if kinds and isinstance(value, Mapping) else value
