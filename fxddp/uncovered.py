"""Parameters that no compiled graph produced a gradient for: noticed by hooks, averaged at the end of the backward.

A parameter can be used in an eager gap, in a frame Dynamo gave up on, or outside of the module. A hook on each known
parameter (`watchers.py`) tells when autograd itself accumulated into it; parameters nobody told us about are looked for
when a set of parameters is seen for the first time.
"""

import itertools
import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from . import _compat
from .living import living
from .replica import digest
from .watchers import Watchers, watched, watchers_of

if TYPE_CHECKING:
    from .backend import Backend
    from .group import Group

_registered = itertools.count(1)
_last_registered = 0


def _count_parameter(*_: object) -> None:
    global _last_registered  # noqa: PLW0603 (torch calls back without state of ours)
    _last_registered = next(_registered)


register_module_parameter_registration_hook(_count_parameter)


def parameters_registered() -> int:
    """How often a module got a parameter since fxddp was imported."""
    return _last_registered


class Watch:
    """The parameters a backend is responsible for."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = weakref.ref(backend)
        self._names: dict[int, str] = {}
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self._pending: dict[int, weakref.ref[Tensor]] = {}
        self.explored = -1

    @property
    def unexplored(self) -> bool:
        """Whether backwards without a compiled graph of ours may hold parameters that nobody told us about."""
        return self.explored != _last_registered

    def __len__(self) -> int:
        return len(self._refs)

    def __contains__(self, parameter: Tensor) -> bool:
        reference = self._refs.get(id(parameter))
        return reference is not None and reference() is parameter

    def parameters(self) -> list[Tensor]:
        """Those that are watched."""
        return [parameter for reference in self._refs.values() if (parameter := reference()) is not None]

    def name(self, parameter: Tensor) -> str:
        """The parameter's qualified name as far as it is known."""
        return self._names.get(id(parameter)) or f"<parameter of shape {tuple(parameter.shape)}>"

    def add(self, parameter: Tensor, name: str, *, rename: bool = False) -> None:
        """Watches a parameter; with `rename` the name replaces one it has."""
        identity = id(parameter)
        if parameter in self:
            self._names[identity] = name if rename else self._names[identity] or name
            return
        if not isinstance(parameter, nn.Parameter) or is_lazy(parameter):
            return
        if not parameter.is_leaf or not _differentiable(parameter):
            return
        refuse_subclass(parameter, name)

        names, refs = self._names, self._refs

        def forget(_: object) -> None:
            names.pop(identity, None)
            refs.pop(identity, None)

        names[identity] = name
        refs[identity] = weakref.ref(parameter, forget)
        (watchers_of(parameter) or Watchers(parameter)).add(self)

    def concern(self) -> int:
        """`Backend.concern`."""
        backend = self._backend()
        return -1 if backend is None else backend.concern()

    def accumulated(self, parameter: Tensor) -> None:
        """Called after autograd has accumulated into a watched parameter."""
        backend = self._backend()
        if backend is None or (backend.lookup() is None and backend.registered.optimizer is None):
            return
        foreign = len(_compat.hooks_after_accumulation(parameter)) > 1
        backend.backward().accumulated(parameter, now=foreign)

    def strangers(self) -> list[Tensor]:
        """Watches every parameter of the running backward that nobody watches yet, and returns those.

        Autograd can be asked about a parameter but does not list them, so every parameter alive in the process is
        asked. With them, and with those of compiled graphs, come all others of the modules they belong to: these may
        be unfrozen or used later. Only done when a set of parameters is seen for the first time.
        """
        parameters, modules = living()
        running: list[Tensor] = [
            parameter
            for parameter in parameters
            if not watched(parameter)
            and not is_lazy(parameter)
            and parameter.requires_grad
            and parameter.is_leaf
            and _compat.accumulates(parameter)
        ]
        names = _relatives(modules, self._refs.keys() | set(map(id, running)))
        unknown = {id(p): p for p in running}
        unknown |= {id(p): p for _, p in names.values() if not watched(p) and _is_plain(p)}
        named = [(names[identity][0] if identity in names else "", p) for identity, p in unknown.items()]
        for name, parameter in _in_common_order(named):
            self.add(parameter, name)
        return running

    def keep_pending(self, parameters: Iterable[Tensor]) -> None:
        """Notes that these parameters hold local gradients, which the next synchronised backward owes an average."""
        self._pending.update((id(p), weakref.ref(p)) for p in parameters)

    def take_pending(self) -> list[Tensor]:
        """Parameters with local gradients left from backwards under `no_sync`."""
        pending, self._pending = self._pending, {}
        return [parameter for reference in pending.values() if (parameter := reference()) is not None]

    def meet(self, parameters: Sequence[Tensor], group: "Group") -> None:
        """First contact of parameters that no graph has: this step has computed with them, so they must be equal."""
        if not parameters:
            return
        backend = self._backend()
        assert backend is not None
        here = {id(p): self.name(p) for p in parameters}
        known = backend.known_tensors(owners_of=here)  # as a rank does that meets them in a graph
        used = here.keys() | {id(tensor) for _, tensor in known if not tensor.requires_grad}
        named = [*known, *_in_common_order((here[id(p)], p) for p in parameters)]
        backend.replica.contact(named, group, send=backend.settings.init_sync, used=used)


def _relatives(modules: Sequence[nn.Module], family: AbstractSet[int]) -> dict[int, tuple[str, Tensor]]:
    """All parameters of the outermost modules that hold one of this family, with their names, by id."""
    children = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    found: dict[int, tuple[str, Tensor]] = {}
    outermost = [dict(m.named_parameters()) for m in modules if id(m) not in children and "_modules" in vars(m)]
    for parameters in sorted(outermost, key=len, reverse=True):  # the longest name is that in the whole model
        if not family.isdisjoint(map(id, parameters.values())):
            for name, parameter in parameters.items():
                found.setdefault(id(parameter), (name.replace("_orig_mod.", ""), parameter))
    return found


def _in_common_order(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Sorts parameters in a way that does not depend on where this process keeps them: by name, kind and value."""
    alike: dict[tuple[str, tuple[int, ...], str], list[Tensor]] = {}
    for name, parameter in named:
        alike.setdefault((name, tuple(parameter.shape), str(parameter.dtype)), []).append(parameter)
    for same in alike.values():
        if len(same) > 1:
            same.sort(key=digest)
    return [(key[0], parameter) for key in sorted(alike) for parameter in alike[key]]


def _differentiable(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _is_plain(parameter: Tensor) -> bool:
    try:
        return type(parameter.data) is Tensor
    except RuntimeError:  # a ShardedTensor has no data of its own
        return False


def refuse_subclass(parameter: Tensor, name: str) -> None:
    """Raises for parameters that another library shards or wraps."""
    if not (_is_plain(parameter) or _compat.is_fake(parameter)):
        raise RuntimeError(
            f"parameter {name or tuple(parameter.shape)} is a {type(parameter).__name__}: fxddp reduces plain "
            f"parameters, and a "
            "sharded or wrapped one is managed elsewhere. Leave this module to its own library, or give fxddp the "
            "plain module"
        )
