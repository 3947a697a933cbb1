"""`_get_ddp_logging_data`: the keys that people read, from what the backend has on record."""

import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .stats import BackwardRecord

if TYPE_CHECKING:
    from .ddp_members import Members

_ENVIRONMENT = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
}
_OF_GLOO = {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"}
_OF_NCCL = {
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
    "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "nccl_debug": "NCCL_DEBUG",
    "nccl_nthreads": "NCCL_NTHREADS",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
}
_DTYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}
NANOSECONDS = 1_000_000_000


class ForwardClock:
    """Times the forwards of one wrapper."""

    def __init__(self) -> None:
        self.count = 0
        self.start = 0.0
        self.last = 0.0
        self.total = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.last = time.perf_counter() - self.start
        self.total += self.last
        self.count += 1


def logging_data(model: "Members", clock: ForwardClock) -> dict[str, Any]:
    """The dictionary; what does not apply, or has not happened yet, is left out."""
    group = dist.get_backend(model.process_group)
    environment = {**_ENVIRONMENT, **(_OF_GLOO if group == "gloo" else _OF_NCCL if group == "nccl" else {})}
    data: dict[str, Any] = {key: os.environ.get(name) or "N/A" for key, name in environment.items()}
    if group == "gloo":
        data["gloo_num_threads"] = 2  # of torch's gloo, not to be set by anybody
    return data | _construction(model) | _buckets(model) | _times(model, clock)


def _construction(model: "Members") -> dict[str, Any]:
    trained = _trained(model).values()
    names = {_DTYPES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in trained}
    return {
        "world_size": dist.get_world_size(model.process_group),
        "rank": dist.get_rank(model.process_group),
        "backend_name": dist.get_backend(model.process_group),
        "module_name": type(model.module).__name__,
        "device_ids": ", ".join(map(str, model.device_ids or ())),
        "output_device": -1 if model.output_device is None else model.output_device,
        "is_multi_device_module": int(model.is_multi_device_module),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in model.module.modules())),
        "broadcast_buffers": int(model.forward_sync_buffers),
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        **({"static_graph": 1} if model.static_graph else {}),
        **({"comm_hook": name} if (name := model.backend.registered.carrier.name) is not None else {}),
        "dtypes": ", ".join(sorted(names)),
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(p.nbytes for p in trained),
    }


def _trained(model: "Members") -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.backend.shared_parameters().items() if p.requires_grad}


def _buckets(model: "Members") -> dict[str, Any]:
    """The buckets of the compiled graphs, in the order of launch; they never have to be rebuilt."""
    backend = model.backend
    trained = _trained(model)
    position = {name: i for i, name in enumerate(trained)}
    sizes, members = [], []
    for site in backend.sites:
        compiled = site.compilation.backward
        for bucket in compiled.program.plan.buckets if compiled is not None else ():
            sizes.append(bucket.nbytes)
            members.append([position[name] for grad in bucket.grads if (name := site.names[grad.input]) in position])
    used = {i for bucket in members for i in bucket}
    used |= {position[name] for record in backend.stats().backwards for name in record.uncovered if name in position}
    unused = [p for i, p in enumerate(trained.values()) if i not in used] if backend.stats().total else []
    text = ", ".join(map(str, sizes))
    return {
        "bucket_sizes": text or str(sum(p.nbytes for p in trained.values())),
        "rebuilt_bucket_sizes": text,
        "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, bucket)) for bucket in members),
        "prev_iteration_grad_ready_order_indices": ", ".join(str(i) for bucket in members for i in bucket),
        "has_rebuilt_buckets": int(bool(sizes)),
        "unused_parameter_size": sum(p.nbytes for p in unused),
        "num_unused_parameters": len(unused),
    }


def _times(model: "Members", clock: ForwardClock) -> dict[str, Any]:
    stats = model.backend.stats()
    data: dict[str, Any] = {"iteration": max(0, model.backend.log.synchronised - 1)}  # the last one's number, from 0
    records = [record for record in stats.backwards if record.sync]
    if not records:
        return data
    last = records[-1]
    data["num_buckets_reduced"] = last.launches + last.uncovered_launches
    spans = [_spans(record) for record in records]
    for key, values in {
        "backward_compute_time": [compute for compute, _, _ in spans],
        "backward_comm_time": [comm for _, comm, _ in spans],
        "backward_compute_comm_overlap_time": [overlap for _, _, overlap in spans],
    }.items():
        data[key] = int(values[-1] * NANOSECONDS)
        data[f"avg_{key}"] = int(sum(values) / len(values) * NANOSECONDS)
    data["forward_compute_time"] = int(clock.last * NANOSECONDS)
    data["avg_forward_compute_time"] = int(clock.total / max(1, clock.count) * NANOSECONDS)
    epoch = time.time() - time.perf_counter()  # the log has the monotonic clock, and people compare dates
    launched, waited = _communication(last)
    for key, moment in {
        "forward_compute_time_start": clock.start,
        "backward_compute_time_start": last.begin,
        "backward_compute_time_end": waited,
        "backward_comm_time_start": launched,
        "backward_comm_time_end": last.end,
    }.items():
        data[key] = int((epoch + moment) * NANOSECONDS)
    return data


def _communication(record: BackwardRecord) -> tuple[float, float]:
    """When the first bucket was launched and when waiting began: the end of a backward that launched none."""
    launches = [moment for kind, _, moment in record.events if kind.startswith("launch")]
    waits = [moment for kind, _, moment in record.events if kind.startswith("wait")]
    waited = waits[0] if waits else record.end
    return (launches[0] if launches else waited), waited


def _spans(record: BackwardRecord) -> tuple[float, float, float]:
    """Seconds of computing, of communication, and of both at once."""
    launched, waited = _communication(record)
    return waited - record.begin, record.end - launched, waited - launched
