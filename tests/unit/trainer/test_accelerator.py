"""What goes through `torch.accelerator`, on an accelerator in Python and with streams that note."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paramd.trainer.home import mirrored
from paramd.trainer.home.mirrored import DeviceCopies
from paramd.trainer.model import accelerator
from paramd.trainer.resume.codec import random_state, set_random_state

SCRIPT = """
import torch
from tests import python_accelerator
from tests.python_accelerator import NAME, on_device
module = python_accelerator.enter()

from paramd.trainer.helpers import insight
from paramd.trainer.home.mirrored import DeviceCopies, finish_copies, mirrored_devices
from paramd.trainer.model import accelerator
from paramd.trainer.resume.codec import random_state, set_random_state

assert mirrored_devices() == ("cpu", NAME)
assert accelerator.kind() == NAME
assert accelerator.in_use() is None
assert insight.device_memory() == {}
assert NAME not in random_state()  # which fails on a device that is not in use

module.initialized = True
assert accelerator.in_use() is module
kept = random_state()
module.states = []
set_random_state(kept)
assert module.states == kept[NAME][:1]

tensor = on_device(torch.arange(5.0))
assert accelerator.holds(tensor)
assert not accelerator.holds(torch.ones(1))
assert not accelerator.captures(tensor.device)
room = torch.zeros(7)
copies = DeviceCopies(room.data_ptr(), room.nbytes)
copies.to_host([room[:5], room[5:]], [tensor, torch.ones(2)])
finish_copies([tensor.device])
copies.close()
assert room.tolist() == [0, 1, 2, 3, 4, 1, 1]
assert insight._computed({"loss": tensor}).recorded_on is not None
assert insight._computed({"loss": torch.ones(1)}) is None
print("done")
"""


def test_an_accelerator_other_than_cuda_is_copied_from_and_left_alone_before_it_is_used() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr
    assert ended.stderr.count("could not be pinned") == 1


class Noting:
    """Streams and events of a device that is not there, noting what is asked of them."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def stream(self, device: torch.device) -> Any:
        return self._stream("side")

    def current(self, device: torch.device) -> Any:
        return self._stream("training's")

    def event(self, device: torch.device, *, blocking: bool) -> Any:
        assert blocking
        return SimpleNamespace(
            record=lambda stream: self.notes.append(f"event behind the {stream.name}"),
            synchronize=lambda: self.notes.append("the host waits for the event"),
        )

    def _stream(self, name: str) -> Any:
        notes = self.notes

        class Stream:
            def __enter__(self) -> None:
                notes.append(f"on the {name}:")

            def __exit__(self, *_: object) -> None:
                notes.append("end")

            def wait_stream(self, other: Any) -> None:
                notes.append(f"the {name} waits for the {other.name}")

            def synchronize(self) -> None:
                notes.append(f"the host waits for the {name}")

        stream = Stream()
        stream.name = name  # type: ignore[attr-defined]
        return stream


def test_copies_are_behind_the_training_and_the_host_waits_for_them_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noting = Noting()
    monkeypatch.setattr(torch, "Stream", noting.stream)
    monkeypatch.setattr(torch, "Event", noting.event)
    monkeypatch.setattr(torch.accelerator, "current_stream", noting.current)
    monkeypatch.setattr(mirrored, "_register", lambda *_: True)
    monkeypatch.setattr(mirrored, "_runtime", lambda: SimpleNamespace(cudaHostUnregister=print))
    source: Any = SimpleNamespace(device=torch.device("cuda", 0))
    target: Any = SimpleNamespace(
        copy_=lambda _, non_blocking: noting.notes.append(f"copy, non_blocking={non_blocking}")
    )
    copies = DeviceCopies(4096, 64)
    copies.to_host([target, target], [source, source])
    copied = ["on the side:", "copy, non_blocking=True", "end"]
    assert noting.notes == [
        "the side waits for the training's",
        *copied,
        *copied,
        "event behind the side",
        "the host waits for the event",
    ]
    noting.notes.clear()
    mirrored.finish_copies([source.device])
    assert noting.notes == ["the host waits for the training's"]
    copies.close()


def test_states_that_were_kept_of_cuda_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = random_state()
    of_devices = [torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)]
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", found.extend)
    set_random_state(kept | {"cuda": of_devices})
    assert found == of_devices[:1]
