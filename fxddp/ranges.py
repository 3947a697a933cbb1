"""Named ranges in a profile of torch's: `fxddp.piece0`, `fxddp.bucket3.allreduce`, `fxddp.bucket3.wait`.

The collective that a process group records inside of `fxddp.bucket3.allreduce` is bucket 3's, unless it is inside of a
step's in it, such as `fxddp.bucket2.all-gather`: later steps of a bucket start when another is launched or waited for.
Buckets and pieces are numbered through the whole backward, as in `BackwardRecord.events`. Without a profiler a range
costs one look at a flag.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import record_function

from . import _compat

if TYPE_CHECKING:
    from .backward import Backward, Launched

OUTSIDE = "outside"
"""In place of a number: a bucket that no graph packed."""


_local = threading.local()


def current() -> str:
    """The bucket that this thread is launching, as `fxddp.bucket3`; "" without a profiler."""
    return str(getattr(_local, "bucket", ""))


def step(bucket: str, name: str) -> AbstractContextManager[Any]:
    """The range of a step of a bucket that was `current` when it was launched."""
    return _inside(bucket, name) if bucket and _compat.profiling() else nullcontext()


def launch(number: int | str) -> AbstractContextManager[Any]:
    """The range of the launch of a bucket with this number."""
    return _inside(f"fxddp.bucket{number}", "allreduce") if _compat.profiling() else nullcontext()


@contextmanager
def _inside(bucket: str, name: str) -> Iterator[None]:
    before, _local.bucket = current(), bucket
    try:
        with record_function(f"{bucket}.{name}"):
            yield
    finally:
        _local.bucket = before


def run_piece(piece: Callable[[list[Any]], Any], arguments: list[Any], number: int, kind: str = "piece") -> Any:
    """Calls a piece inside its range; `kind` is "forward" for one of a forward."""
    with record_function(f"fxddp.{kind}{number}"):
        return piece(arguments)


def launches(function: Callable[..., "Launched"]) -> Callable[..., "Launched"]:
    """Decorates `Backward.launch`."""

    @wraps(function)
    def ranged(backward: "Backward", *arguments: Any, **options: Any) -> "Launched":
        with launch(OUTSIDE if options.get("outside") else backward.record.launches):
            return function(backward, *arguments, **options)

    return ranged


def wait(number: int) -> AbstractContextManager[Any]:
    """The range of the wait for a bucket with this number."""
    return record_function(f"fxddp.bucket{number}.wait") if _compat.profiling() else nullcontext()


def waits(wait: Callable[["Backward", "Launched"], None]) -> Callable[["Backward", "Launched"], None]:
    """Decorates `Backward.wait`."""

    @wraps(wait)
    def ranged(backward: "Backward", launched: "Launched") -> None:
        if launched.work is None or not _compat.profiling():
            return wait(backward, launched)
        with record_function(f"fxddp.bucket{OUTSIDE if launched.outside else launched.index}.wait"):
            return wait(backward, launched)

    return ranged
