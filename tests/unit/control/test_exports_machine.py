"""An export's life: which states follow which, who gets files, what a loss means."""

import asyncio
import re
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from paramd.clock import now_s
from paramd.errors import ConflictError
from paramd.layout.exports.files import ExportState
from paramd_service.exports import incarnation, machine, runner
from paramd_service.exports.machine import Export
from paramd_service.exports.store import ExportRow, File, FileState, TakenOverError

NEW = Export(files={})


def file(name: str, rank: int, size_bytes: int = 10, sources: tuple[int, ...] = ()) -> File:
    return File(name=name, rank=rank, size_bytes=size_bytes, sources=frozenset(sources))


def running(*files: File) -> Export:
    return machine.planned(NEW, incarnation=3, step=7, files=files)


def write_all(export: Export) -> Export:
    for name, one in export.files.items():
        export = machine.given(export, name, one.rank)
        export = machine.written(export, name, "00" * 16)
    return export


def test_a_life_is_told_whole_at_each_step() -> None:
    a, b = file("a", 0), file("b", 1)
    export = running(a, b)
    assert export == Export(
        state=ExportState.RUNNING, incarnation=3, step=7, files={"a": a, "b": b}
    )
    assert running().state is ExportState.VERIFYING
    export = machine.given(export, "a", 5)
    a = replace(a, rank=5, state=FileState.WRITING)
    assert export.files == {"a": a, "b": b}
    export = machine.moved(export, "a", 4)
    assert (export.files["a"], export.written_bytes, export.size_bytes) == (
        replace(a, written_bytes=4), 4, 20,
    )  # fmt: skip
    assert machine.moved(export, "a", 99).files["a"].written_bytes == 10
    assert machine.given(machine.returned(export, "a"), "a", 5).files == {"a": a, "b": b}
    export = machine.given(export, "b", 1)
    assert machine.lost(export, 5, why="x").files["b"] == export.files["b"]
    export = machine.written(export, "a", "aa")
    a = replace(a, state=FileState.WRITTEN, written_bytes=10, checksum="aa")
    assert (export.state, export.files["a"]) == (ExportState.RUNNING, a)
    for early in (lambda: machine.verified(export, "a"), lambda: machine.committed(export)):
        with pytest.raises(ConflictError, match="expected VERIFYING"):
            early()
    whole = machine.written(export, "b", "bb")
    b = whole.files["b"]
    for late in (lambda: machine.given(whole, "a", 0), lambda: machine.written(whole, "a", "")):
        with pytest.raises(ConflictError, match="expected RUNNING"):
            late()
    with pytest.raises(ConflictError, match="expected PLANNED"):
        machine.planned(whole, incarnation=3, step=7, files=[])
    read = machine.verified(whole, "a")
    assert read.files == {"a": replace(a, state=FileState.VERIFIED), "b": b}
    done = machine.committed(read, [file("index", 0)])
    files = {**read.files, "index": file("index", 0)}
    assert done == replace(read, state=ExportState.DONE, files=files)
    for end, state in (
        (machine.failed, ExportState.FAILED),
        (machine.cancelled, ExportState.CANCELLED),
    ):
        assert end(whole, "why") == replace(whole, state=state, reason="why")


def test_files_go_to_their_planned_rank_or_to_whoever_has_fewest_bytes_left() -> None:
    export = running(file("a", 0, 50), file("b", 1, 40), *(file(n, 9, 20) for n in "cdef"))
    export = machine.moved(machine.given(export, "a", 0), "a", 45)
    assert machine.next_files(export, [], per_rank=9) == []
    assert machine.next_files(export, [0, 1], per_rank=1) == [("b", 1)]
    assert machine.next_files(export, [0, 1], per_rank=9) == [
        ("b", 1), ("c", 0), ("d", 0), ("e", 1), ("f", 0),
    ]  # fmt: skip


def test_what_is_over_stays_over() -> None:
    done = machine.committed(write_all(running(file("a", 0))))
    assert machine.failed(done, "x") == machine.cancelled(done, "x") == done
    assert machine.lost(done, 0, why="x") == done
    failed = machine.failed(running(file("a", 0)), "the cause")
    assert machine.cancelled(failed, "later").reason == "the cause"
    assert machine.next_files(failed, [0], per_rank=1) == []


