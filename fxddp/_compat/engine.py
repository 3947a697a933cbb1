"""Autograd's engine: what a backward was asked for, and who is told when one begins.

Checked on torch 2.11.0, 2.13.0 and 2.14.1: every backward that Python starts goes through
`Variable._execution_engine.run_backward`. Those started in C++, as by TorchScript's `backward`, do not, and are asked
about leaf by leaf.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from .autograd import compiled_autograd_enabled, task_id

_first = itemgetter(0)
_observers: list[Callable[[bool], None]] = []
_begun: dict[int, "_Beginning"] = {}
"""Of running backwards that were seen to begin, by task."""
_telling = threading.RLock()
"""Held until observers are through: autograd has a thread for each device, and none may go on before."""

_EngineClass: Any = type(Variable._execution_engine)

_comes_to: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward executes a node; False for the one it starts from. Raises for what is captured."""


def executes(node: Any) -> bool:
    """Whether the running backward, called from inside of it, executes a node."""
    beginning = _begun.get(task_id())
    return _comes_to(node) or (beginning is not None and any(node is root for root in beginning.roots))


def observe_backwards(observer: Callable[[bool], None]) -> None:
    """Has a function called when a backward that accumulates begins, before autograd accumulates anything in it.

    It is called from within the backward, with True, so that it may ask what `executes`; or with False, before the
    backward begins, where a leaf is among what the backward starts from, or compiled autograd would trace that call.
    """
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()
    if observer not in _observers:
        _observers.append(observer)


class _Beginning:
    """A hook on the nodes that a backward starts from; counts once.

    Args:
        tensors: what the backward starts from.
        restricted: it accumulates in some leaves only.

    Attributes:
        roots: the nodes, None for a leaf.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a whole training step may be compiled
    def __init__(self, tensors: Sequence[Any], *, restricted: bool) -> None:
        self._task = -1
        self.restricted = restricted
        self.roots = [tensor.grad_fn if isinstance(tensor, Tensor) else tensor.node for tensor in tensors]
        if compiled_autograd_enabled():
            self.roots = [None]
        if None in self.roots:
            _tell(inside=False)
        self._handles = [node.register_prehook(self) for node in self.roots if node is not None]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *_: object) -> None:
        with _telling:
            if self._task < 0:
                self._task = task_id()
                _begun[self._task] = self
                _tell(inside=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def over(self) -> None:
        """The backward is over."""
        _begun.pop(self._task, None)
        for handle in self._handles:
            handle.remove()


def _tell(*, inside: bool) -> None:
    with _telling:
        for observer in _observers:
            observer(inside)


class _Engine(_EngineClass):  # type: ignore[misc]
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # what is called may be compiled
    def run_backward(self, tensors: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        """As the engine's, which takes: gradients, keep_graph, create_graph, inputs, allow_unreachable, accumulates."""
        inputs = arguments[3] if len(arguments) > 3 else options.get("inputs")
        accumulates = arguments[5] if len(arguments) > 5 else options.get("accumulate_grad")
        if not accumulates:
            return super().run_backward(tensors, *arguments, **options)
        beginning = _Beginning(tensors, restricted=bool(inputs))
        try:
            return super().run_backward(tensors, *arguments, **options)
        finally:
            beginning.over()


def seen_to_begin() -> bool:
    """Whether the running backward's beginning was told to observers."""
    return task_id() in _begun


def accumulates_everywhere() -> bool:
    """Whether the running backward accumulates into all leaves: no `autograd.grad`, nor `backward(inputs=…)`."""
    return bool(Variable._execution_engine.is_checkpoint_valid())


def restricted_to() -> set[int] | None:
    """Which leaves accumulate in the running backward, called from a node of it.

    Returns:
        None if all do, as in a plain `backward()`; else the ids of those of this node's leaves that do:
        `backward(inputs=…)` names some, `autograd.grad` accumulates nowhere.
    """
    beginning = _begun.get(task_id())
    if beginning is not None and not beginning.restricted:
        return None
    node: Any = torch._C._current_autograd_node()
    with suppress(RuntimeError):  # autograd.grad captures one of them
        if all(map(_comes_to, filter(None, map(_first, node.next_functions)))):
            return None
        executed = [parent for parent, _ in node.next_functions if parent is not None and _comes_to(parent)]
        return {id(parent.variable) for parent in executed if hasattr(parent, "variable")}
    return set()
