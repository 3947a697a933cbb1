"""`plan_buckets`: every plan passes the oracle and depends on its arguments alone; some are written out by hand."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.plan import BucketPlan, GradSpec, check_plan
from tests.strategies import DEVICES, DTYPES, caps, dense_strides, grad_lists, planning_inputs, some_grad

many = settings(max_examples=2000)
some = settings(max_examples=200)


def outputs(plan: BucketPlan) -> list[list[int]]:
    """The plan as lists of output indices."""
    return [[grad.output for grad in bucket.grads] for bucket in plan.buckets]


@many
@given(planning_inputs())
def test_every_plan_passes_the_oracle(inputs: tuple[list[GradSpec], int, int]) -> None:
    grads, cap, first_cap = inputs
    plan = plan_buckets(grads, cap=cap, first_cap=first_cap)
    check_plan(plan, grads)
    assert (plan.cap, plan.first_cap) == (cap, min(cap, first_cap))
    for bucket in plan.buckets[:1]:
        assert bucket.nbytes <= plan.first_cap or len(bucket.grads) == 1


@settings(max_examples=100)
@given(grad_lists(min_size=40, max_size=150), st.data())
def test_plans_of_larger_graphs_pass_the_oracle(grads: list[GradSpec], data: st.DataObject) -> None:
    check_plan(plan_buckets(grads, cap=data.draw(caps(grads)), first_cap=data.draw(caps(grads))), grads)


@some
@given(planning_inputs(), st.randoms(use_true_random=False))
def test_result_does_not_depend_on_the_order_of_the_gradients(
    inputs: tuple[list[GradSpec], int, int], rng: random.Random
) -> None:
    grads, cap, first_cap = inputs
    shuffled = rng.sample(grads, len(grads))
    plan = plan_buckets(grads, cap=cap, first_cap=first_cap)
    again = plan_buckets(shuffled, cap=cap, first_cap=first_cap)
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.digest() == plan.digest()


@some
@given(planning_inputs())
def test_planning_is_pure(inputs: tuple[list[GradSpec], int, int]) -> None:
    """Twice the same call gives the same plan, the given list is left alone, and an iterator does as well as a list."""
    grads, cap, first_cap = inputs
    before = list(grads)
    plan = plan_buckets(grads, cap=cap, first_cap=first_cap)
    assert grads == before
    assert plan_buckets(iter(grads), cap=cap, first_cap=first_cap) == plan


@some
@given(grad_lists(), st.integers(0, 10))
def test_caps_above_the_model_give_one_bucket_for_each_kind(grads: list[GradSpec], more: int) -> None:
    cap = max(1, sum(grad.nbytes for grad in grads)) + more
    plan = plan_buckets(grads, cap=cap, first_cap=cap)
    assert len(plan.buckets) == len({(grad.dtype, grad.device) for grad in grads})


@some
@given(grad_lists())
def test_a_cap_of_one_byte_separates_all_gradients_that_are_not_empty(grads: list[GradSpec]) -> None:
    plan = plan_buckets(grads, cap=1, first_cap=1)
    check_plan(plan, grads)
    assert all(sum(grad.nbytes > 0 for grad in bucket.grads) <= 1 for bucket in plan.buckets)


@some
@given(planning_inputs(), st.integers(1, 1 << 40))
def test_a_first_cap_above_the_cap_means_the_cap(inputs: tuple[list[GradSpec], int, int], more: int) -> None:
    grads, cap, _ = inputs
    assert plan_buckets(grads, cap=cap, first_cap=cap + more) == plan_buckets(grads, cap=cap, first_cap=cap)


@some
@given(grad_lists(), st.data())
def test_equal_caps_plan_each_kind_as_if_it_were_alone(grads: list[GradSpec], data: st.DataObject) -> None:
    cap = data.draw(caps(grads))
    together = plan_buckets(grads, cap=cap, first_cap=cap)
    apart = set()
    for kind in {(grad.dtype, grad.device) for grad in grads}:
        alone = plan_buckets([g for g in grads if (g.dtype, g.device) == kind], cap=cap, first_cap=cap)
        apart |= {bucket.grads for bucket in alone.buckets}
    assert {bucket.grads for bucket in together.buckets} == apart


def test_greedy_in_ready_order_by_hand() -> None:
    """Bytes 4 4 4 16 24 16 36 44 4 under 40, the first bucket under 8: the 44 are alone, the 4 join the 36."""
    grads = [some_grad(i, size) for i, size in enumerate([1, 1, 1, 4, 6, 4, 9, 11, 1])]
    plan = plan_buckets(grads, cap=40, first_cap=8)
    assert outputs(plan) == [[0, 1], [2, 3], [4, 5], [7], [6, 8]]
    assert [bucket.nbytes for bucket in plan.buckets] == [8, 20, 40, 44, 40]
    assert [bucket.index for bucket in plan.buckets] == [0, 1, 2, 3, 4]
    check_plan(plan, grads)


def test_order_is_that_of_the_backward_graph_not_of_its_outputs() -> None:
    """A parameter registered first but used last is ready early (Note [bucket order])."""
    ready = [30, 20, 10, 15]
    grads = [some_grad(i, 2, ready=at) for i, at in enumerate(ready)]
    assert outputs(plan_buckets(grads, cap=16, first_cap=8)) == [[2], [3, 1], [0]]


def test_gradients_ready_at_once_go_by_output_index() -> None:
    grads = [some_grad(output, 1, ready=7) for output in (3, 0, 2, 1)]
    assert outputs(plan_buckets(grads, cap=8, first_cap=8)) == [[0, 1], [2, 3]]


def test_kinds_fill_side_by_side_and_are_launched_when_ready() -> None:
    """fp32 at 0 2 4 6 and bf16 at 1 3 5: the bf16 bucket of 1 and 3 is ready before fp32's second one."""
    half = torch.bfloat16
    grads = [some_grad(i, 2, dtype=half if i % 2 else torch.float32) for i in range(7)]
    plan = plan_buckets(grads, cap=16, first_cap=16)
    assert outputs(plan) == [[0, 2], [1, 3, 5], [4, 6]]
    assert [bucket.dtype for bucket in plan.buckets] == [torch.float32, half, torch.float32]


