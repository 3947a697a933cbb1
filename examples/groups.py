"""Sum buckets over several process groups, or in several steps; the gradients are those of one all-reduce.

    torchrun --nproc-per-node 2 examples/groups.py                         # process_group=[…]: buckets in turns
    torchrun --nproc-per-node 2 examples/groups.py --way ring              # reduce-scatter, then all-gather
    torchrun --nproc-per-node 4 examples/groups.py --way hierarchical      # two nodes of two ranks, device_mesh=

Several groups help where one cannot fill the link (Li et al., "PyTorch Distributed", VLDB 2020, arXiv:2006.15704). In
a ring each rank sends 2(N-1)/N of a bucket's bytes. On a mesh of nodes, only the part that a reduce-scatter inside a
node leaves to each rank travels across.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxddp

MIB = 0.05
"""So small that this model has several buckets."""

WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "groups": lambda: {"process_group": [dist.new_group() for _ in range(2)]},
    "ring": lambda: {"algorithm": "ring"},
    "hierarchical": lambda: {"device_mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2))},
}


def gradients(inner: str, **options: Any) -> tuple[list[torch.Tensor], fxddp.Backend]:
    """Of one step of the same network, sent in some way."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    backend = fxddp.backend(MIB, first_bucket_mb=MIB, inner=inner, **options)
    model = torch.compile(module, backend=backend)
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(inputs).square().mean().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None], backend


def main() -> None:
    parser = argparse.ArgumentParser(description="Sum buckets over several groups, or in several steps.")
    parser.add_argument("--way", choices=list(WAYS), default="groups")
    parser.add_argument("--inner", choices=["inductor", "aot_eager"], default="inductor", help="compiles the graphs")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start it with torchrun --nproc-per-node 2 examples/groups.py")
    dist.init_process_group("gloo")
    if args.way == "hierarchical" and dist.get_world_size() % 2:
        raise SystemExit("two nodes of equal size take an even number of ranks: --nproc-per-node 4")

    expected, _ = gradients(args.inner)
    found, backend = gradients(args.inner, **WAYS[args.way]())
    worst = max((ours - theirs).abs().max().item() for ours, theirs in zip(found, expected, strict=True))
    if dist.get_rank() == 0:
        for i, bucket in enumerate(fxddp.explain(backend).buckets):
            print(f"bucket {i}, {bucket.nbytes} bytes: {bucket.route}")
        print(f"gradients differ from those of one all-reduce by {worst:.1e} at most")
    if worst > 1e-6:
        raise SystemExit("the gradients are others")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
