"""In each rank's sidecar: sums of powers of numbers in a snapshot."""

from collections.abc import Mapping, Sequence
from typing import Any

from paramd.errors import UsageError
from paramd_service.sidecar.calls import READERS, check_role
from paramd_service.sidecar.parts import Op, Peer, SidecarPart

DTYPES = ("float64", "float32", "bfloat16", "float16")


class Kurtosis(SidecarPart):
    """Serves the operation `kurtosis` on the sidecar's Unix socket."""

    name = "kurtosis"

    def ops(self) -> Mapping[str, Op]:
        return {"kurtosis": self._sums}

    async def _sums(self, peer: Peer, message: dict[str, Any], _descriptors: list[int]) -> None:
        check_role(peer.caller(message), READERS)
        runs = list(zip(message["begins"], message["numels"], strict=True))
        async with self.host.held(str(message["snapshot_id"]), 60.0) as snapshot:
            data = snapshot.view()
            # On the thread for reductions: the event loop must go on.
            rows = await self.host.reduced(lambda stop: sums(data, message["dtype"], runs, stop))
        peer.answer({"op": "kurtosis", "rows": rows, **self.host.identity()})


def sums(
    data: memoryview, dtype: str, runs: Sequence[tuple[int, int]], stop: Sequence[bool]
) -> list[list[float]]:
    """Of each run (first byte, elements): how many numbers, and the sums of their powers 1 to 4."""
    import torch  # Here: a sidecar starts without it, and may never need it.

    if dtype not in DTYPES:
        raise UsageError(f"dtype: {dtype}; expected one of {', '.join(DTYPES)}")
    rows = []
    for begin, numel in runs:
        if stop:
            break
        run = torch.frombuffer(data[begin:], dtype=getattr(torch, dtype), count=numel).double()
        rows.append([float(numel), *(run.pow(power).sum().item() for power in (1, 2, 3, 4))])
    return rows
