"""examples/groups.py, run for real in every way."""

import re

import pytest

from tests.live.programs import run_example, run_without_launcher

ROUTES = {
    "groups": ["all-reduce over group 0", "all-reduce over group 1"],
    "ring": ["reduce-scatter, all-gather"],
    "hierarchical": ["reduce-scatter inside (2 ranks), all-reduce across (2 ranks), all-gather inside (2 ranks)"],
}


@pytest.mark.parametrize("way", ROUTES)
def test_the_gradients_of_one_all_reduce(way: str):
    done = run_example("groups.py", "--inner", "aot_eager", "--way", way, ranks=4 if way == "hierarchical" else 2)
    assert done.returncode == 0, done.stdout + done.stderr
    routes = re.findall(r"bucket \d, \d+ bytes: (.*)", done.stdout)
    assert len(routes) == 2
    assert routes == [ROUTES[way][i % len(ROUTES[way])] for i in range(2)]
    (worst,) = re.findall(r"one all-reduce by (\S+) at most", done.stdout)
    assert float(worst) <= 1e-6


def test_it_says_how_to_start_it():
    assert "torchrun --nproc-per-node 2" in run_without_launcher("groups.py")
