"""The body of an edit: programs, data and pre-images, and how it is undone. Pure.

    [program][program of its undo][data][pre-images]        all at multiples of 64 bytes

An undo has no body of its own: it writes its program into the spare program space of the body
that it undoes, and takes over that body with its pre-images. So undoing needs no memory, and an
undo can itself be undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paramd.layout.dtypes import item_bytes
from paramd.layout.edits.kinds import EditKind
from paramd.layout.edits.plan import EditItem, PlannedOp, RankEdit
from paramd.memory.edit_program import (
    DTYPE_CODES,
    NO_DATA,
    Record,
    parse_program,
    program_bytes,
    write_program,
)

_ALIGNMENT = 64

_AS_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Stand-ins, by element size, for dtypes that programs do not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Where things lie, as byte offsets into the edits' memory. Absent: begin == end."""

    begin: int
    end: int
    programs: tuple[int, int]
    """Where the two programs begin; equal if there is no room for an undo."""
    data_begin: int
    preimage_begin: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


def body_at(begin: int, edit: RankEdit, *, ops: Sequence[PlannedOp], undoable: bool) -> Body:
    """The body of an edit that begins at `begin`, a multiple of the page size."""
    room = _aligned(program_bytes(len(edit.items)))
    data_begin = begin + room * (2 if undoable else 1)
    preimage_begin = data_begin + _aligned(edit.data_bytes)
    kept = sum(_aligned(item.size_bytes) for item in edit.items if _keeps(item, ops))
    return Body(
        begin=begin,
        end=preimage_begin + (kept if undoable else 0),
        programs=(begin, begin + room if undoable else begin),
        data_begin=data_begin,
        preimage_begin=preimage_begin,
    )


def body_of(begin: int, end: int, *, record_count: int, undoable: bool) -> Body:
    """A body laid out by a predecessor, as far as undo and preview need it."""
    room = _aligned(program_bytes(record_count))
    data_begin = begin + room * (2 if undoable else 1)
    return Body(
        begin=begin,
        end=end,
        programs=(begin, begin + room if undoable else begin),
        data_begin=data_begin,
        preimage_begin=end,
    )


def records_of(
    edit: RankEdit,
    body: Body,
    *,
    ops: Sequence[PlannedOp],
    undoable: bool,
    reset_moments: bool,
) -> Iterator[Record]:
    """The records of an edit's program."""
    preimage = body.preimage_begin
    for item in edit.items:
        op = ops[item.op].op
        data_begin = body.data_begin + item.data_begin if item.data_begin >= 0 else NO_DATA
        keep = NO_DATA
        if undoable and op.kind is EditKind.SET:
            keep = data_begin
        elif undoable and _keeps(item, ops):
            keep, preimage = preimage, preimage + _aligned(item.size_bytes)
        sizes, strides = _merged(item.sizes, item.strides)
        yield Record(
            op=op.kind,
            dtype=_program_dtype(item.dtype),
            arena_begin=item.arena_begin,
            sizes=sizes,
            strides=strides,
            data_begin=data_begin,
            preimage_begin=keep,
            value=op.value,
            weight=op.weight,
            min=op.min,
            max=op.max,
            reset_moments=reset_moments,
        )


def write_undo(
    memory: memoryview, done: int, undo: int, *, arena_bytes: int, reset_moments: bool
) -> None:
    """Write at `undo` the program that undoes the applied one at `done`.

    Additions are subtracted, everything else is swapped back. Raises UsageError if there is no
    program at `done`.
    """
    records = parse_program(memory, done, arena_bytes=arena_bytes)
    write_program(memory, undo, (_undoing(one, reset_moments) for one in records))


def _undoing(record: Record, reset_moments: bool) -> Record:
    if record.op is EditKind.ADD and record.preimage_begin == NO_DATA:
        return replace(record, weight=-record.weight, reset_moments=reset_moments)
    return replace(
        record,
        op=EditKind.SET,
        data_begin=record.preimage_begin,
        preimage_begin=record.preimage_begin,
        reset_moments=reset_moments,
    )


def _keeps(item: EditItem, ops: Sequence[PlannedOp]) -> bool:
    """Whether undoing it needs a pre-image besides its data."""
    return ops[item.op].op.kind not in (EditKind.SET, EditKind.ADD)


def _program_dtype(dtype: str) -> str:
    return dtype if dtype in DTYPE_CODES else _AS_BITS[item_bytes(dtype)]


def _merged(
    sizes: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same elements in the same order with as few dims as possible."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(size for size, _ in merged), tuple(stride for _, stride in merged)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
