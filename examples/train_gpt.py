"""Train a small GPT on Python's own manual, data parallel over any number of processes.

    torchrun --nproc-per-node 2 examples/train_gpt.py     # two ranks: one GPU each, or CPU cores where GPUs are too few
    python examples/train_gpt.py                          # the same training in one process

The text is the documentation that `help("for")` prints, which every Python carries; the model reads it byte by byte.
Each optimizer step uses the same global batch whatever the number of ranks, so both commands draw the same loss curve.

fxddp's part: the model is compiled with its backend, and all micro-batches of a step but the last run under
`backend.no_sync()`. The last backward then averages the whole step's gradients over the ranks while it still computes.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxddp

VOCABULARY = 256  # a token is a byte
WARMUP_STEPS = 100


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT with fxddp.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps in all")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--block-size", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate, reached after the warm-up")
    parser.add_argument("--bucket-mb", type=float, default=1.0, help="gradients travel in buckets of this many MiB")
    parser.add_argument("--inner", choices=["inductor", "aot_eager"], default="inductor", help="compiles the graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="checkpoint, written when training ends")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--report", type=Path, help="write the losses as JSON")
    args = parser.parse_args()
    if args.resume and args.out is None:
        parser.error("--resume needs --out, the checkpoint to go on from")
    return args


class Block(nn.Module):
    """Attention to what came before, then a two-layer network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts each next byte; with targets it returns the mean loss, without them the logits."""

    def __init__(self, block_size: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.empty(block_size, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.blocks(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        logits = F.linear(self.norm(x), self.tokens.weight)  # the output layer shares the embedding's weight
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Sequences:
    """A text cut into sequences, and the fixed order in which a run of a given seed reads them.

    A step's batch follows from the step's number alone: a resumed run needs no sampler state, and the ranks need no
    communication to take different sequences of the same global batch.
    """

    def __init__(self, data: Tensor, block_size: int, seed: int, device: torch.device) -> None:
        self.inputs = data[:-1].unfold(0, block_size, block_size).to(device)
        self.targets = data[1:].unfold(0, block_size, block_size).to(device)
        self.seed = seed

    def micro_batches(self, step: int, batch_size: int, accumulate: int, rank: int, world_size: int) -> Tensor:
        """Which sequences this rank reads in this step: a row of indices for each micro-batch."""
        epoch, position = divmod(step, len(self.inputs) // batch_size)
        order = torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(self.seed + epoch))
        batch = order[position * batch_size : (position + 1) * batch_size]
        return batch.view(accumulate, world_size, -1)[:, rank]


def learning_rate(step: int, highest: float) -> float:
    """Linear warm-up, then 1/sqrt(step): no word of the last step, so a resumed run may also be a longer one."""
    return highest * min((step + 1) / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / (step + 1)))


def mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value.item()


@torch.no_grad()
def evaluate(gpt: GPT, data: Sequences, rank: int, world_size: int) -> float:
    """The mean loss over the validation text, each rank reading its share."""
    total = torch.zeros((), device=data.inputs.device)
    for indices in torch.arange(rank, len(data.inputs), world_size).split(16):
        total += gpt(data.inputs[indices], data.targets[indices]) * len(indices)
    return mean_over_ranks(total) * world_size / len(data.inputs)


@torch.no_grad()
def sample(gpt: GPT, prompt: str, length: int, block_size: int, seed: int) -> str:
    device = gpt.positions.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = gpt(tokens[:, -block_size:])[:, -1] / 0.6  # a temperature below 1 prefers likely bytes
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def differing_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters that are not the same, bit for bit, on every rank."""
    parameters = module.named_parameters()
    mine = {name: hashlib.sha256(p.detach().cpu().numpy().tobytes()).hexdigest() for name, p in parameters}
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return [name for name in mine if len({checksums[name] for checksums in everyone}) > 1]


def show_progress(step: int, steps: int, loss: float) -> None:
    """A bar that rewrites its line on a terminal; elsewhere a line now and then."""
    bar = "#" * (30 * step // steps)
    line = f"[{bar:<30}] step {step}/{steps}  loss {loss:.3f}"
    if sys.stdout.isatty():
        print(f"\r{line}", end="" if step < steps else "\n", flush=True)
    elif step % max(1, steps // 10) == 0 or step == steps:
        print(line, flush=True)


def train(args: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
    if args.batch_size % (parts := args.accumulate * world_size):
        raise SystemExit(f"--batch-size {args.batch_size} must be a multiple of --accumulate times ranks, {parts}")
    text = "\n".join(topics[name] for name in sorted(topics))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    split = len(data) * 9 // 10
    training = Sequences(data[:split], args.block_size, args.seed, device)
    validation = Sequences(data[split:], args.block_size, args.seed, device)

    torch.manual_seed(args.seed)
    gpt = GPT(args.block_size, args.layers, args.width, args.heads).to(device)
    backend = fxddp.backend(bucket_mb=args.bucket_mb, inner=args.inner)
    model = torch.compile(gpt, backend=backend)
    optimizer = torch.optim.AdamW(gpt.parameters(), weight_decay=0.01)

    # `gpt` and `model` share their parameters. Checkpoints are gpt's, so that any program can load them.
    first_step = 0
    if args.resume:
        checkpoint = torch.load(args.out, map_location=device)
        gpt.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_step = checkpoint["step"]

    losses = []
    started = compiled = time.perf_counter()
    for step in range(first_step, args.steps):
        micro_batches = training.micro_batches(step, args.batch_size, args.accumulate, rank, world_size)
        total = torch.zeros((), device=device)
        for number, indices in enumerate(micro_batches.to(device), start=1):
            last = number == args.accumulate
            with contextlib.nullcontext() if last else backend.no_sync():
                # Micro-batches are of one size: the mean of their means, averaged over ranks, is the batch's mean loss.
                loss = model(training.inputs[indices], training.targets[indices]) / args.accumulate
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.lr)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(total))
        if rank == 0:
            show_progress(step + 1, args.steps, losses[-1])
        if step == first_step:
            compiled = time.perf_counter()
    seconds = time.perf_counter() - compiled

    validation_loss = evaluate(gpt, validation, rank, world_size)
    if differing := differing_parameters(gpt):
        raise SystemExit(f"the replicas differ in {', '.join(differing)}")
    if rank == 0:
        tokens = args.batch_size * args.block_size * max(0, len(losses) - 1)
        print(f"validation loss {validation_loss:.3f}")
        print(f"{tokens / seconds:.0f} tokens per second, after {compiled - started:.1f} s for compilation and step 1")
        print(f"all parameters are identical on {world_size} rank(s)")
        print(fxddp.explain(model))
        print(f"a sample:\n{sample(gpt, 'The statement ', 160, args.block_size, args.seed)}")
        if args.out is not None:
            state = {"model": gpt.state_dict(), "optimizer": optimizer.state_dict(), "step": args.steps}
            torch.save(state, args.out)
        if args.report is not None:
            launches = [backward.launches for backward in backend.stats().backwards[-args.accumulate :]]
            report = {"losses": losses, "validation_loss": validation_loss, "all_reduces": launches}
            args.report.write_text(json.dumps(report))


def main() -> None:
    args = parse_arguments()
    # torchrun sets these variables.
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(args, device, rank, world_size)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
