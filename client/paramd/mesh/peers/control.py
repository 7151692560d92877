"""REST client of the control plane, `/api/v1`, and the job document it serves."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx2

from paramd.answers import NOT_PACKED, Answer, asked, parsed_json
from paramd.bounds import PROBLEM, REST_ANSWER, REST_FILE_PART, Bound, OverBoundError
from paramd.documents import Document, read_document
from paramd.errors import (
    CODES,
    ConflictError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
    reason_of,
)
from paramd.mesh.peers import tunnels
from paramd.mesh.peers.grpc import Asked, RankUnreachableError, check_way, is_relayed
from paramd.places import StartingError, running_jobs
from paramd.security import loopback
from paramd.security.near import NearTransport
from paramd.security.tickets import handed, shown_of
from paramd.security.tls import IF_MOVED, ClientTls, Pems, https_context, not_accepted

REST_TIMEOUT_S = 5.0
"""Default timeout of one REST request."""
STARTING_S = 20.0
"""Least timeout of the first ones: a control plane is announced before its parts are loaded."""


@dataclass(frozen=True, slots=True)
class PeerAddress(Document):
    """Addresses of one rank's sidecar."""

    rank: int
    address: str
    """gRPC target, "host:port"."""
    socket_path: str
    """The sidecar's Unix socket, for clients on its host."""
    host_id: str
    """As `state_files.host_id` on its host."""


def behind(address: str) -> str:
    """The address behind a relayed one; any other one itself."""
    return address.split("/", 2)[2] if is_relayed(address) else address


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDocument:
    """The control plane's description of a job. Contains a ticket: never log it."""

    job: str
    incarnation: int
    world_size: int
    control_address: str
    """gRPC target of the control plane."""
    layout_digest: str
    peers: Mapping[int, PeerAddress]
    """By rank; ranks whose sidecar has not joined are absent."""
    ticket: str = field(repr=False)
    ticket_expires_s: float
    """Seconds since the Unix epoch."""
    tls: Pems | None = field(default=None, repr=False)
    """For mtls:// addresses; None when there are none."""
    ticket_seed: str = field(default="", repr=False)
    """Of the keys beside which alone the ticket is good; empty in a document without a ticket."""
    state: str = ""
    """"ended" once all ranks have detached."""

    def shown(self, rank: int | None) -> str:
        """What the sidecar of `rank` is shown of the ticket, None the control plane."""
        if not self.ticket_seed:
            return self.ticket
        return shown_of(handed(self.ticket, self.ticket_seed), rank, self.world_size)

    def peer(self, rank: int) -> PeerAddress:
        """The sidecar's addresses; RankUnreachableError: absent, or on another host's loopback."""
        if rank not in self.peers:
            raise RankUnreachableError(
                rank,
                f"rank {rank} of job {self.job!r} has no sidecar now "
                f"({len(self.peers)} of {self.world_size} have joined); try again in a few "
                f"seconds, or run: paramd status --job {self.job}",
            )
        peer = self.peers[rank]
        check_way(rank, peer.address, peer.host_id)
        return peer

    def asked(self, rank: int) -> Asked:
        """The call target for `rank`. Raises as `peer`."""
        return Asked(
            job=self.job,
            incarnation=self.incarnation,
            rank=rank,
            address=self.peer(rank).address,
            layout_digest=self.layout_digest,
        )


@contextmanager
def readable(url: str) -> Iterator[None]:
    """Raise ParamdError where the block finds that a response breaks the API's schema."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ParamdError(
            f"{url} returned a response that this client cannot read ({error!r}); client and job "
            "may run different versions of paramd"
        ) from error


Find = Callable[[], tuple[str, str]]
"""Returns the current (url, token) of a job's control plane. Raises UnreachableError."""

NOT_BEGUN = "http://127.0.0.1:0"
"""In place of the url of a job that is starting; `RestClient.begun` finds it."""

_LOOK_S = 0.2


