"""A bucket for a codec: its gradients, what was not sent of them before, and the collectives it may start."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _compat
from .packing import places_in
from .rounds import Round, Rounds
from .rows import Rows

if TYPE_CHECKING:
    from .sending import Sending


class Parcel:
    """A bucket for a codec.

    Attributes:
        flat: the local gradients one after the other, divided already; the sum over all ranks is to replace them.
        members: the parameters.
        wire: the bucket in the dtype in which compiled code cast it for travelling, or None.
        rows: of tables in it, which travel in place of these, or None.
        idle: positions of parameters whose gradient nobody takes from here: their state is left alone.
        group: the ranks.
    """

    def __init__(
        self,
        flat: Tensor,
        members: Sequence[Tensor],
        sending: "Sending",
        travels: Callable[[int], None],
        *,
        wire: Tensor | None,
        rows: Rows | None,
        idle: AbstractSet[int],
    ) -> None:
        """Makes one, of what `Carrier.start` is told of the next bucket; `idle` are ids here."""
        assert sending.session is not None
        self.flat = flat
        self.members = members
        self.group = sending.group
        self.wire = wire
        self.rows = rows
        self.idle = {i for i, p in enumerate(members) if id(p) in idle} if idle else set()
        self._session = sending.session
        self._sending = sending
        self._start = partial(sending.transport.start, index=sending.count, counts=False)
        self._travels = travels

    @cached_property
    def views(self) -> list[Tensor]:
        """The gradients, in their parameters' shapes and strides."""
        return places_in(self.flat, self.members)

    @cached_property
    def known(self) -> list[dict[str, Any]]:
        """What was known of each parameter when the iteration began."""
        return list(map(self._session.read, self.members))

    def name(self, i: int) -> str:
        """Qualified name of a parameter."""
        return self._session.name(self.members[i])

    def change(self, i: int, key: str, value: Any) -> None:
        """Has something kept for a parameter when the iteration is over, unless it is idle."""
        if i not in self.idle:
            self._session.change(self.members[i], key, value)

    # --- error feedback ---------------------------------------------------------------------------

    def feed(self) -> None:
        """Adds to the gradients what earlier steps did not send of them."""
        owed = [None if i in self.idle else self._session.error(p) for i, p in enumerate(self.members)]
        there = [i for i, error in enumerate(owed) if error is not None]
        if there:
            torch._foreach_add_([self.views[i] for i in there], [e for e in owed if e is not None])

    def owe(self, errors: Mapping[int, Tensor]) -> None:
        """Keeps what this step does not send, by position; nothing is left of the others.

        What is not finite is dropped: the step is lost anyway, the next ones are not.
        """
        for i, parameter in enumerate(self.members):
            if i in self.idle:
                continue
            error = errors.get(i)
            if error is not None:
                torch.nan_to_num_(error, nan=0.0, posinf=0.0, neginf=0.0)
            self._session.set_error(parameter, error)

    def owe_flat(self, error: Tensor) -> None:
        """`owe` for all parameters, of a tensor laid out as the bucket."""
        self.owe(dict(enumerate(places_in(error, self.members))))

    # --- collectives ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Any:
        """Starts summing a tensor over the ranks, in place."""
        self._travels(tensor.nbytes)
        return self._start(tensor)

    def sum(self, small: Tensor) -> Rounds:
        """Sums the bucket over the ranks, in the dtype in which it was cast for travelling; of tables the rows."""
        if self.rows is not None:
            yield from self.rows.rounds(self.flat, small, self._sending, self._travels)
            return
        yield Round([self.all_reduce(small)])
        if small is not self.flat:
            self.flat.copy_(small)

    def all_to_all(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Starts sending each rank its part of a tensor, as the first half of an all-reduce does; counts with `gather`.

        Returns:
            What comes from each rank, one after the other, and the work.
        """
        self._travels(tensor.nbytes)
        received = torch.empty_like(tensor)
        return received, _compat.all_to_all(self.group.process_group, received, tensor)

    def gather(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Starts sending a tensor to all ranks, as the second half of an all-reduce does.

        Returns:
            What comes from each rank, one after the other, and the work.
        """
        received = tensor.new_empty(tensor.numel() * self.group.size)
        return received, _compat.all_gather(self.group.process_group, received, tensor)


def plain(parcel: Parcel) -> Rounds:
    """The bucket as it is."""
    return parcel.sum(parcel.flat)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a codec computes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def numel_of(shapes: Sequence[Sequence[int]]) -> int:
    """Elements of all these together."""
    return sum(torch.Size(shape).numel() for shape in shapes)
