"""Ranks agree on what they reduce, or say by name how they differ, before a collective could mismatch.

Note [agreement]: what one backward of one set of parameters reduces, and in which buckets, is settled the first time
that set is seen: each rank posts a description to the group's key-value store and reads the others'. Rank 0's buckets
are what travels from then on; a rank whose compile ordered the gradients otherwise (another shape variant) copies into
them. A set that was settled costs nothing, until a parameter turns up in a second set: ranks could then take different
ones, so every backward is compared from there on. Nothing is posted while compiling.
"""

import hashlib
import json
import uuid
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import _compat
from .passes.layout import gradient_strides
from .passes.plan import BucketPlan

if TYPE_CHECKING:
    from .backend import Backend
    from .call import Binding, Call
    from .group import Group

STALL = timedelta(seconds=2)
"""How long a collective may take before this rank looks whether the others are somewhere else."""

Layout = tuple[tuple[int, ...], ...]
"""Buckets of parameters, by id."""


class RanksDisagree(RuntimeError):
    """Ranks came to the same point of a training run with different parameters, shapes or settings."""


class Agreement:
    """What the ranks of a backend's group agreed on so far."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = weakref.ref(backend)
        self._group: Group | None = None
        self._channel: Any = None
        self._posted = 0
        self._settled: dict[tuple[int, ...], Layout] = {}
        self._quick: weakref.WeakKeyDictionary[Binding, dict[Any, Layout | None]] = weakref.WeakKeyDictionary()
        self._seen: dict[int, str] = {}
        self._ways: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self._ambiguous = False
        self._in_doubt = False

    def settle(
        self,
        call: "Call",
        plan: BucketPlan,
        by_bucket: Sequence[Sequence[Tensor]],
        dropped: set[tuple[int, int]],
    ) -> Layout | None:
        """Settles the buckets of one backward.

        Returns:
            None if the plan's own buckets are what travels, else the buckets to copy into.

        Raises:
            RanksDisagree: ranks reduce different parameters.
        """
        self._renew(call.group)
        quick = self._quick.setdefault(call.binding, {})
        case = (id(plan), frozenset(dropped))
        if case in quick and not (self._ambiguous or self._in_doubt):
            return quick[case]
        own: Layout = tuple(tuple(map(id, members)) for members in by_bucket)
        if not own:
            return None
        used = tuple(
            sorted(
                id(parameter)
                for index, members in enumerate(by_bucket)
                for i, parameter in enumerate(members)
                if (index, i) not in dropped
            )
        )
        # what is dropped changes which .grad is written, what is packed changes what travels: both are part of the set
        key = (*sorted(i for bucket in own for i in bucket), -1, *used)
        if key not in self._settled or self._ambiguous or self._in_doubt:
            names = call.binding.bucket_names(plan)
            layout = [
                [_entry(name, p) for name, p in zip(bucket_names, members, strict=True)]
                for bucket_names, members in zip(names, by_bucket, strict=True)
            ]
            unused = [names[index][i] for index, i in sorted(dropped)]
            self._check_static(key, used, names)
            common = self._exchange("gradients of a compiled graph", layout, unused, call.group)
            self._in_doubt = False
            if key not in self._settled:
                self._settled[key] = _apply(common, layout, own)
                self._note(used)
                self._forget_with(p for members in by_bucket for p in members)
        wire = self._settled[key]
        result = None if wire == own else wire
        quick[case] = result
        return result

    def doubt(self) -> None:
        """Has the next backward compared with the others', after one that this rank gave up half-way.

        If the others gave it up too they agree and go on; if not, they wait for this rank's launches, and find out.
        """
        self._in_doubt = True

    def settle_uncovered(self, parameters: Sequence[Tensor], group: "Group", after: tuple[int, ...]) -> tuple[int, ...]:
        """Settles which parameters are reduced outside of the graphs in this backward; returns their order, by id.

        Args:
            parameters: in this rank's order; possibly none.
            group: the ranks.
            after: what this backward has reduced before; what came after that in an earlier one may not be what comes
                on the other ranks now.
        """
        self._renew(group)
        key = (-2, *map(id, parameters))
        ways = self._ways.setdefault(after, set())
        ways.add(key)
        if len(ways) == 1 and (not parameters or (key in self._settled and not self._ambiguous)):
            return self._settled[key][0] if parameters else ()
        backend = self._backend()
        assert backend is not None
        layout = [[_entry(backend.watch.name(p), p) for p in parameters]]
        common = self._exchange("parameters used outside of the compiled graphs", layout, [], group)
        if key not in self._settled:
            self._settled[key] = _apply(common, layout, (key[1:],))
            self._forget_with(parameters)
        return self._settled[key][0]

    def _forget_with(self, parameters: Iterable[Tensor]) -> None:
        """Forgets what was settled about these parameters when they die: their ids are given to others then."""
        for parameter in parameters:
            identity = id(parameter)

            def forget(_: object, identity: int = identity) -> None:
                self._alive.pop(identity, None)
                self._seen.pop(identity, None)
                for key in [key for key in self._settled if identity in key]:
                    del self._settled[key]
                for after, ways in list(self._ways.items()):
                    ways -= {way for way in ways if identity in way}
                    if not ways or identity in after:
                        del self._ways[after]

            if identity not in self._alive:
                self._alive[identity] = weakref.ref(parameter, forget)

    def _renew(self, group: "Group") -> None:
        if self._group is not group:
            self._group = group
            self._channel = None
            self._posted = 0
            self._settled.clear()
            self._quick.clear()
            self._seen.clear()
            self._ways.clear()
            self._ambiguous = self._in_doubt = False

    def _note(self, used: tuple[int, ...]) -> None:
        """Remembers who belongs to which set; a parameter in two sets makes the next ones ambiguous."""
        mine = hashlib.sha256(repr(used).encode()).hexdigest()
        for identity in used:
            if self._seen.setdefault(identity, mine) != mine:
                self._ambiguous = True

    def _check_static(self, key: tuple[int, ...], used: tuple[int, ...], names: list[tuple[str, ...]]) -> None:
        backend = self._backend()
        if backend is None or not backend.settings.static_graph or key in self._settled:
            return
        if not backend.log.synchronised:  # the first backward may have several graphs, each with a set of its own
            return
        known = {i for old in self._settled if old[0] != -2 for i in old[old.index(-1) + 1 :]}
        last = [old[old.index(-1) + 1 :] for old in self._settled if old[0] != -2 and set(old) & set(used)]
        gone = sorted(map(backend.watch.names_of, set(last[-1] if last else ()) - set(used)))
        come = sorted(map(backend.watch.names_of, set(used) - known))
        raise RuntimeError(
            f"static_graph=True, but the parameters that get gradients changed: came {come}, went {gone}. Keep the set "
            "the same in every iteration, or leave static_graph at False"
        )

    def wait(self, work: Any, parameters: Sequence[Tensor], group: "Group") -> None:
        """Waits for launched work; if it does not come, finds out whether another rank took another path.

        A rank that meets a new set of parameters posts it and waits, while this one waits in a collective of a set that
        was settled: each would wait for the other until the group's timeout. For gloo; NCCL's wait returns at once.

        Raises:
            RanksDisagree: on both ranks.
        """
        if self._channel is None or group.backend_name != "gloo":
            work.wait()
            return
        left = _compat.group_timeout(group.process_group)
        while left > STALL:
            try:
                work.wait(STALL)
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise
                left -= STALL
                self._look_for_others(parameters, group)
            else:
                return
        work.wait()

    def _look_for_others(self, parameters: Sequence[Tensor], group: "Group") -> None:
        """Raises if another rank has posted something that this rank, which waits in a collective, is not up to."""
        backend = self._backend()
        assert backend is not None
        for rank in range(group.size):
            key = f"{self._posted + 1}/{rank}"
            if rank == group.rank or not self._channel.check([key]):
                continue
            theirs = json.loads(self._channel.get(key))
            entries = [_entry(backend.watch.name(p), p) for p in parameters]
            mine = {"what": "a set of parameters it knows already", "parameters": entries, "unused": [], "layout": []}
            self._posted += 1
            self._channel.set(f"{self._posted}/{group.rank}", json.dumps(mine))
            raise RanksDisagree(_difference(group.rank, mine, rank, theirs))

    def _exchange(self, what: str, layout: list[Any], unused: list[str], group: "Group") -> list[Any]:
        """Posts this rank's description, reads all, and returns rank 0's layout."""
        if group.size == 1:
            return layout
        if self._channel is None:
            token = group.gather_objects(uuid.uuid4().hex)[0]
            self._channel = group.store(f"fxddp/{token}")
        self._posted += 1
        parameters = sorted((entry for bucket in layout for entry in bucket), key=json.dumps)
        mine = {"what": what, "parameters": parameters, "unused": sorted(unused), "layout": layout}
        self._channel.set(f"{self._posted}/{group.rank}", json.dumps(mine))
        texts = []
        for rank in range(group.size):
            key = f"{self._posted}/{rank}"
            try:
                self._channel.wait([key], _compat.group_timeout(group.process_group))
            except RuntimeError as error:
                raise RanksDisagree(
                    f"rank {group.rank} is about to reduce {what} ({_some(parameters)}), but rank {rank} did not come "
                    "to the same point within the group's timeout: it stopped, took another path through the model, or "
                    f"ran another number of backwards ({error})"
                ) from error
            texts.append(json.loads(self._channel.get(key)))
        for rank, theirs in enumerate(texts):
            if any(theirs[field] != mine[field] for field in ("what", "parameters", "unused")):
                raise RanksDisagree(_difference(group.rank, mine, rank, theirs))
        if self._posted > 2:  # everybody has read what was posted two exchanges ago
            self._channel.delete_key(f"{self._posted - 2}/{group.rank}")
        return texts[0]["layout"]  # type: ignore[no-any-return]


def _entry(name: str, parameter: Tensor) -> list[Any]:
    """How a parameter is described to the other ranks; buckets store gradients in their parameters' memory order."""
    shape = list(parameter.shape)
    return [name, shape, str(parameter.dtype), list(gradient_strides(shape, parameter.stride()))]


