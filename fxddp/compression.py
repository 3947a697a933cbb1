"""Codecs: what travels in place of a bucket, in how many collectives, and what is remembered between steps.

    encode ─ round 1 ─ … ─ round n ─ decode into the bucket

A codec gets buckets of any parameters: what is packed together may change from one step to the next. So everything it
remembers belongs to a parameter, and is saved under the parameter's qualified name.

Note [rounds]: the next collective for a bucket starts when the one before is done. All collectives of a bucket start
before anything else starts on the group, and before a rank waits for the others' records (`Group.settle`), in the
thread that launches. So their order is that of the launches, on every rank, whoever waits for what and when, and no
rank waits for a collective that another one will only start when it hears of this one. A bucket's collectives are
counted when it is launched, as what is announced next says how many there were.

Note [one backward]: what a codec learns from a bucket counts when the backward is over, as weights are then about to
change. A backward that raises leaves no trace, and so does a parameter that no rank has a gradient of. The one thing
that later buckets of the same backward see is the error that an earlier one left of the same parameter.

Note [who takes part]: a rank without inputs, under `join`, has gradients of zero, and sends what it still owes like the
others: it follows all that is the same on all ranks, and ends up owing less.
"""

import hashlib
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _compat, ranges
from .channel import Failed
from .packing import places_in
from .passes.compress import narrows

if TYPE_CHECKING:
    from .group import Group

ERROR = "error"
"""What a rank has not sent of a parameter's gradients so far: its own."""


@dataclass(frozen=True, slots=True)
class Round:
    """Collectives that were started together.

    Attributes:
        works: what to wait for.
        more: how many collectives follow for this bucket.
    """

    works: Sequence[Any]
    more: int = 0


Rounds = Iterator[Round]
"""The collectives of a bucket; what comes after a round runs when that is done."""


class Memory:
    """What a codec keeps for each parameter, by name of the thing; forgotten with the parameter.

    Parameters of one name, as of blocks of one class that are compiled one by one, are numbered in the order in which
    they first travel: "weight", "weight (2)", ….
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], str, dict[str, Any]]] = {}
        self._loaded: dict[str, dict[str, Any]] = {}

    def of(self, parameter: Tensor, name: Callable[[Tensor], str]) -> dict[str, Any]:
        """What is kept for a parameter; what was loaded for it, if it is met for the first time.

        Raises:
            RuntimeError: that is of another shape.
        """
        identity = id(parameter)
        if identity not in self._kept:
            kept = self._kept

            def forget(_: object) -> None:
                kept.pop(identity, None)

            taken = {full for _, full, _ in kept.values()}
            plain_name = full = name(parameter)
            number = 1
            while full in taken:
                number += 1
                full = f"{plain_name} ({number})"
            found = _like(parameter, full, self._loaded.pop(full, {}))
            kept[identity] = (weakref.ref(parameter, forget), full, found)
        return self._kept[identity][2]

    def items(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Everything, by name."""
        yield from ((name, found) for _, name, found in self._kept.values())
        yield from self._loaded.items()

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Forgets everything and keeps this for when the parameters are met."""
        self._kept.clear()
        self._loaded = {name: dict(values) for name, values in state.items()}


def _like(parameter: Tensor, name: str, values: dict[str, Any]) -> dict[str, Any]:
    error = values.get(ERROR)
    if error is not None and error.shape != parameter.shape:
        raise RuntimeError(
            f"the loaded codec state of {name} is of shape {tuple(error.shape)}, the parameter of "
            f"{tuple(parameter.shape)}: it was saved for another model"
        )
    return {key: value.to(parameter.device) if isinstance(value, Tensor) else value for key, value in values.items()}


class Session:
    """What one backward changes of a codec's memory; see Note [one backward]."""

    def __init__(self, codec: "Codec", name: Callable[[Tensor], str]) -> None:
        """Opens one.

        Args:
            codec: whose.
            name: gives a parameter's qualified name, the same on all ranks.
        """
        self.name = name
        self._codec = codec
        self._errors: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._changes: list[tuple[Tensor, str, Any]] = []

    def read(self, parameter: Tensor) -> dict[str, Any]:
        """What was known of a parameter when this backward began."""
        return self._codec.memory.of(parameter, self.name)

    def error(self, parameter: Tensor) -> Tensor | None:
        """What was not sent of a parameter's gradients so far."""
        if id(parameter) in self._errors:
            return self._errors[id(parameter)][1]
        return self.read(parameter).get(ERROR)

    def set_error(self, parameter: Tensor, error: Tensor | None) -> None:
        """Replaces that."""
        self._errors[id(parameter)] = (parameter, error)

    def change(self, parameter: Tensor, key: str, value: Any) -> None:
        """Has something kept when the backward is over."""
        self._changes.append((parameter, key, value))

    def commit(self) -> None:
        """The backward is over."""
        self._changes += [(parameter, ERROR, error) for parameter, error in self._errors.values()]
        for parameter, key, value in self._changes:
            self.read(parameter)[key] = value
        self._changes.clear()
        self._errors.clear()


