"""One training program, run under different adapters, and what differs between two runs of it.

The yardstick is `Manual`: the plain eager model, rank 0's weights copied to all ranks first, and every gradient
averaged by hand with a plain all-reduce after each synchronised backward. Stock DistributedDataParallel (`Stock`) and
fxddp (`Fxddp`) run the same program from the same seeds and must come to the same gradients, parameters and buffers.

A program is a model function `model_fn(rank) -> nn.Module` and a step function `step_fn(ctx, i)`. The step calls
`ctx.model`, and `ctx.backward(loss)` in place of `loss.backward()`: there the adapters differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxddp

Tensors = dict[str, Tensor | None]
Hook = Callable[[Tensor], None]


@dataclass
class Run:
    """What a program did, copied out of it."""

    gradients: list[Tensors] = field(default_factory=list)  # by parameter name, at each synchronised backward
    parameters: Tensors = field(default_factory=dict)  # at the end
    buffers: Tensors = field(default_factory=dict)  # at the end
    watched: Tensors = field(default_factory=dict)  # what the step handed to `ctx.watch`
    problems: list[str] = field(default_factory=list)  # wrong whatever the yardstick says: the strides of a gradient


# ---- adapters -----------------------------------------------------------------------------------------------------


class Manual:
    """The yardstick: eager, averaged by hand.

    `fault` breaks it on purpose ("local": nothing is averaged, "unequal": rank 0's weights are not copied), to see
    that a scenario notices.
    """

    def __init__(self, *, fault: str = "", inner: str = "") -> None:
        self.fault = fault
        self.inner = inner  # with an inner compiler: a plain torch.compile, which tells its rounding from fxddp's
        self.hooks: list[tuple[nn.Parameter, Hook]] = []

    def share(self, module: nn.Module) -> nn.Module:
        """Copy rank 0's state now, and its buffers before every forward, as DistributedDataParallel does."""
        if self.fault != "unequal":
            _copy_from_rank_0([*module.parameters(), *module.buffers()])
            if next(module.buffers(), None) is not None:
                module.register_forward_pre_hook(lambda module, _: _copy_from_rank_0(module.buffers()))
        return module

    def compile(self, fn: Any, **options: Any) -> Any:
        return torch.compile(fn, backend=self.inner, **options) if self.inner else fn

    def compile_in_place(self, module: nn.Module) -> None:
        if self.inner:
            module.compile(backend=self.inner)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def after_backward(self, parameters: Iterable[nn.Parameter]) -> None:
        if self.fault != "local":
            average_gradients(parameters)
        for parameter, hook in self.hooks:
            if parameter.grad is not None:
                hook(parameter)

    def on_gradient(self, parameter: nn.Parameter, hook: Hook) -> None:
        self.hooks.append((parameter, hook))


class Stock:
    """Stock DistributedDataParallel over the eager model."""

    def __init__(self, *, bucket_mb: float, options: dict[str, Any] | None = None) -> None:
        self.options = {"bucket_cap_mb": bucket_mb} | (options or {})
        self.models: list[nn.parallel.DistributedDataParallel] = []

    def share(self, module: nn.Module) -> nn.Module:
        self.models.append(nn.parallel.DistributedDataParallel(module, **self.options))
        return self.models[-1]

    def compile(self, fn: Any, **options: Any) -> Any:
        return fn

    def compile_in_place(self, module: nn.Module) -> None:
        """Eager."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.no_sync())
            yield

    def after_backward(self, parameters: Iterable[nn.Parameter]) -> None:
        """The hooks have averaged."""

    def on_gradient(self, parameter: nn.Parameter, hook: Hook) -> None:
        parameter.register_post_accumulate_grad_hook(hook)


class Fxddp:
    """torch.compile with fxddp's backend."""

    def __init__(
        self, *, bucket_mb: float, inner: str = "aot_eager", split: bool = True, options: dict[str, Any] | None = None
    ) -> None:
        self.options: dict[str, Any] = {"bucket_mb": bucket_mb, "first_bucket_mb": bucket_mb}
        self.options |= {"inner": inner, "split": split} | (options or {})
        self.backends: list[Any] = []
        self.new_backend()

    def new_backend(self) -> None:
        """What is compiled from now on gets a backend of its own."""
        self.backends.append(fxddp.backend(**self.options))

    def share(self, module: nn.Module) -> nn.Module:
        """The backend shares the state of what it compiles."""
        return module

    def compile(self, fn: Any, **options: Any) -> Any:
        return torch.compile(fn, backend=self.backends[-1], **options)

    def compile_in_place(self, module: nn.Module) -> None:
        module.compile(backend=self.backends[-1])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for backend in self.backends:
                stack.enter_context(backend.no_sync())
            yield

    def after_backward(self, parameters: Iterable[nn.Parameter]) -> None:
        """The graphs have averaged."""

    def on_gradient(self, parameter: nn.Parameter, hook: Hook) -> None:
        parameter.register_post_accumulate_grad_hook(hook)


Adapter = Manual | Stock | Fxddp


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each .grad by its average over the ranks: None on every rank stays None, on some it counts as zeros."""
    parameters = list(dict.fromkeys(parameters))
    scale = 1.0 / dist.get_world_size()
    present = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    dist.all_reduce(present)
    with torch.no_grad():
        for parameter, ranks in zip(parameters, present.tolist(), strict=True):
            if not ranks:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            flat = (_real(gradient) * scale).contiguous()
            if flat.numel():
                dist.all_reduce(flat)
                _real(gradient).copy_(flat)


@torch.no_grad()
def _copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel():
            flat = _real(tensor).contiguous()
            dist.broadcast(flat, 0)
            _real(tensor).copy_(flat)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


# ---- running a program --------------------------------------------------------------------------------------------


class Context:
    """What a step sees: the model, its optimizer, data, and the few operations in which the adapters differ."""

    def __init__(self, adapter: Adapter, rank: int, world: int, raw: nn.Module) -> None:
        self.adapter = adapter
        self.rank = rank
        self.world = world
        self.raw = raw  # the plain module, whose parameters are trained
        self.model: Any = raw  # what the step calls; the program's wrapping puts it here
        self.opt: torch.optim.Optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))])
        self.run = Run()
        self.synchronised = True

    def wrap(self, module: nn.Module, **compile_options: Any) -> Any:
        """Make a module data-parallel; compiled under fxddp."""
        return self.adapter.compile(self.adapter.share(module), **compile_options)

    def new_backend(self) -> None:
        """What is wrapped from now on gets an fxddp backend of its own."""
        if isinstance(self.adapter, Fxddp):
            self.adapter.new_backend()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The forwards inside accumulate local gradients; their backwards as well, if they are inside."""
        self.synchronised = False
        with self.adapter.no_sync():
            yield
        self.synchronised = True

    def backward(self, loss: Tensor, *, synchronised: bool | None = None, retain_graph: bool = False) -> None:
        """Run backward, which averages and records gradients unless the forward was under `no_sync`."""
        loss.backward(retain_graph=retain_graph)
        if self.synchronised if synchronised is None else synchronised:
            self.adapter.after_backward(self.raw.parameters())
            self.record_gradients()

    def step(self, loss: Tensor) -> None:
        """The usual step: zero_grad, backward, optimizer."""
        self.opt.zero_grad()
        self.backward(loss)
        self.opt.step()

    def on_gradient(self, hook: Hook) -> None:
        """Call `hook(parameter)` for every parameter whose average has just arrived."""
        for parameter in self.raw.parameters():
            self.adapter.on_gradient(parameter, hook)

    def record_gradients(self) -> None:
        gradients: Tensors = {}
        for name, parameter in self.raw.named_parameters():
            gradients[name] = _copy(parameter.grad)
            if parameter.grad is not None and _strides(parameter.grad) != _strides(parameter):
                self.run.problems.append(
                    f"gradient of {name}: strides {parameter.grad.stride()}, its parameter has {parameter.stride()}"
                )
        self.run.gradients.append(gradients)

    def expect(self, holds: Any, problem: str) -> None:
        """Count `problem` as a difference unless this holds."""
        if not holds:
            self.run.problems.append(problem)

    def watch(self, name: str, tensor: Tensor | None) -> None:
        """Compare this tensor as well."""
        self.run.watched[f"{name} #{len(self.run.watched)}"] = _copy(tensor)

    def normal(self, i: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers, others on each rank and for each `i`."""
        return torch.randn(*shape, generator=self._generator(i)).to(dtype)

    def integers(self, i: int, high: int, *shape: int) -> Tensor:
        """Integers below `high`, others on each rank and for each `i`."""
        return torch.randint(high, shape, generator=self._generator(i))

    def _generator(self, i: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * i + self.rank + 17)


def train(
    model_fn: Callable[[int], nn.Module],
    step_fn: Callable[[Context, int], None],
    *,
    adapter: Adapter,
    rank: int,
    world: int,
    steps: int = 3,
    wrap: Callable[[Context], Any] = lambda ctx: ctx.wrap(ctx.raw),
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    same_weights: bool = False,
) -> Run:
    """Run `steps` steps and return what they did. Ranks start from different weights unless `same_weights`."""
    torch.manual_seed(1 if same_weights else 1 + rank)
    ctx = Context(adapter, rank, world, model_fn(rank))
    parameters = list(ctx.raw.parameters())
    ctx.opt = optimizer(parameters) if optimizer else torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    ctx.model = wrap(ctx)
    for i in range(steps):
        torch.manual_seed(100 + i)
        step_fn(ctx, i)
    ctx.run.parameters = {name: _copy(parameter) for name, parameter in ctx.raw.named_parameters()}
    ctx.run.buffers = {name: _copy(buffer) for name, buffer in ctx.raw.named_buffers()}
    return ctx.run


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _strides(tensor: Tensor) -> list[int]:
    """The strides that place elements: those of sizes above one."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


# ---- comparing two runs -------------------------------------------------------------------------------------------


def compare(reference: Run, got: Run, *, bitwise: bool, tol: float = 1e-4) -> list[str]:
    """What differs, in words; empty if nothing does.

    `tol` bounds the largest difference in a tensor, relative to its largest value (plus 0.01, for values that cancel).
    """
    found = list(got.problems)
    if len(reference.gradients) != len(got.gradients):
        found.append(f"{len(got.gradients)} synchronised backwards, expected {len(reference.gradients)}")
    for k, (expected, actual) in enumerate(zip(reference.gradients, got.gradients, strict=False)):
        found += _compare_all(f"backward {k}, gradient of ", expected, actual, bitwise, tol)
    found += _compare_all("at the end, parameter ", reference.parameters, got.parameters, bitwise, tol)
    found += _compare_all("at the end, buffer ", reference.buffers, got.buffers, bitwise, tol)
    found += _compare_all("", reference.watched, got.watched, bitwise, tol)
    return found


def _compare_all(where: str, expected: Tensors, actual: Tensors, bitwise: bool, tol: float) -> list[str]:
    names = f"{where}names: {sorted(actual)}, expected {sorted(expected)}"
    found = [names] if expected.keys() != actual.keys() else []
    for name in expected.keys() & actual.keys():
        difference = _difference(expected[name], actual[name], bitwise, tol)
        if difference:
            found.append(f"{where}{name}: {difference}")
    return sorted(found)


def _difference(expected: Tensor | None, actual: Tensor | None, bitwise: bool, tol: float) -> str:
    if expected is None or actual is None:
        return "" if expected is actual else f"{_describe(actual)}, expected {_describe(expected)}"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"{_describe(actual)}, expected {_describe(expected)}"
    expected, actual = _wide(expected), _wide(actual)
    equal = (expected == actual) | (expected.isnan() & actual.isnan())
    if equal.all():
        return ""
    largest = (expected - actual)[~equal].abs().max().item()
    size = expected.abs().max().item()
    if not bitwise and largest <= tol * (size + 0.01):  # False where it is not a number
        return ""
    count = int((~equal).sum())
    return f"differs by up to {largest:.3g} in {count} of {equal.numel()} elements, largest expected {size:.3g}"


def _describe(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _wide(tensor: Tensor) -> Tensor:
    tensor = _real(tensor)
    return tensor.double() if tensor.is_floating_point() else tensor.to(torch.float64)


def differences_between_ranks(tensors: Tensors) -> list[str]:
    """Where this rank's tensors are not bitwise those of rank 0, in words."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: None if t is None else _wide(t) for name, t in tensors.items()})
    found = _compare_all("", everyone[0], everyone[dist.get_rank()], bitwise=True, tol=0.0)
    return [f"not as on rank 0: {line}" for line in found]


def assert_same_on_all_ranks(tensors: Tensors) -> None:
    """Raise if this rank's tensors are not bitwise those of rank 0."""
    found = differences_between_ranks(tensors)
    assert not found, "\n".join(found)
