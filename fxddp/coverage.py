"""Hooks only where coverage is not proven.

Note [coverage]: a hook on a parameter notices what autograd accumulates outside of the graphs. It is Python that runs
for each parameter in each backward, and hardly ever has anything to notice. So the parameters of a graph have none as
long as each backward that may come to them executes the node of the graph's last forward, and all their gradients go
the usual way there: the node takes what `.grad` held, so what is there at the end was accumulated elsewhere. They get
hooks, for good and before autograd accumulates anything, in the first backward that does not execute that node, which
is asked when it begins, while some graph of autograd's holds one of them: graphs of other models do not. They get them
as well in the first that takes another way through the node, which is known before it hands on to the parameters. What
no graph answers for gets its hook when the first such backward begins. Graphs of one backend that pack the same
parameters, such as one for each batch size, are one in this: each forward's node is the last one's then. A backward
that C++ starts, and that comes through no graph, is not seen to begin: there only hooks notice.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import _compat
from .watchers import Watchers, hook_waiting, unreached, watchers_of

if TYPE_CHECKING:
    from .backend import Backend

_bare: "weakref.WeakValueDictionary[frozenset[int], Coverage]" = weakref.WeakValueDictionary()
"""Those whose parameters have no hooks, by the ids of the backend and of the parameters' watchers."""

_grad = attrgetter("grad")


class Coverage:
    """Whether the parameters that graphs pack go without hooks.

    Attributes:
        bare: they do.
    """

    def __init__(self, key: frozenset[int], watchers: Sequence[Watchers]) -> None:
        self.bare = False
        self._key = key
        self._node: weakref.ref[Any] | None = None
        self._watchers = list(watchers)
        if watchers and all(each.claim(self.end) for each in watchers):
            self.bare = True
            _bare[key] = self
        else:
            self.end()

    def expect(self, node: Any) -> None:
        """A forward ran, and this is the node that its backward will execute."""
        self._node = weakref.ref(node)

    def executes(self) -> bool:
        """Whether the running backward will come through the graph."""
        node = None if self._node is None else self._node()
        return node is not None and _compat.executes(node)

    def unreached(self) -> bool:
        """Whether the running backward comes to none of the parameters."""
        return unreached(self._watchers)

    def end(self) -> None:
        """From now on hooks notice what autograd accumulates in the parameters."""
        self.bare = False
        _bare.pop(self._key, None)
        watchers, self._watchers = self._watchers, []
        for each in watchers:
            each.hook()


def coverage_of(parameters: Iterable[Tensor], backend: "Backend") -> Coverage:
    """That of the parameters that a graph packs; the same for all graphs of a backend that pack these."""
    watchers = [watchers for p in parameters if (watchers := watchers_of(p)) is not None]
    key = frozenset(map(id, (backend, *watchers)))
    return _bare.get(key) or Coverage(key, watchers)


@dataclass(frozen=True, slots=True)
class Passage:
    """The usual way of one backward through a graph.

    Attributes:
        bare: the graph's parameters had no hooks.
        by_bucket: the parameters whose gradients it packed.
    """

    bare: bool
    by_bucket: Sequence[Sequence[Tensor]]

    def accumulated_elsewhere(self) -> list[Tensor]:
        """Called before `.grad`s are written: the parameters autograd has accumulated into, unnoticed by hooks."""
        if not self.bare or all(all(map(is_, map(_grad, members), repeat(None))) for members in self.by_bucket):
            return []
        return [parameter for parameter in chain.from_iterable(self.by_bucket) if parameter.grad is not None]


def end_all() -> None:
    """Hooks for all parameters: a backward runs that nobody saw begin."""
    _begins(inside=False)


def _begins(inside: bool) -> None:
    hook_waiting(inside=inside)
    for reference in _bare.valuerefs():
        coverage = reference()
        if coverage is not None and not (inside and (coverage.executes() or coverage.unreached())):
            coverage.end()


_compat.observe_backwards(_begins)
