"""Over which groups and in which steps buckets are summed: the same numbers, in the same order on every rank."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxddp
from fxddp import _compat
from fxddp.agreement import Agreement
from fxddp.group import alive
from fxddp.transport import Staged, Stages
from fxddp.units import count
from tests.live.lab import (
    SMALL,
    Mlp,
    average,
    buckets,
    compiled,
    counted_collectives,
    data,
    error_of,
    expect,
    expect_equal,
    gradients,
    launches,
    local,
    loss_of,
    seeded,
)
from tests.live.pool import Pool


class Mixed(nn.Module):
    """Parameters of several dtypes, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 13), nn.Linear(13, 3, dtype=torch.float64)
        self.phase = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.one = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.first(x).relu().double()).float()
        return x * self.one + (self.phase.abs().sum() * x.mean())


def options_of(kind: str, world: int) -> dict[str, Any]:
    if kind == "lanes":
        return {"process_group": [dist.new_group() for _ in range(3)]}
    if kind == "ring":
        return {"algorithm": "ring"}
    return {"device_mesh": init_device_mesh("cpu", (int(kind), world // int(kind)))}


def routes_of(kind: str, world: int) -> set[str]:
    if kind == "lanes":
        return {f"all-reduce over group {i}" for i in range(3)}
    if kind == "ring":
        return {"reduce-scatter, all-gather"}
    inside, across = f"inside ({count(world // int(kind), 'rank')})", f"across ({count(int(kind), 'rank')})"
    return {f"reduce-scatter {inside}, all-reduce {across}, all-gather {inside}"}


def summed(rank: int, world: int, kind: str) -> None:
    """Split and in one graph; a rank that has accumulated something takes its pieces, the others the graph."""
    for make, options in itertools.product((Mlp, Mixed), ({"split": True}, {"split": False})):
        module = seeded(0, make)
        model, backend = compiled(module, keep_graphs=True, **options, **options_of(kind, world))
        for i in range(4):
            module.zero_grad()
            accumulates = i == 2 or (i == 3 and rank == 0)
            if accumulates:
                with backend.no_sync():
                    loss_of(model, 9).backward()
            with counted_collectives() as started:
                loss_of(model, i).backward()
            expected = average(local(module, 9, i) if accumulates else local(module, i))
            what = f"{kind}, {make.__name__}, {options}, step {i}"
            expect_equal(gradients(module), expected, what, tol=1e-6)
            expect(launches(backend)[-1] == buckets(backend) > 1, f"{launches(backend)}")
            pieces = 1 if not options["split"] and not accumulates else buckets(backend)
            expect(backend.stats().last.pieces in (pieces, pieces + 1), f"{what}: {backend.stats().last.pieces} pieces")
            told = {bucket.route for bucket in fxddp.explain(backend).buckets}
            expect(told == routes_of(kind, world), f"explain says {told}")
            if kind != "lanes" and i:
                steps = 2 if kind == "ring" else 3
                count = len(started) if pieces > 1 else steps * buckets(backend)  # a graph's own start in C++
                expect(count == steps * buckets(backend), f"{started} for {buckets(backend)} buckets")
                expect(pieces == 1 or ("allreduce" in started) is (kind != "ring"), f"{started}")
        expect_in_graph(backend, kind)


def expect_in_graph(backend: fxddp.Backend, kind: str) -> None:
    """The collectives stand in the graph, and `explain` shows them after the pass that puts them there."""
    (graph,) = fxddp.explain(backend).graphs
    code = {made.name: made.code for made in graph.passes}
    count = buckets(backend)
    own = {
        "lanes": {"all_reduce": count},
        "ring": {"all_to_all_single": count, "all_gather_into_tensor": count},
    }.get(kind, {"all_to_all_single": count, "all_reduce": count, "all_gather_into_tensor": count})
    shown = code["schedule" if kind == "lanes" else "take_stages"]
    found = Counter(re.findall(r"_c10d_functional\.(\w+)\.default", shown))
    expect(found == {**own, "wait_tensor": sum(own.values())}, f"{kind}: {found}")
    if kind == "lanes":
        names = [alive(lane).group_name for lane in backend.settings.lanes]
        groups = re.findall(r"all_reduce\.default\(\w+, 'sum', '(\w+)'\)", shown)
        expect(groups == [names[i % 3] for i in range(count)], f"{groups} of {names}")


@pytest.mark.parametrize("kind", ["lanes", "ring", "1", "2"])
def test_the_same_numbers_as_an_all_reduce(pool: Pool, kind: str):
    pool.run(summed, kind)


def summed_beside_other_groups(rank: int, world: int, kind: str) -> None:
    """Ranks belong to different numbers of groups, as with tensor parallelism on some of them."""
    other = dist.new_group([0, 1])
    summed(rank, world, kind)
    if rank in (0, 1):
        dist.destroy_process_group(other)


def test_parts_of_a_third(pool3: Pool):
    pool3.run(summed_beside_other_groups, "ring")


def test_two_nodes_of_two(pool4: Pool):
    pool4.run(summed, "2")


class Arriving:
    """Work that is only seen to be done when it was waited for: at once, or late."""

    def __init__(self, work: Any, *, late: bool) -> None:
        self._work = work
        self._done = False
        if not late:
            self.wait()

    def is_completed(self) -> bool:
        return self._done

    def wait(self, *timeout: Any) -> None:
        self._work.wait(*timeout)
        self._done = True


def late_stages() -> Any:
    """Has buckets leave their first stage only when they are waited for."""
    scatter = _compat.reduce_scatter
    return mock.patch.object(_compat, "reduce_scatter", lambda *arguments: Arriving(scatter(*arguments), late=True))


def two_models(rank: int, world: int) -> None:
    """Two models in one backward: on a node, the first one's buckets are through with a stage after the other's."""
    mesh = init_device_mesh("cpu", (2, 2))
    modules = [seeded(seed, Mlp) for seed in range(2)]
    models, backends = zip(*(compiled(module, device_mesh=mesh) for module in modules), strict=True)
    scatter, started = _compat.reduce_scatter, 0

    def arriving(*arguments: Any) -> Any:
        nonlocal started
        started += 1
        return Arriving(scatter(*arguments), late=rank < 2 and started <= buckets(backends[0]))

    for i in range(3):
        for module in modules:
            module.zero_grad()
        started = 0
        with mock.patch.object(_compat, "reduce_scatter", arriving if i else scatter):
            sum(loss_of(model, i) for model in models).backward()  # type: ignore[union-attr]
        expect(started == (2 * buckets(backends[0]) if i else 0), f"{started} buckets")
        for module in modules:
            expect_equal(gradients(module), average(local(module, i)), f"step {i}", tol=1e-6)


def test_two_models_on_one_mesh(pool4: Pool):
    pool4.run(two_models, timeout=30)


def nameless(rank: int, world: int, path: str) -> None:
    """A default group made without a backend's name is gloo where torch has nothing else."""
    dist.destroy_process_group()
    dist.init_process_group(store=dist.FileStore(path, world), rank=rank, world_size=world)
    module = seeded(0, Mlp)
    model, _ = compiled(module, algorithm="ring")
    for i in range(2):
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), f"step {i}", tol=1e-6)


def test_a_group_without_a_backends_name(pool: Pool, tmp_path: Any):
    pool.run(nameless, str(tmp_path / "store"), discard=True, timeout=30)


class Two(nn.Module):
    """Two layers, in two graphs or in one."""

    def __init__(self, graphs: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)
        self.graphs = graphs

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.graphs == 2:
            torch._dynamo.graph_break()
        return self.last(x)


def in_one_graph(rank: int, world: int, kind: str) -> None:
    """Inductor's graphs, two in a backward: one rank comes to the second from pieces, with steps still to be taken."""
    module = seeded(0, Two)
    model, backend = compiled(
        module,
        inner="inductor",
        split=False,
        static_graph=True,
        bucket_mb=SMALL / 2,
        first_bucket_mb=SMALL / 2,
        **options_of(kind, world),
    )
    for i in range(4):
        module.zero_grad()
        started = {name: p.detach() * 0 for name, p in module.last.named_parameters()} if i == 2 and rank == 0 else {}
        for name, gradient in started.items():
            module.last.get_parameter(name).grad = gradient + 0.5
        with late_stages():
            loss_of(model, i).backward()
        found = local(module, i)
        for name, gradient in started.items():
            found[f"last.{name}"] = found[f"last.{name}"] + gradient + 0.5
        expect_equal(gradients(module), average(found), f"{kind}, step {i}", tol=1e-6)
        last, first = (len(plan.buckets) for plan in reversed(backend.plans))
        split = (last if started else 0, first if kind == "lanes" else 0)  # which starts at another group
        pieces = sum(count or 1 for count in split)
        expect(last % 3 and backend.stats().last.pieces in range(pieces, pieces + 3), f"{backend.stats().last}")
    narrow = seeded(0, Mlp)
    model, _ = compiled(narrow, split=False, comm_hook="bf16", **options_of(kind, world))
    loss_of(model, 0).backward()
    exact = average(local(narrow, 0))
    expect_equal(gradients(narrow), exact, f"{kind} in 16 bits", tol=0.01)
    rounded = {name: p.grad for name, p in narrow.named_parameters()}
    expect(not torch.equal(rounded["last.weight"], exact["last.weight"]), f"{kind} in 16 bits")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["lanes", "ring", "1"])
