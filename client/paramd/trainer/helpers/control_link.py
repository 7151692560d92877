"""The embedded control plane: a separate process next to rank 0's trainer."""

from __future__ import annotations

import json
import select
import subprocess
from pathlib import Path
from typing import IO

from paramd.errors import UnreachableError
from paramd.memory import descriptors
from paramd.trainer.helpers.sidecar_link import Identity
from paramd.trainer.helpers.supervisor import Supervisor, end, spawn
from paramd.trainer.settings import AttachSettings


class ControlLink:
    """Starts the control plane and keeps it alive on the same addresses."""

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

    def open(self) -> None:
        """Start it, and keep it up from now on even if this first start fails.

        Raises:
            UnreachableError: it did not come up; its log has the reason.
        """
        try:
            pidfd = self._start()
        except BaseException:
            self._supervisor.start(None)
            raise
        self._supervisor.start(pidfd)

    def let_go(self) -> None:
        """Stop supervising: it ends by itself when all sidecars have left. Idempotent."""
        self._supervisor.close()

    def close(self) -> None:
        """Wait for it to end, then force it. Idempotent."""
        self.let_go()
        if self._process is not None:
            end(self._process, grace_s=3.0)
            self._process = None

    def _start(self) -> int:
        if self._process is not None:
            self._process.wait()
        identity = self._identity
        assert identity.private_key is not None, "rank 0 has it"
        listen = self._listen if self._listen else self._settings.listen
        arguments = ["--job", identity.job, "--listen", listen]
        if self.grpc_address:
            arguments += ["--grpc-listen", self._grpc_listen]
        secrets = {
            "job": identity.job,
            "epoch": identity.epoch,
            "world_size": identity.world_size,
            "private_key": identity.private_key.hex(),
            "token": self._token,
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
        return descriptors.pidfd(self._process.pid)


def _first_line(output: IO[bytes], timeout_s: float) -> dict[str, str] | None:
    poller = select.poll()
    poller.register(output, select.POLLIN)
    if not poller.poll(timeout_s * 1000):
        return None
    line = output.readline()
    return json.loads(line) if line else None
