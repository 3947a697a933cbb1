"""The hook of a parameter, which notices what autograd accumulates, and the backends that share it."""

import weakref
from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _compat

if TYPE_CHECKING:
    from .uncovered import Watch

_watchers: dict[int, "Watchers"] = {}
"""By id of the parameter."""

_waiting: dict[int, "Watchers"] = {}
"""Those for which it is not decided who answers, and those of what was no leaf then; by id of the parameter."""

PATIENCE = 32
"""Backwards of others after which those that wait get hooks all the same: asking takes time for each of them."""


class Watchers:
    """All that watch one parameter; keeps neither them nor the parameter alive.

    One of them answers for it in a backward: one that averages there, else one that runs there, else the last to come.
    The parameter has no hook before one is needed, see Note [coverage].
    """

    def __init__(self, parameter: Tensor) -> None:
        identity = id(parameter)

        def forget(_: object) -> None:
            _watchers.pop(identity, None)
            _waiting.pop(identity, None)

        self.parameter = weakref.ref(parameter, forget)
        self._watches: list[weakref.ref[Watch]] = []
        self._hooked = False
        self._claimed_by: Callable[[], None] | None = None
        _watchers[identity] = self
        self._waited = 0
        _waiting[identity] = self
        if _compat.in_backward():
            self.hook()

    def add(self, watch: "Watch") -> None:
        """Has one more answer."""
        self._watches = [reference for reference in self._watches if reference() is not None]
        self._watches.append(weakref.ref(watch))

    def alive(self) -> list["Watch"]:
        """Those that are still there, the last to come first."""
        return [watch for reference in reversed(self._watches) if (watch := reference()) is not None]

    def claim(self, end: Callable[[], None]) -> bool:
        """Goes without a hook from now on, unless there is one, or a need for one; whether it does.

        Args:
            end: is called where a hook is needed.
        """
        if self._hooked or self._claimed_by is not None:
            return False
        self._claimed_by = end
        return True

    def hook(self) -> None:
        """Has a hook notice what autograd accumulates, before the user's own hooks; as soon as it is a leaf."""
        parameter = self.parameter()
        if self._hooked or parameter is None:
            return
        if parameter.is_leaf:
            self._hooked = True
            self._register(parameter)
        else:
            _waiting[id(parameter)] = self
        end, self._claimed_by = self._claimed_by, None
        if end is not None:
            end()

    def _register(self, parameter: Tensor) -> None:
        frozen = not parameter.requires_grad
        if frozen:  # a hook can only be put on a parameter that requires grad; it stays when that is taken back
            parameter.requires_grad_(True)
        handle = parameter.register_post_accumulate_grad_hook(_hook(self))
        if frozen:
            parameter.requires_grad_(False)
        _compat.put_first(_compat.hooks_after_accumulation(parameter), handle.id)

    def wait_once_more(self) -> bool:
        """Counts one more backward to wait for; whether that was not too many."""
        self._waited += 1
        return self._waited <= PATIENCE

    def hook_unless_claimed(self) -> None:
        """`hook`, where nothing else answers for the parameter."""
        if self._claimed_by is None:
            self.hook()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a whole training step may be compiled
    def accumulated(self, parameter: Tensor) -> None:
        """Has one of them note what autograd accumulated."""
        watches = self.alive()
        if watches:
            (watches[0] if len(watches) == 1 else max(watches, key=methodcaller("concern"))).accumulated(parameter)


def hook(parameter: Tensor) -> None:
    """Has a hook on a watched parameter from now on."""
    watchers = watchers_of(parameter)
    if watchers is not None:
        watchers.hook()


def hook_waiting(*, inside: bool) -> None:
    """Hooks for all parameters that nothing else answers for: a backward begins, which may come to them.

    Args:
        inside: it has begun, so that autograd's graphs hold all that it comes to; it does not start from a leaf.
    """
    waiting = list(_waiting.values())
    if waiting and inside and waiting[0].wait_once_more() and unreached(waiting):
        return
    for identity in list(_waiting):
        watchers = _waiting.pop(identity, None)
        if watchers is not None:
            watchers.hook_unless_claimed()


def _hook(watchers: Watchers) -> Callable[[Tensor], None]:
    """The hook on a watched parameter.

    Autograd calls it for every parameter in every backward, most of which have no gradient then.
    """

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            watchers.accumulated(parameter)

    return _compat.only_inlined(hook)  # type: ignore[no-any-return]  # unlike a disabled one, costs nothing more


def unreached(watchers: Iterable[Watchers]) -> bool:
    """Whether no backward that runs comes to any of these parameters: what accumulates in one holds it."""
    return _compat.unshared([p for each in watchers if (p := each.parameter()) is not None])


def watchers_of(parameter: Tensor) -> Watchers | None:
    """Those that watch a parameter."""
    found = _watchers.get(id(parameter))
    return found if found is not None and found.parameter() is parameter else None


def watched(parameter: Tensor) -> bool:
    """Whether anything watches a parameter."""
    watchers = watchers_of(parameter)
    return watchers is not None and bool(watchers.alive())
