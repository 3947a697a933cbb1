"""Buckets with tables of which only rows travel: each rank's rows go to all ranks, and are added up there.

    bucket     [ gradients │ table │ gradients ]
    travel       all-reduce  rows    all-reduce         a message of a rank: for each table indices, then rows
                             all-gather

Which gradients are tables, and where their rows are, the compiler knows (`passes/tables.py`); here they are dense, as
they were packed. How many rows of each a rank has goes along with the record that announces its graph (`channel.py`),
or that it cannot send rows, as something accumulated is to be added. So all ranks conclude the same for every table.

Note [which rows]: all ranks send as many rows of a table as the one that has the most. Their values come out of the
table, where they are added up already: a row that the model has read twice is named twice, and is the same both times,
and one that is named without need, to fill a message, does no harm.

Every rank adds the others' rows, and its own, in the order of ranks: sums are the same everywhere, and for two ranks
bit by bit those of an all-reduce.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _compat
from .passes.plan import Bucket
from .passes.tables import INDEX, Table, message_bytes, traffic
from .rounds import Round, Rounds

if TYPE_CHECKING:
    from .sending import Sending


WHOLE = -1
"""In place of a number of rows: this rank must have all of the table travel."""


@dataclass(frozen=True, slots=True)
class TableRows:
    """A table in a bucket, and the rows of it that are not zero.

    Attributes:
        start: its first element in the bucket.
        entries, width: its shape: rows, and elements in each.
        indices: where the rows are that this rank sends, as many as all others; int64, flat.
    """

    start: int
    entries: int
    width: int
    indices: Tensor

    @property
    def count(self) -> int:
        """How many rows each rank sends."""
        return self.indices.numel()

    @property
    def end(self) -> int:
        """The element after its last one."""
        return self.start + self.entries * self.width

    def of(self, flat: Tensor) -> Tensor:
        """The table in a bucket, or in a copy of that in another dtype."""
        return flat[self.start : self.end].view(self.entries, self.width)


@dataclass(frozen=True, slots=True)
class Rows:
    """What travels of a bucket in rows.

    Attributes:
        tables: in the order of the bucket.
    """

    tables: tuple[TableRows, ...]

    @staticmethod
    def of(
        bucket: Bucket, tables: Mapping[Table, Sequence[int]], values: Sequence[Tensor], itemsize: int
    ) -> "Rows | None":
        """Those of a packed bucket; None where no table travels in rows.

        Args:
            bucket: as planned.
            tables: in it, with the number of rows that each rank has, or `WHOLE`.
            values: what the slots of the tables hold, table by table.
            itemsize: bytes of an element that travels.
        """
        given = iter(values)
        found = []
        for table, counts in tables.items():
            grad, count = bucket.grads[table.position], max(counts)
            indices = [next(given) for _ in table.slots]
            if WHOLE in counts or traffic(count, grad, len(counts), itemsize) is None:
                continue
            entries = grad.shape[0]
            flat = torch.cat([each.reshape(-1).to(torch.int64) for each in indices])
            assert len(flat) <= count, f"{len(flat)} rows of {grad}, {count} were announced"
            # Negative indices count from the end; what a mask keeps out of the table may be anything.
            filled = torch.cat([flat, flat.new_zeros(count - len(flat))]).remainder_(entries)
            found.append(TableRows(bucket.offsets[table.position], entries, grad.numel // entries, filled))
        return Rows(tuple(found)) if found else None

    def _nbytes(self, flat: Tensor, world_size: int) -> int:
        """Bytes of the all-reduce that is as much to send as a bucket of this dtype."""
        tables = sum(message_bytes(table.count, table.width, flat.dtype.itemsize) for table in self.tables)
        return sum(part.nbytes for part in self._rest(flat)) + world_size * tables // 2

    def rounds(self, flat: Tensor, small: Tensor, sending: "Sending", travels: Callable[[int], None]) -> Rounds:
        """Sums a bucket over the ranks, in place.

        Args:
            flat: the bucket.
            small: the bucket in the dtype in which it travels, spent afterwards; or itself.
            sending: where it is the next bucket.
            travels: to be told the bytes.
        """
        group, rest = sending.group, self._rest(small)
        travels(self._nbytes(small, group.size))
        message = self._message(small)
        received = message.new_empty(group.size * message.numel())
        works = [sending.transport.start(part, sending.count, counts=False) for part in rest]
        works.append(_compat.all_gather(group.process_group, received, message))
        yield Round(works)
        if small is not flat:
            for part, narrow in zip(self._rest(flat), rest, strict=True):
                part.copy_(narrow)
        self._add_up(flat, received.chunk(group.size), small.dtype)

    def _rest(self, flat: Tensor) -> list[Tensor]:
        """The parts of a bucket between its tables."""
        bounds = [0, *(bound for table in self.tables for bound in (table.start, table.end)), flat.numel()]
        return [flat[i:j] for i, j in zip(bounds[::2], bounds[1::2], strict=True) if i < j]

    def _message(self, flat: Tensor) -> Tensor:
        """What this rank sends of the tables in a bucket, as bytes."""
        parts = []
        for table in self.tables:
            rows = table.of(flat).index_select(0, table.indices).view(-1)
            parts += [table.indices.view(torch.uint8), rows.view(torch.uint8), _padding(rows)]
        return torch.cat(parts)

    def _add_up(self, flat: Tensor, messages: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Puts the sums of the rows in these messages, of all ranks in order, into the tables of a bucket."""
        for table in self.tables:
            table.of(flat).index_fill_(0, table.indices, 0)
        for message in messages:
            for table, indices, rows in self._read(message, dtype):
                values = table.of(flat)
                values.index_copy_(0, indices, values.index_select(0, indices).add_(rows))

    def _read(self, message: Tensor, dtype: torch.dtype) -> Iterator[tuple[TableRows, Tensor, Tensor]]:
        at = 0
        for table in self.tables:
            indices = message[at : at + table.count * INDEX].view(torch.int64)
            at += table.count * INDEX
            length = table.count * table.width * dtype.itemsize
            rows = message[at : at + length].view(dtype).view(table.count, table.width)
            at += length + -length % INDEX
            yield table, indices, rows


def _padding(rows: Tensor) -> Tensor:
    """Bytes after these, so that whole numbers may follow."""
    return rows.new_zeros(-rows.nbytes % INDEX, dtype=torch.uint8)
