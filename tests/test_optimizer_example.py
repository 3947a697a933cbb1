"""examples/optimizer_in_backward.py, run for real with a compiled model and with the wrapper."""

import re

import pytest

from tests.live.programs import run_example, run_without_launcher


@pytest.mark.parametrize("arguments", [[], ["--wrapper"], ["--next-forward"]])
def test_the_weights_of_a_step_after_the_backward(arguments: list[str]):
    done = run_example("optimizer_in_backward.py", "--inner", "aot_eager", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"loss ([\d.]+)", done.stdout)
    assert len(losses) == 6
    assert losses[:3] == losses[3:]
    assert float(losses[2]) < 0.6 * float(losses[0])
    assert "0 gradients are left, and the weights differ by 0.0e+00 at most" in done.stdout
    assert "all-reduce, then AdamW" in done.stdout


def test_it_says_how_to_start_it():
    assert "torchrun --nproc-per-node 2" in run_without_launcher("optimizer_in_backward.py")
