"""Which of its backends a rank begins to train with, told by the order in which they were made.

Models of the same kinds look alike to the ranks. Where they begin with different ones of them, gradients of one model
would be averaged with those of another, and rank 0's weights of one sent into the other.
"""

from collections import Counter
from typing import TYPE_CHECKING

from .channel import RanksDisagree

if TYPE_CHECKING:
    from .group import GroupReference

_made: "Counter[GroupReference | None]" = Counter()


class Turn:
    """The place of a backend among those that were made for a process group.

    Args:
        process_group: the one it was given, or None.
    """

    def __init__(self, process_group: "GroupReference | None") -> None:
        self._group = process_group
        _made[process_group] += 1
        self._number = _made[process_group]

    def told(self) -> list[int]:
        """Its place, and how many there are by now: if that differs, ranks have made different ones of their own."""
        return [self._number, _made[self._group]]


def refuse_another(rank: int, theirs: list[int] | None, first: list[int] | None) -> None:
    """Raises if ranks have made as many backends, and begin with different ones.

    Raises:
        RanksDisagree: names them.
    """
    if theirs and first and theirs != first and theirs[1] == first[1]:
        raise RanksDisagree(
            f"rank {rank} begins to train with the backend that it made as number {theirs[0]} of {theirs[1]}, rank 0 "
            f"with its number {first[0]}: their models look alike, and would be taken for each other. Make the "
            "backends, and train with each for the first time, in the same order on all ranks"
        )
