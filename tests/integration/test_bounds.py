"""Too much of every field, to every method that there is: refused, and memory is given back."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Container, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import grpc
import httpx2
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from paramd.security.tickets import Role, Signer
from paramd.v1 import control_pb2, control_pb2_grpc
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.access.join import METHOD_ROLES
from paramd_service.sidecar.calls import ROLES
from tests.integration.control_process import (
    PRIVATE_KEY,
    TOKEN,
    Control,
    control_plane,
    site_plane,
    site_token,
)
from tests.integration.fake_trainer import SIGNER, attached
from tests.integration.sidecar_process import sidecar, ticket, wait_until
from tests.longer import share
from tests.orders import bound, ordered

pytestmark = pytest.mark.usefixtures("grpc_is_up")

MOST_BYTES = 64 << 20
"""What a server may grow by at its peak; half of it is what its heap may keep in pieces."""
MESSAGE_BYTES = 4 << 20
"""Most that a server takes in one message."""
ENDLESS = 64
"""Messages of a stream, each as large as is taken."""
OPEN = frozenset({Role.READER})
SHARE = frozenset(share(range(10_000), 4))
"""Numbers of the messages, of each method, and of the requests that are sent now."""
EACH = range(1 << 30)
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


def crowds(kind: Descriptor) -> Iterator[bytes]:
    """For each field of several messages as many as there is room for, with nothing in them."""
    for field in kind.fields:
        if field.message_type is not None and field.is_repeated:
            yield with_bytes(field, b"") * (MESSAGE_BYTES // 2 - 1)


def too_much(kind: Descriptor, depth: int = 0) -> Iterator[bytes]:
    """For each field messages with a value that is out of any range, or as much as is let in."""
    for field in kind.fields:
        if field.message_type is not None:
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
            texts = MARKUP.encode(), b"\xed\xa0\x80", b"../" * 2000, *([] if depth else [long])
            yield from (with_bytes(field, data) for data in texts)
        elif field.cpp_type != FieldDescriptor.CPPTYPE_BOOL:
            for number in (1 << 62, -1):
                yield tag(field, 0) + varint(number)


def high_water_bytes(pid: int) -> int:
    told = Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2]
    return int(told.split()[0]) << 10


@contextlib.contextmanager
def bounded(pid: int) -> Iterator[Callable[[object], None]]:
    """A block in which a process may grow by `MOST_BYTES`, and after which it gives that back.
    Gives what looks at it, and names what was asked where it has grown by more."""
    before = high_water_bytes(pid)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high water mark begins again

    def look(what: object) -> None:
        grown = high_water_bytes(pid) - before
        assert grown < MOST_BYTES, f"{grown:,} bytes more at {what}"

    yield look
    look("its end")
    process = psutil.Process(pid)
    wait_until(lambda: process.memory_info().rss < before + MOST_BYTES // 2, "it is given back", 60)


@contextlib.contextmanager
def beside(*asks: Callable[[], object]) -> Iterator[None]:
    """Others ask all the while; each of them is answered."""
    ended, failed = threading.Event(), list[Exception]()

    def asking() -> None:
        try:
            while not ended.wait(0.05):
                for ask in asks:
                    ask()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=asking)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failed, failed


@contextlib.contextmanager
def others(
    url: str, address: str, job: str, token: str
) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """What a job that is not besieged asks of its control plane: over REST, and over gRPC."""
    asked = control_pb2.ProveControlRequest(
        job=job, incarnation=1, address=address, nonce=bytes(32)
    )

    def rest() -> None:
        client.get(f"/api/v1/jobs/{job}/ranks").raise_for_status()

    head = {"authorization": f"Bearer {token}"}
    with (
        httpx2.Client(base_url=url, headers=head, trust_env=False, timeout=60) as client,
        grpc.insecure_channel(address) as channel,
    ):
        prove: Any = control_pb2_grpc.ControlServiceStub(channel).ProveControl
        yield rest, lambda: prove(asked, timeout=60)


def besieged(
    pid: int, address: str, service: Any, roles: dict[str, Any], signer: Signer, job: str,
    rank: int | None, *asks: Callable[[], object], chosen: Container[int] = SHARE,
) -> int:  # fmt: skip
    """Sends crowds, and the chosen ones of what is too much; how many messages were refused, or
    answered as any."""
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
        count = 0
        with beside(*asks), bounded(pid) as look:
            for path, method in methods.items():
                numbered = enumerate(too_much(method.input_type))
                some = (data for number, data in numbered if number in chosen)
                for data in chain(crowds(method.input_type), some):
                    endless = method.client_streaming and len(data) > 1 << 20
                    send(path, role_of[path], [data] * (ENDLESS if endless else 1))
                    count += 1
                look(path)
    return count


def test_a_sidecar_refuses_too_much_of_everything_and_serves_on(tmp_path: Path) -> None:
    with (
        sidecar(tmp_path / "s") as process,
        attached(process.socket_path) as trainer,
        grpc.insecure_channel(trainer.address) as channel,
    ):
        ask = channel.unary_unary("/paramd.v1.SidecarService/GetState")

        def serves() -> None:
            ask(b"", timeout=10, metadata=[("authorization", f"Bearer {ticket()}")])

        service = pb.DESCRIPTOR.services_by_name["SidecarService"]
        pid = process.process.pid
        assert besieged(pid, trainer.address, service, ROLES, SIGNER, "job", 0, serves) > 75


def test_a_control_plane_refuses_too_much_of_everything_and_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    with control_plane() as control:
        service = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
        there, own, pid = control.grpc_address, Signer(PRIVATE_KEY), control.process.pid
        with others(control.url, there, "run", TOKEN) as asks:
            assert besieged(pid, there, service, METHOD_ROLES, own, "run", None, *asks) > 25


TEXTS = str(1 << 62), "-1", "NaN", MARKUP, "\ud800", "../" * 10_000, "%00", "*" * 900, "[" * 500
LONG = json.dumps("x" * 500_000)
RAW = "4611686018427387904", "-1e999", "NaN", json.dumps(MARKUP), '"\\ud800"', LONG
HEAD = f"x-long: {'x' * 10_000_000}"
WHOLE = "[" * 500_000, "[0" + ",0" * 400_000 + "]", "{", '"\xff"', "x" * 2_000_000


class Shapes:
    """What an OpenAPI document says that operations take; values that they should not."""

    def __init__(self, document: Any) -> None:
        self._schemas = document.get("components", {}).get("schemas", {})

    def _of(self, schema: Any) -> Any:
        """What a reference, or a choice, is at first."""
        while True:
            if "$ref" in schema:
                schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            elif found := schema.get("anyOf") or schema.get("oneOf"):
                schema = found[0]
            else:
                return schema

    def good(self, schema: Any) -> Any:
        schema = self._of(schema)
        if "enum" in schema or "const" in schema:
            return [*schema.get("enum", ()), schema.get("const")][0]
        if "properties" in schema:
            return {key: self.good(schema["properties"][key]) for key in schema.get("required", ())}
        return {"string": "a", "integer": 1, "number": 1.0, "array": [], "boolean": True}.get(
            schema.get("type"), {}
        )

    def bad(self, schema: Any) -> Iterator[str]:
        """Values as JSON: all that no shape takes, then good ones with such a part."""
        yield from RAW
        schema = self._of(schema)
        good = self.good(schema)
        for key, inner in schema.get("properties", {}).items():
            rest = json.dumps({one: value for one, value in good.items() if one != key})
            for value in self.bad(inner):
                yield f"{rest[:-1]}{', ' if rest != '{}' else ''}{json.dumps(key)}: {value}}}"
        if "items" in schema:
            yield from (f"[{value}]" for value in self.bad(schema["items"]))


def requests(document: Any, job: str) -> Iterator[tuple[str, str, str | None]]:
    """Method, target and body: for each operation too much of each field, one at a time."""
    shapes = Shapes(document)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path.endswith("/updates"):
                continue  # for half a minute it waits for ranks that know of updates
            told = {one["name"]: one for one in operation.get("parameters", ())}
            good = {name: job if name == "job" else "1" for name in told}
            for name, one in told.items():
                for text in TEXTS:
                    given = {**good, name: quote(text, safe="", errors="surrogatepass")}
                    query = f"?{name}={given[name]}" if one["in"] == "query" else ""
                    yield method, path.format(**given) + query, None
            for kind in operation.get("requestBody", {}).get("content", {}).values():
                for body in (*shapes.bad(kind["schema"]), *WHOLE):
                    yield method, path.format(**good), body


def besieged_over_rest(
    control: Control, token: str, *asks: Callable[[], object], chosen: Container[int] = SHARE
) -> int:
    """Sends the chosen ones for the job "run" of a site; how many requests were answered."""
    count, where = 0, urlsplit(control.url)
    head = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    client = httpx2.Client(base_url=control.url, headers=head, trust_env=False, timeout=60)
    with client, contextlib.ExitStack() as halves:
        document = client.get("/api/v1/openapi.json").json()
        with beside(*asks), bounded(control.process.pid) as look:
            for number, (method, target, body) in enumerate(requests(document, "run")):
                if number not in chosen:
                    continue
                with client.stream(method, target, content=body) as answer:
                    told = answer.headers
                    assert told["x-content-type-options"] == "nosniff", (method, target[:80])
                    assert "html" not in told.get("content-type", ""), (method, target[:80])
                    assert answer.status_code < 500 or answer.status_code in (503, 504), answer
                count += 1
                look((method, target[:80], (body or "")[:80]))
                if body == RAW[0]:  # half a body, one without an end, and too long a head
                    for size in ("content-length: 1000000", "transfer-encoding: chunked", HEAD):
                        half = socket.create_connection((where.hostname, where.port))
                        halves.callback(half.close)
                        lines = f"{method.upper()} {target} HTTP/1.1", f"host: {where.netloc}", size
                        sent = "\r\n".join([*lines, *map(": ".join, head.items()), "", ""])
                        with contextlib.suppress(ConnectionError):  # it may hang up meanwhile
                            half.sendall(sent.encode() + b"1\r\n{\r\n" * 1000)
    return count


@contextlib.contextmanager
def site() -> Iterator[tuple[Control, str]]:
    """A site with the jobs "run" and "other", and its token."""
    with site_plane() as control:
        token = site_token()
        for job in ("run", "other"):
            httpx2.post(
                f"{control.url}/api/v1/jobs", json={"job": job, "world_size": 2}, trust_env=False,
                headers={"authorization": f"Bearer {token}"}, timeout=60,
            ).raise_for_status()  # fmt: skip
        yield control, token


def test_rest_refuses_too_much_of_everything_and_serves_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    with (
        site() as (control, token),
        others(control.url, control.grpc_address, "other", token) as asks,
    ):
        assert besieged_over_rest(control, token, *asks) > 250