class RestClient:
    """Client of one control plane; with `find`, follows it to a new address."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        timeout_s: float = REST_TIMEOUT_S,
        tls: ClientTls | None = None,
        find: Find | None = None,
    ) -> None:
        """No I/O. `transport` replaces the network in tests; `tls` None means the environment's.

        With `find` the client follows the job to its next incarnation, which has another token
        and perhaps another port. `tls` None also trusts the CAs of this user's jobs.
        """
        self._timeout_s = timeout_s
        self._has_answered = False
        self._transport, self._tls, self._find = transport, tls, find
        self._left: list[httpx2.AsyncClient] = []
        self._at = (checked_url(url), token)
        self._client = self._client_of(*self._at)
        self._extensions = {"trace": loopback.trace_of(*self._at)}
        """Of each request: who listens at a loopback address is known before it gets the token."""

    def _client_of(self, url: str, token: str) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=url + "/api/v1",
            headers={"authorization": f"Bearer {token}", **NOT_PACKED},
            transport=self._transport
            if self._transport is not None
            else NearTransport(url, self._verify(url)),
            # A proxy from the environment must not see the token.
            trust_env=False,
        )

    def _verify(self, url: str) -> ssl.SSLContext | bool:
        return https_context(url, self._tls if self._tls is not None else client_tls(url))

    @property
    def url(self) -> str:
        return self._at[0]

    def look_again(self) -> None:
        """Switch to the control plane's new address, if `find` knows one."""
        if self._find is None:
            return
        try:
            url, token = self._find()
        except ParamdError:
            return  # the old address's error says more
        if (at := (checked_url(url), token)) != self._at:
            # Not closed yet: requests in flight finish on the client they started on.
            self._left.append(self._client)
            self._at, self._client = at, self._client_of(*at)
            self._extensions = {"trace": loopback.trace_of(*at)}

    async def begun(self, timeout_s: float) -> None:
        """Wait for the address of a job that is starting.

        Raises:
            StartingError: It has none in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._find is not None and self.url == NOT_BEGUN:
            try:
                self._find()
            except StartingError:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(_LOOK_S)
            else:
                self.look_again()

    async def jobs(self) -> list[str]:
        """Names of the jobs that the control plane serves."""
        found = await self.send("GET", "/jobs")
        with readable(self.url):
            return [str(job["job"]) for job in found["jobs"]]

    async def job(self, job: str) -> JobDocument:
        """The job's document, with a fresh ticket.

        Raises UnreachableError, DeniedError, NotFoundError or DeadlineError.
        """
        found = await self.send("GET", f"/jobs/{quote(job, safe='')}")
        with readable(self.url):
            return parse_job(found)

    async def ranks(self, job: str) -> list[dict[str, Any]]:
        """Last state of every rank known to the control plane, ordered by rank."""
        found = await self.send("GET", f"/jobs/{quote(job, safe='')}/ranks")
        with readable(self.url):
            return [dict(rank) for rank in found["ranks"]]

    async def pages(
        self, path: str, limit: int, **query: object
    ) -> AsyncIterator[Mapping[str, Any]]:
        """The pages of a list, until none is left; arguments that are None are not sent."""
        given = {name: value for name, value in query.items() if value is not None}
        token = ""
        while True:
            page = await self.send(
                "GET", f"{path}?{urlencode(given | {'limit': limit, 'page_token': token})}"
            )
            yield page
            token = str(page.get("next_page_token") or "")
            if not token:
                return

    async def close(self) -> None:
        for client in (*self._left, self._client):
            await client.aclose()

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Send one request below /api/v1 and return the JSON response. Never retried.

        `timeout_s` overrides the client's timeout, for requests that wait on the server. Raises the
        ParamdError of the HTTP status.
        """
        answer = await self._answer(method, path, body, timeout_s, REST_ANSWER)
        try:
            return answer.json()
        except ValueError as error:
            raise UnreachableError(
                f"the response of {self.url} is not JSON; is it a paramd control plane?"
            ) from error

    async def tunnel(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection through the control plane to the target of `path` (below /api/v1).

        Raises UnreachableError if the control plane or the target does not answer, else the
        ParamdError of the HTTP status.
        """
        url, token = self._at
        verify = self._verify(url)
        try:
            async with asyncio.timeout(REST_TIMEOUT_S):
                return await tunnels.opened(
                    url,
                    f"/api/v1{path}",
                    token,
                    verify if isinstance(verify, ssl.SSLContext) else None,
                )
        except loopback.StrangerError:
            raise  # it is an OSError, too, and says more
        except tunnels.RefusedError as error:
            raise error_of_http(url, error.status, *problem_of_text(error.text)) from None
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise UnreachableError(
                f"could not open a tunnel through {url} ({error!r}); is it a paramd control plane?"
            ) from error

    async def read_bytes(self, path: str, *, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """Part of an export's file: (size of the whole file, part). Raises as `send`."""
        answer = await self._answer("GET", path, None, timeout_s, REST_FILE_PART)
        try:
            return int(answer.headers["paramd-file-bytes"]), answer.content
        except (KeyError, ValueError) as error:
            raise UnreachableError(
                f"the response of {self.url} is not a file; is it a paramd control plane?"
            ) from error

    async def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float | None,
        bound: Bound,
    ) -> Answer:
        limit_s = timeout_s if timeout_s is not None else self._timeout_s
        if not self._has_answered:
            limit_s = max(limit_s, STARTING_S)
        try:
            answer = await self._sent(method, path, body, limit_s, bound)
            self._has_answered = True
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise UnreachableError(
                f"{self.url} did not answer in time; is the control plane stopped? "
                f"Run: paramd doctor.{self._if_moved()}"
            ) from error
        except OverBoundError as error:
            raise UnreachableError(
                f"{self.url} does not answer as a control plane does: {error}"
            ) from error
        except httpx2.HTTPError as error:
            ca = self._tls.ca if self._tls is not None else client_tls(self.url).ca
            if why := not_accepted(error, ca):
                raise UnreachableError(
                    f"{self.url} has a certificate that cannot be trusted: {why}"
                ) from error
            raise UnreachableError(
                f"{self.url} does not answer ({error}); is the job running? "
                f"Run: paramd status --job JOB, or give the right url.{self._if_moved()}"
            ) from error
        except RuntimeError as error:
            # httpx raises RuntimeError when the client is closed during the request.
            if not self._client.is_closed:
                raise
            raise UnreachableError(
                f"the connection to {self.url} was closed during the request; connect again"
            ) from error
        if answer.status_code >= 400:
            raise error_of_http(self.url, answer.status_code, *problem_of_text(answer.text))
        return answer

    def _if_moved(self) -> str:
        return IF_MOVED if self._find is None else ""

    async def _sent(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        bound: Bound,
    ) -> Answer:
        """One response; sent again only to another address, and if the first had no effect."""
        client = self._client
        try:
            answer = await self._request(method, path, body, timeout_s, bound)
        except (httpx2.ConnectError, loopback.StrangerError):
            self.look_again()
            if self._client is client:
                raise
        else:
            if answer.status_code not in _NOT_OURS:
                return answer
            self.look_again()
            if self._client is client:
                return answer
        return await self._request(method, path, body, timeout_s, bound)

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        bound: Bound,
    ) -> Answer:
        return await asked(
            self._client,
            method,
            path,
            bound,
            timeout_s=timeout_s,
            json=body,
            extensions=self._extensions,
        )


