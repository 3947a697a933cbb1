"""The Dynamo backend: `torch.compile(model, backend=fxddp.backend(…))`."""

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from . import _compat
from .agreement import Agreement
from .backward import Backward
from .by_name import by_name
from .call import Binding
from .comm_hook import CommHook
from .compiled import backend_of, listen, no_sync
from .compiler import Compilation
from .compression import Codec
from .config import AUTO, FIRST_MB, USUAL_MB, Settings, in_mib, make_settings, split_options
from .decision import Decision
from .group import Group, GroupLookup
from .modules import Modules, owners
from .next_forward import UnderWay
from .passes.cost import Speeds
from .passes.plan import BucketPlan
from .passes.stages import Way
from .plan_log import PlanLog
from .refill import ReducedBuckets
from .registered import Registered
from .replica import Replica
from .sending import Outbox
from .site import Site, inspect
from .speeds import assumed, speeds_of
from .stats import EventLog, Stats
from .transport import introduce, way_of
from .turns import Turn
from .uncovered import Watch, refuse_subclass
from .units import mib

__all__ = ["Backend", "backend", "backend_of", "by_name", "no_sync"]

listen()

_numbers = itertools.count()


class Backend:
    """A `torch.compile` backend whose compiled backward averages gradients over the ranks. Made by `fxddp.backend`.

    Attributes:
        turn: its place among the backends that `fxddp.backend` made; None for others.
        registered: what carries buckets in place of the all-reduce, and what updates parameters in backward.
        under_way: what the last backward left to be waited for in the next forward.
        outbox: what this iteration has sent; or took part in, without inputs.
        joining: ranks may run out of inputs, under `join`.
        gathers: the next backward averages what forwards under `no_sync` left; what they leave in it too.
        divide_by_initial_world_size: gradients are then divided by the number of all ranks, not of those with inputs.
    """

    __name__ = "fxddp"  # what torch calls it in its logs

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lookup = GroupLookup(settings.process_group)
        self.turn: Turn | None = None
        self.watch = Watch(self)
        self.modules = Modules(self.watch)
        self.replica = Replica(self)
        self.agreement = Agreement(self)
        self.log = EventLog()
        self.plan_log = PlanLog()
        self.sites: list[Site] = []
        self.registered = Registered(settings)
        self.outbox = Outbox(self)
        self.reduced = ReducedBuckets()
        self.under_way = UnderWay(self)
        self.joining = False
        self.gathers = False
        self.divide_by_initial_world_size = True
        self._number = next(_numbers)
        self._running: dict[int, Backward] = {}
        self._lock = threading.Lock()
        self._local_scopes: list[frozenset[int] | None] = []

    def __repr__(self) -> str:
        settings = self.settings
        size = AUTO if settings.auto else f"{mib(in_mib(settings.cap))} MiB"
        return f"<fxddp backend: buckets of {size}, inner={settings.inner!r}, split={settings.split}>"

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
        """Compiles a Dynamo graph; called by `torch.compile`. Communicates nothing, but for Note [measuring]."""
        settings = self._settings_for(options, mode)
        for module in owners(gm):
            self.adopt(module)
        found = inspect(gm, inputs, {id(tensor): name for name, tensor in self.known_tensors()}, self.is_ignored)
        for position, value in found.trained.items():
            refuse_subclass(value, found.names[position])
        try:
            group = self.lookup()
        except RuntimeError:  # refused when the graph runs; compiling alone is allowed
            group = None
        speeds = self.speeds(group, found.trained.values()) if settings.measures else None
        way = self.way(group)
        if group is not None and not settings.split:
            introduce(settings, group, way)
        compilation = Compilation(settings, found.trained, way, speeds)
        graph = _compat.copy_graph(gm) if settings.keep_graphs else None
        compiled = compilation.compile(gm, inputs)
        site = Site(self, found, compilation, compiled, graph)
        self.sites.append(site)
        self.plan_log.tell(site)
        return site

    def way(self, group: Group | None) -> Way:
        """Over which groups and in which steps graphs sum their buckets."""
        return way_of(self.settings, group, f"fxddp.{self._number}", 1 if group is None else group.size)

    def speeds(self, group: Group | None, trained: Iterable[Tensor]) -> Speeds:
        """What plans are made for where the network counts; a collective for the first graph of a group that trains.

        Args:
            group: None if there is none.
            trained: the graph's parameters.
        """
        first = next(iter(trained), None)
        if group is not None and first is not None and torch.is_grad_enabled():
            return speeds_of(self, group, first)
        return assumed("cpu" if first is None else first.device.type, 1 if group is None else group.size)

    @property
    def sends_rows(self) -> bool:
        """Whether tables may travel in rows."""
        return self.settings.allows_rows and self.registered.carrier.takes_rows

    def is_ignored(self, tensor: Any) -> bool:
        """Whether a tensor is to be left alone, neither sent nor averaged."""
        return False

    def expects_sparse(self, parameter: Tensor, group: Group) -> bool:
        """Whether all ranks average what a parameter has at the end of a backward as a sparse gradient."""
        return False

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
        """Called by `torch._dynamo.reset`, which forgets compiled code."""
        self.sites.clear()
        self.plan_log = PlanLog()

    # --- the modules behind the graphs ------------------------------------------------------------

    def adopt(self, module: nn.Module) -> None:
        """`Modules.adopt`: takes responsibility for all parameters of a module."""
        self.modules.adopt(module)

    def remember(self, module: nn.Module) -> None:
        """`Modules.remember`: takes names from this module from now on."""
        self.modules.remember(module)

    def names(self, parameters: Sequence[Tensor]) -> str:
        """Qualified names of the first of these parameters, and how many more there are."""
        more = f" and {len(parameters) - 4} more" if len(parameters) > 4 else ""
        return ", ".join(map(self.watch.name, parameters[:4])) + more

    def known_tensors(self, owners_of: Mapping[int, str] | None = None) -> list[tuple[str, Tensor]]:
        """`Modules.tensors`: named parameters and buffers of the modules this backend knows."""
        return self.modules.tensors(owners_of)

    # --- running ----------------------------------------------------------------------------------

    def backward(self) -> Backward:
        """The running backward."""
        task = _compat.task_id()
        with self._lock:  # autograd has a thread for each device
            running = self._running.get(task)
            if running is None:
                outermost = not self._running
                if outermost:
                    self.outbox.discard()
                    self.registered.take_over_optimizers(self.watch)
                running = self._running[task] = Backward(self, task)
                if outermost:
                    running.gathers, self.gathers = self.gathers, False
        return running

    @property
    def running(self) -> bool:
        """Whether a backward runs, such as the one around a re-entrant checkpoint's."""
        return bool(self._running)

    def around(self, backward: Backward) -> Backward | None:
        """The outermost running backward, if that is another one: around a re-entrant checkpoint's."""
        outermost = next(iter(self._running.values()), backward)
        return None if outermost is backward else outermost

    def forget(self, backward: Backward) -> None:
        """Called when a backward is over."""
        self._running.pop(backward.task, None)

    def root(self, decision: Decision, group: Group) -> int:
        """The rank whose buffers all get: the first, or under `join` the last that has inputs, as with stock DDP."""
        if decision.root is not None:
            return decision.root
        return group.size - 1 if self.joining else 0

    def is_sync(self, binding: Binding) -> bool:
        """Whether a forward of these parameters, here and now, will synchronise."""
        return not self._local_scopes or not any(
            scope is None or not scope.isdisjoint(binding.ids) for scope in self._local_scopes
        )

    def under_no_sync(self, parameters: Collection[int]) -> bool:
        """Whether all these parameters are under one `no_sync` here and now."""
        return any(scope is None or scope.issuperset(parameters) for scope in self._local_scopes)

    def concern(self) -> int:
        """How much the running backward is this backend's, among those that watch the same parameter.

        0: nothing of it is; 2: it runs in it; 3: it averages in it.
        """
        running = self._running.get(_compat.task_id())
        return 0 if running is None else 2 + running.record.sync

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

    # --- communication hooks ----------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Has a hook of DistributedDataParallel's run on every bucket in place of the averaging all-reduce.

        Args:
            state: passed to every call.
            hook: `(state, bucket) -> Future[Tensor]`; the bucket has the methods of `torch.distributed.GradBucket`, its
                buffer the local gradients: flat, of one dtype and at most `bucket_mb` MiB, not divided; complex ones as
                pairs of real numbers. What the future holds, as many elements, becomes the gradients.

        Raises:
            RuntimeError: there is one already, or a codec, or several groups or steps.
            TypeError, ValueError: it is no such function.

        An error in the hook ends the backward, with its name, the bucket's number and its parameters. See
        examples/compression.py, `--codec hook`, for a hook of torch's own:

            backend.register_comm_hook(None, default_hooks.fp16_compress_hook)
        """
        self.registered.carry_by(CommHook(state, hook))

    # --- optimizer in backward --------------------------------------------------------------------

    def register_optimizer(self, optimizer: Optimizer) -> None:
        """Has an optimizer update its parameters at the end of every synchronised backward, bucket by bucket.

        The weights are those of `optimizer.step()` after the backward, which then finds no gradients and does nothing;
        so do `zero_grad` and, with an error, `clip_grad_norm_`. Gradients accumulate under `no_sync` and are used with
        those of the next synchronised backward. Learning rate schedulers and the optimizer's `state_dict` work as ever.
        With inner="inductor" updates of torch's own optimizers are compiled, bucket by bucket, unless `fused=True`:
        equal to those of `step()` up to the rounding of the parameters' dtype. Muon's iterate in bfloat16, where a sum
        in another order may change the weights' fourth digit; an uncompiled step is as far from exact arithmetic.
        Every synchronised backward is a step, and what it gives no gradient is not updated, whatever `zero_grad` left
        there. A `GradScaler` is refused, and so are optimizers that need a closure, such as LBFGS, or hold another one,
        such as `PostLocalSGDOptimizer` and `ZeroRedundancyOptimizer`: their steps do more than update parameters.
        Whatever else looks at gradients before the step, or an optimizer of your own whose update of a parameter
        depends on other parameters, cannot be combined with it.

        The idea is that of Jiang et al., "Optimizer Fusion", arXiv:2104.00237. See examples/optimizer_in_backward.py.

        Args:
            optimizer: over any of the parameters; others keep their gradients.

        Raises:
            RuntimeError: there is one already.
            ValueError: its step does more than update parameters one by one; says what, and what to do.
        """
        self.registered.update_by(optimizer)

    def synchronize(self) -> None:
        """Waits for what the last backward left under way, with overlap="next_forward", and updates those parameters.

        Afterwards weights and the optimizer's state are those of `optimizer.step()` after that backward. Not a
        collective: any rank may call it at any time between a backward and the next forward. `state_dict`,
        `load_state_dict`, copies and pickles of modules, parameters and optimizers, and compiled graphs do so by
        themselves for what they read.

        Raises:
            RanksDisagree: another rank gave up, or did not come in time.
        """
        self.under_way.settle_all()
        self.under_way.doubtful.clear()

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
    bucket_mb: float | str = USUAL_MB,
    *,
    first_bucket_mb: float = FIRST_MB,
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
    device_mesh: DeviceMesh | None = None,
    algorithm: str | None = None,
    inner: Any = "inductor",
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    split: bool = True,
    init_sync: bool = True,
    forward_sync_buffers: bool = True,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    keep_graphs: bool = False,
    comm_hook: str | Codec | Callable[..., Any] | None = None,
    optimizer: Optimizer | None = None,
    overlap: str | None = None,
) -> Backend:
    """Makes a backend for `torch.compile` that trains data-parallel: each `.grad` is the average over the ranks.

    Buckets and overlap are those of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training", VLDB 2020, arXiv:2006.15704; here the backward graph is cut. One backend may serve several models.

        model = torch.compile(model, backend=fxddp.backend(bucket_mb=25))

    Args:
        bucket_mb: size of a bucket in MiB; gradients are all-reduced bucket by bucket, in the order they become ready.
            "auto" chooses where each bucket ends from a model of the step (`passes/step.py`), for which the group's
            network and the ranks' processors are measured once, together, right before first contact.
        first_bucket_mb: size of the first bucket in MiB; a small one starts the communication early.
        process_group: the group to average over; None for the default group. Without `torch.distributed` the model
            trains alone. Of several groups of the same ranks, buckets take the next one in turns (Li et al., "PyTorch
            Distributed", VLDB 2020, arXiv:2006.15704); see examples/groups.py.
        device_mesh: in place of `process_group`: the ranks of a mesh of one dimension, or of two, (nodes, ranks inside
            a node), for a hierarchical reduction.
        algorithm: "all_reduce", but an all-gather of rows for tables where that is less to send (`rows.py`); "ring", a
            reduce-scatter and an all-gather; "hierarchical", a reduce-scatter inside a node, an all-reduce across nodes
            of each rank's part, and an all-gather inside; `transport.py` has the papers. Sums are those of an
            all-reduce up to rounding. None for what fits the mesh.
        inner: what compiles forward and the pieces of the backward: "inductor", "aot_eager" (runs the operators one by
            one; for debugging), or a callable `(graph, example_inputs) -> callable`.
        options: inductor's settings, as in `torch.compile`.
        mode: one of `torch.compile`'s modes, for inductor.
        split: cut the backward at the buckets and launch between the pieces; False keeps one graph with the collectives
            inside, in all their steps and over all groups, for backwards that have nothing accumulated to fold in.
        init_sync: check shapes and send rank 0's parameters and buffers when a model first runs with grad enabled.
        forward_sync_buffers: send rank 0's buffers before each forward that changes them and will synchronise.
        find_unused_parameters: ranks may use different parameters in one step: averaged over their union, zeros
            standing in; what no rank uses keeps its `.grad`. Parameters that no rank uses need no flag.
        static_graph: raise, naming the parameters, if the set that gets gradients ever changes.
        keep_graphs: keep all graphs for `fxddp.explain`, at the cost of host memory.
        comm_hook: what travels in place of the buckets: "fp16" or "bf16", half the bytes, cast by the compiled code
            that packs them; `fxddp.PowerSGD(…)`, `fxddp.Int8(…)` or `fxddp.Adaptive(…)`, an object that keeps state and
            belongs to this backend; or a hook of DistributedDataParallel's that needs no state; see
            `Backend.register_comm_hook`.
        optimizer: updates its parameters in backward, each when its bucket has arrived, while others still travel, and
            takes their gradients; see `Backend.register_optimizer`.
        overlap: "next_forward" moves the waits for buckets, and the updates, from the end of the backward into the next
            forward, each to right before its parameters are read: where the network is the bottleneck, a step takes as
            long as the network needs, and not that and the forward. Needs `optimizer`. Until that forward has read
            them, weights are those of the step before for code of the user's that reads them: see
            `Backend.synchronize`. Measures the network as "auto" does, to decide in which order buckets leave.

    Raises:
        ValueError: an argument is not allowed; names argument, value and what is allowed.
    """
    made = Backend(
        make_settings(
            bucket_mb,
            first_bucket_mb=first_bucket_mb,
            process_group=process_group,
            device_mesh=device_mesh,
            algorithm=algorithm,
            inner=inner,
            options=options,
            mode=mode,
            split=split,
            init_sync=init_sync,
            forward_sync_buffers=forward_sync_buffers,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            keep_graphs=keep_graphs,
            comm_hook=comm_hook,
            optimizer=optimizer,
            overlap=overlap,
        )
    )
    made.turn = Turn(made.settings.process_group)
    return made
