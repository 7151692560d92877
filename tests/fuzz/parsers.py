"""What every parser promises for any bytes: an answer that holds, or an error that is ours.

Each target takes bytes and returns, whatever they are; anything it raises is a bug.
"""

from __future__ import annotations

import base64
import ctypes
import fnmatch
import re
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from paramd import bounds, streams
from paramd.answers import has_over, parsed, parsed_json, unpacked
from paramd.errors import DataLossError, DeniedError, ParamdError, UsageError
from paramd.filters import Facts, parse_filter
from paramd.layout import codec
from paramd.layout.edits.plan import check_ops, finder, rank_edits
from paramd.layout.merge import LocalLayout, layout_digest, merge_layouts
from paramd.layout.plan import plan_read
from paramd.layout.select import NameIndex, select
from paramd.layout.stats import EMPTY, summarize
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout
from paramd.memory import handover
from paramd.memory.edit_program import parse_program, program_bytes, write_program
from paramd.memory.optimizer_state import parse_table
from paramd.mesh.exports.calls import loaded
from paramd.mesh.reading import stream as reading
from paramd.security import loopback, tickets
from paramd.state import StateName
from paramd.trainer.resume import codec as kept_codec
from paramd.trainer.resume import copies, succession
from paramd.trainer.resume.choice import RankOffer
from paramd.v1 import common_pb2, control_pb2, layout_pb2, sidecar_pb2
from paramd.wire import Chunk, data_chunk, parse_chunk
from paramd_service.control.metrics import passed_on
from paramd_service.edits.entry import body_at, records_of
from paramd_service.edits.sidecar import _part
from paramd_service.sidecar.owner import parse_attach, parse_mesh

ARENA_BYTES = 4096
_FIXED64 = struct.Struct("<Q")


def layout() -> Layout:
    """Two ranks, several dtypes, a box, an interval, replicas, a tied name and a buffer."""

    def tensor(
        fqn: str, dtype: str, shape: tuple[int, ...], *pieces: Piece, **more: object
    ) -> TensorLayout:
        return TensorLayout(fqn, dtype, shape, TensorKind.PARAMETER, pieces, **more)  # type: ignore[arg-type]

    head = (Piece(0, 0, Box((0, 0), (4, 4))), Piece(1, 0, Box((4, 0), (8, 4))))
    flat = (Piece(0, 256, Interval(0, 30)), Piece(1, 256, Interval(30, 49)))
    both = tuple(Piece(rank, 512, Box((0, 0), (3, 5)), (1, 3)) for rank in (0, 1))
    return Layout(
        world_size=2,
        arena_bytes=(ARENA_BYTES, ARENA_BYTES),
        tensors=(
            tensor("head.weight", "float32", (8, 4), *head, aliases=("tied.weight",)),
            tensor("layers.0.up", "bfloat16", (7, 7), *flat, placement="fsdp"),
            tensor("layers.1.up", "int64", (3, 5), *both),
            tensor(
                "scale", "float64", (), Piece(0, 1024, Box((), ())), Piece(1, 1024, Box((), ()))
            ),
            TensorLayout(
                "count", "int64", (1,), TensorKind.BUFFER, (Piece(0, 2048, Box((0,), (1,))),)
            ),
        ),
    )


LAYOUT = layout()
INDEX = NameIndex(LAYOUT)
FIND = finder(LAYOUT)
NUMBERS = summarize(EMPTY)
SIGNER = tickets.Signer(bytes(range(32)))
VERIFIER = tickets.Verifier(SIGNER.public_key)
SECRET = bytes(range(32))
METHODS: tuple[MethodDescriptor, ...] = (
    *sidecar_pb2.DESCRIPTOR.services_by_name["SidecarService"].methods,
    *control_pb2.DESCRIPTOR.services_by_name["ControlService"].methods,
)
PARTS = 8
"""Most fields of a message, and values of a document, where a fuzzer's input is to have more."""
DOCUMENT = replace(bounds.ENGINE_ANSWER, most_bytes=1 << 14, parts=PARTS)


def text_of(data: bytes) -> str:
    """Bytes that are no UTF-8 become lone surrogates, as in JSON and in arguments."""
    return data.decode("utf-8", "surrogateescape")


