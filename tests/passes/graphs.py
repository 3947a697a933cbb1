"""Backward graphs for the tests of the passes: captured from real models, built by hand, drawn; and ways to run them.

Collectives are stood in for by the identity: what a rank sends is what it gets back.
"""

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    DifferentiableAOTOutput,
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from fxddp import _compat
from fxddp.passes.allreduce import BUCKET_META, is_send, is_wait
from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.gradients import find_gradients, graph_outputs
from fxddp.passes.pipeline import Rewritten, rewrite_backward
from fxddp.passes.plan import Bucket, BucketPlan, GradSpec
from fxddp.passes.split import Program
from fxddp.passes.stages import Way

aten = torch.ops.aten
GROUP = "0"
WAY = Way((GROUP,), 2)

Boxed = Callable[[list[Any]], Any]


# --- Captured from models --------------------------------------------------------------------------------------------


@dataclass
class Captured:
    """The backward that AOTAutograd made of one model, and one run of it.

    Attributes:
        backward: the graph, as AOTAutograd hands it to a backend.
        forward: the forward graph.
        parameters: (fake) parameters that require grad, by position among the Dynamo graph's placeholders.
        names: their qualified names, by position.
        forward_outputs: descriptors of the forward graph's outputs.
        arguments: what the backward was called with; empty if it did not run.
        undefined: positions of the gradients that were None when autograd reached the compiled node.
    """

    backward: fx.GraphModule
    forward: fx.GraphModule
    parameters: dict[int, Tensor]
    names: dict[int, str]
    forward_outputs: tuple[Any, ...]
    arguments: tuple[Any, ...] = ()
    undefined: frozenset[int] = frozenset()

    def grads(self) -> dict[str, GradSpec]:
        """The gradients found in the graph, by the parameter's name."""
        found = find_gradients(self.backward, parameters=self.parameters, forward_outputs=self.forward_outputs)
        return {self.names[grad.input]: grad for grad in found}

    def rewrite(self, cap: int = 1, first_cap: int | None = None, **options: Any) -> Rewritten:
        """What the pipeline makes of a copy of the graph; one bucket for each gradient unless told otherwise."""
        return rewrite_backward(
            _compat.copy_graph(self.backward),
            parameters=self.parameters,
            forward_outputs=self.forward_outputs,
            cap=cap,
            first_cap=cap if first_cap is None else first_cap,
            way=WAY,
            **options,
        )


def boxed(function: Callable[..., Any]) -> Boxed:
    """A function with the calling convention of AOTAutograd."""

    def run(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return function(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Dynamo without memory of what was compiled before, and of what is compiled here afterwards."""
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            # Dynamo looks at `.grad` of all it meets, activations after a graph break included.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        torch._dynamo.reset()


def identify(model: Any, gm: fx.GraphModule, examples: Sequence[Any]) -> tuple[dict[int, str], dict[int, Tensor]]:
    """Names and (fake) values of the trained parameters among a Dynamo graph's inputs, by position."""
    known = {id(p): name for name, p in model.named_parameters()} if isinstance(model, nn.Module) else {}
    names: dict[int, str] = {}
    parameters: dict[int, Tensor] = {}
    for position, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True)):
        if isinstance(value, nn.Parameter) and value.requires_grad:
            names[position] = known.get(id(_compat.placeholder_example(node)), f"input {position}")
            parameters[position] = value
    return names, parameters


def sum_backward(result: Any) -> None:
    """The backward of a model's summed result."""
    result.sum().backward()


