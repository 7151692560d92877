"""connect() and async_connect(): find a job's control plane and open a mesh on it."""

from __future__ import annotations

import logging
import os

from paramd import gone
from paramd.errors import UsageError
from paramd.mesh.amesh import AsyncMesh
from paramd.mesh.loop import UNSET, Timeout
from paramd.mesh.mesh import Mesh
from paramd.mesh.peers.control import NOT_BEGUN, Find, client_tls
from paramd.places import StartingError, read_endpoint, running_jobs
from paramd.security.tls import ClientTls
from paramd.state_files import is_job_name

log = logging.getLogger("paramd")


@gone.keywords("connect")
def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    job: str | None = None,
    timeout: Timeout = UNSET,
    tls_ca: str | os.PathLike[str] | None = None,
) -> Mesh:
    """A mesh on a running job. Close it, or use it as a context manager.

    Args:
        url: The control plane's, or just the name of a job. Defaults to PARAMD_URL, then to the
            endpoint in this user's state dir, which is read again when the job restarts.
        token: Its token. Defaults to PARAMD_TOKEN, then to the endpoint's.
        job: Name of the job. Defaults to PARAMD_JOB, then to the only running job.
        timeout: Seconds that a call may take unless it has its own, or a text such as "5m"; 60 by
            default, None means no limit.
        tls_ca: File of CA certificates for https, or the fingerprint "sha256:..." of a job's
            own CA. Defaults to PARAMD_TLS_CA, then to the CA in the job's endpoint, then to the
            system's.

    Raises:
        NotFoundError: this host never had a job of that name.
        UnreachableError: the job has ended, or its control plane does not respond. `connect`
            waits for a job that is starting, `timeout` at most.
        DeniedError: the token is missing or wrong.
        UsageError: several jobs run and none was named.
    """
    return Mesh(async_connect(url, token, job=job, timeout=timeout, tls_ca=tls_ca))


@gone.keywords("connect")
def async_connect(
    url: str | None = None,
    token: str | None = None,
    *,
    job: str | None = None,
    timeout: Timeout = UNSET,
    tls_ca: str | os.PathLike[str] | None = None,
) -> AsyncMesh:
    """A mesh for asyncio; use it as `async with`. Args, Raises: as `connect`.

    Waits up to `timeout` for a job that is starting.
    """
    url, job = _named(url, job)
    at, secret, name, find = located(url, token, job)
    tls = trust(at, tls_ca)
    return AsyncMesh(at, secret, job=name, timeout=timeout, tls=tls, find=find)


def located(
    url: str | None, token: str | None, job: str | None
) -> tuple[str, str, str | None, Find | None]:
    """As `resolve`, with how to look again; of a job that is starting the url is `NOT_BEGUN`."""
    try:
        at, secret, name = resolve(url, token, job)
    except StartingError as error:
        starts = "is starting" if len(error.jobs) == 1 else "are starting"
        log.warning("paramd: %s %s; waiting until it is there", ", ".join(error.jobs), starts)
        at, secret, name = NOT_BEGUN, "", job
    return at, secret, name, _finder(url, token, name)


def resolve(url: str | None, token: str | None, job: str | None) -> tuple[str, str, str | None]:
    """(url, token, job) from the arguments, else the environment, else the state dir.

    Raises:
        NotFoundError, UnreachableError: As `read_endpoint`.
        UsageError: If several jobs run here or no token is known.
    """
    url = url if url is not None else os.environ.get("PARAMD_URL")
    token = token if token is not None else os.environ.get("PARAMD_TOKEN")
    job = job if job is not None else os.environ.get("PARAMD_JOB")
    if url is None:
        endpoint = read_endpoint(job)
        return endpoint.url, token if token is not None else endpoint.token, endpoint.job
    if "://" not in url:
        raise UsageError(f"url: {url!r} has no scheme; write 'http://{url}' (or https://)")
    if token is None:
        token = _known_token(url, job)
    return url, token, job


def _named(url: str | None, job: str | None) -> tuple[str | None, str | None]:
    """(url, job), where the first argument may be a job's name: `connect("my-run")`."""
    if url is None or job is not None or not is_job_name(url):
        return url, job
    return None, url


def trust(url: str, tls_ca: str | os.PathLike[str] | None) -> ClientTls | None:
    """Return the TLS settings for a given CA; None if none is given, because the endpoint, which
    changes with each run, names one."""
    named = tls_ca is not None or bool(os.environ.get("PARAMD_TLS_CA"))
    return client_tls(url, tls_ca) if named else None


def _finder(url: str | None, token: str | None, job: str | None) -> Find | None:
    """A function that reads the endpoint again; None if the url is not from the state dir."""
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
        f"token: none is known for {url}; give one (token=, --token or PARAMD_TOKEN): the owner's "
        "is in the job's endpoint.json, an admin creates others (paramd token create)"
    )
