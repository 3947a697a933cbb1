"""The ways to train that benchmarks compare, each built anew and checked before anything is timed.

A mode is a name of `MODES`, and may end in a bucket size of its own: `ddp@25` has buckets of 25 MiB, whatever the
others have.

Note [one copy of the models per mode]
Dynamo caches compiled code per code object. Were `torch.compile(m)` measured first and `torch.compile(DDP(m2))` of the
same class after it, the second would be served the first's graph, uncut, and DDPOptimizer would never run. Each mode
therefore executes `models.py` anew: equal weights and inputs, code objects of its own.
"""

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

MODES = {
    "local": "torch.compile, no communication",
    "ddp": "DDP, eager",
    "ddp_compile": "torch.compile(DDP)",
    "fxddp": "fxddp",
    "fxddp_unsplit": "fxddp, backward not split",
}
USUAL_MODES = tuple(MODES)
TORCH_HOOKS = ("fp16", "powersgd")  # what torch has a hook for that runs on a CPU
HOOKED = {f"fxddp_{name}": name for name in ("fp16", "bf16", "int8", "powersgd")}
MODES |= {mode: f"fxddp, {name}" for mode, name in HOOKED.items()}
for _hook in TORCH_HOOKS:
    MODES |= {f"ddp_{_hook}": f"DDP, torch's {_hook} hook", f"fxddp_hook_{_hook}": f"fxddp, torch's {_hook} hook"}
    HOOKED |= {f"ddp_{_hook}": _hook, f"fxddp_hook_{_hook}": _hook}
MODES |= {"fxddp_ring": "fxddp, reduce-scatter and all-gather", "fxddp_lanes": "fxddp, two groups in turns"}
MODES |= {"fxddp_hierarchical": "fxddp, inside and across nodes", "fxddp_optimizer": "fxddp, optimizer in backward"}
NEXT_FORWARD = "fxddp_next_forward"
MODES |= {NEXT_FORWARD: "fxddp, waits in the next forward"}
IN_BACKWARD = ("fxddp_optimizer", NEXT_FORWARD)
MODES |= {"ddp_static": "DDP, eager, static graph", "ddp_copies": "DDP, eager, gradients copied out of buckets"}
MODES |= {
    "ddp_uncut": "torch.compile(DDP), forward not cut",
    "ddp_python_reducer": "torch.compile(DDP), Python reducer",
}
AUTO = "fxddp_auto"
MODES |= {AUTO: 'fxddp, "auto"'}
EAGER_BASELINE = "local_eager"
MODES |= {EAGER_BASELINE: "eager, no communication"}
MEASURING = (AUTO, NEXT_FORWARD)
"""Modes that are planned for the network they find; see Note [sweep]."""
DYNAMO: dict[str, dict[str, Any]] = {
    "ddp_uncut": {"optimize_ddp": False},
    "ddp_python_reducer": {"optimize_ddp": "python_reducer"},
}
"""Dynamo's settings while a mode is built and while it steps, if they are not the usual ones."""
STOCK = frozenset(mode for mode in MODES if mode.startswith("ddp"))
EAGER = STOCK - {"ddp_compile", *DYNAMO} | {EAGER_BASELINE}
COMPILED = frozenset(MODES) - EAGER
BASELINE = "local"
RIVAL = "ddp_compile"
FIXED = "fxddp"
LOCAL = (BASELINE, EAGER_BASELINE)
"""Modes that do not communicate."""
UNSIZED = (*LOCAL, AUTO)
"""Modes without a bucket size to choose."""
TORCH_BUCKET_MB = 25  # DistributedDataParallel's default
NODES = 2
LEARNING_RATE = 1e-4
CHECKED_RATE = 1024.0  # of the warm-up of `fxddp_optimizer`: so large that the weights show the gradients
MIB = 2**20
WARM_UP_STEPS = 3
# Per tensor, largest difference over largest gradient. Another order of fp32 sums makes about 1e-5, a wrong mode 1.
GRADIENT_TOLERANCE = 1e-3
# What travels, for fxddp's modes; for DDP's torch's hooks, where it has one that runs on a CPU. Such gradients are
# compared with exact ones: difference over size of the whole gradient. PowerSGD's only before it starts.
COMM_HOOKS = {"fp16": 2e-3, "bf16": 1e-2, "int8": 3e-2, "powersgd": math.inf}


class BenchmarkError(Exception):
    """A rank failed, stalled or computed wrong gradients; the message holds what it said."""


def split_size(mode: str) -> tuple[str, float | None]:
    """The name of a mode and its own bucket size in MiB, None where it has none.

    Raises:
        ValueError: what stands behind `@` is no size.
    """
    name, at, size = mode.partition("@")
    if not at:
        return name, None
    try:
        mib = float(size)
    except ValueError:
        mib = math.nan
    if not 0 < mib < math.inf:
        raise ValueError(f"mode {mode!r}: expected a number of MiB > 0 after '@', such as {name}@25")
    return name, mib


def name_of(mode: str) -> str:
    """The name of a mode without its bucket size."""
    return split_size(mode)[0]


def title(mode: str) -> str:
    """What tables call a mode."""
    name, mib = split_size(mode)
    return MODES[name] if mib is None else f"{MODES[name]}, {mib:g} MiB"


def check_mode(mode: str) -> None:
    """ValueError for what is no mode."""
    name, mib = split_size(mode)
    if name not in MODES:
        raise ValueError(
            f"got mode {mode!r}, expected one of {', '.join(MODES)}, with or without '@' and a size in MiB"
        )
    if mib is not None and mode != f"{name}@{mib:g}":
        raise ValueError(f"got mode {mode!r}, expected {name}@{mib:g}: one name for each")
    if mib is not None and name in UNSIZED:
        raise ValueError(f"got mode {mode!r}, but {name} has no bucket size to choose")


