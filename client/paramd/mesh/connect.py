"""connect(): where a job's control plane is, and a mesh on it."""

from __future__ import annotations

import os

from paramd.errors import UsageError
from paramd.mesh.amesh import AsyncMesh
from paramd.mesh.mesh import Mesh
from paramd.mesh.peers.control import Find
from paramd.places import read_endpoint, running_jobs
from paramd.security.tls import ClientTls


def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    job: str | None = None,
    timeout_s: float | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
) -> Mesh:
    """A mesh on a running job. Close it, or use it as a context manager.

    Args:
        url: The control plane's; without it PARAMD_URL, else what the job wrote into the
            state dir of this user on this host, read again when the job begins anew.
        token: Its token; without it PARAMD_TOKEN, else the state dir's.
        job: Name of the job; without it PARAMD_JOB, else the only one that runs.
        timeout_s: Default time for one call, in seconds; None means 60.
        tls_ca: File of CA certificates to trust when the url is https; without it
            PARAMD_TLS_CA, else those of the system.

    Raises:
        UnreachableError: no such job runs here, or its control plane does not answer.
        DeniedError: the token is missing or wrong.
        UsageError: several jobs run and none was named.
    """
    at, secret, name = resolve(url, token, job)
    tls, find = ClientTls.from_environment(tls_ca), _finder(url, token, name)
    return Mesh(at, secret, job=name, timeout_s=timeout_s, tls=tls, find=find)


def async_connect(
    url: str | None = None,
    token: str | None = None,
    *,
    job: str | None = None,
    timeout_s: float | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
) -> AsyncMesh:
    """A mesh for asyncio, to be used as `async with`. Arguments and errors as `connect`."""
    at, secret, name = resolve(url, token, job)
    tls, find = ClientTls.from_environment(tls_ca), _finder(url, token, name)
    return AsyncMesh(at, secret, job=name, timeout_s=timeout_s, tls=tls, find=find)


def resolve(url: str | None, token: str | None, job: str | None) -> tuple[str, str, str | None]:
    """Where to connect: arguments, else the environment, else the state dir.

    Raises:
        UsageError, UnreachableError: nothing, or too much, was found.
    """
    url = url if url is not None else os.environ.get("PARAMD_URL")
    token = token if token is not None else os.environ.get("PARAMD_TOKEN")
    job = job if job is not None else os.environ.get("PARAMD_JOB")
    if url is None:
        endpoint = read_endpoint(job)
        return endpoint.url, token if token is not None else endpoint.token, endpoint.job
    if token is None:
        token = _known_token(url, job)
    return url, token, job


def _finder(url: str | None, token: str | None, job: str | None) -> Find | None:
    """Reads again where a job is; None when the state dir is not what said it."""
    if url is not None or os.environ.get("PARAMD_URL") is not None:
        return None

    def find() -> tuple[str, str]:
        at, secret, _ = resolve(None, token, job)
        return at, secret

    return find


def _known_token(url: str, job: str | None) -> str:
    for endpoint in running_jobs():
        if endpoint.url == url.rstrip("/") and job in (None, endpoint.job):
            return endpoint.token
    raise UsageError(
        f"token: none is known for {url}; give the one from the job's endpoint.json "
        "(token=, --token or PARAMD_TOKEN)"
    )
