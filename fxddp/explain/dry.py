"""Compiles a model once without training it: plans, keeps graphs, and measures if asked to.

Nothing is communicated, no `.grad` is written, buffers and random state are put back. For another device, or a model
without data, fake tensors stand in: nothing is computed or allocated.
"""

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxddp import _compat
from fxddp.backend import Backend
from fxddp.config import Settings
from fxddp.passes.cost import Speeds
from fxddp.passes.stages import Way
from fxddp.transport import way_of

REPEATS = 5


@dataclass
class Tried:
    """What one forward showed.

    Attributes:
        backend: knows the compiled graphs.
        model: keeps the parameters alive that `used` and the backend speak of.
        used: ids of the leaves that the results depend on.
        breaks: reason and stack trace of each graph break.
        forwards, pieces: measured seconds, by number of the graph (and of the piece).
    """

    backend: "DryBackend"
    model: Any
    used: set[int]
    breaks: tuple[tuple[str, str], ...] = ()
    forwards: Mapping[int, float] = field(default_factory=dict)
    pieces: Mapping[tuple[int, int], float] = field(default_factory=dict)


class DryBackend(Backend):
    """A backend that plans and keeps graphs but answers for no parameter and talks to nobody."""

    def __init__(self, settings: Settings, speeds: Speeds, *, measure: bool = False) -> None:
        planned = replace(
            settings, keep_graphs=True, compile_pieces=measure, split=True, comm_hook=None, optimizer=None
        )
        super().__init__(planned)
        self.lookup = lambda: None  # type: ignore[assignment]
        self.times: dict[tuple[str, int, int], list[float]] = {}
        self._measure = measure
        self._speeds = speeds

    def speeds(self, group: object, trained: object) -> Speeds:
        """As it was told."""
        return self._speeds

    def way(self, group: object) -> Way:
        """As on the ranks that it is planned for."""
        return way_of(self.settings, None, "fxddp", self._speeds.network.world_size)

    def adopt(self, module: nn.Module) -> None:
        """Only takes names from it."""
        self.remember(module)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        """As `Backend`; what is to be measured is called through a clock."""
        site = super().__call__(gm, inputs, **arguments)
        if not self._measure:
            return site
        number, backward = len(self.sites) - 1, site.compilation.backward
        if backward is not None:
            backward.pieces = tuple(
                partial(self._timed, piece, ("piece", number, index)) for index, piece in enumerate(backward.pieces)
            )
        return partial(self._timed, site, ("forward", number, 0))

    def _timed(self, function: Callable[..., Any], key: tuple[str, int, int], *arguments: Any) -> Any:
        _synchronize()
        start = perf_counter()
        try:
            return function(*arguments)
        finally:
            _synchronize()
            self.times.setdefault(key, []).append(perf_counter() - start)


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def try_forward(
    model: Any,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Settings,
    speeds: Speeds,
    *,
    device: torch.device | None,
    measure: bool,
) -> Tried:
    """Compiles and runs one forward, and some more with their backwards to measure them.

    Args:
        model: a module or a function.
        inputs: positional arguments of its forward.
        kwargs: keyword arguments.
        settings: of the backend.
        speeds: what `bucket_mb="auto"` plans with.
        device: trace as if everything were there; None: as it is.
        measure: run forward and backward several times.

    Raises:
        ValueError: what is asked for cannot be traced or measured here.
    """
    tensors = [t for t in _compat.flatten((list(inputs), dict(kwargs))) if isinstance(t, Tensor)]
    if isinstance(model, nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    around: AbstractContextManager[Any] = nullcontext()
    if device is not None or any(t.device.type == "meta" or _compat.is_fake(t) for t in tensors):
        if measure:
            raise ValueError(
                "measure=True runs the model: it needs real weights and inputs, where they are, and no device="
            )
        _refuse_untraceable(tensors)
        around = _compat.fake_mode(tensors)
        model, inputs, kwargs = _as_fake(model, inputs, kwargs, around, traced_on(device or torch.device("cpu")))
    backend = DryBackend(settings, speeds, measure=measure)
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    with around:
        before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        if isinstance(model, nn.Module):
            backend.adopt(model)
        try:
            with (
                _compat.graph_breaks_logged() as breaks,
                torch.random.fork_rng(),
                torch.enable_grad(),
                _compat.compiled_for_once(model, backend) as compiled,
            ):
                results = _compat.flatten(compiled(*inputs, **kwargs))
                used = set(map(id, _compat.upstream_leaves(results)))
                if measure:
                    _repeat(compiled, inputs, kwargs)
        finally:
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(before[name])
    middle = {key: statistics.median(times[1:] or times) for key, times in backend.times.items()}
    return Tried(
        backend,
        model,
        used,
        tuple(breaks),
        {number: seconds for (kind, number, _), seconds in middle.items() if kind == "forward"},
        {(number, index): seconds for (kind, number, index), seconds in middle.items() if kind == "piece"},
    )


def traced_on(device: torch.device) -> torch.device:
    """Where graphs for this device are traced: for the CPU where torch does not find it.

    A torch that was built without CUDA ends the process on fake CUDA tensors; one that was built with it, on a machine
    without a GPU, raises in their backward.
    """
    if device.type in ("cpu", "meta") or (device.type == "cuda" and torch.cuda.is_available()):
        return torch.device("cpu") if device.type == "meta" else device
    return torch.device("cpu")


def _refuse_untraceable(tensors: Sequence[Tensor]) -> None:
    """Raises for fake tensors on a device that torch does not find."""
    for tensor in tensors:
        if _compat.is_fake(tensor) and tensor.device != traced_on(tensor.device):
            raise ValueError(
                f"torch finds no {tensor.device.type} here, and cannot trace fake tensors there: make the model "
                f"on cpu or meta and pass device={tensor.device.type!r}"
            )


def _as_fake(
    model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any], mode: Any, device: torch.device
) -> tuple[Any, Any, Any]:
    """A copy of model and inputs that has shapes and no data."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"device= and models without data need an nn.Module, got {type(model).__name__}")

    def fake(tensor: Tensor) -> Tensor:
        where = tensor.device if _compat.is_fake(tensor) else device
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    memo: dict[int, Any] = {id(tensor): fake(tensor) for tensor in (*model.parameters(), *model.buffers())}
    values = _compat.map_tensors(fake, (tuple(inputs), dict(kwargs)))
    return copy.deepcopy(model, memo), *values


def _repeat(compiled: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for _ in range(REPEATS):
        results = [
            value
            for value in _compat.flatten(compiled(*inputs, **kwargs))
            if isinstance(value, Tensor) and value.requires_grad
        ]
        leaves = [leaf for leaf in _compat.upstream_leaves(results) if leaf.requires_grad]
        if leaves:
            torch.autograd.grad(results, leaves, [torch.ones_like(value) for value in results], allow_unused=True)
