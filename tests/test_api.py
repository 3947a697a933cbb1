"""The public surface: arguments, names, looking up a backend, running alone, and what outlives what."""

from __future__ import annotations

import copy
import gc
import io
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fxddp
from tests.live.lab import (
    SMALL,
    Mlp,
    Recurrent,
    average,
    buckets,
    compiled,
    data,
    error_of,
    expect,
    expect_equal,
    gradients,
    launches,
    local,
    loss_of,
    register_name,
    seeded,
    small_backend,
)
from tests.live.pool import Pool


@pytest.fixture(autouse=True)
def forget_compiled_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_public_names():
    assert set(fxddp.__all__) == {
        "Adaptive",
        "Backend",
        "BackwardRecord",
        "DistributedDataParallel",
        "Explanation",
        "Int8",
        "PowerSGD",
        "RanksDisagree",
        "Stats",
        "backend",
        "backend_of",
        "explain",
        "no_sync",
    }
    assert all(hasattr(fxddp, name) for name in fxddp.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", fxddp.__version__)


# ---- arguments -------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"bucket_mb": 0}, r"bucket_mb must be a positive, finite number of MiB, or 'auto', got 0"),
    ({"bucket_mb": -1.5}, r"bucket_mb .* got -1\.5"),
    ({"bucket_mb": float("inf")}, r"bucket_mb .* got inf"),
    ({"bucket_mb": float("nan")}, r"bucket_mb .* got nan"),
    ({"bucket_mb": "25"}, r"bucket_mb .* got '25'"),
    ({"bucket_mb": True}, r"bucket_mb .* got True"),
    ({"bucket_mb": None}, r"bucket_mb .* got None"),
    ({"first_bucket_mb": 0}, r"^first_bucket_mb .* got 0"),
    ({"process_group": "gloo"}, r"process_group must be a torch\.distributed\.ProcessGroup .* got 'gloo'"),
    ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, r"process_group .* that this rank belongs to"),
    ({"inner": "eager"}, r"inner must be one of \('inductor', 'aot_eager'\) or a callable .* got 'eager'"),
    ({"inner": None}, r"inner .* got None"),
    ({"split": 1}, r"split must be True or False, got 1"),
    ({"init_sync": "yes"}, r"init_sync must be True or False, got 'yes'"),
    ({"forward_sync_buffers": 0}, r"forward_sync_buffers must be True or False, got 0"),
    ({"find_unused_parameters": None}, r"find_unused_parameters must be True or False, got None"),
    ({"static_graph": 0}, r"static_graph must be True or False, got 0"),
    ({"keep_graphs": 2}, r"keep_graphs must be True or False, got 2"),
    ({"options": [("max_autotune", True)]}, r"options must be a mapping of inductor settings or None, got \["),
    ({"options": {"bucket_md": 1}}, r"options \['bucket_md'\] are neither fxddp's \(bucket_mb, .*\) nor settings"),
    ({"options": {"max_autotune": True}, "inner": "aot_eager"}, r"options \['max_autotune'\] .* inner='aot_eager'"),
    ({"mode": "fast"}, r"mode='fast' is not one of torch\.compile's"),
    ({"mode": "max-autotune-no-cudagraphs", "inner": "aot_eager"}, r"mode=.* inner='aot_eager'"),
    ({"mode": "reduce-overhead"}, r"mode='reduce-overhead'.* is not supported yet.* without CUDA graphs"),
    ({"mode": "max-autotune"}, r"mode='max-autotune'.* is not supported yet.* without CUDA graphs"),
    ({"options": {"triton.cudagraphs": True}}, r"triton\.cudagraphs=True .* is not supported yet"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_refused_argument_is_named_with_its_value(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        fxddp.backend(**arguments)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        fxddp.backend(bucket_cap_mb=25)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        fxddp.backend(25, 1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"bucket_mb": 0.0000001},
        {"bucket_mb": 25, "first_bucket_mb": 1.5},
        {"find_unused_parameters": True, "static_graph": True},
        {"mode": "default", "inner": "aot_eager"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": "max-autotune", "options": {"triton.cudagraphs": False}},
        {"options": {"max-autotune": True}},  # as torch.compile spells it, too
    ],
)
def test_accepted_arguments(arguments: dict[str, Any]):
    backend = fxddp.backend(**arguments)
    assert isinstance(backend, fxddp.Backend)
    assert backend.plans == ()
    assert backend.stats() == fxddp.Stats((), 0)
    with pytest.raises(RuntimeError, match="no backward has run"):
        _ = backend.stats().last


def test_repr_tells_the_settings():
    assert repr(fxddp.backend(12.5, inner="aot_eager", split=False)) == (
        "<fxddp backend: buckets of 12.5 MiB, inner='aot_eager', split=False>"
    )


def test_options_of_torch_compile_reach_inductor_but_are_not_fxddps(alone: None):
    x = torch.randn(2, 8)
    with pytest.raises(Exception, match=r"options \['bucket_mb'\] belong to fxddp\.backend\(…\)"):
        torch.compile(Mlp(), backend=fxddp.backend(inner="aot_eager"), options={"bucket_mb": 1})(x)
    with pytest.raises(Exception, match=r"mode='reduce-overhead'.* is not supported yet"):
        torch.compile(Mlp(), backend=fxddp.backend(), mode="reduce-overhead")(x)
    with pytest.raises(Exception, match=r"options \['max_autotune'\] are inductor's, but inner='aot_eager'"):
        torch.compile(Mlp(), backend=fxddp.backend(inner="aot_eager"), options={"max_autotune": True})(x)


# ---- by name ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def named() -> None:
    register_name()


def test_by_name(named: None, alone: None):
    options: Any = {"bucket_mb": SMALL, "first_bucket_mb": SMALL, "inner": "aot_eager"}
    first, second = Mlp(), Mlp()
    model = torch.compile(first, backend="fxddp", options=options)
    loss_of(model, 0).backward()
    backend = fxddp.backend_of(model)
    assert launches(backend) == [buckets(backend)] != [1]
    expect_equal(gradients(first), local(first, 0), "gradients")
    again = torch.compile(second, backend="fxddp", options=dict(reversed(options.items())))
    assert fxddp.backend_of(again) is backend
    other = torch.compile(second, backend="fxddp", options=options | {"bucket_mb": 1})
    assert fxddp.backend_of(other) is not backend


def test_by_name_with_settings_of_inductor(named: None):
    model = torch.compile(
        Mlp(), backend="fxddp", options={"bucket_mb": 2, "max_autotune": True, "epilogue_fusion": False}
    )
    settings = fxddp.backend_of(model).settings
    assert settings.cap == 2 << 20
    assert settings.options == {"max_autotune": True, "epilogue_fusion": False}
    mode = torch.compile(Mlp(), backend="fxddp", mode="max-autotune-no-cudagraphs")
    assert fxddp.backend_of(mode).settings.options["max_autotune"] is True


def test_by_name_with_a_wrong_option(named: None):
    with pytest.raises(ValueError, match=r"options \['bucket_md'\] are neither fxddp's"):
        torch.compile(Mlp(), backend="fxddp", options={"bucket_md": 2})


def nothing_compiled_by_name(rank: int, world: int) -> None:
    register_name()
    module = seeded(0, Recurrent)
    options: Any = {"inner": "aot_eager", "bucket_mb": 3}
    model = torch.compile(module, backend="fxddp", options=options)
    for i in range(2):
        module.zero_grad()
        loss_of(model, i).backward()
        expect_equal(gradients(module), average(local(module, i)), f"step {i}", tol=1e-6)
    expect(not fxddp.backend_of(model).plans, "something was compiled: this tests nothing")


def test_by_name_with_a_model_of_which_nothing_is_compiled(pool: Pool):
    pool.run(nothing_compiled_by_name)


# ---- backend_of ------------------------------------------------------------------------------------------------------


def test_backend_of_whatever_was_compiled():
    backend, other = fxddp.backend(inner="aot_eager"), fxddp.backend(inner="aot_eager")
    assert fxddp.backend_of(torch.compile(Mlp(), backend=backend)) is backend
    assert fxddp.backend_of(torch.compile(nn.Sequential(nn.Linear(8, 4)), backend=backend, dynamic=True)) is backend
    in_place = Mlp()
    in_place.compile(backend=backend)
    assert fxddp.backend_of(in_place) is backend
    assert fxddp.backend_of(torch.compile(torch.square, backend=backend, fullgraph=True)) is backend

    @torch.compile(backend=backend)
    def step(x: Tensor) -> Tensor:
        return x + 1

    assert fxddp.backend_of(step) is backend
    regional = nn.Sequential(nn.Linear(8, 8), Mlp())
    regional[1].compile(backend=other)
    assert fxddp.backend_of(regional) is other
    inner: Any = torch.compile(Mlp(), backend=backend)
    assert fxddp.backend_of(nn.ModuleList([nn.Linear(2, 2), inner])) is backend


@pytest.mark.parametrize(
    "model", [Mlp(), torch.compile(Mlp(), backend="aot_eager"), torch.compile(Mlp()), len, None], ids=repr
)
def test_backend_of_something_else(model: Any):
    with pytest.raises(ValueError, match=r"is not compiled with fxddp: pass what torch\.compile\(…, backend=fxddp"):
        fxddp.backend_of(model)
    with pytest.raises(ValueError, match="is not compiled with fxddp"), fxddp.no_sync(model):
        pass


# ---- without other processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [True, False])
def test_without_a_process_group_it_trains_alone(split: bool):
    module = Mlp()
    model, backend = compiled(module, split=split)
    for i in range(2):
        module.zero_grad()
        with backend.no_sync() if i else fxddp.no_sync(model):
            loss_of(model, i).backward()
        expect_equal(gradients(module), local(module, i), f"step {i}")
    assert backend.stats().total == 0
    assert buckets(backend) > 1


def test_a_group_of_one(alone: None):
    module = Mlp()
    model, backend = compiled(module)
    loss_of(model, 0).backward()
    expect_equal(gradients(module), local(module, 0), "gradients")
    record = backend.stats().last
    assert record.sync
    assert record.launches == record.pieces == buckets(backend) > 1
    assert record.bytes == sum(p.nbytes for p in module.parameters())
    assert record.uncovered == ()
    assert record.uncovered_bytes == record.uncovered_launches == 0
    kinds = [kind for kind, _, _ in record.events]
    assert kinds == ["piece", "launch"] * record.launches + ["wait"] * record.launches
    assert [index for kind, index, _ in record.events if kind == "launch"] == list(range(record.launches))
    times = [seconds for _, _, seconds in record.events]
    assert times == sorted(times)


@pytest.mark.parametrize("size", ["2", "16"])
def test_a_launcher_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch, size: str):
    monkeypatch.setenv("WORLD_SIZE", size)
    model, _ = compiled(Mlp())
    with pytest.raises(RuntimeError, match=rf"started {size} processes .* no process group.*\.init_process_group"):
        loss_of(model, 0)
    with torch.no_grad():
        loss_of(model, 0)  # nothing to synchronise
    monkeypatch.setenv("WORLD_SIZE", "1")
    loss_of(model, 0).backward()


