"""The buckets of one iteration on their way, whatever carries them.

    packed bucket ─► Sending.start ─► a carrier:  SUMMED             the all-reduce of `transport.py`
                                                  Codec              what it makes of the bucket (`compression.py`)
                                                  CommHook           what a hook of the user's does (`comm_hook.py`)
                                                  ReducedPrecision   an all-reduce in another dtype

Note [iteration]: buckets are numbered from the first of a backward to its end, through backwards inside it (of
re-entrant checkpoints). All ranks start the same buckets in the same order, those without inputs included, so these
numbers are the same on all, also where only some reach a bucket in a backward inside another one. Which of several
groups a bucket takes is decided by its number.
"""

import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from .channel import Failed
from .rounds import Travelling
from .rows import Rows
from .transport import Transport, make_transport

if TYPE_CHECKING:
    from .backend import Backend
    from .group import Group
    from .remembered import Session


class Carrier(Protocol):
    """Averages packed buckets over the ranks."""

    @property
    def name(self) -> str | None:
        """What must be the same on all ranks; None for the all-reduce that needs no agreement."""

    @property
    def divides(self) -> bool:
        """Whether it divides by the number of ranks. For others buckets are divided when they are packed."""

    @property
    def in_graphs(self) -> bool:
        """Whether a graph with its collectives inside does all that is to be done with a bucket."""

    @property
    def takes_rows(self) -> bool:
        """Whether it sends tables in rows."""

    def start(
        self,
        flat: Tensor,
        members: Sequence[Tensor],
        sending: "Sending",
        travels: Callable[[int], None],
        *,
        wire: Tensor | None,
        rows: Rows | None,
        idle: AbstractSet[int],
        is_last: bool,
    ) -> Any:
        """Starts averaging a bucket.

        Args:
            flat: the local gradients one after the other; the average replaces them.
            members: the parameters.
            sending: where it is the next bucket.
            travels: to be told the bytes that each collective carries.
            wire: the bucket in the dtype in which compiled code cast it for travelling, or None.
            rows: of tables in it, which travel in place of these; None if there are none, and if not `takes_rows`.
            idle: ids of parameters whose gradient nobody takes from here; the same ones on all ranks.
            is_last: whether no bucket of this graph, or of this end of a backward, follows.

        Returns:
            The work: `wait(timeout)` returns when the average is there.
        """


class Summed:
    """The usual way: an all-reduce, over the groups and in the steps that the backend was made with."""

    name = None
    divides = False
    in_graphs = True
    takes_rows = True

    def start(
        self,
        flat: Tensor,
        members: Sequence[Tensor],
        sending: "Sending",
        travels: Callable[[int], None],
        *,
        rows: Rows | None,
        **_: Any,
    ) -> Any:
        """As `Carrier.start`."""
        sending.group.settle()
        if rows is not None:
            index, names = sending.count, sending.names

            def failed(error: BaseException) -> Failed:
                return Failed(f"sending rows failed for bucket {index} ({names(members)}): {error}")

            return Travelling(rows.rounds(flat, flat, sending, travels), sending.group, failed)
        travels(flat.nbytes)
        return sending.transport.start(flat, sending.count)


SUMMED = Summed()

NOBODY: frozenset[int] = frozenset()


class Sending:
    """What a backend sends in one iteration.

    Attributes:
        group: the ranks.
        transport: what sums over them.
        count: buckets started so far; see Note [iteration].
        divisor: how many ranks have gradients of their own.
        names: qualified names of parameters, in words.
        name: a parameter's qualified name, the same on all ranks.
        session: what a codec learned; see Note [one iteration] in `remembered.py`.
    """

    def __init__(self, backend: "Backend", group: "Group", transport: Transport) -> None:
        replica = backend.replica
        self.group = group
        self.transport = transport
        self.count = 0
        self.divisor = group.size
        self.names = backend.names
        self.name: Callable[[Tensor], str] = lambda parameter: replica.name(replica.number(parameter))
        self.session: Session | None = None
        self._carrier = backend.registered.carrier

    def start(
        self,
        flat: Tensor,
        members: Sequence[Tensor],
        travels: Callable[[int], None],
        *,
        wire: Tensor | None = None,
        rows: Rows | None = None,
        idle: AbstractSet[int] = NOBODY,
        is_last: bool,
    ) -> Any:
        """Starts averaging the next bucket; see `Carrier.start`."""
        work = self._carrier.start(flat, members, self, travels, wire=wire, rows=rows, idle=idle, is_last=is_last)
        self.count += 1
        return work

    def commit(self) -> None:
        """The iteration is over."""
        if self.session is not None:
            self.session.commit()


class Outbox:
    """A backend's iteration under way, as far as it has sent anything."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = weakref.ref(backend)
        self._transport: tuple[Group, Transport] | None = None
        self._sending: Sending | None = None

    def to(self, group: "Group") -> Sending:
        """What this iteration sends to a group. A collective the first time on a group."""
        sending = self._sending
        if sending is None or sending.group is not group:
            backend = self._backend()
            assert backend is not None
            if self._transport is None or self._transport[0] is not group:
                self._transport = (group, make_transport(backend.settings, group, backend.way(group)))
            sending = self._sending = Sending(backend, group, self._transport[1])
        return sending

    def commit(self) -> None:
        """The iteration is over."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.commit()

    def discard(self) -> None:
        """The iteration failed, or another one begins."""
        self._sending = None
