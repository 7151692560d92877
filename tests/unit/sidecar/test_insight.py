"""What a stack means, faulthandler's text, the ring of logged numbers, a process's facts."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paramd_service.insight.activity import Frame, activity_of
from paramd_service.insight.line import LoggedNumbers, TrainerLine
from paramd_service.insight.process import TrainerOutput

SITE = "/opt/env/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"
MAIN = Frame("/home/me/train.py", 9, "main")


WHERE = "train.py:9 in main"
DONE = {
    "dataloader: in DataLoader.next": (
        "/usr/lib/python3.11/threading.py Condition.wait",
        "/usr/lib/python3.11/queue.py Queue.get",
        f"{TORCH}/utils/data/dataloader.py _Multi._next_data",
        f"{TORCH}/utils/data/dataloader.py _Base.__next__",
    ),
    "collective: in all_gather_object": (
        f"{TORCH}/distributed/distributed_c10d.py all_gather",
        f"{TORCH}/distributed/c10d_logger.py wrapper",
        f"{TORCH}/distributed/distributed_c10d.py all_gather_object",
    ),
    "checkpoint: in torch.save": (f"{TORCH}/serialization.py save",),
    "backward: in backward": (
        f"{TORCH}/autograd/graph.py _engine_run_backward",
        f"{TORCH}/_tensor.py Tensor.backward",
    ),
    f"code: at {WHERE}": (),
    "debugger: in a debugger": ("/usr/lib/python3.11/pdb.py Pdb.interaction",),
}
"""What a thread is told to do, by what lies above its script's own frame."""


@pytest.mark.parametrize("told", DONE)
def test_a_stack_tells_what_its_thread_does(told: str) -> None:
    above = [Frame(*line.split()[:1], 1, line.split()[1]) for line in DONE[told]]
    found = activity_of([*above, MAIN])
    assert (f"{found.kind}: {found.what}", found.where) == (told, WHERE)
    nothing = activity_of([])
    assert (nothing.kind, nothing.what, nothing.where) == ("", "at an unknown place", "")


THREAD = {"name": "t", "id": 1, "training": True, "frames": [["f", 1, "n"]]}


@contextmanager
def line_open() -> Iterator[tuple[TrainerLine, socket.socket]]:
    """A trainer's line, and its trainer's end."""
    ours, trainers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dump = os.memfd_create("dump")
    line = TrainerLine(os.getpid(), 1, LoggedNumbers())
    line.open({"thread": 1, "signal": 0}, [ours.fileno(), dump])
    yield line, trainers
    line.close()
    ours.close()
    trainers.close()
    os.close(dump)


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": [THREAD], "collectives": [3]},
        {"threads": [THREAD], "collectives": [{"age_s": 1e400}]},
        {"threads": [THREAD], "device_bytes": None},
        {"threads": [THREAD], "device_bytes": 2**70},
        {"threads": [THREAD | {"frames": [["\ud800", 1, "n"]]}]},
        {"threads": [THREAD | {"id": 2**70}]},
        {"threads": 7},
    ],
)
async def test_no_answer_of_a_script_breaks_its_line(wrong: dict[str, object]) -> None:
    broken: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: broken.append(what))
    with line_open() as (line, trainers):
        asking = asyncio.create_task(line.stacks(collectives=True))
        await asyncio.to_thread(trainers.recv, 4096)
        for odd in (b"[" * 50_000, b'{"id": []}', b'{"id": {}}', b"\xff", b'{"op": "log"}'):
            trainers.send(odd)
        trainers.send(json.dumps({"id": 1, **wrong}).encode())
        assert "cannot be read" in (await asking).missing
        assert broken == []


async def test_who_is_cancelled_while_the_line_closes_ends() -> None:
    with line_open() as (line, trainers):
        asking = asyncio.create_task(line.stacks(collectives=False))
        question = await asyncio.to_thread(trainers.recv, 4096)
        assert b"stacks" in question
        # As when a trainer ends: its socket is closed, and its sidecar stops looking at it.
        line.close()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


def test_what_a_trainer_wrote_last_is_told_after_its_death(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    program = "import sys; print('goes', flush=True); sys.stdin.read(); raise RuntimeError('why')"
    output = TrainerOutput()
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr
        )
        while "goes" not in out.read_text():
            assert process.poll() is None
        output.open(process.pid)
        process.communicate()
    # As log rotation does: the file goes on under another name.
    err.rename(tmp_path / "err.1")
    tails = output.tails(1)
    assert tails == [("stderr", ["RuntimeError: why"], ""), ("stdout", ["goes"], "")]
    output.close()
    (nothing,) = output.tails(1)
    assert nothing[:2] == ("trainer", [])
    output.open(os.getpid())
    assert output.tails(1) == [nothing], "closed is final"