def test_one_graph_with_its_steps_inside(pool: Pool, kind: str):
    pool.run(in_one_graph, kind, timeout=120)


def waited(rank: int, world: int) -> None:
    """A rank waits earlier for a bucket than the others, which come to theirs only after another announcement."""
    module = seeded(0, Two)
    if rank == 0:
        module.last.weight.register_post_accumulate_grad_hook(lambda _: None)
    model, _ = compiled(module, algorithm="ring")
    for i in range(3):
        module.zero_grad()
        with late_stages():
            loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), f"step {i}", tol=1e-6)


def test_a_rank_that_waits_between_graphs(pool: Pool):
    pool.run(waited, timeout=30)


class Summing(torch.autograd.Function):
    """Whose backward is a collective of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


def late_to_announce(rank: int, world: int) -> None:
    """One node waits for the other's records, which come with a collective of the user's behind them."""
    module = seeded(0, Two)
    model, _ = compiled(module, device_mesh=init_device_mesh("cpu", (2, 2)))
    loss_of(model, 0).backward()
    announce = Agreement.announce

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.5 * (rank // 2))
        proposal = announce(*arguments, **options)
        time.sleep(0.1)
        return proposal

    module.zero_grad()
    with late_stages(), mock.patch.object(Agreement, "announce", slowly):
        model(Summing.apply(data(1, 6, 8).requires_grad_())).square().mean().backward()
    expect_equal(gradients(module), average(local(module, 1)), "all the same", tol=1e-6)


def test_a_collective_of_the_users_behind_an_announcement(pool4: Pool):
    pool4.run(late_to_announce, timeout=30)


def joined_in_graphs(rank: int, world: int, graphs: int, updates: bool) -> None:
    """A rank without inputs waits for the other's buckets in other places than that one."""
    module = seeded(0, lambda: Two(graphs))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if updates else None
    model = fxddp.DistributedDataParallel(
        module, algorithm="ring", inner="aot_eager", optimizer=optimizer, bucket_cap_mb=25 if graphs == 2 else SMALL / 2
    )
    loss_of(model, 0).backward()
    with late_stages(), model.join():
        for i in range(2 + 2 * rank):
            loss_of(model, i).backward()
    if updates:
        ours = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        everyone = [torch.empty_like(ours) for _ in range(world)]
        dist.all_gather(everyone, ours)
        expect(all(torch.equal(one, ours) for one in everyone), "equal weights on all ranks")


