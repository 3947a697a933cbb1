"""Small messages between the ranks of a group, sent by the thread that trains and without another one's help.

A collective of a process group runs on threads that must get a core first; where all cores train, that takes
milliseconds. Here a record leaves in the system call that sends it and has arrived by the time it is asked for.

All-gather in ⌈log₂ n⌉ rounds over that many connections per rank (Bruck et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems", 1997): in round k a rank sends the first 2ᵏ blocks it has to the
rank 2ᵏ before it, and gets as many from the rank 2ᵏ after it. The first round leaves at once, the others while waiting.

Over the same connections rank 0 casts bytes to all others, along a binomial tree, and waits for none of them.
"""

import selectors
import socket
import struct
import time
from collections import deque
from datetime import timedelta

import torch.distributed as dist

from .connecting import connect

_LENGTH = struct.Struct("!I")
_HEAD = struct.Struct("!IB")

BLOCKS, CAST = 0, 1
"""Kinds of messages on a connection."""


class PeerGone(ConnectionError):
    """A rank closed its connection: its process ended."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"lost the connection to rank {rank} ({cause})")
        self.rank = rank


class _Peer:
    """The connection to one rank, and what is on its way in each direction."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.outgoing = bytearray()
        self.incoming = bytearray()
        self._space = memoryview(bytearray(1 << 16))
        self.messages: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self.gone = ""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: int, message: bytes) -> None:
        self.outgoing += _HEAD.pack(len(message), kind) + message
        self.flush()

    def flush(self) -> None:
        """Sends what the system takes now."""
        try:
            while self.outgoing:
                del self.outgoing[: self.connection.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError as error:
            self.outgoing.clear()
            self.gone = str(error)

    def fill(self) -> None:
        """Takes what has arrived, in one system call; there may be more."""
        try:
            count = self.connection.recv_into(self._space)
        except BlockingIOError:
            return
        except OSError as error:
            self.gone = str(error)
            return
        if not count:
            self.gone = "it closed the connection"
        self.incoming += self._space[:count]
        while len(self.incoming) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self.incoming)
            if len(self.incoming) < _HEAD.size + length:
                break
            self.messages[kind].append(bytes(self.incoming[_HEAD.size : _HEAD.size + length]))
            del self.incoming[: _HEAD.size + length]

    def message(self, kind: int) -> bytes | None:
        """The next message of a kind, if there is one.

        Raises:
            PeerGone: there is none, and none will come.
        """
        if self.messages[kind]:
            return self.messages[kind].popleft()
        if self.gone:
            raise PeerGone(self.rank, self.gone)
        return None


