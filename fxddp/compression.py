"""Codecs: what travels in place of a bucket, in how many collectives, and what is remembered between steps.

    encode ─ round 1 ─ … ─ round n ─ decode into the bucket

Note [who takes part]: a rank without inputs, under `join`, has gradients of zero, and sends what it still owes like the
others: it follows all that is the same on all ranks, and ends up owing less.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Failed
from .parcel import Parcel
from .remembered import ERROR, Memory, Session
from .rounds import Rounds, Travelling
from .rows import Rows

if TYPE_CHECKING:
    from .sending import Sending


class Codec(ABC):
    """What travels in place of a bucket; one object keeps the state of one backend's parameters.

    Attributes:
        wire: the dtype to which compiled code casts wider buckets, or None.
        steps: collectives it starts itself for a bucket that it makes smaller; "" for those of the backend.
        memory: what is known of each parameter.
    """

    divides = False
    takes_rows = False
    wire: torch.dtype | None = None
    steps: str = ""

    def __init__(self) -> None:
        self.memory = Memory()
        self._loaded = ""

    @property
    def remark(self) -> str:
        """What the bytes and times of a step that was only planned leave out."""
        return ""

    @abstractmethod
    def __str__(self) -> str:
        """The codec and its arguments, the same on all ranks."""

    @abstractmethod
    def rounds(self, parcel: Parcel) -> Rounds:
        """Encodes a bucket, starts its collectives one after the other, and decodes their result into it."""

    @abstractmethod
    def nbytes(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, world_size: int) -> int:
        """Bytes of what travels for a bucket of these parameters; each rank sends 2(N-1)/N of it, by a ring."""

    def start(
        self,
        flat: Tensor,
        members: Sequence[Tensor],
        sending: "Sending",
        travels: Callable[[int], None],
        *,
        wire: Tensor | None,
        rows: Rows | None,
        idle: AbstractSet[int],
        is_last: bool,
    ) -> Travelling:
        """As `Carrier.start`: starts the first collective for a bucket."""
        index, names = sending.count, sending.names

        def failed(error: BaseException) -> Failed:
            return Failed(f"{self} failed for bucket {index} ({names(members)}): {error}")

        if sending.session is None:
            sending.session = Session(self.memory, sending.name)
        sending.group.settle()
        parcel = Parcel(flat, members, sending, travels, wire=wire, rows=rows, idle=idle)
        return Travelling(self.rounds(parcel), sending.group, failed)

    @property
    def name(self) -> str:
        """What must be the same on all ranks: the codec and what was loaded into it."""
        return f"{self}{self._loaded}"

    @property
    def in_graphs(self) -> bool:
        """Whether a graph with its collectives inside does the same."""
        return self.wire is not None

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
