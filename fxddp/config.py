"""The settings of a backend: validated once, in the units users give; bytes inside."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from . import _compat
from .adaptive import Adaptive
from .cast import Cast
from .compression import Codec
from .group import GroupReference
from .int8 import Int8
from .passes.compress import narrows
from .passes.plan import Bucket, GradSpec
from .passes.tables import traffic
from .powersgd import PowerSGD
from .transport import ALGORITHMS

MIB = 1 << 20
AUTO = "auto"
NEXT_FORWARD = "next_forward"
USUAL_MB, FIRST_MB = 25.0, 1.0
INNER_COMPILERS = ("inductor", "aot_eager")
COMM_HOOKS = tuple(Cast.DTYPES)
CODECS = (PowerSGD, Int8, Adaptive)


@dataclass(frozen=True, slots=True)
class Settings:
    """What `fxddp.backend` was asked for; sizes in bytes.

    Without `compile_pieces` graphs are planned, not compiled. With `auto` the buckets of graphs have other sizes than
    `cap`, which is for what no graph packs.
    """

    cap: int
    first_cap: int
    process_group: GroupReference | None
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
    optimizer: Optimizer | None = None
    algorithm: str = "all_reduce"
    lanes: tuple[GroupReference, ...] = ()
    mesh: DeviceMesh | None = None
    caps: tuple[int, ...] = ()
    auto: bool = False
    overlap: str | None = None
    compile_pieces: bool = True

    @property
    def inductor(self) -> bool:
        """Whether inductor compiles."""
        return self.inner == "inductor"

    @property
    def measures(self) -> bool:
        """Whether plans are made for a network that the ranks measure."""
        return self.auto or self.overlap is not None

    @property
    def forward_size(self) -> int:
        """Bytes of parameters, about, that a piece of a forward is the first to read, if waits are to move into it."""
        return max(1, self.cap // 2)

    @property
    def wire(self) -> torch.dtype | None:
        """The dtype to which compiled code casts wider buckets, or None."""
        return None if self.codec is None else self.codec.wire

    @property
    def allows_rows(self) -> bool:
        """Whether tables may travel in rows; what sends buckets in another way than by an all-reduce sends all of them.

        So does a graph with its collectives inside, as it must do the same for all numbers of rows.
        """
        codec_takes = self.codec is None or self.codec.takes_rows
        return self.algorithm == "all_reduce" and self.split and self.comm_hook is None and codec_takes

    def row_bytes(self, grad: GradSpec, world_size: int) -> int | None:
        """Bytes that travel for a gradient as `wire_bytes` counts them, if it travels in rows."""
        if grad.rows is None or not self.allows_rows or world_size < 2:
            return None
        return traffic(grad.rows, grad, world_size, self.wire_dtype(grad).itemsize)

    def wire_dtype(self, values: GradSpec | Bucket) -> torch.dtype:
        """The dtype in which a gradient or a bucket travels, if compiled code casts it."""
        return self.wire if self.wire is not None and narrows(values.dtype, self.wire) else values.dtype

    def wire_bytes(self, bucket: Bucket, world_size: int) -> int:
        """Bytes that travel for a bucket, of which each rank sends 2(N-1)/N by a ring."""
        in_rows = [self.row_bytes(grad, world_size) for grad in bucket.grads]
        whole = [grad for grad, rows in zip(bucket.grads, in_rows, strict=True) if rows is None]
        nbytes = sum(rows for rows in in_rows if rows is not None)
        if self.codec is None:
            return nbytes + sum(grad.nbytes for grad in whole)
        return nbytes + self.codec.nbytes([grad.shape for grad in whole], bucket.dtype, world_size)


def make_settings(
    bucket_mb: float | str = USUAL_MB,
    *,
    first_bucket_mb: float = FIRST_MB,
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
    device_mesh: DeviceMesh | None = None,
    algorithm: str | None = None,
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
    optimizer: Optimizer | None = None,
    overlap: str | None = None,
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
    group, lanes = _groups(process_group)
    if device_mesh is not None:
        group = _group_of(device_mesh, process_group)
    algorithm = _algorithm(algorithm, device_mesh, lanes)
    auto = bucket_mb == AUTO
    if auto and first_bucket_mb != FIRST_MB:
        raise ValueError(
            f"bucket_mb={AUTO!r} chooses the first bucket too: leave first_bucket_mb={first_bucket_mb} out"
        )
    codec = _codec(comm_hook)
    if (lanes or algorithm != "all_reduce") and callable(comm_hook):
        raise ValueError(
            f"comm_hook starts its own collectives: leave it out, or algorithm={algorithm!r} and process_group lists"
        )
    _check_overlap(overlap, optimizer, split=split, algorithm=algorithm, comm_hook=comm_hook)
    return Settings(
        comm_hook=None if codec is not None else comm_hook,  # type: ignore[arg-type]  # then it is callable
        codec=codec,
        optimizer=optimizer,
        overlap=overlap,
        cap=size_in_bytes("bucket_mb", USUAL_MB if auto else bucket_mb),
        auto=auto,
        first_cap=size_in_bytes("first_bucket_mb", first_bucket_mb),
        process_group=group,
        lanes=lanes,
        algorithm=algorithm,
        mesh=device_mesh if algorithm == "hierarchical" else None,
        inner=inner,
        options=_inductor_options(inner, options, mode),
        caps=tuple(size_in_bytes("bucket_cap_mb_list", size) for size in bucket_mb_list),
        **flags,
    )


def _groups(given: Any) -> tuple[GroupReference | None, tuple[GroupReference, ...]]:
    """The group to average over, and the groups that take buckets in turns."""
    several = isinstance(given, (list, tuple))
    found = tuple(given) if several else (() if given is None else (given,))
    if not all(isinstance(group, dist.ProcessGroup) for group in found) or (several and not found):
        raise ValueError(
            f"process_group must be a torch.distributed.ProcessGroup that this rank belongs to, a list of such groups "
            f"of the same ranks, or None for the default group, got {given!r}"
        )
    ranks = [dist.get_process_group_ranks(group) for group in found] if several else []
    if len(set(map(id, found))) < len(found):
        raise ValueError("process_group: a group stands twice in the list; buckets go in turns over different groups")
    if any(each != ranks[0] for each in ranks):
        raise ValueError(f"process_group: buckets go in turns over groups of the same ranks, got groups of {ranks}")
    references = tuple(map(GroupReference, found))
    return (references[0] if found else None), (references if len(found) > 1 else ())


def _group_of(mesh: Any, process_group: object) -> GroupReference | None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2:
        raise ValueError(
            f"device_mesh must be a DeviceMesh of one or two dimensions (nodes, ranks inside), got {mesh!r}"
        )
    if process_group is not None:
        raise ValueError("process_group and device_mesh exclude each other: the mesh brings its own groups")
    group = _compat.flat_group(mesh)
    return None if group is None else GroupReference(group)


def _algorithm(name: str | None, mesh: DeviceMesh | None, lanes: Sequence[object]) -> str:
    two_dimensional = mesh is not None and mesh.ndim == 2
    if name is None:
        name = "hierarchical" if two_dimensional else "all_reduce"
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {ALGORITHMS} or None, got {name!r}")
    if (name == "hierarchical") != two_dimensional:
        raise ValueError(
            f"algorithm={name!r} does not go with device_mesh={mesh}: 'hierarchical' takes a mesh of two dimensions "
            "(nodes, ranks inside), the others take one or none"
        )
    if lanes and name != "all_reduce":
        raise ValueError(f"algorithm={name!r} makes its own groups: give one process_group, got {len(lanes)}")
    return name


def _check_overlap(overlap: object, optimizer: object, *, split: bool, algorithm: str, comm_hook: object) -> None:
    if overlap is None:
        return
    if overlap != NEXT_FORWARD:
        raise ValueError(f"overlap must be {NEXT_FORWARD!r} or None, got {overlap!r}")
    if optimizer is None:
        raise ValueError(
            f"overlap={NEXT_FORWARD!r} updates parameters where the next forward waits for their buckets, and needs "
            "the optimizer that does it: give optimizer=…"
        )
    for holds, given, why in (
        (not split, "split=False", "buckets are waited for inside one graph"),
        (algorithm != "all_reduce", f"algorithm={algorithm!r}", "later steps of a bucket would wait for the forward"),
        (
            comm_hook not in (None, *COMM_HOOKS),
            f"comm_hook={comm_hook!r}",
            "what it keeps between steps is settled in the backward",
        ),
    ):
        if holds:
            raise ValueError(f"overlap={NEXT_FORWARD!r} does not go with {given}: {why}. Leave one of both out")


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


def size_in_bytes(name: str, mib: Any) -> int:
    """Bytes of an argument given in MiB.

    Raises:
        ValueError: it is no size.
    """
    if isinstance(mib, bool) or not isinstance(mib, (int, float)) or not math.isfinite(mib) or mib <= 0:
        allowed = f", or {AUTO!r}" if name in ("bucket_mb", "bucket_cap_mb") else ""
        raise ValueError(f"{name} must be a positive, finite number of MiB{allowed}, got {mib!r}")
    return max(1, int(mib * MIB))


def in_mib(nbytes: int) -> float:
    """The shortest number of MiB that means these bytes: what was given, where that has few digits."""
    rounded = (round(nbytes / MIB, digits) for digits in range(12))
    return next((mib for mib in rounded if int(mib * MIB) == nbytes), nbytes / MIB)


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
        if f.name not in ("cap", "first_cap", "caps", "auto", "codec", "options", "compile_pieces")
    ),
    "first_bucket_mb",
)
"""Arguments of `fxddp.backend` that may stand among `torch.compile`'s `options` when the backend is used by name."""


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separates fxddp's own arguments from inductor's settings."""
    own = {key: value for key, value in options.items() if key in OWN_OPTIONS}
    return own, {key: value for key, value in options.items() if key not in OWN_OPTIONS}
