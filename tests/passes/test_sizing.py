"""`fxddp.passes.sizing`: where buckets end with `bucket_mb="auto"`, judged by a step simulated gradient by gradient."""

import itertools
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.choosing import choose_plan
from fxddp.passes.cost import Machine, Network, Speeds, Work
from fxddp.passes.outline import GradNote, Outline
from fxddp.passes.plan import Bucket, BucketPlan, GradSpec, check_plan
from fxddp.passes.sizing import SLACK, TOGETHER, Stretch, equal_size
from tests.strategies import grad_lists, some_grad

MIB = 1 << 20
SWEEP = (0.5, 1, 2, 4, 8, 16, 25, 32, 64)
SIZES = SWEEP[:6]
"""Those that a bucket of several gradients may have in any model."""


def planned(stretch: Stretch) -> BucketPlan:
    plan = stretch.plan()
    check_plan(plan, stretch.grads)
    return plan


def fixed(stretch: Stretch, mib: float) -> BucketPlan:
    return plan_buckets(stretch.grads, cap=int(mib * MIB), first_cap=min(int(mib * MIB), MIB))


def step(stretch: Stretch, plan: BucketPlan, scale: float = 1.0) -> float:
    """The model, written down once more: a network that sends one bucket after another, helped by what computes."""
    when = {grad.output: ready for grad, ready in zip(stretch.grads, stretch.when, strict=True)}
    network, free, sent, delay, rest = stretch.network, 0.0, 0.0, 0.0, 0.0
    steps = 2 * (network.world_size - 1)
    share = min(network.bandwidth * network.cpu_per_byte, 0.5)  # of the processor's time, while it sends
    for bucket in plan.buckets:
        computed = scale * max(when[grad.output] for grad in bucket.grads)
        delay = min(network.cpu_per_byte * sent, share / (1 - share) * (computed - scale * min(when.values())))
        rest = scale * stretch.total - computed
        launched = computed + delay
        part = bucket.nbytes / network.world_size
        sent += steps * part
        free = max(free, launched) + steps * (network.latency + part / network.bandwidth)
    last = min(network.cpu_per_byte * sent - delay, share / (1 - share) * rest)
    return max(free, scale * stretch.total + delay + last)


networks = st.builds(
    Network, st.sampled_from([2, 3, 8, 64]), st.floats(1e7, 1e11), st.sampled_from([0.0, 1e-6, 1e-5, 1e-4, 1e-3])
)


@st.composite
def models(draw: st.DrawFn, *, max_size: int = 60) -> Stretch:
    """Backwards of one kind of gradients, as networks have them: sizes over several decades, some ready at once."""
    sizes = draw(
        st.lists(st.integers(2, 24).map(lambda e: 1 << e) | st.integers(0, 5000), min_size=1, max_size=max_size)
    )
    total = draw(st.floats(1e-3, 1.0))
    moments = st.floats(0, 1, allow_subnormal=False)  # whose sum has a reciprocal
    gaps = draw(st.lists(moments, min_size=len(sizes) + 1, max_size=len(sizes) + 1))
    scale = total / (sum(gaps) or 1.0)
    grads = [some_grad(i, size) for i, size in enumerate(sizes)]
    when = dict(enumerate(itertools.accumulate(gap * scale for gap in gaps[:-1])))
    return Stretch.of(grads, when, total, draw(networks))


# ---- the closed form -------------------------------------------------------------------------------------------------


def test_the_best_equal_size_is_where_the_derivative_vanishes() -> None:
    size, nbytes, seconds, alpha, beta = sympy.symbols("size nbytes seconds alpha beta", positive=True)
    bound = seconds * size / nbytes + alpha * nbytes / size + beta * nbytes  # of Note [equal buckets]
    (best,) = sympy.solve(sympy.diff(bound, size), size)
    assert sympy.simplify(best - nbytes * sympy.sqrt(alpha / seconds)) == 0
    (keeps_up,) = sympy.solve(sympy.Eq(alpha + beta * size, seconds * size / nbytes), size)
    assert sympy.simplify(keeps_up - alpha * nbytes / (seconds - beta * nbytes)) == 0
    network = Network(2, bandwidth=1e8, latency=1e-4)  # 2 (N-1)/N = 1
    assert float(equal_size(network, 1e8, 0.5)) == pytest.approx(1e8 * (2e-4 / 0.5) ** 0.5)
    assert float(equal_size(network, 1e7, 0.5)) == pytest.approx(2e-4 * 1e7 / (0.5 - 0.1))


