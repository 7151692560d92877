"""`.metadata` of torch.distributed.checkpoint, written by torch itself in a separate process.

Importing torch would block the sidecar for seconds, and stay in its memory. The process reads text
and returns the files' bytes.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from paramd.errors import ParamdError

_TIMEOUT_S = 300.0


def dcp_files(description: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that torch writes, the metadata last; blocks for seconds.

    Raises:
        ParamdError: If torch could not.
    """
    told = json.dumps(description).encode()
    command = [sys.executable, "-m", "paramd_service.formats.dcp_writer"]
    try:
        done = subprocess.run(
            command, check=False, input=told, capture_output=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ParamdError(f"torch did not write its metadata within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ParamdError(f"torch could not write its metadata: {''.join(last)[:300]}")
    return _unpacked(done.stdout)


def _unpacked(output: bytes) -> dict[str, bytes]:
    """Parse one line of JSON [[name, size], ...] and the files' bytes after it."""
    head, _, data = output.partition(b"\n")
    found = {}
    begin = 0
    for name, size in json.loads(head):
        found[str(name)] = data[begin : begin + size]
        begin += size
    return found
