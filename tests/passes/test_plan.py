"""Plans as data, and `check_plan`: it accepts the right plan, and no other."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.plan import Bucket, BucketPlan, GradSpec, check_plan
from tests.strategies import grad_lists, planning_inputs, some_grad

ROOT = Path(__file__).parents[2]

some = settings(max_examples=200)


def rebuild(plan: BucketPlan, rows: list[list[GradSpec]]) -> BucketPlan:
    """The plan with other buckets, numbered in order."""
    return replace(plan, buckets=tuple(Bucket(index, tuple(row)) for index, row in enumerate(rows)))


def by_launch(rows: list[list[GradSpec]]) -> list[list[GradSpec]]:
    """Buckets put right in all that concerns order alone."""
    rows = [sorted(row, key=lambda g: (g.ready, g.output)) for row in rows if row]
    return sorted(rows, key=lambda row: (row[-1].ready, row[-1].output))


# Sizes and offsets


def test_sizes_of_a_gradient() -> None:
    assert (some_grad(0, 2, 3).numel, some_grad(0, 2, 3).nbytes) == (6, 24)
    assert some_grad(0, 5, dtype=torch.bfloat16).nbytes == 10
    assert some_grad(0, 5, dtype=torch.complex128).nbytes == 80
    assert (some_grad(0).numel, some_grad(0).nbytes) == (1, 4)  # a scalar
    assert (some_grad(0, 3, 0).numel, some_grad(0, 3, 0).nbytes) == (0, 0)


def test_sizes_and_offsets_of_a_bucket() -> None:
    bucket = Bucket(0, (some_grad(0, 2, 3), some_grad(1, 0), some_grad(2), some_grad(3, 4)))
    assert bucket.offsets == (0, 6, 6, 7)
    assert (bucket.numel, bucket.nbytes) == (11, 44)
    assert (bucket.dtype, bucket.device) == (torch.float32, torch.device("cpu"))


@some
@given(planning_inputs())
def test_offsets_are_in_elements_and_leave_no_gap(inputs: tuple[list[GradSpec], int, int]) -> None:
    grads, cap, first_cap = inputs
    plan = plan_buckets(grads, cap=cap, first_cap=first_cap)
    for bucket in plan.buckets:
        ends = [offset + grad.numel for offset, grad in zip(bucket.offsets, bucket.grads, strict=True)]
        assert [0, *ends] == [*bucket.offsets, bucket.numel]
    assert plan.nbytes == sum(grad.nbytes for grad in grads)
    assert set(plan.grads) == set(grads)


# Plans as values


@some
@given(planning_inputs())
def test_plans_are_values(inputs: tuple[list[GradSpec], int, int]) -> None:
    """Copies, pickled ones too, are equal, hash alike and have the same digest."""
    grads, cap, first_cap = inputs
    plan = plan_buckets(grads, cap=cap, first_cap=first_cap)
    for same in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert same == plan
        assert hash(same) == hash(plan)
        assert same.digest() == plan.digest()


def test_plans_cannot_be_changed() -> None:
    plan = plan_buckets([some_grad(0, 1)], cap=4, first_cap=4)
    for thing, field in ((plan, "cap"), (plan.buckets[0], "index"), (plan.grads[0], "ready")):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, field, 1)
        with pytest.raises((FrozenInstanceError, TypeError)):
            setattr(thing, "something_new", 1)  # noqa: B010 (mypy knows that it cannot be set)


# Digests


def layout(grads: list[GradSpec], cap: int = 8, first_cap: int = 8) -> str:
    return plan_buckets(grads, cap=cap, first_cap=first_cap).digest()


BASE = [some_grad(0, 1, 2), some_grad(1, 2)]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([replace(BASE[0], shape=(1, 1)), BASE[1]], id="shape"),
        pytest.param([replace(BASE[0], stride=(1, 1)), BASE[1]], id="stride"),
        pytest.param([replace(BASE[0], dtype=torch.int32), BASE[1]], id="dtype"),
        pytest.param([replace(BASE[0], device=torch.device("meta")), BASE[1]], id="device type"),
        pytest.param([replace(BASE[0], input=5), BASE[1]], id="placeholder"),
        pytest.param([replace(BASE[0], ready=9), BASE[1]], id="order"),
        pytest.param(BASE[:1], id="number"),
        pytest.param([], id="none"),
    ],
)
def test_digest_tells_layouts_apart(other: list[GradSpec]) -> None:
    assert layout(other) != layout(BASE)


def test_digest_tells_bucket_boundaries_apart() -> None:
    assert layout(BASE, cap=16, first_cap=16) != layout(BASE)


def test_digest_ignores_what_may_differ_between_ranks() -> None:
    moved = [replace(grad, output=grad.output + 3, ready=grad.ready * 2 + 1, tangents=frozenset()) for grad in BASE]
    assert layout(moved) == layout(BASE)
    assert layout(BASE, cap=9) == layout(BASE)
    on = [[replace(grad, device=torch.device("cuda", rank)) for grad in BASE] for rank in (0, 1)]
    assert layout(on[0]) == layout(on[1])
    sizes = [replace(grad, shape=torch.Size(grad.shape)) for grad in BASE]
    assert layout(sizes) == layout(BASE)


def test_digest_and_plan_are_the_same_in_another_process() -> None:
    """Neither hash seed nor process matters."""
    grads = [
        some_grad(i, i % 5, 3, ready=-i, dtype=dtype)
        for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.complex64] * 7)
    ]
    plan = plan_buckets(grads, cap=64, first_cap=16)
    code = (
        "import pickle, sys\n"
        "from fxddp.passes.bucketing import plan_buckets\n"
        "grads, plan = pickle.load(sys.stdin.buffer)\n"
        "again = plan_buckets(set(grads), cap=plan.cap, first_cap=plan.first_cap)\n"
        "assert again == plan\n"
        "print(plan.digest(), again.digest())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps((grads, plan)), cwd=ROOT, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout.decode().split() == [plan.digest()] * 2


# The oracle rejects broken plans. One valid plan, written by hand, and what can be done to it: eight bytes in each
# gradient, four gradients of one kind, then two of another.

GRADS = [some_grad(i, 2) for i in range(4)] + [some_grad(i, 4, dtype=torch.bfloat16) for i in range(4, 6)]
A, B, C, D, E, F = GRADS
PLAN = BucketPlan((Bucket(0, (A,)), Bucket(1, (B, C)), Bucket(2, (D,)), Bucket(3, (E, F))), cap=16, first_cap=8)


def test_the_plan_that_is_broken_below_is_valid() -> None:
    check_plan(PLAN, GRADS)
    check_plan(PLAN, GRADS[::-1])
    assert plan_buckets(GRADS, cap=16, first_cap=8) == PLAN


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param([[A], [B], [D], [E, F]], "in no bucket", id="gradient dropped"),
        pytest.param([[A], [B, C], [D]], "2 of 6 gradients are in no bucket", id="bucket dropped"),
        pytest.param([[A], [B, C], [C, D], [E, F]], "planned twice", id="gradient duplicated"),
        pytest.param([[A], [B, C], [D], [E, F], [E, F]], "planned twice", id="bucket duplicated"),
        pytest.param([[A], [B, C], [D, some_grad(9, 0)], [E, F]], "never given", id="gradient invented"),
        pytest.param([[A], [B, replace(C, ready=77)], [D], [E, F]], "in no bucket", id="gradient changed"),
        pytest.param([[A], [C, B], [D], [E, F]], "ready order", id="gradients swapped"),
        pytest.param([[B], [A, C], [D], [E, F]], "ready before the last one", id="gradients swapped across buckets"),
        pytest.param([[A], [D], [B, C], [E, F]], "is ready later", id="buckets swapped"),
        pytest.param([[E, F], [A], [B, C], [D]], "is ready later", id="buckets of different kinds swapped"),
        pytest.param([[A], [], [B, C], [D], [E, F]], "bucket 1 is empty", id="empty bucket"),
        pytest.param([[A], [B, C], [D, E, F]], "mixes", id="mixed dtypes"),
        pytest.param([[A], [B, C, D], [E, F]], "holds 24 bytes in 3 gradients, its cap is 16", id="over the cap"),
        pytest.param([[A, B], [C, D], [E, F]], "holds 16 bytes in 2 gradients, its cap is 8", id="over the first cap"),
        pytest.param([[A], [B], [C, D], [E, F]], "bucket 1 has room for output 2", id="not greedy"),
        pytest.param([[A], [B, C], [D], [E], [F]], "bucket 3 has room for output 5", id="needless split"),
    ],
)
def test_check_plan_rejects(rows: list[list[GradSpec]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_plan(rebuild(PLAN, rows), GRADS)


def test_check_plan_rejects_mixed_devices() -> None:
    far = replace(F, device=torch.device("cuda", 0))
    with pytest.raises(AssertionError, match="mixes dtypes or devices"):
        check_plan(rebuild(PLAN, [[A], [B, C], [D], [E, far]]), [*GRADS[:5], far])


@pytest.mark.parametrize("indices", [(1, 2, 3, 4), (0, 2, 1, 3), (0, 0, 1, 2), (0, 1, 2, 7)])
def test_check_plan_rejects_wrong_indices(indices: tuple[int, ...]) -> None:
    buckets = tuple(replace(bucket, index=index) for bucket, index in zip(PLAN.buckets, indices, strict=True))
    with pytest.raises(AssertionError, match="has index"):
        check_plan(replace(PLAN, buckets=buckets), GRADS)


@pytest.mark.parametrize(("cap", "first_cap"), [(16, 0), (16, -1), (0, 0), (8, 16)])
def test_check_plan_rejects_impossible_caps(cap: int, first_cap: int) -> None:
    with pytest.raises(AssertionError, match=r"0 < first_cap <= cap"):
        check_plan(replace(PLAN, cap=cap, first_cap=first_cap), GRADS)


@pytest.mark.parametrize(("cap", "first_cap"), [(24, 8), (8, 8), (16, 16)])
def test_check_plan_rejects_the_plan_of_other_caps(cap: int, first_cap: int) -> None:
    with pytest.raises(AssertionError, match="cap is"):
        check_plan(replace(PLAN, cap=cap, first_cap=first_cap), GRADS)


@pytest.mark.parametrize("field", ["output", "input"])
def test_check_plan_rejects_two_gradients_of_one_thing(field: str) -> None:
    twin = replace(B, **{field: getattr(C, field)})
    with pytest.raises(AssertionError, match=f"{field} 2 has more than one gradient"):
        check_plan(rebuild(PLAN, [[A], [twin, C], [D], [E, F]]), [A, twin, C, D, E, F])


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((2,), (2,)), ((2,), (0,)), ((2,), ()), ((2, 2), (3, 1)), ((2, 2), (1, 1)), ((2, 2, 2), (3, 3, 1))],
)
def test_check_plan_rejects_gradients_with_holes_or_overlap(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """In a flat buffer such a gradient would read or write its neighbour's elements."""
    grads = [replace(A, shape=shape, stride=stride)]
    with pytest.raises(AssertionError, match="does not fill its part"):
        check_plan(plan_buckets(grads, cap=64, first_cap=64), grads)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((), ()), ((2, 3), (1, 2)), ((2, 1, 3), (3, 99, 1)), ((4, 3, 2, 2), (12, 1, 6, 3)), ((0, 5), (7, 7))],
)
def test_check_plan_accepts_any_dense_layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    grads = [replace(A, shape=shape, stride=stride)]
    check_plan(plan_buckets(grads, cap=512, first_cap=512), grads)