def test_files_of_a_lost_writer_go_to_whoever_has_least_to_do() -> None:
    export = running(
        file("a", 0, 100, (0,)), file("b", 1, 10, (0,)), file("c", 2, 10, (0,)), file("d", 2, 90)
    )
    export = machine.given(export, "d", 2)
    export = machine.lost(export, 2, why="killed")
    assert export.state is ExportState.RUNNING, "nobody needs what rank 2 had pinned"
    assert export.files["d"].state is FileState.WAITING
    assert machine.next_files(export, [0, 1], per_rank=1) == [("a", 0), ("b", 1)]
    export = machine.written(machine.given(export, "b", 1), "b", "")
    export = machine.given(export, "a", 0)
    assert machine.next_files(export, [0, 1], per_rank=2) == [("c", 1), ("d", 1)]


def test_a_lost_snapshot_ends_it_only_while_it_is_needed() -> None:
    export = running(file("a", 0, 10, (0, 1)), file("b", 1, 10, (0, 1)))
    both = machine.given(machine.given(export, "a", 0), "b", 1)
    ended = machine.lost(both, 1, why="its sidecar was killed")
    assert ended.state is ExportState.FAILED
    assert {"rank", "1", "killed"} <= set(re.findall(r"\w+", ended.reason))
    written = machine.written(both, "b", "")
    assert machine.lost(written, 1, why="x").state is ExportState.FAILED
    whole = machine.written(written, "a", "")
    assert machine.lost(whole, 1, why="x").state is ExportState.VERIFYING


def test_what_a_lost_writer_says_late_changes_nothing() -> None:
    export = machine.given(running(file("a", 0)), "a", 0)
    export = machine.lost(export, 0, why="x")
    assert machine.moved(export, "a", 9) == export
    assert machine.returned(export, "a") == export


def test_after_a_restart() -> None:
    plan = running(file("a", 0), file("b", 1))
    export = machine.written(machine.given(machine.given(plan, "a", 0), "b", 1), "a", "aa")
    found, _ = machine.after_restart(export, incarnation=3, snapshot_lives=True)
    assert found.state is ExportState.RUNNING
    states = {name: one.state for name, one in found.files.items()}
    assert states == {"a": FileState.WRITTEN, "b": FileState.WAITING}, "what was whole stays"
    found, _ = machine.after_restart(export, incarnation=3, snapshot_lives=False)
    assert (found.state, "lease" in found.reason) == (ExportState.FAILED, True)
    found, _ = machine.after_restart(export, incarnation=4, snapshot_lives=True)
    assert (found.state, "run 3" in found.reason) == (ExportState.FAILED, True)
    verifying = machine.written(export, "b", "bb")
    found, _ = machine.after_restart(verifying, incarnation=3, snapshot_lives=False)
    assert found == verifying, "the snapshot is needed no more"
    assert machine.after_restart(NEW, incarnation=9, snapshot_lives=False)[0] == NEW


async def test_a_run_waits_for_the_last_ones_queue_and_what_was_taken_over_ends_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, ended, taken = AsyncMock(), AsyncMock(), AsyncMock(side_effect=TakenOverError("by one"))
    store.unfinished.return_value = []
    monkeypatch.setattr(incarnation, "SidecarGroup", lambda _: AsyncMock())
    monkeypatch.setattr(runner, "read_spec", lambda _: MagicMock(timeout_s=60.0))
    doing: dict[str, Any] = {
        "mesh": MagicMock(),
        "place": None,
        "on_change": MagicMock(),
        "ended": ended,
    }
    queue = partial(incarnation.IncarnationExports, store=store, assets=AsyncMock(), **doing)
    last, new, now = queue(), queue(), now_s()
    fields = dict.fromkeys(("id", "job", "destination", "format", "actor"), "a")
    row = ExportRow(**fields, request={}, generation=1, created_s=now)
    monkeypatch.setattr(runner.ExportRun, "_stages", taken)
    last.add(row, [])
    await last.settled()
    assert not ended.called
    monkeypatch.setattr(runner.ExportRun, "_stages", lambda _: asyncio.Event().wait())
    last.add(row, [])
    new.start(last)
    await asyncio.gather(last.end("over"), new.settled())
    assert [call[0] for call in store.mock_calls] == ["save", "unfinished"]
