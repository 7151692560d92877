"""Discovery and status over the control plane's REST side, `/api/v1`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2

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
)
from paramd.mesh.peers.grpc import Asked, RankUnreachableError, check_way
from paramd.security.tls import ClientTls, https_context

REST_TIMEOUT_S = 5.0
"""Deadline of one REST request, in seconds."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where one rank's sidecar is found."""

    rank: int
    address: str
    """gRPC target, "host:port"."""
    socket_path: str
    """Its Unix socket, for programs of the same host."""
    host_id: str
    """Names the running kernel of its host, and its network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDocument:
    """What the control plane says of a job. Holds a ticket: never log it."""

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

    def peer(self, rank: int) -> PeerAddress:
        """Where the sidecar of `rank` is found.

        Raises:
            RankUnreachableError: it has not joined, has left, or cannot be reached from here.
        """
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
        """The sidecar of `rank`, to be called. Raises as `peer`."""
        return Asked(
            job=self.job,
            incarnation=self.incarnation,
            rank=rank,
            address=self.peer(rank).address,
            layout_digest=self.layout_digest,
        )


Find = Callable[[], tuple[str, str]]
"""Url and token of a job's control plane as they are now; UnreachableError when there is none."""


class RestClient:
    """Asks one control plane, wherever it is by now. No I/O before the first request."""

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
        """`transport` replaces the network in tests; `tls` is the environment's when None.

        With `find` a control plane that moved is followed: the job's next incarnation may
        have another port, and has another token.
        """
        self._timeout_s = timeout_s
        self._transport, self._tls, self._find = transport, tls, find
        self._left: list[httpx2.AsyncClient] = []
        self._at = (checked_url(url), token)
        self._client = self._client_of(*self._at)

    def _client_of(self, url: str, token: str) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=url + "/api/v1",
            headers={"authorization": f"Bearer {token}"},
            transport=self._transport,
            verify=https_context(url, self._tls),
            # A proxy from the environment must not see the token.
            trust_env=False,
        )

    @property
    def url(self) -> str:
        """Where it is asked now."""
        return self._at[0]

    def look_again(self) -> None:
        """Follows the control plane if it is known to be elsewhere by now."""
        if self._find is None:
            return
        try:
            url, token = self._find()
        except ParamdError:
            return  # what the old address says tells more
        if (at := (checked_url(url), token)) != self._at:
            # Requests under way end where they began.
            self._left.append(self._client)
            self._at, self._client = at, self._client_of(*at)

    async def jobs(self) -> list[str]:
        """Names of the jobs that this control plane knows."""
        found = await self._get("/jobs")
        listed = found.get("jobs", []) if isinstance(found, Mapping) else found
        return [str(job["job"] if isinstance(job, Mapping) else job) for job in listed]

    async def job(self, job: str) -> JobDocument:
        """The job's document, with a fresh ticket.

        Raises:
            UnreachableError, DeniedError, NotFoundError, DeadlineError: as they say.
        """
        found = await self._get(f"/jobs/{quote(job, safe='')}")
        try:
            return parse_job(found)
        except (KeyError, TypeError, ValueError) as error:
            raise ParamdError(
                f"{self.url} gave a job document that this client cannot read ({error!r}); "
                "client and job may run different versions of paramd"
            ) from error

    async def ranks(self, job: str) -> list[dict[str, Any]]:
        """State of every rank, ordered by rank, as the control plane last heard it."""
        found = await self._get(f"/jobs/{quote(job, safe='')}/ranks")
        listed = found.get("ranks", []) if isinstance(found, Mapping) else found
        return [dict(rank) for rank in listed]

    async def audit(
        self, job: str | None, *, order: str, limit: int, page_token: str = ""
    ) -> dict[str, Any]:
        """A page of the audit of a job, or with None of the control plane itself.

        Raises:
            UnreachableError, DeniedError, NotFoundError: as they say.
        """
        path = f"/jobs/{quote(job, safe='')}/audit" if job is not None else "/audit"
        return dict(
            await self._get(
                f"{path}?order={order}&limit={limit}&page_token={quote(page_token, safe='')}"
            )
        )

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        for client in (*self._left, self._client):
            await client.aclose()

    async def _get(self, path: str) -> Any:
        return await self.send("GET", path)

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """The JSON answer to one request below /api/v1. Sent once, never again.

        `timeout_s` is for requests that wait for something; None is the client's own.

        Raises:
            ParamdError: the class that the HTTP status stands for.
        """
        answer = await self._answer(method, path, body, timeout_s)
        try:
            return answer.json()
        except ValueError as error:
            raise UnreachableError(
                f"{self.url} answered something that is not JSON; is it a paramd control plane?"
            ) from error

    async def read_bytes(self, path: str, *, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """(size of a whole file, a part of it), as `read_export_file` answers.

        Raises: as `send`.
        """
        answer = await self._answer("GET", path, None, timeout_s)
        try:
            return int(answer.headers["paramd-file-bytes"]), answer.content
        except (KeyError, ValueError) as error:
            raise UnreachableError(
                f"{self.url} answered something that is no file; is it a paramd control plane?"
            ) from error

    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> httpx2.Response:
        limit_s = timeout_s if timeout_s is not None else self._timeout_s
        try:
            answer = await self._sent(method, path, body, limit_s)
        except httpx2.TimeoutException as error:
            raise UnreachableError(
                f"{self.url} did not answer in time; is the control plane stopped? "
                "Run: paramd doctor"
            ) from error
        except httpx2.HTTPError as error:
            raise UnreachableError(
                f"{self.url} does not answer ({error}); is the job running? "
                "Run: paramd status --job JOB, or give the right url"
            ) from error
        except RuntimeError as error:
            # Closed while another thread, or the job's next incarnation, still asks.
            if not self._client.is_closed:
                raise
            raise UnreachableError(
                f"the connection to {self.url} was closed meanwhile; connect again"
            ) from error
        if answer.status_code >= 400:
            raise error_of_http(
                self.url, answer.status_code, problem_text(answer), problem_type(answer)
            )
        return answer

    async def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> httpx2.Response:
        """One answer; a second request only where the first one surely did nothing."""
        client = self._client
        try:
            answer = await client.request(method, path, json=body, timeout=timeout_s)
        except httpx2.ConnectError:
            self.look_again()
            if self._client is client:
                raise
        else:
            if answer.status_code not in _NOT_OURS:
                return answer
            self.look_again()
            if self._client is client:
                return answer
        return await self._client.request(method, path, json=body, timeout=timeout_s)


_NOT_OURS = (401, 404)
"""What a stranger answers who listens where the job's control plane was."""


def parse_job(found: Mapping[str, Any]) -> JobDocument:
    """The document in a JSON object. Raises KeyError, TypeError or ValueError."""
    peers = [
        PeerAddress(
            rank=int(peer["rank"]),
            address=str(peer["address"]),
            socket_path=str(peer.get("socket_path") or ""),
            host_id=str(peer.get("host_id") or ""),
        )
        for peer in found["peers"]
    ]
    return JobDocument(
        job=str(found["job"]),
        incarnation=int(found["incarnation"]),
        world_size=int(found["world_size"]),
        control_address=str(found["control_address"]),
        layout_digest=str(found["layout_digest"]),
        peers={peer.rank: peer for peer in peers},
        ticket=str(found["ticket"]),
        ticket_expires_s=float(found["ticket_expires_s"]),
    )


def checked_url(url: str) -> str:
    """`url` without its trailing slash.

    Raises:
        UsageError: it is no http(s) URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"url: {url!r}; expected one like http://127.0.0.1:8470")
    if parts.username or parts.password:
        raise UsageError("url: it holds a user or password; give the token apart (token=)")
    return url.rstrip("/")


def problem_text(answer: httpx2.Response) -> str:
    """The message in an error answer, or its first 200 characters."""
    try:
        found = answer.json()
    except ValueError:
        return answer.text[:200]
    if isinstance(found, Mapping):
        for key in ("message", "detail", "error"):
            value = found.get(key)
            if isinstance(value, Mapping):
                value = value.get("message")
            if isinstance(value, str):
                return value
    return answer.text[:200]


def problem_type(answer: httpx2.Response) -> str:
    """The `type` of a problem document after RFC 9457; empty when the answer is none."""
    try:
        found = answer.json()
    except ValueError:
        return ""
    kind = found.get("type") if isinstance(found, Mapping) else None
    return kind if isinstance(kind, str) else ""


def error_of_http(url: str, status: int, text: str, kind: str = "") -> ParamdError:
    """The domain error that a problem of type `kind` names; else the one of the HTTP status."""
    if status in (401, 403):
        return DeniedError(
            f"{url} refused the token ({text}); give the job's token (token=, PARAMD_TOKEN), "
            "as endpoint.json of its state dir has it"
        )
    named = _BY_TYPE.get(kind)
    if named is not None and named is not ParamdError:
        return named(f"{url}: {text}")
    by_status = _BY_STATUS.get(status)
    if by_status is not None:
        return by_status(f"{url}: {text}")
    return ParamdError(f"{url} answered HTTP {status}: {text}")


def _type_of(error: type[ParamdError]) -> str:
    """As the control plane names it, for example "urn:paramd:error:not-found"."""
    name = error.__name__.removesuffix("Error")
    words = "".join(f"-{c}" if c.isupper() and at else c for at, c in enumerate(name))
    return f"urn:paramd:error:{words.lower()}"


_BY_TYPE: dict[str, type[ParamdError]] = {_type_of(error): error for error in CODES}

# For what stands before the control plane, and for its own refusals of what HTTP forbids.
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
