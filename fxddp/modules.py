"""The modules behind the graphs: they name parameters, and own those that no graph covers."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from . import _compat

if TYPE_CHECKING:
    from .uncovered import Watch

NORMALIZATIONS = frozenset(
    module.forward
    for module in (
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    )
)
"""What computes with the statistics of its batch, not with its running ones, in training."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Kind = tuple[type[nn.Module], int]
"""What one graph may serve several modules of: their class and how many parameters and buffers they have."""


class Modules:
    """The modules that a backend met; keeps none of them alive.

    Args:
        watch: is told of every parameter of a module that is adopted.
    """

    def __init__(self, watch: "Watch") -> None:
        self._watch = watch
        self._known: list[weakref.ref[nn.Module]] = []
        self._training: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._known)

    def adopt(self, module: nn.Module) -> None:
        """Takes responsibility for all parameters of a module, whether or not a graph will cover them.

        Only what runs with grad enabled runs on every rank: a module met otherwise, as in an evaluation on one rank, is
        nothing to compare with the others.
        """
        trains = torch.is_grad_enabled()
        self.remember(module)
        if trains:
            self._training.add(module)
        rename = trains and not self._is_part(module)
        for name, parameter in module.named_parameters():
            self._watch.add(parameter, name, rename=rename)

    def remember(self, module: nn.Module) -> None:
        """Takes names from this module from now on."""
        if all(reference() is not module for reference in self._known):
            self._known.append(weakref.ref(module, self._known.remove))

    def tensors(self, owners_of: Mapping[int, str] | None = None) -> list[tuple[str, Tensor]]:
        """Named parameters and buffers of the known modules, each once.

        Args:
            owners_of: only of the modules in training with one of these parameters, names by id; in an order that
                depends on these names alone.
        """
        if owners_of is not None:
            modules = self._owners(owners_of)
        else:
            modules = sorted(self._alive(), key=lambda m: (m not in self._training, -len(list(m.parameters()))))
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in chain.from_iterable(map(_tensors, modules)):
            found.setdefault(id(tensor), (name, tensor))
        return list(found.values())

    def tied(self) -> dict[str, tuple[str, ...]]:
        """The further names of parameters that have several, by the name `tensors` gives."""
        found: dict[str, tuple[str, ...]] = {}
        first = {id(tensor): name for name, tensor in self.tensors()}
        for module in self._alive():
            names: dict[int, list[str]] = {}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
            for identity, same in names.items():
                if len(same) > 1 and first[identity] in same:
                    found[first[identity]] = tuple(name for name in same if name != first[identity])
        return found

    def apart_from(self, module: nn.Module) -> list[nn.Module]:
        """The known modules that share no parameter with this one."""
        own = set(map(id, module.parameters()))
        return [other for other in self._alive() if other is not module and own.isdisjoint(map(id, other.parameters()))]

    def used_before(self, owners_of: Mapping[int, str], begins: Iterable[Kind]) -> set[int]:
        """Tensors without a gradient that may have been computed with when a graph runs, by id.

        What trains can be asked for what was computed from it. A frozen parameter or a buffer cannot: it counts as used
        unless the graph is the beginning of a module that holds it.

        Args:
            owners_of: names of the graph's own parameters and buffers by id.
            begins: the modules that the graph is the beginning of.
        """
        begins = set(begins)
        fresh = {*owners_of}
        used: set[int] = set()
        for module in self._owners(owners_of):
            tensors = {id(tensor) for _, tensor in _tensors(module) if not tensor.requires_grad}
            (fresh if _kind(module) in begins else used).update(tensors)
        return used - fresh

    def only_written(self) -> set[int]:
        """Running statistics of normalisations in training, by id: nothing is computed from them.

        Each rank's are of its own batch after a step, however equal they were before.
        """
        layers = chain.from_iterable(module.modules() for module in self._alive())
        return {
            id(buffer)
            for layer in layers
            if layer.training and type(layer).forward in NORMALIZATIONS
            for name, buffer in layer.named_buffers(recurse=False)
            if name in STATISTICS
        }

    def _alive(self) -> list[nn.Module]:
        return [module for reference in list(self._known) if (module := reference()) is not None]

    def _owners(self, owners_of: Mapping[int, str]) -> list[nn.Module]:
        owned = [
            (sorted(owners_of[id(p)] for p in module.parameters() if id(p) in owners_of), module)
            for module in self._alive()
            if module in self._training
        ]
        return [module for names, module in sorted(owned, key=lambda pair: pair[0]) if names]

    def _is_part(self, module: nn.Module) -> bool:
        """Whether a larger module in training holds a parameter of this one: then that gives the names."""
        own = set(map(id, module.parameters()))
        others = [set(map(id, other.parameters())) for other in self._training if other is not module]
        return any(len(other) > len(own) and not own.isdisjoint(other) for other in others)


def owners(gm: fx.GraphModule) -> Iterator[nn.Module]:
    """The modules in reach of the frame being compiled that own a parameter of this graph."""
    wanted = {id(_compat.placeholder_example(node)) for node in gm.graph.find_nodes(op="placeholder")}
    for module in modules_in(_compat.frame_variables().values()):
        if any(id(p) in wanted for p in module.parameters()):
            yield module


def beginning() -> frozenset[Kind]:
    """The modules that begin with the frame being compiled: those in reach, unless it resumes after a graph break."""
    if _compat.frame_is_resumed():
        return frozenset()
    return frozenset(map(_kind, modules_in(_compat.frame_variables().values())))


def modules_in(values: Iterable[Any]) -> Iterator[nn.Module]:
    """Modules among these values, or one step inside: a bound method's object, an attribute, an item, a closure."""
    for found in list(values):
        value = getattr(found, "__self__", found)
        if isinstance(value, nn.Module):
            yield getattr(value, "_orig_mod", value)
            continue
        inside: list[Any] = []
        if isinstance(value, (list, tuple)):
            inside += value[:64]
        elif isinstance(value, dict):
            inside += list(value.values())[:64]
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
            inside += list(vars(value).values())
        for cell in getattr(value, "__closure__", None) or ():
            inside += [cell.cell_contents] if _compat.filled(cell) else []
        for item in inside:
            if issubclass(type(item), nn.Module):  # what `isinstance` asks for too, `__class__`, may be a user's code
                yield getattr(item, "_orig_mod", item)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Named parameters and buffers, without what stands in for a parameter, as in `functional_call`."""
    parameters = (named for named in module.named_parameters() if isinstance(named[1], nn.Parameter))
    return chain(parameters, module.named_buffers())


def _kind(module: nn.Module) -> Kind:
    return type(module), sum(1 for _ in chain(module.parameters(), module.buffers()))
