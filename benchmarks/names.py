"""How attaching, and asking for all, grows with the number of names; one rank, tiny tensors."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import paramd
from benchmarks.report import Goal, Report, Table
from paramd.mesh.mesh import Mesh
from paramd.trainer.attaching.attachment import Attachment

COUNTS = (1_000, 10_000, 50_000)
MOST_EXPONENT = 1.1

ASKED: dict[str, Callable[[Mesh], object]] = {
    "params": lambda mesh: mesh.params(),
    "summon one": lambda mesh: mesh.summon("0.0.weight"),
    "summon all": lambda mesh: mesh.summon("*"),
    "stats": lambda mesh: mesh.stats("*"),
    "edit all": lambda mesh: mesh.edit("*", mul=1.0),
}


def run(*, quick: bool) -> Report:
    """Everything once at each count; the exponent is between the two largest."""
    counts = COUNTS[:2] if quick else COUNTS
    with tempfile.TemporaryDirectory() as state:
        os.environ["PARAMD_STATE_DIR"] = state
        took = {count: _measured(count) for count in counts}
    few, many = counts[-2:]
    rows, goals = [], []
    for what in took[many]:
        grown = took[many][what] / took[few][what]
        exponent = math.log(grown) / math.log(many / few)
        told = [f"{took[count][what]:.2f}" for count in counts]
        rows.append([what, *told, f"{exponent:.2f}"])
        goals.append(
            Goal(what=f"exponent of: {what}", measured=exponent, limit=MOST_EXPONENT, unit="")
        )
    header = ["", *(f"{count:,} names, s" for count in counts), "exponent"]
    return Report(
        name="names", tables=[Table(title="By names", header=header, rows=rows)], goals=goals
    )


def _measured(count: int) -> dict[str, float]:
    def block() -> torch.nn.Module:
        return torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(50))

    model = torch.nn.ModuleList(block() for _ in range(count // 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begin_s = time.perf_counter()
    attachment = paramd.attach(model, optimizer, job=f"names-{count}")
    took = {"attach": time.perf_counter() - begin_s}
    with paramd.connect(job=attachment.job) as mesh:
        for what, ask in ASKED.items():
            begin_s = time.perf_counter()
            _while_training(attachment, partial(ask, mesh))
            took[what] = time.perf_counter() - begin_s
    attachment.detach()
    return took


def _while_training(attachment: Attachment, ask: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        while not asked.done():
            with attachment.update():
                pass
            time.sleep(0.005)
        asked.result()
