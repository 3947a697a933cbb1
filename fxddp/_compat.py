"""Every private torch API that fxddp uses, in one place.

Checked on torch 2.13.0 and 2.14.1 by the test suite. What a name does elsewhere in fxddp is told by its wrapper here.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

# --- Dynamo: who is being compiled ----------------------------------------------------------------


def frame_variables() -> dict[str, Any]:
    """Local, closure and used global variables of the frame that Dynamo is compiling right now; {} outside of one."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:
        return {}
    used = {name: tx.f_globals[name] for name in tx.f_code.co_names if name in tx.f_globals}
    return {**used, **tx.f_locals}


def no_recompile_limit() -> AbstractContextManager[None]:
    """Compiles inside however often this code was compiled before."""
    patch: AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20
    )
    return patch


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


_frame_listeners: dict[int, Callable[[Any], None]] = {}


def on_frame(listener: Callable[[Any, Any], None]) -> None:
    """Calls `listener(wrapper, locals)` when Dynamo starts on a frame, also on one it will end up not compiling.

    `wrapper` is what `compile_wrapper` finds.

    Listening twice is listening once. `torch._dynamo.reset` forgets listeners.
    """
    from torch._dynamo.callback import callback_handler

    def started(_: Any) -> None:
        caller: Any = sys._getframe()
        while caller is not None:
            if caller.f_code.co_name == "_compile" and "compiler_fn" in caller.f_locals:
                listener(_innermost(caller.f_locals["compiler_fn"]), caller.f_locals.get("locals") or {})
                return
            caller = caller.f_back

    if _frame_listeners.get(id(listener)) not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(started)
        _frame_listeners[id(listener)] = started


def inner_backend(compiler_fn: Any) -> Any:
    """The backend object behind the wrappers that `torch.compile` puts around it."""
    seen = 0
    while seen < 10:
        following = getattr(compiler_fn, "_torchdynamo_orig_backend", None) or getattr(compiler_fn, "compiler_fn", None)
        if following is None:
            return compiler_fn
        compiler_fn, seen = following, seen + 1
    return compiler_fn


def being_compiled() -> Any:
    """What the running `torch.compile` was given, asked from inside of it; None elsewhere."""
    caller: Any = sys._getframe()
    for _ in range(5):
        if caller is None:
            break
        if caller.f_code is torch.compile.__code__:
            return caller.f_locals.get("model")
        caller = caller.f_back
    return None


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


# --- AOTAutograd and inductor: compiling forward and backward -------------------------------------


def aot_compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    backward: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Traces forward and backward of a Dynamo graph and compiles each with its function (boxed calling)."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    with functorch_settings():
        return aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )(gm, inputs)


def inductor_compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    inner_compile: Callable[..., Any],
    patches: dict[str, Any],
    fingerprint: str,
    cache: bool,
) -> Callable[..., Any]:
    """`torch._inductor.compile_fx` with another function for its inner graphs.

    `fingerprint` goes into the keys of inductor's and AOTAutograd's caches, which do not see `inner_compile`: through
    `unsafe_marked_cacheable_functions`, a mapping that is hashed whole and otherwise only looked up by function name.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    marked = {**config.unsafe_marked_cacheable_functions, "fxddp.backward": fingerprint}
    caching = {"bundled_autograd_cache": True} if cache else {"enable_autograd_cache": False}
    with functorch_settings(**caching):
        compiled: Any = compile_fx(
            gm,
            inputs,
            inner_compile=inner_compile,
            config_patches={**patches, "unsafe_marked_cacheable_functions": marked},
        )
    return compiled  # type: ignore[no-any-return]


def mark_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tells AOTAutograd that a function takes its arguments as one list."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def functorch_settings(**more: Any) -> AbstractContextManager[None]:
    """Settings of AOTAutograd for a backward that may run twice and is compiled while its settings hold."""
    from torch._functorch import config

    patch: AbstractContextManager[None] = config.patch(
        {"donated_buffer": False, "force_non_lazy_backward_lowering": True, **more}
    )
    return patch


def inductor_inner_compile(gm: fx.GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
    """Compiles one graph of AOTAutograd with inductor; gives an `OutputCode` called with one list."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, inputs, **arguments)


def inductor_piece(gm: fx.GraphModule, inputs: Sequence[Any], arguments: dict[str, Any]) -> Any:
    """Compiles one piece of a backward with inductor.

    All results keep the strides they were traced with: the next piece was traced with them.
    """
    from torch._inductor.utils import BoxedBool

    output = gm.graph.output_node()
    values: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = [i for i, v in enumerate(values) if isinstance(v, fx.Node)]
    arguments = {**arguments, "static_input_idxs": (), "cudagraphs": BoxedBool(False)}
    return inductor_inner_compile(gm, inputs, **arguments)


def inductor_config_keys() -> frozenset[str]:
    """Names of inductor's settings, those that `torch.compile(options=…)` takes."""
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def cudagraphs_enabled() -> bool:
    """Whether inductor's global settings ask for CUDA graphs."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def inductor_mode(mode: str, dynamic: bool | None = None) -> dict[str, Any]:
    """Inductor settings behind one of `torch.compile`'s modes."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


def output_code_class() -> type:
    """Base class of what AOTAutograd's cache can hold."""
    from torch._inductor.output_code import OutputCode

    return OutputCode


def dump_piece(piece: Any) -> Any:
    """A copy of a compiled piece that can be pickled."""
    from copy import copy

    piece = copy(piece)
    piece.prepare_for_serialization()
    return piece


