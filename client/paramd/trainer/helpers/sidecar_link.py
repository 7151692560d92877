"""Starts a rank's sidecar, hands over descriptors, and restarts it at its address if it dies.

A `Supervisor` keeps any one helper process of the trainer alive.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paramd import places
from paramd.errors import ConflictError, ParamdError, UnreachableError, UsageError, error_of_grpc
from paramd.helpers import end, spawn
from paramd.memory import descriptors, handover
from paramd.memory.descriptors import close_all
from paramd.memory.device_arena import TrainerDevice, create
from paramd.memory.handover import Allocation, Descriptors
from paramd.security.tls import Pems, bindable, host_of, is_of_job
from paramd.state_files import HOST_SOCKET, sidecars_dir
from paramd.trainer.helpers.insight import Insight
from paramd.trainer.settings import AttachSettings
from paramd.version import __version__

log = logging.getLogger("paramd")

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
# A process that lived this long did not fail at startup.
STEADY_S = 5.0

FIRST_PATIENCE, LONGEST_PATIENCE = 8, 64
"""How long a helper process may take to come up, in multiples of attach's wait for it."""

CONNECT_POLL_S = 0.02

STATE_TIMEOUT_S = 2.0
"""How long, in seconds, training waits for device memory that the sidecar makes."""


class LateError(UnreachableError):
    """A helper process lives, and has not come up yet."""


class Patience:
    """How long a helper process may take to come up, which grows with every try.

    On a cold or network file system, or on a busy host, Python alone may need minutes to load.
    A process that is ended before it is up never comes up, however often it is started; so one
    that lives is waited for again, and its successor gets twice the time.
    """

    def __init__(self, who: str, first_s: float) -> None:
        self._who = who
        self._first_s = first_s
        self._factor = FIRST_PATIENCE
        # Of a process that the link before this one has started, too.
        self._begun_s = time.monotonic()

    @property
    def wait_s(self) -> float:
        """Seconds that the next try waits: as long as all before it together."""
        return max(self._first_s, time.monotonic() - self._begun_s)

    def begin(self) -> None:
        """A process was started."""
        self._begun_s = time.monotonic()

    def may_stay(self) -> bool:
        """Whether to keep waiting for a process that lives and is not up yet. Otherwise it is
        replaced, and the next one may take twice as long."""
        if time.monotonic() - self._begun_s < self._factor * self._first_s:
            return True
        self._factor = min(2 * self._factor, LONGEST_PATIENCE)
        return False

    def late(self, process: subprocess.Popen[bytes] | None, log_path: Path) -> LateError:
        """The error of a try that has waited in vain; its log gets the text, too."""
        taken_s = time.monotonic() - self._begun_s
        used = f", used {cpu:.1f} s of CPU" if (cpu := _cpu_s(process)) is not None else ""
        text = (
            f"{self._who} is still starting after {taken_s:.0f} s{used}; a busy host or a slow "
            f"file system may need longer, which PARAMD_SIDECAR_START_TIMEOUT_S (now "
            f"{self._first_s:g}) allows at attach"
        )
        with contextlib.suppress(OSError):
            # Never created here: the helper's log is 0600.
            log_file = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(log_file, f"paramd: {text}\n".encode())
            finally:
                os.close(log_file)
        return LateError(f"{text}; see {log_path}")


def _cpu_s(process: subprocess.Popen[bytes] | None) -> float | None:
    """CPU time of a process, in seconds; None: unknown."""
    if process is None:
        return None
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


