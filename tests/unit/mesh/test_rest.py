"""The job document, and what goes wrong on the way to it."""

import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from paramd.errors import ConflictError, DeniedError, UnreachableError
from paramd.mesh.peers.control import RestClient
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.security.tickets import Role, Signer

URL = "https://control:8470"


def document(incarnation: int = 1, valid_s: float = 600) -> dict[str, Any]:
    return {
        "job": "my-run",
        "incarnation": incarnation,
        "world_size": 2,
        "control_address": "control:8471",
        "layout_digest": "abc",
        "peers": [{"rank": 1, "address": "host:1", "socket_path": "", "host_id": "h"}],
        "ticket": Signer(bytes(32)).mint(
            job="my-run",
            incarnation=incarnation,
            role=Role.SIDECAR,
            rank=0,
            ttl_s=max(valid_s, 1e-6),
        ),
        "ticket_expires_s": time.time() + valid_s,
        "a_newer_field": 1,
    }


def client(handler: Callable[[httpx2.Request], httpx2.Response]) -> RestClient:
    return RestClient(URL + "/", "secret-token", transport=httpx2.MockTransport(handler))


@pytest.mark.parametrize("error", [httpx2.ConnectError("no route"), httpx2.ConnectTimeout("")])
async def test_a_url_that_does_not_answer_is_told_with_where_to_find_the_new_one(
    error: httpx2.HTTPError,
) -> None:
    def unreachable(_: httpx2.Request) -> httpx2.Response:
        raise error

    def told(url: str, **more: Any) -> RestClient:
        return RestClient(url, "token", transport=httpx2.MockTransport(unreachable), **more)

    new = "its new url is in <state dir>/JOB/endpoint.json on its host"
    # One that is read from the state dir is read again.
    found = told(URL, find=lambda: (URL, "token"))
    for rest, hinted in ((told(URL), True), (found, False)):
        with pytest.raises(UnreachableError) as raised:
            await rest.job("my-run")
        assert (new in str(raised.value)) == hinted
        assert rest.url in str(raised.value)
        await rest.close()


async def test_a_request_after_the_client_was_closed_is_an_outage() -> None:
    rest = client(lambda request: httpx2.Response(200, json=document()))
    await rest.close()
    with pytest.raises(UnreachableError, match="was closed during the request; connect again"):
        await rest.job("my-run")


class Answers:
    """A Reach whose control plane is scripted."""

    def __init__(self, answers: list[dict[str, Any] | Exception]) -> None:
        self.answers = answers
        self.count = 0
        transport = httpx2.MockTransport(self.handle)
        self.reach = SidecarFinder(RestClient(URL, "token", transport=transport), "my-run")

    def handle(self, request: httpx2.Request) -> httpx2.Response:
        self.count += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx2.Response(200, json=answer)


async def test_a_ticket_is_renewed_before_it_expires() -> None:
    control = Answers([document(valid_s=0.0), document(valid_s=600)])
    await control.reach.start()

    async def attempt(sidecars: object) -> int:
        return control.count

    deadline_s = time.monotonic() + 60
    assert await control.reach.attempts(attempt, deadline_s) == 2
    assert await control.reach.attempts(attempt, deadline_s) == 2
    await control.reach.close()


async def test_a_refused_ticket_is_asked_for_anew_once() -> None:
    control = Answers([document()])
    await control.reach.start()
    tries = 0

    async def attempt(sidecars: object) -> None:
        nonlocal tries
        tries += 1
        raise DeniedError("not yours")

    with pytest.raises(DeniedError, match="not yours"):
        await control.reach.attempts(attempt, time.monotonic() + 10)
    assert tries == 2
    await control.reach.close()


async def test_a_new_incarnation_is_followed() -> None:
    control = Answers([document(incarnation=1), document(incarnation=2)])
    await control.reach.start()

    async def attempt(sidecars: Any) -> int:
        if sidecars.document.incarnation == 1:
            raise ConflictError("stale incarnation")
        return int(sidecars.document.incarnation)

    assert await control.reach.attempts(attempt, time.monotonic() + 10) == 2
    await control.reach.close()


class Moved:
    """Two control planes: the one of the state dir, and whoever is at the first address."""

    def __init__(self, at_first: int | None) -> None:
        self.at_first = at_first
        self.now = ("https://first:8470", "token-1")
        self.asked: list[str] = []

    def handle(self, request: httpx2.Request) -> httpx2.Response:
        token = request.headers["authorization"].removeprefix("Bearer ")
        self.asked.append(f"{request.method} {request.url.host} {token}")
        if request.url.host == "first" and self.now[0] != URL.replace("control", "first"):
            if self.at_first is None:
                raise httpx2.ConnectError("refused")
            return httpx2.Response(self.at_first, json={"detail": "not here"})
        return httpx2.Response(200, json=document())

    def client(self) -> RestClient:
        transport = httpx2.MockTransport(self.handle)
        return RestClient(*self.now, transport=transport, find=lambda: self.now)


@pytest.mark.parametrize("at_first", [None, 401, 404])
async def test_a_control_plane_that_moved_is_followed_with_its_new_token(
    at_first: int | None,
) -> None:
    moved = Moved(at_first)
    rest = moved.client()
    await rest.job("my-run")
    moved.now = ("https://second:8471", "token-2")
    assert (await rest.job("my-run")).job == "my-run"
    await rest.send("POST", "/jobs/my-run/edits", {})
    assert rest.url == "https://second:8471"
    assert moved.asked == [
        "GET first token-1",
        "GET first token-1",
        "GET second token-2",
        "POST second token-2",
    ]
    await rest.close()


async def test_a_change_that_may_have_happened_is_not_sent_elsewhere() -> None:
    moved = Moved(503)
    rest = moved.client()
    moved.now = ("https://second:8471", "token-2")
    with pytest.raises(UnreachableError):
        await rest.send("POST", "/jobs/my-run/edits", {})
    await rest.close()
    assert moved.asked == ["POST first token-1"]
