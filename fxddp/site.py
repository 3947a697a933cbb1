"""One compiled Dynamo graph, as Dynamo calls it: knows its parameters, meets the other ranks, marks its backward."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from . import _compat, next_forward
from .call import COMPILED_AUTOGRAD, Binding, Bindings, Call, getter
from .compiler import Compilation
from .modules import beginning
from .passes.outline import Source

if TYPE_CHECKING:
    from .backend import Backend
    from .group import Group


@dataclass(frozen=True)
class Inputs:
    """What the inputs of a Dynamo graph are, by position.

    Attributes:
        names: qualified names of parameters and buffers.
        trained: (fake) parameters that require grad.
        buffers: positions of buffers.
        broken_by: why and where Dynamo ended the graph before the end of its frame, if it did.
    """

    names: Mapping[int, str]
    trained: Mapping[int, Tensor]
    buffers: tuple[int, ...]
    broken_by: tuple[str, Source | None] | None = None


class Site:
    """The callable that stands for one graph.

    Attributes:
        names: by position, the qualified name of each parameter and buffer among the graph's inputs.
        trained: positions of the parameters that require grad.
        compilation: what was compiled.
        graph: the Dynamo graph, if graphs are kept.
        broken_by: as in `Inputs`.
        number: how many graphs this backend had compiled before.
        frame: file, line and name of the code it was compiled from, if Dynamo did.
    """

    def __init__(
        self,
        backend: "Backend",
        inputs: Inputs,
        compilation: Compilation,
        compiled: Callable[..., Any],
        graph: fx.GraphModule | None,
    ) -> None:
        self.backend = backend
        self.names = inputs.names
        self.trained = tuple(inputs.trained)
        self.compilation = compilation
        self.graph = graph
        self.broken_by = inputs.broken_by
        self.number = len(backend.sites)
        self.frame = _compat.frame_compiled()
        self._compiled = compiled
        self._begins = beginning()
        self._bindings = Bindings(self.trained)
        self._named = tuple(sorted(inputs.names))
        self._seen = Bindings(self._named)
        mutated = compilation.backward.mutated if compilation.backward is not None else ()
        self._buffers = getter([position for position in inputs.buffers if position in mutated])

    def __call__(self, *arguments: Any) -> Any:
        """Runs the forward; called by Dynamo's code."""
        backend = self.backend
        if not torch.is_grad_enabled():
            self._note_use(arguments, late=False)
            return self._run(arguments)
        if not self.trained:
            self._note_use(arguments, late=True)
            return self._run_without_parameters(arguments)
        group = backend.lookup()
        if group is None:
            return self._run(arguments)
        if _compat.compiled_autograd_enabled():
            raise RuntimeError(COMPILED_AUTOGRAD)
        parameters = self._bindings.pick(arguments)
        binding = self._bindings.get(parameters) or self._bind(parameters)
        sync = backend.is_sync(binding)
        if binding.group is not group:
            self._meet(binding, arguments, group)
        if sync and backend.settings.forward_sync_buffers and not _compat.in_backward():  # recomputes: no new values
            buffers = self._buffers(arguments)
            if not all(map(backend.replica.has_met, buffers)):  # another tensor stands for one by now
                self._meet(binding, arguments, group)
            backend.replica.sync_buffers(buffers, group)
        if backend.registered.optimizer is not None and _compat.in_backward() and _compat.restricted_to() is None:
            backend.backward()  # around that of a re-entrant checkpoint, which must not update what it shares
        since = _compat.sequence_number()
        results = self._run(arguments)
        node = _compat.compiled_node(results, since) or _compat.compiled_node(arguments, since)
        if node is not None:
            compiled = self.compilation.backward
            plan = None if compiled is None else compiled.program.plan
            Call(backend, binding, parameters, group, sync=sync, graph=self.number).mark(node, plan)
        return results

    def _run(self, arguments: Sequence[Any]) -> Any:
        """Calls the compiled graph; what it reads was updated by then."""
        return next_forward.run(self._compiled, arguments, in_pieces=self.compilation.forward is not None)

    def _note_use(self, arguments: Sequence[Any], *, late: bool) -> None:
        """Notes parameters and buffers that are computed with and may never meet the other ranks'."""
        tensors = self._seen.pick(arguments)
        if self._seen.get(tensors) is None:
            names = [self.names[position] for position in self._named]
            self._seen.add(tensors, names)
            self.backend.replica.note_use(zip(names, tensors, strict=True), late=late)

    def _run_without_parameters(self, arguments: Sequence[Any]) -> Any:
        """Runs a graph that trains nothing, such as a compiled loss: what trains around it is found in backward."""
        since = _compat.sequence_number()
        results = self._run(arguments)
        if self.backend.watch.unexplored and self.backend.lookup() is not None:
            node = _compat.compiled_node(results, since)
            if node is not None:
                node.register_prehook(self._explore)
        return results

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a whole training step may be compiled
    def _explore(self, _: Sequence[Tensor | None]) -> None:
        """Pre-hook of the autograd node: looks for what trains around this graph."""
        self.backend.backward().accumulation.explore(self.backend.watch)

    def _bind(self, parameters: tuple[Tensor, ...]) -> Binding:
        watch = self.backend.watch
        for position, parameter in zip(self.trained, parameters, strict=True):
            watch.add(parameter, self.names[position])
        names = [watch.name(p) for p in parameters]
        if len(set(names)) < len(names):  # several models of one class
            names = [self.names[position] for position in self.trained]
        return self._bindings.add(parameters, names)

    def _meet(self, binding: Binding, arguments: Sequence[Any], group: "Group") -> None:
        """First contact of these parameters with the other ranks: rank 0's weights and buffers win."""
        backend = self.backend
        here = {id(arguments[position]): name for position, name in self.names.items()}
        named = backend.known_tensors(owners_of=here)  # other modules may be known on this rank alone
        named += [
            (self.names[position], arguments[position])
            for position in sorted(self.names, key=lambda position: (self.names[position], position))
            if isinstance(arguments[position], Tensor)
        ]
        fresh = any(backend.replica.is_new(tensor, group) for _, tensor in named)
        used: set[int] = set()
        if fresh:
            used = {*map(id, _compat.upstream_leaves(arguments)), *backend.modules.used_before(here, self._begins)}
        backend.replica.contact(named, group, send=backend.settings.init_sync, used=used)
        binding.group = group


