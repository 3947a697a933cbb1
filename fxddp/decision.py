"""What the ranks do where their next steps differ: a pure function of what each of them announced.

Parameters are named by serial numbers that all ranks share (`replica.py`). Every rank draws the same conclusion from
the same events, so no collective can be mismatched:

all at a graph, same parameters, another order or grouping    rank 0's buckets travel, the others copy into them
all at a graph, other parameters        find_unused_parameters: the union travels, zeros stand in (or, with tensor
                                        hooks on those, defer); else defer
some at a graph, others at the end      find_unused_parameters: the latter stand in with zeros; else defer
all at the end                          equal sets, or with find_unused_parameters their union; else an error
some at the end, others at that of a    an error: the former are through
backward inside the backward
with collectives of the model inside    as if find_unused_parameters were not set: theirs and ours must not interleave
anything else                           an error

Deferred, every rank keeps its gradients to the end of the backward, where the sets of the whole backward are compared:
a graph break or a recompile limit on one rank only changes how gradients are grouped, not which there are.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

from .channel import Record

Layout = tuple[tuple[int, ...], ...]
"""Buckets of parameters, by serial number."""

GRAPH = "a compiled graph"
HOOK = "an accumulation hook"
END = "the end of the backward"
INNER = "the end of a backward inside the backward"
BUFFERS = "the buffers before a forward"
FORWARD = "a forward under join"
CONTACT = "first contact"
HOOKS = "the first use of a communication hook or an optimizer in backward"
JOINED = "no more inputs"
MEASURE = 'the measurement of the network for bucket_mb="auto" or overlap="next_forward"'
KINDS = (GRAPH, HOOK, END, BUFFERS, FORWARD, CONTACT, HOOKS, JOINED, INNER, MEASURE)
ENDS = (INNER, END)


@dataclass(frozen=True)
class Event:
    """The next step of a rank.

    Attributes:
        kind: one of `KINDS`.
        buckets: parameters (or buffers) it concerns, in the order they travel.
        unused: those of them that got no gradient here.
        hooked: those whose tensor hooks want to see the local gradient first.
        waiting: those with accumulation hooks, which want to see the average.
        details: anything else that must be equal, of JSON's types.
        owner: the number of the backend.
        cast: rank 0's bytes go out with its record.
        order: the buckets as they are launched, if that is another order than theirs.
        nbytes: of the buffers it concerns.
        tables: parameters of which rows of the gradient may travel.
    """

    kind: str
    buckets: Layout = ()
    unused: tuple[int, ...] = ()
    hooked: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    details: Any = None
    owner: int = 0
    cast: bool = False
    order: tuple[int, ...] = ()
    nbytes: int = 0
    tables: tuple[int, ...] = ()

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The parameters it concerns, sorted."""
        return tuple(sorted(chain.from_iterable(self.buckets)))

    @cached_property
    def record(self) -> Record:
        """Six integers that are equal where events are."""
        layout = chain.from_iterable((*bucket, -1) for bucket in self.buckets)
        sets = (self.members, layout, self.unused, self.hooked)
        rest = (self.details, self.owner, self.waiting, self.cast, self.order, self.nbytes, self.tables)
        details = repr(rest).encode()
        return (KINDS.index(self.kind), *(_digest(array("q", numbers).tobytes()) for numbers in sets), _digest(details))

    @cached_property
    def bare(self) -> "Event":
        """The event without what may differ between ranks: details of the end of a backward, and which are tables."""
        details = None if self.kind in ENDS else self.details
        return replace(self, details=details, tables=()) if self.tables or details != self.details else self

    @cached_property
    def with_cast(self) -> "Event":
        """The event, with rank 0's bytes."""
        return replace(self, cast=True)

    @cached_property
    def alone(self) -> "Decision":
        """What is done where all ranks are at this event."""
        compare = self.kind in ENDS and bool(self.details)
        return Decision(
            self.buckets, frozenset(self.unused), compare=compare, order=self.order, in_rows=bool(self.tables)
        )

    def to_json(self) -> dict[str, Any]:
        """The event in JSON's types."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Event":
        """The reverse of `to_json`."""
        buckets = tuple(map(tuple, data["buckets"]))
        numbers = {name: tuple(data[name]) for name in ("unused", "hooked", "waiting", "order", "tables")}
        return Event(**{**data, **numbers, "buckets": buckets})


@cache
def nothing_left(kind: str, owner: int) -> Event:
    """The end of a backward in which graphs have reduced everything: the usual one, made once."""
    return Event(kind, owner=owner)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


@dataclass(frozen=True)
class Decision:
    """What all ranks do next.

    Attributes:
        buckets: what travels; zeros stand in where a rank has no gradient.
        order: of the buckets, how they are launched, if all ranks are at one event; () for their own order.
        unused: parameters in them that no rank has a gradient of: their `.grad` stays.
        defer: nothing travels before the end of the backward.
        again: ranks that stood in for the others and are still at their own step.
        active: ranks that take part with inputs of their own; None for all.
        root: the last rank that has inputs, whose buffers the others get, as under stock DDP; None for all.
        compare: some rank computed with tensors that were never compared with the others'.
        step: for ranks without inputs, what the first of the others does; its end only if it is that of all.
        in_rows: tables may travel in rows: all ranks are at the same graph.
    """

    buckets: Layout = ()
    unused: frozenset[int] = frozenset()
    defer: bool = False
    again: frozenset[int] = frozenset()
    active: int | None = None
    root: int | None = None
    compare: bool = False
    step: Event | None = None
    order: tuple[int, ...] = ()
    in_rows: bool = False


class Different(Exception):
    """The steps of the ranks cannot be made one; the text says how they differ."""


def decide(events: Sequence[Event], *, find_unused: bool, name: Callable[[int], str]) -> Decision:
    """Makes one step of the ranks' different steps.

    Args:
        events: by rank.
        find_unused: whether ranks may reduce different parameters.
        name: qualified name of a parameter by its number, for errors.

    Raises:
        Different: they cannot be made one.
    """
    active = {rank: event for rank, event in enumerate(events) if event.kind != JOINED}
    joined = frozenset(range(len(events))) - active.keys()
    if not active:
        return Decision(active=0)
    compare = any(event.kind in ENDS and event.details for event in active.values())
    active = {rank: event.bare for rank, event in active.items()}
    first = active[min(active)]
    if joined and any(event.kind in (CONTACT, MEASURE) for event in active.values()):
        raise Different(
            "parameters are met for the first time while a rank has run out of inputs already: run one step on all "
            "ranks before join"
        )
    extra: dict[str, Any] = {"compare": compare}
    if joined:
        going = [event for event in active.values() if event.kind not in ENDS]
        extra |= {"active": len(active), "root": max(active), "step": (going or [first])[0]}
    if all(event == first for event in active.values()):
        return Decision(first.buckets, frozenset(first.unused), again=joined, **extra)
    kinds = {event.kind for event in active.values()}
    if kinds <= {GRAPH, HOOK, *ENDS} and not kinds.issuperset(ENDS):
        hooked = {event.hooked for event in active.values() if event.kind == GRAPH}
        inside = any(event.kind == GRAPH and event.details for event in active.values())
        same = not inside and len({event.members for event in active.values()}) == 1
        unhooked = hooked <= {()} or (kinds == {GRAPH} and len(hooked) == 1)
        if find_unused and unhooked and not inside:
            return _union(active, joined, extra)
        if kinds == {GRAPH} and same and len(hooked) == 1 and len({event.unused for event in active.values()}) == 1:
            return Decision(first.buckets, frozenset(first.unused), again=joined, **extra)
        if (
            kinds <= {GRAPH, *ENDS}
            and GRAPH in kinds
            and (kinds != {GRAPH} or not same or (find_unused and _hooks_agree(active)))
        ):
            waiting = next((m for event in active.values() for m in event.waiting), None)
            if waiting is not None:
                raise Different(
                    f"{name(waiting)} has an accumulation hook, which needs its average now, but ranks took different "
                    f"paths through this backward and can only average at its end. {REMEDY}"
                )
            late = frozenset(rank for rank, event in active.items() if event.kind in ENDS)
            return Decision(defer=True, again=late | joined, **extra)
    raise Different(_difference(active, name))


def _hooks_agree(active: dict[int, Event]) -> bool:
    """Whether a parameter whose tensor hooks see a gradient on one rank has such on all that have a gradient of it."""
    hooked = {member for event in active.values() for member in event.hooked}
    return all((hooked & set(event.members)) - set(event.unused) <= set(event.hooked) for event in active.values())


def _union(active: dict[int, Event], joined: frozenset[int], extra: dict[str, Any]) -> Decision:
    going = {rank: event for rank, event in active.items() if event.kind not in ENDS}
    waiting = frozenset(active.keys() - going.keys()) if going else frozenset()
    buckets: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for event in (going or active).values():
        for bucket in event.buckets:
            new = tuple(member for member in bucket if member not in seen)
            seen.update(new)
            buckets += [new] if new else []
    used = {member for event in (going or active).values() for member in set(event.members) - set(event.unused)}
    if not going:  # packed at the end: one list, in an order that all have
        buckets = [tuple(sorted(seen))] if seen else []
    return Decision(tuple(buckets), frozenset(seen - used), again=waiting | joined, **extra)


REMEDY = (
    "All ranks must use the same parameters in a step, unless find_unused_parameters=True, which averages over the "
    "union. Turn that on, make the branch the same everywhere, or let every parameter take part on every rank (for "
    "instance by adding 0 * p.sum())"
)


EVALUATES = (
    "One trains while another evaluates, or ran another number of forwards or backwards, as after an error between "
    "them: call train() and eval() on all ranks alike, and skip a step on all ranks or on none"
)


def _difference(active: dict[int, Event], name: Callable[[int], str]) -> str:
    rank, first = next(iter(active.items()))
    other, event = next((other, event) for other, event in active.items() if event != first)
    if event.kind != first.kind:
        return _different_kinds(
            first.kind,
            event.kind,
            f"rank {rank} is at {_where(first, name)} while rank {other} is at {_where(event, name)}",
        )
    parts = []
    for one, mine, theirs in ((rank, first, event), (other, event, first)):
        only = [member for member in mine.members if member not in theirs.members]
        if only:
            parts.append(f"only rank {one} has {'' if event.kind == BUFFERS else 'gradients of '}{some(only, name)}")
    if first.unused != event.unused:
        parts.append(
            f"outputs that got no gradient leave {some(first.unused, name) or 'nothing'} unused on rank {rank} and "
            f"{some(event.unused, name) or 'nothing'} on rank {other}"
        )
    if first.hooked != event.hooked:
        parts.append(
            f"tensor hooks sit on {some(first.hooked, name) or 'nothing'} on rank {rank} and on "
            f"{some(event.hooked, name) or 'nothing'} on rank {other}"
        )
    if event.kind == HOOKS and event.details != first.details:
        return hooks_differ(f"rank {other}", event.details, f"rank {rank}", first.details)
    if event.kind == BUFFERS and event.nbytes != first.nbytes and not parts:
        return (
            f"buffers differ in size: {first.nbytes} bytes on rank {rank}, {event.nbytes} on rank {other}. Give them "
            "the same shapes on all ranks, or leave them alone: forward_sync_buffers=False, or the wrapper's "
            "_ddp_params_and_buffers_to_ignore"
        )
    if event.kind == BUFFERS:
        return (
            f"ranks break the model into different graphs, whose buffers differ: {'; '.join(parts)}. Use "
            "fxddp.DistributedDataParallel, which sends all buffers at once, or forward_sync_buffers=False"
        )
    if event.owner != first.owner:
        return (
            f"ranks are in backwards of different models (at {first.kind}): {'; '.join(parts)}. Run the backwards of "
            "several models in the same order on all ranks"
        )
    return f"ranks reduce different parameters in the same backward (at {first.kind}): {'; '.join(parts)}. {REMEDY}"


def _different_kinds(one: str, other: str, places: str) -> str:
    kinds = (one, other)
    if MEASURE in kinds:
        return (
            f"{places}: give all ranks the same bucket_mb and overlap, and compile the model's first training step on "
            "all of them"
        )
    if CONTACT in kinds:
        return (
            f"{places}: they took different paths through the model, or parameters were added, or converted to another "
            f"dtype, shape or memory order, on one of them alone. Do that on all ranks before the same step. {REMEDY}"
        )
    return f"{places}: they took different paths through the model. {EVALUATES if BUFFERS in kinds else REMEDY}"


def hooks_differ(one: str, mine: Sequence[str], other: str, theirs: Sequence[str]) -> str:
    """Says how the communication hooks and optimizers of two ranks differ."""
    kind = 0 if mine[0] != theirs[0] else 1
    what = ("communication hook", "optimizer in backward")[kind]
    return (
        f"the {what} differs between ranks: {mine[kind]} on {one}, {theirs[kind]} on {other}. Register the same on all "
        "ranks"
    )


def _where(event: Event, name: Callable[[int], str]) -> str:
    met = [kind[0] for kind in (event.details or {}).get("kinds", ())] if event.kind == CONTACT else []
    members = some(event.members, name) or some(range(len(met)), met.__getitem__)
    return event.kind + (f" with {members}" if members else "")


def some(members: Sequence[int], name: Callable[[int], str]) -> str:
    """The names of the first of these, and how many more there are."""
    shown = ", ".join(map(name, members[:4]))
    return shown + (f" and {len(members) - 4} more" if len(members) > 4 else "")
