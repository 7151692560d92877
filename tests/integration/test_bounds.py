"""Too much of every field, to every method that there is: refused, and memory is given back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from paramd.security.tickets import Role, Signer
from paramd.v1 import control_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.access.join import METHOD_ROLES
from paramd_service.sidecar.rpc.auth import ROLES
from tests.integration.control_process import control_plane
from tests.integration.fake_trainer import SIGNER, TrainerSettings, attach
from tests.integration.sidecar_process import sidecar, ticket, wait_until
from tests.orders import bound, ordered

pytestmark = pytest.mark.usefixtures("grpc_is_up")

MOST_BYTES = 64 << 20
"""What a server may grow by; twice that while it parses, and half as much again of what its heap
keeps in pieces."""
MESSAGE_BYTES = 4 << 20
"""Most that a server takes in one message."""
ENDLESS = 64
"""Messages of a stream, each as large as is taken."""
OPEN = frozenset({Role.READER})
MARKUP = "<img src=x onerror=alert(1)>\u202e"


def tag(field: FieldDescriptor, wire: int) -> bytes:
    return varint(field.number << 3 | wire)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def with_bytes(field: FieldDescriptor, data: bytes) -> bytes:
    return tag(field, 2) + varint(len(data)) + data


def too_much(kind: Descriptor, depth: int = 0) -> Iterator[bytes]:
    """For each field messages with a value that is out of any range, or as much as is let in."""
    for field in kind.fields:
        if field.message_type is not None:
            # As many as there is room for, with nothing in them, and one with too much.
            if field.is_repeated and not depth:
                yield with_bytes(field, b"") * (MESSAGE_BYTES // 2 - 1)
            if depth < 2:
                yield from (
                    with_bytes(field, data) for data in too_much(field.message_type, depth + 1)
                )
        elif field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            size = 8 if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE else 4
            for value in (b"\xff" * size, b"\xff\xef".rjust(size, b"\xff")):
                yield tag(field, 1 if size == 8 else 5) + value
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            long = b"x" * (MESSAGE_BYTES - 1024)
            for data in (
                MARKUP.encode(),
                b"\xed\xa0\x80",
                b"../" * 2000,
                *([] if depth else [long]),
            ):
                yield with_bytes(field, data)
        elif field.cpp_type != FieldDescriptor.CPPTYPE_BOOL:
            for number in (1 << 62, -1):
                yield tag(field, 0) + varint(number)


def high_water_bytes(pid: int) -> int:
    (line,) = [
        one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in one
    ]
    return int(line.split()[1]) << 10


def besieged(
    pid: int, address: str, service: Any, roles: dict[str, Any], signer: Signer, job: str,
    rank: int | None, serves: Callable[[], object],
) -> int:  # fmt: skip
    """Sends all of it; how many messages were refused, or answered as any."""
    with grpc.insecure_channel(address) as channel:

        def send(path: str, role: Role, messages: list[bytes]) -> None:
            shown = [("authorization", f"Bearer {bound(signer, role, rank, job=job)}")]
            metadata = ordered(signer, path, shown, messages)
            call = channel.stream_stream(path)(iter(messages), timeout=30, metadata=metadata)
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    call.cancel()
            assert call.code().name not in ("UNKNOWN", "INTERNAL"), (path, messages[0][:80])

        methods = {f"/{service.full_name}/{one.name}": one for one in service.methods}
        role_of = {path: min(roles.get(path, OPEN), key=list(Role).index) for path in methods}
        for path, role in role_of.items():
            send(path, role, [b""])  # what is loaded at the first call is loaded
        serves()
        resident, count = high_water_bytes(pid), 0
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high water mark begins again
        for path, method in methods.items():
            for data in too_much(method.input_type):
                endless = method.client_streaming and len(data) > 1 << 20
                send(path, role_of[path], [data] * (ENDLESS if endless else 1))
                count += 1
            serves()
            grown = high_water_bytes(pid) - resident
            assert grown < 2 * MOST_BYTES, f"{grown:,} bytes more at {path}"
    process = psutil.Process(pid)
    wait_until(
        lambda: process.memory_info().rss < resident + MOST_BYTES * 3 // 2, "it is given back"
    )
    return count


def test_a_sidecar_refuses_too_much_of_everything_and_serves_on(tmp_path: Path) -> None:
    with sidecar(tmp_path / "s") as process:
        trainer = attach(process.socket_path, TrainerSettings(arena_bytes=1 << 20))
        trainer.send_mesh()
        with grpc.insecure_channel(trainer.address) as channel:
            ask = channel.unary_unary("/paramd.v1.SidecarService/GetState")

            def serves() -> None:
                ask(b"", timeout=10, metadata=[("authorization", f"Bearer {ticket()}")])

            service = pb.DESCRIPTOR.services_by_name["SidecarService"]
            pid = process.process.pid
            assert besieged(pid, trainer.address, service, ROLES, SIGNER, "job", 0, serves) > 300
        trainer.close()


def test_a_control_plane_refuses_too_much_of_everything_and_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    with control_plane() as control:
        service = control_pb2.DESCRIPTOR.services_by_name["ControlService"]

        def serves() -> None:
            assert control.get("/api/v1/jobs/run/ranks").status_code == 200

        own, pid = Signer(bytes(range(32))), control.process.pid
        assert (
            besieged(pid, control.grpc_address, service, METHOD_ROLES, own, "run", None, serves)
            > 100
        )
