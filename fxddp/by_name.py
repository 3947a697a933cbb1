"""The backend under its name: `torch.compile(model, backend="fxddp", options={"bucket_mb": 25})`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from .config import split_options

if TYPE_CHECKING:
    from .backend import Backend

_named: dict[str, "Backend"] = {}


def by_name(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compiles a Dynamo graph with the backend behind these options; what the name stands for in torch's registry."""
    return named_backend(options, mode)(gm, inputs)


def named_backend(options: Mapping[str, Any] | None, mode: str | None) -> "Backend":
    """The one backend behind these options: models compiled by name with equal options share it.

    Raises:
        ValueError: an option is not allowed, or its value is not.
    """
    from .backend import backend

    own, rest = split_options(options or {})
    key = repr((sorted(own.items(), key=str), sorted(rest.items(), key=str), mode))
    if key not in _named:
        _named[key] = backend(**own, options=rest, mode=mode)
    return _named[key]