def test_it_grows_as_the_root_of_the_model_where_the_network_is_the_bottleneck() -> None:
    growth = sympy.Symbol("growth", positive=True)
    network = Network(2, bandwidth=1e8, latency=1e-4)
    sizes = [float(equal_size(network, 1e8 * times, 0.5 * times)) for times in (1, 4, 16)]
    assert sizes == pytest.approx([sizes[0], 2 * sizes[0], 4 * sizes[0]])
    bound = equal_size(network, 10**8 * growth, growth / 2)
    assert float(sympy.simplify(sympy.diff(sympy.log(bound), growth) * growth)) == pytest.approx(0.5)
    hidden = [float(equal_size(network, 1e7 * times, 0.5 * times)) for times in (1, 4, 16)]
    assert hidden == pytest.approx([hidden[0]] * 3), "and not at all where computation hides the sending"


# ---- the planner -----------------------------------------------------------------------------------------------------


@given(models(), st.sampled_from([0.0, 1e-10, 1e-9, 1e-7]))
def test_no_fixed_size_is_better_in_the_model(stretch: Stretch, cpu: float) -> None:
    stretch = replace(stretch, network=replace(stretch.network, cpu_per_byte=cpu))
    auto = stretch.price(planned(stretch))
    for mib in SIZES:
        assert auto <= stretch.price(fixed(stretch, mib)) * 1.01, mib


@given(models(max_size=9))
def test_the_earliest_end_is_that_of_the_best_of_all_plans(stretch: Stretch) -> None:
    """All ways to cut a few gradients, tried one by one."""
    outputs = [grad.output for grad in stretch.grads]
    ways = itertools.chain.from_iterable(itertools.combinations(outputs[:-1], k) for k in range(len(outputs)))
    plans = [plan_buckets(stretch.grads, cap=1, first_cap=1, ends=frozenset(way)) for way in ways]
    largest = max(16 * MIB, sum(grad.nbytes for grad in stretch.grads) / 8)
    plans = [plan for plan in plans if all(len(b.grads) == 1 or b.nbytes <= largest for b in plan.buckets)]
    for scale in (0.5, 1.0, 2.0):
        best = min(step(stretch, plan, scale) for plan in plans)
        earliest = stretch._search.soonest(scale)
        assert earliest == pytest.approx(best, rel=1e-9)
        ends = [stretch.grads[cut - 1].output for cut in stretch._search.fewest([scale], 0.0)]
        plan = plan_buckets(stretch.grads, cap=1, first_cap=1, ends=frozenset(ends))
        assert step(stretch, plan, scale) <= best * (1 + 1e-9) + 1e-12
        meet = [each for each in plans if step(stretch, each, scale) <= best * (1 + 1e-13)]
        assert len(plan.buckets) <= min(len(each.buckets) for each in meet)


@given(models(), st.sampled_from([0.0, 1e-10, 1e-9, 1e-7]))
def test_its_model_is_the_network_that_sends_one_after_the_other(stretch: Stretch, cpu: float) -> None:
    stretch = replace(stretch, network=replace(stretch.network, cpu_per_byte=cpu))
    for plan in (planned(stretch), fixed(stretch, 1)):
        for scale in (0.5, 1.0):
            assert stretch.finish(plan, scale) == pytest.approx(step(stretch, plan, scale))


@given(models(), st.sampled_from([1e-10, 1e-9, 1e-7]))
def test_the_search_knows_what_is_delayed_where_all_that_was_ready_is_sent(stretch: Stretch, cpu: float) -> None:
    network = replace(stretch.network, cpu_per_byte=cpu)
    share = min(network.bandwidth * cpu, 0.5)
    before = list(itertools.accumulate((grad.nbytes for grad in stretch.grads[:-1]), initial=0))
    for scale in (0.5, 1.0, 2.0):
        moments = [scale * ready for ready in stretch.when]
        lags = [
            min(cpu * network.sent(nbytes), share / (1 - share) * (moment - moments[0]))
            for nbytes, moment in zip(before, moments, strict=True)
        ]
        when = tuple(moment + lag for moment, lag in zip(moments, lags, strict=True))
        delayed = replace(stretch, when=when, total=scale * stretch.total)
        search = replace(stretch, network=network)._search
        assert search.soonest(scale) == pytest.approx(stretch._search.soonest(scale))
        assert search.soonest(scale, late=True) == pytest.approx(delayed._search.soonest(1.0))