class Wire:
    """The connections of one rank. Made by all ranks together; one all-gather at a time.

    Args:
        rank, size: of the group.
        store: shared by the group, with keys that nobody else uses.
        timeout: how long the ranks may take to come here.

    Raises:
        RuntimeError: a rank could not be reached.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._hops = [1 << k for k in range((size - 1).bit_length())]
        self._blocks: list[bytes] = []
        self._round = len(self._hops)
        self._selector = selectors.DefaultSelector()
        distances = {*self._hops, *(size - hop for hop in self._hops)}
        connections = connect(rank, {(rank + distance) % size for distance in distances} - {rank}, store, timeout)
        self._peers = {other: _Peer(other, connection) for other, connection in connections.items()}
        for peer in self._peers.values():
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def start(self, block: bytes) -> None:
        """Starts an all-gather with this rank's block of bytes.

        Raises:
            PeerGone: a rank's process ended.
        """
        assert self.finished, "the last all-gather is not over"
        self._blocks, self._round = [block], 0
        self._send()

    @property
    def finished(self) -> bool:
        """Whether no all-gather is under way."""
        return self._round == len(self._hops)

    def finish(self, patience: float) -> list[bytes] | None:
        """Everybody's blocks, by rank; None if they are not there after `patience` seconds. May be called again.

        Raises:
            PeerGone: a rank's process ended.
        """
        deadline = time.monotonic() + patience
        while not self.finished:
            if not self._advance() and not self._wait(deadline):
                return None
        return self.blocks if self._sent(deadline) else None

    @property
    def blocks(self) -> list[bytes]:
        """What the last all-gather gave, by rank."""
        return [self._blocks[(rank - self.rank) % self.size] for rank in range(self.size)]

    def cast(self, message: bytes, patience: float) -> None:
        """Sends rank 0's bytes to all others, who take them with `receive`, now or later.

        Args:
            message: the bytes.
            patience: seconds for the system to take them, if the connections are slow; what it has not taken then
                leaves at the next call of any kind.
        """
        self._pass_on(message)
        self._sent(time.monotonic() + patience)

    def receive(self, prefix: bytes, patience: float) -> bytes | None:
        """Rank 0's cast that begins with `prefix`, and passes it on; others that come before it are dropped.

        Returns:
            The bytes after the prefix; None if it is not there after `patience` seconds, or as soon as the all-gather
            that is under way has finished. May be called again.

        Raises:
            PeerGone: a rank's process ended.
        """
        deadline = time.monotonic() + patience
        place = -self.rank % self.size
        parent = self._peers[(self.rank + (1 << (place.bit_length() - 1))) % self.size]
        under_way = not self.finished
        while True:
            try:
                while message := parent.message(CAST):
                    if message.startswith(prefix):
                        self._pass_on(message)
                        self._sent(deadline)
                        return message[len(prefix) :]
            except PeerGone:
                if not under_way:
                    raise
            if under_way and self.finished:
                return None
            if not (under_way and self._advance()) and not self._wait(deadline):
                return None

    def close(self) -> None:
        """Closes the connections."""
        for peer in self._peers.values():
            peer.connection.close()
        self._selector.close()

    def _send(self) -> None:
        hop = self._hops[self._round]
        blocks = b"".join(_LENGTH.pack(len(b)) + b for b in self._blocks[: min(hop, self.size - hop)])
        self._peers[(self.rank - hop) % self.size].send(BLOCKS, blocks)

    def _advance(self) -> bool:
        """Finishes a round of the all-gather if its blocks are there; whether they were."""
        peer = self._peers[(self.rank + self._hops[self._round]) % self.size]
        message = peer.message(BLOCKS)
        if message is None:
            peer.fill()  # first, as they mostly are there: cheaper than to ask the system whether
            message = peer.message(BLOCKS)
            if message is None:
                return False
        self._blocks += _unpack(message)
        self._round += 1
        if not self.finished:
            self._send()
        return True

    def _pass_on(self, message: bytes) -> None:
        """Sends a cast to this rank's children in the tree: rank 0's are 1, 2, 4, … before it."""
        place = -self.rank % self.size
        for hop in self._hops:
            if hop > place and place + hop < self.size:
                self._peers[(self.rank - hop) % self.size].send(CAST, message)

    def _sent(self, deadline: float) -> bool:
        """Waits until everything has left: whoever waits for it must not wait for us; False if it has not in time."""
        while any(peer.outgoing for peer in self._peers.values()):
            if not self._wait(deadline):
                return False
        return True

    def _wait(self, deadline: float) -> bool:
        """Waits for something to arrive, or to leave; False if nothing did."""
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return False
        for peer in self._peers.values():
            if peer.gone:
                if peer.connection in self._selector.get_map():
                    self._selector.unregister(peer.connection)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
            if self._selector.get_key(peer.connection).events != events:
                self._selector.modify(peer.connection, events, peer)
        ready = self._selector.select(seconds)
        for key, events in ready:
            if events & selectors.EVENT_WRITE:
                key.data.flush()
            if events & selectors.EVENT_READ:
                key.data.fill()
        return bool(ready)


def _unpack(message: bytes) -> list[bytes]:
    blocks, at = [], 0
    while at < len(message):
        end = at + _LENGTH.size + _LENGTH.unpack_from(message, at)[0]
        blocks.append(message[at + _LENGTH.size : end])
        at = end
    return blocks
