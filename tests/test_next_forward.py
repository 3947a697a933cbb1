"""Waits in the next forward: the weights of an optimizer in backward, bit by bit, whenever somebody reads them."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

import fxddp
from fxddp.group import Group
from fxddp.passes.cost import Machine, Network, Speeds
from tests.live.lab import (
    SMALL,
    Mlp,
    average,
    buckets,
    compiled,
    data,
    error_of,
    expect,
    expect_equal,
    gradients,
    local,
    loss_of,
    seeded,
)
from tests.live.pool import Pool

OVERLAP: dict[str, Any] = {"overlap": "next_forward"}


class Deep(nn.Module):
    """Layers with a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 if i == 0 else 16, 16) for i in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@contextlib.contextmanager
def raising(owner: type, name: str, error: BaseException, times: int = 1) -> Iterator[None]:
    """The first calls of a method raise instead."""
    method, left = vars(owner)[name], [error] * times

    def call(*arguments: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return method(*arguments, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, method)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """Fused, so that no update is compiled, which takes longer than all the rest."""
    return torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)


def waits_in_forward(record: Any) -> list[tuple[str, int]]:
    """What happened after the backward of this record was over."""
    return [(kind, index) for kind, index, when in record.events if when > record.end]


def pairs(make: Any, inner: str, **options: Any) -> Any:
    """Equal models with and without overlap: (module, optimizer, compiled, backend) of each."""
    found = []
    for more in (OVERLAP, {}):
        module = seeded(0, make)
        optimizer = adam(module)
        model, backend = compiled(module, inner=inner, optimizer=optimizer, **options, **more)
        found.append((module, optimizer, model, backend))
    return found


def same_weights(rank: int, world: int, inner: str, comm_hook: str | None) -> None:
    (module, optimizer, model, backend), (reference, stepped, usual, _) = pairs(Deep, inner, comm_hook=comm_hook)
    schedules = [lr_scheduler.ExponentialLR(each, 0.8) for each in (optimizer, stepped)]
    for step in range(5):
        losses = []
        for each in (model, usual):
            loss = loss_of(each, step)
            loss.backward()
            losses.append(loss.detach())
        expect(torch.equal(*losses), f"step {step}: losses {losses}")
        expect(all(p.grad is None for p in module.parameters()), f"step {step}: a gradient is left")
        optimizer.step()  # a training loop may stay as it is
        optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    found, ran = fxddp.explain(model), backend.stats().backwards[-2]
    drawn = Counter(span.kind for span in found.recorded)
    expect(drawn["bucket"] == drawn["wait"] == buckets(backend) and drawn["forward"] >= 2, f"recorded: {drawn}")
    sent = [span.start + ran.begin - bucket.launched for span, bucket in zip(
        (span for span in found.recorded if span.kind == "bucket"), ran.buckets, strict=True)]  # fmt: skip
    expect(max(map(abs, sent)) < 1e-9, "that of the last backward that nothing is left of")
    expect(all(span.seconds >= 0 for span in found.recorded), f"{found.recorded}")
    expect(all(bucket.needed is not None for bucket in found.buckets), str(found))
    before = waits_in_forward(backend.stats().last)
    expect(not before, f"waited before anybody read a weight: {before}")
    backend.synchronize()
    expect_equal(weights(module), weights(reference), "after the last step")
    for record in backend.stats().backwards[:-1]:
        kinds = [kind for kind, _ in waits_in_forward(record)]
        expect(kinds.count("wait") == buckets(backend), f"all buckets are waited for in the next forward: {kinds}")
        expect(kinds.count("forward") >= 2, f"in several pieces: {kinds}")
        expect("wait" in kinds[kinds.index("forward") :], f"between the pieces: {kinds}")


@pytest.mark.parametrize(("inner", "comm_hook"), [("aot_eager", None), ("inductor", None), ("aot_eager", "bf16")])
def test_weights_of_an_optimizer_in_backward(pool: Pool, inner: str, comm_hook: str | None):
    pool.run(same_weights, inner, comm_hook, timeout=180)


