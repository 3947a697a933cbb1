"""How a gradient lies in memory: the strides it must have and the order in which a bucket stores its elements.

torch accumulates a gradient in the parameter's own strides where the parameter fills its memory without gaps
or overlaps, and row-major otherwise. A bucket follows that contract, so that `.grad` can be a view of it.
"""

from collections.abc import Sequence


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
