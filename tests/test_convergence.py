"""Training with compressed gradients ends where uncompressed training ends; benchmarks/convergence.py, made small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import convergence
from benchmarks.convergence import TASKS, WAYS, Outcome
from tests.live.pool import Pool
from tests.live.programs import run_benchmark

SEEDS = 2
STEPS = {"digits": 120, "gpt": 60}
MARGINS = {"PowerSGD(4)": 0.1}
"""Of the mean final loss, in these short runs; 0.01 for all others."""


def outcomes(rank: int, world: int, task: str, way: str) -> list[Outcome]:
    return [TASKS[task](rank, world, way, seed, steps=STEPS[task]) for seed in range(SEEDS)]


@pytest.fixture(scope="module")
def plain(pool: Pool) -> dict[str, list[Outcome]]:
    return {task: pool.run(outcomes, task, "none", timeout=180)[0] for task in TASKS}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "none"])
@pytest.mark.parametrize("task", TASKS)
def test_final_losses(pool: Pool, plain: dict[str, list[Outcome]], task: str, way: str):
    found, again = pool.run(outcomes, task, way, timeout=180)
    assert found == again
    margin = MARGINS.get(way, 0.01)
    for outcome, reference in zip(found, plain[task], strict=True):
        assert outcome.first_loss == pytest.approx(reference.first_loss)
        assert outcome.training_loss < 0.75 * outcome.first_loss, "it has not learned"
        assert outcome.training_loss == pytest.approx(reference.training_loss, rel=2 * margin)
        assert outcome.wire_bytes < 0.6 * outcome.plain_bytes
    apart = convergence.difference(found, plain[task])
    assert abs(sum(apart) / SEEDS) <= margin, apart


def test_the_command(tmp_path: Path):
    options = ["--tasks", "gpt", "--ways", "none,fp16,Int8", "--seeds", "1", "--steps", "5"]
    done = run_benchmark("convergence", *options, "--json", str(tmp_path / "report.json"), timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["none", "fp16", "Int8"]
    assert "| 50.0 % |" in rows[3]
    assert (tmp_path / "report.json").is_file()
