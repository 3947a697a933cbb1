"""Adaptive: as few bytes as the measured error allows.

The discussion of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
arXiv:2006.15704, leaves open how far gradients may be compressed; here that is measured while training.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import flag, positive, whole
from .cast import cast
from .compression import Codec
from .int8 import int8, quantised, shrinks
from .parcel import Parcel, numel_of, plain
from .passes.compress import narrows
from .rounds import Round, Rounds

FULL, BF16, FP16, INT8 = "full", "bf16", "fp16", "int8"
LEVELS = (FULL, BF16, FP16, INT8)
"""From the most careful one; a bucket takes the most careful one of its parameters."""

CASTS = {BF16: torch.bfloat16, FP16: torch.float16}


class Adaptive(Codec):
    """Starts uncompressed, and gives each bucket the fewest bytes whose measured relative error is small enough.

    The rule: in step `start_iter` of a parameter, and every `every` steps from then on, each rank compresses its bucket
    x in all ways, to x̂, on trial: to bytes with scales (`Int8`), to float16 and to bfloat16. Summed over the ranks,
    √(∑|x - x̂|² / ∑|x|²) is the relative error of each. From the next step on the bucket's parameters travel as bytes
    if their error is at most `tolerance`; else in that of the 16-bit dtypes with the smaller error, if that is at most
    `tolerance`; else as they are. The figures, four float64 for each bucket, are all-reduced beside the bucket, so all
    ranks decide alike. Where nothing can be concluded (all zeros, not finite) what was decided before stays.

    That compression should follow what the gradients bear is proposed, as future work, by Li et al., "PyTorch
    Distributed", VLDB 2020, arXiv:2006.15704; the rule is fxddp's own.

    Args:
        tolerance: relative error that is allowed. Normally distributed gradients have 0.007 as bytes,
            0.0017 in bfloat16 and 0.0002 in float16.
        start_iter: steps before the first measurement.
        every: steps between measurements.
        block: of `Int8`.
        use_error_feedback: add what rounding took on the ranks to the next gradient; sums of 16-bit values are rounded
            once more, and that is not given back. Takes memory of the size of the gradients.

    In a training that goes on from a checkpoint (examples/compression.py):

        model = torch.compile(module, backend=fxddp.backend(comm_hook=fxddp.Adaptive(0.01)))

    Raises:
        ValueError: an argument is not allowed; names argument, value and what is allowed.
    """

    def __init__(
        self,
        tolerance: float = 0.01,
        *,
        start_iter: int = 10,
        every: int = 100,
        block: int = 256,
        use_error_feedback: bool = True,
    ) -> None:
        super().__init__()
        positive("tolerance", tolerance)
        whole("start_iter", start_iter, least=0)
        whole("every", every, least=1)
        whole("block", block, least=8, multiple=8)
        flag("use_error_feedback", use_error_feedback)
        self.tolerance = tolerance
        self.start_iter = start_iter
        self.every = every
        self.block = block
        self.use_error_feedback = use_error_feedback

    def __str__(self) -> str:
        return (
            f"Adaptive(tolerance={self.tolerance}, start_iter={self.start_iter}, every={self.every}, "
            f"block={self.block}, use_error_feedback={self.use_error_feedback})"
        )

    @property
    def remark(self) -> str:
        """As `Codec.remark`."""
        return f"Adaptive is shown as it starts, uncompressed: from step {self.start_iter} on what it measures decides"

    def levels(self) -> dict[str, str]:
        """How each parameter travels now, by qualified name: "full", "bf16", "fp16" or "int8"."""
        return {name: values.get("level", FULL) for name, values in self.memory.items()}

    def nbytes(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, world_size: int) -> int:
        """Before anything was measured, which is the most: as uncompressed."""
        return numel_of(shapes) * dtype.itemsize

    def rounds(self, parcel: Parcel) -> Rounds:
        """As `Codec.rounds`."""
        if not parcel.flat.is_floating_point():
            yield from plain(parcel)
            return
        steps = [known.get("steps", 0) for known in parcel.known]
        for i, count in enumerate(steps):
            parcel.change(i, "steps", count + 1)
        if self.use_error_feedback:
            parcel.feed()
        figures = None
        works = []
        if any(count >= self.start_iter and (count - self.start_iter) % self.every == 0 for count in steps):
            figures = self._measure(parcel.flat)
            works.append(parcel.all_reduce(figures))
        for one in self._send(parcel, min(map(self._level, parcel.known), key=LEVELS.index)):
            yield Round([*works, *one.works], one.more)
            works = []
        if figures is not None:
            level = self._choose(figures, parcel.flat.dtype)
            if level is not None:
                for i in range(len(steps)):
                    parcel.change(i, "level", level)

    @staticmethod
    def _level(known: dict[str, str]) -> str:
        return known.get("level", FULL)

    def _send(self, parcel: Parcel, level: str) -> Rounds:
        if level == INT8 and shrinks(parcel, self.block):
            return int8(parcel, self.block, feedback=self.use_error_feedback)
        wire = CASTS.get(level)
        if wire is None or not narrows(parcel.flat.dtype, wire):
            if self.use_error_feedback:
                parcel.owe({})
            return plain(parcel)
        if self.use_error_feedback:
            small = parcel.wire = parcel.flat.to(wire)
            parcel.owe_flat(parcel.flat - small)
        return cast(parcel, wire)

    def _measure(self, flat: Tensor) -> Tensor:
        """The squares of a bucket and of what each level loses of it, summed up."""
        losses = [flat, *(flat - flat.to(wire) for wire in CASTS.values()), flat - quantised(flat, self.block)]
        return torch.stack([loss.double().square().sum() for loss in losses])

    def _choose(self, figures: Tensor, dtype: torch.dtype) -> str | None:
        """The level that the rule gives; None for none."""
        total, *losses = figures.tolist()
        if not all(map(math.isfinite, (total, *losses))) or total == 0:
            return None
        errors = {level: math.sqrt(loss / total) for level, loss in zip(LEVELS[1:], losses, strict=True)}
        if errors[INT8] <= self.tolerance:
            return INT8
        half = min(CASTS, key=errors.__getitem__)
        return half if errors[half] <= self.tolerance and narrows(dtype, CASTS[half]) else FULL
