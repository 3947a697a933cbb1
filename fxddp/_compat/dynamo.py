"""Dynamo: what it is compiling, for whom, and from where it reads."""

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx


def frame_variables() -> dict[str, Any]:
    """Local, closure and used global variables of the frame that Dynamo is compiling right now; {} outside of one."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:
        return {}
    used = {name: tx.f_globals[name] for name in tx.f_code.co_names if name in tx.f_globals}
    return {**used, **tx.f_locals}


def frame_is_resumed() -> bool:
    """Whether the frame that Dynamo is compiling right now is the rest of one, after a graph break."""
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:
        return False
    return str(tx.f_code.co_name).startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


def code_compiled() -> CodeType | None:
    """The code that Dynamo is compiling right now; None outside of one."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code: CodeType = InstructionTranslator.current_tx().f_code
    except AttributeError:
        return None
    return code


def frame_compiled() -> tuple[str, int, str] | None:
    """Its file, line and name."""
    code = code_compiled()
    return None if code is None else (code.co_filename, code.co_firstlineno, code.co_name)


def forget_compiled(code: CodeType) -> None:
    """Has Dynamo compile this code anew."""
    from torch._C._dynamo.eval_frame import reset_code

    reset_code(code)


def recompile_reason() -> str:
    """Which guard failed, so that Dynamo compiles a frame again right now; "" if it compiles it for the first time."""
    caller: Any = sys._getframe()
    while caller is not None:
        if caller.f_code.co_name == "_compile" and "compiler_fn" in caller.f_locals:
            return str(caller.f_locals.get("recompile_reason") or "")
        caller = caller.f_back
    return ""


def traces_compilation() -> bool:
    """Whether torch writes a trace of its compilations, for tlparse (`TORCH_TRACE`)."""
    return bool(torch._logging._internal.trace_log.handlers)


def trace_artifact(name: str, payload: str) -> None:
    """Puts a JSON text into that trace."""
    torch._logging._internal.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=lambda: payload
    )


