"""Backward graphs for the tests of the passes: captured from real models, or built by hand; and ways to run them.

Collectives are stood in for by the identity: what a rank sends is what it gets back.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    DifferentiableAOTOutput,
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from fxddp import _compat, site
from fxddp.passes.allreduce import ALL_REDUCE, BUCKET_META, WAIT
from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.gradients import find_gradients, graph_outputs
from fxddp.passes.pipeline import Rewritten, rewrite_backward
from fxddp.passes.plan import Bucket, BucketPlan, GradSpec
from fxddp.passes.split import Program

aten = torch.ops.aten
GROUP = "0"


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
            group_name=GROUP,
            **options,
        )


def boxed(
    gm: fx.GraphModule, on_call: Callable[[tuple[Any, ...]], None] = lambda _: None
) -> Callable[[list[Any]], Any]:
    """Runs a graph with the calling convention of AOTAutograd."""

    def run(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        on_call(values)
        return gm(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def capture_all(
    model: Callable[..., Any],
    *inputs: Any,
    backward: Callable[[Any], None] | None = lambda result: result.sum().backward(),
    dynamic: bool | None = None,
) -> list[Captured]:
    """Compiles a model, runs it forward and (unless None) backward; one entry for each graph that has a backward.

    A module's own parameters are its trained ones; of a function all inputs that are `nn.Parameter`.
    """
    captured: list[Captured] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        real = model.named_parameters() if isinstance(model, nn.Module) else ()
        names, parameters, _ = site.inspect(gm, examples, {id(p): name for name, p in real})
        forwards: list[fx.GraphModule] = []
        found: list[Captured] = []

        def compile_forward(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            forwards.append(graph)
            return boxed(graph)

        def compile_backward(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            entry = Captured(
                graph,
                forwards[-1],
                parameters,
                {position: names[position] for position in parameters},
                _compat.output_descriptors(forwards[-1]),
            )
            found.append(entry)
            captured.append(entry)
            return boxed(_compat.copy_graph(graph), lambda values: setattr(entry, "arguments", values))

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

    torch._dynamo.reset()
    result = torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    if backward is not None:
        backward(result)
    torch._dynamo.reset()
    return captured


def capture(model: Callable[..., Any], *inputs: Any, **options: Any) -> Captured:
    """The one backward graph of a model."""
    (found,) = capture_all(model, *inputs, **options)
    return found


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
        self, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", stride: Any = None
    ) -> fx.Node:
        """An input that the forward saved."""
        with self.mode:
            value = torch.empty(shape, dtype=dtype, device=device)
            value = value if stride is None else torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return self.placeholder("saved", value)

    def tangent(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", stride: Any = None
    ) -> fx.Node:
        """The gradient of the forward's next output."""
        node = self.saved(*shape, dtype=dtype, device=device, stride=stride)
        node.meta["desc"] = TangentAOTInput(PlainAOTOutput(self._tangents))
        self._tangents += 1
        return node

    def placeholder(self, name: str, value: Any, desc: Any = None) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        node.meta["desc"] = desc
        return node

    def constant(self, name: str, value: Tensor) -> fx.Node:
        """An attribute of the module."""
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
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


def forward_outputs(count: int) -> tuple[DifferentiableAOTOutput, ...]:
    """Descriptors of a forward that returns `count` plain outputs."""
    return tuple(PlainAOTOutput(i) for i in range(count))


def specs_of(gm: fx.GraphModule, strides: Mapping[int, Sequence[int]] | None = None) -> tuple[GradSpec, ...]:
    """The gradients of a graph whose gradients all belong to parameters of their shape and (unless told) strides."""
    parameters = {}
    for i, (value, desc) in enumerate(zip(graph_outputs(gm.graph), gm.graph.output_node().meta["desc"], strict=True)):
        if isinstance(value, fx.Node) and desc is not None:
            fake = value.meta["val"]
            stride = (strides or {}).get(i, fake.stride())
            with fake.fake_mode:
                parameters[desc.grad_of.idx] = torch.empty_strided(
                    fake.shape, stride, dtype=fake.dtype, device=fake.device
                )
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


def targets(gm: fx.GraphModule) -> list[Any]:
    """Targets of all calls, in order."""
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def text(gm: fx.GraphModule) -> str:
    """A graph as text that is equal for equal graphs."""
    return str(gm.graph)