def test_only_the_first_bucket_to_fill_is_small() -> None:
    """Once fp32 has filled its small bucket, bf16 is held to the full cap, although it has launched nothing yet."""
    half = torch.bfloat16
    grads = [some_grad(i, 2, dtype=half if i >= 3 else torch.float32) for i in range(8)]
    assert outputs(plan_buckets(grads, cap=400, first_cap=8)) == [[0], [1, 2], [3, 4, 5, 6, 7]]


def test_a_lone_early_scalar_does_not_use_up_the_small_first_bucket() -> None:
    """Output 0 is launched first, alone of its kind; the first bucket of the others is small nevertheless."""
    grads = [some_grad(0, dtype=torch.float64), *(some_grad(i, 2) for i in range(1, 8))]
    plan = plan_buckets(grads, cap=400, first_cap=16)
    assert outputs(plan) == [[0], [1, 2], [3, 4, 5, 6, 7]]
    check_plan(plan, grads)


def test_a_kind_that_fills_slowly_does_not_hold_the_first_bucket_back() -> None:
    """fp32 comes first but in crumbs; bf16 fills the small bucket and is launched first."""
    half = torch.bfloat16
    grads = [
        some_grad(0, 1),
        some_grad(1, 4, dtype=half),
        some_grad(2, 1),
        some_grad(3, 4, dtype=half),
        some_grad(4, 1),
        some_grad(5, 1),
    ]
    assert outputs(plan_buckets(grads, cap=400, first_cap=8)) == [[1], [3], [0, 2, 4, 5]]


def test_a_huge_gradient_travels_alone_and_counts_as_the_first_bucket() -> None:
    grads = [some_grad(0, 100), *(some_grad(i, 1) for i in range(1, 5))]
    assert outputs(plan_buckets(grads, cap=40, first_cap=8)) == [[0], [1, 2, 3, 4]]
    # Larger than first_cap but not than cap: it still starts the network, and nothing is added to it.
    assert outputs(plan_buckets(grads, cap=410, first_cap=8)) == [[0], [1, 2, 3, 4]]


def test_a_huge_gradient_in_the_middle_leaves_open_what_was_open() -> None:
    """A bias and a norm between the weights of large layers are not worth an all-reduce."""
    grads = [some_grad(i, 1000 if i % 3 == 2 else 1) for i in range(9)]
    plan = plan_buckets(grads, cap=16, first_cap=8)
    assert outputs(plan) == [[2], [0, 1, 3, 4], [5], [6, 7], [8]]
    check_plan(plan, grads)
    assert outputs(plan_buckets(grads, cap=16, first_cap=4)) == [[0], [2], [5], [1, 3, 4, 6], [7], [8]]