def manifest(data: bytes) -> None:
    """The first message of StageEdit, up to the program that a trainer would run."""
    with suppress(ParamdError):
        message = _part(data)
        if isinstance(message, Chunk):
            return
        manifest = message.manifest
        ops = check_ops(FIND, manifest.ops, allow_nonfinite=manifest.allow_nonfinite)
        edits = rank_edits(ops, range(LAYOUT.world_size))
    if "edits" in locals():
        for edit in edits:
            for undoable in (False, True):
                body = body_at(0, edit, ops=ops, undoable=undoable)
                memory = memoryview(bytearray(body.size_bytes + program_bytes(0)))
                records = records_of(edit, body, ops=ops, undoable=undoable, reset_moments=False)
                write_program(memory, 0, records)
                # What a sidecar writes is never refused by its trainer.
                parse_program(memory, 0, arena_bytes=ARENA_BYTES)


def filter_(data: bytes) -> None:
    """The filter language, and what it finds."""
    try:
        found = parse_filter(text_of(data))
    except UsageError:
        return
    for number, tensor in enumerate(LAYOUT.tensors):
        facts = Facts(
            tensor=tensor,
            kind=tensor.kind.value,
            names=(tensor.fqn, *tensor.aliases),
            ranks=frozenset({number}),
        )
        found.matches(facts)
    found.matches_numbers(NUMBERS)


def glob(data: bytes) -> None:
    """A glob matches what fnmatch matches."""
    pattern = text_of(data[:256])
    if any(begin > end for begin, end in re.findall(r"\[(.)-(.)", pattern, re.DOTALL)):
        return  # After an empty range fnmatch takes a "!" for the class's "not".
    found = {INDEX.names[at] for at in INDEX.columns.positions(INDEX._match(pattern))}
    assert found == set(fnmatch.filter(INDEX.names, pattern)), found


def selection(data: bytes) -> None:
    """Patterns with slices, one a line, as far as a plan of what to read."""
    with suppress(ParamdError):
        plan_read(LAYOUT, select(INDEX, text_of(data).split("\n"), with_buffers=True))


def layout_codec(data: bytes) -> None:
    """Layouts of one rank and of all: what is accepted can be planned and comes back the same."""
    with suppress(UsageError, DecodeError):
        found = codec.decode_layout(layout_pb2.Layout.FromString(data))
        again = codec.join_batches(codec.layout_batches(found, max_tensors=2))
        assert again == found
    # One half of the bytes for each of two ranks: first its length, then itself.
    size = data[0] if data else 0
    locals_: list[LocalLayout] = []
    for part in (data[1 : 1 + size], data[1 + size :]):
        with suppress(UsageError):
            locals_.append(codec.decode_local(part))
    for which in (locals_, locals_[:1], locals_[1:]):
        try:
            merged = merge_layouts(which)
        except UsageError:
            continue
        assert codec.decode_layout(codec.encode_layout(merged)) == merged
        assert len(layout_digest(merged)) == 64
        if merged.tensors:
            plan_read(merged, select(NameIndex(merged), "*", with_buffers=True))


def handover_message(data: bytes) -> None:
    """Messages of the Unix socket, and the two that a trainer sends."""
    with suppress(UsageError):
        message = handover._parse(data)
        for parse in (parse_attach, lambda message: parse_mesh(message, b"")):
            with suppress(UsageError):
                parse(message)


def chunk(data: bytes) -> None:
    """A chunk read by hand is the chunk that protobuf reads, and what we write is both."""
    try:
        ours = parse_chunk(data)
    except DecodeError:
        return
    theirs = sidecar_pb2.ReadSnapshotResponse.FromString(data)
    assert (bytes(ours.data), ours.xxh3, ours.offset_bytes) == (
        theirs.data,
        theirs.xxh3,
        theirs.offset_bytes,
    )
    offset = _FIXED64.unpack(data[:8].ljust(8, b"\0"))[0] >> 1
    written = parse_chunk(data_chunk(memoryview(data), offset))
    written.check()
    assert (bytes(written.data), written.offset_bytes) == (data, offset)