class Shifted(Bucket):
    """A bucket whose second gradient starts one element late."""

    @property
    def offsets(self) -> tuple[int, ...]:
        return 0, 3


class Short(Bucket):
    """A bucket that forgets an offset."""

    @property
    def offsets(self) -> tuple[int, ...]:
        return (0,)


class Long(Bucket):
    """A bucket with an element too many."""

    @property
    def numel(self) -> int:
        return 5


class Light(Bucket):
    """A bucket that counts too few bytes."""

    @property
    def nbytes(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Shifted, "puts output 2 at element 3, expected 2"),
        (Short, "1 offsets for 2 gradients"),
        (Long, "has numel 5, its gradients have 4"),
        (Light, "has nbytes 1 for 4 torch.float32"),
    ],
)
def test_check_plan_does_not_believe_a_bucket_about_its_sizes(
    broken: Callable[[int, tuple[GradSpec, ...]], Bucket], message: str
) -> None:
    buckets = (PLAN.buckets[0], broken(1, (B, C)), *PLAN.buckets[2:])
    with pytest.raises(AssertionError, match=message):
        check_plan(replace(PLAN, buckets=buckets), GRADS)


def test_check_plan_holds_the_first_bucket_to_fill_to_the_first_cap_wherever_it_stands() -> None:
    """Bucket 0 is a lone scalar of another kind; the first bucket to fill is bucket 1."""
    scalar = some_grad(0, dtype=torch.float64)
    rest = [some_grad(i, 2) for i in range(1, 4)]
    grads = [scalar, *rest]
    plan = plan_buckets(grads, cap=400, first_cap=8)
    check_plan(rebuild(plan, [[scalar], rest[:1], rest[1:]]), grads)
    with pytest.raises(AssertionError, match="bucket 1 holds 24 bytes in 3 gradients, its cap is 8"):
        check_plan(rebuild(plan, [[scalar], rest]), grads)