class Supervisor:
    """A thread that waits for a process to exit and then calls `restart`.

    `restart` returns the new process's pidfd, or raises and is retried with growing delays; after a
    LateError, whose process it goes on waiting for, at once. It ends soon after `closed`.
    The thread sleeps in the kernel, so it costs the trainer nothing while the process lives.
    """

    def __init__(self, name: str, restart: Callable[[], int]) -> None:
        self._name = name
        self._restart = restart
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"paramd-{name}", daemon=True)
        self._pidfd: int | None = None
        self._closed = False

    def start(self, pidfd: int | None) -> None:
        """Start watching; None when the first start failed and should be retried."""
        self._pidfd = pidfd
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether nobody waits for the process any more."""
        return self._closed

    def readable(self, descriptor: int, timeout_s: float) -> bool:
        """Whether `descriptor` became readable in time, and before `close`."""
        return self._wait(descriptor, timeout_s) and not self._closed

    def close(self) -> None:
        """Stop watching; the process itself is left alone. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._stop)
        if self._pidfd is not None:
            os.close(self._pidfd)

    def _run(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            if self._pidfd is not None:
                lived_long = not self._wait(self._pidfd, STEADY_S)
                if lived_long:
                    self._wait(self._pidfd, None)
                if self._wait(self._stop, 0):
                    return
                os.close(self._pidfd)
                self._pidfd = None
                log.warning("paramd: the %s ended; starting it again", self._name)
                delay_s = FIRST_DELAY_S if lived_long else min(LONGEST_DELAY_S, 2 * delay_s)
            try:
                self._pidfd = self._restart()
            except LateError as error:
                if self._wait(self._stop, 0):
                    return
                log.warning("paramd: %s; training continues without it", error)
            except Exception as error:
                log.warning(
                    "paramd: the %s did not start (%s); training continues without it, next try "
                    "in %.1f s",
                    self._name,
                    error,
                    delay_s,
                )
                if self._wait(self._stop, delay_s):
                    return
                delay_s = min(LONGEST_DELAY_S, 2 * delay_s)

    def _wait(self, descriptor: int, timeout_s: float | None) -> bool:
        """Whether `descriptor` or the stop event became readable in time."""
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTls:
    """The job's own TLS, by which this rank's helpers serve other hosts."""

    name: str
    """Name or address that others connect to."""
    ip: str
    """Address of this host to listen on."""
    pems: Pems = field(repr=False)

    def listen(self, port: str) -> str:
        return f"[{self.ip}]:{port}" if ":" in self.ip else f"{self.ip}:{port}"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identifies this trainer: which rank of which incarnation."""

    job: str
    incarnation: int
    rank: int
    world_size: int
    public_key: bytes
    """Verifies the job's tickets."""
    rank_ticket: str = field(repr=False)
    """Lets this rank's sidecar join the control plane as this rank."""
    copy_ticket: str = field(default="", repr=False)
    """Lets this rank's sidecar send copies to another host; empty: it sends none."""
    private_key: bytes | None = field(default=None, repr=False)
    """Signs the job's tickets; only on rank 0, which starts the control plane."""
    control_token: str = field(default="", repr=False)
    """Token of the control plane's owner; likewise only on rank 0."""
    own_tls: OwnTls | None = None
    """For ranks on several hosts."""
    certified: int = 0
    """The incarnation whose CA the certificates are of; likewise only on rank 0."""


class SidecarLink:
    """One rank's sidecar, whichever process that currently is."""

    def __init__(
        self,
        identity: Identity,
        settings: AttachSettings,
        *,
        socket_path: Path,
        arena_bytes: int,
        device: TrainerDevice | None = None,
        former: SidecarLink | None = None,
    ) -> None:
        """`device`: where the arena is; None: in host memory. `former`: the link of this trainer's
        last incarnation, which ends; its sidecar is kept, at its address."""
        self._device = device
        self._identity = identity
        self._settings = settings
        self._socket_path = socket_path
        self._arena_bytes = arena_bytes
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._host: socket.socket | None = None
        """The connection to `paramd sidecar host` while a sidecar that it starts is awaited."""
        self._mesh: tuple[dict[str, Any], bytes] | None = None
        self._handing = threading.Lock()
        """Held while descriptors go over the connection, or the sidecar is started again."""
        self._asked = 0
        self._supervisor = Supervisor(f"sidecar-{identity.rank}", self._restart)
        self._patience = Patience(
            f"the sidecar of rank {identity.rank}", settings.sidecar_start_timeout_s
        )
        self.descriptors: Descriptors | None = None
        self.continues = (0, 0, -1)
        """Lineage, the lineage it becomes, and the step up to which the sidecar keeps standing
        snapshots; 0 drops them all."""
        own = identity.own_tls
        self._pems = own.pems if own is not None else None
        self.insight: Insight = Insight() if former is None else former.insight
        """Answers the sidecar's questions to this process; each sidecar gets a new line."""
        self.address = ""
        if former is not None:
            former._hand_on(self)

    def open(self) -> None:
        """Reach or start a sidecar and attach to it; ConflictError if its trainer is alive."""
        self._attach(self._reach())

    def own_descriptors(self) -> Descriptors:
        """The shared objects; created here if no sidecar did."""
        if self.descriptors is None:
            device = self._device
            create_arena = partial(create, device.driver, device.device) if device else None
            self.descriptors = Descriptors.create(self._arena_bytes, create_arena=create_arena)
        return self.descriptors

    def add_state(self, size_bytes: int) -> None:
        """Have the sidecar make device memory for more of the optimizer's state.

        The memory is added to `descriptors`, so that a restarted sidecar gets it, too.

        Raises:
            UnreachableError: Without an answer.
            ExhaustedError: If the device has too little memory.
        """
        if not self._handing.acquire(blocking=False):
            raise UnreachableError("the sidecar is being started again")
        try:
            connection, shared = self._connection, self.descriptors
            if connection is None or shared is None:
                raise UnreachableError("no sidecar is connected")
            self._asked += 1
            connection.settimeout(STATE_TIMEOUT_S)
            known = {"known": len(shared.state), "number": self._asked}
            handover.send(connection, {"op": "state", "size_bytes": size_bytes, **known})
            shared.state.append(self._allocated(connection))
        except (OSError, EOFError) as error:
            raise UnreachableError(f"the sidecar does not answer ({error!r})") from None
        finally:
            self._handing.release()

    def _allocated(self, connection: socket.socket) -> Allocation:
        """The answer to the last request; earlier ones came too late."""
        while True:
            answer, received = _answer(connection, "state")
            if answer["number"] == self._asked and len(received) == 1:
                return Allocation(received[0], int(answer["size_bytes"]))
            close_all(received)

    def serve(self, mesh: dict[str, Any], layout: bytes) -> None:
        """Send the sidecar its mesh and layout; from now on one is always kept alive."""
        self._mesh = (mesh, layout)
        try:
            pidfd = self._served()
        except (ParamdError, OSError, EOFError):
            pidfd = None
        self._supervisor.start(pidfd)

    def abandon(self) -> None:
        """Let go of a sidecar whose memory is still wanted by another attempt. Idempotent."""
        self._supervisor.close()
        self._mesh = None
        self._disconnect()
        self._forget_host()
        self._drop_descriptors()

    def _hand_on(self, successor: SidecarLink) -> None:
        """Give the sidecar to the next link; the trainer's memory with it goes."""
        # First, or it could start the sidecar again for the memory that goes.
        self._supervisor.close()
        self._mesh = None
        self._disconnect()
        successor.address = self.address
        successor._process, self._process = self._process, None
        successor._host, self._host = self._host, None
        self._drop_descriptors()

    def close(self) -> None:
        """Detach from the sidecar and let it end. Idempotent."""
        # First, or it would restart the sidecar when it leaves.
        self._supervisor.close()
        self._mesh = None
        if self._connection is not None:
            with contextlib.suppress(OSError):
                handover.send(self._connection, {"op": "detach"})
            if self._process is None:
                # It closes its end when it leaves.
                self._connection.settimeout(5.0)
                with contextlib.suppress(OSError, EOFError, UsageError):
                    handover.receive(self._connection)
        # One that was still starting has nobody to serve.
        grace_s = 5.0 if self._connection is not None else 0.0
        self._disconnect()
        self._forget_host()
        self._reap(grace_s=grace_s)
        self.insight.close()
        self._drop_descriptors()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _forget_host(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None

    def _drop_descriptors(self) -> None:
        if self.descriptors is not None:
            self.descriptors.close()
            self.descriptors = None

    def _restart(self) -> int:
        with self._handing:
            process = self._process
            starting = process is not None and self._connection is None and process.poll() is None
            self._disconnect()
            if not (starting and self._patience.may_stay()):
                self._reap(grace_s=0.0)
            self._attach(self._reach())
            return self._served()

    def _reach(self) -> socket.socket:
        if self._process is not None:
            return self._await_socket(self._process.poll)
        with contextlib.suppress(UnreachableError):
            connection = handover.connect(self._socket_path)
            if self._is_right(connection):
                return connection
            self._send_away(connection)
        own = self._identity.own_tls
        arguments = [
            "--job",
            self._identity.job,
            "--rank",
            str(self._identity.rank),
            "--socket",
            str(self._socket_path),
            "--listen",
            self._listen(),
            "--linger-s",
            str(self._settings.linger_s),
            *(["--job-tls", "--advertise", own.name] if own is not None else []),
            *self._settings.sidecar_options(),
        ]
        stdin = json.dumps(self._pems.to_json()) + "\n" if self._pems is not None else None
        if self._host is None:
            self._patience.begin()
        if self._settings.sidecar == "external":
            return self._of_host(arguments, stdin)
        self._process = spawn(
            "paramd_service.sidecar",
            [*arguments, "--trainer-pid", str(os.getpid())],
            log_path=self._socket_path.with_suffix(".log"),
            stdin=stdin.encode() if stdin is not None else None,
        )
        return self._await_socket(self._process.poll)

    def _of_host(self, arguments: list[str], stdin: str | None) -> socket.socket:
        """Connect to a sidecar that the host starts; one that is late is not asked for again."""
        host = self._host = self._host or self._ask_host(arguments, stdin)
        late = False
        try:
            return self._await_socket(lambda: _ended(host))
        except LateError:
            late = True
            raise
        finally:
            if not late or not self._patience.may_stay():
                host.close()
                self._host = None

    def _ask_host(self, arguments: list[str], stdin: str | None) -> socket.socket:
        """Have `paramd sidecar host` start the sidecar; the returned socket reports its end."""
        path = sidecars_dir() / HOST_SOCKET
        deadline_s = time.monotonic() + self._settings.sidecar_start_timeout_s
        while True:
            try:
                host = handover.connect(path)
                break
            except UnreachableError:
                if time.monotonic() > deadline_s:
                    raise UnreachableError(
                        f"PARAMD_SIDECAR=external, and nobody starts sidecars at {path}; run "
                        "`paramd sidecar host` in the other container, with the same "
                        "PARAMD_STATE_DIR"
                    ) from None
            time.sleep(CONNECT_POLL_S)
        try:
            handover.send(host, {"op": "start", "arguments": arguments, "stdin": stdin})
            _answer(host, "started")
            return host
        except BaseException:
            host.close()
            raise

    def _is_right(self, connection: socket.socket) -> bool:
        """Whether the running sidecar listens where this job's ranks look for it.

        One started for a job on one host does not once the job spans several.
        """
        handover.send(connection, {"op": "where"})
        answer, _ = _answer(connection, "where")
        own, address = self._identity.own_tls, str(answer["address"])
        if own is None:
            return not is_of_job(address)
        return is_of_job(address) and host_of(address) == own.name

    def _send_away(self, connection: socket.socket) -> None:
        """Ask a sidecar to leave, and wait for that; ConflictError if its trainer is alive."""
        with connection:
            handover.send(connection, {"op": "leave"})
            _answer(connection, "leaving")
        deadline_s = time.monotonic() + self._settings.sidecar_start_timeout_s
        with contextlib.suppress(UnreachableError):
            while time.monotonic() < deadline_s:
                handover.connect(self._socket_path).close()
                time.sleep(CONNECT_POLL_S)

    def _listen(self) -> str:
        """The address to listen on: a restarted sidecar reuses its port."""
        own, wanted = self._identity.own_tls, bindable(self._settings.sidecar_listen)
        if own is not None:
            wanted = own.listen("0")
        if not self.address:
            return wanted
        return f"{wanted.rpartition(':')[0]}:{self.address.rpartition(':')[2]}"

    def _await_socket(self, ended: Callable[[], int | None]) -> socket.socket:
        """Connect as soon as the sidecar listens; `ended` returns its exit code once it has one."""
        log_path = self._socket_path.with_suffix(".log")
        deadline_s = time.monotonic() + self._patience.wait_s
        while True:
            with contextlib.suppress(UnreachableError):
                return handover.connect(self._socket_path)
            code = ended()
            if code is not None:
                raise UnreachableError(
                    f"the sidecar of rank {self._identity.rank} ended with code {code}; "
                    f"see {log_path}"
                )
            if time.monotonic() > deadline_s or self._supervisor.closed:
                raise self._patience.late(self._process, log_path)
            time.sleep(CONNECT_POLL_S)

    def _attach(self, connection: socket.socket) -> None:
        identity = self._identity
        message = {
            "op": "attach",
            "job": identity.job,
            "incarnation": identity.incarnation,
            "rank": identity.rank,
            "world_size": identity.world_size,
            "rank_ticket": identity.rank_ticket,
            "copy_ticket": identity.copy_ticket,
            "pid": os.getpid(),
            "start": places.process_start(os.getpid()),
            "arena_bytes": self._arena_bytes,
            "public_key": identity.public_key.hex(),
            "version": __version__,
            "continues": list(self.continues),
        }
        shared = self.descriptors
        if self._device is not None:
            message["device"] = self._device.request.to_message()
            state = shared.state if shared is not None else ()
            message["allocations"] = [allocation.size_bytes for allocation in state]
        if self._pems is not None:
            message["tls"] = self._pems.to_json()
        # A sidecar in another container takes an attach only from a process it has a pidfd of.
        os.close(_pidfd_of_peer(connection))
        ours = shared.as_list() if shared is not None else []
        # A sidecar given the memory answers at once; creating an arena takes longer.
        connection.settimeout(self._settings.sidecar_start_timeout_s + self._arena_bytes / 1e9)
        handover.send(connection, message, ours)
        answer, received = _answer(connection, "attached")
        if self.descriptors is not None:
            # Duplicates of the received descriptors; the originals stay in use.
            close_all(received)
        else:
            on_device = self._device is not None
            try:
                shared = Descriptors.received(received, self._arena_bytes, on_device=on_device)
            except UsageError as error:
                close_all(received)
                raise ConflictError(
                    f"the sidecar handed over unusable descriptors: {error}"
                ) from error
            self.descriptors = shared
        self._connection = connection
        self.address = str(answer["address"])

    def _served(self) -> int:
        """Send mesh and layout, and open the line; return a pidfd of the sidecar."""
        assert self._mesh is not None
        if self._connection is None:
            raise UnreachableError("no sidecar is connected")
        message, layout = self._mesh
        memory = descriptors.create_memory("paramd-layout", len(layout))
        try:
            os.pwrite(memory, layout, 0)
            handover.send(self._connection, message, [memory])
        finally:
            os.close(memory)
        _answer(self._connection, "serving")
        message, handed = self.insight.open_line()
        try:
            handover.send(self._connection, message, handed)
        finally:
            close_all(handed)
        _answer(self._connection, "insight")
        return _pidfd_of_peer(self._connection)

    def _reap(self, *, grace_s: float) -> None:
        if self._process is not None:
            end(self._process, grace_s=grace_s)
            self._process = None


def _pidfd_of_peer(connection: socket.socket) -> int:
    """A pidfd of the sidecar; one in another container and this process exchange theirs."""
    pid = handover.check_peer(connection)
    if pid:
        return descriptors.pidfd(pid)
    own = descriptors.pidfd(os.getpid())
    try:
        handover.send(connection, {"op": "introduce"}, [own])
        _, received = _answer(connection, "introduced")
    finally:
        os.close(own)
    if len(received) == 1 and descriptors.is_pidfd_of_elsewhere(received[0]):
        return received[0]
    close_all(received)
    raise ConflictError("the sidecar introduced itself without a pidfd")


def _ended(host: socket.socket) -> int | None:
    """The exit code that a sidecar's host has reported; -1 if the host itself is gone."""
    poller = select.poll()
    poller.register(host, select.POLLIN)
    if not poller.poll(0):
        return None
    try:
        return int(_answer(host, "ended")[0]["code"])
    except (EOFError, OSError):
        return -1


def _answer(connection: socket.socket, expected: str) -> tuple[handover.Message, list[int]]:
    message, received = handover.receive(connection)
    if message["op"] == expected:
        return message, received
    close_all(received)
    if message["op"] == "error":
        raise error_of_grpc(str(message.get("code")))(str(message.get("message")))
    raise ConflictError(f"the sidecar answered {message['op']!r} instead of {expected!r}")
