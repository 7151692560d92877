"""`paramd doctor`: check this machine, its TLS files, control planes and jobs."""

from __future__ import annotations

import asyncio
import importlib.metadata
import mmap
import os
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from paramd import places
from paramd.answers import asked_once
from paramd.bounds import HEALTH, OverBoundError
from paramd.cli.options import Target, with_output
from paramd.cli.output import Column, seconds
from paramd.cli.parts import RUN, CommandPart, Commands
from paramd.cli.shell import explain, one_line, say
from paramd.errors import ExhaustedError, ParamdError, UsageError
from paramd.integrations.versions import release
from paramd.security.tickets import CLOCK_SKEW_S

if TYPE_CHECKING:
    from paramd.mesh.reading.transfer import Reach
    from paramd.security.tls import ClientTls

DEFAULT_PORT = 8470
LITTLE_MEMORY_BYTES = 1 << 30

FLOORS = {
    "grpcio": "1.71.2",
    "protobuf": "5.29.6",
    "httpx2": "2.16",
    "xxhash": "3.5",
    "torch": "2.10",
    "fastapi": "0.136",
    "starlette": "1.3.1",
    "uvicorn": "0.30",
    "cryptography": "45",
    "pyjwt": "2.15",
}
"""Oldest versions that work and have no known vulnerability, as in pyproject.toml."""

_OF_SERVICE = ("fastapi", "starlette", "uvicorn", "cryptography", "pyjwt")
EXTRAS = {
    "torch": ("torch", "for summon and training"),
    **dict.fromkeys(_OF_SERVICE, ("service", "for training")),
}
"""Optional packages: the extra that installs them, and what needs them."""

_SECCOMP = "the container's seccomp profile or sandbox blocks it; allow sendmsg with descriptors"

COLUMNS = (
    Column("check", "CHECK"),
    Column("verdict", "RESULT"),
    Column("detail", "FOUND"),
    Column("advice", "WHAT TO DO"),
)

TIMEOUT_S = 5.0
NOTABLE_SKEW_S = 5.0
"""More than rounding (the Date header has whole seconds) and network delay explain."""

SOON_S = 7 * 86_400.0
"""A certificate that expires within this time is a warning."""

CERTIFICATES = ("PARAMD_TLS_CERT", "PARAMD_TLS_CLIENT_CERT", "PARAMD_TLS_CLIENT_CA")
KEYS = ("PARAMD_TLS_KEY", "PARAMD_TLS_CLIENT_KEY")