@dataclass(frozen=True, slots=True)
class Run:
    """One mode, ready to step: the plain module that owns the parameters, and the callable that is timed."""

    module: nn.Module
    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    optimizer: torch.optim.Optimizer
    backend: Any  # the fxddp.Backend of the fxddp modes, else None
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext  # of each step


def fresh_models(tag: str) -> ModuleType:
    """`models.py` executed anew; see Note [one copy of the models per mode]."""
    name = "benchmarks_models_" + re.sub(r"\W", "_", tag)
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("models.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo imports by name what compiled code refers to
    spec.loader.exec_module(module)
    return module


def codec(name: str | None) -> Any:
    """The `comm_hook` of fxddp's modes."""
    import fxddp

    objects: dict[str | None, Callable[[], Any]] = {
        "int8": fxddp.Int8,
        "powersgd": lambda: fxddp.PowerSGD(4, start_iter=WARM_UP_STEPS - 1),
    }
    return objects[name]() if name in objects else name


def register_hook(on: Any, name: str | None) -> None:
    """torch's own hook of that name, if there is one."""
    if name == "fp16":
        on.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=WARM_UP_STEPS - 1)
        on.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def build(mode: str, model: str, *, rank: int, bucket_mb: float, comm_hook: str | None = None) -> Run:
    """The model in one mode; weights are the same for all modes and ranks, inputs differ between ranks.

    Args:
        mode: its own bucket size, if it has one, goes before `bucket_mb`.
        model: of `MODELS`.
        rank: of this process.
        bucket_mb: MiB of a bucket.
        comm_hook: of `COMM_HOOKS`.
    """
    module, inputs = fresh_models(mode).make(model, rank)
    name, own_mb = split_size(mode)
    bucket_mb = own_mb or bucket_mb
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    backend = None
    call: Any
    if name in LOCAL:
        call = torch.compile(module) if name in COMPILED else module
    elif name in STOCK or name == "reference":
        with surroundings(name):
            call = DistributedDataParallel(
                module,
                # None asks for the default: only then does torch make the first bucket a small one, as fxddp does.
                bucket_cap_mb=None if bucket_mb == TORCH_BUCKET_MB else bucket_mb,
                gradient_as_bucket_view=name != "ddp_copies",
                static_graph=name == "ddp_static",
            )
        register_hook(call, comm_hook)
        if name in COMPILED:
            call = torch.compile(call)
    else:
        import fxddp  # here, so that the other modes can be measured without it

        hooks = name.startswith("fxddp_hook_")
        options: dict[str, Any] = {"split": name != "fxddp_unsplit", "comm_hook": None if hooks else codec(comm_hook)}
        if name == "fxddp_ring":
            options["algorithm"] = "ring"
        if name == "fxddp_lanes":
            options["process_group"] = [dist.new_group() for _ in range(2)]
        if name == "fxddp_hierarchical":
            options["device_mesh"] = init_device_mesh("cpu", (NODES, dist.get_world_size() // NODES))
        if name in IN_BACKWARD:
            options["optimizer"] = optimizer
        if name == NEXT_FORWARD:
            options["overlap"] = "next_forward"
        if name in MEASURING:
            options["process_group"] = dist.new_group()
        backend = fxddp.backend("auto" if name == AUTO else bucket_mb, **options)
        if hooks:
            register_hook(backend, comm_hook)
        call = torch.compile(module, backend=backend)
    return Run(module, call, inputs, optimizer, backend, partial(surroundings, name) if name in DYNAMO else nullcontext)


@contextmanager
def surroundings(name: str) -> Iterator[None]:
    """What a mode of stock DDP, by its name, has around it while it is built and while it steps."""
    with ExitStack() as stack:
        if name in DYNAMO:
            stack.enter_context(dynamo_config.patch(DYNAMO[name]))
        if name == "ddp_python_reducer":  # its all-reduces are traced by compiled autograd, and fused
            stack.enter_context(compiled_autograd._enable(torch.compile))  # noqa: SLF001
            # DDP sets this for good; what other modes compile afterwards is to be as before.
            stack.enter_context(inductor_config.patch(_fuse_ddp_communication=True))
        yield


def averaged_gradients(run: Run, *, by_hand: bool) -> dict[str, Tensor]:
    """Copies of the gradients; `by_hand` averages them over the ranks first, for modes that do not communicate."""
    found = {}
    for name, parameter in run.module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.detach().to_dense().clone()
        if by_hand:
            dist.all_reduce(found[name])
            found[name] /= dist.get_world_size()
    return found


def check_gradients(
    mode: str, found: dict[str, Tensor], reference: dict[str, Tensor], comm_hook: str | None = None
) -> float:
    """The largest relative difference from DDP's gradients; BenchmarkError where it is no rounding."""
    worst = 0.0
    if comm_hook is not None:
        exact = torch.cat([expected.flatten() for expected in reference.values()])
        worst = ((torch.cat([found[name].flatten() for name in reference]) - exact).norm() / exact.norm()).item()
        if not worst <= COMM_HOOKS[comm_hook]:
            raise BenchmarkError(
                f"mode {mode}: gradients differ from exact ones by {worst:.1e} of their size, expected at most "
                f"{COMM_HOOKS[comm_hook]:.0e} with {comm_hook}; a wrong mode is not measured"
            )
        return worst
    for name, expected in reference.items():
        difference = ((found[name] - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()
        if not difference <= GRADIENT_TOLERANCE:
            raise BenchmarkError(
                f"mode {mode}: gradient of {name} differs from DDP's by {difference:.1e} of its largest element, "
                f"expected at most {GRADIENT_TOLERANCE:.0e}; a wrong mode is not measured"
            )
        worst = max(worst, difference)
    return worst
