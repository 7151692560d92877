"""What others ask of a control plane, one call of REST and one of gRPC every 50 ms until ended; how
many seconds each took, a line each. Arguments: URL, gRPC address, job, token."""

from __future__ import annotations

import sys
import time

from tests.integration.test_bounds import others

PAUSE_S = 0.05


def main() -> None:
    url, address, job, token = sys.argv[1:]
    with others(url, address, job, token) as asks:
        while True:
            for how, ask in zip(("REST", "gRPC"), asks, strict=True):
                begin_s = time.perf_counter()
                ask()
                print(how, time.perf_counter() - begin_s, flush=True)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
