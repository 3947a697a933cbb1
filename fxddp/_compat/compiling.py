"""AOTAutograd and inductor: compiling forward and backward, and what their caches hold."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx


def aot_compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    backward: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    inference: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Traces forward and backward of a Dynamo graph and compiles each with its function (boxed calling).

    A forward without a backward is compiled by `inference`, by default as others.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    with functorch_settings():
        return aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
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

    _lower_scaled_mm()
    return compile_fx_inner(gm, inputs, **arguments)


@cache
def _lower_scaled_mm() -> None:
    """Teaches inductor to have `scaled_mm` write its result where it chooses, such as into a part of a larger buffer.

    Where it knows no operator it has the result allocated first, and copied then.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def lower(a: Any, b: Any, scale: Any) -> Any:
        inputs = [ir.ExternKernel.realize_input(each) for each in (a, b, scale)]
        layout = ir.FlexibleLayout(a.get_device(), a.get_dtype(), [a.get_size()[0] * b.get_size()[1]])
        out = torch.ops.fxddp.scaled_mm.out
        name = "torch.ops.fxddp.scaled_mm.out"
        return ir.TensorBox.create(ir.ExternKernelOut(layout, inputs, python_kernel_name=name, op_overload=out))

    register_lowering(torch.ops.fxddp.scaled_mm.default, type_promotion_kind=None)(lower)


def inductor_piece(gm: fx.GraphModule, inputs: Sequence[Any], arguments: dict[str, Any]) -> Any:
    """Compiles one piece of a graph with inductor.

    All results keep the strides they were traced with: the next piece was traced with them, and so was the backward.
    """
    from torch._inductor.utils import BoxedBool

    output = gm.graph.output_node()
    values: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = [i for i, v in enumerate(values) if isinstance(v, fx.Node)]
    arguments = {**arguments, "static_input_idxs": (), "cudagraphs": BoxedBool(False)}
    with _strides_untold(), _few_fusions(gm):
        return inductor_inner_compile(gm, inputs, **arguments)


def _few_fusions(gm: fx.GraphModule) -> AbstractContextManager[None]:
    """Has inductor's scheduler try fewer pairs of loops where a bucket is packed from many gradients.

    All these loops read the factor, so each counts as a partner for the next 64, though none of them gains by it. What
    else concatenates many tensors in this piece is treated alike.
    """
    from torch._inductor import config

    packed = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    widest = max((len(node.args[0]) for node in packed), default=0)
    usual = config.max_fusion_buffer_group_pairwise_attempts
    patch: AbstractContextManager[None] = config.patch(
        max_fusion_buffer_group_pairwise_attempts=max(1, min(usual, 1024 // max(widest, 1)))
    )
    return patch


@contextmanager
def _strides_untold() -> Iterator[None]:
    """Has inductor not tell AOTAutograd the strides of a piece's results, which it would take for a whole forward's."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        yield
        return
    before, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = before


def calls_products() -> bool:
    """Whether inductor's code calls matrix products in Python, as they are.

    Not from C++, where an operator of ours has no name, nor as the fastest of several kernels.
    """
    from torch._inductor import config

    return not (config.cpp_wrapper or config.max_autotune or config.max_autotune_gemm)


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


def load_piece(piece: Any, *, is_backward: bool) -> Any:
    """Brings a pickled piece back to life."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    constants = CompiledFxGraphConstants()
    loaded, _ = FxGraphCache.cache_hit_post_compile(piece, {}, constants)
    if loaded is None:
        raise RuntimeError("a compiled piece could not be loaded from the compile cache")
    settings: Any = {"cudagraphs": BoxedBool(False), "boxed_forward_device_index": None, "is_backward": is_backward}
    with _strides_untold():
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


def stand_ins(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Tensors without data that have the shapes, strides, dtypes and devices of these."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    with unset_fake_temporarily(), FakeTensorMode():
        return {
            position: torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device)
            for position, t in tensors.items()
        }


@contextmanager
def real_tensors() -> Iterator[None]:
    """Whatever is being traced around it, tensors made inside have data, and autograd is off."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad():
        yield


def cache_folder() -> Path:
    """Where inductor keeps what it compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is a description without data, as tracing uses them."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def fake_mode(tensors: Sequence[Any]) -> Any:
    """The mode that the fake tensors among these belong to, or a new one."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None) or FakeTensorMode()


def forbid_donation() -> None:
    """Notes that the backward being compiled reuses the memory of none of its inputs, so it may run again."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of a graph that shares the module's attributes and keeps all node metadata.

    Its Python code is made when somebody runs or reads it, not after each pass: as inductor has it for its own graphs.
    """
    import copy

    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(gm, copy.deepcopy(gm.graph))


def saved_context() -> Callable[[], AbstractContextManager[Any]]:
    """A function that re-enters the present tracing context, for compiling later."""
    from torch._guards import TracingContext, tracing

    return partial(tracing, TracingContext.try_get())


def flatten(values: Any) -> list[Any]:
    """The leaves of nested containers."""
    return torch.utils._pytree.tree_leaves(values)


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """The same nested containers with `function` of each tensor in its place."""
    return torch.utils._pytree.tree_map_only(Tensor, function, values)
