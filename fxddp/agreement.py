"""Ranks tell each other what they reduce next, and agree on one step or say by name how they differ.

Note [agreement]: nothing is posted while compiling. A backward announces each of its compiled graphs when that starts,
and its end; the record that all exchange (`channel.py`) is the same in the usual case, and then the plan's own buckets
travel. Where it differs the ranks exchange the events in full, once for each combination of records, and conclude what
to do (`decision.py`).

With `static_graph=True` that happens in the first synchronised backward; from then on what was agreed there is all that
may come, and nothing is exchanged, but for tables that travelled in rows then (`rows.py`): how many each rank has.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .channel import Announced, RanksDisagree, Record
from .decision import CONTACT, ENDS, GRAPH, HOOK, JOINED, Decision, Different, Event, decide, some

if TYPE_CHECKING:
    from .backend import Backend
    from .group import Group


class Proposal:
    """An event of this rank, announced; its decision is there when the other ranks announced theirs."""

    __slots__ = ("_agreement", "_announced", "_decision", "_group", "event", "events", "sizes")

    def __init__(
        self,
        agreement: "Agreement",
        event: Event,
        group: "Group",
        announced: Announced | None,
        decision: Decision | None = None,
    ) -> None:
        self.event = event
        self.events: Sequence[Event] = (event,)
        self.sizes: Sequence[Sequence[int]] = ()
        self._agreement = agreement
        self._group = group
        self._announced = announced
        self._decision = decision

    def receive(self) -> bytes | None:
        """Waits for what rank 0 cast with this event; None if a rank is at another, and a decision tells what is done.

        Raises:
            RanksDisagree: rank 0 does not come.
        """
        assert self._announced is not None
        return self._group.channel.receive(self._announced)

    def decision(self) -> Decision:
        """Waits for the other ranks; what all of them do.

        Raises:
            RanksDisagree: they cannot go on together; on every rank.
        """
        if self._decision is None:
            assert self._announced is not None
            # Even where the others' records are there: they may be waiting for this, and this rank, from here on, for
            # them in a way that starts nothing: in a new process group, or in a collective of the user's.
            self._group.settle_all()
            self._decision = self._agreement.conclude(self, self._announced.records(), self._group)
            self.sizes = self._announced.sizes
            self._announced = None
        return self._decision


class Agreement:
    """What the ranks of a backend's group agreed on so far."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = weakref.ref(backend)
        self._group: Group | None = None
        self._static: dict[Record, tuple[Event, list[Decision]]] = {}
        self._turns: dict[Record, int] = {}
        self._closed = False

    def announce(
        self,
        event: Event,
        group: "Group",
        *,
        carried: bool = False,
        cast: Callable[[], bytes] | None = None,
        sizes: Sequence[int] = (),
    ) -> Proposal:
        """Announces what this rank does next.

        Args:
            event: the step.
            group: the ranks.
            carried: some of it was left over from `no_sync`, so that it is no news in a static graph.
            cast: called on rank 0 for bytes that go out with it; the others get them from `Proposal.receive`.
            sizes: numbers that may be others on each rank; all get them as `Proposal.sizes`, by rank.

        Raises:
            RanksDisagree: the ranks lost each other earlier.
            RuntimeError: the graph was promised to be static and is not.
        """
        if self._group is not group:
            self._group = group
            self._static.clear()
            self._turns.clear()
            self._closed = False
        if group.size == 1:
            return Proposal(self, event, group, None, event.alone)
        backend = self._backend()
        assert backend is not None
        if event.kind in (GRAPH, HOOK, *ENDS) and not backend.registered.were_confirmed(group):
            # else ranks would start other collectives, or train otherwise
            backend.replica.agree_on_hooks(backend.registered.names, group)
        if self._closed and not backend.joining and event.kind in (GRAPH, *ENDS):
            known = self._static.get(event.bare.record)
            if known is None and carried:
                return Proposal(self, event.bare, group, None, event.bare.alone)
            if known is None:
                self._refuse_news(event.bare)
            else:
                decision = self._next(event.bare.record, known[1])
                if not decision.in_rows:
                    return Proposal(self, event.bare, group, None, decision)
        group.confirm()
        return Proposal(self, event, group, group.channel.announce(event.record, self._describe(event), cast, sizes))

    def _next(self, record: Record, decisions: list[Decision]) -> Decision:
        """What was decided at this turn of the first iteration; a step may come several times in one."""
        turn = self._turns.get(record, 0)
        self._turns[record] = turn + 1
        return decisions[turn % len(decisions)]

    def conclude(self, proposal: Proposal, records: Sequence[Record], group: "Group") -> Decision:
        """What all ranks do, from their records; called once for each proposal."""
        event = proposal.event
        if all(record == event.record for record in records):
            decision = event.alone
        else:
            key = tuple(records)
            known = group.joint.get(key)
            if known is None:
                texts = group.channel.gather(event.to_json(), self._describe(event))
                proposal.events = list(map(Event.from_json, texts))
                if event.kind == CONTACT and all(theirs.kind == CONTACT for theirs in proposal.events):
                    return event.alone  # `replica.py` compares what they hold
                known = self._decide(proposal.events, group)
                group.remember(key, known)
            decision = known
        backend = self._backend()
        promised = backend is not None and backend.settings.static_graph and not self._closed
        if promised and event.kind in (GRAPH, *ENDS):
            self._static.setdefault(event.bare.record, (event.bare, []))[1].append(decision)
        return decision

    def _decide(self, events: Sequence[Event], group: "Group") -> Decision:
        """For ranks at different steps; by the settings of the backend that the others are at, not this rank's."""
        owner = next((event.owner for event in events if event.kind != JOINED), 0)
        backend = group.owner(owner) or self._backend()  # None where buffers of a model that is gone are confirmed
        find_unused = backend is not None and backend.settings.find_unused_parameters
        try:
            return decide(events, find_unused=find_unused, name=group.title)
        except Different as error:
            raise RanksDisagree(str(error)) from None

    def end_of_iteration(self) -> None:
        """Called when an outermost synchronised backward is over: a static graph is known by now."""
        backend = self._backend()
        self._closed = backend is not None and backend.settings.static_graph
        self._turns.clear()

    def _describe(self, event: Event) -> Callable[[], str]:
        def what() -> str:
            backend = self._backend()
            members = some(event.members, backend.replica.title) if backend is not None else ""
            return f"reduce at {event.kind}" + (f" ({members})" if members else "")

        return what

    def _refuse_news(self, event: Event) -> None:
        """Raises for an event that was not there in the first iteration, unless it has nothing to do with what was."""
        backend = self._backend()
        assert backend is not None
        used = set(event.members) - set(event.unused)
        before = [set(old.members) - set(old.unused) for old, _ in self._static.values() if old.kind == event.kind]
        alike = [old for old in before if event.kind in ENDS or old & set(event.members)]
        if event.kind == GRAPH and not alike:
            return
        known: set[int] = set().union(*before)
        gone = sorted(map(backend.replica.name, (alike[-1] if alike else set()) - used))
        come = sorted(map(backend.replica.name, used - known))
        regrouped = "" if come else ", or other graphs give them, as after another graph break or recompile"
        raise RuntimeError(
            f"static_graph=True, but the parameters that get gradients changed: came {come}, went {gone}{regrouped}. "
            "Keep set and graphs the same in every iteration, or leave static_graph at False"
        )