def sends(gm: fx.GraphModule) -> list[int]:
    """Bucket indices of the all-reduces, in order."""
    return [node.meta[BUCKET_META] for node in gm.graph.nodes if node.target is ALL_REDUCE]


# --- Running ---------------------------------------------------------------------------------------------------------


class _Alone(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is ALL_REDUCE:
            return args[0].clone()
        return args[0] if target is WAIT else super().call_function(target, args, kwargs)


def run_graph(gm: fx.GraphModule, *arguments: Any) -> tuple[Any, ...]:
    """The outputs of a graph; collectives are the identity."""
    values = _Alone(gm).run(*arguments)
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def scales_for(dtypes: Sequence[torch.dtype], scale: float) -> list[Tensor]:
    """The factors that a rewritten graph takes last."""
    return [torch.tensor(scale, dtype=dtype) for dtype in dtypes]


class Unset:
    """Stands in a slot that holds nothing."""


EMPTY = Unset()


def run_program(program: Program, pieces: Sequence[Any], arguments: Sequence[Any], scale: float = 1.0) -> list[Any]:
    """The outputs of a split backward, by the plainest interpreter there is.

    Fails if a piece reads a slot that was declared dead or never filled, and if something stays although nobody needs it.
    """
    slots: list[Any] = [*arguments, *scales_for(program.scales, scale)]
    assert len(slots) == program.inputs + len(program.scales)
    slots += [EMPTY] * (program.slots - len(slots))
    flats: dict[int, Tensor] = {}
    for k, (step, piece) in enumerate(zip(program.steps, pieces, strict=True)):
        values = [slots[i] for i in step.inputs]
        assert EMPTY not in [v for v in values if isinstance(v, Unset)], f"piece {k} reads an empty slot"
        results = piece(*values)
        assert len(results) == len(step.outputs)
        for i, result in zip(step.outputs, results, strict=True):
            slots[i] = result
        if step.bucket is not None:
            flat = slots[step.flat]
            bucket = program.plan.buckets[step.bucket]
            assert isinstance(flat, Tensor)
            assert (tuple(flat.shape), flat.dtype) == ((bucket.numel,), bucket.dtype)
            assert flat.is_contiguous()
            flats[step.bucket] = flat.clone()
            flat.zero_()  # a packed bucket is the wire's: nothing may depend on it afterwards
            slots[step.flat] = EMPTY
        for i in step.dead:
            slots[i] = EMPTY
        needed = {i for later in program.steps[k + 1 :] for i in later.inputs}
        needed |= {i for i in program.outputs if isinstance(i, int)}
        kept = {i for i, value in enumerate(slots) if not isinstance(value, Unset)}
        assert kept == needed & kept, f"after piece {k} slots {kept - needed} are kept for nobody"
    outputs: list[Any] = []
    for ref in program.outputs:
        if isinstance(ref, tuple):
            bucket = program.plan.buckets[ref[0]]
            grad = bucket.grads[ref[1]]
            outputs.append(flats[ref[0]].as_strided(grad.shape, grad.stride, bucket.offsets[ref[1]]))
        else:
            outputs.append(None if ref is None else slots[ref])
    return outputs


def random_like(gm: fx.GraphModule, seed: int = 0) -> list[Any]:
    """Random values for the placeholders of a hand-built graph."""
    generator = torch.Generator().manual_seed(seed)
    values = []
    for node in gm.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        if not isinstance(fake, Tensor):
            values.append(fake)
            continue
        value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        value.copy_(torch.randn(fake.shape, generator=generator, dtype=torch.float64))
        values.append(value)
    return values


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Bitwise equality of two lists of outputs, strides apart."""
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(b, Tensor):
            assert isinstance(a, Tensor), f"output {i} is {a}"
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f"output {i} is {a.dtype} {a.shape}"
            assert torch.equal(a, b), f"output {i} differs by {(a - b).abs().max()}"
        else:
            assert a == b, f"output {i} is {a}, expected {b}"


def fake_mode_of(gm: fx.GraphModule) -> Any:
    """The fake mode of a graph's values, to be entered; does nothing for a graph without tensors."""
    values = [node.meta.get("val") for node in gm.graph.nodes]
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), nullcontext())


def deep(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that shares neither nodes nor attributes."""
    return copy.deepcopy(gm)