class _Sink:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, offset_bytes: int, address: int, size_bytes: int) -> None:
        assert offset_bytes == len(self.data), "a byte was written twice, or left out"
        self.data += ctypes.string_at(address, size_bytes)


class _Source:
    """Sends what the fuzzer says: chunks moved, cut, changed, repeated, of another step."""

    who = "rank 0"

    def __init__(self, whole: bytes, script: bytes) -> None:
        self._whole, self._script = whole, script

    async def chunks(self, offset_bytes: int, timeout_s: float) -> AsyncIterator[Chunk]:
        script, self._script = self._script[:64], self._script[64:]
        for at in range(0, len(script) - 3, 4):
            kind, begin, size, change = script[at : at + 4]
            if kind >= 250:
                yield Chunk(b"", 0, 0, 0, 0, common_pb2.Header(incarnation=1, step=kind % 3))
                continue
            place = (offset_bytes + begin) if kind < 128 else begin
            message = bytearray(data_chunk(memoryview(self._whole[place : place + size]), place))
            found = parse_chunk(bytes(message))
            if kind % 16 == 15 and found.size_bytes:
                message[found.begin + change % found.size_bytes] ^= change
                found = parse_chunk(bytes(message))
            offset_bytes = found.offset_bytes + found.size_bytes
            yield found

    async def probe(self) -> None:
        """It answers."""


def stream(data: bytes) -> None:
    """A read ends with the snapshot's very bytes, or is refused."""
    whole = bytes(range(256))
    sink = _Sink()
    reader = reading.Reader(
        _Source(whole, data), sink, reading.Expected(StateName(1, 0, 1, -1), len(whole))
    )
    try:
        _without_pauses(reader)
    except ParamdError:
        assert whole.startswith(bytes(sink.data))
        return
    assert bytes(sink.data) == whole


def stream_framing(data: bytes) -> None:
    """What opens, answers and carries a bulk stream."""
    with suppress(DataLossError):
        opening = streams.read_opening(data)
        assert 0 <= opening.begin <= opening.end
        assert streams.read_opening(opening.sealed(SECRET)) == opening
        # The fuzzer does not know the secret, but for what the seeds are sealed with.
        with suppress(DeniedError):
            opening.check(data, SECRET)
            assert opening.sealed(SECRET) == data
    with suppress(DataLossError):
        status, size = streams.read_reply(data, b"an opening", SECRET)
        assert size <= streams.MAX_TEXT_BYTES
        if status:
            streams.error_of(status, data[streams.REPLY_BYTES :][:size])
        else:
            assert data[: streams.REPLY_BYTES] == streams.reply(b"an opening", SECRET)
    for part in (data, data[: streams.WINDOW_HEADER_BYTES]):
        with suppress(DataLossError):
            window = streams.read_window(part)
            assert window.packed() == part
            assert window.size <= streams.WINDOW_BYTES
            if window.kind == streams.FAILED:
                streams.error_of(window.xxh3, data[streams.WINDOW_HEADER_BYTES :])


def _without_pauses(reader: reading.Reader) -> None:
    # One attempt after the other, as `run` makes them, but for its timers and pauses.
    for _ in range(reading.MAX_FAILURES + 1):
        with suppress(reading.DataLossError, StopIteration):
            reader._read(time.monotonic() + 60).send(None)
        if reader._proven:
            return
    raise ParamdError("too often")


def safetensors(data: bytes) -> None:
    """A file that is read for a restore."""
    with suppress(ParamdError):
        loaded(data, "fuzz")


def ticket(data: bytes) -> None:
    """A text that is shown as a ticket, and claims that another signer signed."""
    with suppress(DeniedError):
        VERIFIER.verify(text_of(data), job="job", incarnation=1)
    with suppress(DeniedError):
        tickets._parse(base64.urlsafe_b64encode(data).decode())


def program(data: bytes) -> None:
    """The program of an edit as the trainer reads it from shared memory."""
    with suppress(UsageError):
        for record in parse_program(memoryview(data), 0, arena_bytes=ARENA_BYTES):
            assert 0 <= record.arena_begin <= record.arena_end <= ARENA_BYTES


def table(data: bytes) -> None:
    """The table of optimizer state as a sidecar reads it from shared memory."""
    with suppress(UsageError):
        parse_table(data)