@settings(max_examples=600)
@given(planning_inputs(min_size=2, max_size=8), st.data())
def test_check_plan_accepts_one_plan_only(inputs: tuple[list[GradSpec], int, int], data: st.DataObject) -> None:
    """Gradients are moved between the buckets of a valid plan, order is put right: always rejected, if it changed."""
    grads, cap, first_cap = inputs
    plan = plan_buckets(grads, cap=cap, first_cap=first_cap)
    rows = [list(bucket.grads) for bucket in plan.buckets] + [[]]
    for _ in range(data.draw(st.integers(1, 3))):
        source = data.draw(st.sampled_from([row for row in rows if row]))
        target = data.draw(st.sampled_from(rows))
        for _ in range(data.draw(st.integers(1, len(source)))):
            target.append(source.pop())
    changed = rebuild(plan, by_launch(rows))
    assume(changed != plan)
    with pytest.raises(AssertionError):
        check_plan(changed, grads)


@settings(max_examples=600)
@given(grad_lists(max_size=6), st.data())
def test_check_plan_judges_any_grouping_as_the_planner_does(grads: list[GradSpec], data: st.DataObject) -> None:
    """Gradients dealt into buckets at random pass exactly when that is the plan."""
    cap = data.draw(st.integers(1, 64) | st.sampled_from([400, 1 << 20, 1 << 60]))
    first_cap = min(cap, data.draw(st.integers(1, 64) | st.just(1 << 60)))
    plan = plan_buckets(grads, cap=cap, first_cap=first_cap)
    rows: list[list[GradSpec]] = [[] for _ in grads]
    for grad in grads:
        rows[data.draw(st.integers(0, len(grads) - 1))].append(grad)
    dealt = rebuild(plan, by_launch(rows))
    if dealt == plan:
        check_plan(dealt, grads)
    else:
        with pytest.raises(AssertionError):
            check_plan(dealt, grads)
