"""Rank 0's control plane: started, told its secrets, kept alive."""

from __future__ import annotations

import json
import select
import subprocess
from pathlib import Path
from typing import IO, Any

from paramd.errors import UnreachableError
from paramd.helpers import end, spawn
from paramd.memory import descriptors
from paramd.security.tls import is_loopback
from paramd.trainer.helpers.sidecar_link import Identity
from paramd.trainer.helpers.supervisor import Supervisor
from paramd.trainer.settings import AttachSettings


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
        self.grpc_address = ""
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
        if self.grpc_address:
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
        self.url, self.grpc_address = ready["url"], ready["grpc_address"]
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
