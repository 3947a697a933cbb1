"""Members of torch's wrapper that people use beside `forward`: with another meaning here, or not there."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook

from . import _compat
from . import ddp_arguments as checked
from ._compat import data_parallel as stock
from .config import Settings
from .ddp_logging import ForwardClock, logging_data
from .group import GroupLookup, GroupReference
from .join import Shadow, Uneven
from .module_backend import ModuleBackend
from .optimizer import optimizer_over


class Members(nn.parallel.DistributedDataParallel):
    """The base of `fxddp.DistributedDataParallel`.

    Attributes:
        backend: the wrapper's own backend.
    """

    backend: ModuleBackend
    _settings: Settings
    _clock: ForwardClock
    _module_parameters: list[nn.Parameter]
    shared_tensors: Callable[[], list[tuple[str, Tensor]]]

    @property
    def bucket_bytes_cap(self) -> int:  # type: ignore[override]
        """Size of a bucket in bytes."""
        return self._settings.cap

    # --- settings that can be changed later -------------------------------------------------------

    def _set_static_graph(self) -> None:
        """From now on the set of parameters with gradients must not change."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.backend.stats().total:
            raise RuntimeError(
                f"set static_graph before training starts, not after {self.backend.stats().total} backwards: "
                f"pass static_graph=True to {type(self).__name__}"
            )
        self.static_graph = True
        self._change_settings(static_graph=True, find_unused_parameters=not self.skip_all_reduce_unused_params)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Averages over other ranks from now on; at their next training forward they get the new rank 0's weights."""
        if self._settings.lanes or self._settings.mesh is not None:
            raise RuntimeError(
                "_update_process_group replaces one group, but this wrapper has several: make a new one with the new "
                "groups"
            )
        self.process_group = checked.group(new_process_group, None)
        given = GroupReference(self.process_group)
        self._change_settings(process_group=given)
        self.backend.lookup = GroupLookup(given)

    def _change_settings(self, **changed: Any) -> None:
        self._settings = replace(self._settings, **changed)
        self.backend.settings = self._settings

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = stock.HookLocation.POST_FORWARD
    ) -> None:
        """Has `hook(state, {name: buffer})` synchronise buffers in place of sending rank 0's.

        What it returns, None or a list of futures, is waited for at once.
        """
        super()._register_buffer_comm_hook(state, hook, comm_hook_location)

    # --- looking ----------------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What the wrapper was given and what the last backwards did; times in nanoseconds, sizes in bytes."""
        return logging_data(self, self._clock)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Checks its argument; every backward is on record, whatever the rate."""
        if sample_rate < 1:
            raise ValueError(f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate!r}")

    def _check_reducer_finalized(self) -> None:
        """Returns: a backward that ended has reduced everything."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Returns: outputs are the module's own and are never cloned."""

    @property
    def reducer(self) -> "Reducer":  # type: ignore[override]
        """For libraries that ask torch's reducer for the average of what forwards under `no_sync` left."""
        return Reducer(self.backend)

    # --- not there --------------------------------------------------------------------------------

    @property
    def join_device(self) -> torch.device:
        """The device of `Join`'s own collectives."""
        device: torch.device = self._module_parameters[0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """The group of `Join`'s own collectives."""
        return self.process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does; called by `Join`.

        Args:
            kwargs: `divide_by_initial_world_size`, by default True: divide by the number of all ranks, not of those
                that still have inputs.
        """
        self.backend.owes_backward = False  # whatever an error left of another `join`
        self.backend.divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return Shadow(self)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Inside, ranks may have different numbers of inputs: those that run out take part with zeros.

        At the end all ranks get what the rank has that ran out last.

        Args:
            divide_by_initial_world_size: see `join_hook`.
            enable: whether to do anything.
            throw_on_early_termination: raise on all ranks as soon as one runs out.
        """
        return Uneven(self, enable=enable, throw=throw_on_early_termination, by_initial=divide_by_initial_world_size)

    @property
    def joins_first(self) -> bool:
        """Whether `Join` was given this model before others: its forwards tell how many ranks have inputs."""
        return bool(self._join_config.is_first_joinable)

    def leave_join(self) -> None:
        """Forwards announce nothing to ranks without inputs any more; torch leaves that on."""
        self._join_config = stock.no_join()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Has a communication hook run on every bucket; see `Backend.register_comm_hook`."""
        self.backend.register_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(None, stock.builtin_hook(comm_hook_type))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Has an optimizer update parameters in backward; see `Backend.register_optimizer`.

        Args:
            optim: a class of `torch.optim`.
            args: for its constructor, after the parameters.
            optim_params: the parameters it is for; None for all.
            kwargs: for its constructor.

        Raises:
            ValueError: `optim` is no optimizer class, or one that cannot update parameters one by one.
            RuntimeError: there is one already.

        As in examples/optimizer_in_backward.py:

            model._register_fused_optim(torch.optim.AdamW, 0.01)
        """
        parameters = self._module_parameters if optim_params is None else optim_params
        optimizer = optimizer_over(optim, parameters, *args, **kwargs)
        self.backend.register_optimizer(optimizer)
        self._change_settings(optimizer=optimizer)  # for copies

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        raise NotImplementedError("_set_sparse_metadata: sparse gradients need none, and travel dense but on gloo")

    def _remove_autograd_hooks(self) -> None:
        raise NotImplementedError(
            "_remove_autograd_hooks: there is no Reducer whose hooks could be removed; use .module to train without "
            "averaging"
        )


class Reducer:
    """What torch's pipeline schedules and other libraries call of the reducer of torch's wrapper."""

    def __init__(self, backend: ModuleBackend) -> None:
        self._backend = backend

    def prepare_for_backward(self, tensors: Sequence[Tensor]) -> None:
        """Has the next backward average what forwards under `no_sync` accumulated, its own included.

        Args:
            tensors: outputs that it starts from; of no use here, as unused parameters are found anyway.
        """
        self._backend.gathers = True

    def _rebuild_buckets(self) -> bool:
        return False  # they are in the order of the backward from the start


def _refuse_to_be_wrapped(parent: nn.Module, _: str, child: nn.Module | None) -> None:
    """Torch's own wrapper around a module that averages its gradients already would average them again, and wait."""
    stock_wrapper = isinstance(parent, nn.parallel.DistributedDataParallel)
    if stock_wrapper and child is not None and not isinstance(parent, Members):
        checked.not_for_stock(child)


stock.on_module_set(_compat.only_inlined(_refuse_to_be_wrapped))
