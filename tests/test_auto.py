"""`bucket_mb="auto"` on live ranks: measured once, the same plan everywhere, warm starts, and what it refuses."""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxddp
import fxddp.speeds
from fxddp.passes.cost import Machine, Network, Speeds
from fxddp.passes.plan import check_plan
from tests.live.lab import (
    Mlp,
    average,
    counted_collectives,
    error_of,
    expect,
    expect_equal,
    gradients,
    local,
    loss_of,
    register_name,
    seeded,
)
from tests.live.pool import Pool

SLOW = Speeds(Machine(1e6, 1e6, 0.0), Network(2, 1e5, 1e-6, cpu_per_call=20e-6, cpu_per_byte=1e-9))
FAST = Speeds(Machine(1e12, 1e12, 0.0), Network(2, 1e9, 1e-3, cpu_per_call=20e-6, cpu_per_byte=1e-10))
"""With the one even these models have several buckets, with the other all bytes take less than a message."""


def pretend(speeds: Speeds = SLOW) -> None:
    """Has the measurement find this, on this rank."""
    figures = asdict(speeds.network)
    del figures["world_size"]
    fxddp.speeds._network = lambda group, device: {name: value for name, value in figures.items() if value}
    fxddp.speeds._machine = lambda device, dtype: (speeds.machine.flops, speeds.machine.memory)


def own_cache(folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{dist.get_rank()}"


def check(
    module: nn.Module, model: Any, backend: fxddp.Backend, what: str, *, group: Any = None, tol: float = 0.0
) -> list[int]:
    """One right step; the bytes of its buckets."""
    module.zero_grad()
    loss_of(model, 1).backward()
    expect_equal(gradients(module), average(local(module, 1), group), what, tol)
    (plan,) = backend.plans
    check_plan(plan, plan.grads)
    expect(plan.ends is not None, f"{what}: not planned by ends")
    record = backend.stats().last
    expect(record.launches == len(plan.buckets), f"{what}: {record.launches} launches for {len(plan.buckets)} buckets")
    return [bucket.nbytes for bucket in plan.buckets]


# ---- the real measurement --------------------------------------------------------------------------------------------


def measured(rank: int, world: int, folder: str) -> dict[str, Any]:
    own_cache(folder)
    module = seeded(rank, Mlp)
    backend = fxddp.backend(bucket_mb="auto", inner="aot_eager", process_group=dist.new_group())
    group = backend.lookup()
    assert group is not None
    model = torch.compile(module, backend=backend)
    begin = time.perf_counter()
    loss_of(model, 0)
    first = time.perf_counter() - begin
    speeds = group.speeds
    with counted_collectives() as started:
        sizes = check(module, model, backend, "measured")
    again = fxddp.backend(bucket_mb="auto", inner="aot_eager", process_group=group.process_group)
    with counted_collectives() as few:
        loss_of(torch.compile(seeded(0, Mlp), backend=again), 0)
    return {
        "speeds": speeds,
        "sizes": sizes,
        "first": first,
        "step": started,
        "again": few,
        "same": group.speeds is speeds,
    }


def test_the_network_is_measured_once_and_agreed(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(measured, str(tmp_path))
    assert one["speeds"] == other["speeds"]
    assert one["sizes"] == other["sizes"]
    network, machine = one["speeds"].network, one["speeds"].machine
    assert network.world_size == 2
    assert 1e-6 < network.latency < 1e-1
    assert 1e6 < network.bandwidth < 1e12
    assert 1e-6 < network.cpu_per_call < 1e-1
    assert 1e-12 < network.cpu_per_byte < 1e-6
    assert 1e8 < machine.flops < 1e14
    assert 1e8 < machine.memory < 1e13
    for found in (one, other):
        assert found["same"]
        assert found["step"].count("allreduce") == len(found["sizes"]) + 6, "six averaged by hand, to compare with"
        assert "allreduce" not in found["again"], "measured again for another backend on the same group"


def bounded(rank: int, world: int, bandwidth: float) -> tuple[float, float]:
    """Measures a network that takes as long as this one would; seconds it took, and the bandwidth that was found."""
    group = fxddp.backend(process_group=dist.new_group()).lookup()
    assert group is not None
    channel, plain = group.channel, type(group).all_reduce
    assert channel is not None

    def slow(self: Any, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        time.sleep(tensor.nbytes / bandwidth)
        return plain(self, tensor, *arguments, **options)

    type(group).all_reduce = slow  # type: ignore[method-assign]
    try:
        begin = time.perf_counter()
        found = fxddp.speeds._network(group, torch.device("cpu"))
        return time.perf_counter() - begin, found["bandwidth"]
    finally:
        type(group).all_reduce = plain  # type: ignore[method-assign]


@pytest.mark.parametrize("mbit", [50, 1000])
def test_a_slow_network_is_measured_with_fewer_bytes(pool: Pool, mbit: int) -> None:
    for seconds, found in pool.run(bounded, mbit * 1e6 / 8):
        assert seconds < 0.5
        assert mbit * 1e6 / 8 * 0.5 < found < mbit * 1e6 / 8 * 1.05


@pytest.mark.parametrize(
    ("cores", "threads", "spare"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], [1, 1], True),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], [2, 1], False),
        ([[0], [1]], [1, 1], False),
        ([[0, 1], [2, 3]], [1, 1], True),
        ([[0, 1, 2, 3]], [4], False),
    ],
)
def test_what_sends_has_cores_of_its_own(cores: list[list[int]], threads: list[int], spare: bool) -> None:
    told = [["here", *each] for each in zip(cores, threads, strict=True)]
    assert fxddp.speeds.has_spare_cores([*told, ["there", [0], 1]], "here") == spare
    assert not fxddp.speeds.has_spare_cores([*told, ["there", [0], 1]], "there")


