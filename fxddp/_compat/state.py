"""State dicts of the wrapper: DistributedDataParallel's names, and they load into the plain module all the same."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .wrapping import wrap

PREFIX = "module."
MARK = "saved_by_fxddp"


def mark_states(wrapper: nn.Module) -> None:
    """Has a wrapper's state dicts say whose they are, in their metadata, which `torch.save` keeps."""
    if _mark not in wrapper._state_dict_hooks.values():  # a copy brings it along
        wrapper._register_state_dict_hook(_mark)
    _accept_marked()


def _mark(_wrapper: nn.Module, _state: Mapping[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    if not prefix:
        metadata[MARK] = True


@functools.cache
def _accept_marked() -> None:
    wrap(nn.Module, "load_state_dict", _load_plain)


def _load_plain(
    load: Callable[..., Any], module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    return load(module, _plain(module, state_dict), *args, **kwargs)


def _plain(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A wrapper's state with the names of the plain module, if that is what it is loaded into."""
    metadata = getattr(state, "_metadata", {})
    if not metadata.get("", {}).get(MARK) or isinstance(module, DistributedDataParallel):
        return state
    if not all(name.startswith(PREFIX) for name in state) or not module.state_dict().keys().isdisjoint(state):
        return state
    plain = OrderedDict((name.removeprefix(PREFIX), value) for name, value in state.items())
    plain._metadata = OrderedDict(  # type: ignore[attr-defined]
        ((name + ".").removeprefix(PREFIX).removesuffix("."), value) for name, value in metadata.items() if name
    )
    return plain
