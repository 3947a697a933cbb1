"""The worker pool itself: results, errors, hangs and recovery."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.live.pool import Pool, RankError, WorkerError


def total(rank: int, world: int, value: float, *, scale: float = 1.0) -> torch.Tensor:
    tensor = torch.full((4,), value * (rank + 1) * scale)
    dist.all_reduce(tensor)
    return tensor


def fail_on(rank: int, world: int, bad: int) -> int:
    if rank == bad:
        raise ValueError(f"rank {rank} was told to fail")
    return rank


def hang_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        sleep_for_long()


def sleep_for_long() -> None:
    time.sleep(1000)


def die_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)


def return_unpicklable(rank: int, world: int) -> object:
    return lambda: rank


def leave_a_stray_collective(rank: int, world: int) -> None:
    if rank == 0:
        leave_a_stray_collective.work = dist.all_reduce(torch.zeros(3, dtype=torch.float64), async_op=True)  # type: ignore[attr-defined]


def leave_no_group(rank: int, world: int) -> None:
    dist.destroy_process_group()


def never_joined_collective(rank: int, world: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.zeros(1))


def state(rank: int, world: int) -> dict[str, object]:
    return {
        "random": torch.rand(1).item(),
        "threads": torch.get_num_threads(),
        "env": {k: v for k, v in os.environ.items() if k.startswith(("OMP", "GLOO", "TORCHINDUCTOR"))},
    }


def compile_something(rank: int, world: int) -> float:
    return torch.compile(lambda x: (x * 2 + 1).sum(), backend="aot_eager")(torch.ones(3)).item()


def test_results_come_in_order_of_rank(pool: Pool) -> None:
    first, second = pool.run(total, 2.0, scale=3.0)
    assert torch.equal(first, torch.full((4,), 18.0))
    assert torch.equal(second, first)


def test_workers_are_kept_and_clean_between_jobs(pool: Pool) -> None:
    assert pool.run(compile_something) == [9.0, 9.0]
    pids = pool.pids
    first, second = pool.run(state), pool.run(state)
    assert first == second  # the same random numbers each time
    assert pool.pids == pids
    assert first[0]["threads"] == 1
    assert first[0]["env"]["OMP_NUM_THREADS"] == "1"
    assert first[0]["env"]["TORCHINDUCTOR_CACHE_DIR"] == first[1]["env"]["TORCHINDUCTOR_CACHE_DIR"]


def test_an_error_on_one_rank_names_it_and_the_pool_recovers(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 1: ValueError: rank 1 was told to fail.*in fail_on") as caught:
        pool.run(fail_on, 1)
    assert caught.value.errors[0] is None
    assert pool.run(fail_on, -1) == [0, 1]


def test_expected_errors_are_data(pool: Pool) -> None:
    none, error = pool.run(fail_on, 1, expect_error=True)
    assert none is None
    assert isinstance(error, RankError)
    assert (error.rank, error.type, error.message) == (1, "ValueError", "rank 1 was told to fail")
    with pytest.raises(WorkerError, match="an error was expected"):
        pool.run(fail_on, -1, expect_error=True)


def test_a_hang_ends_with_the_stacks_of_the_ranks_that_hang(pool: Pool) -> None:
    none, error = pool.run(hang_on_rank_1, timeout=2, expect_error=True)
    assert none is None
    assert error.type == "Hang"
    assert "sleep_for_long" in error.traceback
    assert pool.run(fail_on, -1) == [0, 1]


def test_a_worker_that_dies_is_reported(pool: Pool) -> None:
    none, error = pool.run(die_on_rank_1, expect_error=True)
    assert (none, error.type) == (None, "Died")
    assert "exit code 7" in error.message


def test_a_result_that_cannot_travel_is_an_error(pool: Pool) -> None:
    errors = pool.run(return_unpicklable, expect_error=True)
    assert all("pickle" in error.message.lower() for error in errors)


def test_a_group_left_unusable_is_blamed_on_its_job(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="leave_no_group returned on every rank, then the health check"):
        pool.run(leave_no_group)
    with pytest.raises(WorkerError, match="leave_a_stray_collective returned on every rank, then the health check"):
        pool.run(leave_a_stray_collective)
    assert pool.run(leave_no_group, discard=True) == [None, None]
    assert pool.run(fail_on, -1) == [0, 1]


def test_a_collective_that_a_rank_never_joins_becomes_an_error() -> None:
    with Pool(2, group_timeout=2) as short:
        error, none = short.run(never_joined_collective, expect_error=True)
    assert none is None
    assert error.type == "RuntimeError"
    assert "Timed out" in error.message


def test_a_job_must_be_importable(pool: Pool) -> None:
    with pytest.raises(TypeError, match="module-level function"):
        pool.run(lambda rank, world: None)


def test_three_ranks(pool3: Pool) -> None:
    assert [result[0].item() for result in pool3.run(total, 1.0)] == [6.0, 6.0, 6.0]


def test_workers_die_with_their_parent() -> None:
    # The parent is killed while one worker is idle and the other sits in a job.
    program = (
        "import threading, time; from tests import test_pool; from tests.live.pool import Pool; pool = Pool(2);"
        "pool.run(test_pool.fail_on, -1);"
        "threading.Thread(target=pool.run, args=(test_pool.hang_on_rank_1,), daemon=True).start();"
        "print(*pool.pids, flush=True); time.sleep(1000)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.5)
        parent.kill()
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if _is_running(pid)]:
        assert time.monotonic() < deadline, f"workers {alive} outlived their parent"
        time.sleep(0.1)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # an orphan may stay behind as a zombie where nothing reaps it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