def _apply(common: list[Any], mine: list[Any], own: Layout) -> Layout:
    """Rank 0's buckets in terms of this rank's parameters."""
    if common == mine:
        return own
    ids: dict[str, list[int]] = {}
    for bucket, members in zip(mine, own, strict=True):
        for entry, identity in zip(bucket, members, strict=True):
            ids.setdefault(json.dumps(entry), []).append(identity)
    doubtful = sorted(key for key, found in ids.items() if len(found) > 1)
    if doubtful:
        raise RanksDisagree(
            f"ranks order gradients differently, and {doubtful[0]} names more than one parameter, so they cannot be "
            "matched. Compile the whole module instead of its parts"
        )
    return tuple(tuple(ids[json.dumps(entry)][0] for entry in bucket) for bucket in common)


def _difference(rank: int, mine: dict[str, Any], other: int, theirs: dict[str, Any]) -> str:
    if mine["what"] != theirs["what"]:
        return (
            f"rank {rank} reduces {mine['what']} ({_some(mine['parameters'])}) while rank {other} reduces "
            f"{theirs['what']} ({_some(theirs['parameters'])}): they took different paths through the model. {REMEDY}"
        )
    only_mine = [e for e in mine["parameters"] if e not in theirs["parameters"]]
    only_theirs = [e for e in theirs["parameters"] if e not in mine["parameters"]]
    parts = []
    if only_mine:
        parts.append(f"only rank {rank} has gradients of {_some(only_mine)}")
    if only_theirs:
        parts.append(f"only rank {other} has gradients of {_some(only_theirs)}")
    if mine["unused"] != theirs["unused"]:
        parts.append(
            f"outputs that got no gradient leave {mine['unused'] or 'nothing'} unused on rank {rank} and "
            f"{theirs['unused'] or 'nothing'} on rank {other}"
        )
    return f"ranks reduce different parameters in the same backward ({mine['what']}): {'; '.join(parts)}. {REMEDY}"


REMEDY = (
    "All ranks must use the same parameters in a step; per-rank sets (find_unused_parameters across ranks) are not "
    "supported yet. "
    "Make the branch the same everywhere, or let every parameter take part on every rank (for instance by adding 0 * "
    "p.sum())"
)


def _some(entries: Sequence[Any]) -> str:
    names = [f"{name} {tuple(shape)}" for name, shape, *_ in entries[:4]]
    return ", ".join(names) + (f" and {len(entries) - 4} more" if len(entries) > 4 else "")
