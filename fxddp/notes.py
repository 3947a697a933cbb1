"""Notes in a group's store: what a rank that leaves the others' path says before it goes; see Note [side channel]."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist


def reason(error: BaseException | None) -> str:
    """Why a rank leaves: an exception by its kind and message, if it has one; None stands for one of other code."""
    if error is None:
        return "an exception outside of fxddp"
    return ": ".join(filter(None, (type(error).__name__, str(error))))


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank has left.

    Attributes:
        rank: which.
        step: its last announced one.
        launched: collectives it had started by then.
        text: continues "rank 0 …".
        lost: it takes part in nothing any more; else it gave up this one step.
    """

    rank: int
    step: int
    launched: int
    text: str
    lost: bool


class Notes:
    """The notes of a group's ranks: of each the last of either kind.

    Args:
        rank: of this process.
        size: of the group.
        store: shared by the group, with keys that nobody else uses.
    """

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self._rank, self._size, self._store = rank, size, store

    def leave(self, step: int, launched: int, text: str, *, lost: bool) -> None:
        """Leaves a note of this rank; in vain where the store is gone: what counts is the error that led here."""
        note = Note(self._rank, step, launched, text, lost)
        with suppress(RuntimeError):
            self._store.set(self._key(self._rank, lost), json.dumps(asdict(note)))
            self._store.set("noted", "")

    def others(self) -> Iterator[Note]:
        """The notes of the other ranks; a single request to the store where there are none."""
        if self._store.check(["noted"]):
            for rank in range(self._size):
                if rank != self._rank:
                    yield from filter(None, (self._find(rank, lost) for lost in (False, True)))

    def gave_up(self) -> list[Note]:
        """The step each rank, this one too, gave up last, of those that did so."""
        return list(filter(None, (self._find(rank, lost=False) for rank in range(self._size))))

    def _find(self, rank: int, lost: bool) -> Note | None:
        key = self._key(rank, lost)
        return Note(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    @staticmethod
    def _key(rank: int, lost: bool) -> str:
        return f"{'lost' if lost else 'gave up'}/{rank}"
