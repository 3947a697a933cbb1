"""Where the other ranks are, while this one waits for them: asked over UDP, answered by a thread that sleeps till then.

Records say what a rank is about to do in fxddp. A rank that left its training loop early does nothing in fxddp any
more: it may sit in a collective of the user's, which waits for the ranks that wait for it. Its training thread cannot
tell; the one here reads that thread's stack.
"""

import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

PACKET = 4096
PATIENCE = 0.5
"""Seconds in which answers are collected."""

MANY = 64
"""Ranks that are asked at once; of larger groups, others each time."""

SYMMETRIC = frozenset({
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "reduce_scatter",
    "reduce_scatter_tensor",
})  # fmt: skip
"""Collectives that no rank leaves before all have come."""

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(dist.__file__).parent / "distributed_c10d.py")
_JOIN = str(Path(dist.__file__).parent / "algorithms" / "join.py")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's training thread is.

    Attributes:
        line: the innermost line of the user's, as "train.py:57 in main".
        inside: it is in fxddp.
        collective: the function of torch.distributed that it is in, or "".
        ranks: the (global) ranks that take part in that.
        left_join: it asks, at the end of torch's `Join`, which ranks have inputs left.
        destroyed: it has destroyed its process group.
    """

    line: str = ""
    inside: bool = False
    collective: str = ""
    ranks: tuple[int, ...] = ()
    left_join: bool = False
    destroyed: bool = False

    def stuck_without(self, rank: int) -> bool:
        """Whether it waits in a collective of the user's for a (global) rank that is in fxddp."""
        return not self.inside and self.collective in SYMMETRIC and rank in self.ranks

    def __str__(self) -> str:
        return f"in torch.distributed.{self.collective} at {self.line}" if self.collective else f"at {self.line}"


class Whereabouts:
    """Answers the other ranks of a group, and asks them.

    Args:
        rank: of the group; the thread that makes this is the one that trains.
        size: of the group.
        host: this machine's address on the way to the others.
        store: shared by the group, with keys that nobody else uses.
        exists: whether the process group is still there.
    """

    def __init__(self, rank: int, size: int, host: str, store: dist.Store, exists: Callable[[], bool]) -> None:
        self._rank, self._size, self._store, self._exists = rank, size, store, exists
        self._secret = secrets.token_hex(8).encode()
        self._thread = threading.get_ident()
        self._next = 0
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        address = self._socket.getsockname()
        store.set(f"place/{rank}", f"{address[0]} {address[1]} {self._secret.decode()}")
        threading.Thread(target=self._answer, name="fxddp whereabouts", daemon=True).start()

    def ask(self, others: Iterable[int] | None = None) -> dict[int, Place]:
        """Asks ranks, by default all others, where they are; those that answer in time."""
        wanted = [rank for rank in (range(self._size) if others is None else others) if rank != self._rank]
        if len(wanted) > MANY:
            wanted = (wanted + wanted)[self._next % len(wanted) :][:MANY]
            self._next += MANY
        found: dict[int, Place] = {}
        with socket.socket(self._socket.family, socket.SOCK_DGRAM) as asking:
            waiting = {}
            for rank in wanted:
                if self._store.check([f"place/{rank}"]):
                    host, port, secret = self._store.get(f"place/{rank}").decode().split()
                    asking.sendto(secret.encode(), (host, int(port)))
                    waiting[host, int(port)] = rank
            deadline = time.monotonic() + PATIENCE
            while waiting and (left := deadline - time.monotonic()) > 0:
                asking.settimeout(left)
                try:
                    data, address = asking.recvfrom(PACKET)
                except TimeoutError:
                    break
                rank = waiting.pop(address[:2], -1)
                if rank >= 0:
                    place = json.loads(data)
                    found[rank] = Place(**{**place, "ranks": tuple(place["ranks"])})
        return found

    def close(self) -> None:
        """Answers no more."""
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                data, address = self._socket.recvfrom(PACKET)
                if data == self._secret:
                    self._socket.sendto(json.dumps(asdict(self._look())).encode()[:PACKET], address)
            except OSError:
                return  # closed

    def _look(self) -> Place:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 (documented, for debuggers)
        place = Place() if frame is None else place_of(frame)
        return place if self._exists() else replace(place, destroyed=True)


def place_of(frame: FrameType) -> Place:
    """What a thread's innermost frame says."""
    line, collective, inside, left_join = "", "", False, False
    ranks: tuple[int, ...] = ()
    current: FrameType | None = frame
    while current is not None:
        file = current.f_code.co_filename
        if file.startswith(_HERE):
            inside = True
        elif file == _COLLECTIVES:
            collective, ranks = current.f_code.co_name, _ranks(current.f_locals.get("group"))
        elif file == _JOIN:
            left_join = left_join or current.f_code.co_name == "__exit__"
        elif not line and not file.startswith((_TORCH, "<")):
            line = f"{Path(file).name}:{current.f_lineno} in {current.f_code.co_name}"
        current = current.f_back
    return Place(line, inside, collective, ranks, left_join)


def _ranks(group: Any) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):
        return ()
