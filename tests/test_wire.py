"""Small messages between ranks, which are threads here: any number of them, any size of blocks, ends and strangers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fxddp.wire import PeerGone, Wire

TIMEOUT = timedelta(seconds=30)


def on_ranks(size: int, job: Callable[[Wire], Any]) -> list[Any]:
    """Runs a job on the connected wires of so many ranks."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        wire = Wire(rank, size, store, TIMEOUT)
        try:
            return job(wire)
        finally:
            wire.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def gathered(wire: Wire, block: bytes) -> list[bytes]:
    wire.start(block)
    return gathered_rest(wire)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9])
def test_everybody_gets_everything(size: int):
    """In many all-gathers one after the other, with ranks that come late in turns."""

    def job(wire: Wire) -> None:
        for i in range(20):
            if i % size == wire.rank:
                time.sleep(0.01)
            expected = [f"{rank} in {i}".encode() * (rank + 1) for rank in range(size)]
            assert gathered(wire, expected[wire.rank]) == expected

    on_ranks(size, job)


@pytest.mark.parametrize("size", [2, 5])
def test_large_blocks(size: int):
    """More than the system buffers; whoever is finished has nothing left to send."""

    def job(wire: Wire) -> None:
        expected = [bytes([rank]) * (8 << 20) for rank in range(size)]
        assert gathered(wire, expected[wire.rank]) == expected
        assert all(not peer.outgoing for peer in wire._peers.values())

    on_ranks(size, job)


def test_nobody_waits_longer_than_it_wants():
    def job(wire: Wire) -> None:
        if wire.rank == 1:
            time.sleep(0.5)
        wire.start(b"x")
        if wire.rank == 0:
            assert wire.finish(0.1) is None
            assert not wire.finished
        while wire.finish(1.0) is None:
            pass

    on_ranks(2, job)


def test_an_end_is_noticed_after_what_was_sent_before_it():
    def job(wire: Wire) -> None:
        if wire.rank == 1:
            assert gathered(wire, b"last words")[0] == b"x"
            return
        wire.start(b"x")
        time.sleep(0.3)  # the other one is gone by now
        assert wire.finish(5.0) == [b"x", b"last words"]
        wire.start(b"y")
        with pytest.raises(PeerGone, match="rank 1"):
            wire.finish(5.0)

    on_ranks(2, job)


def test_strangers_are_sent_away():
    """Whoever finds the port before the ranks do, and says nothing or something else."""
    store = dist.HashStore()

    def run(rank: int) -> list[bytes]:
        if rank == 0:  # connects to rank 1; strangers come first
            store.wait(["address/1"], TIMEOUT)
            host, port, _ = store.get("address/1").decode().split()
            for words in (b"", b"GET / HTTP/1.1\r\n\r\n and more than enough"):
                with socket.create_connection((host, int(port)), 5) as stranger:
                    stranger.sendall(words)
        wire = Wire(rank, 2, store, TIMEOUT)
        try:
            return gathered(wire, str(rank).encode())
        finally:
            wire.close()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[b"0", b"1"]] * 2


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9])
def test_rank_0_casts_and_waits_for_nobody(size: int):
    """Each cast comes with an all-gather that nobody finishes before the next cast, as before a forward."""
    ahead = threading.Event()

    def job(wire: Wire) -> None:
        if wire.rank == 0:
            wire.cast(b"0 hello", 1.0)
            wire.start(b"0 ")
            ahead.set()
        else:
            assert ahead.wait(10)  # sent before anybody else came
            wire.start(b"0 ")
            assert received(wire, b"0 ") == b"hello"
        for i in range(1, 20):
            while wire.finish(1.0) is None:
                pass
            prefix = f"{i} ".encode()
            if wire.rank == 0:
                wire.cast(prefix + bytes(i), 1.0)
            wire.start(prefix)
            if wire.rank != 0:
                assert received(wire, prefix) == bytes(i)
        assert gathered_rest(wire) == [b"19 "] * size

    on_ranks(size, job)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_casts_that_nobody_wanted_are_dropped(size: int):
    """And where rank 0 casts nothing, the all-gather ends the wait."""

    def job(wire: Wire) -> None:
        for i in range(6):
            prefix = f"{i} ".encode()
            if wire.rank == 0 and i % 3 != 2:
                wire.cast(prefix + b"large" * 100_000, 1.0)
            wire.start(prefix if wire.rank or i % 3 != 2 else b"another step")
            if wire.rank != 0 and i % 3 == 1:
                assert received(wire, prefix) == b"large" * 100_000
            if wire.rank != 0 and i % 3 == 2:
                assert received(wire, prefix) is None
                assert wire.blocks[0] == b"another step"
            gathered_rest(wire)

    on_ranks(size, job)


def received(wire: Wire, prefix: bytes) -> bytes | None:
    for _ in range(20):
        value = wire.receive(prefix, 1.0)
        if value is not None or (wire.finished and wire.blocks[0] != prefix):
            return value
    raise AssertionError("nothing came")


def gathered_rest(wire: Wire) -> list[bytes]:
    blocks = None
    while blocks is None:
        blocks = wire.finish(1.0)
    return blocks
