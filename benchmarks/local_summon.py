"""`summon_full_params`: entering and leaving against PyTorch's, and the memory it takes."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import GIB, Series, run_rounds
from benchmarks.ranks import ObedientRanks
from benchmarks.report import Goal, Report, Table

WORLD_SIZE = 2
LAYERS = 16
FLAGS: dict[str, dict[str, bool]] = {
    "rank0_only": {"writeback": False, "rank0_only": True},
    "writeback": {"writeback": True},
    "rank0_only, offload_to_cpu": {
        "writeback": False, "rank0_only": True, "offload_to_cpu": True,
    },
    "rank0_only, writeback": {"writeback": True, "rank0_only": True},
}  # fmt: skip
TORCH_WORKS = ("rank0_only", "writeback")
"""On the CPU it fails to offload, and it refuses the last."""
KINDS = ("nested", "flat", "fsdp2")


def run(*, quick: bool) -> Report:
    """Every kind in processes of its own; the contenders take turns in shuffled order."""
    width = 1024 if quick else 4096
    rounds = 3 if quick else 7
    rows, goals, numbers = [], [], {}
    for kind in KINDS:
        with ObedientRanks("benchmarks.workers.local_summon", WORLD_SIZE) as ranks:
            shard_bytes: list[int] = ranks.call("build", kind, width, LAYERS)
            series, memory = _measured(ranks, kind, rounds)
        size_bytes = 4 * width * width * LAYERS
        rows += _rows(kind, series, memory, size_bytes)
        goals += _goals(kind, series, memory, shard_bytes, size_bytes, width)
        numbers[kind] = {
            name: {"seconds": found.seconds, "taken_bytes": memory[name]}
            for name, found in series.items()
        }
    header = [
        "model",
        "flags",
        "by",
        "s",
        "fastest, slowest",
        "rank 0 takes MiB",
        "others take MiB",
    ]
    title = f"Enter and leave, {size_bytes / GIB:.3g} GiB of float32 over {WORLD_SIZE} ranks"
    return Report(
        name="local_summon",
        tables=[Table(title=title, header=header, rows=rows)],
        goals=goals,
        numbers=numbers,
    )


def _measured(
    ranks: ObedientRanks, kind: str, rounds: int
) -> tuple[dict[str, Series], dict[str, list[float]]]:
    taken: dict[str, list[list[float]]] = {}

    def contender(name: str, by: str, flags: dict[str, bool]) -> float:
        answers: list[dict[str, Any]] = ranks.call("summon", by, flags, False)
        taken.setdefault(name, []).append([answer["taken_bytes"] for answer in answers])
        return float(max(answer["seconds"] for answer in answers))

    contenders = {
        f"{what}|{by}": (lambda w=what, b=by, f=flags: contender(f"{w}|{b}", b, f))
        for what, flags in FLAGS.items()
        for by in ("torch", "paramd")
        if by == "paramd" or (what in TORCH_WORKS and kind != "fsdp2")
    }
    series = run_rounds(contenders, rounds=rounds, warm_ups=1, watched=lambda: ranks.pids)
    memory = {
        name: [max(column) for column in zip(*found, strict=True)] for name, found in taken.items()
    }
    return series, memory


def _rows(
    kind: str, series: dict[str, Series], memory: dict[str, list[float]], size_bytes: int
) -> list[list[str]]:
    rows = []
    for name, found in series.items():
        what, by = name.split("|")
        fastest, slowest = found.spread_s
        first, *others = (f"{taken / (1 << 20):.0f}" for taken in memory[name])
        rows.append(
            [
                kind,
                what,
                by,
                f"{found.seconds:.3f}",
                f"{fastest:.3f}, {slowest:.3f}",
                first,
                *others,
            ]
        )
    return rows


def _goals(
    kind: str,
    series: dict[str, Series],
    memory: dict[str, list[float]],
    shard_bytes: list[int],
    size_bytes: int,
    width: int,
) -> list[Goal]:
    goals = []
    for what in TORCH_WORKS:
        if f"{what}|torch" in series:
            ratio = series[f"{what}|paramd"].seconds / series[f"{what}|torch"].seconds
            goals.append(
                Goal(what=f"{kind}, {what}: time against PyTorch's", measured=ratio, limit=1.0)
            )
    offloaded = memory["rank0_only, offload_to_cpu|paramd"]
    others = max(taken / shard for taken, shard in zip(offloaded[1:], shard_bytes[1:], strict=True))
    goals.append(
        Goal(
            what=f"{kind}, rank0_only, offload_to_cpu: others above their shards",
            measured=100 * others, limit=5.0, unit="%",
        )
    )  # fmt: skip
    goals.append(
        Goal(
            what=f"{kind}, rank0_only, offload_to_cpu: rank 0 above its shards",
            measured=offloaded[0] / (1 << 20),
            limit=(size_bytes + 4 * width * width) / (1 << 20), unit="MiB",
        )
    )  # fmt: skip
    return goals
