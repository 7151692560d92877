"""Ranks that start warm: forked from a process that has imported torch already.

Importing torch takes 2 to 3 CPU seconds, for each rank of each launch: more than most tests
take. One process per pytest worker imports it once and forks the ranks; nothing else has
happened in it, it has one thread, and every rank is a process of its own in a session of its
own. A rank is forked twice, so that the test's process, which adopts orphans
(`leaks.adopt_orphans`), becomes its parent: it waits for it, kills and stops it as any child.

    warm = WarmStart()
    process = warm.start(["tests.multiprocess.workers.stamp", "--kind", "ddp"], env, out, err)
    process.wait()
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POLL_S = 0.01
ROOT = Path(__file__).resolve().parent.parent


class WarmProcess:
    """A forked rank, with what subprocess.Popen has for a started one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its status once it has ended; negative for a signal."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (found := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return found

    def send_signal(self, number: int) -> None:
        """Signals it unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmStart:
    """The process that forks ranks, seen from the test's side."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                cwd=ROOT,
                # torch looks at these while it is imported.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
                     "PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        self._file = ours.makefile("rw")
        ours.close()

    def start(
        self, arguments: Sequence[str], env: Mapping[str, str], stdout: Path, stderr: Path
    ) -> WarmProcess:
        """Runs a module as `python -m` does: `arguments` are its name and its own arguments."""
        request = {
            "arguments": list(arguments),
            "env": dict(env),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()
        return WarmProcess(int(self._file.readline()))

    def close(self) -> None:
        """Ends the process; ranks that it forked go on."""
        self._file.close()
        self._process.wait()


def main() -> None:
    """Serves until the test's side closes; a forked rank leaves the loop to run its module."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    tasks = len(os.listdir("/proc/self/task"))
    assert tasks == 1, f"{tasks} threads: what they hold would be held for ever in a fork"
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        _become(request)
        runpy.run_module(request["arguments"][0], run_name="__main__", alter_sys=True)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    with connection, connection.makefile("rw") as file:
        for line in iter(file.readline, ""):
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                rank = os.fork()
                if rank == 0:
                    os.close(read_end)
                    os.close(write_end)
                    return dict(json.loads(line))
                os.write(write_end, str(rank).encode())
                os._exit(0)
            os.close(write_end)
            os.waitpid(child, 0)
            file.write(os.read(read_end, 32).decode() + "\n")
            file.flush()
            os.close(read_end)
    return None


def _become(request: Mapping[str, Any]) -> None:
    os.setsid()
    for name, number in (("stdout", 1), ("stderr", 2)):
        opened = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = list(request["arguments"])


if __name__ == "__main__":
    main()
