"""What would data-parallel training of these models send? Explained on any machine, for ranks that are not there.

    python examples/explain_model.py                                  # a ConvNet, on 64 ranks with 100 Gbit/s each
    python examples/explain_model.py --model llama                    # a transformer from `transformers`
    python examples/explain_model.py --model llama --html llama.html  # the same as a page for the browser

Nothing is trained, downloaded or sent: the models are built on the meta device, without weights, and only traced.
`transformers` is not needed by fxddp: `python -m pip install transformers` brings it.
"""

import argparse
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxddp


class Block(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + self.skip(x))


class ConvNet(nn.Module):
    """A residual network for pictures of 224 by 224."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=4, padding=3)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(*(Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(sizes)))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(torch.relu(self.stem(x)))
        return self.head(x.mean((2, 3)))


def convnet(small: bool) -> tuple[nn.Module, tuple[Any, ...]]:
    return ConvNet(8, 10) if small else ConvNet(), (torch.empty(32, 3, 224, 224),)


def llama(small: bool) -> tuple[nn.Module, tuple[Any, ...]]:
    """A transformer of the Llama family with 12 layers and 134 million parameters, as a configuration alone."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("--model llama is built by transformers: python -m pip install transformers")
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found, unused-ignore]

    size: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if not small:
        size = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    config = LlamaConfig(vocab_size=320 if small else 32000, use_cache=False, tie_word_embeddings=False, **size)
    return LlamaForCausalLM(config), (torch.zeros(4, 128, dtype=torch.int64),)


MODELS = {"convnet": convnet, "llama": llama}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Explain what data-parallel training of a model would send.")
    parser.add_argument("--model", choices=sorted(MODELS), default="convnet")
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--bandwidth", default="100Gbit/s", help="of each rank")
    parser.add_argument("--bucket-mb", type=float, default=25)
    parser.add_argument("--html", type=Path, help="write the page here")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace here, for Perfetto")
    parser.add_argument("--small", action="store_true", help="a few layers only")
    args = parser.parse_args(argv)

    with torch.device("meta"):
        model, inputs = MODELS[args.model](args.small)
    found = fxddp.explain(
        model,
        *inputs,
        world_size=args.world_size,
        bandwidth=args.bandwidth,
        bucket_mb=args.bucket_mb,
        device="cuda",
    )
    print(found)
    if args.html:
        found.save(args.html)
    if args.trace:
        found.save_trace(args.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
