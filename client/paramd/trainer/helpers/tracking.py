"""Trackers written beside the training: `paramd log`, one process for each, started by rank 0."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from paramd.errors import ParamdError
from paramd.helpers import end
from paramd.trainer.helpers.site_link import token_of
from paramd.trainer.settings import AttachSettings

log = logging.getLogger("paramd")

GRACE_S = 10.0
"""How long a tracker may take to write what it has."""


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