class Parcel:
    """A bucket for a codec.

    Attributes:
        flat: the local gradients one after the other, divided already; the sum over all ranks is to replace them.
        members: the parameters.
        wire: the bucket in the dtype in which compiled code cast it for travelling, or None.
        idle: positions of parameters whose gradient nobody takes from here: their state is left alone.
        group: the ranks.
        sent: bytes that were handed to collectives so far, as of an all-reduce.
    """

    def __init__(
        self,
        flat: Tensor,
        members: Sequence[Tensor],
        group: "Group",
        session: Session,
        reduce: Callable[[Tensor], Any],
        *,
        wire: Tensor | None = None,
        idle: AbstractSet[int] = frozenset(),
        count: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Makes one.

        Args:
            flat: see above, like the next two.
            members: see above.
            group: see above.
            session: of the backward.
            reduce: starts summing a tensor over the ranks, in place, uncounted; returns the work.
            wire: see above.
            idle: ids of such parameters.
            count: told how many bytes each collective carries.
        """
        self.flat = flat
        self.members = members
        self.group = group
        self.wire = wire
        self.idle = {i for i, p in enumerate(members) if id(p) in idle} if idle else set()
        self._session = session
        self._reduce = reduce
        self._count = count

    @cached_property
    def views(self) -> list[Tensor]:
        """The gradients, in their parameters' shapes and strides."""
        return places_in(self.flat, self.members)

    @cached_property
    def known(self) -> list[dict[str, Any]]:
        """What was known of each parameter when the backward began."""
        return list(map(self._session.read, self.members))

    def name(self, i: int) -> str:
        """Qualified name of a parameter."""
        return self._session.name(self.members[i])

    def change(self, i: int, key: str, value: Any) -> None:
        """Has something kept for a parameter when the backward is over, unless it is idle."""
        if i not in self.idle:
            self._session.change(self.members[i], key, value)

    # --- error feedback ---------------------------------------------------------------------------

    def feed(self) -> None:
        """Adds to the gradients what earlier steps did not send of them."""
        owed = [None if i in self.idle else self._session.error(p) for i, p in enumerate(self.members)]
        there = [i for i, error in enumerate(owed) if error is not None]
        if there:
            torch._foreach_add_([self.views[i] for i in there], [e for e in owed if e is not None])

    def owe(self, errors: Mapping[int, Tensor]) -> None:
        """Keeps what this step does not send, by position; nothing is left of the others.

        What is not finite is dropped: the step is lost anyway, the next ones are not.
        """
        for i, parameter in enumerate(self.members):
            if i in self.idle:
                continue
            error = errors.get(i)
            if error is not None:
                torch.nan_to_num_(error, nan=0.0, posinf=0.0, neginf=0.0)
            self._session.set_error(parameter, error)

    def owe_flat(self, error: Tensor) -> None:
        """`owe` for all parameters, of a tensor laid out as the bucket."""
        self.owe(dict(enumerate(places_in(error, self.members))))

    # --- collectives ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Any:
        """Starts summing a tensor over the ranks, in place."""
        self._count(tensor.nbytes)
        return self._reduce(tensor)

    def all_to_all(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Starts sending each rank its part of a tensor, as the first half of an all-reduce does; counts with `gather`.

        Returns:
            What comes from each rank, one after the other, and the work.
        """
        self._count(tensor.nbytes)
        received = torch.empty_like(tensor)
        return received, _compat.all_to_all(self.group.process_group, received, tensor)

    def gather(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Starts sending a tensor to all ranks, as the second half of an all-reduce does.

        Returns:
            What comes from each rank, one after the other, and the work.
        """
        received = tensor.new_empty(tensor.numel() * self.group.size)
        return received, _compat.all_gather(self.group.process_group, received, tensor)


class Travelling:
    """The work of a bucket under way; waits as the work of a collective does."""

    def __init__(self, rounds: Rounds, group: "Group", failed: Callable[[BaseException], Failed]) -> None:
        self._rounds = rounds
        self._group = group
        self._failed = failed
        self._round: Round | None = None
        self._abandoned = False
        self._range = ranges.current()
        self._count = 0
        self._next()
        if self._round is not None:
            group.count(len(self._round.works) + self._round.more)
            if self._round.more:
                group.unsettled = self

    @torch.no_grad()
    def _next(self) -> None:
        try:
            with ranges.step(self._range, f"round{self._count}"):
                self._round = next(self._rounds, None)
        except Exception as error:
            raise self._failed(error) from error
        self._count += 1

    def settle(self, timeout: timedelta | None = None) -> None:
        """Starts all that is left to start; see Note [rounds]."""
        while not self._abandoned and self._round is not None and self._round.more:
            _wait(self._round.works, timeout)
            self._next()
        if self._group.unsettled is self:
            self._group.unsettled = None

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits until the bucket holds its result.

        Raises:
            Failed: the codec failed.
            RuntimeError: a collective failed, or "timed out".
        """
        self.settle(timeout)
        if self._round is not None:
            _wait(self._round.works, timeout)
            if not self._abandoned:
                self._next()

    def is_completed(self) -> bool:
        """Whether the last collective is over."""
        last = self._round
        return last is None or (not last.more and all(work.is_completed() for work in last.works))

    def abandon(self) -> None:
        """Has no further collective started: its backward failed."""
        if not self._abandoned and self._round is not None and self._round.more:
            self._group.count(-self._round.more)
            self._group.unsettled = None
        self._abandoned = True


def _wait(works: Sequence[Any], timeout: timedelta | None) -> None:
    for work in works:
        work.wait() if timeout is None else work.wait(timeout)


class Codec(ABC):
    """What travels in place of a bucket; one object keeps the state of one backend's parameters.

    Attributes:
        wire: the dtype to which compiled code casts wider buckets, or None.
        steps: collectives it starts itself for a bucket that it makes smaller; "" for those of the backend.
        memory: what is known of each parameter.
    """

    wire: torch.dtype | None = None
    steps: str = ""

    def __init__(self) -> None:
        self.memory = Memory()
        self._loaded = ""

    @abstractmethod
    def __str__(self) -> str:
        """The codec and its arguments, the same on all ranks."""

    @abstractmethod
    def rounds(self, parcel: Parcel) -> Rounds:
        """Encodes a bucket, starts its collectives one after the other, and decodes their result into it."""

    @abstractmethod
    def nbytes(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, world_size: int) -> int:
        """Bytes of what travels for a bucket of these parameters; each rank sends 2(N-1)/N of it, by a ring."""

    def start(self, parcel: Parcel, what: Callable[[], str]) -> Travelling:
        """Starts the first collective for a bucket; `what` describes it, in an error."""

        def failed(error: BaseException) -> Failed:
            return Failed(f"{self} failed for {what()}: {error}")

        parcel.group.settle()
        return Travelling(self.rounds(parcel), parcel.group, failed)

    def fingerprint(self) -> str:
        """What must be the same on all ranks: the codec and what was loaded into it."""
        return f"{self}{self._loaded}"

    def state_dict(self) -> dict[str, Any]:
        """What is to be saved with a checkpoint, by qualified names of the parameters.

        Errors are this rank's own and differ between ranks: save one on each rank. Tensors are copies, in the
        parameters' shapes where they are errors. Parameters of one name, as of blocks of one class that are compiled
        one by one, are numbered in the order in which they first travel, which a resumed run must keep.
        """
        found = {}
        for name, values in self.memory.items():
            kept = {k: v.detach().clone(memory_format=torch.contiguous_format) if isinstance(v, Tensor) else v
                    for k, v in values.items() if v is not None}  # fmt: skip
            if kept:
                found[name] = kept
        return {"codec": str(self), "rank": _rank(), "parameters": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave; on all ranks, before the next backward.

        With another number of ranks, or with the state of one rank on all, errors are not those that are owed: leave
        them out with `{name: {k: v for k, v in kept.items() if k != "error"} …}`.

        Raises:
            ValueError: it is no such state, or of another codec, or holds another rank's errors.
        """
        if not isinstance(state, Mapping) or not state.keys() >= {"codec", "parameters"}:
            raise ValueError(f"expected what {type(self).__name__}.state_dict() gave, got {state!r:.80}")
        if state["codec"] != str(self):
            raise ValueError(f"this state was saved by {state['codec']}, this codec is {self}: make it with the same")
        whose = state.get("rank", _rank())
        if whose != _rank() and any(values.get(ERROR) is not None for values in state["parameters"].values()):
            raise ValueError(
                f"this is the state of rank {whose}, loaded on rank {_rank()}: what a rank still owes is its own. Save "
                "and load one state for each rank, or leave the errors out, as the docstring shows"
            )
        self._load(state["parameters"])

    def _load(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self.memory.load(parameters)
        self._loaded = f" with state {_shared_digest(parameters)}" if parameters else ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "memory": self.state_dict()}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update({**values, "memory": Memory()})
        self._load(values["memory"]["parameters"])


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _shared_digest(parameters: Mapping[str, Mapping[str, Any]]) -> str:
    """Changes with all that must be the same on all ranks: everything but errors."""
    digest = hashlib.blake2b(digest_size=6)
    for name, values in sorted(parameters.items()):
        for key, value in sorted(values.items()):
            if key != ERROR:
                data = value.detach().cpu().double().numpy().tobytes() if isinstance(value, Tensor) else repr(value)
                digest.update(f"{name}/{key}:".encode() + (data if isinstance(data, bytes) else data.encode()))
    return digest.hexdigest()


def whole(name: str, value: object, *, least: int, multiple: int = 1) -> None:
    """Refuses a codec's argument that is no such number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or value % multiple:
        kind = f"multiple of {multiple}" if multiple > 1 else "whole number"
        raise ValueError(f"{name} must be a {kind}, at least {least}, got {value!r}")


def positive(name: str, value: object) -> None:
    """Refuses a codec's argument that is no finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive, finite number, got {value!r}")


def flag(name: str, value: object) -> None:
    """Refuses a codec's argument that is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a codec computes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def numel_of(shapes: Sequence[Sequence[int]]) -> int:
    """Elements of all these together."""
    return sum(torch.Size(shape).numel() for shape in shapes)


def plain(parcel: Parcel) -> Rounds:
    """The bucket as it is."""
    yield Round([parcel.all_reduce(parcel.flat)])


def cast(parcel: Parcel, wire: torch.dtype) -> Rounds:
    """The bucket in a narrower dtype; the ranks' values are added in it."""
    small = parcel.flat.to(wire) if parcel.wire is None else parcel.wire
    yield Round([parcel.all_reduce(small)])
    parcel.flat.copy_(small)


class Cast(Codec):
    """Half the bytes: buckets wider than 16 bits are cast to float16 or bfloat16 by the code that packs them.

    As DistributedDataParallel's `fp16_compress_hook` and `bf16_compress_hook`, whose numbers it has but for the order
    of dividing and rounding.

    Args:
        name: "fp16", whose largest number is 65,504 and whose smallest is 6e-8, or "bf16", with the range of float32
            and 8 bits of precision.
    """

    DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # noqa: RUF012 (never written)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.dtype = self.wire = self.DTYPES[name]

    def __str__(self) -> str:
        return self.name

    def rounds(self, parcel: Parcel) -> Rounds:
        """As `Codec.rounds`."""
        return cast(parcel, self.dtype) if narrows(parcel.flat.dtype, self.dtype) else plain(parcel)

    def nbytes(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, world_size: int) -> int:
        """2 for each element of a wider dtype."""
        return numel_of(shapes) * (self.dtype if narrows(dtype, self.dtype) else dtype).itemsize
