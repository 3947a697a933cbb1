"""Autograd: what the running backward will do, and the hooks of a parameter."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Identifies the running backward; -1 outside of one."""

_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Runs a function at the end of the running backward; dropped if the backward raises."""


def profiling() -> bool:
    """Whether a profiler of torch's records."""
    return profiler._is_profiler_enabled


def sequence_number() -> int:
    """Number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def compiled_node(tensors: Sequence[Any], since: int) -> Any:
    """The backward node that AOTAutograd's function made for these results, not older than `since`, or None.

    Results that are views, or inputs written to, have nodes of their own before it.
    """
    seen = set()
    stack = [t.grad_fn for t in reversed(tensors) if isinstance(t, Tensor) and t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen or node._sequence_nr() < since or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        if type(node).__name__ == "CompiledFunctionBackward":
            return node
        stack += [parent for parent, _ in node.next_functions if parent is not None]
    return None


def accumulates(leaf: Tensor) -> bool:
    """Whether the running, unrestricted backward accumulates into this leaf, or has done so already."""
    with torch.enable_grad():
        node: Any = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return bool(torch._C._will_engine_execute_node(node))


def keep_until_read(tensor: Tensor) -> None:
    """Keeps a CUDA tensor's memory from being used again before what this stream does with it is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def upstream_leaves(arguments: Sequence[Any]) -> list[Tensor]:
    """Leaves that these values were computed from."""
    seen = set()
    leaves = []
    stack = [value.grad_fn for value in arguments if isinstance(value, Tensor) and value.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack += [parent for parent, _ in node.next_functions if parent is not None]
    return leaves


def compiled_autograd_enabled() -> bool:
    """True where compiled autograd would capture a backward; it never runs the compiled backward it is given."""
    from torch._dynamo import compiled_autograd

    return bool(
        torch._dynamo.config.compiled_autograd
        or compiled_autograd.compiled_autograd_enabled
        or compiled_autograd.in_compiled_autograd_region
    )


def distributed_autograd() -> bool:
    """Whether a hook runs in a backward of `torch.distributed.autograd`, whose engine does not say where it is."""
    return task_id() >= 0 and torch._C._current_autograd_node() is None


_guards: Any = torch._C._dynamo.guards
alias: Callable[..., Tensor] = _guards._reinterpret_tensor
"""`alias(tensor, shape, strides, offset=0)`: a tensor over the same memory that is no view to autograd.

So users may `detach_()` a `.grad` made by it. It passes by the dispatcher, which costs more than the alias itself.
"""


def weak_memory(tensor: Tensor) -> Any:
    """Names the memory a tensor lies in without keeping it alive; equal for the same memory, and never for other."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def no_view(tensor: Tensor) -> Tensor:
    """The same values in the same memory, not as a view."""
    return alias(tensor, tensor.shape, tensor.stride()) if tensor._is_view() else tensor


def hooks_after_accumulation(parameter: Tensor) -> Any:
    """The parameter's post-accumulate-grad hooks by id, in call order; None if it has none."""
    return parameter._post_accumulate_grad_hooks


def put_first(hooks: Any, key: int) -> None:
    """Has one of these hooks called before the others. Autograd goes by the order in which a dict was filled."""
    ours = hooks.pop(key)
    others = list(hooks.items())
    hooks.clear()
    hooks[key] = ours
    hooks.update(others)


def hooks_before_accumulation(parameter: Tensor) -> Any:
    """The parameter's tensor hooks; falsy if it has none."""
    return parameter._backward_hooks


def spare_undefined(parameter: Tensor) -> dict[int, Any]:
    """Has a parameter's tensor hooks not be called for an undefined gradient; returns them by id, for `spare_no_more`.

    Those of `register_multi_grad_hook` count how often they are called, and know what None means.
    """
    hooks: Any = parameter._backward_hooks
    spared = {key: hook for key, hook in hooks.items() if getattr(hook, "__qualname__", "") != _COUNTS_CALLS}
    for key, hook in spared.items():
        hooks[key] = _unless_undefined(hook)
    return spared


_COUNTS_CALLS = "register_multi_grad_hook.<locals>.get_inner_hook.<locals>.inner_hook"


def _unless_undefined(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor | None], Tensor | None]:
    return lambda gradient: None if gradient is None else hook(gradient)


def spare_no_more(parameter: Tensor, spared: dict[int, Any]) -> None:
    """Takes back `spare_undefined`."""
    hooks: Any = parameter._backward_hooks
    hooks.update({key: hook for key, hook in spared.items() if key in hooks})


def creates_graph() -> bool:
    """Whether the running backward was asked for a graph of its own (`create_graph=True`), called from a hook in it."""
    return torch.is_grad_enabled()


def in_backward() -> bool:
    """Whether this thread runs a backward, as when a checkpoint computes again."""
    return task_id() >= 0


def unshared(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing but Python holds any of these tensors: no node of autograd's that accumulates into them."""
    return max(map(_uses, tensors), default=1) == 1


def run_other_accumulation_hooks(parameter: Tensor) -> None:
    """Calls the post-accumulate-grad hooks of a parameter, but for the first, which is ours."""
    for hook in list(parameter._post_accumulate_grad_hooks.values())[1:]:
        hook(parameter)


def data_version(tensor: Tensor) -> int:
    """Changes when a tensor is written to."""
    return tensor._version


def is_nested() -> bool:
    """Whether the running backward was started inside another one's node, as by a re-entrant checkpoint."""
    frame, started = sys._getframe(1), False
    while frame is not None:
        started = started or frame.f_code is _ENGINE
        if started and frame.f_code is _NODE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_NODE = torch.autograd.function.BackwardCFunction.apply.__code__
