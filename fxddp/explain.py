"""`fxddp.explain`: every graph and bucket plan of a model, before or while it trains; needs no process group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import _compat
from .backend import Backend, backend_of
from .config import MIB, Settings, make_settings
from .passes.pipeline import PassRecord
from .passes.plan import Bucket, BucketPlan
from .site import Site


@dataclass(frozen=True, slots=True)
class Row:
    """One gradient in a bucket: the parameter's qualified name, its bytes, and the node at which it is ready."""

    name: str
    nbytes: int
    ready: int
    node: str


@dataclass(frozen=True)
class GraphExplanation:
    """One compiled graph.

    Attributes:
        plan: the buckets.
        names: qualified names of the graph's parameters and buffers, by position among its inputs.
        unused: parameters that require grad and are inputs of the graph, but get no gradient from it that can be
        packed. nodes: names of the backward's nodes, in order (empty unless graphs are kept).
        dynamo, forward: graphs (None unless kept).
        passes: the backward's readable code after each pass, the first entry being the graph as AOTAutograd made it.
        pieces: the graphs between the launches.
    """

    plan: BucketPlan
    names: Mapping[int, str]
    unused: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    dynamo: fx.GraphModule | None = None
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    passes: tuple[PassRecord, ...] = ()
    pieces: tuple[fx.GraphModule, ...] = ()

    def rows(self, bucket: Bucket) -> tuple[Row, ...]:
        """The gradients of one bucket."""
        return tuple(
            Row(
                self.names.get(grad.input, f"input {grad.input}"),
                grad.nbytes,
                grad.ready,
                self.nodes[grad.ready] if grad.ready < len(self.nodes) else "",
            )
            for grad in bucket.grads
        )


@dataclass(frozen=True)
class Explanation:
    """What `fxddp.explain` found; `str()` is the report.

    Attributes:
        graphs: the compiled graphs that have a backward, in the order they were compiled.
        settings: the backend's settings.
        world_size: number of ranks the report is for, or None if unknown.
        frozen: parameters that do not require grad.
        uncovered: parameters that require grad and get no gradient from any graph, with the reason.
    """

    graphs: tuple[GraphExplanation, ...]
    settings: Settings
    world_size: int | None
    frozen: tuple[str, ...] = ()
    uncovered: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(graph.plan.nbytes for graph in self.graphs)

    @property
    def wire_bytes(self) -> int:
        """Bytes that travel for them: fewer, if they are compressed. `fxddp.Adaptive` is shown as it starts."""
        buckets = (bucket for graph in self.graphs for bucket in graph.plan.buckets)
        return sum(self.settings.wire_bytes(bucket, self.world_size or 1) for bucket in buckets)

    def __str__(self) -> str:
        settings = self.settings
        inner = settings.inner if isinstance(settings.inner, str) else getattr(settings.inner, "__name__", "a callable")
        ranks = f" on {self.world_size} ranks" if self.world_size else ""
        graphs = f"{len(self.graphs)} graph{'s' * (len(self.graphs) != 1)} with a backward"
        buckets = sum(len(graph.plan.buckets) for graph in self.graphs)
        sizes = f"buckets of {_size(settings.cap)} (the first of {_size(min(settings.first_cap, settings.cap))})"
        lines = [
            f"fxddp{ranks}: {graphs}, {buckets} buckets, {_size(self.nbytes)} of gradients",
            f"{sizes}, inner={inner}, {'split' if settings.split else 'unsplit'}",
        ]
        what = "gradients"
        if settings.codec is not None:
            lines.append(f"compressed by {settings.codec} to {_size(self.wire_bytes)}")
            what = "compressed gradients"
        if self.world_size:
            sent = 2 * (self.world_size - 1) * self.wire_bytes // self.world_size
            lines.append(
                f"each rank sends at least {_size(sent)} a step (2(N-1)/N of the {what}, by a ring all-reduce)"
            )
        for index, graph in enumerate(self.graphs):
            lines += ["", f"graph {index}"]
            lines += _table(graph)
            if graph.unused:
                lines.append(f"  no gradient in this graph: {_list(graph.unused)}")
        if self.frozen:
            lines += ["", f"frozen: {_list(self.frozen)}"]
        if self.uncovered:
            lines += ["", "covered by no graph:"]
            lines += [f"  {name}: {reason}" for name, reason in self.uncovered.items()]
        return "\n".join(lines)


