"""Live worker processes that stay up between tests.

    pool.run(job, 3, timeout=60)     # -> [job(rank, world, 3) for each rank], each run in its own process

A job is a module-level function: workers import it by name. The workers and their process group serve one job after
another. After a job that raised, hung or left the group unusable they are thrown away, and the next job starts fresh
ones: no test can spoil the next one. Fresh ones are forked from a server that has imported torch once, so they cost
a fraction of a second.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import queue
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

START_TIMEOUT = 120.0  # seconds for a worker to import torch and join its group
GROUP_TIMEOUT = 60.0  # seconds until a collective that a rank never joined becomes an error; compiling takes a while
GRACE = 15.0  # seconds the other ranks get to finish once one has raised
HEALTH_TIMEOUT = 5.0  # seconds for an all-reduce after a job
HEALTH_CHECK = "health check"

# The server imports these before it forks. None of them starts a thread, which a fork would lose.
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx"])


@dataclass(frozen=True)
class RankError:
    """What one rank raised, as data. `type` is "Hang" for a rank that did not return, "Died" for one that is gone."""

    rank: int
    type: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"---- rank {self.rank}: {self.type}: {self.message}\n{self.traceback}"


class WorkerError(Exception):
    """A job failed on at least one rank; `errors` holds what each rank raised, None where it returned."""

    def __init__(self, job: str, errors: list[RankError | None], note: str = "") -> None:
        self.errors = errors
        failed = [error for error in errors if error is not None]
        ranks = ", ".join(str(error.rank) for error in failed)
        text = f"{job} failed on rank {ranks} of {len(errors)}\n" if failed else f"{job}: {note}\n"
        super().__init__(text + "\n".join(map(str, failed)))


class Pool:
    """`world` processes joined in one gloo group, started by the first `run` and again after a job that failed."""

    def __init__(self, world: int = 2, *, group_timeout: float = GROUP_TIMEOUT) -> None:
        self.world = world
        self.group_timeout = group_timeout
        self._folder = tempfile.TemporaryDirectory(prefix="fxddp-pool-")
        self._env = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # Compiled pieces are shared by ranks and jobs, as on a user's machine.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(self._path("inductor")),
        }
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """The process of each rank; empty while no worker is up."""
        return [worker.pid for worker in self._workers]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        expect_error: bool = False,
        discard: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(rank, world, *args, **kwargs)` on every rank and return the results in order of rank.

        `expect_error` returns what each rank raised (`RankError`, None where it returned) and fails if none did.
        `discard` is for jobs that do not leave the workers as they found them: fresh ones serve the next job.
        """
        name = _name_of(fn)
        if not self._workers:
            self._start()
        replies = self._ask((name, args, kwargs), timeout)
        errors = [reply if isinstance(reply, RankError) else None for reply in replies]
        failed = any(errors)
        if failed or discard:
            self.close()
        else:
            self._check_group(name)
        if expect_error:
            if not failed:
                raise WorkerError(name, errors, "an error was expected, every rank returned")
            return list(errors)
        if failed:
            raise WorkerError(name, errors)
        return [pickle.loads(reply) for reply in replies]

    def close(self) -> None:
        """End the workers; a later `run` starts new ones."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._store = None

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _start(self) -> None:
        # The store lives here and picks its own port: no race for a free one, and it outlives any worker.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        for rank in range(self.world):
            log, stacks = self._path(f"rank{rank}.log"), self._path(f"rank{rank}.stacks")
            stacks.unlink(missing_ok=True)
            settings = _Settings(rank, self.world, store.port, self.group_timeout, self._env, log, stacks)
            self._workers.append(_Worker(settings))
        replies = self._collect(START_TIMEOUT)
        errors = [reply if isinstance(reply, RankError) else None for reply in replies]
        if any(errors):
            self.close()
            raise WorkerError("starting the workers", errors)

    def _check_group(self, job: str) -> None:
        """A collective that only one rank launched would meet the next job's: find it while its job is known."""
        errors = [reply if isinstance(reply, RankError) else None for reply in self._ask(HEALTH_CHECK, HEALTH_TIMEOUT)]
        if any(errors):
            self.close()
            raise WorkerError(f"{job} returned on every rank, then the health check of the process group", errors)

    def _ask(self, request: object, timeout: float) -> list[Any]:
        message = pickle.dumps(request)
        for worker in self._workers:
            with contextlib.suppress(OSError):  # a dead worker: reported by _collect
                worker.connection.send_bytes(message)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        """One reply per rank: the pickled result, or a RankError."""
        deadline = time.monotonic() + timeout
        waiting = {worker.connection: worker for worker in self._workers}
        replies: list[Any] = [None] * self.world
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = list(waiting.values())
                for worker, stacks in zip(hung, _stacks(hung), strict=True):
                    message = f"no result after {timeout:g} s, or {GRACE:g} s after another rank raised"
                    replies[worker.rank] = RankError(worker.rank, "Hang", message, stacks + worker.log_tail())
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                worker = waiting.pop(connection)
                reply = replies[worker.rank] = worker.receive()
                if isinstance(reply, RankError):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return replies


