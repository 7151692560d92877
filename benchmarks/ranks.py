"""Processes that obey: they run one command at a time, so that contenders take turns.

Each line on a process's stdin is a JSON list `[command, arguments...]`; the answer is one
JSON line on its stdout. Several of them make a real torch.distributed job; a single one is
a client, or a sender of bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

WARM_HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 31),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_ARENA_MAX": "1",
}
"""One heap from which glibc gives no block back: what was used a few times stays warm."""

WORLD_SIZE = 2
"""Training ranks that the trainer-side benchmarks share."""

_LEAVE_S = 60.0


class ObedientRanks(AbstractContextManager["ObedientRanks"]):
    """`world_size` processes running `python -m module`; ended at exit by closing stdin.

    Args:
        module: its `main` must end in `obey`.
        threads: threads of torch in each process.
        state_dir: paramd's state dir; None makes a private one and removes it at exit.
        environment: more variables, such as `WARM_HEAP`.
    """

    def __init__(
        self,
        module: str,
        world_size: int = 1,
        *,
        threads: int = 1,
        state_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._owns_state_dir = state_dir is None
        self.state_dir = (
            state_dir if state_dir is not None else Path(tempfile.mkdtemp(prefix="paramd-bench-"))
        )
        shared = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": str(threads),
            "PARAMD_STATE_DIR": str(self.state_dir),
            "PARAMD_LISTEN": "127.0.0.1:0",
            # Nothing must outlive a benchmark that fails.
            "PARAMD_LINGER_S": "5",
        } | (dict(environment) if environment is not None else {})  # fmt: skip
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                text=True,
            )
            for rank in range(world_size)
        ]

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def call(self, *command: Any) -> list[Any]:
        """Runs one command on all ranks and returns their answers, by rank."""
        self.tell(*command)
        return self.update()

    def tell(self, *command: Any) -> None:
        """Begins one command on all ranks; `hear` has to follow."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()

    def update(self) -> list[Any]:
        """Waits for the answers to what was told, by rank.

        Raises:
            RuntimeError: a rank ended instead.
        """
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with code {process.wait()}")
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
                process.wait(_LEAVE_S if error is None else 5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if self._owns_state_dir:
            shutil.rmtree(self.state_dir, ignore_errors=True)


def obey(commands: Mapping[str, Callable[..., Any]]) -> None:
    """A process's main loop; ends with stdin."""
    # Libraries print; only answers may reach the pipe.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(commands[name](*arguments)), file=answers, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def reading(
    client: ObedientRanks, *, transport: str, bytes_per_s: float = 0.0
) -> Iterator[dict[str, float]]:
    """A client reads everything again and again while the block runs.

    The dict that is yielded is filled at the end: `count` of reads and `bytes_per_s`.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="paramd-bench-") as directory:
        stop = Path(directory) / "stop"
        client.tell("read_until", str(stop), transport, bytes_per_s)
        try:
            yield found
        finally:
            stop.touch()
            found |= client.update()[0]


def train_for(
    ranks: ObedientRanks, order: Sequence[int], *, seconds: float
) -> list[list[list[float]]]:
    """Steps in `order`, again and again for about `seconds`; for each rank what `train` says."""
    found: list[list[list[float]]] = [[] for _ in ranks.pids]
    end_s = time.perf_counter() + seconds
    while not found[0] or time.perf_counter() < end_s:
        for rank, steps in enumerate(ranks.call("train", list(order))):
            found[rank] += steps
    return found
