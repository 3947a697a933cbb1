"""`fxddp.explain`: what a training will send, when, and what that costs; before or while it trains.

report   what was found, as plain data: parts    gather   from a backend's graphs to a report
text     for a terminal                          dry      one forward that trains nothing
page     for a browser                           timeline when everything happens
trace    for Perfetto                            advice   what would make it faster
cli      python -m fxddp explain
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxddp import units
from fxddp.arguments import positive, whole
from fxddp.backend import Backend, backend_of
from fxddp.config import Settings, make_settings
from fxddp.group import alive
from fxddp.passes.cost import Machine, Network, Speeds
from fxddp.speeds import assumed

from .dry import traced_on, try_forward
from .gather import gather, name_of
from .parts import Break, Bucket, Gradient, Graph, Parameter, Pass, Piece, Size
from .report import ASSUMED, GIVEN, MEASURED, Explanation
from .timeline import Span

__all__ = [
    "Break",
    "Bucket",
    "Explanation",
    "Gradient",
    "Graph",
    "Parameter",
    "Pass",
    "Piece",
    "Size",
    "Span",
    "explain",
]

TRAVEL = ("process_group", "lanes", "mesh", "algorithm")
FIELDS = {
    "bucket_mb": ("cap", "auto"),
    "first_bucket_mb": ("first_cap",),
    "mode": ("options",),
    "bucket_mb_list": ("caps",),
    "comm_hook": ("comm_hook", "codec"),
    **dict.fromkeys(("process_group", "device_mesh", "algorithm"), TRAVEL),
}
"""What an argument of `fxddp.backend` says in `Settings`, where that is not one field of its name."""

_ARGUMENTS = inspect.signature(make_settings).parameters.keys()


def explain(
    model_or_backend: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    bandwidth: float | str | None = None,
    latency: float | str | None = None,
    flops: float | None = None,
    memory_bandwidth: float | str | None = None,
    device: str | torch.device | None = None,
    measure: bool = False,
    **backend_arguments: Any,
) -> Explanation:
    """Shows how a model's gradients are packed and sent, when, what it costs, and what no graph covers.

    Two uses:
        explain(compiled_model) or explain(backend): what was compiled so far, with the last backward that ran.
        explain(model, *inputs, world_size=64, bandwidth="100Gbit/s"): compiles the model's forward once on `inputs`
            and plans its backward. Nothing is communicated, no gradient is computed, and buffers and random state are
            put back; it works without a process group, and for devices and ranks that are not there.

    Args:
        model_or_backend: a module, a function, something compiled with fxddp, its wrapper, or a `Backend`.
        inputs: positional arguments of one forward.
        kwargs: keyword arguments of that forward.
        world_size: number of ranks to report for; by default that of the backend's group, or of the default group, if
            there is one.
        bandwidth: what each rank can send: "100Gbit/s", "12.5GB/s", or bytes per second.
        latency: of an empty message: "5us", or seconds.
        flops: floating point operations per second of one rank's processor.
        memory_bandwidth: of its memory: "2TB/s", or bytes per second.
        device: explain as if model and inputs were there ("cuda"). They may be on the meta device, without data.
        measure: run forward and backward a few times and report measured times of the computation.
        backend_arguments: arguments of `fxddp.backend`; by default those of the model's backend.

    Returns:
        An object whose `str()` is a report, with `save("report.html")`, `save_trace("trace.json")` and `to_json()`.
        Graphs and passes as code are there with `inputs`, or if the backend was made with `keep_graphs=True`.

    Raises:
        ValueError: no inputs were given and the model is not compiled with fxddp, or an argument is not allowed.
        TypeError: an argument is neither one of these nor one of `fxddp.backend`, or the model cannot be called.
    """
    device = None if device is None else _device(device)
    if world_size is not None:
        whole("world_size", world_size, least=1)
    unknown = sorted(backend_arguments.keys() - _ARGUMENTS)
    if unknown:
        raise TypeError(f"explain: {', '.join(unknown)} is neither an argument of explain nor of fxddp.backend")
    if not inputs and not kwargs:
        needs = sorted(backend_arguments) + ["device"] * (device is not None) + ["measure"] * measure
        if needs:
            raise ValueError(f"explain needs the inputs of one forward to plan with {needs}")
        return _explain_compiled(
            model_or_backend,
            world_size,
            network=partial(_network, bandwidth=bandwidth, latency=latency),
            machine=partial(_machine, flops=flops, memory=memory_bandwidth),
            origins=partial(
                _origins, flops=flops, memory_bandwidth=memory_bandwidth, bandwidth=bandwidth, latency=latency
            ),
        )
    if isinstance(model_or_backend, Backend):
        raise ValueError(
            "explain(backend) shows what it compiled; to plan for other arguments, pass the model and its inputs"
        )
    model, trained = _plain(model_or_backend)
    if not callable(model):
        raise TypeError(f"explain needs a model, a function or what was compiled of one, got {type(model).__name__}")
    settings = _changed(make_settings() if trained is None else trained.settings, backend_arguments)
    if world_size is None:
        world_size = _world_size(settings, trained)
    known = _measured(trained)
    kind = _device_type(model, device)
    machine = _machine(kind, known, flops=flops, memory=memory_bandwidth)
    network = _network(world_size, known, kind, bandwidth=bandwidth, latency=latency)
    speeds = Speeds(machine, network or assumed("cpu", 1).network)
    tried = try_forward(model, inputs, kwargs or {}, settings, speeds, device=device, measure=measure)
    notes = []
    if not any(site.compilation.backward for site in tried.backend.sites) and not tried.used:
        notes.append("nothing that this forward returns depends on what requires grad: no gradient is computed or sent")
    if device is not None and traced_on(device) != device and device.type != "meta":
        notes.append(
            f"torch finds no {device.type} here: the graphs were traced with the operators of the CPU, where a "
            f"few of {device.type}'s differ"
        )
    return gather(
        tried.backend,
        model=name_of(model),
        settings=settings,
        network=network,
        machine=machine,
        device=str(device) if device is not None and device.type != "meta" else None,
        origins=_origins(known, flops=flops, memory_bandwidth=memory_bandwidth, bandwidth=bandwidth, latency=latency),
        notes=notes,
        tried=tried,
        trained=trained,
    )


def _explain_compiled(
    model: Any,
    world_size: int | None,
    *,
    network: Callable[..., Network | None],
    machine: Callable[..., Machine],
    origins: Callable[..., Mapping[str, str]],
) -> Explanation:
    try:
        backend = model if isinstance(model, Backend) else backend_of(model)
    except ValueError as error:
        raise ValueError(
            f"{error}; or give explain the inputs of one forward, for a model that was never run"
        ) from None
    if world_size is None:
        group = backend.lookup()
        world_size = group.size if group is not None else None
    devices = [tensor.device.type for _, tensor in backend.known_tensors()]
    known = _measured(backend)
    module = None if isinstance(model, Backend) else _plain(model)[0]
    notes = []
    if not any(site.compilation.backward for site in backend.sites):
        notes.append(
            "nothing with a backward was compiled so far: run a forward with grad enabled, or give explain its inputs"
        )
    others = backend.modules.apart_from(module) if isinstance(module, nn.Module) else ()
    if others:
        notes.append(f"this is all that the backend compiled, for {', '.join(map(name_of, others))} as well")
    return gather(
        backend,
        model="fxddp" if module is None else name_of(module),
        settings=backend.settings,
        network=network(world_size, known),
        machine=machine(devices[0] if devices else "cpu", known),
        origins=origins(known),
        notes=notes,
        trained=backend,
    )


def _plain(model: Any) -> tuple[Any, Backend | None]:
    """The model behind what was compiled or wrapped, and its backend."""
    from fxddp.ddp import DistributedDataParallel

    try:
        backend = backend_of(model)
    except ValueError:
        return getattr(model, "_orig_mod", model), None
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model), backend


def _world_size(settings: Settings, trained: Backend | None) -> int | None:
    if settings.process_group is not None:
        return alive(settings.process_group).size()
    if trained is not None and (group := trained.lookup()) is not None:
        return group.size
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def _changed(settings: Settings, arguments: Mapping[str, Any]) -> Settings:
    if not arguments:
        return settings
    given = make_settings(**arguments)
    changed = {field for name in arguments for field in FIELDS.get(name, (name,))}
    return replace(settings, **{field: getattr(given, field) for field in changed})


def _device_type(model: Any, device: torch.device | None) -> str:
    if device is not None:
        return device.type
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return "cpu" if first is None else first.device.type


def _measured(backend: Backend | None) -> Speeds | None:
    """What a backend's ranks measured, if they did."""
    group = None if backend is None else backend.lookup()
    return group.speeds if group is not None and group.size > 1 else None


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"device: {device!r} is no device that torch knows") from None


