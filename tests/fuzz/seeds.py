"""Inputs to start from: good ones, made by the code that writes them."""

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from paramd import streams
from paramd.errors import DeniedError
from paramd.layout import codec
from paramd.layout.edits.kinds import EditKind
from paramd.layout.exports.safetensors import TensorSpec, encode_header
from paramd.layout.merge import LocalLayout
from paramd.layout.types import Box, Layout
from paramd.memory.edit_program import NO_DATA, Record, program_bytes, write_program
from paramd.security import loopback
from paramd.security.tickets import Role
from paramd.trainer.resume import codec as kept_codec
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import data_chunk
from paramd_service.sidecar.metrics import render
from tests.edit_ops import edit_op
from tests.fuzz.parsers import LAYOUT, METHODS, PARTS, SECRET, SIGNER
from tests.integration.fake_trainer import TrainerSettings, attach_message

TERMS = (
    "layers.*.weight numel>1M dtype=bfloat16 norm>10",
    'head.* "tied=x" shape=4096x* dims<=2 rank!=3 tied=true',
    "name~up placement=fsdp kind!=buffer nan>0 absmax>=1.5e-3 zero<1k",
    "w[0:4, -3:] std<.5 mean!=0 inf=0 min>-2 max<2G shape=scalar",
)
PATTERNS = (
    "*", "layers.*.up", "head.weight[0:4, :, -3:]", "[!a-z]?[ab]*", "l*.[0-9].u?", "[]*]", "sc[",
    "up",
)  # fmt: skip


def _manifest() -> list[bytes]:
    ops = (
        edit_op(fqn="head.weight", kind=EditKind.MUL, value=0.5),
        edit_op(fqn="head.weight", box=Box((1, 0), (6, 3)), kind=EditKind.SET, with_data=True),
        edit_op(
            fqn="layers.0.up",
            box=Box((1, 2), (5, 7)),
            kind=EditKind.LERP,
            weight=0.1,
            with_data=True,
        ),
        edit_op(fqn="layers.1.up", kind=EditKind.FILL, value=3.0),
        edit_op(fqn="scale", kind=EditKind.CLAMP, min=-1.0, max=1.0),
        edit_op(fqn="tied.weight", kind=EditKind.ADD, value=1.0, weight=-1.0),
    )
    found = [pb.EditManifest(edit_id="0" * 32, incarnation=1, ops=[op]) for op in ops]
    found.append(pb.EditManifest(edit_id="1" * 32, ops=ops[2:5], undoable=True))
    return [pb.StageEditRequest(manifest=one).SerializeToString() for one in found]


def _local(layout: Layout, rank: int) -> bytes:
    tensors = tuple(
        replace(one, pieces=tuple(piece for piece in one.pieces if piece.rank == rank))
        for one in layout.tensors[:2]
    )
    return codec.encode_local(LocalLayout(rank=rank, arena_bytes=4096, tensors=tensors))


def _layout() -> list[bytes]:
    first, second = (_local(LAYOUT, rank) for rank in range(2))
    assert len(first) < 256
    whole = codec.encode_layout(LAYOUT).SerializeToString()
    return [whole, bytes([len(first)]) + first + second]


def _handover() -> list[bytes]:
    attach = attach_message(TrainerSettings(arena_bytes=4096), allocations=[4096])
    peer = {"rank": 0, "address": "127.0.0.1:1", "socket_path": "/s", "host_id": "h"}
    mesh = {"op": "mesh", "peers": [peer], "control_address": None, "layout_digest": "d"}
    others = [
        {"op": "map", "ticket": "t", "snapshot_id": "s"},
        {"op": "unmap", "snapshot_id": "s"},
        {"op": "live", "ticket": "t", "rank": 0, "incarnation": 1, "layout_digest": "d"},
        {"op": "stage", "ticket": "t", "edit_id": "0" * 32},
        {"op": "lend", "ticket": "t"},
        {"op": "take", "offset_bytes": 0, "spans": [[0, 0, 8]]},
        {"op": "state", "known": 0, "size_bytes": 4096, "number": 1},
        {"op": "detach"},
    ]
    return [b"[" * 2000, *(json.dumps(one).encode() for one in (attach, mesh, *others))]


def _chunk() -> list[bytes]:
    header = pb.ReadSnapshotResponse(data=b"x", offset_bytes=7)
    header.header.step = 3
    return [
        data_chunk(memoryview(b"some data"), 300),
        data_chunk(memoryview(b""), 0),
        header.SerializeToString(),
    ]


def _stream_framing() -> list[bytes]:
    windows = [
        streams.Window(streams.DATA, 7, 100, 5),
        streams.Window(streams.LAST, 107, 0),
        streams.Window(streams.DATA, 0, streams.WINDOW_BYTES),
    ]
    return [
        streams.Opening(bytes(16), 1, 300, True).sealed(SECRET),
        streams.Opening(bytes(16), 0, 0).sealed(SECRET),
        streams.reply(b"an opening", SECRET),
        streams.refusal(DeniedError("no")),
        streams.failure(DeniedError("no")),
        *(one.packed() for one in windows),
    ]


def _safetensors() -> list[bytes]:
    specs = [
        TensorSpec(name="w", dtype="float32", shape=(2, 3)),
        TensorSpec(name="b", dtype="bfloat16", shape=()),
    ]
    deep = b'{"a":' * 200
    return [
        encode_header(specs, {"format": "pt"}) + bytes(26),
        encode_header([], {}),
        len(deep).to_bytes(8, "little") + deep,
    ]


