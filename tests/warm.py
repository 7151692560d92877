"""Processes of ours that start warm: forked from one that has imported what they need.

Importing takes 3 CPU seconds in a rank, 1.4 in a control plane, 0.4 in a sidecar: more than most
tests take otherwise. One process with torch for ranks, and one without for the services of each
pytest worker, import it all once and fork (`warm_server.py`). So do the workers themselves start,
each with what forks its own ranks; without xdist, pytest starts both. Every fork is a process of
its own, with the descriptors, session, environment, command line and limits it was to have. It is
forked twice, so that the test's process, which adopts orphans (`leaks.adopt_orphans`), becomes its
parent: it waits for it, kills and stops it as any child.

    warm = WarmStart("ranks")
    rank = WarmProcess(warm, ["tests.multiprocess.workers.stamp", "--kind", "ddp"], env=env)
    rank.wait()

`start_children_with` lets `subprocess.Popen` do so for the modules in `WARM`, in the test's
process and in what it started; nothing that starts a process has to know. So does what a `Host`
(`hosts.py`) runs: the fork enters its namespaces. What is started in any other way starts cold: a
script, other code by `-c`, another interpreter, or when PARAMD_TESTS_COLD is set.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    "tests.integration.pruning_trainer": "ranks",
    "tests.integration.resting_trainer": "ranks",
    "tests.integration.site_trainer": "ranks",
    "tests.multiprocess.workers.resuming": "ranks",
    "tests.program": "ranks",
    "tests.sequences": "ranks",
    "tests.sequences.pairs": "ranks",
    "torch.distributed.run": "ranks",
}
"""Modules that start warm by `python -m`, from the process that has imported this."""

WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""What xdist has a worker of pytest's run, by `python -c`."""

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

    def await_ready(self) -> None:
        """Returns once `is_ready`."""

    def close(self) -> None:
        """Ends the process that forks; what it forked goes on."""
        self._connection.close()


inherited: Forker | None = None
"""What came with this process, if that was forked to start others."""


class WarmStart(Forker):
    """A process that forks for pytest or one of its workers, seen from their side.

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
            )  # fmt: skip
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether it has imported all; until then a cold start is sooner done."""
        if not self._is_ready and select.select([self._connection], [], [], 0)[0]:
            self.await_ready()
        return self._is_ready

    def close(self) -> None:
        super().close()
        self._process.wait()

    def await_ready(self) -> None:
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
        _fork(self, forker, arguments, {**asked, "env": environment}, purpose == "ranks", host)

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]


class WarmProcess(subprocess.Popen[bytes]):
    """A rank: any module, in a session of its own; its children start warm too.

    Args:
        forker: it starts once this is ready.
        options: Popen's.
    """

    def __init__(self, forker: Forker, arguments: Sequence[str], **options: Any) -> None:
        forker.await_ready()
        self._forker = forker
        super().__init__(
            arguments, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )

    def _execute_child(self, *values: Any) -> None:
        asked = _parameters.bind(self, *values).arguments
        _fork(self, self._forker, asked["args"], asked, starts_others=True)


def _fork(
    started: Any, forker: Forker, arguments: Sequence[str], asked: Mapping[str, Any],
    starts_others: bool, host: int = 0,
) -> None:  # fmt: skip
    """What Popen's own start does; `asked` is what that is called with."""
    asked_for = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
    started.pid = forker.fork(
        arguments,
        asked["env"],
        [number if given == -1 else given for number, given in enumerate(asked_for)],
        cwd=str(asked["cwd"] or ""),
        new_session=asked["start_new_session"],
        starts_others=starts_others,
        host=host,
    )
    started._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    started._close_pipe_fds(*(asked[name] for name in pipes))


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
    if arguments[:1] == ["-c"] and (host or arguments[1:] == [WORKER]):
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