def capture_all(
    model: Callable[..., Any],
    *inputs: Any,
    backward: Callable[[Any], None] = sum_backward,
    dynamic: bool | None = None,
) -> list[Captured]:
    """Compiles a model and runs it forward and backward; one entry for each graph that has a backward."""
    captured: list[Captured] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        names, parameters = identify(model, gm, examples)
        forwards: list[fx.GraphModule] = []
        found: list[Captured] = []

        def compile_forward(graph: fx.GraphModule, _: Any) -> Boxed:
            forwards.append(graph)
            return boxed(graph)

        def compile_backward(graph: fx.GraphModule, _: Any) -> Boxed:
            entry = Captured(graph, forwards[-1], parameters, names, _compat.output_descriptors(forwards[-1]))
            found.append(entry)
            captured.append(entry)
            original = _compat.copy_graph(graph)

            def run(*values: Any) -> Any:
                entry.arguments = values
                return original(*values)

            return boxed(run)

        run = _compat.aot_compile(gm, examples, forward=compile_forward, backward=compile_backward)

        def call(*arguments: Any) -> Any:
            since = _compat.sequence_number()
            results = run(*arguments)
            node = _compat.compiled_node(results, since) or _compat.compiled_node(arguments, since)
            if node is not None:
                node.register_prehook(lambda gradients: note_undefined(found[-1], gradients))
            return results

        return call

    def note_undefined(entry: Captured, gradients: Sequence[Tensor | None]) -> None:
        entry.undefined = frozenset(i for i, gradient in enumerate(gradients) if gradient is None)

    with fresh_dynamo():
        backward(torch.compile(model, backend=backend, dynamic=dynamic)(*inputs))
    return captured


def capture(model: Callable[..., Any], *inputs: Any, **options: Any) -> Captured:
    """The one backward graph of a model."""
    (found,) = capture_all(model, *inputs, **options)
    return found


def compile_piece(piece: fx.GraphModule, arguments: dict[str, Any]) -> Callable[..., Any]:
    """Compiles a piece with inductor; `arguments` are those that inductor passes to its inner compiler."""
    values = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    compiled = _compat.inductor_piece(piece, values, arguments)
    return lambda *values: compiled(list(values))


def train_with_inductor(
    model: nn.Module, *inputs: Any, cap: int = 1, backward: Callable[[Any], None] = sum_backward
) -> list[Rewritten]:
    """Runs a model forward and backward, each piece of the backward compiled by inductor; nothing is scaled."""
    from torch._inductor.compile_fx import compile_fx

    done: list[Rewritten] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        _, parameters = identify(model, gm, examples)
        descriptors: list[Any] = []

        def compile_graph(graph: fx.GraphModule, values: Sequence[Any], **arguments: Any) -> Any:
            if not arguments.get("is_backward"):
                descriptors[:] = _compat.output_descriptors(graph)
                return _compat.inductor_inner_compile(graph, values, **arguments)
            rewritten = rewrite_backward(
                _compat.copy_graph(graph),
                parameters=parameters,
                forward_outputs=descriptors,
                cap=cap,
                first_cap=cap,
                way=WAY,
                inputs=values,
                fold=True,
            )
            done.append(rewritten)
            pieces = [compile_piece(piece, arguments) for piece in rewritten.pieces]
            return boxed(lambda *values: run_program(rewritten.program, pieces, values))

        with _compat.functorch_settings(enable_autograd_cache=False), torch.enable_grad():
            return compile_fx(gm, examples, inner_compile=compile_graph)

    with fresh_dynamo():
        backward(torch.compile(model, backend=backend)(*inputs))
    return done


def on_cuda(captured: Captured) -> Captured:
    """The same backward for a model on CUDA, as fake tensors: nothing needs a GPU.

    Autograd itself cannot be traced for a device that the torch build lacks; a graph traced on the CPU can be moved.
    """
    mode = FakeTensorMode()
    cuda = torch.device("cuda", 0)
    gm = _compat.copy_graph(captured.backward)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=cuda)
        return nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake

    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = moved(node.meta["val"])
        elif node.op == "call_function":
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": cuda}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)
    gm.recompile()
    parameters = {position: moved(parameter) for position, parameter in captured.parameters.items()}
    return Captured(gm, captured.forward, parameters, captured.names, captured.forward_outputs)


# --- Built by hand ---------------------------------------------------------------------------------------------------


