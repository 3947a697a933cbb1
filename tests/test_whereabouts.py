"""A rank that waits for one that has left its training loop: told where that is, and not before it is sure."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxddp.whereabouts import Place, Whereabouts, place_of
from tests.live.lab import Mlp, average, compiled, error_of, expect, expect_equal, gradients, local, loss_of, seeded
from tests.live.pool import Pool


def early(rank: int, world: int, kind: str) -> str:
    """Rank 1 runs out of batches and goes on to what comes after the loop, where it waits for rank 0."""
    model, _ = compiled(seeded(0, Mlp))
    loss_of(model, 0).backward()
    waits: dict[str, Callable[[], Any]] = {
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(torch.zeros(1)),
        "all_gather_object": lambda: dist.all_gather_object([None] * world, rank),
    }
    message = ""
    if rank == 0:
        since = time.monotonic()
        message = str(error_of(lambda: loss_of(model, 1).backward()))
        expect(time.monotonic() - since < 30, "long before the group's timeout")
    waits[kind]()
    return message


@pytest.mark.parametrize("kind", ["barrier", "all_reduce", "all_gather_object"])
def test_a_rank_that_has_left_the_loop(pool: Pool, kind: str):
    message = pool.run(early, kind, discard=True)[0]
    assert "rank 0 was about to reduce at a compiled graph (first.weight" in message
    assert f"but rank 1 waits for it in torch.distributed.{kind} at test_whereabouts.py:" in message
    assert ": it ran another number of steps" in message


def leaving(rank: int, world: int) -> str:
    """Rank 1 destroys the group when it is through, and lives on."""
    group, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()
    model, _ = compiled(seeded(0, Mlp), process_group=group)
    loss_of(model, 0).backward()
    if rank == 1:
        dist.destroy_process_group(group)
        store.wait(["told"])
        return ""
    since = time.monotonic()
    message = str(error_of(lambda: loss_of(model, 1).backward()))
    store.set("told", "")
    expect(time.monotonic() - since < 30, "long before the group's timeout")
    return message


def test_a_rank_that_has_destroyed_the_group(pool: Pool):
    message = pool.run(leaving, discard=True)[0]
    assert "rank 0 was about to reduce at a compiled graph (first.weight" in message
    assert "but rank 1 has destroyed its process group, and is at test_whereabouts.py:" in message


def late(rank: int, world: int) -> None:
    """Ranks that are only late: asleep, in a collective without rank 0, or in one that rank 0 need not wait in."""
    others = dist.new_group([1, 2])
    module = seeded(0, Mlp)
    model, _ = compiled(module)
    loss_of(model, 0).backward()
    work: Any = None
    for i, waits in enumerate(("sleep", "others", "left")):
        if waits == "left":
            if rank == 2:
                time.sleep(4)
            received = torch.zeros(1)
            dist.scatter(received, [torch.zeros(1)] * world if rank == 2 else None, src=2) if rank else None
            if rank == 0:  # its part comes when rank 2 is there; it does not wait
                work = dist.scatter(received, None, src=2, async_op=True)
        elif rank == 1 and waits == "sleep":
            time.sleep(4)
        elif rank == 2 and waits == "others":
            time.sleep(4)
            dist.barrier(others)
        elif rank == 1 and waits == "others":
            dist.barrier(others)
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), waits, tol=1e-5)
        if waits == "left" and rank == 0:
            work.wait()


def test_ranks_that_are_late(pool3: Pool):
    pool3.run(late)


def test_what_a_stack_says():
    places: list[Place] = []
    entered, leave = threading.Event(), threading.Event()

    def waiting() -> None:
        entered.set()
        leave.wait(10)

    thread = threading.Thread(target=waiting)
    thread.start()
    entered.wait(10)
    assert thread.ident is not None
    places.append(place_of(sys._current_frames()[thread.ident]))
    leave.set()
    thread.join()
    assert places[0].line.startswith("threading.py:") or places[0].line.startswith("test_whereabouts.py:")
    assert not places[0].collective
    assert not places[0].inside
    stuck = Place("train.py:5 in main", collective="barrier", ranks=(0, 1))
    assert stuck.stuck_without(0)
    assert not stuck.stuck_without(2)
    assert not Place("train.py:5 in main", collective="broadcast", ranks=(0, 1)).stuck_without(0)
    assert not Place("train.py:5 in main", inside=True, collective="barrier", ranks=(0, 1)).stuck_without(0)


def test_questions_and_answers():
    """Of more ranks than are asked at once, all are asked in the end; strangers and the dead give no answer."""
    store = dist.HashStore()
    asked = [Whereabouts(rank, 100, "127.0.0.1", store, lambda: True) for rank in range(99)]
    places: dict[int, Place] = {}
    for _ in range(3):
        places |= asked[0].ask()
    assert places.keys() == set(range(1, 99))
    assert all(place.line.startswith("test_whereabouts.py:") for place in places.values())
    host, port, _ = store.get("place/5").decode().split()

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        stranger.sendto(b"guess", (host, int(port)))
        with pytest.raises(TimeoutError):
            stranger.recvfrom(100)
    asked[5].close()
    assert asked[0].ask([4, 5, 6]).keys() == {4, 6}
    for each in asked:
        each.close()
