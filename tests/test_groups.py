"""Process groups: which one is averaged over, and what happens when they come and go under a compiled model."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxddp
from tests.live.lab import (
    Mlp,
    average,
    buckets,
    compiled,
    counted_collectives,
    error_of,
    expect,
    expect_equal,
    gradients,
    launches,
    local,
    loss_of,
    seeded,
    small_backend,
)
from tests.live.pool import Pool

SPLITS = pytest.mark.parametrize("split", [True, False])


def check_step(module: nn.Module, model: Any, backend: fxddp.Backend, i: int, what: str, *, group: Any = None) -> None:
    module.zero_grad()
    loss_of(model, i).backward()
    expect_equal(gradients(module), average(local(module, i), group), what)
    record = backend.stats().last
    expect(
        record.launches == buckets(backend) > 1, f"{what}: {record.launches} launches for {buckets(backend)} buckets"
    )


# ---- groups that come and go -----------------------------------------------------------------------------------------


def rejoin(path: str, rank: int, world: int) -> None:
    """Leaves the default group for a new one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def again(rank: int, world: int, folder: str, split: bool) -> None:
    """One compiled model through several default groups: of the same size, smaller ones, none, and a larger one."""
    module = seeded(rank, Mlp)
    model, backend = compiled(module, split=split)
    loss_of(model, 0)
    check_step(module, model, backend, 0, "the first group")
    module.zero_grad()
    with backend.no_sync():
        loss_of(model, 1).backward()
    rejoin(f"{folder}/same", rank, world)
    loss_of(model, 2).backward()
    expect_equal(gradients(module), average(local(module, 1, 2)), "what was pending before the new group")
    check_step(module, model, backend, 3, "a group of the same size")
    with torch.no_grad():  # ranks part, and meet again
        for parameter in module.parameters():
            parameter.add_(rank)
    rejoin(f"{folder}/permuted", (rank + 1) % world, world)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    for weight in weights.values():
        dist.broadcast(weight, 0)
    loss_of(model, 4)
    expect_equal(
        {name: p.detach() for name, p in module.named_parameters()}, dict(weights), "weights of the new rank 0"
    )
    check_step(module, model, backend, 4, "a group in another order")
    dist.barrier()
    if rank < world - 1:
        rejoin(f"{folder}/fewer", rank, world - 1)
        for i in (5, 6):
            check_step(module, model, backend, i, "a smaller group")
        if world == 3:
            check_alone(module, model, backend, f"{folder}/alone{rank}")
    else:
        check_alone(module, model, backend, f"{folder}/alone{rank}")
    rejoin(f"{folder}/everyone", rank, world)
    loss_of(model, 9)
    check_step(module, model, backend, 9, "everyone again")
    other = seeded(rank, Mlp)
    another = torch.compile(other, backend=backend)
    loss_of(another, 10)
    check_step(other, another, backend, 10, "another model, met in the last group only")
    expect(len(backend.plans) == 1, f"compiled {len(backend.plans)} times")


def check_alone(module: nn.Module, model: Any, backend: fxddp.Backend, path: str) -> None:
    rejoin(path, 0, 1)
    check_step(module, model, backend, 7, "a group of one")
    dist.destroy_process_group()
    module.zero_grad()
    total = backend.stats().total
    loss_of(model, 8).backward()
    expect_equal(gradients(module), local(module, 8), "no group")
    expect(backend.stats().total == total, "without a group a backward is on record")


@SPLITS
def test_groups_destroyed_and_made_again(pool: Pool, tmp_path: Any, split: bool):
    pool.run(again, str(tmp_path), split, discard=True)


@SPLITS
def test_three_ranks_become_two_and_three(pool3: Pool, tmp_path: Any, split: bool):
    pool3.run(again, str(tmp_path), split, discard=True)


def given_group(rank: int, world: int) -> list[str]:
    """A group that was given is used until it is destroyed; then nothing is averaged over another one instead."""
    group = dist.new_group([0, 1])
    module = seeded(0, Mlp)
    model, backend = compiled(module, process_group=group)
    check_step(module, model, backend, 0, "given group", group=group)
    loss = loss_of(model, 1)
    dist.destroy_process_group(group)
    module.zero_grad()
    messages = []
    with counted_collectives() as started:
        messages.append(str(error_of(lambda: loss_of(model, 2), "the forward")))
    expect(not started, f"started {started}")
    del loss
    with torch.no_grad():
        loss_of(model, 2)
    other, backend = compiled(module)
    check_step(module, other, backend, 3, "a new backend")
    return messages


def test_a_given_group_that_was_destroyed(pool: Pool):
    for messages in pool.run(given_group):
        for message in messages:
            assert "the process_group given to fxddp.backend was destroyed" in message
            assert "make a new backend" in message


def default_group_given(rank: int, world: int, path: str) -> str:
    module = seeded(0, Mlp)
    model, backend = compiled(module, process_group=dist.group.WORLD)
    check_step(module, model, backend, 0, "default group, given")
    rejoin(path, rank, world)
    return str(error_of(lambda: loss_of(model, 2)))


def test_the_default_group_given_and_destroyed(pool: Pool, tmp_path: Any):
    for message in pool.run(default_group_given, str(tmp_path / "again"), discard=True):
        assert "the process_group given to fxddp.backend was destroyed" in message


# ---- the end of a group ---------------------------------------------------------------------------------------------


