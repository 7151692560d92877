"""Ranks that obey: real torch.distributed processes that run one command at a time.

Each line on a rank's stdin is a JSON list `[command, arguments...]`; the answer is one
JSON line on its stdout. So trainer-side peers and paramd's clients are measured in turns
within one run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

# Blocks go back to the heap, not to the kernel: the "warm heap" of the peers.
_WARM_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 31), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}


class ObedientRanks(AbstractContextManager["ObedientRanks"]):
    """`world_size` processes running `python -m module`; ended at exit by closing stdin."""

    def __init__(self, module: str, world_size: int, *, threads: int = 1) -> None:
        self.state_dir = Path(tempfile.mkdtemp(prefix="paramd-bench-"))
        self.state_dir.chmod(0o700)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | _WARM_HEAP | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": str(threads),
            "PARAMD_STATE_DIR": str(self.state_dir),
            "PARAMD_LISTEN": "127.0.0.1:0",
        }  # fmt: skip
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                text=True,
            )
            for rank in range(world_size)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, *command: Any) -> list[Any]:
        """Runs one command on all ranks and returns their answers, by rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with code {process.wait()}")
        return json.loads(line)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def obey(commands: Mapping[str, Callable[..., Any]]) -> None:
    """A rank's main loop; ends with stdin."""
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(commands[name](*arguments)), flush=True)