class Builder:
    """Writes a backward graph node by node; values are fake tensors, computed as nodes are added."""

    def __init__(self, shape_env: Any = None) -> None:
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
        self._tangents = 0

    def saved(
        self, *shape: Any, dtype: torch.dtype = torch.float32, device: str = "cpu", stride: Sequence[Any] | None = None
    ) -> fx.Node:
        """An input that the forward saved."""
        with self.mode:
            value = torch.empty(shape, dtype=dtype, device=device)
            value = value if stride is None else torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return self.placeholder(value)

    def tangent(self, *shape: Any, **options: Any) -> fx.Node:
        """The gradient of the forward's next output."""
        node = self.saved(*shape, **options)
        node.meta["desc"] = TangentAOTInput(PlainAOTOutput(self._tangents))
        self._tangents += 1
        return node

    def placeholder(self, value: Any) -> fx.Node:
        """An input of any kind."""
        node = self.graph.placeholder(f"input_{len(self.graph.find_nodes(op='placeholder'))}")
        node.meta["val"] = value
        return node

    def constant(self, name: str, value: Tensor) -> fx.Node:
        """An attribute of the module."""
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, with the value it gives."""
        node = self.graph.call_function(target, args, kwargs)
        values, options = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values, **options)
        return node

    def finish(self, outputs: Sequence[Any], grad_of: Mapping[int, int] | None = None) -> fx.GraphModule:
        """Ends the graph; `grad_of` maps outputs to the inputs whose gradients they are, by default all, in order."""
        grad_of = {i: i for i in range(len(outputs))} if grad_of is None else grad_of
        node = self.graph.output(tuple(outputs))
        node.meta["desc"] = [
            GradAOTOutput(PlainAOTInput(grad_of[i])) if i in grad_of else None for i in range(len(outputs))
        ]
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)


def plain_outputs(count: int) -> tuple[DifferentiableAOTOutput, ...]:
    """Descriptors of a forward that returns `count` plain outputs."""
    return tuple(PlainAOTOutput(i) for i in range(count))


def specs_of(gm: fx.GraphModule, strides: Mapping[int, Sequence[int]] | None = None) -> tuple[GradSpec, ...]:
    """The gradients of a graph, for parameters of their shapes and (by output, unless told) of their strides."""
    parameters = {}
    for i, (value, desc) in enumerate(zip(graph_outputs(gm.graph), gm.graph.output_node().meta["desc"], strict=True)):
        if isinstance(value, fx.Node) and desc is not None:
            fake = value.meta["val"]
            stride = (strides or {}).get(i, fake.stride())
            with fake.fake_mode:
                parameter = torch.empty_strided(fake.shape, stride, dtype=fake.dtype, device=fake.device)
            parameters[desc.grad_of.idx] = parameter
    return find_gradients(gm, parameters=parameters)


def plan_of(gm: fx.GraphModule, cap: int = 1, strides: Mapping[int, Sequence[int]] | None = None) -> BucketPlan:
    """A plan for all gradients of a graph, by default one bucket for each."""
    return plan_buckets(specs_of(gm, strides), cap=cap, first_cap=cap)


def plan_by_hand(specs: Sequence[GradSpec], *buckets: Sequence[int]) -> BucketPlan:
    """A plan with the given gradients (by output) in each bucket, whatever the caps say."""
    by_output = {spec.output: spec for spec in specs}
    chosen = (Bucket(i, tuple(by_output[output] for output in outputs)) for i, outputs in enumerate(buckets))
    return BucketPlan(tuple(chosen), cap=1 << 40, first_cap=1 << 40)


# --- Looking at graphs -----------------------------------------------------------------------------------------------


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    """All calls, in order."""
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def text(gm: fx.GraphModule) -> str:
    """A graph as text that is equal for equal graphs."""
    return str(gm.graph)


def sends(gm: fx.GraphModule) -> list[int]:
    """Bucket indices of the all-reduces, in order."""
    return [node.meta[BUCKET_META] for node in gm.graph.nodes if is_send(node)]


# --- Running ---------------------------------------------------------------------------------------------------------


class _Alone(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if is_send(n):
            return self.env[n.args[0]].clone()  # type: ignore[index]
        return self.env[n.args[0]] if is_wait(n) else super().run_node(n)  # type: ignore[index]


def run_graph(gm: fx.GraphModule, *arguments: Any) -> list[Any]:
    """The outputs of a graph; collectives are the identity."""
    return list(_Alone(gm, garbage_collect_values=False).run(*arguments))


def scales_for(dtypes: Sequence[torch.dtype], scale: float) -> list[Tensor]:
    """The factors that a rewritten graph takes last."""
    return [torch.tensor(scale, dtype=dtype) for dtype in dtypes]


class _Empty:
    """Stands in a slot that holds nothing."""


def run_program(program: Program, pieces: Sequence[Any], arguments: Sequence[Any], scale: float = 1.0) -> list[Any]:
    """The outputs of a split backward, by the plainest interpreter there is.

    Fails if a piece reads a slot that was declared dead or never filled, and if something stays that nobody needs.
    """
    slots: list[Any] = [*arguments, *scales_for(program.scales, scale)]
    assert len(slots) == program.inputs + len(program.scales)
    slots += [_Empty()] * (program.slots - len(slots))
    flats: dict[int, Tensor] = {}
    for k, (step, piece) in enumerate(zip(program.steps, pieces, strict=True)):
        values = [slots[i] for i in step.inputs]
        assert not any(isinstance(value, _Empty) for value in values), f"piece {k} reads an empty slot"
        results = piece(*values)
        for i, result in zip(step.outputs, results, strict=True):
            slots[i] = result
        if step.bucket is not None:
            flat = slots[step.flat]
            bucket = program.plan.buckets[step.bucket]
            assert isinstance(flat, Tensor)
            assert (tuple(flat.shape), flat.dtype) == ((bucket.numel,), bucket.dtype)
            assert flat.is_contiguous()
            if step.wire >= 0:
                wire = slots[step.wire]
                assert wire.is_contiguous() and wire.dtype.itemsize < flat.dtype.itemsize
                assert_same([wire], [flat.to(wire.dtype)])
                wire.fill_(torch.nan)
            for table in program.tables_in.get(step.bucket, ()):
                assert not any(isinstance(slots[i], _Empty) for i in table.slots), f"{table} has no indices"
            flats[step.bucket] = flat.clone()
            flat.fill_(torch.nan)  # a packed bucket is the wire's: nothing else may share its memory
        for i in (*step.dead, *step.spent):
            slots[i] = _Empty()
        needed = {i for later in program.steps[k + 1 :] for i in later.inputs}
        needed |= {i for i in program.outputs if isinstance(i, int)}
        kept = {i for i, value in enumerate(slots) if not isinstance(value, _Empty)}
        assert kept <= needed, f"after piece {k} slots {kept - needed} are kept for nobody"
    outputs: list[Any] = []
    for ref in program.outputs:
        if isinstance(ref, tuple):
            bucket = program.plan.buckets[ref[0]]
            grad = bucket.grads[ref[1]]
            outputs.append(flats[ref[0]].as_strided(grad.shape, grad.stride, bucket.offsets[ref[1]]))
        else:
            outputs.append(None if ref is None else slots[ref])
    return outputs


def random_inputs(gm: fx.GraphModule, seed: int = 0, **sizes: int) -> list[Any]:
    """Random values for the placeholders of a hand-built graph; `sizes` gives symbols their values."""
    generator = torch.Generator().manual_seed(seed)
    values: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        if not isinstance(fake, Tensor):
            values.append(concrete(fake, sizes))
            continue
        shape, stride = ([concrete(size, sizes) for size in row] for row in (fake.shape, fake.stride()))
        value = torch.empty_strided(shape, stride, dtype=fake.dtype)
        wide = torch.complex128 if fake.dtype.is_complex else torch.float64
        values.append(value.copy_(torch.randn(shape, generator=generator, dtype=wide)))
    return values


def concrete(size: Any, sizes: Mapping[str, int]) -> int:
    """A size with its symbols' values put in."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression.xreplace({symbol: sizes[str(symbol)] for symbol in expression.free_symbols}))


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Bitwise equality of two lists of outputs, strides apart."""
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(b, Tensor):
            assert isinstance(a, Tensor), f"output {i} is {a}"
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f"output {i} is {a.dtype} {a.shape}"
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"output {i} differs"
        else:
            assert a is b or a == b, f"output {i} is {a}, expected {b}"


# --- Drawn by hypothesis ---------------------------------------------------------------------------------------------

Drawn = tuple[fx.GraphModule, dict[int, tuple[int, ...]]]


@st.composite
def backwards(draw: st.DrawFn, *, writes: bool = False) -> Drawn:
    """Small backward graphs and, by output, the strides of those parameters that are not row-major.

    Values are of shape (2, 2), (4,) or (). Outputs may be inputs, constants, None, or one twice; some are gradients.
    With `writes`, copies and views of copies are written to in between; none of those is an output.
    """
    builder = Builder()
    nodes = [builder.saved(2, 2), builder.tangent(4), builder.tangent(2, 2)]
    buffers: list[fx.Node] = []

    def pick(*shapes: tuple[int, ...]) -> fx.Node:
        return draw(st.sampled_from([n for n in [*nodes, *buffers] if tuple(n.meta["val"].shape) in shapes]))

    def unbind() -> fx.Node:
        rows = builder.call(aten.unbind.int, pick((2, 2)), 0)
        first = builder.call(operator.getitem, rows, 0)
        return builder.call(aten.cat.default, [builder.call(operator.getitem, rows, 1), first])

    def fold() -> fx.Node:
        value = pick((2, 2), (4,))
        return builder.call(aten.reshape.default, value, [4] if value.meta["val"].dim() == 2 else [2, 2])

    # Reading what is written to: only through operations that make something new, so that outputs stay as they are.
    makers: dict[str, Callable[[], fx.Node]] = {
        "add": lambda: builder.call(aten.add.Tensor, pick((2, 2)), pick((2, 2), ())),
        "sin": lambda: builder.call(aten.sin.default, pick((2, 2), (4,), ())),
        "mm": lambda: builder.call(aten.mm.default, pick((2, 2)), pick((2, 2))),
        "sum": lambda: builder.call(aten.sum.default, pick((2, 2), (4,))),
        "unbind": unbind,
        "constant": lambda: builder.constant("constant", torch.arange(4.0)),
    }
    viewers: dict[str, Callable[[], fx.Node]] = {
        "fold": fold,
        "t": lambda: builder.call(aten.t.default, pick((2, 2))),
    }
    writers = ["copy", "view", "write"]
    for _ in range(draw(st.integers(1, 14))):
        operation = draw(st.sampled_from([*makers, *(writers if writes else viewers)]))
        if operation in makers:
            nodes.append(makers[operation]())
        elif operation in viewers:
            nodes.append(viewers[operation]())
        elif operation == "copy":
            buffers.append(builder.call(aten.clone.default, pick((2, 2))))
        elif buffers and operation == "view":
            buffers.append(builder.call(aten.t.default, draw(st.sampled_from(buffers))))
        elif buffers:
            builder.call(aten.mul_.Tensor, draw(st.sampled_from(buffers)), nodes[0])
            nodes[0] = builder.call(aten.sin.default, pick((2, 2)))  # another factor next time
    outputs = draw(st.lists(st.none() | st.sampled_from(nodes), min_size=1, max_size=8))
    mine = {i: node for i, node in enumerate(outputs) if node is not None and draw(st.integers(0, 3))}
    turned: dict[int, tuple[int, ...]] = {
        i: (1, 2) for i, node in mine.items() if node.meta["val"].dim() == 2 and draw(st.booleans())
    }
    return builder.finish(outputs, {i: i for i in mine}), turned