# ---- one plan --------------------------------------------------------------------------------------------------------


def differing(rank: int, world: int, folder: str, wrapped: bool) -> Any:
    """Ranks that measure very different networks and processors."""
    own_cache(folder)
    pretend(SLOW if rank else FAST)
    module = seeded(rank, Mlp)
    group = dist.new_group()
    if wrapped:
        model: Any = fxddp.DistributedDataParallel(module, bucket_cap_mb="auto", process_group=group, inner="aot_eager")
        backend = model.backend
    else:
        backend = fxddp.backend(bucket_mb="auto", inner="aot_eager", process_group=group)
        model = torch.compile(module, backend=backend)
    sizes = check(module, model, backend, "differing")
    shared = backend.lookup()
    assert shared is not None
    return shared.speeds, sizes, backend.plans[0].digest()


@pytest.mark.parametrize("wrapped", [False, True])
def test_ranks_that_measure_differently_plan_the_same(pool: Pool, tmp_path: Path, wrapped: bool) -> None:
    one, other = pool.run(differing, str(tmp_path), wrapped)
    assert one == other
    assert one[0].machine.flops == 1e6, "the slower processor counts"


def several(rank: int, world: int, folder: str) -> tuple[list[int], int]:
    own_cache(folder)
    pretend()
    module = seeded(rank, Mlp)
    backend = fxddp.backend(bucket_mb="auto", inner="aot_eager", process_group=dist.new_group(), keep_graphs=True)
    model = torch.compile(module, backend=backend)
    sizes = check(module, model, backend, "several buckets")
    for i in (3, 4):
        with backend.no_sync():
            loss_of(model, i).backward()
    loss_of(model, 5).backward()
    return sizes, backend.stats().last.launches


def test_unequal_buckets_are_launched_one_by_one(pool: Pool, tmp_path: Path) -> None:
    for sizes, launches in pool.run(several, str(tmp_path)):
        assert len(sizes) == launches > 2
        assert len(set(sizes)) > 2


def sub(rank: int, world: int, folder: str) -> list[Any]:
    """Two groups of two among four ranks, whose networks differ, each with a model of its own."""
    own_cache(folder)
    pair = rank // 2
    pretend(SLOW if pair else FAST)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    module = seeded(rank, Mlp)
    backend = fxddp.backend(bucket_mb="auto", inner="aot_eager", process_group=groups[pair])
    return check(module, torch.compile(module, backend=backend), backend, "subgroup", group=groups[pair])


