"""States of the random number generators that a training draws from."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch

from paramd.trainer.model import accelerator


def random_state() -> dict[str, Any]:
    """Python's, NumPy's global one once it was imported, torch's on the host and each device.

    A device costs a synchronization with it. Their states are under the accelerator's name, "cuda"
    for CUDA and HIP, and left out while the training has not used it.
    """
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [version, _packed(words), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, keys, *rest]
    devices = accelerator.in_use()
    if devices is not None:
        found[str(accelerator.kind())] = devices.get_rng_state_all()
    return found


def set_random_state(found: dict[str, Any]) -> None:
    """Continue as they were when `random_state` was taken."""
    version, words, gauss = found["python"]
    random.setstate((version, _unpacked(words), gauss))
    if "numpy" in found:
        import numpy

        numpy.random.set_state(tuple(found["numpy"]))
    kind = accelerator.kind()
    if kind in found and torch.accelerator.is_available():
        states = found[kind][: torch.accelerator.device_count()]
        torch.get_device_module(kind).set_rng_state_all(states)
    torch.set_rng_state(found["torch"])


def _packed(words: tuple[int, ...]) -> bytes:
    return array("I", words).tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    return tuple(array("I", data))
