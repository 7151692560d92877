"""Processes of ours that start warm: forked from one that has imported what they need.

Importing takes 3 CPU seconds in a rank, 1.4 in a control plane, 0.4 in a sidecar: more than most
tests take otherwise. Two processes for each pytest worker, one with torch for ranks and one
without for services, import it all once and fork (`warm_server.py`). Every fork is a process of
its own, with the descriptors, session, environment, command line and limits it was to have. It is
forked twice, so that the test's process, which adopts orphans (`leaks.adopt_orphans`), becomes its
parent: it waits for it, kills and stops it as any child.

    warm = WarmStart("ranks")
    process = warm.start(["tests.multiprocess.workers.stamp", "--kind", "ddp"], env, out, err)
    process.wait()

`start_children_with` lets `subprocess.Popen` do so for the modules in `WARM`, in the test's
process and in what it started; nothing that starts a process has to know. So does what a `Host`
(`hosts.py`) runs: the fork enters its namespaces. What is started in any other way starts cold: a
script, `-c` elsewhere than on such a host, another interpreter, or when PARAMD_TESTS_COLD is set.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POLL_S = 0.01
ROOT = Path(__file__).resolve().parent.parent

WARM = {
    "paramd_service.control": "service",
    "paramd_service.control.ended": "service",
    "paramd_service.sidecar": "service",
    "tests.integration.fake_trainer": "service",
    "paramd.cli": "ranks",
    "paramd.examples.train_gpt": "ranks",
    "tests.integration.calm_gpt": "ranks",
    "tests.integration.far_trainer": "ranks",
    "tests.integration.site_trainer": "ranks",
    "tests.multiprocess.workers.resuming": "ranks",
    "tests.program": "ranks",
    "torch.distributed.run": "ranks",
}
"""Modules that start warm by `python -m`, from the process that has imported this."""

ENTER = ("-n", "-u", "-m", "-p", "--")
"""What `nsenter -t PID` is told to run a program on a host of `hosts.py`."""

FIXED = (
    "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONDEVMODE", "PYTHONHASHSEED", "PYTHONHOME",
    "PYTHONMALLOC", "PYTHONOPTIMIZE", "PYTHONPATH", "PYTHONUTF8", "PYTHONWARNINGS",
)  # fmt: skip
"""What an interpreter looks at once, when it starts; who wants another value starts cold."""

PLAIN = {
    "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False,
    "gid": None, "gids": None, "uid": None, "umask": -1, "process_group": -1,
    "restore_signals": True,
}  # fmt: skip
"""Popen's options of a start that a fork can stand for."""

_ROOM_BYTES = 1 << 13


class Forker:
    """A connection to a process that forks; what it forks is this process's child."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Not in a fork of the process that it was made for."""
        return self._owner == os.getpid()

    @property
    def is_ready(self) -> bool:
        """Whether it would answer at once."""
        return True

    def fork(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        descriptors: Sequence[int],
        *,
        cwd: str = "",
        new_session: bool = True,
        starts_others: bool = False,
        host: int = 0,
    ) -> int:
        """Runs a module as `python -m` does; returns the process id.

        Args:
            arguments: the module's name, or "-c" and the code, and its own arguments.
            descriptors: its stdin, stdout and stderr.
            starts_others: it, too, can start its children warm.
            host: a process whose namespaces it is to be in, if not in ours.
        """
        limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS,
                  resource.RLIMIT_CORE)  # fmt: skip
        told = {
            "arguments": list(arguments),
            "env": dict(env),
            "cwd": cwd or os.getcwd(),
            "umask": _umask(),
            "limits": [resource.getrlimit(limit) for limit in limits],
            "new_session": new_session,
            "starts_others": starts_others,
            "host": host,
        }
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(told).encode()], descriptors)
            return int(self._connection.recv(32))

    def close(self) -> None:
        """Ends the process that forks; what it forked goes on."""
        self._connection.close()


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


