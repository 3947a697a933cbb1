"""Runs the scripts in `examples/` and the commands in `benchmarks/` as a user does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_example(name: str, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Runs one under torchrun, over loopback."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launcher, str(ROOT / "examples" / name), *arguments],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def run_benchmark(
    name: str, *arguments: str, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m benchmarks.{name}`, with these environment variables."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_without_launcher(name: str) -> str:
    """What one that needs a launcher says without."""
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"} | {"PYTHONPATH": str(ROOT)}
    script = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(script, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr
