"""Control planes: a site's, where the job registers and which its sidecars join, or rank 0's own.

Rank 0 starts its own, passes it its secrets and keeps it alive. It also starts the trackers, one
`paramd track` process for each.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paramd.answers import Answer, asked_once
from paramd.bounds import REST_ANSWER, OverBoundError
from paramd.errors import ConflictError, DeniedError, ParamdError, UnreachableError, UsageError
from paramd.helpers import end, spawn
from paramd.memory import descriptors
from paramd.security.loopback import trace_of
from paramd.security.tickets import key_from_hex
from paramd.security.tls import ClientTls, Pems, bindable, https_context, is_loopback, not_accepted
from paramd.state_files import check_private
from paramd.trainer.helpers.sidecar_link import Identity, Patience, Supervisor
from paramd.trainer.settings import AttachSettings

if TYPE_CHECKING:
    import ssl


TIMEOUT_S = 10.0
"""Longest wait for the control plane at attach, in seconds."""

MAX_TOKEN_BYTES = 4096
_REFUSALS: dict[int, type[ParamdError]] = {
    401: DeniedError,
    403: DeniedError,
    409: ConflictError,
    422: UsageError,
}

log = logging.getLogger("paramd")

GRACE_S = 10.0
"""How long, in seconds, a tracker may take to write its remaining data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenIncarnation:
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
    certified: int = 0
    """The incarnation whose CA the certificates are of, where the control plane is the job's own;
    it lasts for as long as that control plane's key."""
    url: str = ""
    """URL of the site's control plane; empty when there is no site, or it did not answer."""
    control_address: str = ""
    """The site's gRPC target, which sidecars join."""


def register(
    settings: AttachSettings,
    *,
    job: str,
    world_size: int,
    incarnation_floor: int,
    hosts: Sequence[str] = (),
    succeeds: int = 0,
) -> TakenIncarnation:
    """Have the control plane begin a new incarnation, above `incarnation_floor`. Not idempotent.

    `hosts` is the address of each rank, for ranks on several hosts. `succeeds`: the incarnation in
    which this very training still runs; 0: none.

    Raises:
        UnreachableError: No answer, or it cannot serve now.
        DeniedError: The token is missing, wrong, or may not register jobs.
        ConflictError: The job is already training, or the control plane belongs to another job.
        UsageError: Invalid URL, or one that would send the token unencrypted to another host.
    """
    url = settings.control.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"control: {url!r}; expected one like http://127.0.0.1:8470")
    verify = https_context(url)
    token = token_of(settings)
    body: dict[str, Any] = {
        "job": job,
        "world_size": world_size,
        "incarnation_floor": incarnation_floor,
    }
    if hosts:
        body["rank_hosts"] = list(hosts)
    if succeeds:
        body["succeeds"] = succeeds
    return _asked(url, token, verify, body)


def _asked(
    url: str, token: str, verify: ssl.SSLContext | bool, body: Mapping[str, Any]
) -> TakenIncarnation:
    # Here, because most jobs have no site.
    import httpx2

    from paramd.security.near import NearTransport

    try:
        answer = asked_once(
            "POST",
            f"{url}/api/v1/jobs",
            REST_ANSWER,
            timeout_s=TIMEOUT_S,
            transport=NearTransport(url, verify),
            json=body,
            headers={"authorization": f"Bearer {token}"},
            # Whoever listens at a loopback address is known before it gets the token.
            extensions={"trace": trace_of(url, token)},
        )
    except (httpx2.HTTPError, TimeoutError, OverBoundError) as error:
        if why := not_accepted(error, ClientTls.from_environment().ca):
            raise UnreachableError(
                f"{url} has a certificate that cannot be trusted: {why}"
            ) from error
        raise UnreachableError(f"the control plane at {url} does not answer ({error})") from error
    if answer.status_code != 201:
        raise _refusal(url, answer)
    try:
        certified = "rank_hosts" in body
        return _registration(url, int(body["world_size"]), answer.json(), certified=certified)
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(
            f"{url} sent an answer that this paramd cannot read ({error!r}); the versions of "
            "the control plane and the training may differ"
        ) from error


def token_of(settings: AttachSettings) -> str:
    """The token to register with: PARAMD_TOKEN, else the contents of PARAMD_TOKEN_FILE.

    Raises:
        DeniedError: If neither is set.
        UsageError: If the file cannot be read.
    """
    if settings.token:
        return settings.token
    if not settings.token_file:
        raise DeniedError(
            f"no token for the control plane at {settings.control}; set PARAMD_TOKEN or "
            "PARAMD_TOKEN_FILE to one that may register jobs"
        )
    check_private(Path(settings.token_file))
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
        raise ValueError(f"{len(tickets)} tickets, run {incarnation}")
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


def _refusal(url: str, answer: Answer) -> ParamdError:
    try:
        text = str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {answer.status_code}"
    # The control plane's own failures must not keep a training from starting.
    return _REFUSALS.get(answer.status_code, UnreachableError)(f"{url}: {text}")


class ControlLink:
    """Starts the control plane and keeps it alive, at its addresses as long as they are free."""

    def __init__(
        self, identity: Identity, settings: AttachSettings, *, directory: Path, token: str
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._directory = directory
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor = Supervisor("control", self._start)
        self._patience = Patience("the control plane", settings.sidecar_start_timeout_s)
        self._starting: subprocess.Popen[bytes] | None = None
        """A process that has not told its addresses yet."""
        self._listen = ""
        self._grpc_listen = ""
        self._up = threading.Lock()
        self._when_up: list[Callable[[], None]] = []
        self.url = ""
        self.control_address = ""
        """The control plane's gRPC target, which sidecars join."""
        self.exports: list[dict[str, Any]] = []
        """The last complete exports of this job, newest first (resume/exported.py)."""

    def open(self, *, resumes: bool) -> None:
        """Start it, and keep it up from now on even if this first start fails.

        `resumes`: training resumes from memory and waits only until the addresses are known;
        clients wait for the rest, and exports are not listed.

        Raises:
            UnreachableError: If it did not come up; its log has the reason.
        """
        try:
            pidfd = self._start(resumes=resumes)
        except BaseException:
            self._supervisor.start(None)
            raise
        self._supervisor.start(pidfd)

    def take_next(self, above: int, hosts: Sequence[str]) -> TakenIncarnation:
        """Have the process begin the next incarnation, with the keys of the present one: clients
        that are refused by the first sidecar in it find it here. Raises as `register`."""
        present = self._identity
        own = present.own_tls
        tls = ClientTls(pems=own.pems) if own is not None else None
        body: dict[str, Any] = {
            "job": present.job,
            "world_size": present.world_size,
            "incarnation_floor": above,
            "succeeds": present.incarnation,
        }
        if hosts:
            body["rank_hosts"] = list(hosts)
        if not self.url:
            raise UnreachableError("the control plane has not come up yet")
        taken = _asked(self.url, self._token, https_context(self.url, tls), body)
        return replace(
            taken,
            url="",
            control_address="",
            private_key=present.private_key,
            certified=present.certified,
        )

    def goes_on(self, identity: Identity) -> None:
        """Use the identity of the next incarnation. A process that did not answer `take_next`
        learns it from the first rank that joins; a process that starts later gets it at start."""
        self._identity = identity

    def when_up(self, act: Callable[[], None]) -> None:
        """Call `act` now, or on another thread once the control plane has come up."""
        with self._up:
            if not self.url:
                self._when_up.append(act)
                return
        act()

    def release(self) -> None:
        """Stop supervising: it ends by itself when all sidecars have left. Idempotent."""
        self._supervisor.close()

    def close(self) -> None:
        """Wait for it to end, then force it. Idempotent."""
        self.release()
        if self._process is not None:
            # One that is still starting has nobody to serve.
            end(self._process, grace_s=0.0 if self._starting is not None else 3.0)
            self._process = None
        if self._starting is not None:
            assert self._starting.stdout is not None
            self._starting.stdout.close()
            self._starting = None

    def _start(self, *, resumes: bool = False) -> int:
        log_path = self._directory / "control.log"
        process = self._starting
        if process is None or process.poll() is not None or not self._patience.may_stay():
            process = self._spawn(log_path, resumes=resumes)
        assert process.stdout is not None
        if not self._supervisor.readable(process.stdout.fileno(), self._patience.wait_s):
            raise self._patience.late(process, log_path)
        self._starting = None
        with process.stdout as output:
            line = output.readline()
        try:
            ready = json.loads(line)
        except ValueError:
            # Also where something else prints as Python starts: its successor waits for its end.
            end(process, grace_s=0.0)
            raise UnreachableError(
                f"the control plane did not start (it said {line[:80]!r}); see {log_path}"
            ) from None
        with self._up:
            self.url, self.control_address = ready["url"], ready["grpc_address"]
            waiting, self._when_up = self._when_up, []
        self._listen, self._grpc_listen = ready["listen"], ready["grpc_listen"]
        self.exports = ready["exports"]
        for act in waiting:
            try:
                act()
            except Exception:
                # The process is up: one that counts as failed would be waited for until its end.
                log.exception("paramd: an action that waited for the control plane failed")
        return descriptors.pidfd(process.pid)

    def _spawn(self, log_path: Path, *, resumes: bool) -> subprocess.Popen[bytes]:
        if self._starting is not None:
            end(self._starting, grace_s=0.0)
            assert self._starting.stdout is not None
            self._starting.stdout.close()
        elif self._process is not None:
            self._process.wait()
        identity = self._identity
        assert identity.private_key is not None, "rank 0 has it"
        own = identity.own_tls
        arguments = ["--job", identity.job, *self._wanted_listen()]
        if own is not None:
            arguments += ["--advertise", own.name]
        if self.control_address:
            arguments += ["--grpc-listen-near", self._grpc_listen]
        secrets = {
            "job": identity.job,
            "incarnation": identity.incarnation,
            "world_size": identity.world_size,
            "private_key": identity.private_key.hex(),
            "token": self._token,
            "own_tls": own is not None,
            "certified": identity.certified,
            "resumes": resumes,
        }
        self._patience.begin()
        self._process = self._starting = spawn(
            "paramd_service.control",
            arguments,
            log_path=log_path,
            stdin=json.dumps(secrets).encode() + b"\n",
            piped=True,
        )
        return self._process

    def _wanted_listen(self) -> tuple[str, str]:
        """The option for REST's address: the one that was named, else near the previous one.

        A port that was named is never replaced, or whoever takes it meanwhile would be asked
        instead of us. For other hosts it is not on loopback.
        """
        named = self._settings.listen or DEFAULT_LISTEN
        own, (host, _, port) = self._identity.own_tls, named.rpartition(":")
        wanted = own.listen(port) if own is not None and is_loopback(host) else bindable(named)
        if self._settings.listen and port != "0":
            return "--listen", wanted
        return "--listen-near", self._listen or wanted


@dataclass(eq=False, slots=True)
class Tracking:
    """A process of `paramd track` for each tracker that was asked for.

    Sidecars compute the statistics; this process only starts and ends them. Each ends by itself
    when the job no longer answers or is restarted.
    """

    _job: str
    _settings: AttachSettings
    _directory: Path
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """A control plane that comes up late has them opened on a thread of its own."""
    _closed: bool = False

    def open(self) -> None:
        """Start the processes; a failed start costs its tracker, not the training. Does nothing
        once closed."""
        with self._lock:
            if self._closed:
                return
            for kind in self._settings.trackers:
                try:
                    self._processes[kind] = self._start(kind)
                except (OSError, ParamdError) as error:
                    log.warning("paramd: nothing is logged to %s: %s", kind, error)

    def _start(self, kind: str) -> subprocess.Popen[bytes]:
        arguments = ["track", "--to", kind, "--job", self._job]
        token = None
        if self._settings.control:
            arguments += ["--url", self._settings.control, "--token", "-"]
            token = token_of(self._settings).encode() + b"\n"
        path = self._directory / f"log-{kind}.log"
        return spawn("paramd.cli", arguments, log_path=path, stdin=token, without=_OTHERS)

    def close(self) -> None:
        """Let the trackers write their data, and end the processes. Idempotent."""
        with self._lock:
            self._closed = True
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for kind, process in self._processes.items():
            end(process, grace_s=GRACE_S)
            # A process that was still starting has nothing to write.
            if process.returncode not in (0, -signal.SIGTERM):
                log.warning(
                    "paramd: the process that logs to %s ended with status %s; see %s",
                    kind,
                    process.returncode,
                    self._directory / f"log-{kind}.log",
                )
        self._processes = {}


DEFAULT_LISTEN = "127.0.0.1:8470"
_OTHERS = ("PARAMD_URL", "PARAMD_TOKEN", "PARAMD_TOKEN_FILE", "PARAMD_CONTEXT", "PARAMD_JOB")
"""A user's own settings, which may name another control plane."""
