"""The collectives of a bucket that a codec sends, one after the other.

Note [rounds]: the next collective for a bucket starts when the one before is done. All collectives of a bucket start
before anything else starts on the group, and before a rank waits for the others' records (`Group.settle`), in the
thread that launches. So their order is that of the launches, on every rank, whoever waits for what and when, and no
rank waits for a collective that another one will only start when it hears of this one. A bucket's collectives are
counted when it is launched, as what is announced next says how many there were.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from . import ranges
from .channel import Failed

if TYPE_CHECKING:
    from .group import Group


@dataclass(frozen=True, slots=True)
class Round:
    """Collectives that were started together.

    Attributes:
        works: what to wait for.
        more: how many collectives follow for this bucket.
    """

    works: Sequence[Any]
    more: int = 0


Rounds = Iterator[Round]
"""The collectives of a bucket; what comes after a round runs when that is done."""


class Travelling:
    """The work of a bucket under way; waits as the work of a collective does."""

    def __init__(self, rounds: Rounds, group: "Group", failed: Callable[[BaseException], Failed]) -> None:
        self._rounds = rounds
        self._group = group
        self._failed = failed
        self._round: Round | None = None
        self._abandoned = False
        self._range = ranges.current()
        self._count = 0
        self._next()
        if self._round is not None:
            group.count(len(self._round.works) + self._round.more)
            if self._round.more:
                group.unsettled = self

    @torch.no_grad()
    def _next(self) -> None:
        try:
            with ranges.step(self._range, f"round{self._count}"):
                self._round = next(self._rounds, None)
        except Exception as error:
            raise self._failed(error) from error
        self._count += 1

    def settle(self, timeout: timedelta | None = None) -> None:
        """Starts all that is left to start; see Note [rounds]."""
        while not self._abandoned and self._round is not None and self._round.more:
            _wait(self._round.works, timeout)
            self._next()
        if self._group.unsettled is self:
            self._group.unsettled = None

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits until the bucket holds its result.

        Raises:
            Failed: the codec failed.
            RuntimeError: a collective failed, or "timed out".
        """
        self.settle(timeout)
        if self._round is not None:
            _wait(self._round.works, timeout)
            if not self._abandoned:
                self._next()

    def is_completed(self) -> bool:
        """Whether the last collective is over."""
        last = self._round
        return last is None or (not last.more and all(work.is_completed() for work in last.works))

    def abandon(self) -> None:
        """Has no further collective started: its backward failed."""
        if not self._abandoned and self._round is not None and self._round.more:
            self._group.count(-self._round.more)
            self._group.unsettled = None
        self._abandoned = True


def _wait(works: Sequence[Any], timeout: timedelta | None) -> None:
    for work in works:
        work.wait() if timeout is None else work.wait(timeout)