def test_each_group_has_its_own_network(pool4: Pool, tmp_path: Path) -> None:
    found = pool4.run(sub, str(tmp_path))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert len(found[0]) == 1, "a message costs more than all bytes"
    assert len(found[2]) > 2


def alone(rank: int, world: int) -> int:
    group = [dist.new_group([each]) for each in range(world)][rank]
    module = seeded(rank, Mlp)
    backend = fxddp.backend(bucket_mb="auto", inner="aot_eager", process_group=group)
    with counted_collectives() as started:
        loss_of(torch.compile(module, backend=backend), 0).backward()
    expect(started == ["allreduce"], f"alone, but started {started}")
    expect_equal(gradients(module), local(module, 0), "alone")
    return len(backend.plans[0].buckets)


def test_a_group_of_one_measures_nothing(pool: Pool) -> None:
    assert pool.run(alone) == [1, 1]


def test_without_a_group_it_trains_alone() -> None:
    module = seeded(0, Mlp)
    backend = fxddp.backend(bucket_mb="auto", inner="aot_eager")
    loss_of(torch.compile(module, backend=backend), 0).backward()
    expect_equal(gradients(module), local(module, 0), "no group")
    assert len(backend.plans[0].buckets) == 1
    assert "buckets of auto" in repr(backend)


def evaluated(rank: int, world: int, folder: str) -> list[int]:
    """Rank 0 evaluates before it trains, and compiles for that on its own."""
    own_cache(folder)
    pretend()
    module = seeded(rank, Mlp)
    backend = fxddp.backend(bucket_mb="auto", inner="aot_eager", process_group=dist.new_group())
    model = torch.compile(module, backend=backend)
    if rank == 0:
        with torch.no_grad(), counted_collectives() as started:
            loss_of(model, 0)
        expect(not started, f"evaluating started {started}")
    module.zero_grad()
    loss_of(model, 1).backward()
    expect_equal(gradients(module), average(local(module, 1)), "after an evaluation")
    return [bucket.nbytes for bucket in backend.plans[-1].buckets]


