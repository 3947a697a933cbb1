"""Small messages between the ranks of a group, sent by the thread that trains and without another one's help.

A collective of a process group runs on threads that must get a core first; where all cores train, that takes
milliseconds. Here a record leaves in the system call that sends it and has arrived by the time it is asked for.

All-gather in ⌈log₂ n⌉ rounds over that many connections per rank (Bruck et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems", 1997): in round k a rank sends the first 2ᵏ blocks it has to the
rank 2ᵏ before it, and gets as many from the rank 2ᵏ after it. The first round leaves at once, the others while waiting.

Over the same connections rank 0 casts bytes to all others, along a binomial tree, and waits for none of them.
"""

import fcntl
import os
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import _compat

_LENGTH = struct.Struct("!I")
_HEAD = struct.Struct("!IB")

BLOCKS, CAST = 0, 1
"""Kinds of messages on a connection."""

GREETING = 5.0
"""Seconds that whoever connected has to say which rank it is."""


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
        """Takes what has arrived."""
        try:
            while part := self.connection.recv(1 << 16):
                self.incoming += part
        except BlockingIOError:
            pass
        except OSError as error:
            self.gone = str(error)
        else:
            self.gone = "it closed the connection"
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
        self._peers: dict[int, _Peer] = {}
        self._blocks: list[bytes] = []
        self._round = len(self._hops)
        self._selector = selectors.DefaultSelector()
        self._connect(store, timeout)

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
        message = self._peers[(self.rank + self._hops[self._round]) % self.size].message(BLOCKS)
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
        """Waits for something to arrive, or to leave; False if nothing did. Past the deadline it only looks."""
        seconds = max(0.0, deadline - time.monotonic())
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

    def _connect(self, store: dist.Store, timeout: timedelta) -> None:
        distances = set(self._hops) | {self.size - hop for hop in self._hops}
        peers = {(self.rank + distance) % self.size for distance in distances} - {self.rank}
        host = own_address(store)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        secret = secrets.token_hex(8)  # a stranger may find the port
        with socket.create_server((host, 0), family=family, backlog=len(peers) + 1) as server:
            server.settimeout(timeout.total_seconds())
            address = server.getsockname()
            store.set(f"address/{self.rank}", f"{address[0]} {address[1]} {secret}")
            for peer in sorted(peers):
                if peer > self.rank:
                    self._peers[peer] = _Peer(peer, self._reach(peer, store, timeout))
            while len(self._peers) < len(peers):
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(peers - self._peers.keys())
                    raise RuntimeError(
                        f"ranks {missing} did not connect to rank {self.rank} at {address[0]}:{address[1]} within "
                        f"{timeout.total_seconds():g} s: {_ADVICE}"
                    ) from None
                rank = _greeting(connection, secret)
                if rank in peers:
                    self._peers[rank] = _Peer(rank, connection)
                else:
                    connection.close()
        for other in self._peers.values():
            self._selector.register(other.connection, selectors.EVENT_READ, other)

    def _reach(self, peer: int, store: dist.Store, timeout: timedelta) -> socket.socket:
        store.wait([f"address/{peer}"], timeout)
        host, port, secret = store.get(f"address/{peer}").decode().split()
        try:
            connection = socket.create_connection((host, int(port)), timeout.total_seconds())
        except OSError as error:
            raise RuntimeError(
                f"rank {self.rank} cannot reach rank {peer} at {host}:{port} ({error}): {_ADVICE}"
            ) from error
        connection.sendall(secret.encode() + _LENGTH.pack(self.rank))
        return connection


_ADVICE = (
    "fxddp talks over TCP on the interface that leads to the group's store, or on the one that GLOO_SOCKET_IFNAME "
    "names; set it to one on which the ranks reach each other"
)


def _unpack(message: bytes) -> list[bytes]:
    blocks, at = [], 0
    while at < len(message):
        end = at + _LENGTH.size + _LENGTH.unpack_from(message, at)[0]
        blocks.append(message[at + _LENGTH.size : end])
        at = end
    return blocks


def _greeting(connection: socket.socket, secret: str) -> int:
    """The rank that connected; -1 for a stranger."""
    received = b""
    connection.settimeout(GREETING)
    try:
        while len(received) < len(secret) + _LENGTH.size:
            part = connection.recv(len(secret) + _LENGTH.size - len(received))
            if not part:
                return -1
            received += part
    except OSError:
        return -1
    known, rank = received[: len(secret)], received[len(secret) :]
    return int(_LENGTH.unpack(rank)[0]) if known == secret.encode() else -1


def own_address(store: dist.Store) -> str:
    """The address at which the other ranks reach this one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface[:15].encode())
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    host = _compat.store_host(store) or socket.gethostname()
    with suppress(OSError):
        found = _facing(host)
        if not found.startswith("127.") or host == "localhost" or host.startswith("127."):
            return found
    with suppress(OSError):  # a host name that leads to loopback, as Debian's do; others reach us by the default route
        return _facing("192.0.2.1")
    return "127.0.0.1"


def _facing(host: str) -> str:
    """This machine's address on the way to another."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        found: Any = probe.getsockname()
        return str(found[0])
