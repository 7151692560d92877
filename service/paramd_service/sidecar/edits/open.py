"""From a manifest to an edit with memory and a program; the slow parts run on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from paramd.errors import ExhaustedError, UsageError
from paramd.layout.codec import decode_layout
from paramd.layout.edits.ops import decode_ops
from paramd.layout.edits.plan import PlannedOp, RankEdit, check_ops, rank_edits
from paramd.layout.types import TensorLayout
from paramd.memory.edit_program import ANY_STEP, write_program
from paramd.v1 import layout_pb2
from paramd_service.aio import uncancelled
from paramd_service.sidecar.edits.entry import EditLimits, Entry, UndoRefusal
from paramd_service.sidecar.edits.layout import body_at, records_of, write_undo
from paramd_service.sidecar.edits.memory import EditMemory, Range
from paramd_service.sidecar.edits.receive import DataRange, Intake
from paramd_service.sidecar.edits.table import UndoBook

Answer = TypeVar("Answer")


class RankLayout:
    """One rank's layout as serialized tensors: as objects, those of 100,000 names take 100 MB."""

    def __init__(self, serialized: bytes, rank: int) -> None:
        """Slow for large layouts: call it off the event loop."""
        self._tensors: dict[str, bytes] = {}
        for tensor in layout_pb2.Layout.FromString(serialized).tensors:
            own = [piece for piece in tensor.pieces if piece.rank == rank]
            del tensor.pieces[:]
            tensor.pieces.extend(own)
            data = tensor.SerializeToString()
            for name in (tensor.fqn, *tensor.aliases):
                self._tensors[name] = data

    def find(self, name: str) -> TensorLayout | None:
        """The tensor with that name or alias."""
        data = self._tensors.get(name)
        if data is None:
            return None
        tensor = layout_pb2.Tensor.FromString(data)
        return decode_layout(layout_pb2.Layout(tensors=[tensor])).tensors[0]


class Opener:
    """Opens the edits of one attachment."""

    def __init__(
        self,
        memory: EditMemory,
        undo: UndoBook,
        *,
        rank: int,
        arena_bytes: int,
        limits: EditLimits,
        layout: Callable[[], bytes],
    ) -> None:
        self._memory = memory
        self._undo = undo
        self._rank = rank
        self._arena_bytes = arena_bytes
        self._limits = limits
        self._layout_bytes = layout
        self._layout: RankLayout | None = None
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="paramd-edits")

    async def on_thread(self, work: Callable[[], Answer]) -> Answer:
        """Run work that touches the memory; cancellation waits for its end."""
        return await uncancelled(self._loop.run_in_executor(self._threads, work))

    async def close(self) -> None:
        """Stop the threads."""
        await self._loop.run_in_executor(None, self._threads.shutdown)

    async def plan(self, entry: Entry) -> None:
        """Set `ops` and `edit`. Raises UsageError, NotFoundError: it does not fit the layout."""
        if entry.edit is not None:
            return
        serialized, manifest = self._layout_bytes(), entry.manifest

        def plan() -> tuple[PlannedOp, ...]:
            if self._layout is None:
                self._layout = RankLayout(serialized, self._rank)
            ops = decode_ops(manifest.ops)
            return check_ops(self._layout.find, ops, allow_nonfinite=manifest.allow_nonfinite)

        entry.ops = await self.on_thread(plan)
        (entry.edit,) = rank_edits(entry.ops, [self._rank])

    async def open_new(self, entry: Entry, check_bytes: Callable[[Entry, int], None]) -> None:
        """Reserve memory for an edit and write its program; `check_bytes` enforces the budget."""
        manifest = entry.manifest
        if_step = manifest.if_step if manifest.HasField("if_step") else ANY_STEP
        if if_step < ANY_STEP:
            raise UsageError(f"if_step: {if_step}; expected 0 or more")
        await self.plan(entry)
        edit, ops = entry.edit, entry.ops
        assert edit is not None
        entry.op_count = len(ops)
        undoable = manifest.undoable
        if not undoable:
            entry.refusal = UndoRefusal.NOT_ASKED
        elif body_at(0, edit, ops=ops, undoable=True).size_bytes > self._limits.undo_budget_bytes:
            undoable, entry.refusal = False, UndoRefusal.TOO_LARGE
        size_bytes = body_at(0, edit, ops=ops, undoable=undoable).size_bytes
        check_bytes(entry, size_bytes)
        begin, end = await self.reserve(size_bytes)
        entry.body = body = replace(body_at(begin, edit, ops=ops, undoable=undoable), end=end)
        entry.program_begin, entry.size_bytes = body.programs[0], edit.data_bytes
        buffer = self._memory.buffer
        records = records_of(
            edit, body, ops=ops, undoable=undoable, reset_moments=manifest.reset_moments
        )
        write = partial(write_program, buffer, entry.program_begin, records, if_step=if_step)
        await self.on_thread(write)
        entry.intake = Intake(
            buffer[body.data_begin : body.data_begin + edit.data_bytes],
            self._memory.sparse.address + body.data_begin,
            _data_ranges(edit, ops),
            op_count=len(ops),
            allow_nonfinite=manifest.allow_nonfinite,
        )

    async def open_undo(self, entry: Entry, original: Entry) -> None:
        """Write the program that undoes `original` next to the one that was applied."""
        manifest = entry.manifest
        body = self._undo.claim(original, entry)
        if list(manifest.ops) != list(original.manifest.ops):
            raise UsageError(f"ops: an undo names those of the edit it undoes, {manifest.undo_of}")
        entry.op_count, entry.body = len(manifest.ops), body
        first, second = body.programs
        entry.program_begin = second if original.program_begin == first else first
        if not manifest.undoable:
            entry.refusal = UndoRefusal.NOT_ASKED
        entry.intake = Intake(
            memoryview(b""), 0, [], op_count=entry.op_count, allow_nonfinite=False
        )

        def write() -> None:
            write_undo(
                self._memory.buffer,
                original.program_begin,
                entry.program_begin,
                arena_bytes=self._arena_bytes,
                reset_moments=manifest.reset_moments,
            )

        await self.on_thread(write)

    async def reserve(self, size_bytes: int) -> Range:
        """Reserve memory, if need be at the expense of undo data. Raises ExhaustedError."""
        while True:
            try:
                return await self._memory.reserve(size_bytes)
            except ExhaustedError:
                if not self._undo.drop_oldest():
                    raise


def _data_ranges(edit: RankEdit, ops: Sequence[PlannedOp]) -> list[DataRange]:
    return [
        DataRange(
            item.op,
            item.data_begin,
            item.data_begin + item.size_bytes,
            item.dtype,
            ops[item.op].tensor.fqn,
        )
        for item in edit.items
        if item.data_begin >= 0
    ]
