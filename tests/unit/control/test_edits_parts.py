"""Planning, limits, and a driver whose store fails."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from paramd.errors import NotFoundError, UsageError
from paramd.layout.edits.ops import OpSpec
from paramd.layout.select import NameIndex
from paramd.layout.stats import Stats
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.edits.calls import in_effect
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.access.authority import Principal
from paramd_service.control.access.roles import UserRole
from paramd_service.control.store.edits import EditRow
from paramd_service.control.store.engine import StoreError
from paramd_service.edits import service
from paramd_service.edits.incarnation import IncarnationEdits
from paramd_service.edits.machine import Commit, EditMachine, IncarnationEnded, Staged
from paramd_service.edits.runner import EditRun
from paramd_service.edits.spec import (
    EditConfig,
    EditSpec,
    merged,
    ops_of,
    plan_edit,
    replicas_text,
    same_data,
)
from tests.unit.control.reports import mesh

ID = "0" * 32
ROW: Any = dict.fromkeys(("job", "actor", "role"), "a") | {
    "incarnation": 1, "state": "STAGING", "created_s": 0.0, "manifest": b"", "digest": "6d",
}  # fmt: skip


def layout() -> Layout:
    """Two ranks: one replicated vector, one sharded matrix, one buffer."""
    whole = tuple(Piece(rank, 0, Box((0,), (4,))) for rank in (0, 1))
    halves = Piece(0, 64, Box((0, 0), (2, 2))), Piece(1, 64, Box((2, 0), (4, 2)))
    count = (Piece(0, 128, Box((), ())),)
    tensors = (
        TensorLayout("bias", "float32", (4,), TensorKind.PARAMETER, whole),
        TensorLayout("weight", "float32", (4, 2), TensorKind.PARAMETER, halves),
        TensorLayout("count", "int64", (), TensorKind.BUFFER, count),
    )
    return Layout(2, (256, 256), tensors)


def plan(*words: OpSpec, **fields: Any) -> Any:
    spec = EditSpec(ops=words, **fields)
    return plan_edit(NameIndex(layout()), spec, edit_id=ID, incarnation=1, layout_digest="d")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (OpSpec(pattern="nothing", op="fill", value=0.0), NotFoundError),
        (OpSpec(pattern="count", op="fill", value=0.0), UsageError),
        (OpSpec(pattern="bias", op="fill", value=float("nan")), UsageError),
        (OpSpec(pattern="bias", op="eval"), UsageError),
    ],
)
def test_what_does_not_fit_is_refused(words: OpSpec, error: type[Exception]) -> None:
    with pytest.raises(error):
        plan(words)


@pytest.mark.parametrize("depth", range(7))
def test_an_edit_is_in_effect_after_an_even_number_of_undos_of_undos(depth: int) -> None:
    chain = [
        EditRow(
            **{**ROW, "state": "APPLIED"},
            id=f"{number}",
            boundary=2 * number,
            undo_of=f"{number - 1}" if number else "",
            undone_by=f"{number + 1}" if number < depth else "",
        )
        for number in range(depth + 1)
    ]
    other = replace(chain[0], id="other", boundary=3, undone_by="")
    of_an_earlier_one = replace(chain[0], id="undo", boundary=1, undo_of="before", undone_by="")
    found = in_effect([*chain, other, of_an_earlier_one])
    pairs = [(first.id, last.id) for first, last in found]
    left = [("0", f"{depth}")] * (depth % 2 == 0)
    assert sorted(pairs) == sorted([*left, ("other", "other"), ("undo", "undo")])
    boundaries = [last.boundary for _, last in found]
    assert boundaries == sorted(boundaries, reverse=True)


def test_replicas_must_have_the_same_data_and_shards_need_not() -> None:
    index = NameIndex(layout())
    done = plan(*(OpSpec(pattern=name, op="set", data=True) for name in ("bias", "weight")))
    check = same_data(index, ops_of(index, done.manifest))
    assert check({0: (b"a", b"x"), 1: (b"a", b"y")}) == ""
    assert "'bias'" in check({0: (b"a", b"x"), 1: (b"b", b"x")})


async def test_before_a_commit_data_is_checked_and_numbers_of_a_preview_are_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = NameIndex(layout())
    done = plan(OpSpec(pattern="bias", op="set", data=True)).manifest

    async def found(*_: object, **__: object) -> Any:
        return index, ""

    monkeypatch.setattr(service, "verify_staged", found)
    detail = {"before": {"mean": 1.0}, "after": {"mean": 2.0}}
    row = SimpleNamespace(
        undo_of="", manifest=done.SerializeToString(), detail=detail, size_bytes=9
    )
    driver: Any = SimpleNamespace(row=row, machine=SimpleNamespace(same_data=None))
    driver.describe = lambda **more: detail.update(more)
    whole: Any = SimpleNamespace(_layout=found, config=EditConfig(range_bytes=8), mesh=MagicMock())
    _, ops = await service.EditService._verified(whole, driver)
    assert "'bias'" in driver.machine.same_data({0: (b"a",), 1: (b"b",)})
    await IncarnationEdits._ranges(whole, driver, index, ops)
    assert detail == {"before": None, "after": None}, "too large to be taken in time"


async def test_an_edit_that_is_created_while_its_run_ends_ends_with_it() -> None:
    planned, fed = plan(OpSpec(pattern="bias", op="fill", value=1.0)), []
    driver = SimpleNamespace(feed=fed.append, is_idle=False)
    whole: Any = MagicMock(_creating=asyncio.Lock(), mesh=MagicMock(number=3, over="over", job="j"))
    whole.work = SimpleNamespace(open={}, drive=lambda *_: driver)
    whole.records.edits = MagicMock(
        find=AsyncMock(return_value=None), add=AsyncMock(return_value=7)
    )
    by = Principal("me", UserRole.EDITOR)
    row = await service.EditService._begun(whole, by, planned, NameIndex(layout()), "", {})
    assert (row.number, fed) == (7, [IncarnationEnded("run 3 ended")])


def test_statistics_count_replicas_once() -> None:
    index = NameIndex(layout())
    ops = ops_of(index, plan(OpSpec(pattern="*", op="mul", value=2.0)).manifest)
    one = Stats(count=4, mean=1.0, sum_squares=4.0, min=1.0, max=1.0)
    found = merged(index, ops, {0: [one, one], 1: [one, one]})
    assert found is not None
    # bias once, both halves of weight.
    assert found["norm"] == pytest.approx((3 * 4.0) ** 0.5)
    assert found["mean"] == 1.0
    assert replicas_text(index, ops, {0: [one, one], 1: [one, one._replace(max=2.0)]}) == ""
    told = replicas_text(index, ops, {0: [one, one], 1: [one._replace(max=2.0), one]})
    assert "replicas of 'bias' on ranks 0, 1 had different values" in told


class Calls:
    """Sidecars that nobody may reach."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def reach(self, *_: object) -> Any:
        self.asked.append("reach")

    async def ask(self, rank: int, address: str, request: object) -> Any:
        self.asked.append(type(request).__name__)
        return pb.WithdrawBoundaryResponse(fate=pb.BOUNDARY_FATE_WITHDRAWN)