@dataclass(frozen=True)
class _Settings:
    """What a worker needs to know to serve."""

    rank: int
    world: int
    port: int
    group_timeout: float
    env: dict[str, str]
    log: Path
    stacks: Path


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, settings: _Settings) -> None:
        self.rank = settings.rank
        self.settings = settings
        self.connection, theirs = Pipe()
        self.process = _FORKS.Process(target=_serve, args=(theirs, settings), daemon=True)
        with _environment(settings.env):  # for the server, which the first worker starts
            self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def receive(self) -> Any:
        try:
            ok, content = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            message = f"the process ended with exit code {self.process.exitcode}"
            return RankError(self.rank, "Died", message, self.log_tail())
        return content if ok else RankError(self.rank, *content)

    def log_tail(self, size: int = 4000) -> str:
        text = self.settings.log.read_text(errors="replace")[-size:].strip()
        return f"\n(end of the log of rank {self.rank})\n{text}\n" if text else ""

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _stacks(workers: Sequence[_Worker]) -> list[str]:
    """What every thread of these workers is doing now."""
    for worker in workers:
        if worker.process.is_alive() and worker.settings.stacks.exists():  # until then the signal would end it
            os.kill(worker.pid, signal.SIGUSR1)
    time.sleep(0.5)
    texts = [worker.settings.stacks for worker in workers]
    return [text.read_text(errors="replace") if text.exists() else "" for text in texts]


@contextlib.contextmanager
def _environment(env: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _name_of(fn: Callable[..., Any]) -> str:
    name = f"{fn.__module__}:{fn.__qualname__}"
    if "<" in fn.__qualname__ or fn.__module__ == "__main__":
        raise TypeError(f"a job must be a module-level function that workers can import, got {name}")
    return name


# ---- the worker's side --------------------------------------------------------------------------------------------


def _serve(connection: Connection, settings: _Settings) -> None:
    """Join the group, then run one job after another until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    with settings.log.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stacks = settings.stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(settings.env)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # a torchrun around the test run is not this group
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        # The end of the file means that the parent closed the connection or died: no worker outlives it, busy or not.
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv_bytes())
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    gc.freeze()  # what the imports left behind: a collection between jobs need not look at it
    # Dynamo times the guards of every graph for its log, with the processor's caches flushed: 20 ms each time.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    rank, world = settings.rank, settings.world

    def join() -> bytes:
        store = dist.TCPStore("127.0.0.1", settings.port, is_master=False)
        timeout = datetime.timedelta(seconds=settings.group_timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        return b""

    connection.send_bytes(_reply(join))
    while True:
        request = requests.get()
        connection.send_bytes(_reply(lambda: _answer(request, rank, world)))  # noqa: B023 (called at once)


def _reply(answer: Callable[[], bytes]) -> bytes:
    try:
        return pickle.dumps((True, answer()))
    except BaseException as error:  # noqa: BLE001 (whatever a job raises is for the parent to judge)
        return pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc())))


def _answer(request: bytes, rank: int, world: int) -> bytes:
    content = pickle.loads(request)
    if content == HEALTH_CHECK:
        _check_health(rank, world)
        return b""
    name, args, kwargs = content
    _clean()
    module, _, qualname = name.partition(":")
    fn: Any = importlib.import_module(module)
    for attribute in qualname.split("."):
        fn = getattr(fn, attribute)
    return pickle.dumps(fn(rank, world, *args, **kwargs))


def _clean() -> None:
    """Forget what the job before compiled and drew at random."""
    gc.collect()  # models in reference cycles, with their hooks
    torch._dynamo.reset()
    torch.manual_seed(0)
    random.seed(0)


def _check_health(rank: int, world: int) -> None:
    total = torch.full((3,), float(rank + 1), dtype=torch.float64)
    dist.all_reduce(total)
    expected = world * (world + 1) / 2
    if total.tolist() != [expected] * 3:
        raise RuntimeError(f"an all-reduce after the job gave {total.tolist()}, expected {expected}: stray collectives")
