"""In each client: `mesh.parts.kurtosis.compute("layers.*")`."""

from dataclasses import dataclass

from paramd.layout.plan import ReadPlan
from paramd.layout.stats import by_dtype, stats_items
from paramd.mesh.loop import UNSET
from paramd.mesh.parts.host import MeshPart
from paramd.mesh.reading.ops import ask_op
from paramd.mesh.reading.pin import while_pinned
from paramd.mesh.reading.stream import Reading


@dataclass(frozen=True)
class Row:
    """The kurtosis of one full tensor."""

    name: str
    step: int
    kurtosis: float


class Kurtosis(MeshPart):
    """Asks the sidecars, and merges what they say of their shards."""

    async def compute(self, *patterns: str) -> list[Row]:
        """The kurtosis of each tensor that matches, all at one step; training goes on."""
        deadline_s = self._host.deadline(UNSET)
        return await while_pinned(self._host.reach, patterns or ("*",), _merged, deadline_s)


async def _merged(reading: Reading, plan: ReadPlan) -> list[Row]:
    sums = [[0.0] * 5 for _ in plan.tensors]
    for rank, items in stats_items(plan).items():
        for dtype, tensors, begins, numels in by_dtype(items):
            fields = {
                "snapshot_id": reading.pinned.pins[rank].snapshot_id,
                "dtype": dtype,
                "begins": list(begins),
                "numels": list(numels),
            }
            answer = await ask_op(reading.sidecars, rank, "kurtosis", fields)
            for tensor, row in zip(tensors, answer["rows"], strict=True):
                sums[tensor] = [a + b for a, b in zip(sums[tensor], row, strict=True)]
    step = reading.pinned.state.step
    return [
        Row(tensor.name, step, kurtosis(*row))
        for tensor, row in zip(plan.tensors, sums, strict=True)
    ]


def kurtosis(count: float, one: float, two: float, three: float, four: float) -> float:
    """From the sums of powers 1 to 4; NaN where all numbers are equal."""
    mean, square = one / count, two / count
    variance = square - mean**2
    fourth = four / count - 4 * mean * three / count + 6 * mean**2 * square - 3 * mean**4
    return fourth / variance**2 if variance > 0 else float("nan")
