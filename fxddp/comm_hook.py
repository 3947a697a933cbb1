"""DistributedDataParallel's communication hooks: what a user runs on a bucket in place of the all-reduce.

Note [order of hooks]: a hook may start further collectives when its first one is done, from another thread (PowerSGD
does). On gloo nothing orders these between ranks but the hook itself, so the next bucket's hook is only called when the
last one has finished; except for hooks known to start a single collective. NCCL runs such callbacks when they are
enqueued, in order.
"""

import threading
import typing
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from .channel import Failed
from .packing import places_in

if TYPE_CHECKING:
    from .sending import Sending

SINGLE = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
"""Hooks that start one collective for each bucket."""

Future = torch.futures.Future[torch.Tensor]


class GradBucket:
    """A bucket as a hook sees it, with the methods of `torch.distributed.GradBucket`.

    As there, the buffer of complex gradients holds real numbers, twice as many: a hook that casts to 16 bits would
    lose the imaginary parts, and collectives give real results.
    """

    def __init__(self, buffer: Tensor, parameters: Sequence[Tensor], index: int, *, is_last: bool) -> None:
        self._buffer = buffer
        self._parameters = list(parameters)
        self._index = index
        self._is_last = is_last

    def buffer(self) -> Tensor:
        """The gradients, flat and not divided yet."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, in the parameters' shapes, and one dimension of 2 more where these are complex."""
        if not self._parameters[0].is_complex():
            return places_in(self._buffer, self._parameters)
        pairs = torch.view_as_complex(self._buffer.view(-1, 2))
        return [torch.view_as_real(place) for place in places_in(pairs, self._parameters)]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their gradients."""
        return self._parameters

    def index(self) -> int:
        """Number of the bucket in this backward."""
        return self._index

    def is_last(self) -> bool:
        """Whether this is a graph's last bucket."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Replaces the buffer."""
        self._buffer = tensor


class HookWork:
    """What a hook was started for; waits as the work of a collective does."""

    def __init__(self, future: Any, flat: Tensor, failed: Callable[[BaseException], Failed]) -> None:
        self._future = future
        self._flat = flat
        self._failed = failed
        self._done = threading.Event()
        self._taken = False
        if not hasattr(future, "add_done_callback"):
            raise TypeError(f"callback must return a torch.futures.Future object, but got {type(future).__name__}")
        future.add_done_callback(lambda _: self._done.set())

    def is_completed(self) -> bool:
        """Whether the hook's result is there."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits for the hook's result and puts it into the bucket; does nothing once that was done, or raised.

        Raises:
            Failed: the hook failed.
            RuntimeError: "timed out".
        """
        if timeout is not None and not self._done.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self._taken:
            return
        self._taken = True
        try:
            result = self._future.wait()
        except Exception as error:
            raise self._failed(error) from error
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if not isinstance(result, Tensor) or result.numel() != self._flat.numel():
            found = f"{tuple(result.shape)}" if isinstance(result, Tensor) else f"{result!r:.80}"
            like = f"the buffer, of {self._flat.numel()} elements"
            raise self._failed(TypeError(f"it must give a future of a tensor like {like}, not of {found}"))
        if result.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(result.reshape(-1))


class CommHook:
    """A registered hook.

    Args:
        state: passed to every call.
        hook: `(state, bucket) -> Future[Tensor]`.

    Raises:
        TypeError, ValueError: it is no such function.
    """

    divides = True
    in_graphs = False
    takes_rows = False

    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, got {hook!r}")
        bucket, result = _annotations(hook)
        if bucket not in (None, Any, dist.GradBucket):
            raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket, got {bucket!r}")
        if result not in (None, Any, Future):
            raise ValueError(
                f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], got {result!r}"
            )
        self.name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self._state = state
        self._hook = hook
        self._last: weakref.ref[HookWork] | None = None

    def start(
        self,
        flat: Tensor,
        members: Sequence[Tensor],
        sending: "Sending",
        travels: Callable[[int], None],
        *,
        is_last: bool,
        **_: Any,
    ) -> HookWork:
        """As `Carrier.start`: calls the hook for a bucket; see Note [order of hooks].

        Raises:
            Failed: it raised; names hook, bucket and parameters.
        """
        group, index, names = sending.group, sending.count, sending.names

        def failed(error: BaseException) -> Failed:
            return Failed(f"communication hook {self.name} failed for bucket {index} ({names(members)}): {error}")

        travels(flat.nbytes)
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        last = None if self._last is None else self._last()  # of this graph or another
        if last is not None and self._hook not in SINGLE and group.backend_name == "gloo":
            # even if it is done: had it failed, all ranks must stop at this one
            group.wait(last, lambda: f"run communication hook {self.name}")
        group.settle()
        group.count()
        try:
            future = self._hook(self._state, GradBucket(flat, members, index, is_last=is_last))
            work = HookWork(future, flat, failed)
        except Exception as error:
            raise failed(error) from error
        self._last = weakref.ref(work)
        return work


def _annotations(hook: Callable[..., Any]) -> tuple[Any, Any]:
    """What a hook says of its bucket and its result; None where it says nothing, or what cannot be looked up."""
    try:
        hints = typing.get_type_hints(hook)
    except (NameError, TypeError):
        return None, None
    return hints.get("bucket"), hints.get("return")
