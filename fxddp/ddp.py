"""`fxddp.DistributedDataParallel`: torch's wrapper by name and contract, with a compiled module and fxddp's backend.

Note [drop-in]: a subclass of torch's class for `isinstance` alone. Torch's `__init__` never runs, so there is no
Reducer, and `forward` never says which module is active, so DDPOptimizer never wakes. What a wrapper adds to a backend:
tensors are known, checked and sent at construction, and each forward knows whether it will synchronise.
"""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh

from . import _compat
from . import ddp_arguments as checked
from . import mixed_precision as precision
from ._compat import data_parallel as stock
from .compression import Codec
from .config import make_settings
from .ddp_logging import ForwardClock
from .ddp_members import Members
from .join import announce_forward
from .module_backend import ModuleBackend, Structure

_instances = itertools.count()

_NOT_COPIED = ("backend", "process_group", "device_mesh", "_runs", "_codes", "_hooked", "_clock", "_structure")
"""What belongs to this process or this instance: made anew for a copy."""


class DistributedDataParallel(Members):
    """Trains a module data-parallel: after `loss.backward()` every `.grad` is the average over the ranks.

    A drop-in for `torch.nn.parallel.DistributedDataParallel`: same arguments, same names in `state_dict`. The module is
    compiled with an `fxddp.backend` of its own, which `backend` gives; what a graph does not cover is averaged at the
    end of the same backward. A collective: ranks check that they hold the same parameters and buffers, and get rank 0's
    values. The contract is that of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training", VLDB 2020, arXiv:2006.15704.

        model = fxddp.DistributedDataParallel(module)  # in place of torch.nn.parallel.DistributedDataParallel

    Arguments of torch's class, where they mean something else or nothing here:

    - `bucket_cap_mb`: MiB, 25 by default with a first bucket of 1 MiB; a given size is also the first bucket's.
    - `bucket_cap_mb_list`: MiB of the buckets in the order in which gradients become ready; the last for all others.
    - `broadcast_buffers`: deprecated as in torch 2.13, in favour of `forward_sync_buffers`. Rank 0's buffers are sent
      before each forward that will synchronise: in training mode, with grad enabled and outside of `no_sync`.
    - `find_unused_parameters`, `static_graph`: as in `fxddp.backend`; a static graph may use different parameters on
      different ranks, as torch's may.
    - `skip_all_reduce_unused_params`: ranks leave out the same parameters; nothing is exchanged, whatever
      `find_unused_parameters` says.
    - `gradient_as_bucket_view`, `batched_grad_copy`: a gradient is always a view of its bucket, packed by compiled
      code; both values give that.
    - `delay_all_reduce_named_params`, `param_to_hook_all_reduce`: these parameters, which must be the module's, are
      averaged like all others, in the order the backward gives. Nothing has to be delayed for it.
    - `mixed_precision`: parameters and inputs are cast to `param_dtype` in the forward, and gradients travel in
      `reduce_dtype`, by default `param_dtype`. They accumulate in the parameters' own dtype, and it works on CPUs too.
      Activation checkpointing goes with it inside of compiled graphs; eager code that is computed again in the backward
      meets the uncast parameters.
    - `dim`: kept for `scatter` and `gather`.

    Args:
        module: what to train.
        device_ids: None, or the one device that holds the module; inputs are moved there.
        output_device: None, or that device.
        dim: the batch dimension.
        broadcast_buffers: deprecated.
        init_sync: check shapes and send rank 0's parameters and buffers now. With False they are only checked, at the
            first training forward.
        process_group: the ranks; None for the default group. A list of groups: see `fxddp.backend`.
        bucket_cap_mb: size of a bucket in MiB, or "auto"; see `fxddp.backend`.
        find_unused_parameters: ranks may use different parameters in one step.
        check_reduction: deprecated.
        gradient_as_bucket_view: see above.
        static_graph: raise if the set of parameters with gradients ever changes.
        delay_all_reduce_named_params: see above.
        param_to_hook_all_reduce: see above.
        mixed_precision: torch's `_MixedPrecision`.
        device_mesh: a mesh of one dimension, in place of `process_group`; of two with algorithm="hierarchical".
        skip_all_reduce_unused_params: see above.
        bucket_cap_mb_list: see above.
        batched_grad_copy: see above.
        forward_sync_buffers: send rank 0's buffers before forwards; None for True.
        compile: compile the module; with False nothing is compiled and gradients are averaged at the end of the
            backward, for debugging, with the same numbers.
        first_bucket_mb: size of the first bucket in MiB.
        inner: as in `fxddp.backend`, like the next three.
        options: settings of inductor.
        mode: one of `torch.compile`'s modes.
        split: cut the backward at the buckets.
        keep_graphs: keep all graphs for looking at them.
        comm_hook: as `fxddp.backend`'s.
        optimizer: as `fxddp.backend`'s, like the next one, which needs `compile=True`.
        overlap: as `fxddp.backend`'s.
        dynamic: as in `torch.compile`.
        fullgraph: as in `torch.compile`.

    Raises:
        ValueError: an argument is not allowed, or there is no process group.
        RuntimeError: the module cannot be trained this way; says why.
        RanksDisagree: on every rank: the module is not the same on all of them.
    """

    def __init__(  # noqa: PLR0917 (as in torch)
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: Tensor | None = None,
        mixed_precision: stock.MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        compile: bool = True,  # noqa: A002 (torch's word for it)
        first_bucket_mb: float | None = None,
        inner: str | Callable[..., Any] = "inductor",
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
        split: bool = True,
        keep_graphs: bool = False,
        comm_hook: str | Codec | Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        overlap: str | None = None,
        algorithm: str | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        checked.types(module, device_mesh, mixed_precision)
        checked.flags(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
            compile=compile,
            fullgraph=fullgraph,
        )
        if check_reduction:
            warnings.warn(
                "check_reduction is deprecated and has no effect: every backward is checked",
                FutureWarning,
                stacklevel=2,
            )
        self.process_group = checked.group(process_group, device_mesh, algorithm)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        sync, init_sync_buffers = checked.buffer_flags(broadcast_buffers, forward_sync_buffers)
        self.forward_sync_buffers = sync
        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore = set(ignored)
        named = checked.parameters(module, ignored)
        checked.delayed(delay_all_reduce_named_params, param_to_hook_all_reduce, named)
        checked.module(module, named)
        self._module_parameters = [parameter for _, parameter in named]
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.device_ids, self.output_device = checked.devices(device_ids, output_device, self._module_parameters)
        self.is_multi_device_module = len({p.device for p in self._module_parameters}) > 1
        self.dim = dim
        self.use_side_stream_for_tensor_copies = True
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self._comm_hooks: list[tuple[Any, object]] = []
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        caps, first = checked.bucket_sizes(bucket_cap_mb, bucket_cap_mb_list, first_bucket_mb)
        self._settings = make_settings(
            caps[0],
            first_bucket_mb=first,
            process_group=checked.given_groups(process_group, self.process_group, device_mesh, algorithm),
            device_mesh=device_mesh if algorithm == "hierarchical" else None,
            algorithm=algorithm,
            inner=inner,
            options=options,
            mode=mode,
            split=split,
            init_sync=init_sync,
            forward_sync_buffers=False,  # all buffers, not just those of a graph, are sent in `forward`
            find_unused_parameters=(find_unused_parameters or static_graph) and not skip_all_reduce_unused_params,
            static_graph=static_graph,
            keep_graphs=keep_graphs,
            comm_hook=comm_hook,
            optimizer=optimizer,
            overlap=overlap,
            bucket_mb_list=caps[1:],
        )
        if overlap is not None and not compile:
            raise ValueError(f"overlap={overlap!r} moves waits into a compiled forward: leave compile=False out")
        self._compile: dict[str, Any] | None = {"dynamic": dynamic, "fullgraph": fullgraph} if compile else None
        self.module = module
        self._connect()
        self._first_contact(send=init_sync, send_buffers=init_sync and init_sync_buffers)
        if mixed_precision is not None:
            precision.cast_buffers(mixed_precision, module, ignored)

    def _connect(self) -> None:
        """Makes what belongs to this instance: the backend and the compiled call."""
        self.backend = ModuleBackend(self._settings, self.module, frozenset(self.parameters_to_ignore))
        self._clock = ForwardClock()
        self._structure = Structure(self.module)
        _compat.mark_states(self)
        reduction = precision.reduction(self.mixed_precision, self.backend.shared_parameters().values())
        if reduction is not None:
            self.backend.registered.carry_by(reduction)
        self._runs: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._codes: set[CodeType] = set()
        self._hooked: tuple[int, ...] | None = None

    @property
    def _run(self) -> Callable[..., Any]:
        """The call of the module, compiled for the hooks that modules have: Dynamo does not notice first ones.

        Nor does it in code of the module's own that it compiled after a graph break.
        """
        hooked = self._structure.hooked
        if hooked != self._hooked:
            self._hooked = hooked
            self.backend.forget_frames(self._codes)
        if hooked not in self._runs:
            run = precision.runner(self.mixed_precision, frozenset(self.parameters_to_ignore))
            if self._compile is not None:
                run = _compat.with_own_code(run, f"forward_{next(_instances)}_of_{type(self.module).__name__}")
                self._codes.add(run.__code__)
                run = torch.compile(run, backend=self.backend, **self._compile)
            self._runs[hooked] = run
        return self._runs[hooked]

    def _first_contact(self, *, send: bool, send_buffers: bool) -> None:
        group = self.backend.lookup()
        assert group is not None
        parameters = list(self.backend.shared_parameters().items())
        buffers = list(self.backend.shared_buffers().items())
        replica = self.backend.replica
        replica.contact([*parameters, *buffers] if send_buffers else parameters, group, send=send)
        replica.contact(buffers, group, send=False)

    # --- forward ----------------------------------------------------------------------------------

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="fxddp.DistributedDataParallel compiles its module itself: leave fullgraph off here"
    )
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; decides whether the backward of this forward synchronises."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"), self._clock:
            checked.no_stock_around()
            trains = torch.is_grad_enabled()
            if not trains:  # eager parts would not ask
                self.backend.under_way.settle_all()
            if self._structure.has_changed():
                self._structure = Structure(self.module)
                self.backend.keep_up()
            sync = self._synchronises
            if self._join_config.enable:
                self._tell_joined(sync=sync and trains)
            if self._syncs_buffers_at(stock.HookLocation.PRE_FORWARD):
                self._sync_buffers()
            if self.device_ids:
                inputs, kwargs = stock.moved(inputs, kwargs, torch.device(self.device_type, self.device_ids[0]))
            if self.mixed_precision is not None:
                inputs, kwargs = stock.cast(inputs, kwargs, self.mixed_precision.param_dtype)
            with nullcontext() if sync else self.backend.no_sync():
                output = self._run(self.module, *inputs, **kwargs)
            if self._syncs_buffers_at(stock.HookLocation.POST_FORWARD):
                self._sync_buffers()
            if trains:
                self.backend.mark(stock.tensors_in(output), sync=sync)
            return output

    def _tell_joined(self, *, sync: bool) -> None:
        """Tells ranks without inputs what is coming; see Note [join]."""
        Join.notify_join_context(self)
        group = self.backend.lookup()
        if group is not None and group.size > 1:
            announce_forward(self.backend, group, sync=sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards that run inside stay local and accumulate.

        The next synchronised backward averages the sum, with the collectives of a normal step. Where the forward ran
        decides. Setting `require_backward_grad_sync` does the same.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def _synchronises(self) -> bool:
        return self.require_backward_grad_sync and not self.backend.is_local

    # --- buffers ----------------------------------------------------------------------------------

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The buffers that ranks share, by name, as they are now."""
        return self.backend.shared_buffers()

    @property
    def modules_buffers(self) -> list[Tensor]:  # type: ignore[override]
        """The buffers that ranks share, as they are now."""
        return list(self.named_module_buffers.values())

    def shared_tensors(self) -> list[tuple[str, Tensor]]:
        """Names and tensors that are the same on all ranks after a step: buffers only if forwards send them."""
        shared: dict[str, Tensor] = {**self.backend.shared_parameters()}
        return list((shared | self.backend.shared_buffers() if self.forward_sync_buffers else shared).items())

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward here and now would send rank 0's buffers.

        It does if it will synchronise: in training mode, with grad enabled, outside of `no_sync`. Setting
        `require_forward_param_sync` to False turns it off.
        """
        return bool(
            self.forward_sync_buffers
            and self.require_forward_param_sync
            and self._synchronises
            and self.training
            and torch.is_grad_enabled()
            and self.backend.has_buffers
        )

    def _syncs_buffers_at(self, location: Any) -> bool:
        hook = self.__dict__.get("buffer_hook")
        wanted = stock.HookLocation.PRE_FORWARD if hook is None else hook.buffer_comm_hook_location
        return wanted == location and self.will_sync_module_buffers()

    @torch.no_grad()
    def _sync_buffers(self) -> None:
        group = self.backend.lookup()
        assert group is not None
        buffers = self.named_module_buffers
        hook = self.__dict__.get("buffer_hook")
        with stock.same_versions(list(buffers.values())):
            if hook is None:
                self.backend.send_buffers(buffers, group)
                return
            for future in hook.buffer_comm_hook(hook.buffer_comm_hook_state, buffers) or ():
                future.wait()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module, whose names here begin with "module."; takes a state of the plain module as well."""
        if state_dict and not any(key.startswith("module.") for key in state_dict):
            return self.module.load_state_dict(state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict, assign)

    # --- copies -----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        """An independent wrapper of a copy of the module, on the same group, with a backend of its own."""
        new = self.__new__(type(self))
        memo[id(self)] = new
        state = {key: value for key, value in self.__dict__.items() if key not in _NOT_COPIED}
        new.__dict__.update(copy.deepcopy({k: v for k, v in state.items() if k != "_settings"}, memo))
        new.__dict__["_settings"] = replace(
            self._settings,
            codec=copy.deepcopy(self._settings.codec, memo),
            optimizer=copy.deepcopy(self._settings.optimizer, memo),
        )
        for key in ("process_group", "device_mesh"):
            if key in self.__dict__:
                new.__dict__[key] = self.__dict__[key]
        new._rebuild()  # noqa: SLF001 (of this class)
        return new

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: this one "
                "has a group of its own, and a process group cannot be pickled. Save its state_dict, or its .module"
            )
        state = {key: value for key, value in self.__dict__.items() if key not in _NOT_COPIED}
        state["broadcast_buffers"] = self.forward_sync_buffers
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        state.pop("broadcast_buffers", None)
        nn.Module.__setstate__(self, state)
        self.process_group = stock.default_group()
        self._rebuild()

    def _rebuild(self) -> None:
        self._connect()
        self._module_parameters = list(self.backend.shared_parameters().values())