def _machine(kind: str, known: Speeds | None, *, flops: float | None, memory: float | str | None) -> Machine:
    base = assumed(kind, 1).machine if known is None else known.machine
    if flops is not None:
        positive("flops", flops)
    return Machine(
        base.flops if flops is None else float(flops),
        base.memory if memory is None else units.bandwidth(memory, "memory_bandwidth"),
        base.launch,
    )


def _network(
    world_size: int | None,
    known: Speeds | None,
    kind: str = "cpu",
    *,
    bandwidth: float | str | None,
    latency: float | str | None,
) -> Network | None:
    usual = assumed("cpu", 1).network if known is None else known.network
    wide = usual.bandwidth if bandwidth is None else units.bandwidth(bandwidth)
    late = usual.latency if latency is None else units.seconds(latency)
    if kind != "cpu":  # what computes does not send
        usual = replace(usual, cpu_per_call=0.0, cpu_per_byte=0.0)
    return None if world_size is None else replace(usual, world_size=world_size, bandwidth=wide, latency=late)


def _origins(known: Speeds | None, **given: float | str | None) -> dict[str, str]:
    """Where each figure comes from."""
    otherwise = ASSUMED if known is None else MEASURED
    return {name: otherwise if value is None else GIVEN for name, value in given.items()}