_NOT_OURS = (401, 404)
"""Statuses from an unrelated server that now listens on the job's old port."""


def parse_job(found: Mapping[str, Any]) -> JobDocument:
    """Parse a job document. Raises KeyError, TypeError or ValueError."""
    absent = {"socket_path": "", "host_id": ""}
    peers = [read_document(PeerAddress, {**absent, **peer}) for peer in found["peers"]]
    return read_document(
        JobDocument,
        found,
        peers={peer.rank: peer for peer in peers},
        tls=Pems.of_json(found["tls"]) if found.get("tls") is not None else None,
        ticket_seed=str(found.get("ticket_seed", "")),
        state=str(found.get("state", "")),
    )


def checked_url(url: str) -> str:
    """`url` without its trailing slash; UsageError if it is no http(s) URL or has credentials."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"url: {url!r}; expected one like http://127.0.0.1:8470")
    if parts.username or parts.password:
        raise UsageError("url: contains a user or password; give the token separately (token=)")
    return url.rstrip("/")


def problem_of_text(text: str) -> tuple[str, str]:
    """(message, `type` of the RFC 9457 problem document); else (its first 200 characters, "")."""
    try:
        found = parsed_json(text, PROBLEM)
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        return text[:200], ""
    kind = found.get("type")
    kind = kind if isinstance(kind, str) else ""
    for key in ("message", "detail", "error"):
        value = found.get(key)
        if isinstance(value, Mapping):
            value = value.get("message")
        if isinstance(value, str):
            return value, kind
    return text[:200], kind


def error_of_http(url: str, status: int, text: str, kind: str = "") -> ParamdError:
    """The domain error named by the problem type `kind`, else the one for the HTTP status."""
    named = _BY_TYPE.get(kind)
    if status == 403 and named is DeniedError:
        # The token is good, its role is not: no other token is advised than the one it names.
        return DeniedError(text)
    if status in (401, 403):
        return DeniedError(
            f"{url}: {text}"
            if named is DeniedError
            else f"{url} refused the token ({text}); give another one (token=, PARAMD_TOKEN)"
        )
    if named is not None and named is not ParamdError:
        return named(text)
    by_status = _BY_STATUS.get(status)
    if by_status is not None:
        return by_status(f"{url}: {text}")
    return ParamdError(f"{url} answered HTTP {status}: {text}")


_BY_TYPE: dict[str, type[ParamdError]] = {
    f"urn:paramd:error:{reason_of(kind()).lower().replace('_', '-')}": kind for kind in CODES
}

# For proxies in front of the control plane, and for its HTTP-level errors.
_BY_STATUS: dict[int, type[ParamdError]] = {
    400: UsageError,
    404: NotFoundError,
    409: ConflictError,
    422: UsageError,
    429: ExhaustedError,
    502: UnreachableError,
    503: UnreachableError,
    504: DeadlineError,
}


def client_tls(url: str, ca: str | os.PathLike[str] | None = None) -> ClientTls:
    """The CA for `url`: `ca`, else PARAMD_TLS_CA, else the CA in a running job's endpoint."""
    found = ClientTls.from_environment(ca)
    if found.ca is None and not found.pin:
        for endpoint in running_jobs():
            if endpoint.ca and endpoint.url == url.rstrip("/"):
                return ClientTls(pems=Pems(ca=endpoint.ca.encode()))
    return found
