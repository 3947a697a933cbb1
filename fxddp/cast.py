"""Buckets that travel in 16 bits: cast by the compiled code that packs them, or here where no graph does."""

from collections.abc import Sequence

import torch

from .compression import Codec
from .parcel import Parcel, numel_of, plain
from .passes.compress import narrows
from .rounds import Rounds


def cast(parcel: Parcel, wire: torch.dtype) -> Rounds:
    """The bucket in a narrower dtype; the ranks' values are added in it, but rows of tables in that of the bucket."""
    return parcel.sum(parcel.flat.to(wire) if parcel.wire is None else parcel.wire)


class Cast(Codec):
    """Half the bytes: buckets wider than 16 bits are cast to float16 or bfloat16 by the code that packs them.

    As DistributedDataParallel's `fp16_compress_hook` and `bf16_compress_hook`, whose numbers it has but for the order
    of dividing and rounding.

    Args:
        name: "fp16", whose largest number is 65,504 and whose smallest is 6e-8, or "bf16", with the range of float32
            and 8 bits of precision.
    """

    takes_rows = True
    DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # noqa: RUF012 (never written)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.dtype = self.wire = self.DTYPES[name]
        self._kind = name

    def __str__(self) -> str:
        return self._kind

    def rounds(self, parcel: Parcel) -> Rounds:
        """As `Codec.rounds`."""
        return cast(parcel, self.dtype) if narrows(parcel.flat.dtype, self.dtype) else plain(parcel)

    def nbytes(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, world_size: int) -> int:
        """2 for each element of a wider dtype."""
        return numel_of(shapes) * (self.dtype if narrows(dtype, self.dtype) else dtype).itemsize