def _ticket() -> list[bytes]:
    ticket = SIGNER.mint(job="job", incarnation=1, role=Role.SIDECAR, rank=0, ttl_s=1e9, now_s=0.0)
    claims = {
        "job": "job", "incarnation": 1, "role": "reader", "exp": 9e9, "jti": "1", "rank": 0,
        "iat": 1.0, "token": "t",
    }  # fmt: skip
    return [ticket.encode(), json.dumps(claims).encode()]


def _program() -> list[bytes]:
    records = (
        Record(EditKind.SET, "float32", 64, (2, 3), (3, 1), data_begin=512, preimage_begin=512),
        Record(EditKind.CLAMP, "bfloat16", 128, (5,), (2,), min=-1.0, max=1.0),
        Record(EditKind.FILL, "int64", 0, (), (), NO_DATA, value=3.0),
    )
    found = []
    for count in range(len(records) + 1):
        memory = bytearray(program_bytes(count) + 1024)
        write_program(memoryview(memory), 0, records[:count])
        found.append(bytes(memory))
    return found


def _table() -> list[bytes]:
    texts = (b'{"step": 1, "states": {}}', b"[1]", b"")
    packed = [zlib.compress(text) for text in texts]
    return [struct.pack("=q", len(one)) + one for one in packed]


def _metrics() -> list[bytes]:
    told = render([("step", "Steps", 7), ("stands_total", "X", {"edit": 1.5})], job="job", rank=1)
    return [told.encode(), told.replace('job="job"', 'job="other"').encode()]


def _proof() -> list[bytes]:
    digest = loopback.token_digest("token")
    bodies = [
        json.dumps({"proof": loopback.proof_of(digest, "0" * 32, "127.0.0.1", 8470)}),
        json.dumps({"proof": "0" * 64}),
    ]
    return [
        f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode() for body in bodies
    ]


def _kept_state() -> list[bytes]:
    values: list[object] = [
        {"a": [1, (2.5, None)], 3: b"x"},
        {"t": torch.arange(3, dtype=torch.float32), "n": np.arange(4).reshape(2, 2)},
    ]
    return [kept_codec.encode(value) for value in values]


def _answer() -> list[bytes]:
    frame = pb.StreamGradientsResponse()
    frame.frame.facts.notes.extend([pb.GradientNote()] * (PARTS + 1))
    logged = pb.GetLoggedResponse(count=7)
    logged.entries.extend([pb.LoggedEntry(number=1, values={"loss": 0.5})] * (PARTS + 1))
    said = {
        "GetLogged": logged,
        "GetMetrics": pb.GetMetricsResponse(text="step 7"),
        "GetLayout": pb.GetLayoutResponse(layout=codec.encode_layout(LAYOUT)),
        "StreamGradients": frame,
    }
    places = {method.name: place for place, method in enumerate(METHODS)}
    return [bytes([places[name]]) + one.SerializeToString() for name, one in said.items()]


def _document() -> list[bytes]:
    texts = (b'{"jobs": [1, "a", null, {"b": []}]}', b"[" * 2000, b"[1" + b",1" * 200 + b"]")
    wide = "[1,2,3]".encode("utf-16")
    return [*texts, wide, *map(zlib.compress, texts)]


def _buddy() -> list[bytes]:
    label = {
        "step": 7, "lineage": 3, "edits": 0, "before": [1, 2], "digest": 5, "arena_bytes": 64,
        "optimizer_bytes": 0, "record_bytes": 0, "table_bytes": 0,
    }  # fmt: skip
    whole = {"copies": [{"rank": 0, "label": label}], "pid": 1, "ownership": "OWNED"}
    whole |= {"incarnation": 1, "step": 7, "op": "copies"}
    without = {name: value for name, value in label.items() if name != "digest"}
    bad = (without, label | {"before": [1 << 60] * 300}, label | {"arena_bytes": 1 << 80})
    wrong = [whole | {"copies": [{"rank": 0, "label": one}]} for one in bad]
    return [json.dumps(one).encode() for one in (label, whole, *wrong)]


def _http_answer() -> list[bytes]:
    heads = (
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\n",
        b"HTTP/1.1 503 No\r\ncontent-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 302 There\r\nlocation: /\r\n\r\n",
        b"HTTP/1.1 100 Go on\r\n\r\nHTTP/1.0 200 OK\r\n\r\n",
    )
    return [head + b'{"a": 7}\n\r\n0\r\n\r\n' for head in heads]


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "manifest": _manifest,
    "filter": lambda: [text.encode() for text in TERMS],
    "glob": lambda: [text.encode() for text in PATTERNS],
    "selection": lambda: [text.encode() for text in (*PATTERNS, "\n".join(PATTERNS[:2]))],
    "layout": _layout,
    "handover": _handover,
    "chunk": _chunk,
    "stream": lambda: [
        bytes([0, 0, 64, 0] * 5),
        bytes([250, 0, 0, 0, 15, 0, 100, 1, 0, 0, 200, 0]),
    ],
    "stream_framing": _stream_framing,
    "safetensors": _safetensors,
    "ticket": _ticket,
    "program": _program,
    "table": _table,
    "metrics": _metrics,
    "proof": _proof,
    "kept_state": _kept_state,
    "answer": _answer,
    "document": _document,
    "buddy": _buddy,
    "http_answer": _http_answer,
}
