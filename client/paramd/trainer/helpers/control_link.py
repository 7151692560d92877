"""What rank 0 starts: the control plane, told its secrets and kept alive, and trackers.

A tracker is a process of `paramd log` beside the training, one for each that was asked for.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from paramd.errors import ParamdError, UnreachableError
from paramd.helpers import end, spawn
from paramd.memory import descriptors
from paramd.security.tls import is_loopback
from paramd.trainer.helpers.sidecar_link import Identity
from paramd.trainer.helpers.site_link import token_of
from paramd.trainer.helpers.supervisor import Supervisor
from paramd.trainer.settings import AttachSettings

log = logging.getLogger("paramd")

GRACE_S = 10.0
"""How long a tracker may take to write what it has."""


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
        self._listen = ""
        self._grpc_listen = ""
        self.url = ""
        self.control_address = ""
        """gRPC target of it, which sidecars join."""
        self.exports: list[dict[str, Any]] = []
        """The last whole exports of this job, newest first (resume/exported.py)."""

    def open(self, *, resumes: bool) -> None:
        """Start it, and keep it up from now on even if this first start fails.

        Args:
            resumes: training goes on from memory, and waits only until the addresses are known;
                those who connect wait for the rest, and exports are not told.

        Raises:
            UnreachableError: it did not come up; its log has the reason.
        """
        try:
            pidfd = self._start(resumes=resumes)
        except BaseException:
            self._supervisor.start(None)
            raise
        self._supervisor.start(pidfd)

    def release(self) -> None:
        """Stop supervising: it ends by itself when all sidecars have left. Idempotent."""
        self._supervisor.close()

    def close(self) -> None:
        """Wait for it to end, then force it. Idempotent."""
        self.release()
        if self._process is not None:
            end(self._process, grace_s=3.0)
            self._process = None

    def _start(self, *, resumes: bool = False) -> int:
        if self._process is not None:
            self._process.wait()
        identity = self._identity
        assert identity.private_key is not None, "rank 0 has it"
        own = identity.own_tls
        arguments = ["--job", identity.job, "--listen", self._wanted_listen()]
        if own is not None:
            arguments += ["--advertise", own.name]
        if self.control_address:
            arguments += ["--grpc-listen", self._grpc_listen]
        secrets = {
            "job": identity.job,
            "incarnation": identity.incarnation,
            "world_size": identity.world_size,
            "private_key": identity.private_key.hex(),
            "token": self._token,
            "own_tls": own is not None,
            "resumes": resumes,
        }
        log_path = self._directory / "control.log"
        self._process, output = spawn(
            "paramd_service.control",
            arguments,
            log_path=log_path,
            stdin=json.dumps(secrets).encode() + b"\n",
        )
        with output:
            ready = _first_line(output, self._settings.sidecar_start_timeout_s)
        if ready is None:
            end(self._process, grace_s=0.0)
            raise UnreachableError(f"the control plane did not start; see {log_path}")
        self.url, self.control_address = ready["url"], ready["grpc_address"]
        self._listen, self._grpc_listen = ready["listen"], ready["grpc_listen"]
        self.exports = ready["exports"]
        return descriptors.pidfd(self._process.pid)

    def _wanted_listen(self) -> str:
        """Where it was before, else as told; for other hosts not on loopback."""
        if self._listen:
            return self._listen
        own, (host, _, port) = self._identity.own_tls, self._settings.listen.rpartition(":")
        return own.listen(port) if own is not None and is_loopback(host) else self._settings.listen


def _first_line(output: IO[bytes], timeout_s: float) -> dict[str, Any] | None:
    poller = select.poll()
    poller.register(output, select.POLLIN)
    if not poller.poll(timeout_s * 1000):
        return None
    line = output.readline()
    return json.loads(line) if line else None


class Tracking:
    """`paramd log` of this job, into each tracker that was asked for.

    What it computes, the sidecars compute; this process only starts and ends it. It ends by
    itself when the job no longer answers, or begins anew.
    """

    def __init__(self, job: str, settings: AttachSettings, directory: Path) -> None:
        self._job = job
        self._settings = settings
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def open(self) -> None:
        """Start the processes; one that cannot be started costs its tracker, not the training."""
        for kind in self._settings.trackers:
            try:
                self._processes[kind] = self._start(kind)
            except (OSError, ParamdError) as error:
                log.warning("paramd: nothing is logged to %s: %s", kind, error)

    def _start(self, kind: str) -> subprocess.Popen[bytes]:
        arguments = ["log", "--to", kind, "--job", self._job]
        # A person's own settings may name another control plane.
        environment = {key: value for key, value in os.environ.items() if key not in _OTHERS}
        token = None
        if self._settings.control:
            arguments += ["--url", self._settings.control, "--token", "-"]
            token = token_of(self._settings).encode() + b"\n"
        path = self._directory / f"log-{kind}.log"
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "paramd.cli", *arguments],
                stdin=subprocess.PIPE if token is not None else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                # Ctrl-C in the training's terminal is the training's.
                start_new_session=True,
            )
        finally:
            os.close(output)
        if process.stdin is not None and token is not None:
            with process.stdin:
                process.stdin.write(token)
        return process

    def close(self) -> None:
        """Have what was logged written, and end the processes. Idempotent."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for kind, process in self._processes.items():
            end(process, grace_s=GRACE_S)
            # One that was still starting has nothing to write.
            if process.returncode not in (0, -signal.SIGTERM):
                log.warning(
                    "paramd: what logged to %s ended with status %s; see %s",
                    kind, process.returncode, self._directory / f"log-{kind}.log",
                )  # fmt: skip
        self._processes = {}


_OTHERS = ("PARAMD_URL", "PARAMD_TOKEN", "PARAMD_TOKEN_FILE", "PARAMD_CONTEXT", "PARAMD_JOB")