def inspect(
    gm: fx.GraphModule, inputs: Sequence[Any], names: Mapping[int, str], is_ignored: Callable[[Any], bool]
) -> Inputs:
    """Finds out what a Dynamo graph's inputs are.

    Args:
        gm: the graph.
        inputs: its (fake) example inputs.
        names: qualified names by id of the real tensors, as far as modules are known.
        is_ignored: whether a real tensor is to be left alone.
    """
    named: dict[int, str] = {}
    roots: dict[int, str] = {}
    trained: dict[int, Tensor] = {}
    buffers = []
    for position, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        example = _compat.placeholder_example(node)
        if not isinstance(value, Tensor) or is_ignored(example):
            continue
        source = _compat.placeholder_source(node)
        known = names.get(id(example))
        parameter = isinstance(value, nn.Parameter)
        if not parameter and not known and "_buffers[" not in source:
            continue
        named[position] = known or readable(source) or f"input {position}"
        roots[position] = root(source)
        if not parameter:
            buffers.append(position)
        elif value.requires_grad:
            trained[position] = value
    often = Counter(named.values())  # more than once for several models of one class
    unique = {p: f"{roots[p]}.{name}" if often[name] > 1 else name for p, name in named.items()}
    reason = _compat.graph_break(gm)
    broken_by = None if reason is None else (reason[0], Source(*reason[1]) if reason[1] else None)
    return Inputs(unique, trained, tuple(buffers), broken_by)


def root(source: str) -> str:
    """`models[0]` from `L['models'][0]._modules['a']._parameters['weight']`."""
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", re.split(r"\._(?:modules|parameters|buffers)\[", source)[0])


def readable(source: str) -> str:
    """`a.weight` from `L['self']._modules['a']._parameters['weight']`."""
    keys = [part.split("']")[0].split('"]')[0] for part in source.replace('["', "['").split("['")[1:]]
    return ".".join(key for key in keys if key not in ("self", "fn", "mod"))