def let_go_of(rank: int, world: int, kind: str) -> None:
    """The model and its backend live on, the groups do not: their threads would meet the end of Python."""
    known = set(dist.distributed_c10d._world.pg_map)
    group = dist.new_group(list(range(world)))
    arguments: dict[str, Any] = {"process_group": group, "comm_hook": fxddp.PowerSGD(2) if kind == "codec" else None}
    if kind == "ring":
        arguments["algorithm"] = "ring"
    if kind == "lanes":
        arguments["process_group"] = [group, dist.new_group(list(range(world)))]
    module = seeded(0, Mlp)
    wrapper = fxddp.DistributedDataParallel(Mlp(), process_group=group, inner="aot_eager")
    model, _ = compiled(module, **arguments)
    for i in range(2):
        loss_of(model, i).backward()
        loss_of(wrapper, i).backward()
    del wrapper  # its `process_group` is the group, as of DDP's
    made = [made for made in dist.distributed_c10d._world.pg_map if made not in known]
    expect(len(made) == (2 if kind in {"ring", "lanes"} else 1), f"{len(made)} groups")
    references = [weakref.ref(group) for group in made]
    for group in made:
        dist.destroy_process_group(group)
    del made, group, arguments, known
    gc.collect()
    expect([reference() for reference in references] == [None] * len(references), "a group outlives its destruction")
    error_of(lambda: loss_of(model, 2), "the forward")


@pytest.mark.parametrize("kind", ["group", "codec", "ring", "lanes"])
def test_a_destroyed_group_is_let_go_of(pool: Pool, kind: str):
    pool.run(let_go_of, kind)


# ---- subgroups -------------------------------------------------------------------------------------------------------


def subgroups(rank: int, world: int, split: bool) -> None:
    """Each group averages by itself and divides by its own size."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    group = pair if rank < 2 else single
    module = seeded(rank, Mlp)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    model, backend = compiled(module, process_group=group, split=split)
    loss_of(model, 0)
    weights = dict(before)
    for weight in weights.values():
        dist.broadcast(weight, group=group, group_src=0)
    expect_equal(
        {name: p.detach() for name, p in module.named_parameters()}, dict(weights), "the group's first rank wins"
    )
    for i in range(3):
        check_step(module, model, backend, i, f"step {i}", group=group)
    with backend.no_sync():
        loss_of(model, 4).backward()
    loss_of(model, 5).backward()
    record = backend.stats().last
    expect(record.launches == buckets(backend), f"{record.launches} launches")
    if rank == 2:  # alone, as often as it likes
        check_step(module, model, backend, 6, "one more", group=group)


@SPLITS
def test_a_subgroup_averages_over_its_members(pool3: Pool, split: bool):
    pool3.run(subgroups, split)


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.across = nn.Linear(4, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.across(self.up(x).relu())


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common, self.own = Mlp(), Tail()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.common(x))


def two_groups(rank: int, world: int) -> None:
    """Two backends with two groups in one model: some parameters are averaged over all ranks, some over a part."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    group = pair if rank < 2 else single
    module = seeded(0, Mixed)
    everyone = small_backend()
    part = small_backend(process_group=group)
    module.common.compile(backend=everyone)
    module.own.compile(backend=part)
    for i in range(3):
        module.zero_grad()
        if i == 1:
            with everyone.no_sync(), part.no_sync():
                loss_of(module, 7).backward()
        loss_of(module, i).backward()
        found = local(module, 7, i) if i == 1 else local(module, i)
        expected = average({name: g for name, g in found.items() if name.startswith("common.")})
        expected |= average({name: g for name, g in found.items() if name.startswith("own.")}, group)
        expect_equal(gradients(module), expected, f"step {i}")
    expect(launches(everyone)[-1] == buckets(everyone) > 1, f"{launches(everyone)}")
    expect(launches(part)[-1] == buckets(part) > 1, f"{launches(part)}")


def test_two_groups_in_one_model(pool3: Pool):
    pool3.run(two_groups)


def not_a_member(rank: int, world: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        model, backend = compiled(module := seeded(0, Mlp), process_group=group)
        check_step(module, model, backend, 0, "the member", group=group)
        return ""
    return str(error_of(lambda: compiled(Mlp(), process_group=group)))


def test_a_rank_that_is_not_in_the_group(pool: Pool):
    member, other = pool.run(not_a_member)
    assert member == ""
    assert "process_group must be" in other
    assert "that this rank belongs to" in other


# ---- a group of one, made by hand ------------------------------------------------------------------------------------


def compiled_before_the_group(rank: int, world: int, path: str, split: bool) -> None:
    """Compiled and trained without a group first: from the moment there is one, gradients are averaged."""
    dist.destroy_process_group()
    module = seeded(rank, Mlp)
    model, backend = compiled(module, split=split)
    module.zero_grad()
    loss_of(model, 0).backward()
    expect_equal(gradients(module), local(module, 0), "no group")
    rejoin(path, rank, world)
    os.environ["WORLD_SIZE"] = str(world)
    loss_of(model, 1)
    check_step(module, model, backend, 1, "a group")
    expect(len(backend.plans) == 1, f"compiled {len(backend.plans)} times")


@SPLITS
def test_a_model_compiled_before_there_was_a_group(pool: Pool, tmp_path: Any, split: bool):
    pool.run(compiled_before_the_group, str(tmp_path / "store"), split, discard=True)