def test_plans_are_looked_for_where_all_that_was_ready_is_sent() -> None:
    """What sending takes from the processor is so much here that plans made without it are worse."""
    network = Network(2, 1e8, 1e-5, cpu_per_call=1e-4, cpu_per_byte=3e-9)
    better = 0
    for seed in range(40):
        draw = random.Random(seed)
        grads = [some_grad(i, draw.choice([100, 10_000, 300_000])) for i in range(48)]
        stretch = Stretch.of(grads, {i: 0.05 * (i + 1) / 48 for i in range(48)}, 0.05, network)
        least, price = {}, stretch.price(planned(stretch))
        for late in (False, True):
            found = [stretch._search.fewest(scales, slack, late=late) for scales in TOGETHER for slack in SLACK]
            ends = [frozenset(grads[cut - 1].output for cut in stretch._trimmed(cuts)) for cuts in found]
            least[late] = min(stretch.price(plan_buckets(grads, cap=1, first_cap=1, ends=each)) for each in ends)
        assert price <= min(least.values()) * (1 + 1e-12)
        better += least[True] < least[False] * (1 - 1e-6)
    assert better, "no case shows the difference"


def test_what_travels_is_what_is_planned_for() -> None:
    """Half of the bytes travel: as on a network twice as fast."""
    grads = [some_grad(i, 1000 * (i % 7 + 1)) for i in range(60)]
    when = {i: 1e-3 * (i + 1) for i in range(60)}
    half = Stretch.of(grads, when, 0.06, Network(2, 1e6, 1e-3), sent=lambda grad: grad.nbytes / 2)
    whole = Stretch.of(grads, when, 0.06, Network(2, 2e6, 1e-3))
    assert half.plan() == whole.plan() != Stretch.of(grads, when, 0.06, Network(2, 1e6, 1e-3)).plan()
    assert half.finish(half.plan()) == pytest.approx(whole.finish(whole.plan()))


@given(grad_lists(min_size=1, max_size=40), networks, st.floats(1e-3, 1.0), st.randoms())
def test_every_kind_has_a_plan(grads: list[GradSpec], network: Network, total: float, order: random.Random) -> None:
    last = max(grad.ready for grad in grads) + 1
    when = {grad.output: total * grad.ready / last for grad in grads}
    stretch = Stretch.of(grads, when, total, network)
    plan = planned(stretch)
    for mib in SIZES:
        assert stretch.price(plan) <= stretch.price(fixed(stretch, mib)) * 1.1, mib
    order.shuffle(grads)
    assert planned(Stretch.of(grads, when, total, network)) == plan, "the order in which gradients are listed has a say"


@pytest.mark.parametrize("latency", [1e-3, 0.0])
def test_what_lies_around_a_gradient_too_large_to_share_a_bucket(latency: float) -> None:
    """Where a collective is dear, the small ones before and after it travel together."""
    grads = [some_grad(i, 1 << 24 if i == 4 else 1) for i in range(9)]
    stretch = Stretch.of(grads, {i: 1e-3 * i for i in range(9)}, 8e-3, Network(2, 4e9, latency))
    plan = planned(stretch)
    assert all(stretch.price(plan) <= stretch.price(fixed(stretch, mib)) for mib in SWEEP)
    small = [bucket for bucket in plan.buckets if bucket.nbytes < MIB]
    assert len(small) == 1 or not latency


