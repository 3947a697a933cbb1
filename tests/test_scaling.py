"""`benchmarks.scaling`: steps on paper, and the check of that model on real ranks."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import scaling
from fxddp.passes.plan import GradSpec
from tests.live.programs import run_benchmark


def training(count: int = 40) -> scaling.Training:
    """40 gradients of 1 MiB, ready one after the other."""
    grads = [GradSpec(i, i, i, (1 << 18,), (1,), torch.float32, torch.device("cpu"), frozenset()) for i in range(count)]
    return scaling.Training(0.01, 0.02, tuple(grads), tuple((i + 1) / count for i in range(count)), frozenset())


@pytest.mark.parametrize("shape", ["ring", "tree"])
@pytest.mark.parametrize("ranks", [8, 64, 4096])
def test_the_latency_of_many_ranks(shape: str, ranks: int) -> None:
    network = scaling.link(ranks, 1e10, 1e-5, shape)
    assert network.delay == pytest.approx(1e-5 * 2 * (math.log2(ranks) if shape == "tree" else ranks - 1))
    assert network.sent(1e9) == pytest.approx(2e9 * (ranks - 1) / ranks)


@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10])
def test_the_step_of_many_ranks(bandwidth: float) -> None:
    """Never below computation or sending; more ranks never faster; the chosen buckets hardly ever behind the fixed."""
    here, before = training(), 0.0
    for ranks in (8, 64, 512, 4096):
        network = scaling.link(ranks, bandwidth, 1e-5, "tree")
        ddp, auto = scaling.both(here, network)
        assert ddp.buckets == 3
        assert auto.seconds >= max(here.forward + here.backward, network.all_reduce(here.nbytes))
        assert auto.exposed == pytest.approx(auto.seconds - 0.03)
        assert before <= auto.seconds <= 1.02 * ddp.seconds
        before = auto.seconds


def test_it_runs(tmp_path: Path) -> None:
    """Table and plot of a small model, after a check on two ranks."""
    picture = tmp_path / "plot.svg"
    options = ["--small", "--ranks", "8,4096", "--bandwidths", "1Gbit/s,100Gbit/s", "--plot", str(picture)]
    options += ["--check", "--worlds", "2", "--model", "smoke", "--rounds", "2", "--no-namespaces"]
    done = run_benchmark("scaling", *options)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    checked, rows = lines[2:4], lines[6:]
    assert ["(auto)" in checked[0], "(25 MiB)" in checked[1]] == [True, True]
    for line in checked:
        assert 0.05 < float(line.split("|")[-2]) < 20
    assert len(rows) == 2 * 2 * 2
    assert all(float(line.split("|")[-2]) < 1.05 for line in rows)
    assert len(ElementTree.parse(picture).findall("{http://www.w3.org/2000/svg}polyline")) == 4