def graph_break(gm: fx.GraphModule) -> tuple[str, tuple[str, int, str, str] | None] | None:
    """Why Dynamo ended a graph, and the user's file, line, function and text; None if the frame ended with it."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frames = [f for f in reason.user_stack if not f.filename.startswith(str(Path(torch.__file__).parent))]
    where = [(f.filename, f.lineno or 0, f.name, (f.line or "").strip()) for f in frames or reason.user_stack]
    return str(reason.reason), where[-1] if where else None


@contextmanager
def graph_breaks_logged() -> Iterator[list[tuple[str, str]]]:
    """Inside, collects (reason, stack trace of the user's code) of every graph break, those before any graph too."""
    from torch._dynamo.symbolic_convert import graph_break_log

    found: list[tuple[str, str]] = []
    level, propagate = graph_break_log.level, graph_break_log.propagate
    shown = graph_break_log.isEnabledFor(logging.DEBUG)
    handler = _BreakHandler(found)
    graph_break_log.addHandler(handler)
    graph_break_log.setLevel(logging.DEBUG)
    graph_break_log.propagate = propagate and shown
    try:
        yield found
    finally:
        graph_break_log.removeHandler(handler)
        graph_break_log.setLevel(level)
        graph_break_log.propagate = propagate


class _BreakHandler(logging.Handler):
    def __init__(self, found: list[tuple[str, str]]) -> None:
        super().__init__(logging.DEBUG)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        reason = text.partition("Graph Break Reason: ")[2]
        for end in ("\nStack variable source attribution:", "\nUser code traceback:"):
            reason = reason.partition(end)[0]
        where = re.search(r"in user code at (.+):(\d+)\n", text)
        place = f'File "{where[1]}", line {where[2]}, in ?\n  ' if where else ""
        self._found.append((reason.strip(), text.partition("User code traceback:\n")[2] or place))


@contextmanager
def compiled_for_once(model: Any, backend: Any) -> Iterator[Callable[..., Any]]:
    """`torch.compile` of a model as in a new process, which leaves nothing behind: no code, no count of it, no shapes.

    Before torch 2.13, where other code was compiled from the same source, Dynamo still counts this towards its limit.

    Args:
        model: a module or a function; called inside.
        backend: a new object, by which Dynamo tells its code from others'.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo import convert_frame, pgo
    from torch._dynamo.eval_frame import cached_backends
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    shapes = pgo._CODE_STATE, pgo._INIT_CODE_STATE  # those seen before, which would become dynamic
    pgo._CODE_STATE, pgo._INIT_CODE_STATE = defaultdict(pgo.CodeState), None
    config: dict[str, Any] = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), 1 << 20)
    config |= dict.fromkeys(("automatic_dynamic_local_pgo", "automatic_dynamic_remote_pgo"), False)
    compile_: Any = torch.compile  # its overloads leave `isolate_recompiles` out
    alone = {"isolate_recompiles"} & signature(compile_).parameters.keys()  # from torch 2.13 on
    try:
        with torch._dynamo.config.patch(config):
            yield compile_(model, backend=backend, **dict.fromkeys(alone, True))
    finally:
        pgo._CODE_STATE, pgo._INIT_CODE_STATE = shapes
        for code in [code for reference in convert_frame.input_codes.seen if (code := reference()) is not None]:
            entries: list[Any] = _debug_get_cache_entry_list(code)
            own = [entry for entry in entries if inner_backend(entry.backend) is backend]
            if own and len(own) == len(entries):
                forget_compiled(code)
                continue
            for entry in own:  # code that is in use by others: what was compiled for them stays
                entry.guard_manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("compiled for once"))
        for key in [key for key, value in cached_backends.items() if inner_backend(value) is backend]:
            del cached_backends[key]


def placeholder_source(node: fx.Node) -> str:
    """Where Dynamo read a placeholder from, such as `L['self']._modules['a']._parameters['weight']`; "" if unknown."""
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None:
        return ""
    name = source.name
    return name() if callable(name) else str(name)


def placeholder_example(node: fx.Node) -> Any:
    """The real object behind a placeholder of a Dynamo graph, or None."""
    argument = node.meta.get("grapharg")
    try:
        return None if argument is None else argument.example
    except AssertionError:
        return None


_frame_listeners: list[Callable[[Any, Any], None]] = []


class _Lasting(list[Any]):
    """Callbacks of which `_frame_started` outlasts `torch._dynamo.reset`: models that were compiled before go on."""

    def clear(self) -> None:
        self[:] = [callback for callback in self if callback is _frame_started]


def on_frame(listener: Callable[[Any, Any], None]) -> None:
    """Calls `listener(wrapper, locals)` when Dynamo starts on a frame, also on one it will end up not compiling.

    Args:
        listener: gets what `compile_wrapper` finds, and the frame's local variables by name.
    """
    from torch._dynamo.callback import callback_handler

    _frame_listeners.append(listener)
    if _frame_started not in callback_handler.start_callbacks:
        callback_handler.start_callbacks = _Lasting(callback_handler.start_callbacks)
        callback_handler.start_callbacks.append(_frame_started)


def _frame_started(_: Any) -> None:
    caller: Any = sys._getframe()
    while caller is not None:
        if caller.f_code.co_name == "_compile" and "compiler_fn" in caller.f_locals:
            for listener in _frame_listeners:
                listener(_innermost(caller.f_locals["compiler_fn"]), caller.f_locals.get("locals") or {})
            return
        caller = caller.f_back


_compile_listeners: list[Callable[[Any, Any], Callable[[Any], None] | None]] = []


def on_compile(listener: Callable[[Any, Any], Callable[[Any], None] | None]) -> None:
    """Calls `listener(wrapper, model)` whenever `torch.compile` is given a model or function.

    torch looks a backend up by its name without touching it, so this stands in `torch._dynamo.optimize`, which
    `torch.compile` calls next.

    Args:
        listener: gets what `compile_wrapper` finds, and what is to be compiled; what it raises, `torch.compile` raises.
            May give a function to be called with the result.
    """
    if not _compile_listeners:
        torch._dynamo.optimize = _heard(torch._dynamo.optimize)
    _compile_listeners.append(listener)


def _heard(optimize: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(optimize)
    def heard(*arguments: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        if (caller.f_code.co_name, caller.f_code.co_filename) != ("compile", torch.__file__):
            return optimize(*arguments, **options)
        wishes = [listener(options.get("backend"), caller.f_locals.get("model")) for listener in _compile_listeners]
        context = optimize(*arguments, **options)

        def compile_it(model: Any) -> Any:
            result = context(model)
            for wish in filter(None, wishes):
                wish(result)
            return result

        return compile_it

    return heard


def inner_backend(compiler_fn: Any) -> Any:
    """The backend object behind the wrappers that `torch.compile` puts around it."""
    seen = 0
    while seen < 10:
        following = getattr(compiler_fn, "_torchdynamo_orig_backend", None) or getattr(compiler_fn, "compiler_fn", None)
        if following is None:
            return compiler_fn
        compiler_fn, seen = following, seen + 1
    return compiler_fn


def compile_wrapper(compiled: Any) -> Any:
    """The object `torch.compile` made of its backend argument, from what it returned; None if it is not compiled."""
    if isinstance(compiled, torch.nn.Module) and getattr(compiled, "_compiled_call_impl", None) is not None:
        compiled = compiled._compiled_call_impl
    context = getattr(compiled, "dynamo_ctx", None)
    callback = getattr(context, "callback", None) or getattr(compiled, "_torchdynamo_orig_backend", None)
    if callback is None:
        for cell in getattr(compiled, "__closure__", None) or ():
            value: Any = cell.cell_contents if filled(cell) else None
            if hasattr(value, "_torchdynamo_orig_backend"):
                callback = value
                break
            inner = getattr(value, "callback", None)
            if hasattr(inner, "_torchdynamo_orig_backend"):
                callback = inner
                break
    return _innermost(callback)


def _innermost(callback: Any) -> Any:
    seen = 0
    while callback is not None and hasattr(callback, "_torchdynamo_orig_backend") and seen < 10:
        callback, seen = callback._torchdynamo_orig_backend, seen + 1
    return callback


def filled(cell: Any) -> bool:
    """Whether a closure's cell holds something."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def with_own_code(function: Any, name: str) -> Any:
    """The same function with a code object of its own: Dynamo counts recompiles, and learns sizes, by code object."""
    code = function.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def only_inlined(function: Any) -> Any:
    """Has Dynamo never compile this function for itself; in what it compiles it may be inlined."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
    return function
