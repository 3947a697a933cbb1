"""Turns what a backend compiled into an `Explanation`.

sending      how buckets travel              parameters   what becomes of each parameter
graphs       one compiled graph as data      times        when buckets travel
breaks       where graphs end early          recorded     when they did in the last backward
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxddp.backend import Backend
from fxddp.config import AUTO, Settings, in_mib
from fxddp.passes.cost import Machine, Network, Speeds

from . import advice
from .breaks import breaks_of
from .dry import Tried
from .graphs import View, graph_at
from .parameters import parameters_of, sent_twice
from .recorded import recorded_spans, superseded, unlike_the_last
from .report import ASSUMED, MEASURED, Explanation
from .sending import Sending, numbered, runs_of, unmodelled
from .timeline import simulate
from .times import other_sizes, planned_for, timed, with_times


def gather(
    backend: Backend,
    *,
    model: str,
    settings: Settings,
    network: Network | None,
    machine: Machine,
    device: str | None = None,
    origins: Mapping[str, str],
    notes: Sequence[str] = (),
    tried: Tried | None = None,
    trained: Backend | None = None,
) -> Explanation:
    """The report on a backend's graphs.

    Args:
        backend: what compiled them.
        model: name of what was compiled.
        settings: what the user asked for.
        network: what to predict all-reduces with.
        machine: what to predict computation with.
        device: report this device in place of the one that was traced on.
        origins: where each figure of machine and network comes from.
        notes: what to keep in mind.
        tried: what a dry run showed; None for a backend that trains.
        trained: the backend that trains the model, if one does.
    """
    compiled = [site for site in backend.sites if site.compilation.backward is not None]
    replaced = superseded(backend, compiled)
    sites = [site for site in compiled if site not in replaced]
    world_size = 1 if network is None else network.world_size
    view = View(machine, device, tried, Sending(settings, world_size, runs_of(settings, trained)))
    graphs = numbered([graph_at(i, site, view) for i, site in enumerate(sites)], view.sending)
    breaks = breaks_of(backend, tried)
    parameters = parameters_of(backend, graphs, breaks, tried)
    eager = {parameter.name for parameter in parameters if parameter.state == "eager"}
    late = [tensor for name, tensor in backend.known_tensors() if name in eager]
    known = with_times(sites, graphs, machine, network, view.sending)
    steps = [each.steps() for each in known]
    spans = simulate(steps, network, list(view.sending.late(late, settings.cap)))
    recorded = recorded_spans(backend, sites, graphs)
    graphs = [timed(graph, step, spans, recorded) for graph, step in zip(graphs, steps, strict=True)]
    speeds = None if network is None else Speeds(machine, network)
    found = Explanation(
        model=model,
        graphs=tuple(graphs),
        parameters=tuple(parameters),
        settings=_described(settings, view.sending),
        machine=machine,
        network=network,
        device=device or (graphs[0].buckets[0].device if graphs and graphs[0].buckets else "cpu"),
        assumed=tuple(name for name, origin in origins.items() if origin == ASSUMED),
        measured=tuple(name for name, origin in origins.items() if origin == MEASURED),
        breaks=tuple(breaks),
        timeline=spans,
        recorded=recorded,
        sizes=other_sizes(known, spans, speeds, view.sending, late),
        notes=(
            *notes,
            *unmodelled(settings, view.sending),
            *unlike_the_last(backend, sites, len(replaced)),
            *planned_for(sites, settings, network),
            *sent_twice(graphs, parameters),
        ),
        versions={"fxddp": _version(), "torch": torch.__version__},
    )
    return replace(found, advice=tuple(advice.advise(found)))


def _version() -> str:
    from fxddp import __version__

    return __version__


def _described(settings: Settings, sending: Sending) -> dict[str, Any]:
    """The arguments of `fxddp.backend`, as numbers and text."""
    inner = settings.inner if isinstance(settings.inner, str) else getattr(settings.inner, "__name__", "a callable")
    mesh = settings.mesh
    return {
        "bucket_mb": AUTO if settings.auto else in_mib(settings.cap),
        "first_bucket_mb": AUTO if settings.auto else in_mib(min(settings.first_cap, settings.cap)),
        "bucket_cap_mb_list": [in_mib(cap) for cap in settings.caps],
        "inner": inner,
        "split": settings.split,
        "find_unused_parameters": settings.find_unused_parameters,
        "static_graph": settings.static_graph,
        "comm_hook": sending.runs.hook,
        "codec": None if settings.codec is None else str(settings.codec),
        "optimizer": sending.runs.optimizer,
        "overlap": settings.overlap,
        "algorithm": settings.algorithm,
        "process_groups": len(settings.lanes) or 1,
        "device_mesh": None if mesh is None else [mesh.size(0), mesh.size(1)],
        "options": {key: str(value) for key, value in settings.options.items()},
    }


def name_of(model: Any) -> str:
    """What to call a model or a function in a report."""
    if isinstance(model, nn.Module):
        return type(model).__name__
    return str(getattr(model, "__qualname__", type(model).__name__))
