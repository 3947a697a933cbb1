"""Connections between the ranks of a group: addresses go through its store, and whoever connects says who it is."""

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import _compat

_LENGTH = struct.Struct("!I")

GREETING = 5.0
"""Seconds that whoever connected has to say which rank it is."""

_ADVICE = (
    "fxddp talks over TCP on the interface that leads to the group's store, or on the one that GLOO_SOCKET_IFNAME "
    "names; set it to one on which the ranks reach each other"
)


def connect(rank: int, peers: AbstractSet[int], store: dist.Store, timeout: timedelta) -> dict[int, socket.socket]:
    """Connects a rank with others, which do the same.

    Args:
        rank: this one.
        peers: the ranks to connect with; it is among theirs.
        store: shared by them, with keys that nobody else uses.
        timeout: how long they may take to come here.

    Returns:
        The connection to each.

    Raises:
        RuntimeError: a rank could not be reached.
    """
    host = own_address(store)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    secret = secrets.token_hex(8)  # a stranger may find the port
    connections: dict[int, socket.socket] = {}
    with socket.create_server((host, 0), family=family, backlog=len(peers) + 1) as server:
        server.settimeout(timeout.total_seconds())
        address = server.getsockname()
        store.set(f"address/{rank}", f"{address[0]} {address[1]} {secret}")
        for peer in sorted(peers):
            if peer > rank:
                connections[peer] = _reach(rank, peer, store, timeout)
        while len(connections) < len(peers):
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(peers - connections.keys())
                raise RuntimeError(
                    f"ranks {missing} did not connect to rank {rank} at {address[0]}:{address[1]} within "
                    f"{timeout.total_seconds():g} s: {_ADVICE}"
                ) from None
            other = _greeting(connection, secret)
            if other in peers:
                connections[other] = connection
            else:
                connection.close()
    return connections


def _reach(rank: int, peer: int, store: dist.Store, timeout: timedelta) -> socket.socket:
    store.wait([f"address/{peer}"], timeout)
    host, port, secret = store.get(f"address/{peer}").decode().split()
    try:
        connection = socket.create_connection((host, int(port)), timeout.total_seconds())
    except OSError as error:
        raise RuntimeError(f"rank {rank} cannot reach rank {peer} at {host}:{port} ({error}): {_ADVICE}") from error
    connection.sendall(secret.encode() + _LENGTH.pack(rank))
    return connection


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