@pytest.mark.parametrize(("graphs", "updates"), [(2, False), (2, True), (1, True)])
def test_a_rank_without_inputs_in_a_ring(pool: Pool, graphs: int, updates: bool):
    pool.run(joined_in_graphs, graphs, updates, timeout=30)


def turns(rank: int, world: int) -> None:
    """Which group each bucket takes, whatever was launched before; with the wrapper as well, and under join."""
    groups = [dist.new_group() for _ in range(2)]
    names = {id(group): i for i, group in enumerate(groups)}
    taken: list[int] = []
    original: Any = vars(dist.ProcessGroup)["allreduce"]

    def spy(group: dist.ProcessGroup, *arguments: Any, **others: Any) -> Any:
        if id(group) in names:
            taken.append(names[id(group)])
        return original.__get__(group)(*arguments, **others)

    module = seeded(0, Mlp)
    model = fxddp.DistributedDataParallel(
        module, process_group=groups, bucket_cap_mb=0.0005, first_bucket_mb=0.0005, inner="aot_eager"
    )
    setattr(dist.ProcessGroup, "allreduce", spy)  # noqa: B010 (mypy knows that it is a method)
    try:
        for i in range(3):
            taken.clear()
            loss_of(model, i).backward()
            count = buckets(model.backend)
            expect(taken == [j % 2 for j in range(count)], f"step {i}: {taken} for {count} buckets")
            told = [bucket.route for bucket in fxddp.explain(model).buckets]
            expect(told == [f"all-reduce over group {j}" for j in taken], f"explain says {told}")
    finally:
        setattr(dist.ProcessGroup, "allreduce", original)  # noqa: B010
    with model.join():
        for i in range(2 + rank):
            loss_of(model, i).backward()


def test_buckets_take_groups_in_turns(pool: Pool):
    pool.run(turns)


def joined(rank: int, world: int) -> None:
    """A rank without inputs goes through the same stages; what ranks do differently as well."""
    module = seeded(0, Mlp)
    model = fxddp.DistributedDataParallel(module, algorithm="ring", bucket_cap_mb=0.0005, inner="aot_eager")
    loss_of(model, 0).backward()
    expected = [average(local(module, i)) for i in range(2)]
    expected.append({name: g / world for name, g in local(module, 2).items() if g is not None})  # zeros of the others
    with model.join():
        for i in range(2 + rank):
            module.zero_grad()
            loss_of(model, i).backward()
            expect_equal(gradients(module), expected[i], f"step {i}", tol=1e-6)
    module.zero_grad()
    loss_of(model, 1).backward()
    expect_equal(gradients(module), expected[1], "afterwards", tol=1e-6)


