"""Globs over 100,000 names, hostile ones included."""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.report import Goal, Report, Table
from paramd.errors import ParamdError
from paramd.layout.select import NameIndex, select
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout

NAME_COUNT = 100_000
PATTERN_BYTES = 1 << 10


def run(*, quick: bool) -> Report:
    """Each pattern on several fresh indexes, so that nothing is remembered."""
    layout = _layout()
    times: dict[str, list[float]] = {what: [] for what in _patterns()}
    found = {}
    for _ in range(3 if quick else 9):
        index = NameIndex(layout)
        for what, pattern in _patterns().items():
            begin_s = time.perf_counter()
            try:
                found[what] = f"{len(select(index, [pattern])):,}"
            except ParamdError as error:
                found[what] = type(error).__name__
            times[what].append(time.perf_counter() - begin_s)
    medians_s = {what: statistics.median(all_) for what, all_ in times.items()}
    rows = [
        [what, str(len(pattern)), found[what], f"{1e3 * medians_s[what]:.2f}"]
        for what, pattern in _patterns().items()
    ]
    return Report(
        name="select",
        tables=[
            Table(
                title=f"Globs over {NAME_COUNT:,} names",
                header=["pattern", "bytes", "names found", "median ms"],
                rows=rows,
            )
        ],
        goals=[
            Goal(
                what=f"slowest glob of at most 1 KiB over {NAME_COUNT:,} names",
                measured=1e3 * max(medians_s.values()), limit=10, unit="ms",
            )
        ],
    )  # fmt: skip


def _patterns() -> dict[str, str]:
    draw = random.Random(0)
    return {
        "one name": "layers.77.block.3.weight",
        "one layer": "layers.77.*",
        "every weight": "*.weight",
        "every name": "*",
        "nothing": "no.such.name.*",
        "stars between letters": "*a" * (PATTERN_BYTES // 2),
        "stars that nearly match": "*l*a*y*e*r*s*.*" * (PATTERN_BYTES // 15),
        "only stars": "*" * PATTERN_BYTES,
        "question marks": "?" * PATTERN_BYTES,
        "classes": "*[a-z]" * (PATTERN_BYTES // 6),
        "random": "".join(draw.choice("layers.0123*?[]!-") for _ in range(PATTERN_BYTES)),
    }


def _layout() -> Layout:
    region = Box(begin=(0,), end=(1,))
    tensors = []
    for number in range(NAME_COUNT):
        layer, rest = divmod(number, 100)
        block, kind = divmod(rest, 2)
        name = f"layers.{layer}.block.{block}.{'weight' if kind else 'bias'}"
        tensors.append(_tensor(name, number, region))
    return Layout(world_size=1, arena_bytes=(4 * NAME_COUNT,), tensors=tuple(tensors))


def _tensor(name: str, number: int, region: Box) -> TensorLayout:
    piece = Piece(rank=0, region=region, arena_begin=4 * number)
    return TensorLayout(
        fqn=name, shape=(1,), dtype="float32", kind=TensorKind.PARAMETER, pieces=(piece,)
    )
