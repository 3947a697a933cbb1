"""Launches held back: a permutation that keeps the link busy, and sends what is needed first first."""

from itertools import accumulate, chain

from hypothesis import given
from hypothesis import strategies as st

from fxddp.passes.launching import plan_launches

seconds = st.floats(0.001, 10, allow_nan=False)


@given(st.lists(st.tuples(seconds, seconds, st.integers(0, 5)), max_size=20))
def test_launches(drawn: list[tuple[float, float, int]]):
    ready = list(accumulate(piece for piece, _, _ in drawn))
    sending, needed = [time for _, time, _ in drawn], [place for _, _, place in drawn]
    launches = plan_launches(ready, sending, needed)
    order = list(chain.from_iterable(launches))
    assert sorted(order) == list(range(len(drawn))), "each once"
    waiting: set[int] = set()
    busy = 0.0
    for bucket, started in enumerate(launches):
        waiting.add(bucket)
        for each in started:
            assert each in waiting, "packed before"
            assert needed[each] == min(needed[i] for i in waiting), "the one that is needed first"
            waiting.remove(each)
            busy = max(busy, ready[bucket]) + sending[each]
        if bucket + 1 < len(drawn):
            assert not waiting or busy > ready[bucket + 1], "the link does not idle while something could leave"
    assert not waiting


def test_a_slow_link_gets_one_bucket_and_then_those_needed_first():
    assert plan_launches([1, 2, 3, 4], [10, 10, 10, 10], [3, 2, 1, 0]) == ((0,), (), (), (3, 2, 1))


def test_a_fast_link_gets_each_at_once():
    assert plan_launches([1, 2, 3], [0.1, 0.1, 0.1], [2, 1, 0]) == ((0,), (1,), (2,))