def explain(
    model_or_backend: Any, *inputs: Any, world_size: int | None = None, **backend_arguments: Any
) -> Explanation:
    """Shows how a model's gradients are packed and sent, and what no graph covers.

    Two uses:
        explain(compiled_model) or explain(backend): what was compiled so far.
        explain(model, *inputs, world_size=64, bucket_mb=25): compiles the model's forward once on `inputs` and plans
            its backward. Nothing is communicated, no gradient is computed, and buffers and random state are put back;
            it works without a process group.

    Args:
        model_or_backend: a module, a function, something compiled with fxddp, or a `Backend`.
        inputs: arguments of one forward.
        world_size: number of ranks to report for; by default that of the backend's group, if there is one.
        backend_arguments: arguments of `fxddp.backend`; by default those of the model's backend.

    Returns:
        An object whose `str()` is a report and whose attributes hold plans and graphs. Graphs are there with `inputs`,
        or if the backend was made with `keep_graphs=True`.

    Raises:
        ValueError: no inputs were given and the model is not compiled with fxddp.
    """
    if isinstance(model_or_backend, Backend):
        if inputs or backend_arguments:
            raise ValueError(
                "explain(backend) shows what it compiled; to plan for other arguments, pass the model and its inputs"
            )
        return _report(model_or_backend, world_size)
    if not inputs:
        if backend_arguments:
            raise ValueError(f"explain needs the inputs of one forward to plan with {sorted(backend_arguments)}")
        return _report(backend_of(model_or_backend), world_size)
    try:
        settings = backend_of(model_or_backend).settings
        model = getattr(model_or_backend, "_orig_mod", model_or_backend)
    except ValueError:
        settings, model = make_settings(), model_or_backend
    if backend_arguments:
        given = make_settings(**backend_arguments)
        changed = {name for name in Settings.__slots__ if name in backend_arguments}
        changed |= {"codec"} if "comm_hook" in backend_arguments else set()
        changed |= {"cap"} & {name.replace("bucket_mb", "cap") for name in backend_arguments}
        changed |= {"first_cap"} & {name.replace("bucket_mb", "cap") for name in backend_arguments}
        settings = replace(settings, **{name: getattr(given, name) for name in changed})
    dry = _DryBackend(replace(settings, keep_graphs=True, run_backward=False))
    used = _run_forward(model, inputs, dry)
    return _report(dry, world_size, used=used)


class _DryBackend(Backend):
    """A backend that plans and keeps graphs but answers for no parameter and talks to nobody."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.lookup = lambda: None  # type: ignore[assignment]

    def adopt(self, module: nn.Module) -> None:
        self.remember(module)


def _run_forward(model: Any, inputs: tuple[Any, ...], backend: Backend) -> set[int]:
    """Compiles and runs one forward; returns the ids of the leaves its results depend on."""
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    if isinstance(model, nn.Module):
        backend.adopt(model)
    compiled: Callable[..., Any] = torch.compile(model, backend=backend)
    try:
        with torch.random.fork_rng(), torch.enable_grad(), _compat.no_recompile_limit():
            results = compiled(*inputs)
    finally:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(before[name])
    return set(map(id, _compat.upstream_leaves(_compat.flatten(results))))


def _report(backend: Backend, world_size: int | None, used: set[int] | None = None) -> Explanation:
    if world_size is None:
        group = backend.lookup()
        world_size = group.size if group is not None else None
    graphs = tuple(_graph(site) for site in backend.sites if site.compilation.backward is not None)
    covered = {
        name for graph in graphs for bucket in graph.plan.buckets for name in (row.name for row in graph.rows(bucket))
    }
    in_graphs = {name for graph in graphs for name in graph.unused}
    frozen, uncovered = [], {}
    for name, tensor in backend.known_tensors():
        if not isinstance(tensor, nn.Parameter):
            continue
        if not tensor.requires_grad:
            frozen.append(name)
        elif name not in covered:
            uncovered[name] = _reason(name, tensor, in_graphs, used)
    return Explanation(graphs, backend.settings, world_size, tuple(frozen), uncovered)


def _reason(name: str, parameter: Tensor, in_graphs: set[str], used: set[int] | None) -> str:
    if name in in_graphs:
        return "an input of a graph, but its gradient is always zero, sparse, or of another dtype"
    if used is None:
        return "in no compiled graph so far; if eager code uses it, it is reduced after the backward"
    if id(parameter) in used:
        return "used in eager code (a graph break or a disabled part); reduced after the backward, not overlapped"
    return "not used by this forward"


def _graph(site: Site) -> GraphExplanation:
    backward = site.compilation.backward
    assert backward is not None
    plan = backward.program.plan
    planned = {grad.input for bucket in plan.buckets for grad in bucket.grads}
    unused = tuple(site.names[position] for position in site.trained if position not in planned)
    found = backward.rewritten
    return GraphExplanation(
        plan=plan,
        names=site.names,
        unused=unused,
        nodes=found.nodes if found else (),
        dynamo=site.graph,
        forward=site.compilation.forward_graph,
        backward=found.gm if found else None,
        passes=tuple(found.history) if found else (),
        pieces=found.pieces if found else (),
    )


def _table(graph: GraphExplanation) -> list[str]:
    total = len(graph.nodes)
    lines = [f"  {'bucket':>6}  {'bytes':>10}  {'dtype':<10} {'device':<6}  {'ready at':<28}  parameters"]
    for bucket in graph.plan.buckets:
        rows = graph.rows(bucket)
        last = max(rows, key=lambda row: row.ready)
        ready = f"node {last.ready}" + (f" of {total}: {last.node}" if total else "")
        dtype = str(bucket.dtype).removeprefix("torch.")
        lines.append(
            f"  {bucket.index:>6}  {_size(bucket.nbytes):>10}  {dtype:<10} {bucket.device.type:<6}  {ready[:28]:<28}  "
            f"{_list([row.name for row in rows])}"
        )
    if not graph.plan.buckets:
        lines.append("  no gradients of parameters")
    return lines


def _list(names: Any, limit: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f", … ({len(names)} in all)" if len(names) > limit else "")


def _size(nbytes: float) -> str:
    if nbytes >= MIB:
        return f"{nbytes / MIB:.4g} MiB"
    return f"{nbytes / 1024:.4g} KiB" if nbytes >= 1024 else f"{nbytes:.0f} B"
