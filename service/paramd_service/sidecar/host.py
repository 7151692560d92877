"""`python -m paramd_service.sidecar.host`: starts sidecars for trainings in other containers.

A trainer with PARAMD_SIDECAR=external sends its request over a Unix socket in the state dir: the
options with which it would start the sidecar itself, and its certificate for standard input. It is
notified when the sidecar ends. Sidecars outlive the trainer's connection, for a restarted trainer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from socket import socket
from typing import Any

from paramd.errors import DeniedError, ParamdError, UsageError, codes_of
from paramd.helpers import be_first_victim, spawn
from paramd.memory import handover
from paramd.memory.descriptors import pidfd
from paramd.places import job_dir
from paramd.state_files import HOST_SOCKET, sidecars_dir
from paramd.state_files import socket_path as socket_path_of
from paramd_service import core_dumps
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.main import MAX_PEMS_BYTES, parse

MAX_SIDECARS = 64
"""Most sidecars: one host has no room for more ranks."""


def main() -> int:
    """Start sidecars until a signal; return the exit code."""
    be_first_victim()
    core_dumps.forbid()
    try:
        asyncio.run(_run())
    except ParamdError as error:
        print(f"paramd sidecar host: {error}", file=sys.stderr)
        return codes_of(error).exit
    return 0


async def _run() -> None:
    host = Host(sidecars_dir() / HOST_SOCKET)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.leave)
    await host.serve()


class Host:
    """Listens, starts sidecars, and ends with them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sidecars: dict[int, subprocess.Popen[bytes]] = {}
        self._trainers: dict[socket, None] = {}
        self._leaving = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._log = Log(fields={"pid": os.getpid()})

    async def serve(self) -> None:
        """Serve until `leave`, then drain.

        Raises:
            UsageError: If another host listens there.
        """
        loop = asyncio.get_running_loop()
        listener = handover.listen(self._path)
        loop.add_reader(listener.fileno(), self._accept, listener)
        self._log("hosting", socket_path=str(self._path))
        await self._leaving.wait()
        loop.remove_reader(listener.fileno())
        self._path.unlink(missing_ok=True)
        listener.close()
        for process in self._sidecars.values():
            process.terminate()
        if self._sidecars:
            await self._all_ended.wait()
        for trainer in list(self._trainers):
            self._forget(trainer)
        self._log("closed")

    def leave(self) -> None:
        """Drain; the second time, kill the sidecars."""
        if self._leaving.is_set():
            for process in self._sidecars.values():
                process.kill()
        self._leaving.set()

    def _accept(self, listener: socket) -> None:
        try:
            trainer, _ = listener.accept()
        except OSError:
            return
        trainer.setblocking(False)
        try:
            handover.check_peer(trainer)
        except DeniedError as error:
            self._log("connection-refused", reason=str(error))
            trainer.close()
            return
        self._trainers[trainer] = None
        asyncio.get_running_loop().add_reader(trainer.fileno(), self._asked, trainer)

    def _asked(self, trainer: socket) -> None:
        try:
            message, descriptors = handover.receive(trainer)
            for descriptor in descriptors:
                os.close(descriptor)
            self._start(message, trainer)
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            self._forget(trainer)
        except ParamdError as error:
            self._tell(
                trainer, {"op": "error", "code": codes_of(error).grpc, "message": str(error)}
            )

    def _start(self, message: dict[str, Any], trainer: socket) -> None:
        config, arguments, stdin = asked_for(message)
        if len(self._sidecars) >= MAX_SIDECARS or self._leaving.is_set():
            raise UsageError(f"start: {MAX_SIDECARS} sidecars run here, or this host is leaving")
        process = spawn(
            "paramd_service.sidecar",
            arguments,
            log_path=config.socket_path.with_suffix(".log"),
            stdin=stdin.encode() if stdin is not None else None,
        )
        self._sidecars[process.pid] = process
        ended = pidfd(process.pid)
        asyncio.get_running_loop().add_reader(ended, self._ended, ended, process, trainer)
        self._log("started", job=config.job, rank=config.rank, sidecar_pid=process.pid)
        self._tell(trainer, {"op": "started", "pid": process.pid})

    def _ended(self, ended: int, process: subprocess.Popen[bytes], trainer: socket) -> None:
        asyncio.get_running_loop().remove_reader(ended)
        os.close(ended)
        code = process.wait()
        del self._sidecars[process.pid]
        self._log("ended", sidecar_pid=process.pid, code=code)
        if trainer in self._trainers:
            self._tell(trainer, {"op": "ended", "code": code})
        if not self._sidecars and self._leaving.is_set():
            self._all_ended.set()

    def _tell(self, trainer: socket, message: dict[str, Any]) -> None:
        try:
            handover.send(trainer, message)
        except OSError:
            self._forget(trainer)

    def _forget(self, trainer: socket) -> None:
        asyncio.get_running_loop().remove_reader(trainer.fileno())
        self._trainers.pop(trainer, None)
        trainer.close()


def asked_for(message: dict[str, Any]) -> tuple[SidecarConfig, list[str], str | None]:
    """The sidecar that a trainer requests.

    Raises:
        UsageError: If it is none of this state dir.
    """
    arguments, stdin = message.get("arguments"), message.get("stdin")
    if message["op"] != "start" or not isinstance(arguments, list) or not arguments:
        raise UsageError("expected start, with the arguments of a sidecar")
    if not all(isinstance(one, str) for one in arguments):
        raise UsageError("start: arguments must be text")
    if stdin is not None and not (isinstance(stdin, str) and len(stdin) <= MAX_PEMS_BYTES):
        raise UsageError(f"start: stdin must be text of at most {MAX_PEMS_BYTES:,} characters")
    try:
        config = parse(arguments)
    except SystemExit:
        raise UsageError("start: the arguments are not those of a sidecar") from None
    job_dir(config.job)
    wanted = socket_path_of(config.job, config.rank)
    if config.socket_path != wanted:
        raise UsageError(
            f"start: the socket is {config.socket_path}, and here it would be {wanted}; mount the "
            "state dir at the same path in both containers, and set PARAMD_STATE_DIR to it"
        )
    return config, arguments, stdin


if __name__ == "__main__":
    sys.exit(main())