class Verdict(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    detail: str
    advice: str = ""
    """The remedy; empty when the verdict is OK."""


def machine() -> Iterator[Finding]:
    """All checks of this machine, in order. A check that raises becomes a failed finding."""
    for check in (_python, _packages, _state_dir, _memory, _port, _clock):
        try:
            yield from check()
        except Exception as error:
            advice = "the check itself crashed; run with --debug and report it"
            name = check.__name__.strip("_").replace("_", " ")
            yield _finding(name, False, f"{type(error).__name__}: {error}", advice)


def _python() -> Iterator[Finding]:
    found = ".".join(str(part) for part in sys.version_info[:3])
    yield _finding("python", sys.version_info >= (3, 11), found, "install Python 3.11 or newer")


def _packages() -> Iterator[Finding]:
    for name, floor in FLOORS.items():
        extra, use = EXTRAS.get(name, ("", "always"))
        install = f"pip install 'paramd[{extra}]'" if extra else "pip install paramd"
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            bad = Verdict.WARNING if extra else Verdict.FAILED
            yield _finding(name, False, "not installed", f"required {use}: {install}", bad)
            continue
        good = release(found) >= release(floor)
        yield _finding(name, good, found, f"needs {floor} or newer: {install} --upgrade")


def _state_dir() -> Iterator[Finding]:
    path = places.state_dir()
    if not path.exists():
        parent = next(p for p in path.parents if p.exists())
        yield _finding(
            "state dir",
            os.access(parent, os.W_OK | os.X_OK),
            f"{path} will be created",
            f"{parent} is not writable: set PARAMD_STATE_DIR to a directory of yours",
        )
        return
    found = path.stat()
    if found.st_uid != os.geteuid():
        problem = "belongs to another user: set PARAMD_STATE_DIR to a directory of yours"
    elif not os.access(path, os.W_OK | os.X_OK):
        problem = f"is not writable: chmod u+rwx {path}"
    elif stat.S_IMODE(found.st_mode) & 0o022:
        problem = f"is writable by other users: chmod go-w {path}"
    else:
        problem = ""
    yield _finding("state dir", not problem, str(path), problem)
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and stat.S_IMODE(entry.stat().st_mode) & 0o077:
            told = f"{entry} is open to other users"
            yield _finding("job dir", False, told, f"chmod 700 {entry}")


def _memory() -> Iterator[Finding]:
    from paramd.memory import descriptors

    available = descriptors.available_bytes()
    yield _finding(
        "shared memory",
        available >= LITTLE_MEMORY_BYTES,
        f"{available / 1e9:,.1f} GB available",
        "each rank needs twice its parameters' size; raise the container's memory limit",
        Verdict.WARNING,
    )
    try:
        descriptor = descriptors.create_memory("paramd-doctor", mmap.PAGESIZE)
    except ExhaustedError as error:
        yield _finding("memfd", False, str(error), "free memory or raise the limit")
        return
    try:
        os.close(descriptors.wake_event())
        os.close(descriptors.pidfd(os.getpid()))
        yield _finding("memfd, eventfd, pidfd", True, "work", "")
        yield _finding("SCM_RIGHTS", _passes(descriptor), "descriptors can be passed", _SECCOMP)
    finally:
        os.close(descriptor)


def _passes(descriptor: int) -> bool:
    """Whether a shared memory descriptor works after passing through a Unix socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [descriptor])
        _, received, _, _ = socket.recv_fds(theirs, 1, 1)
    if not received:
        return False
    with mmap.mmap(descriptor, mmap.PAGESIZE) as mine:
        mine[0] = 7
    try:
        with mmap.mmap(received[0], mmap.PAGESIZE) as other:
            return other[0] == 7
    finally:
        os.close(received[0])


def _port() -> Iterator[Finding]:
    """REST's default port and gRPC's, which is the next one."""
    mine: dict[str, str] = {}
    for running in places.running_jobs():
        for address in (running.url, running.grpc_address):
            mine[address.rpartition(":")[2]] = running.job
    advice = "the next free port will be used; to choose one, set PARAMD_LISTEN=127.0.0.1:PORT"
    for port in (DEFAULT_PORT, DEFAULT_PORT + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                detail, free = "free", True
            except OSError as error:
                job = mine.get(str(port))
                free = job is not None
                detail = f"serves job {job}" if free else f"taken ({error.strerror})"
        yield _finding(f"port {port}", free, detail, advice, Verdict.WARNING)


def _clock() -> Iterator[Finding]:
    installed_s = Path(__file__).stat().st_mtime
    now_s = time.time()
    good = now_s > installed_s - 86_400
    detail = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    yield _finding(
        "clock", good, detail, "earlier than paramd's installation, tickets will fail: set it"
    )
    with suppress(OSError):
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        yield _finding("clock source", True, source.read_text().strip(), "")


def _finding(
    check: str, good: bool, detail: str, advice: str = "", bad: Verdict = Verdict.FAILED
) -> Finding:
    verdict = Verdict.OK if good else bad
    return Finding(check=check, verdict=verdict, detail=detail, advice="" if good else advice)


@with_output
def doctor(target: Target) -> None:
    """Check this machine and its running jobs, and suggest fixes.

    Checks versions, the state dir, shared memory, sockets, ports, the clock and
    TLS files; clocks and certificates of the control planes; and the ranks of
    every running job, or of the one named. Exits with code 1 if any check
    failed; warnings alone exit with 0.
    """
    chosen = target.settings
    findings = [*machine(), *tls_files(chosen.tls_ca)]
    if chosen.url is not None:
        urls = {chosen.url}
    else:
        urls = {found.url for found in places.running_jobs() if chosen.job in (None, found.job)}
    for url in sorted(urls):
        findings += control_plane(url, chosen.tls_ca)
    findings += jobs(target)
    rows = [{**asdict(finding), "verdict": finding.verdict.value} for finding in findings]
    target.show("checks", rows, COLUMNS, id_key="check")
    verdicts = [finding.verdict for finding in findings]
    failed, warned = verdicts.count(Verdict.FAILED), verdicts.count(Verdict.WARNING)
    say(f"{len(findings)} checks, {failed} failed, {warned} warnings")
    if failed:
        raise typer.Exit(1)


def jobs(target: Target) -> Iterator[Finding]:
    """One finding per running job, and one per unhealthy rank."""
    chosen = target.settings
    if chosen.url is not None and chosen.job is None:
        try:
            targets = [Target(replace(chosen, job=name)) for name in asyncio.run(_served(target))]
        except (ParamdError, OSError) as error:
            yield _silent(chosen.url, error)
            return
        if not targets:
            yield _finding("jobs", True, f"none at {chosen.url}")
    elif chosen.url is not None or chosen.job is not None:
        targets = [target]
    else:
        running = places.running_jobs()
        targets = [
            Target(replace(chosen, job=job.job, url=job.url, token=job.token)) for job in running
        ]
        if not running:
            yield _finding("jobs", True, "none running here")
    for one in targets:
        yield from _job(one)


async def _served(target: Target) -> list[str]:
    """Names of the jobs at the control plane of `target`."""
    async with target.rest() as (client, _):
        return await client.jobs()


def _silent(name: str, error: Exception) -> Finding:
    advice = f"is it still running? Its logs are in {places.state_dir()}"
    return _finding(name, False, one_line(explain(error)[0]), advice)


LANES = {
    "same-host": "shared memory",
    "stream": "streams over TCP",
    "grpc": "gRPC alone",
    "auto": "no way",
}


def _job(target: Target) -> Iterator[Finding]:
    chosen = target.settings
    name = f"job {chosen.job}" if chosen.job is not None else str(chosen.url)
    try:
        with target.connect() as mesh:
            found, lanes, url = mesh.status(), mesh.lanes(), mesh.url
            reaches = mesh.reaches()
    except (ParamdError, OSError) as error:
        yield _silent(name, error)
        return
    told = f"run {found.incarnation}, step {found.step}, {found.world_size} ranks"
    yield _finding(f"job {found.job}", True, f"{told}; dashboard: {url}")
    for row in found:
        if not row.healthy:
            yield _finding(
                f"job {found.job} rank {row.rank}",
                False,
                f"{row.phase}: {row.reason}",
                f"see rank-{row.rank}.log in {places.state_dir() / found.job}",
            )
    for lane in lanes:
        yield _finding(
            f"job {found.job} rank {lane.rank} bytes",
            not lane.reason,
            f"{LANES[lane.transport]}{': ' * bool(lane.reason)}{lane.reason}",
            "let that port through; reading is slower without it",
            Verdict.WARNING,
        )
    yield from _between_hosts(found.job, reaches)


def _between_hosts(job: str, reaches: Sequence[Reach]) -> Iterator[Finding]:
    """One finding for each pair of hosts of which one does not reach the other."""
    for one in reaches:
        if one.reason:
            other = f"rank {one.to}" if one.to >= 0 else "control plane"
            yield _finding(
                f"job {job}, host of rank {one.rank} to {other}",
                False,
                f"{one.address}: {one.reason}",
                "open that port between the hosts, or name an address that they reach "
                "(PARAMD_ADDRESS)",
            )
    hosts = {one.rank for one in reaches}
    if len(hosts) > 1 and not any(one.reason for one in reaches):
        slowest_ms = 1000 * max(one.took_s for one in reaches)
        told = f"{len(hosts)} hosts reach each other and the control plane, the slowest pair in"
        yield _finding(f"job {job} hosts", True, f"{told} {slowest_ms:.0f} ms")


def control_plane(url: str, tls_ca: str | None) -> Iterator[Finding]:
    """Compare its clock with ours and, with https, check its certificate. Sends no token."""
    parts = urlsplit(url)
    host = parts.netloc
    try:
        from paramd.mesh.peers.control import client_tls
        from paramd.security.tls import pinned

        tls = client_tls(url, tls_ca)
        tls = pinned(url, tls.pin) if tls.pin else tls
        if parts.scheme == "https":
            certificate = _certificate(host, parts.hostname or "", parts.port or 443, tls)
            yield certificate
            if certificate.verdict is Verdict.FAILED:
                return
        yield _remote_clock(host, url, tls)
    except (ParamdError, OSError) as error:
        advice = "is it running, and is the port reachable from here?"
        yield _finding(f"control plane {host}", False, str(error), advice)


def _remote_clock(host: str, url: str, tls: ClientTls) -> Finding:
    import httpx2

    from paramd.security.tls import https_context

    before_s = time.time()
    try:
        answer = asked_once(
            "GET",
            url.rstrip("/") + "/healthz",
            HEALTH,
            timeout_s=TIMEOUT_S,
            transport=httpx2.AsyncHTTPTransport(verify=https_context(url, tls), trust_env=False),
        )
    except (httpx2.HTTPError, TimeoutError, OverBoundError) as error:
        raise OSError(f"{url} does not respond ({error})") from error
    return clock_finding(host, answer.headers.get("date"), (before_s + time.time()) / 2)


def clock_finding(host: str, date: str | None, now_s: float) -> Finding:
    """Compare the Date header `date` with our clock, which read `now_s` at that moment."""
    check = f"clock of {host}"
    try:
        # Truncated to whole seconds, half a second on average.
        theirs_s = parsedate_to_datetime(date or "").timestamp() + 0.5
    except ValueError:
        advice = "is it a paramd control plane? A proxy may have removed the header"
        told = f"it sent no usable time (Date: {date!r})"
        return _finding(check, False, told, advice, Verdict.WARNING)
    ahead_s = now_s - theirs_s
    skew_s = abs(ahead_s)
    if skew_s <= NOTABLE_SKEW_S:
        return _finding(check, True, "within a few seconds of ours")
    refused = skew_s > CLOCK_SKEW_S
    advice = (
        "tickets and tokens would be refused"
        if refused
        else f"at most {CLOCK_SKEW_S:.0f} s is tolerated"
    )
    told = f"ours is {seconds(skew_s)} {'ahead' if ahead_s > 0 else 'behind'}"
    bad = Verdict.FAILED if refused else Verdict.WARNING
    return _finding(check, False, told, f"synchronize the clocks (NTP); {advice}", bad)


def _certificate(host: str, name: str, port: int, tls: ClientTls) -> Finding:
    from paramd.security.tls import verify_advice

    check = f"TLS of {host}"
    context = tls.ssl_context()
    try:
        with (
            socket.create_connection((name, port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            found = secure.getpeercert()
    except ssl.SSLCertVerificationError as error:
        advice = verify_advice(error.verify_code, tls.ca)
        return _finding(check, False, error.verify_message, advice)
    except ssl.SSLError as error:
        advice = "does the port speak TLS? It may require a client certificate: "
        return _finding(
            check, False, str(error), f"{advice}PARAMD_TLS_CLIENT_CERT and PARAMD_TLS_CLIENT_KEY"
        )
    assert found is not None
    parts: Any = found["issuer"]
    issuer = ", ".join(value for part in parts for _, value in part)
    end_s = float(ssl.cert_time_to_seconds(str(found["notAfter"])))
    # A job's own CA renews it by itself.
    soon_s = SOON_S if tls.pems is None else 0.0
    return expiry_finding(check, f"issued by {issuer}", end_s, time.time(), soon_s=soon_s)


def expiry_finding(
    check: str, what: str, end_s: float, now_s: float, *, soon_s: float = SOON_S
) -> Finding:
    """Whether a certificate is valid at `now_s` and does not expire within `soon_s`."""
    left_s = end_s - now_s
    day = time.strftime("%Y-%m-%d", time.gmtime(end_s))
    told = f"{what}, {'valid until' if left_s > 0 else 'expired on'} {day}"
    advice = "renew it; servers reload the files by themselves"
    bad = Verdict.WARNING if left_s > 0 else Verdict.FAILED
    return _finding(check, left_s > soon_s, told, advice, bad)


def tls_files(tls_ca: str | None) -> Iterator[Finding]:
    """Check the files in PARAMD_TLS_* and --tls-ca: expiry of certificates, modes of keys."""
    named = {name: os.environ.get(name) for name in (*CERTIFICATES, *KEYS)}
    named["TLS CA"] = tls_ca if tls_ca is not None else os.environ.get("PARAMD_TLS_CA")
    for name, text in named.items():
        if not text or text.startswith("sha256:"):
            continue
        path = Path(text).expanduser()
        try:
            yield _key_file(name, path) if name in KEYS else _certificate_file(name, path)
        except (UsageError, OSError, ValueError) as error:
            yield _finding(name, False, str(error), "give a PEM file that this user can read")


def _key_file(name: str, path: Path) -> Finding:
    from paramd.security.tls import read_pem

    read_pem(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        return _finding(name, False, f"{path} is readable by other users", f"chmod 600 {path}")
    return _finding(name, True, f"{path}, readable only by its owner")


def _certificate_file(name: str, path: Path) -> Finding:
    from paramd.security.tls import read_pem

    data = read_pem(path)
    try:
        from cryptography import x509
    except ModuleNotFoundError:
        return _finding(name, True, f"{path}; install paramd[service] to check its expiry")
    found = x509.load_pem_x509_certificates(data)
    end_s = min(certificate.not_valid_after_utc.timestamp() for certificate in found)
    return expiry_finding(name, str(path), end_s, time.time())


class Doctor(CommandPart):
    """What is wrong with this machine, and with its jobs."""

    name = "doctor"

    def add_to(self, commands: Commands) -> None:
        commands.add(RUN, doctor, "", "-o json")
