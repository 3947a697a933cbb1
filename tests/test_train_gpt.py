"""examples/train_gpt.py, run for real: one and two processes must train the same model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"
SMALL = "--layers=2 --width=32 --heads=2 --block-size=32 --batch-size=24 --accumulate=3 --lr=0.05 --bucket-mb=0.03"
STEPS = 16

Train = Callable[..., dict[str, Any]]


def execute(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run the example and return its report; runs with the same arguments are run once."""
    folder = tmp_path_factory.mktemp("train_gpt")
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"

    @cache
    def run(ranks: int, *arguments: str) -> dict[str, Any]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        report = folder / "report.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, *launcher, str(EXAMPLE), *SMALL.split(), *arguments, "--report", str(report)]
        process = execute(command, environment)
        assert process.returncode == 0, f"{' '.join(command)}\n{process.stdout}\n{process.stderr}"
        assert f"all parameters are identical on {ranks} rank(s)" in process.stdout
        result: dict[str, Any] = json.loads(report.read_text())
        return result

    return run


def through(train: Train, ranks: int) -> dict[str, Any]:
    return train(ranks, "--inner", "aot_eager", "--steps", str(STEPS))


def test_loss_falls(train: Train) -> None:
    losses = through(train, ranks=2)["losses"]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(5.5, abs=0.2)  # log(256): it starts out knowing nothing
    assert losses[-1] < losses[0] - 1


def test_two_ranks_train_like_one_process_on_the_combined_batch(train: Train) -> None:
    """Three micro-batches on each of two ranks are one batch: losses and the model at the end agree."""
    one, two = through(train, ranks=1), through(train, ranks=2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-5)


def test_only_the_last_micro_batch_communicates(train: Train) -> None:
    """Two of three micro-batches run under no_sync; the last one reduces the gradients of the whole step in buckets."""
    first, second, last = through(train, ranks=2)["all_reduces"]
    assert first == second == 0
    assert last > 1


def test_inductor_trains_the_same_model(train: Train) -> None:
    expected = through(train, ranks=1)
    compiled = train(2, "--inner", "inductor", "--steps", str(STEPS))
    assert compiled["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert compiled["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-5)


def test_resumed_training_ends_where_training_in_one_go_ends(train: Train, tmp_path: Path) -> None:
    whole = through(train, ranks=2)
    options = ["--inner", "aot_eager", "--out", str(tmp_path / "checkpoint.pt")]
    first = train(2, *options, "--steps", str(STEPS // 2))
    second = train(2, *options, "--steps", str(STEPS), "--resume")
    assert first["losses"] + second["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert second["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-6)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    """Unequal micro-batches would weigh sequences differently on different numbers of ranks."""
    process = execute([sys.executable, str(EXAMPLE), "--batch-size", "7"], {})
    assert process.returncode != 0
    assert "--batch-size 7" in process.stderr
