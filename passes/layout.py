"""How a gradient lies in memory: the strides it must have and the order in which a bucket stores its elements.

torch accumulates a gradient in the parameter's own strides where the parameter fills its memory without gaps
or overlaps, and row-major otherwise. A bucket follows that contract, so that `.grad` can be a view of it.
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

aten = torch.ops.aten


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def storage_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost one in memory (ties keep their order)."""
    return tuple(sorted(range(len(shape)), key=lambda d: (-stride[d] if shape[d] != 1 else 0, d)))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if the elements fill their memory without gaps or overlaps, in any order of the dimensions."""
    step = 1
    for size, jump in sorted(((s, j) for s, j in zip(shape, stride, strict=True) if s != 1), key=lambda pair: pair[1]):
        if size == 0:
            return True
        if jump != step:
            return False
        step *= size
    return True


def gradient_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides that the gradient of a parameter of this shape and these strides must have."""
    return tuple(stride) if is_dense(shape, stride) else contiguous_strides(shape)


def lay_out(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Gives all values of a graph the strides that follow from those its inputs really have; edits `gm` in place.

    Inductor's forward may save an activation in another layout than the backward was traced with, such as a convolution
    channels-last. AOTAutograd says so only through the example inputs; pieces are compiled for each other's strides.
    """
    traced = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    if [_strides(value) for value in traced] == [_strides(value) for value in inputs]:
        return
    for node in gm.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # the new strides may not allow a view
    mode = detect_fake_mode(inputs)
    assert mode is not None, "the inputs of a backward graph are not fake"
    with patch.object(mode, "allow_non_fake_inputs", new=True):  # constants of the graph are real
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    gm.recompile()


def _strides(value: Any) -> tuple[str, ...]:
    # As text: comparing symbols would guard on them.
    return tuple(map(str, value.stride())) if isinstance(value, torch.Tensor) else ()
