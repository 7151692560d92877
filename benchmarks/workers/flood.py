"""Opens connections to a port at a rate, from an address of its own, and says half a word on each.

    python -m benchmarks.workers.flood PORT SECONDS PER_S "text that is sent"

Prints how many it has opened. It keeps the last `KEPT` open, and hangs up on older ones.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections import deque

FROM = "127.0.0.2"
KEPT = 2_000


def main(port: int, seconds: float, per_s: float, text: bytes) -> int:
    opened, begin_s = 0, time.monotonic()
    kept: deque[socket.socket] = deque()
    while (now_s := time.monotonic() - begin_s) < seconds:
        if opened >= now_s * per_s:
            time.sleep(0.001)
            continue
        one = socket.socket()
        one.bind((FROM, 0))
        one.settimeout(1.0)
        with contextlib.suppress(OSError):
            one.connect(("127.0.0.1", port))
            one.sendall(text)
        opened += 1
        kept.append(one)
        if len(kept) > KEPT:
            kept.popleft().close()
    return opened


if __name__ == "__main__":
    print(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4].encode()))
