"""State dicts: those of the wrapper and of compiled modules load into the plain module all the same."""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .wrapping import wrap

PREFIX = "module."  # of the wrapper, as of torch's
COMPILED = "_orig_mod."
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


def plain_names(compiled: Any) -> None:
    """Has a compiled module save its state under the plain names, and load it with or without torch's prefix."""
    if isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule):
        compiled._register_state_dict_hook(_without_prefix)
        compiled._register_load_state_dict_pre_hook(_with_prefix)


def _without_prefix(_: Any, state: Any, prefix: str, __: Any) -> None:
    if _asked_by_checkpoint_functions():
        return
    for names in (state, getattr(state, "_metadata", {})):
        for name in [name for name in names if name.startswith(prefix + COMPILED)]:
            names[prefix + name.removeprefix(prefix + COMPILED)] = names.pop(name)


def _asked_by_checkpoint_functions() -> bool:
    # torch.distributed.checkpoint.state_dict takes the prefix away itself, and insists on finding it.
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        caller = caller.f_back
    return caller is not None


def _with_prefix(state: Any, prefix: str, *_: Any) -> None:
    for names in (state, getattr(state, "_metadata", {})):
        for name in [n for n in names if n.startswith(prefix) and not n.startswith(prefix + COMPILED)]:
            if name != prefix.removesuffix("."):
                names[prefix + COMPILED + name.removeprefix(prefix)] = (
                    names.pop(name) if names is state else names[name]
                )
