"""Finds which outputs of a backward graph are gradients of parameters, and when each is ready.

    backward graph                         found
    tangent_0 ─► mm ─► weight gradient     GradSpec(output=0, input=3, ready=1, tangents={0})
             └─► sum ─► bias gradient      GradSpec(output=1, input=4, ready=2, tangents={0})
             └─► mm ─► gradient of x       not a parameter: stays local

Identity comes from AOTAutograd's descriptors (`meta["desc"]`), never from names. Tied weights are one input and so
one gradient; frozen parameters and buffers have none; differentiable inputs and activations that cross a graph break
have a gradient but are not among `parameters`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .layout import gradient_strides
from .plan import GradSpec


def output_node(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    return graph.output_node()


def graph_outputs(graph: fx.Graph) -> tuple[Any, ...]:
    """The values a graph returns, as a flat tuple of nodes, constants and None."""
    (values,) = graph.output_node().args
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def tangent_positions(graph: fx.Graph, forward_outputs: Sequence[Any]) -> dict[fx.Node, int | None]:
    """Maps each tangent placeholder to the position of its output among the forward's outputs, as autograd counts them.

    Tokens that order side effects are no outputs to autograd, and the parts of a tensor subclass are one.

    Args:
        graph: a backward graph of AOTAutograd.
        forward_outputs: descriptors of the forward graph's outputs, in order.

    Returns:
        None for a tangent whose output is not among them (such a tangent counts as always defined).
    """
    real = [_whole(desc) for desc in forward_outputs if type(desc).__name__ != "ForwardTokenAOTOutput"]
    position = {desc: i for i, desc in enumerate(dict.fromkeys(real))}
    found: dict[fx.Node, int | None] = {}
    for node in graph.find_nodes(op="placeholder"):
        desc = _whole(node.meta.get("desc"))
        if type(desc).__name__ == "TangentAOTInput":
            found[node] = position.get(desc.output)
    return found


def _whole(desc: Any) -> Any:
    """The descriptor of the tensor a value belongs to: a subclass is several values in a graph, one to autograd."""
    while type(desc).__name__.startswith("Subclass"):
        desc = desc.base
    return desc


def _dependencies(graph: fx.Graph, tangents: Mapping[fx.Node, int | None]) -> dict[fx.Node, int]:
    """For each node the set of forward outputs whose tangent it depends on, as a bit mask; bit 0: always defined."""
    mask: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node in tangents:
            where = tangents[node]
            mask[node] = 1 if where is None else 1 << (where + 1)
        else:
            mask[node] = 0
            for parent in node.all_input_nodes:
                mask[node] |= mask[parent]
    return mask


def find_gradients(
    gm: fx.GraphModule, *, parameters: Mapping[int, torch.Tensor], forward_outputs: Sequence[Any] = ()
) -> tuple[GradSpec, ...]:
    """Lists the gradients of parameters that a backward graph returns, in the order of its outputs.

    Args:
        gm: a backward graph of AOTAutograd; its output node carries `meta["desc"]`.
        parameters: by position among the Dynamo graph's placeholders, the (fake) parameter.
        forward_outputs: descriptors of the forward graph's outputs; with them each gradient knows the outputs
            it depends on.

    Returns:
        One `GradSpec` for each dense gradient of the parameter's own dtype and shape. Other gradients (sparse,
        of another dtype) are left out: they stay local and are reduced outside of the graph.
    """
    graph = gm.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    masks = _dependencies(graph, tangent_positions(graph, forward_outputs))
    descriptors = graph.output_node().meta.get("desc") or ()
    found = []
    for output, (node, desc) in enumerate(zip(graph_outputs(graph), descriptors, strict=False)):
        if not isinstance(node, fx.Node) or type(desc).__name__ != "GradAOTOutput":
            continue
        source = desc.grad_of
        if type(source).__name__ != "PlainAOTInput" or source.idx not in parameters:
            continue
        parameter = parameters[source.idx]
        value = node.meta.get("val")
        if (
            not isinstance(value, torch.Tensor)
            or value.layout is not torch.strided
            or value.dtype != parameter.dtype
            or value.device != parameter.device
            or tuple(value.shape) != tuple(parameter.shape)
        ):
            continue
        shape = tuple(int(size) for size in parameter.shape)
        mask = masks[node]
        found.append(
            GradSpec(
                output=output,
                input=source.idx,
                ready=order[node],
                shape=shape,
                stride=gradient_strides(shape, tuple(int(step) for step in parameter.stride())),
                dtype=parameter.dtype,
                device=parameter.device,
                tangents=frozenset()
                if mask & 1
                else frozenset(i for i in range(mask.bit_length()) if mask >> (i + 1) & 1),
            )
        )
    return tuple(found)
