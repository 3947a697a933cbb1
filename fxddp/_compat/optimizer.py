"""What is private in torch's optimizers and of use to an update in backward. Checked on 2.11 to 2.14."""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim import optimizer as optim_module

from .dynamo import with_own_code
from .wrapping import wrap, wrap_inside

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
ROUNDS_AS_EAGER: dict[str, Any] = {"emulate_precision_casts": True}
"""Has inductor round values of 16 bits, as in Muon's iteration, after each operation: fused it would not in between."""

_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether a user registered hooks around `step`, of this optimizer or of all."""
    return any(getattr(optimizer, name, None) for name in _HOOKS) or any(map(vars(optim_module).get, _GLOBAL_HOOKS))


def part_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class with the same state and settings, for some of the parameters."""
    part: Optimizer = object.__new__(type(optimizer))
    part.__dict__.update(vars(optimizer))
    part.__dict__.pop("step", None)  # a learning rate scheduler's, bound to the whole optimizer
    part.__dict__.update((name, OrderedDict()) for name in _HOOKS)
    part.param_groups = groups
    return part


def step_to_compile(optimizer: Optimizer, name: str) -> Callable[[], None] | None:
    """What an optimizer's `step` computes, compiled, to be called with grad off; None where torch has it not compiled.

    torch compiles `step` by itself, after the graph breaks of its decorators: one code object for all optimizers of a
    class, of which it compiles eight. Here is the function within, with a code object of its own.

    Args:
        optimizer: made by `part_of`, so that there are no hooks around the step.
        name: the function's, in torch's logs.
    """
    step: Any = type(optimizer).step
    while not getattr(step, "_torchdynamo_disable", False):
        if not hasattr(step, "__wrapped__"):
            return functools.partial(torch.compile(with_own_code(step, name), options=ROUNDS_AS_EAGER), optimizer)
        step = step.__wrapped__
    return None


def optimizers_of_parameters() -> tuple[int, int]:
    """Changes when `torch.distributed.optim._apply_optimizer_in_backward` gives parameters an optimizer; or (0, 0)."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return (0, 0) if module is None else (len(module.param_to_acc_grad_map), len(module.param_to_optim_hook_handle_map))


class OptimizerOfEach(Optimizer):
    """Steps the optimizers that `_apply_optimizer_in_backward` gave to parameters, in place of the hooks that do so.

    Args:
        parameters: of which `has_optimizer` is true.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})
        hooks = sys.modules["torch.distributed.optim.apply_optimizer_in_backward"].param_to_optim_hook_handle_map
        for parameter in _members(self):
            for handle in hooks.pop(parameter, ()):
                handle.remove()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps the optimizers of the parameters in its groups."""
        for parameter in _members(self):
            for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()


def has_optimizer(parameter: Tensor) -> bool:
    """Whether `_apply_optimizer_in_backward` gave a parameter an optimizer."""
    return hasattr(parameter, "_in_backward_optimizers")


def note_step(optimizer: Optimizer) -> None:
    """Tells learning rate schedulers that the optimizer made its step."""
    vars(optimizer)["_opt_called"] = True


def before_clipping(guard: Callable[[Iterable[Tensor]], None]) -> None:
    """Has `guard` look at the parameters whose gradients a function of `torch.nn.utils` is about to clip.

    `clip_grad_norm_` is one of them: it ends with the first of these.
    """

    def guarded(clip: Callable[..., None], parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        guard(parameters)
        clip(parameters, *args, **kwargs)

    wrap_inside(clip_grad._clip_grads_with_norm_, guarded)
    wrap_inside(clip_grad.clip_grad_value_, guarded)


def before_unscaling(guard: Callable[[Iterable[Tensor]], None]) -> None:
    """Has `guard` look at the parameters of an optimizer whose gradients a `torch.amp.GradScaler` is about to use."""

    def guarded(method: Callable[..., Any], self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            guard(_members(optimizer))
        return method(self, optimizer, *args, **kwargs)

    wrap(GradScaler, "unscale_", guarded)
    wrap(GradScaler, "step", guarded)


@functools.cache
def before_saving(settle: Callable[[Iterable[Tensor]], None]) -> None:
    """Has `settle` called with the parameters of a module or optimizer that is about to be saved, loaded or copied."""
    saved: tuple[tuple[type, Callable[[Any], Iterable[Tensor]], tuple[str, ...]], ...] = (
        (torch.nn.Module, lambda module: module.parameters(), ("state_dict", "load_state_dict")),
        (torch.nn.Parameter, lambda parameter: (parameter,), ("__deepcopy__", "__reduce_ex__")),
        (Optimizer, _members, ("state_dict", "load_state_dict", "__getstate__")),
    )
    for owner, members, names in saved:
        for name in names:
            wrap(owner, name, functools.partial(_settled, settle, members))


def _members(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _settled(
    settle: Callable[[Iterable[Tensor]], None],
    members: Callable[[Any], Iterable[Tensor]],
    method: Callable[..., Any],
    owner: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.compiler.is_compiling():
        settle(members(owner))
    return method(owner, *args, **kwargs)


def when_scaled(note: Callable[[], None]) -> None:
    """Has `note` called in every backward through a loss that a `torch.amp.GradScaler` has scaled."""

    def noted(scale: Callable[..., Any], self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        for tensor in [scaled] if isinstance(scaled, Tensor) else scaled:
            if self.is_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: note())
        return scaled

    wrap(GradScaler, "scale", noted)
