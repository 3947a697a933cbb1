"""Named ranges in a profile of torch's: `fxddp.piece0`, `fxddp.bucket3.allreduce`, `fxddp.bucket3.wait`.

The collective that a process group records inside of `fxddp.bucket3.allreduce` is bucket 3's; buckets and pieces are
numbered through the whole backward, as in `BackwardRecord.events`. Without a profiler a range costs one look at a flag.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import record_function

from . import _compat

if TYPE_CHECKING:
    from .backward import Backward, Launched

OUTSIDE = "outside"
"""In place of a number: a bucket that no graph packed."""


def run_piece(piece: Callable[[list[Any]], Any], arguments: list[Any], number: int) -> Any:
    """Calls a piece inside its range."""
    with record_function(f"fxddp.piece{number}"):
        return piece(arguments)


def launches(launch: Callable[..., "Launched"]) -> Callable[..., "Launched"]:
    """Decorates `Backward.launch`."""

    @wraps(launch)
    def ranged(backward: "Backward", *arguments: Any, **options: Any) -> "Launched":
        if not _compat.profiling():
            return launch(backward, *arguments, **options)
        number = OUTSIDE if options.get("outside") else backward.record.launches
        with record_function(f"fxddp.bucket{number}.allreduce"):
            return launch(backward, *arguments, **options)

    return ranged


def waits(wait: Callable[["Backward", "Launched"], None]) -> Callable[["Backward", "Launched"], None]:
    """Decorates `Backward.wait`."""

    @wraps(wait)
    def ranged(backward: "Backward", launched: "Launched") -> None:
        if launched.work is None or not _compat.profiling():
            return wait(backward, launched)
        with record_function(f"fxddp.bucket{OUTSIDE if launched.outside else launched.index}.wait"):
            return wait(backward, launched)

    return ranged