def test_a_rank_without_inputs(pool: Pool):
    pool.run(joined)


def meshes(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, world))
    expect(
        "1D device mesh" in str(error_of(lambda: fxddp.DistributedDataParallel(Mlp(), device_mesh=mesh))), "as torch"
    )
    module = seeded(0, Mlp)
    model = fxddp.DistributedDataParallel(module, device_mesh=mesh, algorithm="hierarchical", inner="aot_eager")
    loss_of(model, 0).backward()
    expect_equal(gradients(module), average(local(module, 0)), "on a mesh of two dimensions", tol=1e-6)
    one = init_device_mesh("cpu", (world,))
    for options, message in (
        ({"device_mesh": mesh, "algorithm": "ring"}, "algorithm='ring' does not go with"),
        ({"algorithm": "hierarchical"}, "takes a mesh of two dimensions"),
        ({"device_mesh": one, "algorithm": "hierarchical"}, "takes a mesh of two dimensions"),
        ({"device_mesh": mesh, "process_group": dist.group.WORLD}, "exclude each other"),
        ({"device_mesh": "mesh"}, "must be a DeviceMesh"),
        ({"algorithm": "tree"}, "algorithm must be one of"),
        ({"process_group": []}, "a list of such groups"),
        ({"process_group": [dist.group.WORLD, None]}, "a list of such groups"),
        ({"process_group": [dist.group.WORLD, dist.group.WORLD]}, "a group stands twice"),
        ({"process_group": [dist.group.WORLD, dist.new_group()], "algorithm": "ring"}, "makes its own groups"),
        ({"process_group": [dist.group.WORLD, dist.new_group()], "comm_hook": fxddp.PowerSGD}, "give an object"),
        ({"algorithm": "ring", "comm_hook": lambda state, bucket: None}, "starts its own collectives"),
    ):
        error = error_of(lambda options=options: fxddp.backend(**options))  # type: ignore[misc]
        expect(isinstance(error, ValueError) and message in str(error), f"{options}: {error!r}")
    error = error_of(lambda: fxddp.backend(algorithm="ring").register_comm_hook(None, lambda state, bucket: None))
    expect("starts its own collectives" in str(error), str(error))
    single = dist.new_group([rank], use_local_synchronization=True)
    everyone = dist.new_group()
    error = error_of(lambda: fxddp.backend(process_group=[everyone, single]))
    expect("groups of the same ranks" in str(error), str(error))


def test_meshes_and_what_is_refused(pool: Pool):
    pool.run(meshes)


def differing(rank: int, world: int) -> str:
    model, _ = compiled(seeded(0, Mlp), algorithm=("all_reduce", "ring")[rank])
    return str(error_of(lambda: loss_of(model, 0)))


def test_ranks_with_other_algorithms(pool: Pool):
    for message in pool.run(differing):
        assert "algorithm differs between ranks: 'ring' on rank 1, 'all_reduce' on rank 0" in message


# ---- the order of stages, without processes --------------------------------------------------------------------------


class Slow:
    """Work that is done when it is told to be."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self, timeout: object = None) -> None:
        self.done = True


def test_every_stage_sees_the_buckets_in_order():
    """A bucket that is through with a stage early stays behind the one ahead of it."""
    entered: list[tuple[int, Staged]] = []
    works: dict[tuple[int, int], Slow] = {}
    made: list[Staged] = []

    def stage(number: int) -> Any:
        def start(bucket: Staged) -> Slow:
            if bucket not in made:
                made.append(bucket)
            entered.append((number, bucket))
            return works.setdefault((number, made.index(bucket)), Slow())

        return start

    class Alone:
        def __init__(self) -> None:
            self.lines: set[Stages] = set()

        def count(self) -> None:
            pass

    line = Stages(Alone(), 1, {"a": stage(0), "b": stage(1), "c": stage(2)})  # type: ignore[arg-type]
    first = line.start(torch.zeros(2), 0)
    second = line.start(torch.zeros(2), 1)
    works[0, 1].done = True
    third = line.start(torch.zeros(2), 2)
    assert [(n, made.index(b)) for n, b in entered] == [(0, 0), (0, 1), (0, 2)]  # none went ahead of the first
    works[0, 0].done = True
    third.wait()
    for number in range(3):
        assert [made.index(b) for n, b in entered if n == number] == [0, 1, 2]
    first.wait()
    second.wait()