class WarmStart(Forker):
    """A process that forks for a pytest worker, seen from the test's side.

    Args:
        purpose: what it imports: "service" or "ranks".
    """

    def __init__(self, purpose: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_server", str(theirs.fileno()),
                 purpose, "-" * _ROOM_BYTES],
                cwd=ROOT,
                # torch looks at OMP_NUM_THREADS while it is imported.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
                     "PYTHONFAULTHANDLER": "1", "PARAMD_TEST_ROOM": "-" * 8 * _ROOM_BYTES},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether it has imported all; until then a cold start is sooner done."""
        if not self._is_ready and select.select([self._connection], [], [], 0)[0]:
            self._await_ready()
        return self._is_ready

    def start(
        self, arguments: Sequence[str], env: Mapping[str, str], stdout: Path, stderr: Path
    ) -> WarmProcess:
        """Starts a rank, whose own children start warm too."""
        self._await_ready()
        with open(os.devnull, "rb") as stdin, stdout.open("wb") as out, stderr.open("wb") as err:
            descriptors = [stdin.fileno(), out.fileno(), err.fileno()]
            return WarmProcess(
                self.fork(arguments, env, descriptors, cwd=str(ROOT), starts_others=True)
            )

    def close(self) -> None:
        super().close()
        self._process.wait()

    def _await_ready(self) -> None:
        with self._lock:
            if not self._is_ready:
                # No assertion: `make security` runs the tests under -O, and this must be read.
                if not self._connection.recv(32):
                    raise RuntimeError("the warm process ended before it was ready")
                self._is_ready = True


_cold_start: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_cold_start)


def start_children_with(service: Forker, ranks: Forker) -> None:
    """From now on `subprocess.Popen` lets these start what is in `WARM`."""
    forkers = {"service": service, "ranks": ranks}

    def start(self: Any, *values: Any) -> None:
        asked = _parameters.bind(self, *values).arguments
        environment = asked["env"] if asked["env"] is not None else dict(os.environ)
        arguments, host = _of_python(asked["args"])
        purpose = _purpose(arguments, host) if _is_plain(asked, environment) else None
        forker = forkers[purpose] if purpose is not None else None
        if forker is None or not (forker.is_ours and forker.is_ready):
            _cold_start(self, *values)
            return
        if "-P" in asked["args"][1:3]:
            environment = {**environment, "PYTHONSAFEPATH": "1"}
        asked_for = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        self.pid = forker.fork(
            arguments,
            environment,
            [number if given == -1 else given for number, given in enumerate(asked_for)],
            cwd=str(asked["cwd"] or ""),
            new_session=asked["start_new_session"],
            starts_others=purpose == "ranks",
            host=host,
        )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]


def _of_python(command: Any) -> tuple[list[str], int]:
    """What our interpreter is to run, as `Forker.fork` takes it, and on which host, if any."""
    if isinstance(command, str | bytes | os.PathLike):
        return [], 0
    words, host = [os.fsdecode(word) for word in command], 0
    if tuple(words[3:8]) == ENTER:
        host, words = int(words[2]), words[8:]
    if words[0] != sys.executable:
        return [], host
    # As unbuffered as all that start warm.
    options = [word for word in words[1:3] if word in ("-u", "-P")]
    rest = words[1 + len(options) :]
    return (rest[1:] if rest[:1] == ["-m"] else rest), host


def _purpose(arguments: Sequence[str], host: int) -> str | None:
    """Which of the warm processes is to run this, if any."""
    if host and arguments[:1] == ["-c"]:
        return "ranks"
    return WARM.get(arguments[0]) if arguments else None


def _is_plain(asked: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    return (
        environment.get("PARAMD_TESTS_COLD") != "1"
        and asked["executable"] in (None, sys.executable)
        and all(asked.get(name, value) == value for name, value in PLAIN.items())
        and all(_fixed(environment, name) == _fixed(os.environ, name) for name in FIXED)
    )


def _fixed(environment: Mapping[str, str], name: str) -> list[str]:
    """The value of a variable; of a path its folders, but the root, where we start anyway."""
    return [
        part for part in environment.get(name, "").split(os.pathsep) if part not in ("", str(ROOT))
    ]


def _umask() -> int:
    """Ours; asking the usual way would change it for a moment."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("/proc names no umask")
