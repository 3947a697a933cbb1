"""The settings of a backend: validated once, in the units users give; bytes inside."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from . import _compat

MIB = 1 << 20
INNER_COMPILERS = ("inductor", "aot_eager")
COMM_HOOKS = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `fxddp.backend` was asked for; sizes in bytes."""

    cap: int
    first_cap: int
    process_group: dist.ProcessGroup | None
    inner: str | Callable[..., Any]
    options: Mapping[str, Any]
    split: bool
    init_sync: bool
    forward_sync_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    keep_graphs: bool
    comm_hook: str | Callable[..., Any] | None = None
    optimizer: Optimizer | None = None
    caps: tuple[int, ...] = ()
    run_backward: bool = True

    @property
    def inductor(self) -> bool:
        """Whether inductor compiles."""
        return self.inner == "inductor"


def make_settings(
    bucket_mb: float = 25,
    *,
    first_bucket_mb: float = 1,
    process_group: dist.ProcessGroup | None = None,
    inner: str | Callable[..., Any] = "inductor",
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    split: bool = True,
    init_sync: bool = True,
    forward_sync_buffers: bool = True,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    keep_graphs: bool = False,
    comm_hook: str | Callable[..., Any] | None = None,
    optimizer: Optimizer | None = None,
    bucket_mb_list: Sequence[float] = (),
) -> Settings:
    """Checks the arguments of `fxddp.backend`; each error names argument, value and what is allowed.

    `bucket_mb_list` is for `DistributedDataParallel` alone: sizes of the buckets one by one, in MiB.
    """
    flags = {
        "split": split,
        "init_sync": init_sync,
        "forward_sync_buffers": forward_sync_buffers,
        "find_unused_parameters": find_unused_parameters,
        "static_graph": static_graph,
        "keep_graphs": keep_graphs,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    if not callable(inner) and inner not in INNER_COMPILERS:
        raise ValueError(
            f"inner must be one of {INNER_COMPILERS} or a callable (graph, inputs) -> callable, got {inner!r}"
        )
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group must be a torch.distributed.ProcessGroup that this rank belongs to, or None for the "
            f"default "
            f"group, got {process_group!r}"
        )
    if comm_hook is not None and not callable(comm_hook) and comm_hook not in COMM_HOOKS:
        raise ValueError(f"comm_hook must be one of {COMM_HOOKS}, a hook (state, bucket), or None, got {comm_hook!r}")
    return Settings(
        comm_hook=comm_hook,
        optimizer=optimizer,
        cap=_bytes("bucket_mb", bucket_mb),
        first_cap=_bytes("first_bucket_mb", first_bucket_mb),
        process_group=process_group,
        inner=inner,
        options=_inductor_options(inner, options, mode),
        caps=tuple(_bytes("bucket_cap_mb_list", size) for size in bucket_mb_list),
        **flags,
    )


def _bytes(name: str, mib: float) -> int:
    if isinstance(mib, bool) or not isinstance(mib, (int, float)) or not math.isfinite(mib) or mib <= 0:
        raise ValueError(f"{name} must be a positive, finite number of MiB, got {mib!r}")
    return max(1, int(mib * MIB))


def _inductor_options(inner: object, options: Mapping[str, Any] | None, mode: str | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"options must be a mapping of inductor settings or None, got {options!r}")
    merged = dict(options or {})
    if mode not in (None, "default"):
        if inner != "inductor":
            raise ValueError(f"mode={mode!r} is for inner='inductor', but inner={inner!r}")
        try:
            merged = {**_compat.inductor_mode(str(mode)), **merged}
        except RuntimeError as error:
            raise ValueError(f"mode={mode!r} is not one of torch.compile's: {error}") from None
    if merged and inner != "inductor":
        raise ValueError(f"options {sorted(merged)} are inductor's, but inner={inner!r}")
    known = _compat.inductor_config_keys() if merged else frozenset()
    merged = {key.replace("-", "_"): value for key, value in merged.items()}
    unknown = sorted(set(merged) - known)
    if unknown:
        raise ValueError(
            f"options {unknown} are neither fxddp's ({', '.join(OWN_OPTIONS)}) nor settings of torch._inductor.config"
        )
    if merged.get("triton.cudagraphs"):
        raise ValueError(
            f"triton.cudagraphs=True (mode={mode!r}) is not supported yet: all-reduces are launched between CUDA "
            f"graphs' "
            "pieces; use a mode without CUDA graphs, such as 'default' or 'max-autotune-no-cudagraphs'"
        )
    return merged


OWN_OPTIONS = (
    "bucket_mb",
    *(f.name for f in fields(Settings) if f.name not in ("cap", "first_cap", "caps", "options", "run_backward")),
    "first_bucket_mb",
)
"""Arguments of `fxddp.backend` that may stand among `torch.compile`'s `options` when the backend is used by name."""


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separates fxddp's own arguments from inductor's settings."""
    own = {key: value for key, value in options.items() if key in OWN_OPTIONS}
    return own, {key: value for key, value in options.items() if key not in OWN_OPTIONS}
