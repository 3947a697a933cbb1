"""The Dynamo backend: `torch.compile(model, backend=fxddp.backend(…))`."""

import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from . import _compat
from .agreement import Agreement
from .backward import Backward
from .call import Binding
from .compiler import Compilation
from .config import MIB, Settings, make_settings, split_options
from .group import GroupLookup
from .passes.plan import BucketPlan
from .replica import Replica
from .site import Site, inspect
from .stats import EventLog, Stats
from .uncovered import Watch, refuse_subclass


class Backend:
    """A `torch.compile` backend whose compiled backward averages gradients over the ranks. Made by `fxddp.backend`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lookup = GroupLookup(settings.process_group)
        self.watch = Watch(self)
        self.replica = Replica()
        self.agreement = Agreement(self)
        self.log = EventLog()
        self.sites: list[Site] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._training: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._running: dict[int, Backward] = {}
        self._lock = threading.Lock()
        self._local_scopes: list[frozenset[int] | None] = []
        listen()

    @property
    def __name__(self) -> str:
        """`torch.compile` asks for it before anything else: the one moment to learn of a model it may never compile.

        Dynamo compiles nothing of `nn.Sequential(…).compile(…)`, of any class of torch's own compiled in place, and of
        whatever comes after its recompile limit, and tells nobody.
        """
        listen()  # torch._dynamo.reset may have been called since
        for module in _modules_in([_compat.being_compiled()]):
            self.adopt(module)
        return "fxddp"

    def __repr__(self) -> str:
        settings = self.settings
        size = settings.cap / MIB
        return f"<fxddp backend: buckets of {size:g} MiB, inner={settings.inner!r}, split={settings.split}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        """A copied model shares the backend, which is bound to a group and tells models apart by their parameters."""
        return self

    # --- compiling --------------------------------------------------------------------------------

    def __call__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Any:
        """Compiles a Dynamo graph; called by `torch.compile`. Communicates nothing."""
        settings = self._settings_for(options, mode)
        self._adopt_modules_of(gm)
        found = inspect(gm, inputs, {id(tensor): name for name, tensor in self.known_tensors()})
        for position, value in found.trained.items():
            refuse_subclass(value, found.names[position])
        try:
            group = self.lookup()
        except RuntimeError:  # refused when the graph runs; compiling alone is allowed
            group = None
        name, size = (group.name, group.size) if group is not None else ("", 1)
        compilation = Compilation(settings, found.trained, name, size)
        graph = _compat.copy_graph(gm) if settings.keep_graphs else None
        compiled = compilation.compile(gm, inputs)
        site = Site(self, found, compilation, compiled, graph)
        self.sites.append(site)
        return site

    def _settings_for(self, options: Mapping[str, Any] | None, mode: str | None) -> Settings:
        """The settings with what `torch.compile` itself was given: inductor's `options` and `mode`."""
        if not options and not mode:
            return self.settings
        own, rest = split_options(options or {})
        if own:
            raise ValueError(
                f"options {sorted(own)} belong to fxddp.backend(…), which was given already: put them there"
            )
        extra = make_settings(inner=self.settings.inner, options=rest, mode=mode).options
        return replace(self.settings, options={**self.settings.options, **extra})

    def reset(self) -> None:
        """Called by `torch._dynamo.reset`, which forgets compiled code and listeners."""
        self.sites.clear()
        listen()

    # --- the modules behind the graphs ------------------------------------------------------------

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
            self.watch.add(parameter, name, rename=rename)

    def _is_part(self, module: nn.Module) -> bool:
        """Whether a larger module in training holds a parameter of this one: then that gives the names."""
        own = set(map(id, module.parameters()))
        others = [set(map(id, other.parameters())) for other in self._training if other is not module]
        return any(len(other) > len(own) and not own.isdisjoint(other) for other in others)

    def remember(self, module: nn.Module) -> None:
        """Takes names from this module from now on."""
        if all(reference() is not module for reference in self._modules):
            self._modules.append(weakref.ref(module, self._modules.remove))

    def known_tensors(self, owners_of: Mapping[int, str] | None = None) -> list[tuple[str, Tensor]]:
        """Named parameters and buffers of the modules this backend knows.

        Args:
            owners_of: only of the modules in training with one of these parameters, names by id; in an order that
                depends on these names alone.
        """
        modules = [module for reference in list(self._modules) if (module := reference()) is not None]
        if owners_of is not None:
            modules = [module for module in modules if module in self._training]
            owned = [(sorted(owners_of[id(p)] for p in m.parameters() if id(p) in owners_of), m) for m in modules]
            modules = [module for names, module in sorted(owned, key=lambda pair: pair[0]) if names]
        else:
            modules.sort(key=lambda m: (m not in self._training, -len(list(m.parameters()))))
        found: dict[int, tuple[str, Tensor]] = {}
        for module in modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                found.setdefault(id(tensor), (name, tensor))
        return list(found.values())

    def _adopt_modules_of(self, gm: fx.GraphModule) -> None:
        """Adopts the modules in reach of the compiled frame that own a parameter of this graph."""
        wanted = {id(_compat.placeholder_example(node)) for node in gm.graph.find_nodes(op="placeholder")}
        for module in _modules_in(_compat.frame_variables().values()):
            if any(id(p) in wanted for p in module.parameters()):
                self.adopt(module)

    # --- running ----------------------------------------------------------------------------------

    def backward(self) -> Backward:
        """The running backward."""
        task = _compat.task_id()
        with self._lock:  # autograd has a thread for each device
            running = self._running.get(task)
            if running is None:
                running = self._running[task] = Backward(self, task)
        return running

    def forget(self, backward: Backward) -> None:
        """Called when a backward is over."""
        self._running.pop(backward.task, None)

    def is_sync(self, binding: Binding) -> bool:
        """Whether a forward of these parameters, here and now, will synchronise."""
        return not self._local_scopes or not any(
            scope is None or not scope.isdisjoint(binding.ids) for scope in self._local_scopes
        )

    def under_no_sync(self, parameters: Collection[int]) -> bool:
        """Whether all these parameters are under one `no_sync` here and now."""
        return any(scope is None or scope.issuperset(parameters) for scope in self._local_scopes)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Gradients of forwards that run inside stay local and accumulate.

        The next synchronised backward averages the sum, with the collectives of a normal step.
        As under DistributedDataParallel, where the *forward* ran decides. Parameters that only eager code uses follow
        the other forwards of the same backward, or, if it has none, the place of the backward.

        Args:
            model: only this one of several models on the backend.
        """
        scope = None if model is None else frozenset(map(id, model.parameters()))
        self._local_scopes.append(scope)
        try:
            yield
        finally:
            self._local_scopes.remove(scope)

    # --- looking ----------------------------------------------------------------------------------

    @property
    def plans(self) -> tuple[BucketPlan, ...]:
        """The bucket plans of the compiled graphs that have a backward, in the order they were compiled."""
        return tuple(
            site.compilation.backward.program.plan for site in self.sites if site.compilation.backward is not None
        )

    def stats(self) -> Stats:
        """What the last backwards launched, ran and waited for."""
        return self.log.stats()


def backend(
    bucket_mb: float = 25,
    *,
    first_bucket_mb: float = 1,
    process_group: dist.ProcessGroup | None = None,
    inner: Any = "inductor",
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    split: bool = True,
    init_sync: bool = True,
    forward_sync_buffers: bool = True,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    keep_graphs: bool = False,
) -> Backend:
    """Makes a backend for `torch.compile` that trains data-parallel.

    Args:
        bucket_mb: size of a bucket in MiB; gradients are all-reduced bucket by bucket, in the order they become ready.
        first_bucket_mb: size of the first bucket in MiB; a small one starts the communication early.
        process_group: the group to average over; None for the default group. Without `torch.distributed` the model
            trains alone.
        inner: what compiles forward and the pieces of the backward: "inductor", "aot_eager" (runs the operators one by
            one; for debugging), or a callable `(graph, example_inputs) -> callable`.
        options: inductor's settings, as in `torch.compile`.
        mode: one of `torch.compile`'s modes, for inductor.
        split: cut the backward at the buckets and launch between the pieces; False keeps one graph with the collectives
            inside.
        init_sync: check shapes and send rank 0's parameters and buffers when a model first runs with grad enabled.
        forward_sync_buffers: send rank 0's buffers before each forward that changes them and will synchronise.
        find_unused_parameters: accepted for DistributedDataParallel's sake: parameters without gradient are found from
            the graph in any case. Ranks that use different parameters in one step raise; averaging over their union is
            not supported yet.
        static_graph: raise, naming the parameters, if the set that gets gradients ever changes.
        keep_graphs: keep all graphs for `fxddp.explain`, at the cost of host memory.

    Raises:
        ValueError: an argument is not allowed; names argument, value and what is allowed.
    """
    return Backend(
        make_settings(
            bucket_mb,
            first_bucket_mb=first_bucket_mb,
            process_group=process_group,
            inner=inner,
            options=options,
            mode=mode,
            split=split,
            init_sync=init_sync,
            forward_sync_buffers=forward_sync_buffers,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            keep_graphs=keep_graphs,
        )
    )


_named: dict[str, Backend] = {}


def _by_name(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """The backend under its name: `torch.compile(model, backend="fxddp", options={"bucket_mb": 25})`."""
    return named_backend(options, mode)(gm, inputs)


def __getattr__(name: str) -> Any:
    """Gives `by_name`, the entry point: whoever loads it will compile by name, and from now on frames must be heard."""
    if name == "by_name":
        _by_name.reset = listen  # type: ignore[attr-defined]
        listen()
        return _by_name
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def named_backend(options: Mapping[str, Any] | None, mode: str | None) -> Backend:
    """The one backend behind these options: models compiled by name with equal options share it."""
    own, rest = split_options(options or {})
    key = repr((sorted(own.items(), key=str), sorted(rest.items(), key=str), mode))
    if key not in _named:
        _named[key] = backend(**own, options=rest, mode=mode)
    return _named[key]


def backend_of(model: Any) -> Backend:
    """The backend of a model or function compiled with fxddp; of a regionally compiled module, that of its first part.

    Raises:
        ValueError: it is not compiled, or with another backend.
    """
    found = _backends(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} is not compiled with fxddp: pass what torch.compile(…, backend=fxddp.backend(…)) "
            f"returned, or a "
            "module on which .compile(backend=…) was called"
        )
    return found[0]


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """`Backend.no_sync` for one compiled model, whatever backends its parts have."""
    backend_of(model)
    with ExitStack() as stack:
        for each in _backends(model):
            stack.enter_context(each.no_sync(model if isinstance(model, nn.Module) else None))
        yield


def _backends(model: Any) -> list[Backend]:
    candidates = [model, *(model.modules() if isinstance(model, nn.Module) else ())]
    found: dict[int, Backend] = {}
    for candidate in candidates:
        inner = _backend_behind(_compat.compile_wrapper(candidate))
        if inner is not None:
            found.setdefault(id(inner), inner)
    return list(found.values())


def _backend_behind(wrapper: Any) -> Backend | None:
    """The backend in what `torch.compile` made of its backend argument, if it is one of ours."""
    inner = _compat.inner_backend(wrapper)
    if inner is _by_name:
        arguments = getattr(wrapper, "kwargs", {})
        return named_backend(arguments.get("options"), arguments.get("mode"))
    return inner if isinstance(inner, Backend) else None


def listen() -> None:
    """Has Dynamo tell when it starts on a frame for one of our backends.

    It may compile nothing of it (an LSTM, a frame without tensor work); then the module's parameters are known all the
    same.
    """
    _compat.on_frame(_frame_started)


def _frame_started(wrapper: Any, variables: Mapping[str, Any]) -> None:
    compiler = _backend_behind(wrapper)
    if compiler is not None:
        for name in ("self", "fn", "mod"):
            for module in _modules_in([variables.get(name)]):
                compiler.adopt(module)


def _modules_in(values: Any) -> Iterator[nn.Module]:
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
            if isinstance(item, nn.Module):
                yield getattr(item, "_orig_mod", item)
