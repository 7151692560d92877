"""States of the random number generators that a training draws from."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Python's, NumPy's global one once it was imported, torch's on the host and each CUDA device.

    A device costs a synchronization with it.
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
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_state(found: dict[str, Any]) -> None:
    """Continue as they were when `random_state` was taken."""
    version, words, gauss = found["python"]
    random.setstate((version, _unpacked(words), gauss))
    if "numpy" in found:
        import numpy

        numpy.random.set_state(tuple(found["numpy"]))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(found["cuda"][: torch.cuda.device_count()])
    torch.set_rng_state(found["torch"])


def _packed(words: tuple[int, ...]) -> bytes:
    return array("I", words).tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    return tuple(array("I", data))
