"""PowerSGD: gradients travel as products of two thin matrices.

Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, arXiv:1905.13727, algorithms 1 and 2.

    M = gradient + error                       n × m, on each rank
    P = sum over the ranks of M Q              n × r, with the Q of the last step; then made orthonormal
    Q = sum over the ranks of Mᵀ P             m × r
    gradient = P Qᵀ,  error = M - P (Mᵀ P)ᵀ    the same on all ranks, and each rank's own
"""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .arguments import flag, positive, whole
from .compression import Codec
from .parcel import Parcel, numel_of, plain, wide
from .rounds import Round, Rounds


class PowerSGD(Codec):
    """Compresses gradients of two and more dimensions to two factors of low rank, by one step of power iteration.

    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
    arXiv:1905.13727.

    A gradient of shape (n, …) is an n × m matrix. All factors of a bucket travel in two all-reduces, the second one
    starting when the first is done; the first also carries what is not compressed: gradients of fewer dimensions, and
    matrices that would not shrink enough. Factors are computed in float32 (float64 for float64) and travel in the
    gradients' dtype; complex gradients travel as they are.

    The numbers are those of torch's `powerSGD_hook`, but each gradient is compressed by itself, wherever it is packed,
    errors are those of Algorithm 2 (what this rank sent, not what all ranks did: their sum is the same), and a step
    whose gradients are not finite leaves Q as it was. Factors are made orthonormal by a QR decomposition, which needs
    no epsilon: it gives orthonormal columns for matrices of lower rank and for zeros as well.

    Args:
        rank: columns of the factors, torch's `matrix_approximation_rank`; more send more and err less.
        start_iter: steps for which a parameter's gradient travels as it is, before compression starts; torch's
            `start_powerSGD_iter`. The first gradients are the hardest to compress.
        min_compression_rate: compress a matrix if n·m > (n + m)·rank·min_compression_rate.
        use_error_feedback: add what was not sent to the next gradient. Takes memory of the size of the gradients.
        warm_start: start from the last step's Q in place of a random one.
        random_seed: for random Q, with the parameter's name; the same on all ranks.

    In a training that goes on from a checkpoint (examples/compression.py):

        model = torch.compile(module, backend=fxddp.backend(comm_hook=fxddp.PowerSGD(4)))

    Raises:
        ValueError: an argument is not allowed; names argument, value and what is allowed.
    """

    def __init__(
        self,
        rank: int = 1,
        *,
        start_iter: int = 1000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
    ) -> None:
        super().__init__()
        whole("rank", rank, least=1)
        whole("start_iter", start_iter, least=0)
        whole("random_seed", random_seed, least=0)
        positive("min_compression_rate", min_compression_rate)
        flag("use_error_feedback", use_error_feedback)
        flag("warm_start", warm_start)
        self.rank = rank
        self.start_iter = start_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.random_seed = random_seed

    def __str__(self) -> str:
        return (
            f"PowerSGD(rank={self.rank}, start_iter={self.start_iter}, min_compression_rate="
            f"{self.min_compression_rate}, use_error_feedback={self.use_error_feedback}, warm_start={self.warm_start}, "
            f"random_seed={self.random_seed})"
        )

    @property
    def remark(self) -> str:
        """As `Codec.remark`."""
        before = f"the first {self.start_iter} steps send gradients as they are; then " if self.start_iter else ""
        return f"{before}PowerSGD sends a bucket in two all-reduces, and only one's latency is predicted"

    def compresses(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether a gradient of this shape travels as factors, once compression started."""
        if len(shape) < 2 or not dtype.is_floating_point:
            return False
        n, m = _matrix(shape)
        return n * m > (n + m) * self.rank * self.min_compression_rate

    def nbytes(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, world_size: int) -> int:
        """Once compression started: (n + m)·min(n, m, rank) elements for each matrix, all elements of the others."""
        small = [shape for shape in shapes if self.compresses(shape, dtype)]
        rest = numel_of(shapes) - numel_of(small)
        factors = sum((n + m) * min(n, m, self.rank) for n, m in map(_matrix, small))
        return (rest + factors) * dtype.itemsize

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
        by_shape: dict[tuple[int, int], list[int]] = {}  # matrices of one shape are multiplied together
        for i, parameter in enumerate(parcel.members):
            if steps[i] >= self.start_iter and self.compresses(parameter.shape, parameter.dtype):
                by_shape.setdefault(_matrix(parameter.shape), []).append(i)
        if by_shape:
            alike = [
                _Alike(parcel, shape, indices, [self._start(parcel, i, steps[i]) for i in indices])
                for shape, indices in by_shape.items()
            ]
            yield from self._factors(parcel, alike)
            return
        yield from plain(parcel)
        if self.use_error_feedback:
            parcel.owe({})

    def _factors(self, parcel: Parcel, alike: "Sequence[_Alike]") -> Rounds:
        compressed = {i for group in alike for i in group.indices}
        pieces = parcel.flat.split([parameter.numel() for parameter in parcel.members])
        rest = [piece for i, piece in enumerate(pieces) if i not in compressed]
        parts = [*rest, *(group.left().flatten() for group in alike)]
        sent = torch.cat(parts)
        yield Round([parcel.all_reduce(sent)], more=1)

        arrived = sent.split([part.numel() for part in parts])
        if rest:
            torch._foreach_copy_(rest, list(arrived[: len(rest)]))
        parts = [group.right(p).flatten() for group, p in zip(alike, arrived[len(rest) :], strict=True)]
        sent = torch.cat(parts)
        if self.use_error_feedback:
            parcel.owe({i: error for group in alike for i, error in group.errors()})
        yield Round([parcel.all_reduce(sent)])

        for group, q in zip(alike, sent.split([part.numel() for part in parts]), strict=True):
            kept = group.finish(q)
            if self.warm_start:
                for k, i in enumerate(group.indices):
                    parcel.change(i, "q", kept[k])

    def _start(self, parcel: Parcel, i: int, step: int) -> Tensor:
        """The Q to start from: the last step's, or a random one."""
        kept: Tensor | None = parcel.known[i].get("q")
        if kept is not None:
            return kept
        n, m = _matrix(parcel.members[i].shape)
        text = f"{self.random_seed} {parcel.name(i)} {0 if self.warm_start else step}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        drawn = torch.randn(m, min(n, m, self.rank), generator=torch.Generator().manual_seed(seed))
        return drawn.to(parcel.flat.device, wide(parcel.flat.dtype))


class _Alike:
    """The matrices of one shape in a bucket.

    Attributes:
        indices: their positions in it.
    """

    def __init__(self, parcel: Parcel, shape: tuple[int, int], indices: Sequence[int], start: Sequence[Tensor]) -> None:
        self.indices = indices
        self._views = [parcel.views[i] for i in indices]
        self._dtype = parcel.flat.dtype
        self._wide = wide(self._dtype)
        self._matrices = torch.stack([view.reshape(shape) for view in self._views]).to(self._wide)
        self._before = torch.stack(list(start))
        self._p = self._q = self._before

    def left(self) -> Tensor:
        """M Q, as it travels."""
        self._p = torch.bmm(self._matrices, _orthonormal(self._before))
        return self._p.to(self._dtype)

    def right(self, p: Tensor) -> Tensor:
        """Mᵀ P, as it travels, from the sum of M Q."""
        self._p = _orthonormal(p.view(self._p.shape).to(self._wide))
        self._q = torch.bmm(self._matrices.mT, self._p).to(self._dtype)
        return self._q

    def errors(self) -> Iterator[tuple[int, Tensor]]:
        """By position, what P and this rank's Mᵀ P leave of each gradient."""
        lost = torch.baddbmm(self._matrices, self._p, self._q.to(self._wide).mT, alpha=-1).to(self._dtype)
        for i, view, error in zip(self.indices, self._views, lost, strict=True):
            yield i, error.view(view.shape)

    def finish(self, q: Tensor) -> Tensor:
        """Puts P Qᵀ into the bucket, from the sum of Mᵀ P; returns the Q to start from in the next step."""
        q = q.view(self._q.shape).to(self._wide)
        result = torch.bmm(self._p, q.mT)
        torch._foreach_copy_(self._views, [r.view(v.shape) for r, v in zip(result, self._views, strict=True)])
        return torch.where(q.sum((1, 2), keepdim=True).isfinite(), q, self._before)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a gradient of at least two dimensions."""
    return shape[0], numel_of([shape[1:]])


def _orthonormal(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span those of each matrix; for deficient ones more than that."""
    orthonormal: Tensor = torch.linalg.qr(matrices).Q
    return orthonormal
