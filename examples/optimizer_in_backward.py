"""Train with the optimizer in the backward: a parameter is updated when its bucket has arrived, while others travel.

    torchrun --nproc-per-node 2 examples/optimizer_in_backward.py                 # fxddp.backend(optimizer=…)
    torchrun --nproc-per-node 2 examples/optimizer_in_backward.py --wrapper       # _register_fused_optim of DDP's
    torchrun --nproc-per-node 2 examples/optimizer_in_backward.py --next-forward  # overlap="next_forward"

The same model is then trained with `optimizer.step()` after the backward, and the weights are compared. No gradient is
left after the backward: they are not kept longer than their update takes. Schedules, `no_sync` and the optimizer's
`state_dict` work as ever; clipping and a `GradScaler` look at gradients before the step and are refused. With
`--next-forward` the waits and updates move into the forward of the next step; `synchronize` ends the last one.
"""

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxddp

MIB = 0.05
"""So small that this model has several buckets."""


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs that follow from the step and the rank, and what another network of this shape makes of them."""
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    return inputs, network(seed=1)(inputs).detach()


def train(model: Callable[[Tensor], Tensor], after: Callable[[], None], steps: int) -> None:
    """A training loop; `after` is what is done after each backward."""
    for step in range(steps):
        inputs, targets = batch(step)
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        after()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with the optimizer in the backward.")
    parser.add_argument("--wrapper", action="store_true", help="with fxddp.DistributedDataParallel")
    parser.add_argument("--next-forward", action="store_true", help="wait for buckets in the next forward")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--inner", choices=["inductor", "aot_eager"], default="inductor", help="compiles the graphs")
    args = parser.parse_args()
    if args.wrapper and args.next_forward:
        raise SystemExit("overlap needs optimizer=…, which the wrapper takes as well: here it is shown without")
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start it with torchrun --nproc-per-node 2 examples/optimizer_in_backward.py")
    dist.init_process_group("gloo")

    # updated in the backward: nothing is left to do after it
    module = network(seed=0)
    if args.wrapper:
        wrapped = fxddp.DistributedDataParallel(module, bucket_cap_mb=MIB, inner=args.inner)
        wrapped._register_fused_optim(torch.optim.AdamW, 0.01)  # noqa: SLF001 (DDP's own name for it)
        train(wrapped, lambda: None, args.steps)
        backend: fxddp.Backend = wrapped.backend
    else:
        optimizer = torch.optim.AdamW(module.parameters(), 0.01)
        overlap = "next_forward" if args.next_forward else None
        backend = fxddp.backend(MIB, first_bucket_mb=MIB, inner=args.inner, optimizer=optimizer, overlap=overlap)
        train(torch.compile(module, backend=backend), lambda: None, args.steps)
        backend.synchronize()
    left = sum(parameter.grad is not None for parameter in module.parameters())

    # updated after the backward
    reference = network(seed=0)
    stepped = torch.optim.AdamW(reference.parameters(), 0.01)
    plain = fxddp.backend(MIB, first_bucket_mb=MIB, inner=args.inner)

    def step() -> None:
        stepped.step()
        stepped.zero_grad()

    train(torch.compile(reference, backend=plain), step, args.steps)

    pairs = list(zip(module.parameters(), reference.parameters(), strict=True))
    worst = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    if dist.get_rank() == 0:
        print(fxddp.explain(backend))
        print(f"{left} gradients are left, and the weights differ by {worst:.1e} at most")
    if not all(torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5) for ours, theirs in pairs):
        raise SystemExit("an optimizer in the backward gives other weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
