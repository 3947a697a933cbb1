"""`fxddp.passes.runs`: what lies before each place where a bucket may end."""

import torch

from fxddp.passes.cost import Network
from fxddp.passes.cutting import Search
from fxddp.passes.runs import RUNS, Runs
from fxddp.passes.step import Step
from tests.strategies import some_grad


def test_what_lies_before_each_bound() -> None:
    """Two kinds, of which the one that comes first has fewer bytes; half of the bytes travel."""
    sizes, kinds = (2, 10, 10, 4), (torch.float64, torch.float32, torch.float32, torch.float64)
    grads = [some_grad(i, size, dtype=kind) for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))]
    runs = Runs.of(grads, [0.1, 0.2, 0.3, 0.4], [grad.nbytes / 2 for grad in grads])
    assert runs.ready == [0.1, 0.2, 0.3, 0.4]
    assert runs.memory == [0, 16, 56, 96, 128]
    assert runs.sent == [0, 8, 28, 48, 64]
    assert [kind.sent for kind in runs.kinds] == [[0, 0, 20, 40, 40], [0, 8, 8, 8, 24]]
    assert [kind.last for kind in runs.kinds] == [[-1, -1, 1, 2, 2], [-1, 0, 0, 0, 3]]
    fast, slow = (Search(runs, Step(0.1, 0.5, Network(2, speed, 1.0))) for speed in (1e9, 1.0))
    assert fast.buckets((1, 2, 4)) == [(1, 20), (2, 20), (3, 24)], "the smaller kind waits for its last one"
    assert slow.buckets((1, 2, 4)) == [(0, 8), (1, 20), (2, 20), (3, 16)], "sending takes longer than a message"


def test_runs_are_few_and_end_with_what_is_large() -> None:
    sizes = [100_000 if i % 498 == 497 else 1 for i in range(10_000)]
    grads = [some_grad(i, size) for i, size in enumerate(sizes)]
    runs = Runs.of(grads, [float(i) for i in range(10_000)], [float(grad.nbytes) for grad in grads])
    assert len(runs.ready) <= 2 * RUNS + 1
    assert {float(i) for i, size in enumerate(sizes) if size > 1} <= set(runs.ready)
    (kind,) = runs.kinds
    lengths = [after - before for before, after in zip(kind.last, kind.last[1:], strict=False)]
    assert max(lengths) == -(-10_000 // RUNS)
    assert sum(length > 1 for length in lengths) > 1000, "small ones are taken together"


def test_gradients_without_bytes_are_taken_together_too() -> None:
    grads = [some_grad(i, 0) for i in range(10_000)]
    assert len(Runs.of(grads, [0.0] * 10_000, [0.0] * 10_000).ready) == 10_000 // 5
