"""The network between two nodes: two network namespaces whose rate can change under running processes, or loopback.

    rank 0 in namespace fxb0 ── fxbv0 ═══ veth pair ═══ fxbv1 ── namespace fxb1 with rank 1
                                 └─ tc tbf on each end (token bucket: RATE, both directions) ─┘

Namespaces need root and iproute2. `open_network` falls back to loopback, and says why, where they cannot be had.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Protocol

UNSHAPED = "none"
# A full bucket passes at once, whatever the rate. Small against the models' bytes, large enough for 2 Gbit/s.
BURST_BYTES = 256 * 1024
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9}


class NetworkUnavailable(Exception):
    """Namespaces cannot be set up here; the message says what is missing."""


def bits_per_second(rate: str) -> float | None:
    """The rate as a number, None for unshaped; ValueError for what is no rate."""
    if rate == UNSHAPED:
        return None
    match = _RATE.fullmatch(rate)
    if match is None:
        raise ValueError(f"rate must be '{UNSHAPED}' or a number with kbit, mbit or gbit (such as 1gbit), got {rate!r}")
    return float(match[1]) * _FACTORS[match[2]]


class Network(Protocol):
    """What the driver needs of a network: where the ranks of each of two nodes run, and the rate between these."""

    kind: str

    def command_prefix(self, node: int) -> list[str]: ...

    def interface(self, node: int) -> str: ...

    def set_rate(self, rate: str) -> None: ...

    def close(self) -> None: ...


class Loopback:
    """All ranks on this host's loopback interface; it has no rate to set."""

    kind = "loopback"

    def command_prefix(self, node: int) -> list[str]:
        return []

    def interface(self, node: int) -> str:
        return "lo"

    def set_rate(self, rate: str) -> None:
        if rate != UNSHAPED:
            raise NetworkUnavailable(f"loopback cannot be shaped, asked for {rate}")

    def close(self) -> None:
        pass


class NamespacePair:
    """Two namespaces of this benchmark's own, joined by a veth pair; `close` removes them with everything inside."""

    kind = "namespaces"
    _namespaces = ("fxb0", "fxb1")
    _interfaces = ("fxbv0", "fxbv1")

    def __init__(self) -> None:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise NetworkUnavailable(f"{' and '.join(missing)} not found; install iproute2")
        if os.geteuid() != 0:
            raise NetworkUnavailable("network namespaces need root")
        self._lock = self._take_lock()
        self._shaped = False
        try:
            self._remove()  # what a killed run left behind: the lock says that no live run owns it
            self._create()
        except BaseException:
            self.close()
            raise

    def command_prefix(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", self._namespaces[node]]

    def interface(self, node: int) -> str:
        return self._interfaces[node]

    def set_rate(self, rate: str) -> None:
        """Changes the rate in both directions at once; connections stay up."""
        bits_per_second(rate)
        for namespace, interface in zip(self._namespaces, self._interfaces, strict=True):
            tc = ["tc", "-n", namespace, "qdisc"]
            if rate != UNSHAPED:
                shape = ["root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "100ms"]
                _call(*tc, "replace", "dev", interface, *shape)
            elif self._shaped:
                _call(*tc, "del", "dev", interface, "root")
        self._shaped = rate != UNSHAPED

    def close(self) -> None:
        self._remove()
        self._lock.close()

    @staticmethod
    def _take_lock() -> IO[str]:
        path = Path(tempfile.gettempdir()) / "fxb-network.lock"
        lock = path.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise SystemExit(
                f"another benchmark run holds {path}: two at once would measure each other; wait for it to end"
            ) from None
        return lock

    def _create(self) -> None:
        left, right = self._namespaces
        for namespace in self._namespaces:
            _call("ip", "netns", "add", namespace)
        _call(
            *("ip", "link", "add", self._interfaces[0], "netns", left, "type", "veth"),
            *("peer", "name", self._interfaces[1], "netns", right),
        )
        for rank, (namespace, interface) in enumerate(zip(self._namespaces, self._interfaces, strict=True)):
            _call("ip", "-n", namespace, "addr", "add", f"10.99.0.{rank + 1}/24", "dev", interface)
            _call("ip", "-n", namespace, "link", "set", interface, "up")
            _call("ip", "-n", namespace, "link", "set", "lo", "up")
        self.set_rate("1gbit")  # finds out now, not after an hour, whether this kernel has tbf
        self.set_rate(UNSHAPED)

    def _remove(self) -> None:
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def open_network(*, namespaces: bool) -> tuple[Network, str | None]:
    """The pair of namespaces, or loopback together with the reason."""
    if not namespaces:
        return Loopback(), "asked not to use namespaces"
    try:
        return NamespacePair(), None
    except NetworkUnavailable as error:
        return Loopback(), str(error)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
