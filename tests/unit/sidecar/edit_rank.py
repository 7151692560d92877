"""One rank with edits and without servers: memory, page, and a trainer that applies."""

import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import torch

from paramd.layout.codec import encode_layout
from paramd.layout.edits.plan import plan_edit
from paramd.layout.types import Layout
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import SparseMemory, create_sparse
from paramd.memory.edit_program import parse_program
from paramd.memory.handover import edits_bytes
from paramd.tensors.edit_ops import Views, run
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import Chunk, checksum_of
from paramd_service.edits.entry import EditLimits, Entry
from paramd_service.edits.manager import Edits, Scope
from paramd_service.edits.memory import EditMemory
from paramd_service.edits.receive import copy_of
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.kept_states import KeptStates
from paramd_service.sidecar.uploads import Fill


class Rank:
    """What trainer and sidecar share, and both of their sides."""

    def __init__(self, layout: Layout, arena: bytes, rank: int = 0) -> None:
        self.layout, self.rank = layout, rank
        self.arena = bytearray(arena)
        self.descriptor = create_sparse("test-edits", edits_bytes(len(arena)))
        self.page_descriptor = os.memfd_create("test-page")
        os.ftruncate(self.page_descriptor, 4096)
        self.page = ControlPage(self.page_descriptor)
        self.number = 0

    @asynccontextmanager
    async def edits(
        self,
        *,
        undo_budget_bytes: int = 1 << 30,
        budget_bytes: int = 1 << 30,
        expiry_s: float = 600.0,
        idle_s: float = 60.0,
    ) -> AsyncIterator[Edits]:
        """A sidecar's edits; a second one after the first is its successor."""
        with ThreadPoolExecutor(1) as executor:
            memory = EditMemory(
                self.descriptor, pool_bytes=1 << 20, idle_s=idle_s, executor=executor
            )
            scope = Scope(
                page=self.page,
                rank=self.rank,
                arena_bytes=len(self.arena),
                limits=EditLimits(
                    budget_bytes=budget_bytes,
                    undo_budget_bytes=undo_budget_bytes,
                    expiry_s=expiry_s,
                ),
                layout=encode_layout(self.layout).SerializeToString,
                kept_states=KeptStates,
            )
            edits = Edits(memory, scope, Faults())
            try:
                await edits.start()
                yield edits
            finally:
                await edits.close()

    def boundary(self, edits: Edits, entry: Entry) -> None:
        """Makes it ready, agrees and applies: one request from begin to end."""
        self.ready(edits, entry)
        self.agree()
        self.apply()
        edits.settle()

    def ready(self, edits: Edits, entry: Entry) -> None:
        self.number += 1
        token = 1000 + self.number
        argument = edits.make_ready(entry.edit_id, boundary=self.number, token=token)
        page = self.page
        page[Word.READY] = 0
        page[Word.TOKEN], page[Word.ARGUMENT] = token, argument
        page[Word.READY] = self.number

    def agree(self) -> None:
        page = self.page
        page[Word.PROMISED] = 0
        page[Word.AGREED_TOKEN] = page[Word.TOKEN]
        page[Word.AGREED] = page[Word.READY]

    def apply(self) -> None:
        page = self.page
        page[Word.EDIT_AGREED] = page[Word.AGREED]
        memory = SparseMemory(self.descriptor)
        records = parse_program(memory.buffer, page[Word.ARGUMENT], arena_bytes=len(self.arena))
        arena, data = Views(memoryview(self.arena)), Views(memory.buffer)
        with torch.no_grad():
            for record in records:
                run(
                    record,
                    arena.at(record.dtype, record.arena_begin, record.sizes, record.strides),
                    data.dense(record, record.data_begin),
                    data.dense(record, record.preimage_begin),
                )
        page[Word.EDITS] += 1
        page[Word.EDIT_NS], page[Word.EDIT_STEP] = 7, page[Word.STEP]
        page[Word.EDIT_TOKEN] = page[Word.AGREED_TOKEN]
        page[Word.EDIT_APPLIED] = page[Word.AGREED]

    def manifest(
        self, number: int, ops: Sequence[pb.EditOp] = (), **fields: object
    ) -> pb.EditManifest:
        return pb.EditManifest(
            **{
                "edit_id": f"{number:032x}",
                "incarnation": 1,
                "ops": ops,
                "undoable": True,
                **fields,
            }  # type: ignore[arg-type]
        )

    def data_of(self, ops: Sequence[pb.EditOp], operands: Sequence[torch.Tensor | None]) -> bytes:
        """This rank's data, cut out of whole operands."""
        (edit,) = plan_edit(self.layout, ops, ranks=[self.rank]).ranks
        data = bytearray(edit.data_bytes)
        for item in edit.items:
            operand = operands[item.op]
            if item.data_begin >= 0 and operand is not None:
                part = operand.flatten().as_strided(
                    item.sizes, item.source_strides, item.source_begin
                )
                data[item.data_begin : item.data_begin + item.size_bytes] = bytes_of(part)
        return bytes(data)

    def close(self) -> None:
        self.page.close()
        os.close(self.descriptor)
        os.close(self.page_descriptor)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


async def stage(edits: Edits, manifest: pb.EditManifest, data: bytes, chunk: int = 100) -> Entry:
    """Stages an edit as a client would."""
    entry = await edits.begin(manifest)
    for at in range(0, len(data), chunk):
        part = data[at : at + chunk]
        await edits.take(entry, [(at, len(part), fill_of(part, at))])
    return entry


def fill_of(data: bytes, offset: int, *, checked_at: int | None = None) -> Fill:
    """Takes bytes as from a message; `checked_at`: the offset that its checksum was made for."""
    at = checked_at if checked_at is not None else offset
    return copy_of(Chunk(data, 0, len(data), checksum_of(data, at), offset))
