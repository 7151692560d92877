"""What goes through `torch.accelerator`, on an accelerator in Python and with streams that note."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from paramd.trainer.model import accelerator
from paramd.trainer.resume.codec import random_state, set_random_state

SCRIPT = """
import torch
from tests import python_accelerator
from tests.python_accelerator import NAME, on_device
module = python_accelerator.enter()

from paramd.trainer.helpers import insight
from paramd.trainer.home.mirrored import DeviceCopies, finish_copies
from paramd.trainer.home.mirrored import mirrored_devices
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