@pytest.mark.parametrize("place", [0, 4, 8])
@pytest.mark.parametrize("mib", [10, 14, 64])
def test_what_is_alone_shares_no_bucket(place: int, mib: int) -> None:
    """Although one bucket would be best for so slow a network; as the table of an embedding."""
    grads = [some_grad(i, mib * MIB // 4 if i == place else 1000) for i in range(9)]
    when, network = {i: 1e-3 * i for i in range(9)}, Network(2, 1e9, 1e-2)
    shared = [len(bucket.grads) for bucket in planned(Stretch.of(grads, when, 8e-3, network)).buckets]
    assert (1 in shared) == (mib == 64), "too large to share one"
    plan = planned(Stretch.of(grads, when, 8e-3, network, alone=frozenset({place})))
    assert [grad.output for bucket in plan.buckets if bucket.nbytes >= mib * MIB for grad in bucket.grads] == [place]


@pytest.mark.parametrize(("latency", "rows", "alone"), [(1e-5, True, True), (1e-1, True, False), (1e-5, False, False)])
def test_a_table_is_alone_where_copying_it_takes_longer_than_one_more_bucket(
    latency: float, rows: bool, alone: bool
) -> None:
    grads = [some_grad(i, 1 << 20 if i == 1 else 1000) for i in range(3)]
    notes = {i: GradNote(str(i), None, Work(flops=i), rows=rows and i == 1) for i in range(3)}
    speeds = Speeds(Machine(1e6, 1e10, 1e-6), Network(2, 1e9, latency))  # all are ready at once
    plan = choose_plan(grads, Outline(9, notes, work=Work(flops=3)), speeds=speeds, sent=lambda grad: grad.nbytes)
    assert any([grad.output for grad in bucket.grads] == [1] for bucket in plan.buckets) == alone


def plan_of(network: Network) -> BucketPlan:
    """Of 12 MiB, a quarter at a time, that become ready evenly within a tenth of a second."""
    grads = [some_grad(i, 65536) for i in range(48)]
    notes = {i: GradNote("", None, Work(flops=i + 1)) for i in range(48)}
    speeds = Speeds(Machine(480.0, 1.0, 0.0), network)
    return choose_plan(grads, Outline(48, notes, work=Work(flops=48)), speeds=speeds, sent=lambda grad: grad.nbytes)


def test_a_call_that_takes_much_of_the_processor_is_made_less_often() -> None:
    counts = [len(plan_of(Network(2, 1e9, 1e-5, cpu_per_call=seconds)).buckets) for seconds in (0.0, 1e-3, 1e-1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[2] == 1


def test_what_a_processor_sends_delays_what_it_computes() -> None:
    """Five gradients of a MiB, one a second, in buckets of their own, and much more behind them."""
    grads = [some_grad(i, 1 << 18) for i in range(5)]

    def late(bandwidth: float, cpu: float, *, ranks: int = 2, scale: float = 1.0, rest: float = 989.0) -> float:
        """How much that ends later, with bytes counted in MiB."""
        network = Network(ranks, bandwidth * MIB, 0.0, cpu_per_byte=cpu / MIB)
        stretch = Stretch.of(grads, {i: 7.0 + i for i in range(5)}, 11.0 + rest, network)
        return stretch.finish(fixed(stretch, 1), scale) - scale * (11.0 + rest)

    assert late(100.0, 0.0) == pytest.approx(0.0)
    assert late(100.0, 0.001) == pytest.approx(5 * 0.001)
    assert late(100.0, 0.001, scale=2.0) == pytest.approx(5 * 0.001), "bytes take no longer where computing does"
    assert late(100.0, 0.001, ranks=4) == pytest.approx(5 * 0.0015), "each of four ranks sends 1.5 times the bytes"
    # Sending would take twice the time that there is: it gets half of the processor while something is computed.
    assert late(100.0, 2.0, rest=1.0) == pytest.approx(4.0 + 1.0)
    assert late(100.0, 2.0, rest=1.0, scale=1.5) == pytest.approx(1.5 * (4.0 + 1.0))
    assert late(100.0, 2.0) == pytest.approx(5 * 2.0)


def test_one_bucket_is_best_where_the_processor_is_what_sends() -> None:
    """Nothing is hidden then, and what was not launched yet takes nothing from the computation."""
    plans = [plan_of(Network(2, 1e9, 1e-5, cpu_per_call=1e-4, cpu_per_byte=cpu)) for cpu in (0.0, 1e-9)]
    assert [len(plan.buckets) == 1 for plan in plans] == [False, True]


def test_buckets_are_as_large_as_what_hides_them_and_the_last_ones_small() -> None:
    grads = [some_grad(i, 16384) for i in range(200)]  # 12.5 MiB, a sixteenth each
    for gbit in (0.25, 5):
        when = {i: 0.15 * (i + 1) / 200 for i in range(200)}
        stretch = Stretch.of(grads, when, 0.15, Network(2, gbit * 1e9 / 8, 1e-4))
        sizes = [bucket.nbytes for bucket in planned(stretch).buckets]
        assert len(sizes) > 3
        if gbit < 1:  # the network is the bottleneck: it starts early, and the rest becomes ready while it is busy
            assert sizes == sorted(sizes)
        else:  # hidden but for the last one
            assert sizes == sorted(sizes, reverse=True)


def test_no_bucket_waits_for_small_gradients_behind_large_ones() -> None:
    """Two of a norm behind each of 20 convolutions, a little later."""
    grads = [some_grad(i, 65536 if i % 3 == 0 else 64) for i in range(60)]
    when = {i: 0.005 * (i // 3 + 1) + (0.0001 if i % 3 else 0.0) for i in range(60)}
    *buckets, last = planned(Stretch.of(grads, when, 0.1, Network(2, 1e8, 1e-4))).buckets
    assert len(buckets) > 2
    assert {bucket.grads[-1].output % 3 for bucket in buckets} == {0}
    assert last.grads[-1].output == 59


def test_no_bucket_takes_much_memory() -> None:
    """A network so slow to answer that one bucket would be best."""
    grads = [some_grad(i, 1 << 20) for i in range(200)]  # 4 MiB each
    when = {i: 0.15 * (i + 1) / 200 for i in range(200)}
    sizes = [bucket.nbytes for bucket in planned(Stretch.of(grads, when, 0.15, Network(2, 1e9, 1.0))).buckets]
    assert max(sizes) <= 100 * MIB
    assert len(sizes) == 8


def test_a_few_odd_gradients_do_not_double_the_all_reduces() -> None:
    """A scalar of another dtype beside every layer, as with norms in fp32 around weights in bf16."""
    pairs = [(some_grad(2 * i, 1 << 20, dtype=torch.bfloat16), some_grad(2 * i + 1, 2)) for i in range(50)]
    grads = list(itertools.chain.from_iterable(pairs))
    when = {grad.output: 0.001 * (grad.output + 1) for grad in grads}
    plan = planned(Stretch.of(grads, when, 0.1, Network(2, 1e9, 1e-4)))
    kinds = [bucket.dtype for bucket in plan.buckets]
    assert kinds.count(torch.float32) == 1
    assert kinds.count(torch.bfloat16) > 3


def test_alone_there_is_one_bucket_of_each_kind() -> None:
    grads = [some_grad(i, 1000, dtype=(torch.float32, torch.float64)[i % 2]) for i in range(10)]
    stretch = Stretch.of(grads, {i: float(i) for i in range(10)}, 10.0, Network(1, 1e9, 1e-5))
    assert len(planned(stretch).buckets) == 2
    assert Stretch.of([], {}, 1.0, Network(2, 1e9, 1e-5)).ends() == frozenset()


@pytest.mark.parametrize("ends", [frozenset(), frozenset({1, 3})])
def test_the_oracle_knows_where_buckets_must_end(ends: frozenset[int]) -> None:
    grads = [some_grad(i, 4) for i in range(6)]
    plan = plan_buckets(grads, cap=1, first_cap=1, ends=ends)
    check_plan(plan, grads)
    assert [bucket.grads[-1].output for bucket in plan.buckets] == sorted({*ends, 5})
    other = plan_buckets(grads, cap=1, first_cap=1, ends=frozenset({2}))
    with pytest.raises(AssertionError, match="output"):
        check_plan(BucketPlan(other.buckets, cap=1, first_cap=1, ends=ends), grads)
    one = (Bucket(0, tuple(grads)),)
    if ends:
        with pytest.raises(AssertionError, match="goes on after output 1"):
            check_plan(BucketPlan(one, cap=1, first_cap=1, ends=ends), grads)


@settings(max_examples=20)
@given(st.integers(1, 1000), st.floats(0.9, 1.1))
def test_a_batch_that_is_a_little_larger_gives_the_same_plan(batch: int, more: float) -> None:
    size = sympy.Symbol("s0", positive=True, integer=True)
    grads = [some_grad(i, 100_000) for i in range(20)]
    notes = {i: GradNote("", None, Work(flops=10**6 * size * (i + 1))) for i in range(20)}
    speeds = Speeds(Machine(1e10, 1e10, 0.0), Network(2, 1e8, 1e-4))

    def plan(value: int) -> BucketPlan:
        told = Outline(20, notes, values={size: value}, work=Work(flops=10**6 * size * 20))
        return choose_plan(grads, told, speeds=speeds, sent=lambda grad: grad.nbytes)

    exact = 1 << (batch % 12)
    assert plan(exact) == plan(max(1, round(exact * more)))


def lines_to_plan(count: int) -> int:
    """Lines of Python that run while so many gradients are planned."""
    draw = random.Random(0)
    grads = [some_grad(i, draw.randrange(1, 5000)) for i in range(count)]
    stretch = Stretch.of(grads, {i: (i + 1) / count for i in range(count)}, 1.0, Network(8, 1e9, 1e-5))
    lines = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        stretch.plan()
    finally:
        sys.settrace(before)
    return lines


def test_the_planner_grows_with_the_gradients_and_no_faster() -> None:
    assert lines_to_plan(40_000) < 5 * lines_to_plan(10_000)
