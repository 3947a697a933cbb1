"""Tools for jobs that look at single backwards: small models, data, gradients by hand, comparisons in words."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxddp
from fxddp.backend import by_name

Gradients = dict[str, Tensor | None]
SMALL = 0.001  # MiB: several buckets even in these models


class Mlp(nn.Module):
    """Three layers, of which no two parameters have the same shape."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, width), nn.Linear(width, width + 1), nn.Linear(width + 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


class Recurrent(nn.Module):
    """Dynamo compiles nothing of a model with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def small_backend(**options: Any) -> fxddp.Backend:
    """A backend with buckets so small that these models have several, which runs operators one by one."""
    usual: dict[str, Any] = {"bucket_mb": SMALL, "first_bucket_mb": SMALL, "inner": "aot_eager"}
    return fxddp.backend(**usual | options)


def compiled(module: nn.Module, **options: Any) -> tuple[Any, fxddp.Backend]:
    """The compiled module and its `small_backend`."""
    backend = small_backend(**options)
    return torch.compile(module, backend=backend), backend


def register_name() -> None:
    """Gives torch the name "fxddp", as an installed fxddp does: the tests run from the source folder as well."""
    if "fxddp" not in torch._dynamo.list_backends(exclude_tags=None):
        torch._dynamo.register_backend(by_name, name="fxddp")


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    """A module with the weights that this seed draws."""
    torch.manual_seed(seed)
    return make()


def data(i: int, *shape: int, rank: int | None = None) -> Tensor:
    """Normal numbers, others for each `i` and rank."""
    rank = dist.get_rank() if rank is None and dist.is_initialized() else rank or 0
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * i + rank + 17))


def loss_of(model: Any, i: int) -> Tensor:
    """The loss of the `i`th batch of a model that takes 8 features."""
    return model(data(i, 6, 8)).square().mean()


def gradients(module: nn.Module) -> Gradients:
    """Copies of all `.grad`."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in module.named_parameters()}


def local_gradients(module: nn.Module, *losses: Callable[[nn.Module], Tensor]) -> Gradients:
    """What an eager copy of the module accumulates over these losses, on this rank alone."""
    module = copy.deepcopy(module)
    module.zero_grad()
    for loss in losses:
        loss(module).backward()
    return gradients(module)


def local(module: nn.Module, *numbers: int) -> Gradients:
    """`local_gradients` of these batches."""
    return local_gradients(module, *(partial(loss_of, i=i) for i in numbers))


def average(gradients: Mapping[str, Tensor | None], group: dist.ProcessGroup | None = None) -> Gradients:
    """The averages over the ranks, by hand; None stays None."""
    scale = 1.0 / dist.get_world_size(group)
    averages: Gradients = {}
    for name, gradient in gradients.items():
        if gradient is None:
            averages[name] = None
        else:
            averages[name] = flat = gradient * scale
            dist.all_reduce(flat, group=group)
    return averages


def total(*several: Mapping[str, Tensor | None]) -> Gradients:
    """The sums of gradients, as `.grad` accumulates them."""
    sums: Gradients = {}
    for name in several[0]:
        present = [g for gradients in several if (g := gradients[name]) is not None]
        sums[name] = sum(present[1:], start=present[0].clone()) if present else None
    return sums


def expect_equal(
    got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], what: str, tol: float = 0.0
) -> None:
    """Raises unless all tensors are equal: bit by bit, or relative to the largest value.

    The order in which more than two ranks are added depends on a gradient's place in its bucket.
    """
    if dist.is_initialized() and dist.get_world_size() > 2:
        tol = max(tol, 1e-5)
    assert got.keys() == expected.keys(), f"{what}: {sorted(got)}, expected {sorted(expected)}"
    wrong = []
    for name, want in expected.items():
        have = got[name]
        if have is None or want is None:
            if have is not want:
                wrong.append(f"{name} is {_kind(have)}, expected {_kind(want)}")
        elif have.shape != want.shape or have.dtype != want.dtype:
            wrong.append(f"{name} is {_kind(have)}, expected {_kind(want)}")
        elif not torch.equal(have, want):
            error, size = (have - want).abs().max().item(), want.abs().max().item()
            if not error <= tol * (size + 1e-3):
                wrong.append(f"{name} is off by {error:.3g} of {size:.3g}")
    assert not wrong, f"{what} on rank {dist.get_rank() if dist.is_initialized() else 0}: {'; '.join(wrong)}"


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def expect(holds: object, what: str) -> None:
    """Raises unless this holds; workers have no pytest to show what an assertion compared."""
    if not holds:
        raise AssertionError(f"{what} (rank {dist.get_rank() if dist.is_initialized() else 0})")


def launches(backend: fxddp.Backend) -> list[int]:
    """All-reduces of each recorded backward, in graphs and outside."""
    return [record.launches + record.uncovered_launches for record in backend.stats().backwards]


def buckets(backend: fxddp.Backend) -> int:
    """All buckets of the backend's plans that hold something."""
    return sum(bool(bucket.nbytes) for plan in backend.plans for bucket in plan.buckets)


def error_of(call: Callable[[], object], what: str = "this") -> BaseException:
    """What a call raises; an error if it raises nothing."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 (accidents and interrupts are what is looked for)
        return error
    raise AssertionError(f"{what} raised nothing")


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Collects the names of the collectives that this process starts inside, whoever starts them."""
    started: list[str] = []
    kinds = (
        "allreduce",
        "broadcast",
        "allgather",
        "_allgather_base",
        "alltoall_base",
        "barrier",
        "reduce_scatter",
        "gather",
        "scatter",
    )
    originals = {kind: vars(dist.ProcessGroup)[kind] for kind in kinds}

    def spy(kind: str) -> Any:
        def start(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
            started.append(kind)
            return originals[kind].__get__(group)(*arguments, **options)

        return start

    for kind in kinds:
        setattr(dist.ProcessGroup, kind, spy(kind))
    try:
        yield started
    finally:
        for kind, original in originals.items():
            setattr(dist.ProcessGroup, kind, original)
