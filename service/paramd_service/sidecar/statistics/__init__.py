"""Statistics of tensors, computed by torch.

Importing this package loads torch, fully or not at all: an import that fails halfway leaves C++
registrations behind, which make every later import in the process fail.
"""

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
        # Beyond repair in this process: exit, and the trainer starts another sidecar.
        print(f"paramd sidecar: torch could not be loaded ({error!r})", file=sys.stderr, flush=True)
        os._exit(EXIT_HALF_LOADED)


_load_torch()
