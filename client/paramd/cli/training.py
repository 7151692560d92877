"""The demo's training: two ranks of the example under torchrun, ended as they began."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paramd import places
from paramd.errors import DeadlineError, UnreachableError

MODULE = "paramd.examples.train_gpt"

DESTINATION = "checkpoints"
"""Name of the destination that is configured for the training: a directory of its own."""

RANKS = 2
MAX_STEPS = 20_000
"""Where the training would end by itself, should nobody be left to end it."""

POLL_S = 0.05
STOP_S = 30.0
SHOWN_LINES = 80
"""Of a training that failed: torchrun says much after the ranks' own last words."""

_LOSS = re.compile(r"^step (\d+) loss ([0-9.]+)$", re.MULTILINE)


class Training:
    """A training that this process has started."""

    def __init__(
        self, job: str, process: subprocess.Popen[bytes], log_path: Path, checkpoints: Path
    ) -> None:
        self.job = job
        self.checkpoints = checkpoints
        """Where the destination of the demo lies."""
        self._process = process
        self._log_path = log_path

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait_until_open(self, *, timeout_s: float) -> None:
        """Waits until the job can be found.

        Raises:
            UnreachableError: the training ended before. DeadlineError: it took too long.
        """
        deadline_s = time.monotonic() + timeout_s
        while not any(found.job == self.job for found in places.running_jobs()):
            self.check(deadline_s, "it did not attach")
            time.sleep(POLL_S)

    def check(self, deadline_s: float, what: str) -> None:
        """Raises when the training has ended or the time is over, and shows its last lines."""
        if self.running and time.monotonic() <= deadline_s:
            return
        print(self.last_lines(), file=sys.stderr, flush=True)
        if not self.running:
            raise UnreachableError(
                f"the training ended with code {self._process.returncode}; its last lines stand "
                "above. To run it alone: torchrun --standalone --nproc-per-node 2 "
                f"-m {MODULE} --no-attach"
            )
        raise DeadlineError(f"the training: {what} in time; its last lines stand above")

    def losses(self) -> dict[int, float]:
        """The loss of every update so far, by its number."""
        text = self._log_path.read_text(errors="replace")
        return {int(step): float(loss) for step, loss in _LOSS.findall(text)}

    def loss_around(self, step: int, *, timeout_s: float = 10.0, width: int = 20) -> float:
        """Mean loss of the updates up to `step`, at most `width` of them.

        Raises:
            UnreachableError, DeadlineError: the training never printed that step.
        """
        deadline_s = time.monotonic() + timeout_s
        while step not in (losses := self.losses()):
            self.check(deadline_s, f"it did not print step {step}")
            time.sleep(POLL_S)
        near = [losses[at] for at in range(step - width + 1, step + 1) if at in losses]
        return sum(near) / len(near)

    def last_lines(self) -> str:
        """The end of its output."""
        with self._log_path.open(errors="replace") as file:
            return "".join(deque(file, SHOWN_LINES)).rstrip()

    def wait(self) -> int:
        """Waits for its end; returns its exit code."""
        return self._process.wait()

    def stop(self) -> None:
        """Asks the ranks to end after a step; makes them after `STOP_S`. Idempotent."""
        if not self.running:
            return
        # torchrun gives each rank a session of its own, so they must be known one by one.
        ranks = _children(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pidfd in ranks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def _children(pid: int) -> list[int]:
    """A pidfd of each living child of a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                with suppress(ProcessLookupError):
                    found.append(os.pidfd_open(int(child)))
    return found


@contextmanager
def started(
    job: str, folder: Path, *, keep: bool, ranks: int = RANKS, control: str | None = None
) -> Iterator[Training]:
    """Ranks that train until the block ends; their output goes to a file in `folder`.

    `control` is the URL of a site to register at; its token is then read from PARAMD_TOKEN_FILE.

    Without `keep` they also end by themselves, after `MAX_STEPS`.
    """
    log_path, checkpoints = folder / "training.log", folder / "checkpoints"
    checkpoints.mkdir()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # Should the demo be killed, nothing of it serves on for the usual ten minutes.
        "PARAMD_LINGER_S": "10",
        "PARAMD_DESTINATIONS": json.dumps({DESTINATION: str(checkpoints)}),
    }
    environment.pop("PARAMD_TOKEN", None)
    command = [
        sys.executable, "-m", "torch.distributed.run",
        "--standalone", "--nproc-per-node", str(ranks),
        "-m", MODULE, "--job", job, "--steps", str(MAX_STEPS), "--every", "1",
        *(["--keep"] if keep else []),
        *(["--control", control] if control is not None else []),
    ]  # fmt: skip
    with _Interrupts() as interrupts, log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C in our terminal is ours; the ranks end in good order after it.
            start_new_session=True,
        )
        training = Training(job, process, log_path, checkpoints)
        try:
            interrupts.release()
            yield training
        finally:
            interrupts.hold()
            training.stop()


class _Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP as KeyboardInterrupt, but never while they are held.

    So none falls between the start of a process and the knowledge of it, or into its
    ending. Held at first.
    """

    _NAMES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._held = True
        self._came = False

    def __enter__(self) -> _Interrupts:
        self._before = {name: signal.signal(name, self._note) for name in self._NAMES}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def hold(self) -> None:
        """From now on they are only noted."""
        self._held = True

    def release(self) -> None:
        """From now on they raise; one that was noted raises here."""
        self._held = False
        if self._came:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: object) -> None:
        self._came = True
        if not self._held:
            raise KeyboardInterrupt


def free_job_name(wanted: str) -> str:
    """`wanted`, or with a number behind it when a job of that name runs."""
    taken = {endpoint.job for endpoint in places.running_jobs()}
    number, name = 1, wanted
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name
