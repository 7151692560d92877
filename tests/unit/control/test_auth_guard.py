"""What browsers can be made to do and what must not stand in a URL, refused before anything.

Who may call what is in test_auth_roles.py for REST, and in integration/test_auth_grpc.py.
"""

import errno
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from paramd.errors import ConflictError
from paramd.security.tickets import holds_token, new_token
from paramd_service.control.access.join import (
    MAX_DETAIL_CHARS,
    MAX_SOURCES,
    FailureLimit,
    errors_as_statuses,
)
from paramd_service.control.api.guard import MAX_BODY_BYTES, Guard

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


FOREIGN = ["null", "http://evil.example", f"https://{HOST}", "http://127.0.0.1:8471", "file://", ""]


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        *((method, {"origin": origin}, 403) for origin in FOREIGN for method in ("GET", "DELETE")),
        ("GET", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "websocket"}, 403),
    ],
)
async def test_only_a_link_may_come_from_another_site(
    client: httpx2.AsyncClient, method: str, headers: dict[str, str], status: int
) -> None:
    assert (await client.request(method, "/", headers=headers)).status_code == status
    assert bool(reached) == (status == 200)


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


JOIN = "/paramd.v1.ControlService/Join"


class Call:
    """What a gRPC call was aborted with."""

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...]
    ) -> None:
        self.code, self.text = code, details
        raise grpc.aio.AbortError


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConflictError("x" * 2 * MAX_DETAIL_CHARS), grpc.StatusCode.FAILED_PRECONDITION,
         "x" * MAX_DETAIL_CHARS),
        (KeyError("a secret"), grpc.StatusCode.INTERNAL,
         "internal error; see the control plane's log"),
        (OSError(errno.EMFILE, "a secret"), grpc.StatusCode.RESOURCE_EXHAUSTED,
         "out of file descriptors; try again, or raise the limit (ulimit -n)"),
    ],
)  # fmt: skip
async def test_a_handlers_error_is_a_status_and_what_was_not_expected_stays_in_the_log(
    error: Exception, code: grpc.StatusCode, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = Call()
    with pytest.raises(grpc.aio.AbortError):
        async with errors_as_statuses(call, JOIN):
            raise error
    assert (call.code, call.text) == (code, text)
    assert ("a secret" in caplog.text) == ("a secret" in str(error))
