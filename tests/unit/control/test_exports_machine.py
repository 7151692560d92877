"""An export's life: which states follow which, who gets files, what a loss means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paramd.errors import ConflictError
from paramd.layout.exports.files import ExportState
from paramd_service.control.exports import machine
from paramd_service.control.exports.machine import Export
from paramd_service.control.store.exports import File, FileState

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


def test_the_whole_way_to_done() -> None:
    export = running(file("a", 0), file("b", 1))
    assert (export.state, export.incarnation, export.step) == (ExportState.RUNNING, 3, 7)
    assert machine.next_files(export, [0, 1], per_rank=1) == [("a", 0), ("b", 1)]
    export = machine.given(export, "a", 0)
    export = machine.moved(export, "a", 4)
    assert (export.written_bytes, export.size_bytes) == (4, 20)
    export = machine.written(export, "a", "aa" * 16)
    assert export.state is ExportState.RUNNING
    export = machine.written(machine.given(export, "b", 1), "b", "bb" * 16)
    assert export.state is ExportState.VERIFYING
    export = machine.verified(machine.verified(export, "a"), "b")
    export = machine.committed(export, [file("index", 0, 3)])
    assert export.state is ExportState.DONE
    assert list(export.files) == ["a", "b", "index"]


def test_what_is_over_stays_over() -> None:
    done = machine.committed(write_all(running(file("a", 0))))
    for end in (
        machine.failed(done, "x"),
        machine.cancelled(done, "x"),
        machine.lost(done, 0, why="x"),
    ):
        assert end == done
    failed = machine.failed(running(file("a", 0)), "the cause")
    assert machine.cancelled(failed, "later").reason == "the cause"
    assert machine.next_files(failed, [0], per_rank=1) == []


@pytest.mark.parametrize("step", ["planned", "given", "written", "verified", "committed"])
def test_an_event_out_of_its_state_is_refused(step: str) -> None:
    plain = running(file("a", 0))
    calls = {
        "planned": lambda: machine.planned(plain, incarnation=1, step=1, files=[]),
        "given": lambda: machine.given(machine.given(plain, "a", 0), "a", 0),
        "written": lambda: machine.written(write_all(plain), "a", ""),
        "verified": lambda: machine.verified(plain, "a"),
        "committed": lambda: machine.committed(plain),
    }
    with pytest.raises(ConflictError):
        calls[step]()


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
    assert "rank 1" in ended.reason
    assert "killed" in ended.reason
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
    assert found.state is ExportState.FAILED
    assert "lease" in found.reason
    found, _ = machine.after_restart(export, incarnation=4, snapshot_lives=True)
    assert found.state is ExportState.FAILED
    assert "incarnation 3" in found.reason
    verifying = machine.written(export, "b", "bb")
    found, _ = machine.after_restart(verifying, incarnation=3, snapshot_lives=False)
    assert found == verifying, "the snapshot is needed no more"
    assert machine.after_restart(NEW, incarnation=9, snapshot_lives=False)[0] == NEW


def test_a_file_of_a_rank_that_is_not_there_is_given_to_another() -> None:
    export = running(file("a", 5), replace(file("b", 0), size_bytes=1))
    assert machine.next_files(export, [0, 1], per_rank=1) == [("a", 1), ("b", 0)]
    assert machine.next_files(export, [], per_rank=1) == []


def test_every_event_changes_what_it_is_about_and_nothing_else() -> None:
    begun = running(file("a", 0, 10, (0,)), file("b", 1, 20, (0,)))
    other = begun.files["b"]
    given = machine.given(begun, "a", 4)
    one = given.files["a"]
    assert (one.rank, one.state, one.written_bytes) == (4, FileState.WRITING, 0)
    moved = machine.moved(given, "a", 6)
    assert moved.files["a"] == replace(one, written_bytes=6)
    assert machine.moved(given, "a", 99).files["a"].written_bytes == 10
    back = machine.returned(moved, "a")
    assert back.files["a"] == replace(one, state=FileState.WAITING)
    lost = machine.lost(moved, 4, why="x")
    assert lost == back, "what a lost rank had written of it counts no more"
    written = machine.written(moved, "a", "aa")
    whole = replace(one, state=FileState.WRITTEN, written_bytes=10, checksum="aa")
    assert written.files["a"] == whole
    assert {found.files["b"] for found in (given, moved, back, lost, written)} == {other}
    verifying = machine.written(machine.given(written, "b", 1), "b", "bb")
    verified = machine.verified(verifying, "a")
    assert verified.files["a"] == replace(whole, state=FileState.VERIFIED)
    assert verified.files["b"] == verifying.files["b"]


@pytest.mark.parametrize("state", [ExportState.PLANNED, ExportState.RUNNING, ExportState.VERIFYING])
def test_what_goes_on_can_be_cancelled_and_fail(state: ExportState) -> None:
    export = replace(running(file("a", 0)), state=state)
    assert machine.cancelled(export, "by alice") == replace(
        export, state=ExportState.CANCELLED, reason="by alice"
    )
    assert machine.failed(export, "no disk") == replace(
        export, state=ExportState.FAILED, reason="no disk"
    )


def test_an_export_of_no_files_has_nothing_to_write() -> None:
    assert running().state is ExportState.VERIFYING


def test_what_is_taken_over_says_why() -> None:
    export = machine.moved(machine.given(running(file("a", 0)), "a", 0), "a", 4)
    found, why = machine.after_restart(export, incarnation=3, snapshot_lives=True)
    assert (found, why) == (machine.returned(export, "a"), "the snapshot is still leased")
    found, why = machine.after_restart(export, incarnation=4, snapshot_lives=True)
    assert (found.reason, why) == (f"{why}; export again", "incarnation 3 of the job has ended")
    found, why = machine.after_restart(export, incarnation=3, snapshot_lives=False)
    assert why == "the control plane was down for longer than the snapshot's lease"
    assert found == machine.failed(export, f"{why}; export again")
    for ended, told in (
        (NEW, "nothing was pinned yet"),
        (write_all(running(file("a", 0))), "all files are written"),
        (machine.failed(export, "x"), "it has ended"),
    ):
        assert machine.after_restart(ended, incarnation=3, snapshot_lives=False) == (ended, told)


def test_files_without_a_writer_go_where_fewest_bytes_wait() -> None:
    export = running(
        *(file("a", 0, 100), file("b", 0, 50), file("c", 1, 100), file("d", 1, 60)),
        *(file("x", 9, 25), file("y", 9, 20), file("z", 9, 1)),
    )
    export = machine.moved(machine.given(export, "a", 0), "a", 90)
    # Rank 0 has 60 bytes before it, rank 1 160: it gets x, y and z, until that is no longer less.
    assert machine.next_files(export, [0, 1], per_rank=9) == [
        *(("b", 0), ("c", 1), ("d", 1), ("x", 0), ("y", 0), ("z", 0)),
    ]
    assert machine.next_files(export, [0, 1], per_rank=2) == [("b", 0), ("c", 1), ("d", 1)]
    small = running(file("a", 0, 30), file("x", 9, 40), file("y", 9, 5), file("z", 9, 5))
    assert machine.next_files(small, [0, 1], per_rank=9)[1:] == [("x", 1), ("y", 0), ("z", 0)]
    # At the same time one rank writes no more files than it may.
    twice = machine.given(machine.given(export, "c", 1), "d", 1)
    assert machine.next_files(twice, [0, 1], per_rank=2) == [("b", 0)]