class Mixed(nn.Module):
    """Tied and frozen weights, a graph break, a layer used on both sides of it, a head for other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.head, self.other = (nn.Linear(8, 8) for _ in range(4))
        self.frozen, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.route = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.twice(self.first(x)).tanh())
        torch._dynamo.graph_break()
        x = self.frozen(self.eager(x)).tanh()
        return self.other(x) if self.route else self.head(self.twice(x))

    @torch.compiler.disable
    def eager(self, x: Tensor) -> Tensor:
        return self.tied(x).tanh()


def mixed(rank: int, world: int) -> None:
    """Batches of several sizes, accumulation, an evaluation and a checkpoint between steps."""
    late, usual = pairs(Mixed, "aot_eager", find_unused_parameters=True, bucket_mb=SMALL / 8, first_bucket_mb=SMALL / 8)
    for step in range(8):
        for module, _, model, backend in (late, usual):
            module.route = int(step == 3 and rank == 1)
            for part in range(2 if step % 3 == 2 else 0):
                with backend.no_sync():
                    model(data(10 + part, 5, 8)).square().mean().backward()
            model(data(step, 4 + step % 3, 8)).square().mean().backward()
            if step == 4:
                with torch.no_grad():
                    module.evaluated = model(data(step, 4, 8))
            if step == 5:
                state = module.state_dict()
                module.saved = {name: tensor.clone() for name, tensor in state.items()}
        if step == 4:
            expect(torch.equal(late[0].evaluated, usual[0].evaluated), "an evaluation sees the new weights")
        if step == 5:
            expect_equal(late[0].saved, usual[0].saved, "a checkpoint holds the new weights")
    late[3].synchronize()
    expect_equal(weights(late[0]), weights(usual[0]), "after the last step")
    after = [kind for record in late[3].stats().backwards for kind, _ in waits_in_forward(record)]
    expect("wait" in after, f"some waits moved: {after}")


def test_all_at_once(pool: Pool):
    pool.run(mixed)


class Attention(nn.Module):
    """Embedding, one block of a transformer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 12)
        self.block = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(tokens)))


def transformer(rank: int, world: int) -> None:
    """With batches of several lengths: dynamic shapes after the first."""
    late, usual = pairs(Attention, "aot_eager")
    for step in range(4):
        tokens = torch.randint(0, 16, (3, 4 + step), generator=torch.Generator().manual_seed(10 * step + rank))
        for _, _, model, _ in (late, usual):
            model(tokens).square().mean().backward()
    late[3].synchronize()
    expect_equal(weights(late[0]), weights(usual[0]), "after the last step")
    moved = [kind for kind, _ in waits_in_forward(late[3].stats().backwards[-2])]
    expect("wait" in moved and "forward" in moved, f"waits moved, also with dynamic shapes: {moved}")


def test_a_transformer_with_dynamic_shapes(pool: Pool):
    pool.run(transformer)


