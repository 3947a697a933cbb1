"""The settings of a backend: validated once, in the units users give; bytes inside."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from . import _compat
from .adaptive import Adaptive
from .compression import Cast, Codec
from .int8 import Int8
from .passes.plan import Bucket
from .powersgd import PowerSGD

MIB = 1 << 20
INNER_COMPILERS = ("inductor", "aot_eager")
COMM_HOOKS = tuple(Cast.DTYPES)
CODECS = (PowerSGD, Int8, Adaptive)


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
    comm_hook: Callable[..., Any] | None = None
    codec: Codec | None = None
    caps: tuple[int, ...] = ()
    run_backward: bool = True

    @property
    def inductor(self) -> bool:
        """Whether inductor compiles."""
        return self.inner == "inductor"

    @property
    def wire(self) -> torch.dtype | None:
        """The dtype to which compiled code casts wider buckets, or None."""
        return None if self.codec is None else self.codec.wire

    def wire_bytes(self, bucket: Bucket, world_size: int) -> int:
        """Bytes that travel for a bucket, of which each rank sends 2(N-1)/N by a ring."""
        if self.codec is None:
            return bucket.nbytes
        return self.codec.nbytes([grad.shape for grad in bucket.grads], bucket.dtype, world_size)


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
    comm_hook: str | Codec | Callable[..., Any] | None = None,
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
    codec = _codec(comm_hook)
    return Settings(
        comm_hook=None if codec is not None else comm_hook,  # type: ignore[arg-type]  # then it is callable
        codec=codec,
        cap=_bytes("bucket_mb", bucket_mb),
        first_cap=_bytes("first_bucket_mb", first_bucket_mb),
        process_group=process_group,
        inner=inner,
        options=_inductor_options(inner, options, mode),
        caps=tuple(_bytes("bucket_cap_mb_list", size) for size in bucket_mb_list),
        **flags,
    )


def _codec(comm_hook: Any) -> Codec | None:
    """The codec that is meant; None for a hook."""
    if isinstance(comm_hook, Codec):
        return comm_hook
    if isinstance(comm_hook, str) and comm_hook in COMM_HOOKS:
        return Cast(comm_hook)
    names = ", ".join(f"fxddp.{codec.__name__}" for codec in CODECS)
    if isinstance(comm_hook, type) and issubclass(comm_hook, Codec):
        raise ValueError(f"comm_hook is the class {comm_hook.__name__}: give an object, {comm_hook.__name__}(…)")
    if comm_hook is not None and not callable(comm_hook):
        raise ValueError(
            f"comm_hook must be one of {COMM_HOOKS}, an object of {names}, a hook (state, bucket), or None, got "
            f"{comm_hook!r}"
        )
    return None


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
    *(
        f.name
        for f in fields(Settings)
        if f.name not in ("cap", "first_cap", "caps", "codec", "options", "run_backward")
    ),
    "first_bucket_mb",
)
"""Arguments of `fxddp.backend` that may stand among `torch.compile`'s `options` when the backend is used by name."""


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separates fxddp's own arguments from inductor's settings."""
    own = {key: value for key, value in options.items() if key in OWN_OPTIONS}
    return own, {key: value for key, value in options.items() if key not in OWN_OPTIONS}
