"""Statistics of tensors, computed by torch.

Importing this package is how a sidecar loads torch, fully or not at all. An import that fails
halfway leaves registrations in C++ behind that make every later import fail, so the process
could never compute statistics again.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

from paramd.errors import exhausted_of

ROOM = 64
"""Descriptors that must be free before torch is loaded; it needs about a dozen at a time."""

EXIT_HALF_LOADED = 71


def _load_torch() -> None:
    if "torch" in sys.modules:
        return
    with ExitStack() as taken:
        try:
            for _ in range(ROOM):
                taken.enter_context(open(os.devnull, "rb"))
        except OSError as error:
            raise (exhausted_of(error) or error) from None
    try:
        import torch  # noqa: F401
    except Exception as error:
        # Beyond repair in this process: exit, and the trainer starts a successor.
        print(f"paramd sidecar: torch could not be loaded ({error!r})", file=sys.stderr, flush=True)
        os._exit(EXIT_HALF_LOADED)


_load_torch()
