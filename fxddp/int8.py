"""Int8: gradients travel as bytes, each block of them with a scale.

    each rank       quantises its bucket, with a scale for each block           } all-to-all: rank k gets part k
    rank k          adds up what came for part k, in full, and quantises that   } all-gather: all ranks get all parts
    each rank       multiplies with the scales

One byte for each element goes each way, as much as an all-reduce of bytes would move, but sums are made in floating
point: no rank's share of the 8 bits shrinks with the number of ranks, as it would (to 127 // N levels) if bytes were
added up while they travel, and nothing can overflow. An all-gather of everybody's bytes would be as exact as the first
half, but moves N-1 bytes for each element in place of 2(N-1)/N. This is the compressed all-reduce of Tang et al.,
"1-bit Adam", ICML 2021, arXiv:2102.02888, with the blocks of Dettmers, "8-Bit Approximations for Parallelism in Deep
Learning", ICLR 2016, arXiv:1511.04561.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import flag, whole
from .compression import Codec
from .parcel import Parcel, numel_of, plain, wide
from .rounds import Round, Rounds

LEVELS = 127


class Int8(Codec):
    """A byte for each element, and a scale of float32 for each block of `block` elements (float64 for float64).

    A block's largest value becomes 127 or -127; all others are rounded to a 127th of it. Values are rounded on the rank
    they come from, and once more when they are added up; with error feedback what rounding took is added to the next
    gradient. Buckets so small that they would not shrink, and complex ones, travel as they are.

    Of a block with a value that is not finite nothing that is finite arrives, so that `GradScaler` notices.

    The collectives are those of Tang et al., "1-bit Adam", ICML 2021, arXiv:2102.02888, the bytes near those of
    Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016, arXiv:1511.04561; error feedback is
    that of Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.

    Args:
        block: elements that share a scale, a multiple of 8.
        use_error_feedback: add what rounding took to the next gradient. Takes memory of the size of the gradients.

    In a training that goes on from a checkpoint (examples/compression.py):

        model = torch.compile(module, backend=fxddp.backend(comm_hook=fxddp.Int8()))

    Raises:
        ValueError: an argument is not allowed; names argument, value and what is allowed.
    """

    steps = "all-to-all, all-gather"

    def __init__(self, block: int = 256, *, use_error_feedback: bool = True) -> None:
        super().__init__()
        whole("block", block, least=8, multiple=8)
        flag("use_error_feedback", use_error_feedback)
        self.block = block
        self.use_error_feedback = use_error_feedback

    def __str__(self) -> str:
        return f"Int8(block={self.block}, use_error_feedback={self.use_error_feedback})"

    def nbytes(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, world_size: int) -> int:
        """For n elements in N parts of ⌈n / (N·block)⌉ blocks: block bytes and a scale each, if that is less."""
        return int8_bytes(numel_of(shapes), self.block, dtype, world_size)

    def rounds(self, parcel: Parcel) -> Rounds:
        """As `Codec.rounds`."""
        if self.use_error_feedback and parcel.flat.is_floating_point():
            parcel.feed()
        if shrinks(parcel, self.block):
            yield from int8(parcel, self.block, feedback=self.use_error_feedback)
            return
        yield from plain(parcel)
        if self.use_error_feedback and parcel.flat.is_floating_point():
            parcel.owe({})


def blocks_of(numel: int, block: int, world_size: int) -> int:
    """Blocks in each rank's part."""
    return -(-numel // (world_size * block))


def int8_bytes(numel: int, block: int, dtype: torch.dtype, world_size: int) -> int:
    """Bytes that travel for so many elements; as many as they are where bytes with scales are no fewer."""
    whole = numel * dtype.itemsize
    if not dtype.is_floating_point:
        return whole
    blocks = world_size * blocks_of(numel, block, world_size)
    return min(whole, blocks * (block + wide(dtype).itemsize))


def shrinks(parcel: Parcel, block: int) -> bool:
    """Whether a bucket travels as bytes."""
    flat = parcel.flat
    return int8_bytes(flat.numel(), block, flat.dtype, parcel.group.size) < flat.nbytes


def int8(parcel: Parcel, block: int, *, feedback: bool) -> Rounds:
    """The bucket as bytes; see the module."""
    flat, size = parcel.flat, parcel.group.size
    blocks = blocks_of(flat.numel(), block, size)
    kind = wide(flat.dtype)
    rows = _rows(flat, size, blocks, block)
    message, error = _quantise(rows)
    received, work = parcel.all_to_all(message.view(-1))
    yield Round([work], more=1)

    mine = _dequantise(received.view(size, -1), blocks, block, kind).sum(0, keepdim=True)
    answer, lost = _quantise(mine)
    error[parcel.group.rank] += lost[0]
    if feedback:
        parcel.owe_flat(error.view(-1)[: flat.numel()].to(flat.dtype))
    gathered, work = parcel.gather(answer.view(-1))
    yield Round([work])

    flat.copy_(_dequantise(gathered.view(size, -1), blocks, block, kind).view(-1)[: flat.numel()])


def quantised(flat: Tensor, block: int) -> Tensor:
    """What is left of a flat tensor when it was quantised once: for measuring."""
    blocks = blocks_of(flat.numel(), block, 1)
    rows = _rows(flat, 1, blocks, block)
    message, _ = _quantise(rows)
    return _dequantise(message, blocks, block, rows.dtype).view(-1)[: flat.numel()]


def _rows(flat: Tensor, ranks: int, blocks: int, block: int) -> Tensor:
    """A copy of a flat tensor as (ranks, blocks, block), zeros at its end."""
    rows = flat.new_empty(ranks, blocks, block, dtype=wide(flat.dtype))
    whole = rows.view(-1)
    whole[: flat.numel()].copy_(flat)
    whole[flat.numel() :].zero_()
    return rows


def _quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The message that (ranks, blocks, block) values become, and what they lose; `rows` is used up.

    A message has a row for each rank: bytes, and then scales.
    """
    ranks, blocks, block = rows.shape
    message = rows.new_empty(ranks, blocks * (block + rows.dtype.itemsize), dtype=torch.uint8)
    scales = torch.linalg.vector_norm(rows, math.inf, -1, keepdim=True).div_(LEVELS)
    rounded = torch.div(rows, torch.where(scales == 0, 1, scales)).round_()
    _values(message, blocks, block).copy_(rounded)
    message[:, blocks * block :] = scales.view(ranks, -1).view(torch.uint8)
    return message, rows.addcmul_(rounded, scales, value=-1)


def _values(message: Tensor, blocks: int, block: int) -> Tensor:
    """The bytes in a message, as (ranks, blocks, block)."""
    values: Tensor = message[:, : blocks * block].view(torch.int8).unflatten(1, (blocks, block))
    return values


def _dequantise(message: Tensor, blocks: int, block: int, kind: torch.dtype) -> Tensor:
    """The values in a message, as (ranks, blocks, block)."""
    scales = message[:, blocks * block :].contiguous().view(kind).unsqueeze(-1)
    return torch.mul(_values(message, blocks, block), scales)
