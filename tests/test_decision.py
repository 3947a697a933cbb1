"""What ranks conclude from their different steps, without processes: all the same, and safe."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxddp.decision import (
    BUFFERS,
    CONTACT,
    END,
    ENDS,
    FORWARD,
    GRAPH,
    HOOK,
    HOOKS,
    INNER,
    JOINED,
    KINDS,
    Decision,
    Different,
    Event,
    decide,
)

MEMBERS = st.lists(st.integers(1, 12), unique=True, max_size=8)


@st.composite
def graphs(draw: st.DrawFn, kind: str = GRAPH) -> Event:
    """A step with some parameters in some buckets, of which some got no gradient."""
    members = draw(MEMBERS)
    buckets: list[tuple[int, ...]] = []
    while members:
        size = draw(st.integers(1, len(members)))
        buckets.append(tuple(members[:size]))
        members = members[size:]
    flat = sorted(m for bucket in buckets for m in bucket)
    unused = draw(st.lists(st.sampled_from(flat), unique=True)) if flat and kind == GRAPH else []
    return Event(kind, tuple(buckets), tuple(sorted(unused)))


def ends() -> st.SearchStrategy[Event]:
    """The end of a backward, or of one inside it, with some parameters left."""
    return st.builds(lambda kind, m: Event(kind, (tuple(sorted(m)),) if m else ()), st.sampled_from(ENDS), MEMBERS)


STEPS = st.one_of(graphs(), ends(), st.just(Event(JOINED)))


def outcome(events: list[Event], find_unused: bool) -> Decision | str:
    try:
        return decide(events, find_unused=find_unused, name=str)
    except Different as error:
        return str(error)


@given(st.lists(STEPS, min_size=2, max_size=4), st.booleans())
def test_what_travels(events: list[Event], find_unused: bool):
    """Nothing travels twice, nothing is lost, nobody is left waiting, and no sets are mixed without being asked to."""
    result = outcome(events, find_unused)
    active = [e for e in events if e.kind != JOINED]
    if not active:
        assert result == Decision(active=0)
        return
    if isinstance(result, str):
        assert not find_unused or {e.kind for e in active}.issuperset(ENDS)
        return
    travels = [m for bucket in result.buckets for m in bucket]
    assert len(travels) == len(set(travels))
    assert all(result.buckets), "an empty bucket"
    moving = [e for e in active if e.kind not in ENDS] or active
    for rank, event in enumerate(events):
        stays = event.kind == JOINED or (event.kind in ENDS and moving is not active)
        assert (rank in result.again) == stays
    if result.defer:
        assert not find_unused
        assert not travels
        return
    assert set(travels) == {m for e in moving for m in e.members}
    used = {m for e in moving for m in set(e.members) - set(e.unused)}
    assert result.unused == set(travels) - used
    if not find_unused:
        assert len({(e.members, e.unused) for e in active}) == 1
    assert (result.active is None) == (len(active) == len(events))
    if result.active is not None:
        assert result.active == len(active)
        assert result.root is not None
        assert events[result.root].kind != JOINED


@given(st.lists(STEPS, min_size=2, max_size=4), st.booleans())
def test_events_survive_the_wire(events: list[Event], find_unused: bool):
    """Ranks decide from what they were sent; equal records mean equal events."""
    sent = [Event.from_json(json.loads(json.dumps(event.to_json()))) for event in events]
    assert outcome(sent, find_unused) == outcome(events, find_unused)
    for one in events:
        for other in events:
            assert (one.record == other.record) == (one == other)


@given(graphs(), st.permutations(range(3)))
def test_rank_0s_order_travels(event: Event, order: list[int]):
    """The same parameters in another order and grouping: those of the first rank travel."""
    other = Event(GRAPH, tuple((m,) for m in sorted(event.members, key=lambda m: order[m % 3])), event.unused)
    result = decide([event, other], find_unused=False, name=str)
    assert result.buckets == event.buckets
    assert not result.defer


def test_tensor_hooks_on_what_one_rank_does_not_use():
    """They want the local gradient before it travels, which the end of the backward can wait for."""
    events = [Event(GRAPH, ((1, 2),), unused=(2,)), Event(GRAPH, ((1, 2),), hooked=(2,))]
    assert decide(events, find_unused=True, name=str) == Decision(defer=True)
    with pytest.raises(Different, match="tensor hooks sit on nothing on rank 0 and on 2 on rank 1"):
        decide([Event(GRAPH, ((1, 2),)), events[1]], find_unused=True, name=str)


def test_the_same_step_needs_no_thought():
    event = Event(GRAPH, ((3, 1), (2,)), (1,))
    assert decide([event, event], find_unused=False, name=str) == event.alone


@pytest.mark.parametrize("kind", [HOOK, BUFFERS, CONTACT, HOOKS, FORWARD])
@pytest.mark.parametrize("other", KINDS)
def test_steps_that_cannot_meet(kind: str, other: str):
    events = [Event(kind, ((1, 2),)), Event(other, ((1, 3),))]
    mixable = {GRAPH, HOOK, *ENDS}
    if JOINED in (kind, other) and CONTACT not in (kind, other):
        assert decide(events, find_unused=False, name=str).again == {1}
        return
    message = "met for the first time" if JOINED in (kind, other) else "rank 0"
    with pytest.raises(Different, match=message):
        decide(events, find_unused=False, name=str)
    if kind not in mixable or other not in mixable:
        with pytest.raises(Different, match=message):
            decide(events, find_unused=True, name=str)


@pytest.mark.parametrize("find_unused", [False, True])
def test_the_end_of_a_backward_is_not_that_of_one_inside(find_unused: bool):
    """A rank that is through would not come back for what the other has still to do."""
    ends = [Event(kind, ((1, 2),)) for kind in ENDS]
    with pytest.raises(Different, match="rank 0 is at the end of a backward inside the backward with 1, 2"):
        decide(ends, find_unused=find_unused, name=str)
    graph = Event(GRAPH, ((3,),))
    late = decide([graph, Event(INNER, ((1,),))], find_unused=find_unused, name=str)
    assert late.again == {1}


def test_a_difference_is_named():
    names = {1: "body.weight", 2: "left.weight", 3: "right.weight"}
    ends = [Event(END, ((1, 2),)), Event(END, ((1, 3),))]
    with pytest.raises(Different) as error:
        decide(ends, find_unused=False, name=names.__getitem__)
    assert "only rank 0 has gradients of left.weight; only rank 1 has gradients of right.weight" in str(error.value)