async def committed(
    calls: Calls, save: Callable[[EditRow], Awaitable[None]], told: list[str]
) -> EditRow:
    """How an edit of two ranks ends that both have staged, and that is committed."""
    driver = EditRun(
        EditMachine(world_size=2, manifest_digest=b"m"),
        EditRow(**ROW, id=ID),
        calls=calls,  # type: ignore[arg-type]
        view=lambda: mesh(0, 1),
        save=save,
        on_change=lambda row: told.append(row.state),
    )
    for event in (Staged(0, b"m"), Staged(1, b"m"), Commit(1, 5)):
        driver.feed(event)
    ended = await asyncio.wait_for(driver.until(), 60)
    await driver.finish()
    return ended


async def test_a_commit_that_cannot_be_saved_reaches_nobody_and_is_aborted() -> None:
    calls, saved, told = Calls(), [], list[str]()

    async def save(row: EditRow) -> None:
        if row.state == "COMMITTED":
            raise StoreError("the disk is full")
        saved.append(row.state)

    ended = await committed(calls, save, told)
    assert (ended.state, saved) == ("ABORTED", ["ABORTED"])
    assert told == ["STAGED", "ABORTED"]
    assert "reach" not in calls.asked


async def test_a_fault_of_ours_on_the_way_to_a_rank_calls_the_edit_off() -> None:
    class Broken(Calls):
        async def reach(self, *_: object) -> Any:
            raise RuntimeError("a bug")

    async def save(row: EditRow) -> None:
        pass

    calls = Broken()
    ended = await committed(calls, save, [])
    assert ended.state == "ABORTED"
    assert "a fault of paramd" in ended.reason
    assert "WithdrawBoundaryRequest" in calls.asked
