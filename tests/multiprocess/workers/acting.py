"""Trains with a thread that asks for edits, holds and steps as a sidecar would; compares.

Every rank has such a thread, which writes the sidecar's words of its own page: nobody else
does while no control plane asks. The edits change nothing (x * 1.0), so the training must
compute exactly what it does without paramd, while it is edited, held and stepped.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

import paramd
from paramd.layout.edits.kinds import EditKind
from paramd.memory.control_page import Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.edit_program import Record, write_program
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.boundary.agreement import EDIT, HOLD, RESUME, STEP
from paramd.trainer.boundary.hold import HoldState
from tests.multiprocess import kinds
from tests.multiprocess.workers.train import Training, adam, differences, train_plainly

DEADLINE_S = 30.0
EDITS = 5
PROGRAM_BYTES = 1 << 16


class Driver(threading.Thread):
    """One rank's sidecar, as far as its words go."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(name="driver")
        self.page = attachment._page
        self.memory = SparseMemory(attachment._sidecar.own_descriptors().edits)
        self.records = [
            Record(
                EditKind.MUL,
                shard.dtype,
                begin,
                tuple(shard.tensor.shape),
                tuple(shard.tensor.stride()),
                value=1.0,
            )
            for shard, begin in attachment._home.pieces()
            if shard.tensor.is_floating_point()
        ]
        self.number = 0
        self.told: list[tuple[str, int]] = []
        """What happened at which step; must be the same on all ranks."""
        self.failure = ""
        self.waits_s: list[float] = []

    def run(self) -> None:
        try:
            self.script()
        except BaseException:
            self.failure = traceback.format_exc()
        finally:
            self.memory.close()

    def script(self) -> None:
        self.memory.reserve(0, PROGRAM_BYTES)
        write_program(self.memory.buffer, 0, self.records)
        for _ in range(EDITS):
            self.edit()
        self.hold(20.0)
        held_at = self.page[Word.STEP]
        self.edit()
        assert self.page[Word.STEP] == held_at, "a held rank went on"
        for count in (1, 3):
            self.ask(STEP, count)
            self.until(lambda: self.page[Word.HELD] == HoldState.HELD, "held again")
            held_at += count
            assert self.page[Word.STEP] == held_at, (self.page[Word.STEP], held_at)
            self.told.append(("stepped", held_at))
        self.edit()
        self.ask(RESUME)
        self.until(lambda: self.page[Word.STEP] > held_at, "training goes on")
        begun_s = time.monotonic()
        self.hold(0.4)
        held_at = self.page[Word.STEP]
        self.until(lambda: self.page[Word.HELD] == HoldState.RUNNING, "the lease ends by itself")
        assert 0.25 < time.monotonic() - begun_s < 10
        self.told.append(("lease ended", held_at))
        self.edit()

    def edit(self) -> None:
        begun_s = time.monotonic()
        self.ask(EDIT)
        self.until(lambda: self.page[Word.EDIT_APPLIED] == self.number, "applied")
        self.waits_s.append(time.monotonic() - begun_s)
        self.told.append(("edit", self.page[Word.EDIT_STEP]))

    def hold(self, lease_s: float) -> None:
        self.page[Word.HOLD_UNTIL_NS] = time.monotonic_ns() + int(lease_s * 1e9)
        self.ask(HOLD)
        self.until(lambda: self.page[Word.HELD] == HoldState.HELD, "held")
        self.told.append(("held", self.page[Word.AGREED_STEP]))

    def ask(self, action: int, argument: int = 0) -> None:
        page = self.page
        self.number += 1
        page[Word.READY] = 0
        page[Word.TOKEN], page[Word.ACTION] = 1000 + self.number, action
        page[Word.ARGUMENT] = argument
        page[Word.HIGHEST] = page[Word.READY] = self.number
        self.until(lambda: page[Word.AGREED] == self.number, f"agreed on action {action}")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"not {what} in time"
            time.sleep(0.0005)


def train(name: str) -> str:
    """What was wrong; empty when nothing."""
    kind = kinds.named(name)
    training = Training(kind, adam)
    attachment = paramd.attach(training.built.model, training.optimizers, job=name)
    driver = Driver(attachment)
    driver.start()
    while not everybody(not driver.is_alive()):
        training.step()
    driver.join()
    edits = attachment._page[Word.EDITS]
    attachment.detach()
    theirs = train_plainly(Training(kind, adam), len(training.run.losses))
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, [driver.told, edits])
    bad = differences(training.end(), theirs)
    if driver.failure or bad or any(one != told[0] for one in told):
        return f"{driver.failure} {bad[:5]} {told}"
    waits = sorted(driver.waits_s)
    return "" if edits == EDITS + 3 else f"{edits} edits applied, waits {waits}"


def everybody(condition: bool) -> bool:
    told = torch.tensor([int(condition)])
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in arguments.kinds.split(","):
        wrong = train(name)
        if wrong:
            print(f"FAILED {name}: {wrong}", flush=True)
            os._exit(1)
        print(json.dumps({"ok": name}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
