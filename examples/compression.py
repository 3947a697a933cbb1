"""Train with compressed gradients, stop, and go on from a checkpoint that holds what the codec remembers.

    torchrun --nproc-per-node 2 examples/compression.py                    # PowerSGD
    torchrun --nproc-per-node 2 examples/compression.py --codec int8       # or fp16, bf16, adaptive, none
    torchrun --nproc-per-node 2 examples/compression.py --codec hook       # a communication hook of torch's, as it is

The model learns to imitate another one of the same shape. With PowerSGD and Int8 each rank owes the others what it has
not sent yet; that belongs to the checkpoint, and differs from rank to rank. So each rank saves a state of its own.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fxddp

CODECS: dict[str, Any] = {
    "none": lambda: None,
    "fp16": lambda: "fp16",
    "bf16": lambda: "bf16",
    "powersgd": lambda: fxddp.PowerSGD(4, start_iter=10, min_compression_rate=1),
    "int8": fxddp.Int8,
    "adaptive": lambda: fxddp.Adaptive(start_iter=5, every=20),
    "hook": lambda: default_hooks.fp16_compress_hook,
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))


def train(module: nn.Module, codec: Any, steps: range, inner: str) -> fxddp.Backend:
    """Plain SGD on batches that follow from the step and the rank; the codec is all that compression adds."""
    teacher = network(seed=1)
    backend = fxddp.backend(bucket_mb=0.05, first_bucket_mb=0.05, inner=inner, comm_hook=codec)
    model = torch.compile(module, backend=backend)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    for step in steps:
        batch = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        loss = F.mse_loss(model(batch), teacher(batch).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    return backend


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with compressed gradients.")
    parser.add_argument("--codec", choices=list(CODECS), default="powersgd")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--inner", choices=["inductor", "aot_eager"], default="inductor", help="compiles the graphs")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start it with torchrun --nproc-per-node 2 examples/compression.py")
    dist.init_process_group("gloo")
    half = args.steps // 2

    student, codec = network(seed=0), CODECS[args.codec]()
    train(student, codec, range(half), args.inner)
    with tempfile.TemporaryDirectory() as folder:  # a real run keeps it
        path = Path(folder) / f"checkpoint-{dist.get_rank()}.pt"
        state = codec.state_dict() if hasattr(codec, "state_dict") else None
        torch.save({"model": student.state_dict(), "codec": state}, path)

        student, codec = network(seed=2), CODECS[args.codec]()
        checkpoint = torch.load(path)
    student.load_state_dict(checkpoint["model"])
    if checkpoint["codec"] is not None:
        codec.load_state_dict(checkpoint["codec"])
    backend = train(student, codec, range(half, args.steps), args.inner)

    last = backend.stats().last
    if dist.get_rank() == 0:
        print(f"the last step's gradients are {last.bytes} bytes, and {last.wire_bytes} travelled")
        print(fxddp.explain(backend))
    weights = torch.cat([parameter.detach().flatten() for parameter in student.parameters()])
    first = weights.clone()
    dist.broadcast(first, 0)
    if not torch.equal(weights, first):
        raise SystemExit("the replicas differ")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