def test_given_caps_go_one_after_the_other_even_with_huge_gradients() -> None:
    """Whoever lists the sizes of buckets gets these buckets."""
    grads = [some_grad(0, 1), some_grad(1, 1), some_grad(2, 1000, 1000), some_grad(3, 1), some_grad(4, 1)]
    plan = plan_buckets(grads, cap=16, first_cap=16, caps=(16,))
    assert outputs(plan) == [[0, 1], [2], [3, 4]]
    check_plan(plan, grads)


def test_empty_gradients_join_the_open_bucket_even_a_full_one() -> None:
    grads = [some_grad(0, 0), some_grad(1, 2), some_grad(2, 0, 3), some_grad(3, 1), some_grad(4, 5, 0)]
    plan = plan_buckets(grads, cap=8, first_cap=8)
    assert outputs(plan) == [[0, 1, 2], [3, 4]]
    assert plan.buckets[0].offsets == (0, 0, 2)
    check_plan(plan, grads)


def test_an_empty_gradient_never_joins_one_larger_than_the_cap() -> None:
    """It would only delay it. Alone of its kind or not, it gets a bucket of zero bytes then."""
    grads = [some_grad(0, 100), some_grad(1, 0), some_grad(2, 100)]
    plan = plan_buckets(grads, cap=8, first_cap=8)
    assert outputs(plan) == [[0], [1], [2]]
    assert [bucket.nbytes for bucket in plan.buckets] == [400, 0, 400]
    check_plan(plan, grads)


def test_no_gradients_give_no_buckets() -> None:
    plan = plan_buckets([], cap=1, first_cap=1)
    assert plan.buckets == ()
    assert plan.grads == ()
    assert plan.nbytes == 0
    check_plan(plan, [])


@pytest.mark.parametrize("name", ["cap", "first_cap"])
@pytest.mark.parametrize("value", [0, -1, 2.5, 25.0, "25", None, True, float("inf")])
def test_a_cap_that_is_no_size_is_refused_by_name(name: str, value: object) -> None:
    arguments: dict[str, object] = {"cap": 8, "first_cap": 8, name: value}
    with pytest.raises(ValueError, match=rf"^{name} must be a positive whole number of bytes") as error:
        plan_buckets([some_grad(0, 1)], **arguments)  # type: ignore[arg-type]
    assert repr(value) in str(error.value)


def test_two_gradients_at_one_output_are_refused() -> None:
    with pytest.raises(AssertionError, match="same output"):
        plan_buckets([some_grad(0, 1), some_grad(0, 2)], cap=8, first_cap=8)


@pytest.fixture(scope="module")
def hundred_thousand() -> list[GradSpec]:
    """As many gradients of all kinds, in no order."""
    rng = random.Random(0)
    grads = []
    for output in range(100_000):
        shape = (rng.randrange(512),)
        dtype, device = rng.choice(DTYPES), rng.choice(DEVICES)
        ready = rng.randrange(200_000)
        grads.append(GradSpec(output, output, ready, shape, dense_strides(shape), dtype, device, frozenset()))
    return grads


@pytest.mark.parametrize("cap", [1, 1 << 20, 1 << 60])
def test_a_hundred_thousand_gradients_are_each_measured_once(
    cap: int, hundred_thousand: list[GradSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of open or closed buckets does not matter: no bucket's size is added up again."""
    measured = 0
    nbytes = GradSpec.nbytes.fget  # type: ignore[attr-defined]

    def count(grad: GradSpec) -> int:
        nonlocal measured
        measured += 1
        size: int = nbytes(grad)
        return size

    with monkeypatch.context() as patch:
        patch.setattr(GradSpec, "nbytes", property(count))
        plan = plan_buckets(hundred_thousand, cap=cap, first_cap=4096)
    assert measured == len(hundred_thousand)
    assert sum(len(bucket.grads) for bucket in plan.buckets) == len(hundred_thousand)


def test_a_hundred_thousand_gradients_pass_the_oracle(hundred_thousand: list[GradSpec]) -> None:
    check_plan(plan_buckets(hundred_thousand, cap=1 << 20, first_cap=1 << 12), hundred_thousand)
