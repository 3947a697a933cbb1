"""Tells which pieces are the same but for names, as those of equal blocks of a model are: they are compiled once.

    mul_7 = mul(tangents_1, add_3)            mul_9 = mul(getitem_4, add_1)
    sum_2 = sum(mul_7, [0, 1])                sum_5 = sum(mul_9, [0, 1])
    └──────────────── both: 0 = input, 1 = input, 2 = mul(0, 1), 3 = sum(2, [0, 1]) ────────────────┘

Pieces are alike if they have the same operators on the same operands, literally equal constants of the same types, and
values of the same shapes, strides, dtypes and devices everywhere. Sizes that are symbols must be the same symbols;
tensors kept in the graph the same objects. What holds anything else is like nothing.
"""

from typing import Any

import torch
from torch import fx

LITERALS = (
    bool, int, float, complex, str, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class _Unknown(Exception):
    """A graph holds something that cannot be compared."""


def structure(gm: fx.GraphModule) -> tuple[object, ...] | None:
    """What a graph computes, without names; equal for graphs that can share one compiled form.

    Returns:
        A key for comparing graphs that live at the same time and share their symbols; None for a graph that shares
        with no other.
    """
    number: dict[fx.Node, int] = {}
    found: list[object] = []
    try:
        for node in gm.graph.nodes:
            found.append((node.op, _target(gm, node), _form((node.args, node.kwargs), number), _values(node)))
            number[node] = len(number)
    except _Unknown:
        return None
    return tuple(found)


def _target(gm: fx.GraphModule, node: fx.Node) -> object:
    if node.op == "get_attr":
        value = gm
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return id(value)
    return node.target if node.op in ("call_function", "call_method") else None


def _values(node: fx.Node) -> object:
    """What is known of a node's results, and of the operands that an operator saw when it was traced."""
    if "unbacked_bindings" in node.meta:
        raise _Unknown
    return tuple(_form(node.meta.get(key), {}) for key in ("val", "eager_input_vals"))


def _form(value: Any, number: dict[fx.Node, int]) -> object:
    """A value as a hashable key; equal keys mean equal values of equal types."""
    parts: tuple[object, ...]
    if isinstance(value, fx.Node):
        parts = (number[value],)
    elif isinstance(value, (tuple, list)):
        parts = tuple(_form(item, number) for item in value)
    elif isinstance(value, dict):
        parts = tuple((name, _form(item, number)) for name, item in value.items())
    elif isinstance(value, slice):
        parts = tuple(_form(item, number) for item in (value.start, value.stop, value.step))
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        parts = (str(value.node.expr),)
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
        sizes = (*value.shape, *value.stride(), value.storage_offset())  # as text: comparing symbols guards on them
        parts = (value.dtype, value.device, *map(str, sizes))
    elif isinstance(value, LITERALS):
        parts = (repr(value),)
    else:
        raise _Unknown
    return (type(value), *parts)