def test_records_of_old_backwards_are_dropped(alone: None):
    model, backend = compiled(nn.Linear(8, 2))
    for _ in range(70):
        loss_of(model, 0).backward()
    assert backend.stats().total == 70
    assert len(backend.stats().backwards) == 64


# ---- inner compilers -------------------------------------------------------------------------------------------------


def test_a_callable_compiles_forward_and_every_piece(alone: None):
    graphs: list[torch.fx.GraphModule] = []

    def inner(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(gm)
        assert len(inputs) == len(gm.graph.find_nodes(op="placeholder"))
        return gm

    module = Mlp()
    model, backend = compiled(module, inner=inner)
    loss_of(model, 0).backward()
    expect_equal(gradients(module), local(module, 0), "gradients")
    assert len(graphs) == 1 + backend.stats().last.pieces


# ---- what outlives what ----------------------------------------------------------------------------------------------


def train_and_forget(rank: int, world: int, inner: str) -> None:
    """Models come and go while backend and compiled code live on."""
    backend = small_backend(inner=inner)
    kept: list[Any] = []
    for k in range(8):
        module = seeded(k, Mlp)
        model = torch.compile(module, backend=backend)
        if k % 3 == 2:
            with backend.no_sync():
                loss_of(model, k).backward()
        for i in range(2):
            module.zero_grad()
            loss_of(model, i).backward()
            expected = average(local(module, i))
            expect_equal(gradients(module), expected, f"model {k}, step {i}", tol=1e-5)
        if k % 3 == 0:  # the last that is known of it are gradients that were not synchronised
            with backend.no_sync():
                loss_of(model, k).backward()
        alive = [weakref.ref(tensor) for p in module.parameters() for tensor in (p, p.grad)]
        del module, model
        gc.collect()
        if rank:  # what takes a dead parameter's address is not the next model here
            kept += [nn.Parameter(torch.empty(0)) for _ in range(100)]
        left = sum(reference() is not None for reference in alive)
        expect(not left, f"{left} of {len(alive)} parameters and gradients of model {k} are still alive")
    expect(len(backend.plans) == 1, f"{len(backend.plans)} compilations for one class of models")
    expect(not backend.watch._refs, f"{len(backend.watch._refs)} parameters are still watched")
    expect(not backend.known_tensors(), "modules are still known")
    sizes = {
        "bindings": len(backend.sites[0]._bindings._known),
        "modules": len(backend.modules),
        "tensors met": len(backend.replica._met),
    }
    expect(max(sizes.values()) <= 1, f"what was noted of dead models stays: {sizes}")


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_deleted_model_is_freed(pool: Pool, inner: str):
    pool.run(train_and_forget, inner, timeout=180)


def copy_save_and_reset(rank: int, world: int, path: str) -> None:
    module = seeded(0, Mlp)
    model, backend = compiled(module)
    loss_of(model, 0).backward()

    # A copy trains on its own: its gradients are averaged, the original's stay.
    before = gradients(module)
    twin = copy.deepcopy(model)
    expect(fxddp.backend_of(twin) is backend, "a copy has another backend")
    twin.zero_grad()
    loss_of(twin, 1).backward()
    expect_equal(gradients(twin._orig_mod), average(local(module, 1)), "copy")
    expect_equal(gradients(module), before, "original")
    twin_of_raw = copy.deepcopy(module)
    twin_of_raw.zero_grad()
    expect_equal(local(twin_of_raw, 2), local(module, 2), "eager")
    expect(not any(p._post_accumulate_grad_hooks for p in twin_of_raw.parameters()), "a copy took hooks along")

    # Whole modules and state are saved and loaded as before compiling.
    memory = io.BytesIO()
    torch.save(module, memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=False)
    expect_equal(dict(loaded.named_parameters()), dict(module.named_parameters()), "loaded module")
    anew, other = compiled(loaded)
    loss_of(anew, 3).backward()
    expect_equal(gradients(loaded), average(local(loaded, 3)), "loaded module")
    expect(launches(other) == [buckets(other)], f"loaded module: {launches(other)}")
    file = Path(f"{path}.{rank}")
    torch.save(model.state_dict(), file)
    model.load_state_dict(torch.load(file))

    # After a reset everything compiles again, on the same backend and on a new one.
    for attempt in range(2):
        torch._dynamo.reset()
        module.zero_grad()
        loss_of(model, 4).backward()
        expect_equal(gradients(module), average(local(module, 4)), f"reset {attempt}")
    torch._dynamo.reset()
    anew, other = compiled(module)
    module.zero_grad()
    loss_of(anew, 5).backward()
    expect_equal(gradients(module), average(local(module, 5)), "another backend")
    expect(launches(other) == [buckets(other)], f"another backend: {launches(other)}")


def test_copying_saving_and_compiling_again(pool: Pool, tmp_path: Path):
    pool.run(copy_save_and_reset, str(tmp_path / "state"), timeout=120)


def refuse_without_group(rank: int, world: int) -> str:
    model, _ = compiled(Mlp())
    dist.destroy_process_group()
    import os

    os.environ["WORLD_SIZE"] = str(world)
    return str(error_of(lambda: loss_of(model, 0)))


def test_a_destroyed_group_is_not_taken_for_none(pool: Pool):
    for message in pool.run(refuse_without_group, discard=True):
        assert "started 2 processes" in message


@pytest.mark.parametrize("part", [False, True])
def test_checkpoints_have_the_plain_names(part: bool):
    """Of a compiled module, or of one with a compiled part; with and without torch's prefix they can be loaded."""
    plain = seeded(0, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    compiled_part: Any = torch.compile(plain, backend=small_backend())
    model: Any = nn.ModuleDict({"body": compiled_part}) if part else compiled_part
    prefix = "body." if part else ""
    state = model.state_dict()
    assert list(state) == [prefix + name for name in plain.state_dict()]
    fresh = seeded(1, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    fresh.load_state_dict({name.removeprefix(prefix): value for name, value in state.items()})
    for middle in ("", "_orig_mod."):
        other = {prefix + middle + name: value + 1 for name, value in plain.state_dict().items()}
        model.load_state_dict(other)
        assert all(torch.equal(plain.state_dict()[n], other[prefix + middle + n]) for n in plain.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


@pytest.mark.parametrize("part", [False, True])
def test_torchs_checkpoint_functions(part: bool):
    """`torch.distributed.checkpoint.state_dict` gives plain names as well, and loads what it gave."""

    def trained(seed: int) -> tuple[Any, Any]:
        model: Any = torch.compile(seeded(seed, lambda: nn.Sequential(nn.Linear(4, 4))), backend=small_backend())
        model = nn.Sequential(model) if part else model
        optimizer = torch.optim.AdamW(model.parameters())
        model(data(seed, 2, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, others) = trained(0), trained(1)
    state, of_optimizer = get_state_dict(model, optimizer)
    names = ["0.0.weight", "0.0.bias"] if part else ["0.weight", "0.bias"]
    assert list(state) == names == list(of_optimizer["state"])
    set_state_dict(other, others, model_state_dict=dict(state), optim_state_dict=of_optimizer)
    for loaded, saved in zip(other.state_dict().items(), model.state_dict().items(), strict=True):
        assert loaded[0] == saved[0] and torch.equal(loaded[1], saved[1])
    moments = zip(others.state.values(), optimizer.state.values(), strict=True)
    assert all(torch.equal(loaded["exp_avg"], saved["exp_avg"]) for loaded, saved in moments)


def test_a_model_that_slices_its_modules_stays_one_graph():
    """A slice of a ModuleList is a module being set while Dynamo traces: what fxddp does there must be traceable."""

    class Sliced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers[:2]:
                x = layer(x)
            return x

    torch._dynamo.reset()
    torch.compile(Sliced(), backend=fxddp.backend(inner="aot_eager"), fullgraph=True)(torch.randn(2, 4))