def metrics(data: bytes) -> None:
    """A sidecar's metrics, as a control plane passes them on: its own series alone."""
    found = passed_on.own_series(text_of(data), job="job", rank=1)
    assert len(found) <= bounds.METRICS_BYTES
    for line in found.splitlines():
        assert line.isprintable()
        if not line.startswith("# "):
            assert re.match(r'paramd_sidecar_[a-z_]+\{job="job",rank="1"', line)
            assert line.count("job=") == 1
    # Once more changes nothing.
    assert passed_on.own_series(found, job="job", rank=1) == found


def proof(data: bytes) -> None:
    """The answer of whoever listens where a token is about to be sent."""
    peer = (loopback.plain_ip("127.0.0.1"), 8470)
    asked = loopback.Question("http://127.0.0.1:8470", "token", peer, peer, frozenset(), "0" * 32)
    with suppress(ValueError):
        answer = loopback.answer_of(data)
        if answer is not None:
            with suppress(loopback.StrangerError):
                asked.check(*answer)
                digest = loopback.token_digest("token")
                assert loopback.proof_of(digest, "0" * 32, "127.0.0.1", 8470).encode() in data


def kept_state(data: bytes) -> None:
    """A record of a training's state, as the host that kept it gives it back."""
    with suppress(UsageError):
        kept_codec.decode(data)


def answer(data: bytes) -> None:
    """What a peer answers to the method that the first byte says: a message of its kind, or an
    error of the call once it is used."""
    method = METHODS[(data[0] if data else 0) % len(METHODS)]
    kind = GetMessageClass(method.output_type)
    found, body = parsed(method.name, kind.FromString, data[1:]), data[1:]
    if isinstance(found, Message):
        # Counted before it is parsed, and no part of it is left out.
        assert has_over(method.output_type, body, PARTS) or _count(found) <= PARTS
        return
    try:
        _ = found.header
    except DataLossError:
        return
    raise AssertionError(f"{found} is neither a message nor an error")


def _count(message: Message) -> int:
    """What a message and all its parts have of what a sender may repeat."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            count += len(value)
            continue
        several = value if field.is_repeated else [value]
        if field.is_repeated and field.cpp_type >= Field.CPPTYPE_STRING:
            count += len(several)
        if field.message_type is not None:
            count += sum(map(_count, several))
    return count


def document(data: bytes) -> None:
    """A JSON document of somebody else, as it is and packed."""
    for read in (parsed_json, unpacked):
        with suppress(ValueError):
            found = read(data, DOCUMENT)
            assert _values(found) <= PARTS + 1, found


def _values(found: object) -> int:
    """Values of a document that are no containers, and containers that have none."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        return sum(map(_values, found)) or 1
    return 1


def buddy(data: bytes) -> None:
    """What a sidecar says of the copies that it keeps; a copy's label on its way to its rank."""
    memory = memoryview(data)
    with suppress(UsageError), kept_codec.legible():
        succession._snapshots_in(memory, copies._label_of(data))
    try:
        told = handover._parse(data)
    except UsageError:
        return
    here = copies.Copies(job="job", rank=0, sockets={1: Path("/nowhere/rank-1.sock")})
    with suppress(UsageError), kept_codec.legible():
        here._heard(1, told, RankOffer())
    for (rank, mark), (number, label) in here._labels.items():
        # Its sidecar does not answer any more: the next way is taken.
        assert here.prepare(mark, {rank: 0}, []) == [copies.Damaged(rank, 0, mark)]
        assert number == 1
        again = copies._label_of(copies._packed_label(label))
        assert copies.marks_of(again) == copies.marks_of(label)


PARSERS: dict[str, Callable[[bytes], None]] = {
    "manifest": manifest, "filter": filter_, "glob": glob, "selection": selection,
    "layout": layout_codec, "handover": handover_message, "chunk": chunk, "stream": stream,
    "stream_framing": stream_framing, "safetensors": safetensors, "ticket": ticket,
    "program": program, "table": table, "metrics": metrics, "proof": proof,
    "kept_state": kept_state, "answer": answer, "document": document, "buddy": buddy,
}  # fmt: skip
