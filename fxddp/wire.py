"""Small messages between the ranks of a group, sent by the thread that trains and without another one's help.

A collective of a process group runs on threads that must get a core first; where all cores train, that takes
milliseconds. Here a record leaves in the system call that sends it and has arrived by the time it is asked for.

All-gather in ⌈log₂ n⌉ rounds over that many connections per rank (Bruck et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems", 1997): in round k a rank sends the first 2ᵏ blocks it has to the
rank 2ᵏ before it, and gets as many from the rank 2ᵏ after it. The first round leaves at once, the others while waiting.
"""

import fcntl
import os
import secrets
import selectors
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import _compat

_LENGTH = struct.Struct("!I")

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
        self.gone = ""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: bytes) -> None:
        self.outgoing += _LENGTH.pack(len(message)) + message
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
            return
        except OSError as error:
            self.gone = str(error)
        else:
            self.gone = "it closed the connection"

    def message(self) -> bytes | None:
        """The next whole message, if there is one.

        Raises:
            PeerGone: there is none, and none will come.
        """
        whole = len(self.incoming) >= _LENGTH.size
        end = _LENGTH.size + _LENGTH.unpack_from(self.incoming)[0] if whole else 0
        if not whole or len(self.incoming) < end:
            if self.gone:
                raise PeerGone(self.rank, self.gone)
            return None
        message = bytes(self.incoming[_LENGTH.size : end])
        del self.incoming[:end]
        return message


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
            peer = self._peers[(self.rank + self._hops[self._round]) % self.size]
            message = peer.message()
            if message is None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._wait(left):
                    return None
                continue
            self._blocks += _unpack(message)
            self._round += 1
            if not self.finished:
                self._send()
        while any(peer.outgoing for peer in self._peers.values()):  # whoever waits for it must not wait for us
            left = deadline - time.monotonic()
            if left <= 0 or not self._wait(left):
                return None
        return [self._blocks[(rank - self.rank) % self.size] for rank in range(self.size)]

    def close(self) -> None:
        """Closes the connections."""
        for peer in self._peers.values():
            peer.connection.close()
        self._selector.close()

    def _send(self) -> None:
        hop = self._hops[self._round]
        blocks = self._blocks[: min(hop, self.size - hop)]
        self._peers[(self.rank - hop) % self.size].send(b"".join(_LENGTH.pack(len(b)) + b for b in blocks))

    def _wait(self, seconds: float) -> bool:
        """Waits for something to arrive, or to leave; False if nothing did."""
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
        host = _own_address(store)
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


def _own_address(store: dist.Store) -> str:
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