COPIES: dict[str, Any] = {
    "optimizer": lambda optimizer: optimizer,
    "deepcopy of the optimizer": copy.deepcopy,
    "pickle of the optimizer": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


def reads(rank: int, world: int, how: str) -> None:
    late, usual = pairs(Deep, "aot_eager")
    for step in range(3):
        for _, _, model, _ in (late, usual):
            loss_of(model, step).backward()
        found = []
        for module, optimizer, model, backend in (late, usual):
            if how == "state_dict":
                found.append({k: v.clone() for k, v in module.layers[1].state_dict().items()})
            elif how == "deepcopy":
                found.append(weights(copy.deepcopy(module)))
            elif how == "pickle":
                found.append(weights(pickle.loads(pickle.dumps(module))))
            elif how in COPIES:
                whole = COPIES[how](optimizer)
                state = whole.state_dict()["state"]
                expect(len(state) == len(weights(module)), f"{how}, step {step}: state of {len(state)} parameters")
                found.append({str(i): each["exp_avg"].clone() for i, each in state.items()})
            elif how == "load_state_dict":
                module.load_state_dict(seeded(7, Deep).state_dict())
                backend.synchronize()
                found.append(weights(module))
            elif how == "evaluation":
                with torch.no_grad():
                    found.append({"output": model(data(9, 3, 8))})
            else:
                backend.synchronize()
                found.append(weights(module))
        expect(waits_in_forward(late[3].stats().last), f"{how} settles")
        expect_equal(found[0], found[1], f"{how}, step {step}")


@pytest.mark.parametrize(
    "how",
    [
        "state_dict",
        "deepcopy",
        "pickle",
        "optimizer",
        "deepcopy of the optimizer",
        "pickle of the optimizer",
        "load_state_dict",
        "evaluation",
        "synchronize",
    ],
)
def test_whoever_reads_weights_sees_new_ones(pool: Pool, how: str):
    pool.run(reads, how)


class Habits(nn.Module):
    """A layer that starts to be used in eager code, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)
        self.early = False

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.first(self.prepare(x)).tanh())

    @torch.compiler.disable
    def prepare(self, x: Tensor) -> Tensor:
        return self.shared(x) if self.early else x + 1


def eager_use(rank: int, world: int, synchronizes: bool) -> None:
    (module, _, model, backend), (reference, _, usual, _) = pairs(Habits, "aot_eager")
    for step in range(5):
        module.early = reference.early = step >= 2
        if synchronizes and step == 2:
            backend.synchronize()
        if step == 2 and not synchronizes:
            error = error_of(lambda: loss_of(model, 2).backward(), "an eager use of what was under way")
            expect("shared" in str(error) and "synchronize" in str(error), f"names parameter and remedy: {error}")
            return
        for each in (model, usual):
            loss_of(each, step).backward()
    backend.synchronize()
    expect_equal(weights(module), weights(reference), "after the last step")


@pytest.mark.parametrize("synchronizes", [False, True])
def test_eager_code_that_takes_up_a_weight_under_way(pool: Pool, synchronizes: bool):
    pool.run(eager_use, synchronizes)


def earlier_forward(rank: int, world: int, forwards: int, fused: bool) -> None:
    """What an earlier forward saved changes when a backward has left updates under way: autograd has to see it."""
    for options in (OVERLAP, {}):
        module = seeded(0, Deep)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=fused)
        model, _ = compiled(module, inner="aot_eager", optimizer=optimizer, **options)
        loss_of(model, 0).backward()
        results = [model(data(each, 4, 8)) for each in range(forwards)]
        first, second = results[0][:, 0].sum(), results[-1][:, 1].sum()
        first.backward(retain_graph=True)
        error = error_of(second.backward, f"a second backward with {options}")
        expect("modified by an inplace operation" in str(error), f"as autograd says it: {error}")


@pytest.mark.parametrize(("forwards", "fused"), [(1, False), (2, False), (2, True)])
def test_a_backward_of_an_earlier_forward(pool: Pool, forwards: int, fused: bool):
    pool.run(earlier_forward, forwards, fused, discard=True)


def written(rank: int, world: int, synchronizes: bool) -> None:
    (module, _, model, backend), (reference, _, usual, _) = pairs(Deep, "aot_eager")
    for step in range(3):
        for each in (model, usual):
            loss_of(each, step).backward()
        if synchronizes:
            backend.synchronize()
        with torch.no_grad():
            for each in (module, reference):
                each.layers[1].weight.clamp_(-0.1, 0.1)
        if not synchronizes:
            error = error_of(lambda: loss_of(model, 1), "a forward after a write")
            expect("layers.1.weight" in str(error) and "synchronize" in str(error), f"names them: {error}")
            return
    backend.synchronize()
    expect_equal(weights(module), weights(reference), "after the last step")


@pytest.mark.parametrize("synchronizes", [False, True])
def test_code_that_writes_to_a_weight_under_way(pool: Pool, synchronizes: bool):
    pool.run(written, synchronizes, discard=not synchronizes)


def converted(rank: int, world: int, synchronizes: bool) -> None:
    """A module is given another dtype, by way of `p.data`; then one on the same group is asked, and one on another."""
    (module, _, model, backend), (reference, _, usual, _) = pairs(Deep, "aot_eager")
    for each in (model, usual):
        loss_of(each, 0).backward()
    if synchronizes:
        backend.synchronize()
        expect_equal(weights(module.double()), weights(reference.double()), "converted afterwards")
        return
    module.double()
    error = error_of(backend.synchronize, "an update of another dtype")
    expect("layers.4.bias" in str(error) and "backend.synchronize() before code" in str(error), f"names it: {error}")
    other, _ = compiled(seeded(rank, Mlp))
    again = error_of(lambda: loss_of(other, 1).backward(), "the same group")
    expect("whatever model they train" in str(again) and "a new process group" in str(again), f"says so: {again}")
    fresh = seeded(rank, Mlp)
    there, _ = compiled(fresh, process_group=dist.new_group())
    loss_of(there, 1).backward()
    expect_equal(gradients(fresh), average(local(fresh, 1)), "on a new group")


@pytest.mark.parametrize("synchronizes", [False, True])
def test_a_weight_under_way_that_is_converted(pool: Pool, synchronizes: bool):
    pool.run(converted, synchronizes, discard=not synchronizes)


def slow(rank: int, world: int) -> None:
    """On a network that is slow next to the processors buckets are held back, and leave as the next forward needs."""
    module, reference = seeded(0, Deep), seeded(0, Deep)
    group = dist.new_group([0, 1])
    backend = fxddp.backend(
        SMALL, first_bucket_mb=SMALL, inner="aot_eager", optimizer=adam(module), process_group=group, **OVERLAP
    )
    found = backend.lookup()
    assert found is not None
    found.speeds = Speeds(Machine(1e12, 1e12, 1e-7), Network(2, 1e6, 1e-5))
    model = torch.compile(module, backend=backend)
    usual, _ = compiled(reference, optimizer=adam(reference))
    for step in range(3):
        loss_of(model, step).backward()
        loss_of(usual, step).backward()
    last = backend.stats().last
    (site,) = backend.sites
    assert site.compilation.backward is not None
    program = site.compilation.backward.program
    buckets_of, count = program.plan.buckets, len(program.plan.buckets)
    sent = [bucket.nbytes for bucket in last.buckets]
    expect(sent == [buckets_of[i].nbytes for i in program.order], f"as planned: {sent}, {program.order}")
    layers = [site.names[buckets_of[i].grads[0].input] for i in program.order]
    expect(layers[0].startswith("layers.4"), f"the first to fill: {layers}")
    expect(layers[1:] == sorted(layers[1:], key=lambda name: name[:8]), f"then as the forward needs them: {layers}")
    launched = [i for i, (kind, _, _) in enumerate(last.events) if kind == "launch"]
    pieces = [i for i, (kind, _, _) in enumerate(last.events) if kind == "piece"]
    expect(launched[1] > pieces[count - 1], f"held back to the end: {last.events}")
    backend.synchronize()
    expect_equal(weights(module), weights(reference), "after the last step")


def test_buckets_leave_in_the_order_of_need(pool: Pool):
    pool.run(slow)


def other_orders(rank: int, world: int) -> None:
    """Ranks that would launch in different orders launch in that of the backward."""
    module = seeded(0, Deep)
    group = dist.new_group([0, 1])
    backend = fxddp.backend(
        SMALL, first_bucket_mb=SMALL, inner="aot_eager", optimizer=adam(module), process_group=group, **OVERLAP
    )
    found = backend.lookup()
    assert found is not None
    found.speeds = Speeds(Machine(1e12, 1e12, 1e-7), Network(2, 1e6 if rank else 1e15, 1e-5 if rank else 0.0))
    model = torch.compile(module, backend=backend)
    reference = seeded(0, Deep)
    usual, _ = compiled(reference, optimizer=adam(reference))
    for step in range(3):
        loss_of(model, step).backward()
        loss_of(usual, step).backward()
    (plan,) = backend.plans
    expect([b.nbytes for b in backend.stats().last.buckets] == [b.nbytes for b in plan.buckets], "as they fill")
    backend.synchronize()
    expect_equal(weights(module), weights(reference), "after the last step")


def test_ranks_with_other_orders(pool: Pool):
    pool.run(other_orders)


def failing(rank: int, world: int, where: str) -> None:
    """A wait or an update fails on one rank: no rank goes on with these weights, and a checkpoint does."""
    module = seeded(0, Deep)
    optimizer = adam(module)
    model, backend = compiled(module, optimizer=optimizer, **OVERLAP)
    for step in range(2):
        loss_of(model, step).backward()
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    loss_of(model, 2).backward()
    if rank == 0:
        owner, name = (Group, "wait") if where == "wait" else (torch.optim.AdamW, "step")
        with raising(owner, name, RuntimeError("the link is gone")):
            error = error_of(lambda: loss_of(model, 3), "a forward whose bucket is not used")
        expect("the link is gone" in str(error), f"says what: {error}")
        for what, call in (
            ("a forward", lambda: loss_of(model, 3)),
            ("a checkpoint", module.state_dict),
            ("synchronize", backend.synchronize),
        ):
            error = error_of(call, what)
            expect("new process group" in str(error) and "the link is gone" in str(error), f"{what} says so: {error}")
    else:
        error = error_of(lambda: loss_of(model, 3).backward(), "a step without the other rank")
        expect(isinstance(error, fxddp.RanksDisagree) and "the link is gone" in str(error), f"of rank 0: {error}")
    ends = []
    for more in ({"process_group": dist.new_group([0, 1]), **OVERLAP}, {"process_group": dist.new_group([0, 1])}):
        module = seeded(5, Deep)
        optimizer = adam(module)
        module.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        model, backend = compiled(module, optimizer=optimizer, **more)
        for step in (2, 3):
            loss_of(model, step).backward()
        backend.synchronize()
        ends.append(weights(module))
    expect_equal(ends[0], ends[1], "from the checkpoint on")


@pytest.mark.parametrize("where", ["wait", "update"])
def test_a_failure_is_never_forgotten(pool: Pool, where: str):
    pool.run(failing, where, discard=True)


def interrupted(rank: int, world: int, whom: tuple[int, ...]) -> None:
    """Ctrl-C while a bucket is waited for, on some ranks: the program catches it, and all weights come out right."""
    (module, _, late, backend), (reference, _, usual, _) = pairs(Deep, "aot_eager")
    expected, _, never, _ = pairs(Deep, "aot_eager")[1]
    for step in range(3):
        for model in (late, usual, never):
            loss_of(model, step).backward()
        with raising(Group, "wait", KeyboardInterrupt(), times=int(rank in whom)):
            if rank in whom:
                error = error_of(partial(loss_of, late, step))
                expect(isinstance(error, KeyboardInterrupt), f"as it was raised: {error}")
        with raising(Group, "wait", KeyboardInterrupt(), times=int(rank in whom)):
            loss = loss_of(usual, 10 + step)
            if rank in whom:
                expect(isinstance(error_of(loss.backward), KeyboardInterrupt), "as it was raised")
            else:
                loss.backward()
        loss_of(never, 10 + step).backward()
        loss_of(late, 10 + step).backward()
    backend.synchronize()
    expect_equal(weights(module), weights(expected), "interrupted in the next forward")
    expect_equal(weights(reference), weights(expected), "interrupted in the backward")


@pytest.mark.parametrize("whom", [(0,), (0, 1)])
def test_an_interrupt_in_a_wait(pool: Pool, whom: tuple[int, ...]):
    pool.run(interrupted, whom)


def wrapped(rank: int, world: int) -> None:
    module, reference = seeded(0, Deep), seeded(0, Deep)
    options: dict[str, Any] = {"bucket_cap_mb": SMALL, "inner": "aot_eager"}
    late = fxddp.DistributedDataParallel(module, optimizer=adam(module), **options, **OVERLAP)
    usual = fxddp.DistributedDataParallel(reference, optimizer=adam(reference), **options)
    for step in range(4):
        for model in (late, usual):
            with model.no_sync():
                loss_of(model, 20 + step).backward()
            loss_of(model, step).backward()
        if step == 2:
            with torch.no_grad():
                expect(torch.equal(late(data(5, 3, 8)), usual(data(5, 3, 8))), "an evaluation")
    moved = [kind for kind, _ in waits_in_forward(late.backend.stats().backwards[-3])]
    expect("wait" in moved, f"also what has accumulated is waited for in the next forward: {moved}")
    for model in (late, usual):
        with model.join():
            for step in range(2 + rank):
                loss_of(model, 30 + step).backward()
    late.backend.synchronize()
    expect_equal(weights(module), weights(reference), "after the last step")


def test_the_wrapper(pool: Pool):
    pool.run(wrapped)


def test_what_it_does_not_go_with():
    module = Mlp()
    given: dict[str, Any] = {"optimizer": adam(module), **OVERLAP}
    for options, said in (
        ({**OVERLAP}, "optimizer"),
        ({**given, "overlap": "next"}, "next_forward"),
        ({**given, "split": False}, "split=False"),
        ({**given, "algorithm": "ring"}, "ring"),
        ({**given, "comm_hook": fxddp.Int8()}, "Int8"),
    ):
        with pytest.raises(ValueError, match=said):
            fxddp.backend(**options)
    with pytest.raises(RuntimeError, match="overlap"):
        fxddp.backend(**given).register_comm_hook(None, lambda state, bucket: None)
