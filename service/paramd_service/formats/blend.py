"""What torch computes for an export, in a short-lived process: merged weights, and averages.

Importing torch would block the sidecar for seconds, and stay in its memory. The process gets one
box of a tensor at a time, with what is blended into it, and returns its bytes.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from paramd.errors import ParamdError
from paramd.layout.exports.files import Blend

_TIMEOUT_S = 300.0
"""Seconds that one box may take; the first includes the start of torch."""
_LAST_LINES = 1


@dataclass(frozen=True, slots=True)
class Operand:
    """Dense bytes of a box of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def head(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": self.shape, "size_bytes": self.data.nbytes}


class Blender:
    """The process, started on first use. For one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def blend(self, blend: Blend, base: Operand, inputs: Sequence[Operand]) -> None:
        """Change the base's bytes in place; blocks.

        Raises:
            ParamdError: If torch could not.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        head = {
            "kind": blend.kind,
            "weight": blend.weight,
            "transposed": blend.transposed,
            "tensors": [one.head for one in (base, *inputs)],
        }
        watch = threading.Timer(_TIMEOUT_S, process.kill)
        watch.daemon = True
        watch.start()
        try:
            process.stdin.write(json.dumps(head).encode() + b"\n")
            for one in (base, *inputs):
                process.stdin.write(one.data)
            process.stdin.flush()
            _read_into(process.stdout, base.data)
        except (OSError, EOFError) as error:
            raise ParamdError(f"torch could not compute the weights: {self._why(error)}") from None
        finally:
            watch.cancel()

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paramd_service.formats.blend_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        return self._process

    def _why(self, error: Exception) -> str:
        process = self._process
        assert process is not None
        process.kill()
        _, told = process.communicate()
        lines = told.decode("utf-8", "replace").strip().splitlines()[-_LAST_LINES:]
        return "".join(lines)[:300] or f"its process ended ({error})"


def _read_into(source: IO[bytes], target: memoryview) -> None:
    at = 0
    while at < target.nbytes:
        part = source.read(min(target.nbytes - at, 1 << 20))
        if not part:
            raise EOFError
        target[at : at + len(part)] = part
        at += len(part)
