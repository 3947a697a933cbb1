"""Which backend a compiled model has, and which models a backend is to compile: told by torch, asked by users."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from . import _compat
from .by_name import by_name, named_backend
from .modules import modules_in

if TYPE_CHECKING:
    from .backend import Backend


def backend_of(model: Any) -> "Backend":
    """The backend of a model or function compiled with fxddp; of a regionally compiled module, that of its first part.

    Args:
        model: what `torch.compile` returned, a module on which `.compile()` was called, one with such parts, or a
            `fxddp.DistributedDataParallel`.

    Raises:
        ValueError: it is not compiled, or with another backend.
    """
    found = backends_in(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} is not compiled with fxddp: pass what torch.compile(…, backend=fxddp.backend(…)) "
            f"returned, or a "
            "module on which .compile(backend=…) was called"
        )
    return found[0]


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """`Backend.no_sync` for one compiled model, whatever backends its parts have.

    Args:
        model: as in `backend_of`; of a function, everything on its backend is meant.

    Raises:
        ValueError: it is not compiled, or with another backend.

    The gradients of several micro-batches travel once, with the last:

        with fxddp.no_sync(model):
            for micro_batch in micro_batches[:-1]:
                model(micro_batch).sum().backward()
        model(micro_batches[-1]).sum().backward()
    """
    backend_of(model)
    with ExitStack() as stack:
        for each in backends_in(model):
            stack.enter_context(each.no_sync(model if isinstance(model, nn.Module) else None))
        yield


def listen() -> None:
    """Has torch tell which models are to be compiled with one of our backends, and which frames Dynamo starts on.

    Dynamo may compile nothing of them: of an LSTM, of a frame without tensor work, of torch's own classes compiled in
    place, of whatever comes after its recompile limit. Their parameters are known all the same.
    """
    _compat.on_compile(_compiling)
    _compat.on_frame(_frame_started)


def _compiling(wrapper: Any, model: Any) -> Any:
    backend = _backend_behind(wrapper)
    if backend is None:
        return None
    for module in modules_in([model]):
        backend.adopt(module)
    return _compat.plain_names


def _frame_started(wrapper: Any, variables: Mapping[str, Any]) -> None:
    backend = _backend_behind(wrapper)
    if backend is not None:
        for name in ("self", "fn", "mod"):
            for module in modules_in([variables.get(name)]):
                backend.adopt(module)


def backends_in(model: Any) -> list["Backend"]:
    """All backends of a model and its parts: compiled ones, and those of `fxddp.DistributedDataParallel`."""
    candidates = [model, *(model.modules() if isinstance(model, nn.Module) else ())]
    found: dict[int, Backend] = {}
    for candidate in candidates:
        inner = _backend_behind(_compat.compile_wrapper(candidate)) or _own_backend(candidate)
        if inner is not None:
            found.setdefault(id(inner), inner)
    return list(found.values())


def _own_backend(candidate: Any) -> "Backend | None":
    from .ddp import DistributedDataParallel

    return candidate.backend if isinstance(candidate, DistributedDataParallel) else None


def _backend_behind(wrapper: Any) -> "Backend | None":
    """The backend in what `torch.compile` made of its backend argument, if it is one of ours."""
    from .backend import Backend

    inner = _compat.inner_backend(wrapper)
    if inner is by_name:
        arguments = getattr(wrapper, "kwargs", {})
        return named_backend(arguments.get("options"), arguments.get("mode"))
    return inner if isinstance(inner, Backend) else None