def test_an_evaluation_on_one_rank_measures_nothing(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(evaluated, str(tmp_path))
    assert one == other
    assert len(one) > 2


def by_name(rank: int, world: int, folder: str) -> list[int]:
    own_cache(folder)
    pretend()
    register_name()
    module = seeded(rank, Mlp)
    options = {"bucket_mb": "auto", "inner": "aot_eager", "process_group": dist.new_group()}
    model = torch.compile(module, backend="fxddp", options=options)
    return check(module, model, fxddp.backend_of(model), "by name")


def test_it_works_by_name(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(by_name, str(tmp_path))
    assert one == other
    assert len(one) > 2


# ---- caches ----------------------------------------------------------------------------------------------------------


def cached(rank: int, world: int, folder: str, factor: float) -> tuple[int, list[int]]:
    """A process that measures a network so many times as fast as the first did."""
    own_cache(folder)
    pretend(Speeds(SLOW.machine, Network(2, SLOW.network.bandwidth * factor, SLOW.network.latency / factor)))
    torch._dynamo.reset()
    counters.clear()
    module = seeded(rank, Mlp)
    backend = fxddp.backend(bucket_mb="auto")
    sizes = check(module, torch.compile(module, backend=backend), backend, f"factor {factor}", tol=1e-5)
    return counters["aot_autograd"]["autograd_cache_hit"], sizes


def test_a_second_process_starts_warm_though_it_measures_a_little_differently(tmp_path: Path) -> None:
    found = []
    for factor in (1.0, 1.2, 100.0):
        with Pool(2) as fresh:
            found.append(fresh.run(cached, str(tmp_path / "shared"), factor, timeout=200))
    cold, warm, other = found
    assert [hit for hit, _ in cold] == [0, 0]
    assert warm == [(1, sizes) for _, sizes in cold]
    assert [hit for hit, _ in other] == [0, 0], "a plan for another network was served"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"latency": 0, "bandwidth": 1, "flops": 1, "memory": 1}', "null"]
)
def test_what_an_earlier_process_kept_is_read_with_care(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kept.json"
    names = ["latency", "bandwidth", "flops", "memory"]
    assert fxddp.speeds._read(file, names) is None
    file.write_text(text)
    assert fxddp.speeds._read(file, names) is None
    found = {"latency": 1e-5, "bandwidth": 1e9, "flops": 1e11, "memory": 1e10}
    fxddp.speeds._write(file, found)
    assert fxddp.speeds._read(file, names) == found
    assert fxddp.speeds._read(file, [*names, "cpu_per_call"]) is None, "figures that an older version did not measure"
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def unequal(rank: int, world: int, folder: str) -> str:
    own_cache(folder)
    module = seeded(rank, Mlp)
    size: Any = "auto" if rank else 25
    backend = fxddp.backend(bucket_mb=size, inner="aot_eager", process_group=dist.new_group())
    return str(error_of(lambda: loss_of(torch.compile(module, backend=backend), 0)))


def test_ranks_with_other_settings_are_told(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(unequal, str(tmp_path)):
        assert "give all ranks the same bucket_mb" in text
        assert "first contact" in text


@pytest.mark.parametrize("wrong", ["Auto", "25", None, True])
def test_only_auto_is_a_word_for_a_size(wrong: Any) -> None:
    with pytest.raises(ValueError, match="bucket_mb must be a positive, finite number of MiB, or 'auto'"):
        fxddp.backend(bucket_mb=wrong)


def test_the_first_bucket_is_chosen_too() -> None:
    with pytest.raises(ValueError, match="leave first_bucket_mb=2 out"):
        fxddp.backend(bucket_mb="auto", first_bucket_mb=2)


# ---- explain ---------------------------------------------------------------------------------------------------------


def explained(rank: int, world: int, folder: str) -> list[str]:
    own_cache(folder)
    pretend()
    module = seeded(rank, Mlp)
    model = torch.compile(
        module, backend=fxddp.backend(bucket_mb="auto", inner="aot_eager", process_group=dist.new_group())
    )
    loss_of(model, 0).backward()
    found = fxddp.explain(model)
    expect(pickle.loads(pickle.dumps(found.network)) == SLOW.network, f"{found.network}")
    again = fxddp.explain(model, torch.randn(6, 8))
    expect([b.names for b in again.buckets] == [b.names for b in found.buckets], "planned otherwise than it trains")
    return [str(found), found.to_json()]


def test_explain_shows_the_measured_network(pool: Pool, tmp_path: Path) -> None:
    text, data = pool.run(explained, str(tmp_path))[0]
    shown = " ".join(text.split())
    assert 'chosen by bucket_mb="auto"' in shown
    assert "with 800000 bit/s and 1 µs a message (measured)" in shown
    assert "sending takes 20 µs a bucket and 1.05 ms a MiB from the processor" in shown
    assert '▸"auto"' in shown
    assert '"bucket_mb": "auto"' in data


def test_explain_plans_for_a_network_that_is_not_there(tmp_path: Path) -> None:
    torch._dynamo.reset()
    usual: dict[str, Any] = {"world_size": 8, "bucket_mb": "auto", "flops": 1e6, "memory_bandwidth": 1e6}
    slow = fxddp.explain(Mlp(), torch.randn(6, 8), bandwidth="1Mbit/s", latency="1us", **usual)
    torch._dynamo.reset()
    late = fxddp.explain(Mlp(), torch.randn(6, 8), bandwidth="1Gbit/s", latency="1s", **usual)
    assert len(slow.buckets) > len(late.buckets) == 1
    assert slow.sizes[0].bucket_mb == "auto"
    assert slow.sizes[0].buckets == len(slow.buckets)
    assert slow.sizes[0].exposed <= 1.05 * min(size.exposed for size in slow.sizes)
    slow.save(tmp_path / "report.html")
    assert fxddp.Explanation.load(tmp_path / "report.html").sizes == slow.sizes