def load_piece(piece: Any) -> Any:
    """Brings a pickled piece back to life."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    constants = CompiledFxGraphConstants()
    loaded, _ = FxGraphCache.cache_hit_post_compile(piece, {}, constants)
    if loaded is None:
        raise RuntimeError("a compiled piece of the backward could not be loaded from the compile cache")
    settings: Any = {"cudagraphs": BoxedBool(False), "boxed_forward_device_index": None, "is_backward": True}
    loaded.post_compile([], constants, settings)
    return loaded


def bypass_cache(reason: str) -> Exception:
    """An exception that tells AOTAutograd's cache to leave this artifact out."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    return BypassAOTAutogradCache(reason)


def output_descriptors(gm: fx.GraphModule) -> tuple[Any, ...]:
    """AOTAutograd's descriptors of a graph's outputs."""
    return tuple(gm.graph.output_node().meta.get("desc") or ())


def mutated_inputs() -> tuple[int, ...]:
    """Positions of the inputs whose data the graph being compiled changes."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return ()
    return tuple(i for i, info in enumerate(metadata.input_info) if info.mutates_data)


def stand_in(tensor: Tensor) -> Tensor:
    """A tensor without data that has this one's shape, strides, dtype and device."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    with unset_fake_temporarily(), FakeTensorMode():
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def forbid_donation() -> None:
    """Notes that the backward being compiled reuses the memory of none of its inputs, so it may run again."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def creates_graph() -> bool:
    """Whether the running backward was asked for a graph of its own (`create_graph=True`), called from a hook in it."""
    return torch.is_grad_enabled()


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of a graph that shares the module's attributes and keeps all node metadata."""
    import copy

    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def saved_context() -> Callable[[], AbstractContextManager[Any]]:
    """A function that re-enters the present tracing context, for compiling later."""
    from torch._guards import TracingContext, tracing

    return partial(tracing, TracingContext.try_get())


# --- Autograd: what the running backward will do --------------------------------------------------

task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Identifies the running backward; -1 outside of one."""

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Runs a function at the end of the running backward; dropped if the backward raises."""


def sequence_number() -> int:
    """Number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def compiled_node(tensors: Sequence[Any], since: int) -> Any:
    """The backward node that AOTAutograd's function made for these results, not older than `since`, or None.

    Results that are views, or inputs written to, have nodes of their own before it.
    """
    seen = set()
    stack = [t.grad_fn for t in reversed(tensors) if isinstance(t, Tensor) and t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen or node._sequence_nr() < since or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        if type(node).__name__ == "CompiledFunctionBackward":
            return node
        stack += [parent for parent, _ in node.next_functions if parent is not None]
    return None


def restricted_to() -> set[int] | None:
    """Which leaves accumulate in the running backward, called from a node of it.

    Returns:
        None if all do, as in a plain `backward()`; else the ids of those of this node's leaves that do:
        `backward(inputs=…)` names some, `autograd.grad` accumulates nowhere.
    """
    will_execute = torch._C._will_engine_execute_node
    node: Any = torch._C._current_autograd_node()
    parents: list[Any] = [parent for parent, _ in node.next_functions if parent is not None]
    try:
        executed = [parent for parent in parents if will_execute(parent)]
    except RuntimeError:  # autograd.grad captures one of them
        return set()
    if len(executed) == len(parents):
        return None
    return {id(parent.variable) for parent in executed if hasattr(parent, "variable")}


def accumulates(leaf: Tensor) -> bool:
    """Whether the running, unrestricted backward accumulates into this leaf, or has done so already."""
    with torch.enable_grad():
        node: Any = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return bool(torch._C._will_engine_execute_node(node))


def keep_until_read(tensor: Tensor) -> None:
    """Keeps a CUDA tensor's memory from being used again before what this stream does with it is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def flatten(values: Any) -> list[Any]:
    """The leaves of nested containers."""
    return torch.utils._pytree.tree_leaves(values)


def upstream_leaves(arguments: Sequence[Any]) -> list[Tensor]:
    """Leaves that these values were computed from."""
    seen = set()
    leaves = []
    stack = [value.grad_fn for value in arguments if isinstance(value, Tensor) and value.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack += [parent for parent, _ in node.next_functions if parent is not None]
    return leaves


def compiled_autograd_enabled() -> bool:
    """True where compiled autograd would capture a backward; it never runs the compiled backward it is given."""
    from torch._dynamo import compiled_autograd

    return bool(
        torch._dynamo.config.compiled_autograd
        or compiled_autograd.compiled_autograd_enabled
        or compiled_autograd.in_compiled_autograd_region
    )


below_autograd: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowADInplaceOrView
"""Inside, operators skip autograd: an alias made here is no view to it, and users may `detach_()` such a `.grad`."""


def no_view(tensor: Tensor) -> Tensor:
    """The same values in the same memory, not as a view."""
    if not tensor._is_view():
        return tensor
    with below_autograd():
        return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def hooks_after_accumulation(parameter: Tensor) -> Any:
    """The parameter's post-accumulate-grad hooks by id, in call order; None if it has none."""
    return parameter._post_accumulate_grad_hooks


def put_first(hooks: Any, key: int) -> None:
    """Has one of these hooks called before the others. Autograd goes by the order in which a dict was filled."""
    ours = hooks.pop(key)
    others = list(hooks.items())
    hooks.clear()
    hooks[key] = ours
    hooks.update(others)


def hooks_before_accumulation(parameter: Tensor) -> Any:
    """The parameter's tensor hooks; falsy if it has none."""
    return parameter._backward_hooks


# --- Process groups -------------------------------------------------------------------------------


def group_exists(group: dist.ProcessGroup) -> bool:
    """False once a group was destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that the members of a group share."""
    return dist.distributed_c10d._world.pg_map[group][1]


def group_timeout(group: dist.ProcessGroup) -> Any:
    """How long collectives of a group may take."""
    return group._get_backend(group._device_types[0]).options._timeout
