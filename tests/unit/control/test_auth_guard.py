"""What browsers can be made to do, what must not stand in a URL, and gRPC calls without the right
ticket; refused before anything.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from paramd.errors import ConflictError, DeniedError, NotFoundError
from paramd.security.tickets import Claims, Role, Signer, Verifier, holds_token, new_token
from paramd_service.admission import TokenRevokedError
from paramd_service.control.access import join
from paramd_service.control.access.join import (
    MAX_DETAIL_CHARS,
    MAX_SOURCES,
    FailureLimit,
    TicketInterceptor,
    errors_as_statuses,
)
from paramd_service.control.api.guard import MAX_BODY_BYTES, SECURITY_HEADERS, Guard

HOST = "127.0.0.1:8470"
reached: list[str] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    request = Request(scope, receive)
    await request.body()
    reached.append(request.method)
    await PlainTextResponse("ok", headers={"x-frame-options": "SAMEORIGIN"})(scope, receive, send)


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    reached.clear()
    guarded = Guard(
        app,
        listen_host="10.0.0.7",
        is_token=holds_token,
        names=lambda: frozenset({"train.example", "*.mesh.example", "fd00::7"}),
    )
    transport = httpx2.ASGITransport(guarded)
    async with httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}") as found:
        yield found


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost:1", "[::1]:8470", "10.0.0.7:8470", "train.example", "TRAIN.example:1",
     "a.mesh.example", "[fd00::7]:8470"],
)  # fmt: skip
async def test_names_of_this_server_pass(client: httpx2.AsyncClient, host: str) -> None:
    assert (await client.get("/", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "a.b.mesh.example",
     "mesh.example", "xtrain.example", "0.0.0.0", "[::]", "2130706433", "", "train.example@evil"],
)  # fmt: skip
async def test_a_rebound_name_is_refused_whatever_else_is_right(
    client: httpx2.AsyncClient, host: str
) -> None:
    headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert (await client.get("/", headers=headers)).status_code == 400
    assert reached == []


@pytest.mark.parametrize(
    "origin",
    ["null", "http://evil.example", f"https://{HOST}", "http://127.0.0.1:8471", "file://", ""],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_a_foreign_origin_is_refused(
    client: httpx2.AsyncClient, origin: str, method: str
) -> None:
    answer = await client.request(method, "/", headers={"origin": origin})
    assert answer.status_code == 403
    assert reached == []


@pytest.mark.parametrize(
    ("site", "mode", "method", "status"),
    [
        ("same-origin", "cors", "GET", 200),
        ("none", "navigate", "GET", 200),
        ("cross-site", "navigate", "GET", 200),
        ("cross-site", "navigate", "POST", 403),
        ("cross-site", "no-cors", "GET", 403),
        ("same-site", "cors", "GET", 403),
        ("cross-site", "websocket", "GET", 403),
    ],
)
async def test_only_a_link_may_come_from_another_site(
    client: httpx2.AsyncClient, site: str, mode: str, method: str, status: int
) -> None:
    headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
    assert (await client.request(method, "/", headers=headers)).status_code == status


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
async def test_a_form_of_another_site_changes_nothing(
    client: httpx2.AsyncClient, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = await client.post("/", content=b'{"role":"admin"}', headers=headers)
    assert answer.status_code == 415
    assert reached == []
    assert (await client.post("/", json={"role": "admin"})).status_code == 200


async def test_bodies_have_a_length_and_a_limit(client: httpx2.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    headers = {"content-type": "application/json"}
    long = b" " * (MAX_BODY_BYTES + 1)
    assert (await client.post("/", content=chunks(), headers=headers)).status_code == 411
    assert (await client.post("/", content=long, headers=headers)).status_code == 413
    assert reached == []


@pytest.mark.parametrize(
    "url",
    ["/?token=x", "/?Access_Token=", "/?a=1&ticket=2", "/?a={}", "/?{}=1", "/x/{}", "/{}/x",
     "/?a=x{}y"],
)  # fmt: skip
async def test_a_token_in_a_url_is_refused_and_not_logged(
    client: httpx2.AsyncClient, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    token = new_token()
    with caplog.at_level(logging.DEBUG, logger="paramd.control.access"):
        answer = await client.get(url.format(token))
    assert answer.status_code == 400
    assert token not in answer.text
    assert "GET" in caplog.text
    assert token not in caplog.text
    assert reached == []


async def test_every_answer_has_the_headers_and_a_route_may_set_its_own(
    client: httpx2.AsyncClient,
) -> None:
    answer = await client.get("/")
    for name, value in SECURITY_HEADERS:
        expected = "SAMEORIGIN" if name == b"x-frame-options" else value.decode()
        assert answer.headers.get_list(name.decode()) == [expected]
    refused = await client.get("/?token=x")
    assert all(refused.headers[name.decode()] == value.decode() for name, value in SECURITY_HEADERS)
    assert "default-src 'none'" in refused.headers["content-security-policy"]


async def test_browsers_are_told_to_keep_to_tls_but_not_for_loopback(
    client: httpx2.AsyncClient,
) -> None:
    for url, told in (
        ("https://train.example/", True),
        ("https://127.0.0.1:8470/", False),
        ("http://train.example/", False),
    ):
        answer = await client.get(url)
        assert ("strict-transport-security" in answer.headers) == told, url


async def test_websockets_do_not_exist() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    guarded = Guard(app, listen_host="127.0.0.1", is_token=holds_token)
    reached.clear()
    await guarded({"type": "websocket"}, None, send)  # type: ignore[arg-type]
    assert (sent, reached) == ([], [])


def test_who_sends_wrong_tokens_is_limited_and_nobody_else() -> None:
    now_s = [0.0]
    limit = FailureLimit(burst=2.0, per_s=1.0, clock=lambda: now_s[0])
    assert [limit.allows("a") for _ in range(3)] == [True, True, False]
    assert limit.allows("b")
    now_s[0] = 1.0
    assert [limit.allows("a") for _ in range(2)] == [True, False]
    # However long it has been quiet: no more than the burst at once.
    now_s[0] = 1e6
    assert [limit.allows("a") for _ in range(4)] == [True, True, False, False]
    for number in range(2 * MAX_SOURCES):
        limit.allows(str(number))
    assert len(limit._left) == MAX_SOURCES


def test_a_sender_gets_its_failures_back_at_the_rate_set() -> None:
    now_s = [0.0]
    usual = FailureLimit(clock=lambda: now_s[0])
    quick = FailureLimit(burst=2.0, per_s=4.0, clock=lambda: now_s[0])
    assert [usual.allows("a") for _ in range(21)] == [True] * 20 + [False]
    assert [quick.allows("a") for _ in range(3)] == [True, True, False]
    now_s[0] = 0.25
    assert [quick.allows("a") for _ in range(2)] == [True, False]
    now_s[0] = 1.0
    assert [usual.allows("a") for _ in range(2)] == [True, False]


JOIN = "/paramd.v1.ControlService/Join"
SCHEDULE = "/paramd.v1.ControlService/ScheduleBoundary"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/"
OWN, OTHER = Signer(bytes(range(32))), Signer(bytes(32))
KEYS = {("run", 1): OWN, ("other", 1): OTHER, ("run", 2): OTHER}
DENIED, ROLE_DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def bearer(signer: Signer = OWN, role: Role = Role.SIDECAR, **claims: Any) -> tuple[str, str]:
    """Metadata with a ticket: of run, incarnation 1 and rank 2 unless told otherwise."""
    named: dict[str, Any] = {"job": "run", "incarnation": 1, "rank": 2, "ttl_s": 86_400.0} | claims
    return "authorization", f"Bearer {signer.mint(role=role, **named)}"


class Call:
    """One gRPC call to a server with the interceptor."""

    def __init__(self) -> None:
        self.served: list[tuple[Any, Claims | None]] = []
        self.denials: list[tuple[str, ...]] = []
        self.code: grpc.StatusCode | None = None
        self.text = ""
        self.trailers: dict[str, bytes] = {}
        self.gate = TicketInterceptor(
            self.verifier, self.check, lambda *told: self.denials.append(told)
        )

    def verifier(self, job: str, incarnation: int) -> Verifier:
        if (job, incarnation) not in KEYS:
            raise DeniedError(f"no job {job!r}, incarnation {incarnation}")
        return Verifier(KEYS[job, incarnation].public_key)

    def check(self, claims: Claims) -> None:
        if claims.token_id == "gone":
            raise TokenRevokedError("the token was revoked")

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...]
    ) -> None:
        self.code, self.text, self.trailers = code, details, dict(trailing_metadata)
        raise grpc.aio.AbortError

    async def serve(self, details: Any) -> str:
        self.served.append((details, join._caller.get(None)))
        return "served"

    async def make(self, method: str, metadata: Any) -> Any:
        """Make the call; what the gate let it have."""
        details = SimpleNamespace(method=method, invocation_metadata=metadata)
        # A task, as gRPC has for each call.
        found = await asyncio.create_task(self.gate.intercept_service(self.serve, details))  # type: ignore[arg-type]
        if not self.served:
            assert found.request_streaming, "it would wait for a request"
            with pytest.raises(grpc.aio.AbortError):
                await anext(found.stream_stream(None, self))
            return None
        assert self.served[0][0] is details
        return found

    def details(self) -> tuple[int, str, str, str]:
        """Code, text, reason and domain, as a client reads them."""
        status = status_pb2.Status.FromString(self.trailers["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        return status.code, status.message, info.reason, info.domain


@pytest.mark.parametrize(
    ("method", "metadata", "code", "reason", "text"),
    [
        (JOIN, None, DENIED, "DENIED", "'authorization: Bearer <ticket>', once"),
        (JOIN, [], DENIED, "DENIED", "'authorization: Bearer <ticket>', once"),
        (JOIN, [bearer(), bearer()], DENIED, "DENIED", "once"),
        (JOIN, [("authorization", b"Bearer x")], DENIED, "DENIED", "once"),
        (JOIN, [("authorization", "bearer x")], DENIED, "DENIED", "once"),
        (JOIN, [("ticket", bearer()[1])], DENIED, "DENIED", "once"),
        (JOIN, [("authorization", "Bearer x")], DENIED, "DENIED", "not a ticket of paramd"),
        (JOIN, [bearer(OTHER)], DENIED, "DENIED", "not signed by this job's"),
        (JOIN, [bearer(job="other")], DENIED, "DENIED", "not signed by this job's"),
        (JOIN, [bearer(incarnation=2)], DENIED, "DENIED", "not signed by this job's"),
        (JOIN, [bearer(incarnation=3)], DENIED, "DENIED", "no job 'run', incarnation 3"),
        (JOIN, [bearer(now_s=1000.0)], DENIED, "DENIED", "the ticket expired"),
        (SCHEDULE, [bearer(role=Role.READER, token_id="gone")], DENIED, "TOKEN_REVOKED", "revoked"),
        (JOIN, [bearer(role=Role.READER)], ROLE_DENIED, "ROLE", f"'reader' may not call {JOIN}"),
        (JOIN, [bearer(role=Role.CONTROL)], ROLE_DENIED, "ROLE", "'control' may not"),
        (SCHEDULE, [bearer()], ROLE_DENIED, "ROLE", f"'sidecar' may not call {SCHEDULE}"),
        (SCHEDULE, [bearer(role=Role.VIEWER)], ROLE_DENIED, "ROLE", "'viewer' may not"),
        (JOIN + "x", [bearer()], ROLE_DENIED, "ROLE", "'sidecar' may not"),
        (HEALTH + "Other", [bearer()], ROLE_DENIED, "ROLE", "'sidecar' may not"),
        ("/" + "x" * 300, [bearer()], ROLE_DENIED, "ROLE", "may not call /" + "x" * 199),
    ],
)  # fmt: skip
async def test_a_call_without_the_right_ticket_is_refused_and_told(
    method: str, metadata: Any, code: grpc.StatusCode, reason: str, text: str
) -> None:
    call = Call()
    assert await call.make(method, metadata) is None
    assert call.served == []
    assert text in call.text
    assert len(call.text) < 300
    assert call.code is code
    assert call.details() == (code.value[0], call.text, reason, "paramd")
    assert call.denials == [("", "", method, call.text)]


@pytest.mark.parametrize(
    ("method", "roles"),
    [
        (JOIN, {Role.SIDECAR}),
        (SCHEDULE, {Role.READER, Role.EDITOR, Role.CONTROL}),
        (REFLECTION, set(Role)),
        (REFLECTION.replace("v1", "v1alpha"), set(Role)),
    ],
)
async def test_each_method_takes_the_tickets_of_its_roles(method: str, roles: set[Role]) -> None:
    for role in Role:
        call = Call()
        served = await call.make(method, [("other", "x"), bearer(role=role)])
        assert (served == "served") == (role in roles), role
        assert (call.denials == []) == (role in roles), role


@pytest.mark.parametrize("name", ["Check", "List", "Watch"])
async def test_a_probe_of_health_needs_no_ticket(name: str) -> None:
    call = Call()
    assert await call.make(HEALTH + name, None) == "served"
    assert call.denials == []
    assert call.served[0][1] is None, "a probe speaks for nobody"


async def test_a_call_speaks_for_its_own_rank_job_and_incarnation_only() -> None:
    async def handler(_: Any) -> None:
        assert join.caller_rank() == ("run", 1, 2)
        assert join.caller_token() == "t"
        join.check_rank(2)
        join.check_incarnation("run", 1)
        for rank in (0, 1, 3):
            with pytest.raises(join.RoleError, match=f"rank 2; it is not valid for rank {rank}"):
                join.check_rank(rank)
        for job, incarnation in (("run", 2), ("run", 0), ("other", 1)):
            with pytest.raises(
                ConflictError, match=f"'run', incarnation 1; .* '{job}', incarnation {incarnation}"
            ):
                join.check_incarnation(job, incarnation)

    details: Any = SimpleNamespace(method=JOIN, invocation_metadata=[bearer(token_id="t")])
    await asyncio.create_task(Call().gate.intercept_service(handler, details))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "code", "reason", "text"),
    [
        (NotFoundError("no job x"), grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "no job x"),
        (join.RoleError("not you"), ROLE_DENIED, "ROLE", "not you"),
        (ConflictError("x" * MAX_DETAIL_CHARS), grpc.StatusCode.FAILED_PRECONDITION, "CONFLICT",
         "x" * MAX_DETAIL_CHARS),
        (ConflictError("x" * MAX_DETAIL_CHARS + "y"), grpc.StatusCode.FAILED_PRECONDITION,
         "CONFLICT", "x" * MAX_DETAIL_CHARS),
        (KeyError("a secret"), grpc.StatusCode.INTERNAL, "PARAMD",
         "internal error; see the control plane's log"),
        (OSError(errno.EMFILE, "a secret"), grpc.StatusCode.RESOURCE_EXHAUSTED, "EXHAUSTED",
         "no file descriptor is left; try again, or raise the limit (ulimit -n)"),
    ],
)  # fmt: skip
async def test_a_handlers_error_is_a_status_and_what_was_not_expected_stays_in_the_log(
    error: Exception,
    code: grpc.StatusCode,
    reason: str,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = Call()
    with pytest.raises(grpc.aio.AbortError):
        async with errors_as_statuses(call, JOIN):
            raise error
    assert (call.code, call.text) == (code, text)
    assert call.details() == (code.value[0], text, reason, "paramd")
    is_logged = "a secret" in str(error)
    assert (f"{JOIN} failed" in caplog.text, "a secret" in caplog.text) == (is_logged, is_logged)


async def test_a_handlers_own_abort_stays_what_it_is() -> None:
    call = Call()
    with pytest.raises(grpc.aio.AbortError):
        async with errors_as_statuses(call, JOIN):
            raise grpc.aio.AbortError
    assert call.code is None
