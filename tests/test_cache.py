"""Compile caches: plain `torch.compile` and fxddp share a folder, and nobody is ever served the other's artifact."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxddp
import fxddp.compiler
from tests.live.pool import Pool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def _step(backend: Any, rank: int, tolerance: float = 1e-6) -> dict[str, Any]:
    """Compiles a fresh model, runs one step, and says what the caches did and how far each gradient is from right."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
    torch.compile(model, backend=backend)(x).square().mean().backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    local = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    average = []
    for gradient in local:
        total = gradient / dist.get_world_size()
        dist.all_reduce(total)
        average.append(total)
    cache = counters["aot_autograd"]
    return {
        "hit": cache["autograd_cache_hit"],
        "miss": cache["autograd_cache_miss"],
        "bypass": cache["autograd_cache_bypass"],
        "pieces_missed": counters["inductor"]["fxgraph_cache_miss"],
        "averaged": all(torch.allclose(got[n], g, atol=tolerance) for n, g in zip(got, average, strict=True)),
        "local": all(torch.allclose(got[n], g, atol=1e-6) for n, g in zip(got, local, strict=True)),
    }


def _sequence(rank: int, world: int, folder: str, kinds: list[str]) -> list[dict[str, Any]]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    group = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(world)][rank]
    digest = fxddp.compiler.source_digest
    try:
        found = []
        for kind in kinds:
            name, _, value = kind.partition("=")
            fxddp.compiler.source_digest = digest
            if name == "plain":
                backend: Any = "inductor"
            elif name == "bucket":
                backend = fxddp.backend(float(value))
            elif name == "wire":
                backend = fxddp.backend(comm_hook=value)
            elif name == "codec":
                backend = fxddp.backend(comm_hook=fxddp.Int8())
            elif name == "unsplit":
                backend = fxddp.backend(split=False)
            elif name == "group":
                backend = fxddp.backend(process_group=group)
            elif name == "alone":
                backend = fxddp.backend(process_group=alone, split=value != "unsplit")
            elif name == "emptied":  # on one rank
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank or 'new'}"
                backend = fxddp.backend()
            else:
                fxddp.compiler.source_digest = lambda: "another version"  # type: ignore[assignment]
                backend = fxddp.backend()
            found.append(_step(backend, rank, 1e-2 if name in ("wire", "codec") else 1e-6))
        return found
    finally:
        fxddp.compiler.source_digest = digest


def test_plain_and_fxddp_never_share_an_artifact(pool: Pool, tmp_path: Path) -> None:
    kinds = [
        "plain",
        "bucket=25",
        "plain",
        "bucket=25",
        "bucket=0.0001",
        "bucket=25",
        "version",
        "unsplit",
        "unsplit",
        "group",
        "alone",
        "alone=unsplit",
        "bucket=25",
        "emptied",
    ]
    for rank, steps in enumerate(pool.run(_sequence, str(tmp_path), kinds, timeout=300)):
        for kind, step in zip(kinds, steps, strict=True):
            assert step["local" if kind.startswith(("plain", "alone")) else "averaged"], f"{kind}: {step}"
        hits = [step["hit"] for step in steps]
        # the third plain and the repeated fxddp compiles are served; other settings, another version and unsplit are
        # not. A group is looked up when the graph runs, and the number of its ranks is an argument of the graph, so
        # groups share. In the end rank 0 alone has nothing to be served.
        assert hits == [0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1, rank], list(zip(kinds, hits, strict=True))
        assert [step["pieces_missed"] for step in steps][3] == 0


def test_fxddp_first_then_plain(pool: Pool, tmp_path: Path) -> None:
    for steps in pool.run(_sequence, str(tmp_path), ["bucket=25", "plain", "bucket=25"], timeout=300):
        assert [step["hit"] for step in steps] == [0, 0, 1]
        assert steps[1]["local"]
        assert steps[0]["averaged"]
        assert steps[2]["averaged"]


def test_what_travels_is_part_of_the_key(pool: Pool, tmp_path: Path) -> None:
    """A graph that casts is served to nobody who asks for none or for another; codecs that need no casts share."""
    kinds = ["bucket=25", "wire=fp16", "wire=bf16", "wire=fp16", "bucket=25", "codec"]
    for steps in pool.run(_sequence, str(tmp_path), kinds, timeout=300):
        assert [step["hit"] for step in steps] == [0, 0, 0, 1, 1, 1]
        assert all(step["averaged"] for step in steps)


def _plain_input_then_parameter(rank: int, world: int, folder: str) -> list[bool]:
    """One graph, compiled for a weight that is a plain tensor first and for one that is a parameter afterwards."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    backend = fxddp.backend()
    x = torch.full((2, 3), 1.0 + rank)

    def loss(weight: Tensor) -> Tensor:
        return (x @ weight).sum()

    found = []
    for parameter in (False, True, False):
        torch._dynamo.reset()
        weight = torch.ones(3, 1)
        weight = nn.Parameter(weight) if parameter else weight.requires_grad_(True)
        torch.compile(loss, backend=backend)(weight).backward()
        expected = 2.0 * (1.5 if parameter else 1.0 + rank)
        found.append(weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, expected)))
    return found


def test_a_parameter_is_not_a_plain_input(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_plain_input_then_parameter, str(tmp_path), timeout=200) == [[True] * 3] * 2


def _first_process(rank: int, world: int, folder: str) -> dict[str, Any]:
    return _sequence(rank, world, folder, ["bucket=25"])[0]


@pytest.mark.parametrize("world", [2])
def test_a_second_process_starts_warm(world: int, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with Pool(world) as fresh:
            found.append(fresh.run(_first_process, str(tmp_path / "shared"), timeout=200))
    for cold, warm in zip(*found, strict=True):
        assert (cold["hit"], cold["miss"]) == (0, 1)
        assert (warm["hit"], warm["miss"], warm["bypass"], warm["pieces_missed"]) == (1, 0, 0, 0)
        assert warm["averaged"]


def test_the_digest_of_the_code_changes_with_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "fxddp"
    shutil.copytree(Path(fxddp.__file__).parent, here, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fxddp.compiler, "__file__", str(here / "compiler.py"))
    digest = fxddp.compiler.source_digest.__wrapped__
    for path in here.rglob("*.py"):
        before = digest()
        path.write_text(path.read_text() + "\n")
        assert digest() != before, f"a change in {path.relative_to(here)} goes unnoticed"
