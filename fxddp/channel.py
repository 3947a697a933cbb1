"""The side channel of a group: what ranks tell each other about their collectives before they run them.

Note [side channel]: every step of fxddp that communicates starts with a record, a few integers that all ranks exchange
over connections of their own (`wire.py`), whatever the data travels on. Records pair up by their order, so a rank
always learns what the others are about to do, and collectives of the data group only run where all records were equal
or all ranks drew the same conclusion from their difference. A record is sent when a backward starts and waited for
when the first bucket is packed.

What records cannot tell is what happened after them: a rank that gave up a backward half-way leaves a note in the
group's store, and a rank that waits longer than `STALL` reads the others' notes.
"""

import json
import struct
import threading
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from . import _compat
from .connecting import own_address
from .notes import Note, Notes
from .whereabouts import Place, Whereabouts
from .wire import PeerGone, Wire

if TYPE_CHECKING:
    from .group import Group

STALL = 1.0
"""Seconds that a wait may take before this rank looks for notes of the others."""

GRACE = 10.0
"""Seconds that a wait may take although a rank that started all of the same collectives has given up this step."""

ASK = 2.0
"""Seconds that a wait may take before this rank asks the others where they are."""

WORDS = 6
"""Integers in a record that the caller fills."""

OTHER_STEPS = (
    "it ran another number of steps. Give all ranks the same number of batches, or use join of "
    "fxddp.DistributedDataParallel"
)
LEFT_JOIN = (
    "it is at the end of Join, and its last forward, with grad enabled, got no backward. Evaluate under torch.no_grad()"
)

Record = tuple[int, ...]

_RECORD = struct.Struct(f"!{WORDS + 2}q")


class RanksDisagree(RuntimeError):
    """Ranks came to the same point of a training run with different parameters, shapes, settings or steps.

    Raised on every rank that takes part, before anything of the step travels, in the forward of first contact or from
    `loss.backward()`; the text names ranks, parameters, what was expected and what to do. A rank that waits for one
    that left, or does something else, raises it within seconds where that rank can be asked, or else within the
    timeout of the process group. Where the ranks have lost each other it is raised again by every later step.
    """


class Failed(RuntimeError):
    """What was waited for failed by itself, on this rank: a user's communication hook."""


class Announced:
    """A record under way to the other ranks.

    Attributes:
        sizes: by rank, the numbers that came with its record; known with the records.
    """

    __slots__ = ("_channel", "block", "blocks", "sizes", "what")

    def __init__(self, channel: "Channel", block: bytes, what: Callable[[], str]) -> None:
        self.block = block
        self.what = what
        self.blocks: list[bytes] | None = None
        self.sizes: tuple[tuple[int, ...], ...] = ()
        self._channel = channel

    def records(self) -> list[Record]:
        """Waits for the records of all ranks.

        Raises:
            RanksDisagree: a rank is at another step, has launched other collectives, failed, or did not come in time.
        """
        self._channel.complete(self)
        assert self.blocks is not None
        rows = [_RECORD.unpack_from(block) for block in self.blocks]
        if any(row[:2] != rows[0][:2] for row in rows):
            self._channel.refuse_steps(rows)
        self.sizes = tuple(tuple(array("q", block[_RECORD.size :])) for block in self.blocks)
        return [row[2:] for row in rows]


