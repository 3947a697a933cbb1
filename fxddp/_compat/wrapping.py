"""Functions of torch's that run through one of ours."""

from collections.abc import Callable
from functools import wraps
from typing import Any

Around = Callable[..., Any]
"""Called with a function and the arguments of a call of it, in place of it."""


def through(function: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """The function as it is seen from outside, of which `around` makes every call."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    return call


def wrap(owner: Any, name: str, around: Around) -> None:
    """Puts `through` in the place of a function of a module or class. What was wrapped last runs first."""
    setattr(owner, name, through(getattr(owner, name), around))


def wrap_inside(function: Any, around: Around) -> None:
    """`wrap` for a decorated function that others may have imported by now: for what its decorator calls."""
    (cell,) = function.__closure__
    cell.cell_contents = through(cell.cell_contents, around)
