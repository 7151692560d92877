"""An external control plane: the job registers there, and its sidecars join it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paramd.errors import (
    ConflictError,
    DeniedError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.security.tickets import key_from_hex
from paramd.security.tls import ClientTls, Pems, https_context, not_accepted
from paramd.trainer.settings import AttachSettings

if TYPE_CHECKING:
    import httpx2

TIMEOUT_S = 10.0
"""Longest wait for the control plane at attach, in seconds."""

MAX_TOKEN_BYTES = 4096
_REFUSALS: dict[int, type[ParamdError]] = {
    401: DeniedError,
    403: DeniedError,
    409: ConflictError,
    422: UsageError,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenIncarnation:
    """An incarnation, with its keys and its ranks' tickets."""

    incarnation: int
    public_key: bytes
    """Verifies the incarnation's tickets."""
    rank_tickets: list[str] = field(repr=False)
    """By rank; each lets one sidecar join as that rank."""
    copy_tickets: list[str] = field(default_factory=list, repr=False)
    """By rank; each lets one sidecar send copies to another host. May be empty."""
    rank_pems: list[Pems] = field(default_factory=list, repr=False)
    """By rank, for ranks on several hosts: a certificate of the job's own CA."""
    private_key: bytes | None = field(default=None, repr=False)
    """Signs the incarnation's tickets; None when a site's control plane keeps it."""
    url: str = ""
    """Of the site's control plane; empty when there is no site, or it did not answer."""
    control_address: str = ""
    """gRPC target of it, which sidecars join."""


def register(
    settings: AttachSettings,
    *,
    job: str,
    world_size: int,
    incarnation_floor: int,
    hosts: Sequence[str] = (),
) -> TakenIncarnation:
    """Have the control plane begin a new incarnation, above `incarnation_floor`. Not idempotent.

    `hosts` is the address of each rank, for ranks on several hosts.

    Raises:
        UnreachableError: no answer, or it cannot serve now.
        DeniedError: the token is missing, wrong, or may not register jobs.
        ConflictError: the job is already training, or the control plane belongs to another job.
        UsageError: invalid URL, or one that would send the token unencrypted to another host.
    """
    import httpx2  # here, because most jobs have no site

    url = settings.control.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"control: {url!r}; expected one like http://127.0.0.1:8470")
    verify = https_context(url)
    body: dict[str, Any] = {
        "job": job,
        "world_size": world_size,
        "incarnation_floor": incarnation_floor,
    }
    if hosts:
        body["rank_hosts"] = list(hosts)
    try:
        answer = httpx2.post(
            f"{url}/api/v1/jobs",
            json=body,
            headers={"authorization": f"Bearer {token_of(settings)}"},
            timeout=TIMEOUT_S,
            verify=verify,
            # A proxy from the environment must not see the token.
            trust_env=False,
        )
    except httpx2.HTTPError as error:
        if why := not_accepted(error, ClientTls.from_environment().ca):
            raise UnreachableError(
                f"{url} has a certificate that cannot be trusted: {why}"
            ) from error
        raise UnreachableError(f"the control plane at {url} does not answer ({error})") from error
    if answer.status_code != 201:
        raise _refusal(url, answer)
    try:
        return _registration(url, world_size, answer.json(), certified=bool(hosts))
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(
            f"{url} sent an answer that this paramd cannot read ({error!r}); the versions of "
            "the control plane and the training may differ"
        ) from error


def token_of(settings: AttachSettings) -> str:
    """The token to register with: PARAMD_TOKEN, else the contents of PARAMD_TOKEN_FILE.

    Raises:
        DeniedError: neither is set.
        UsageError: the file cannot be read.
    """
    if settings.token:
        return settings.token
    if not settings.token_file:
        raise DeniedError(
            f"no token for the control plane at {settings.control}; set PARAMD_TOKEN or "
            "PARAMD_TOKEN_FILE to one that may register jobs"
        )
    try:
        with Path(settings.token_file).open() as file:
            return file.read(MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token_file: {settings.token_file} cannot be read: {error}") from error


def _registration(
    url: str, world_size: int, found: Mapping[str, Any], *, certified: bool
) -> TakenIncarnation:
    tickets = [str(ticket) for ticket in found["rank_tickets"]]
    copy_tickets = [str(ticket) for ticket in found.get("copy_tickets", [])]
    incarnation = int(found["incarnation"])
    if len(tickets) != world_size or len(copy_tickets) not in (0, world_size) or incarnation < 1:
        raise ValueError(f"{len(tickets)} tickets, incarnation {incarnation}")
    pems = [Pems.of_json(one) for one in found["rank_tls"]] if certified else []
    if certified and len(pems) != world_size:
        raise ValueError(f"{len(pems)} certificates")
    return TakenIncarnation(
        url=url,
        incarnation=incarnation,
        control_address=str(found["control_address"]),
        public_key=key_from_hex(found, "public_key"),
        rank_tickets=tickets,
        copy_tickets=copy_tickets,
        rank_pems=pems,
    )


def _refusal(url: str, answer: httpx2.Response) -> ParamdError:
    try:
        text = str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {answer.status_code}"
    # The control plane's own failures must not keep a training from starting.
    return _REFUSALS.get(answer.status_code, UnreachableError)(f"{url}: {text}")