class Channel:
    """The side channel of one process group. Made by all its ranks together.

    Attributes:
        step: how many records were announced.
        launched: how many collectives were started on the data group; where a rank gave up half-way these differ.
    """

    def __init__(self, group: "Group") -> None:
        token = group.gather_objects(uuid.uuid4().hex)[0]
        self.rank, self.size = group.rank, group.size
        self.step = 0
        self.launched = 0
        self.timeout: timedelta = _compat.group_timeout(group.process_group)
        self._store = group.store(f"fxddp/{token}")
        self._wire = Wire(self.rank, self.size, group.store(f"fxddp/{token}/wire"), self.timeout)
        self._notes = Notes(self.rank, self.size, self._store)
        host = own_address(self._store)
        self._whereabouts = Whereabouts(self.rank, self.size, host, self._store, lambda: group.exists)
        self._global_rank = dist.get_global_rank(group.process_group, self.rank)
        self._lock = threading.RLock()
        self._open: Announced | None = None
        self._broken = ""
        self._given_up: dict[int, int] = {}

    def announce(
        self,
        record: Sequence[int],
        what: Callable[[], str],
        cast: Callable[[], bytes] | None = None,
        sizes: Sequence[int] = (),
    ) -> Announced:
        """Sends a record.

        Args:
            record: `WORDS` integers.
            what: describes the step in an error: "rank 0 is about to {what}".
            cast: called on rank 0 for bytes that go out with it; the others ask for them with `receive`.
            sizes: numbers that may be others on each rank; not with `cast`.

        Raises:
            RanksDisagree: the ranks lost each other earlier.
        """
        if self._broken:
            raise RanksDisagree(self._broken)
        with self._lock:
            if self._open is not None:  # of a backward that was given up: the others count on this rank to pass it on
                self.complete(self._open)
            self.step += 1
            block = _RECORD.pack(self.step, self.launched, *record) + array("q", sizes).tobytes()
            if cast is not None and self.rank == 0:  # first, so that it is there when the record is
                self._try(lambda: self._wire.cast(block + cast(), STALL), what)
            self._try(lambda: self._wire.start(block), what)
            self._open = Announced(self, block, what)
            return self._open

    def receive(self, announced: Announced) -> bytes | None:
        """What rank 0 cast with its record, if that is the same as this rank's; does not wait for the other ranks.

        Returns:
            The bytes; None where any rank announced another step: the records will tell.

        Raises:
            RanksDisagree: it failed, or did not come in time.
        """
        found: bytes | None = None

        def attempt(seconds: float) -> bool:
            nonlocal found
            found = self._wire.receive(announced.block, seconds)
            if found is None and self._wire.finished:
                if any(block != announced.block for block in self._wire.blocks):
                    return True  # also if rank 0 cast: who passes it on may be at another step
                found = self._wire.receive(announced.block, seconds)
            return found is not None

        self._patiently(attempt, announced.what)
        return found

    def complete(self, announced: Announced) -> None:
        """Waits for the other ranks' records, unless that was done."""
        with self._lock:  # autograd has a thread for each device
            if announced.blocks is None:
                announced.blocks = self.finish(announced.what)
                self._open = None

    def gather(self, value: Any, what: Callable[[], str]) -> list[Any]:
        """Everybody's `value` (of JSON's types), by rank, after records that differed."""
        self._try(lambda: self._wire.start(json.dumps(value).encode()), what)
        return list(map(json.loads, self.finish(what)))

    # --- waiting ----------------------------------------------------------------------------------

    def _try(self, action: Callable[[], None], what: Callable[[], str]) -> None:
        try:
            action()
        except PeerGone as error:
            self._lost(what, error)

    def finish(self, what: Callable[[], str]) -> list[bytes]:
        """Waits for everybody's blocks; see `wait`."""
        blocks: list[bytes] | None = None

        def attempt(seconds: float) -> bool:
            nonlocal blocks
            blocks = self._wire.finish(seconds)
            return blocks is not None

        self._patiently(attempt, what)
        assert blocks is not None
        return blocks

    def wait(self, work: Any, what: Callable[[], str]) -> None:
        """Waits for gloo work of this step.

        Raises:
            RanksDisagree: another rank gave up this step, died, or did not come within the group's timeout; and from
                then on at every announcement.
        """
        self._patiently(lambda seconds: _arrived(work, seconds), what)

    def _patiently(self, attempt: Callable[[float], bool], what: Callable[[], str]) -> None:
        since = time.monotonic()
        places: dict[int, Place] = {}
        while True:
            try:
                if attempt(STALL):
                    return
            except (RanksDisagree, Failed):
                raise
            except (RuntimeError, PeerGone) as error:
                self._lost(what, error)
            if time.monotonic() - since >= self.timeout.total_seconds():
                self._lost(what, None)
            with suppress(dist.DistError):
                self._store.set(f"at/{self.rank}", str(self.step))
                self._look(what, patient=time.monotonic() - since < GRACE)
                if time.monotonic() - since >= ASK:
                    before, places = places, self._whereabouts.ask()
                    self._refuse_deadlock(before, places, what)

    def _refuse_deadlock(self, before: dict[int, Place], now: dict[int, Place], what: Callable[[], str]) -> None:
        """Raises if a rank will not come: it waits for this one in a collective of the user's, or left the group."""
        for rank, place in now.items():
            if place.destroyed and rank in before and before[rank].destroyed:
                self._break(
                    f"rank {self.rank} was about to {what()}, but rank {rank} has destroyed its process group, and is "
                    f"{place}: {OTHER_STEPS}"
                )
            if place == before.get(rank) and place.stuck_without(self._global_rank):
                why = LEFT_JOIN if place.left_join else OTHER_STEPS
                self._break(f"rank {self.rank} was about to {what()}, but rank {rank} waits for it {place}: {why}")

    def _look(self, what: Callable[[], str], *, patient: bool = False) -> None:
        """Reads what other ranks noted: raises if one of them will not come to where this rank waits."""
        for note in self._notes.others():
            here = self._given_up.get(note.step)
            if note.lost or (here is None and self._is_in_vain(note, patient=patient)):
                self._break(f"rank {self.rank} was about to {what()}, but rank {note.rank} {note.text}")
            if here is not None and here != note.launched:
                self._break(
                    f"ranks gave up a backward at different points: rank {note.rank} {note.text}, after "
                    f"{note.launched} collectives of the run; rank {self.rank} after {here}"
                )

    def _is_in_vain(self, note: Note, *, patient: bool) -> bool:
        """Whether this rank waits for one that gave up a step.

        What that rank had started before will arrive, and may well end here as it did there: in an exception. But the
        further collectives of a communication hook are not counted.
        """
        if note.step == self.step:
            return not patient or note.launched < self.launched
        return note.step == self.step - 1  # it goes on with the step after

    def _lost(self, what: Callable[[], str], error: Exception | None) -> None:
        missing: list[int] = []
        places: dict[int, Place] = {}
        with suppress(dist.DistError):
            self._look(what)
            self._store.set(f"at/{self.rank}", str(self.step))
            time.sleep(STALL)  # the others notice at the same time, and say so
            self._look(what)
            for rank in range(self.size):
                here = self._store.check([f"at/{rank}"]) and int(self._store.get(f"at/{rank}")) == self.step
                missing += [] if here else [rank]
            places = self._whereabouts.ask(missing)
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing)) or 'unknown'}"
        limit = f"within the group's timeout of {self.timeout.total_seconds():g} s"
        self._break(
            f"rank {self.rank} was about to {what()}, but {who} "
            + (f"is gone ({error})" if error else f"did not come to the same point {limit}")
            + ": it stopped, took another path through the model, or ran another number of backwards. "
            + "".join(f"Rank {rank} is {place}. " for rank, place in places.items() if place.line)
            + "Look for an error of that rank",
            error,
        )

    def _break(self, message: str, cause: BaseException | None = None) -> None:
        """Gives up the channel for good: its ranks cannot know any more where the others are."""
        self._broken = (
            f"{message}. The ranks of this process group lost each other there, whatever model "
            "they train: start the training again from a checkpoint, in new processes or on a new process group"
        )
        self._notes.leave(self.step, self.launched, f"lost the others: {message}", lost=True)
        raise RanksDisagree(message) from cause

    def close(self) -> None:
        """Closes the connections to the other ranks."""
        self._wire.close()
        self._whereabouts.close()

    # --- giving up --------------------------------------------------------------------------------

    def give_up(self, reason: str) -> None:
        """Notes that this rank will launch nothing more of this step; that is a step of its own."""
        self._given_up = {self.step: self.launched}
        self._notes.leave(self.step, self.launched, f"gave up there: {reason}", lost=False)
        self.step += 1

    def lose(self, reason: str) -> None:
        """Gives up the channel for good, unless it is: this rank is in a state that no step can follow."""
        if not self._broken:
            with suppress(RanksDisagree):
                self._break(f"rank {self.rank} {reason}")

    def drain(self, work: Any, patience: timedelta) -> bool:
        """Waits for launched gloo work that nobody will use; False if the others will not come."""
        since = time.monotonic()
        while time.monotonic() - since < patience.total_seconds():
            try:
                if _arrived(work, STALL):
                    return True
                self._look(lambda: "clean up after an error")
            except RuntimeError:
                return False
        return False

    def refuse_steps(self, rows: Sequence[Sequence[int]]) -> None:
        """Raises for records of ranks that are at different steps."""
        where = "; ".join(f"rank {rank}: step {row[0]}, {row[1]} collectives" for rank, row in enumerate(rows))
        last = min(row[0] for row in rows) - 1
        with suppress(dist.DistError):
            where += "".join(f"; rank {note.rank} {note.text}" for note in self._notes.gave_up() if note.step >= last)
        self._break(
            f"ranks are at different steps ({where}): a backward was given up, or ran, on some ranks only. All ranks "
            "must skip a step, or none"
        )


def _arrived(work: Any, seconds: float) -> bool:
    """Waits for gloo work for a while; whether it is done.

    Raises:
        RuntimeError: it failed.
    """
    started = time.monotonic()
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        if "timed out" in str(error).lower() and time.monotonic() - started > seconds / 2:
            return False
        raise
    return True
