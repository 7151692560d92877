"""Bytes that a follower with deltas is sent, against those that changed and all there are."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import paramd
from benchmarks.ranks import WORLD_SIZE, ObedientRanks
from benchmarks.report import Goal, Report, Table
from paramd import places

CASES = (
    ("bfloat16", 1e-6, 1),
    ("bfloat16", 1e-5, 1),
    ("bfloat16", 1e-5, 10),
    ("bfloat16", 1e-4, 1),
    ("bfloat16", 1e-3, 1),
    ("float32", 1e-5, 1),
)
"""Dtype, learning rate, updates between two frames."""

PATIENCE_S = 0.5

WARM = 10
"""Updates before anything is counted."""


@dataclass(slots=True)
class Case:
    """What one case was measured to be, over its frames."""

    name: str
    whole_bytes: int
    frames: int = 0
    step: int = 0
    changed_bytes: int = 0
    sent_bytes: int = 0
    error: list[BaseException] = field(default_factory=list)


def run(*, quick: bool) -> Report:
    """The example's GPT under FSDP2, two ranks; one follower reads each frame."""
    count = 5 if quick else 40
    with ExitStack() as stack:
        ranks = stack.enter_context(ObedientRanks("benchmarks.workers.followed", WORLD_SIZE))
        cases = [_measure(ranks, number, *CASES[number], count) for number in range(len(CASES))]
    rows = [
        [
            case.name,
            f"{case.changed_bytes / case.frames / case.whole_bytes:.1%}",
            f"{case.sent_bytes / case.frames / case.whole_bytes:.1%}",
            f"{case.sent_bytes / max(case.changed_bytes, 1):.2f}",
        ]
        for case in cases
    ]
    header = ["update", "bytes changed, of all", "bytes sent, of all", "sent / changed"]
    typical = cases[1]
    return Report(
        name="followers",
        tables=[Table(title="A follower with deltas, means of frames", header=header, rows=rows)],
        goals=[
            Goal(
                what="bfloat16, lr 1e-5: bytes sent / all",
                measured=typical.sent_bytes / typical.frames / typical.whole_bytes,
                limit=0.2,
            ),
            Goal(
                what="any: bytes sent / all, at most all and its digests",
                measured=max(c.sent_bytes / c.frames / c.whole_bytes for c in cases),
                limit=1.05,
            ),
        ],
        notes=[f"{cases[0].whole_bytes:,} bytes of bfloat16 in all, {count} frames each."],
        numbers={
            case.name: [case.frames, case.changed_bytes, case.sent_bytes, case.whole_bytes]
            for case in cases
        },
    )


def _measure(
    ranks: ObedientRanks, number: int, dtype: str, lr: float, every: int, count: int
) -> Case:
    job = f"followed-{number}"
    size_bytes = int(ranks.call("build", dtype, lr, job)[0])
    ranks.call("train", WARM)
    case = Case(f"{dtype}, AdamW, lr {lr:g}" + (f", every {every}" * (every > 1)), size_bytes)
    reading = threading.Thread(target=_read, args=(ranks, job, every, count, case))
    reading.start()
    step = WARM
    while reading.is_alive():
        ranks.call("train", 1)
        step += 1
        # A frame of each update: wait for the reader, but not for a step that it has missed.
        until_s = time.monotonic() + PATIENCE_S
        while 0 < case.step < step - every - 1 and time.monotonic() < until_s:
            time.sleep(0.001)
    reading.join()
    if case.error:
        raise case.error[0]
    return case


def _read(ranks: ObedientRanks, job: str, every: int, count: int, case: Case) -> None:
    try:
        endpoint = places._load(ranks.state_dir / job / places.ENDPOINT_FILE)
        assert endpoint is not None
        with paramd.connect(endpoint.url, endpoint.token, job=job) as mesh:
            for number, frame in enumerate(mesh.follow("*", every=every, deltas=True)):
                assert frame.changed_bytes is not None
                case.step = frame.step
                if number and not frame.dropped:
                    case.frames += 1
                    case.changed_bytes += frame.changed_bytes
                    case.sent_bytes += frame.sent_bytes
                if case.frames == count:
                    return
    except BaseException as error:
        case.error.append(error)
