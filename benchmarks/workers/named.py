"""One rank with so many names: tells how long each call took, and dies as if it was killed.

The next one that is started with the same folder tells how long it took to go on from there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import torch

import paramd
from paramd import places
from paramd.mesh.mesh import Mesh
from paramd.trainer.attaching.attachment import Attachment

JOB = "names"


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])

    def block() -> torch.nn.Module:
        return torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(50))

    model = torch.nn.ModuleList(block() for _ in range(count // 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begin_s = time.perf_counter()
    attachment = paramd.attach(model, optimizer, job=JOB, resume="auto")
    took_s = time.perf_counter() - begin_s
    if attachment.resumed:
        took = {"resume": took_s}
        attachment.detach()
    else:
        took = {"attach": took_s}
        with paramd.connect(job=JOB) as mesh:
            for what, ask in ASKED.items():
                begin_s = time.perf_counter()
                told_s = _while_training(attachment, partial(ask, mesh))
                took[what] = told_s or time.perf_counter() - begin_s
                print(count, what, f"{took[what]:.2f} s", file=sys.stderr, flush=True)
    (folder / "told").write_text(json.dumps(took))
    os.kill(os.getpid(), signal.SIGKILL)


def _while_training(attachment: Attachment, ask: Callable[[], object]) -> float | None:
    """What it says that it took, if it does."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        while not asked.done():
            with attachment.update():
                pass
            attachment.end_iteration()
            time.sleep(0.005)
        found = asked.result()
        return found if isinstance(found, float) else None


def _sorted_again(mesh: Mesh) -> float:
    """By another statistic of the same state, which the control plane has."""
    mesh.pause()
    _page(mesh, "-norm")
    begin_s = time.perf_counter()
    _page(mesh, "mean")
    took_s = time.perf_counter() - begin_s
    mesh.resume()
    return took_s


def _page(_: Mesh, sort: str = "-numel") -> None:
    """What the dashboard asks for first: the largest tensors."""
    found = places.read_endpoint(JOB)
    request = urllib.request.Request(
        f"{found.url}/api/v1/jobs/{JOB}/params?sort={sort}&limit=100",
        headers={"authorization": f"Bearer {found.token}"},
    )
    with urllib.request.urlopen(request) as answer:
        assert len(json.load(answer)["params"]) == 100


def _joined_again(mesh: Mesh) -> None:
    """The sidecar is killed; its successor takes over and joins."""
    for one in psutil.Process().children(recursive=True):
        if "paramd_service.sidecar" in one.cmdline():
            one.kill()
            one.wait()
    mesh.summon("0.0.weight", timeout=300.0)


ASKED: dict[str, Callable[[Mesh], object]] = {
    "params": lambda mesh: mesh.params(),
    "summon one": lambda mesh: mesh.summon("0.0.weight", timeout=None),
    "summon all": lambda mesh: mesh.summon("*", timeout=None),
    "stats": lambda mesh: mesh.stats("*", timeout=None),
    "edit all": lambda mesh: mesh.edit("*", mul=1.0, timeout=None),
    "export": lambda mesh: mesh.export("here/all").wait(timeout=None),
    "page, first": _page,
    "page": _page,
    "page, by a statistic": lambda mesh: _page(mesh, "-norm"),
    "page, by another": _sorted_again,
    "join": _joined_again,
}


if __name__ == "__main__":
    main()
