"""What a stack means, faulthandler's text, the ring of logged numbers, a process's facts."""

from __future__ import annotations

import asyncio
import faulthandler
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paramd import state_files
from paramd_service.sidecar.insight.activity import Frame, activity_of, parse_faulthandler
from paramd_service.sidecar.insight.line import MAX_KEPT, LoggedNumbers, TrainerLine
from paramd_service.sidecar.insight.process import TrainerOutput, catches, facts_of, last_lines

SITE = "/opt/env/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"
MAIN = Frame("/home/me/train.py", 9, "main")


@pytest.mark.parametrize(
    ("frames", "kind", "what", "where"),
    [
        ([], "", "at an unknown place", ""),
        (
            [
                Frame("/usr/lib/python3.11/threading.py", 320, "Condition.wait"),
                Frame("/usr/lib/python3.11/queue.py", 171, "Queue.get"),
                Frame(f"{TORCH}/utils/data/dataloader.py", 1, "_Multi._next_data"),
                Frame(f"{TORCH}/utils/data/dataloader.py", 2, "_Base.__next__"),
                MAIN,
            ],
            "dataloader",
            "in DataLoader.next",
            "train.py:9 in main",
        ),
        (
            [
                Frame(f"{TORCH}/distributed/distributed_c10d.py", 1, "all_gather"),
                Frame(f"{TORCH}/distributed/c10d_logger.py", 2, "wrapper"),
                Frame(f"{TORCH}/distributed/distributed_c10d.py", 3, "all_gather_object"),
                MAIN,
            ],
            "collective",
            "in all_gather_object",
            "train.py:9 in main",
        ),
        (
            [Frame(f"{TORCH}/serialization.py", 1, "save"), MAIN],
            "checkpoint",
            "in torch.save",
            "train.py:9 in main",
        ),
        (
            [
                Frame(f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward"),
                Frame(f"{TORCH}/_tensor.py", 2, "Tensor.backward"),
                MAIN,
            ],
            "backward",
            "in backward",
            "train.py:9 in main",
        ),
        ([MAIN], "code", "at train.py:9 in main", "train.py:9 in main"),
        (
            [Frame("/usr/lib/python3.11/pdb.py", 1, "Pdb.interaction"), MAIN],
            "debugger",
            "in a debugger",
            "train.py:9 in main",
        ),
    ],
)
def test_a_stack_tells_what_its_thread_does(
    frames: list[Frame], kind: str, what: str, where: str
) -> None:
    found = activity_of(frames)
    assert (found.kind, found.what, found.where) == (kind, what, where)


def test_what_faulthandler_writes_is_parsed(tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        end.set()
        thread.join()
        threads = parse_faulthandler((tmp_path / "stacks").read_text())
    functions = [[frame.function for frame in frames] for _, frames in threads]
    assert any("wait" in one for one in functions[:-1])
    assert "test_what_faulthandler_writes_is_parsed" in functions[-1]
    assert threads[-1][1][0].file == __file__
    assert threads[-1][1][0].line > 0


def test_the_ring_keeps_the_latest_numbers_and_counts_all() -> None:
    numbers = LoggedNumbers()
    numbers.add([[step, 1.0, {"loss": step}] for step in range(MAX_KEPT + 5)])
    numbers.add([None, [1], [1, "x", {}], [1, 2.0, 3], ["a", 1.0, {"loss": 1}]])
    assert numbers.count == MAX_KEPT + 5
    kept = numbers.after(0, 10)
    assert [one.number for one in kept] == list(range(6, 16))
    assert [one.number for one in numbers.after(8, 2)] == [9, 10]
    assert numbers.after(MAX_KEPT + 5, 10) == []
    numbers.add([[7, 2.0, {"loss": "nan"}]])
    assert math.isnan(numbers.after(MAX_KEPT + 5, 10)[0].values["loss"])


def test_the_kernel_tells_of_a_process_and_of_none() -> None:
    mine = facts_of(os.getpid())
    assert mine.rss_bytes > 1 << 20
    assert mine.open_file_count > 2
    assert mine.open_file_limit > 2
    assert mine.thread_count >= 1
    nobody = facts_of(1 << 30)
    assert (nobody.rss_bytes, nobody.open_file_count, nobody.process_state) == (-1, -1, "")
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not catches(os.getpid(), signal.SIGRTMIN + 3)
    assert not catches(1 << 30, signal.SIGINT)


def test_last_lines_come_from_a_file_and_else_the_reason_is_told(tmp_path: Path) -> None:
    program = "import sys; print('a\\nb\\nc', flush=True); sys.stdin.read()"
    for target, lines in ((tmp_path / "log", ["b", "c"]), (None, [])):
        with (target or Path(os.devnull)).open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
            while target is not None and "c" not in target.read_text():
                assert process.poll() is None
            found, why = last_lines(process.pid, 2)
            process.communicate()
        assert found == lines
        assert bool(why) is not bool(lines)


def test_who_is_cancelled_while_the_line_closes_ends() -> None:
    async def both_at_once() -> None:
        ours, trainers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        dump = os.memfd_create("dump")
        line = TrainerLine(os.getpid(), 1, LoggedNumbers())
        line.open({"thread": 1, "signal": 0}, [ours.fileno(), dump])
        asking = asyncio.create_task(line.stacks(collectives=False))
        question = await asyncio.to_thread(trainers.recv, 4096)
        assert b"stacks" in question
        # As when a trainer ends: its socket is closed, and its sidecar stops looking at it.
        line.close()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        ours.close()
        trainers.close()
        os.close(dump)

    asyncio.run(both_at_once())


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


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a\nb\nc\n", ["b", "c"]),
        ("a\nb\nunfinished", ["b", "unfinished"]),
        ("10%\r20%\r30%\r\nend\r\n", ["30%", "end"]),
        ("\n\n", ["", ""]),
        ("x" * 3000 + "\n", ["x" * 2000]),
        (("y" * 99 + "\n") * 5000, ["y" * 99] * 2),
        ("z" * (1 << 19), ["z" * 2000]),
    ],
)
def test_last_lines_are_bounded_and_whole(tmp_path: Path, text: str, lines: list[str]) -> None:
    (tmp_path / "log").write_text(text, newline="")
    with (tmp_path / "log").open("rb") as file:
        assert state_files.last_lines(file.fileno(), 2) == lines
        if len(text) > 100_000 and "\n" in text:
            assert set(state_files.last_lines(file.fileno(), 10_000)) == {"y" * 99}
