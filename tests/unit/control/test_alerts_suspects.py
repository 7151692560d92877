"""Which edits an alert may come from: applied, of its tensors, a few samples before, of values."""

from dataclasses import replace
from typing import Any

import pytest

from paramd.layout.edits.ops import EditState
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.alerts.book import Book, Finding, Severity
from paramd_service.alerts.config import Rule
from paramd_service.alerts.courses import Courses, Sampled
from paramd_service.alerts.numbers import WINDOW, NumberHistory
from paramd_service.alerts.suspects import UNKNOWN_S, Changes, onset_of
from paramd_service.control.store.edits import EditRow

NOW_S = 1000.0
FINDING = Finding(
    rule=Rule.NORM_JUMP, subject="norms", severity=Severity.WARNING, reason="w1 jumped",
    fqn="w1", others=("w2",), step=140, onset=(110, 140),
)  # fmt: skip


def edit(
    edit_id: str = "e1", *, step: int = 130, names: tuple[str, ...] = ("w1",), **given: Any
) -> EditRow:
    op = {
        "pattern": "w*",
        "op": "mul",
        "value": 0.5,
        "names": list(names),
        "name_count": len(names),
    }
    manifest = pb.EditManifest(ops=[pb.EditOp(fqn=name) for name in names])
    row = EditRow(
        id=edit_id, job="job", incarnation=1, state=EditState.APPLIED, actor="ann", role="editor",
        created_s=NOW_S - 5, ended_s=NOW_S - 5, step=step, edits=step, digest="",
        manifest=manifest.SerializeToString(), detail={"ops": [op] if names else []},
    )  # fmt: skip
    return replace(row, **given)


def suspect_among(*rows: EditRow, finding: Finding = FINDING) -> str:
    changes = Changes(1)
    changes.add(rows)
    found = changes.suspect(finding, NOW_S)
    return found.edit if found is not None else ""


def test_an_applied_edit_of_its_tensor_a_few_samples_before_is_suspected_without_its_values() -> (
    None
):
    changes = Changes(1)
    changes.add([edit()])
    found = changes.suspect(FINDING, NOW_S)
    assert found is not None
    assert (found.edit, found.actor, found.step, found.steps_before) == ("e1", "ann", 130, 10)
    assert found.text == "mul w*, by ann, applied 10 steps before"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (edit(state=EditState.ABORTED, step=-1), "a dry run changes nothing"),
        (edit(state=EditState.COMMITTED, step=-1), "it is not applied yet"),
        (edit(names=("w3",)), "it is of another tensor"),
        (edit(step=100), "it came many samples before"),
        (edit(step=141), "it came after the first sample that shows it"),
        (edit(incarnation=0), "it was applied in another run"),
    ],
)
def test_no_other_edit_is_suspected(row: EditRow, why: str) -> None:
    assert suspect_among(row) == "", why


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule not in (
    Rule.NON_FINITE, Rule.NORM_JUMP, Rule.GRADIENT_JUMP, Rule.LOGGED_NUMBER)])  # fmt: skip
def test_no_edit_is_suspected_of_what_is_no_value(rule: Rule) -> None:
    assert suspect_among(edit(), finding=replace(FINDING, rule=rule, fqn="")) == ""


def test_an_edit_of_a_tensor_that_the_finding_only_lists_is_suspected_too() -> None:
    assert suspect_among(edit(names=("w2",))) == "e1"


def test_a_learning_rate_concerns_every_tensor() -> None:
    change = {"optimizer": 0, "group": 1, "values": {"lr": 0.1}}
    row = edit(names=(), detail={"hyperparameters": change})
    changes = Changes(1)
    changes.add([row])
    found = changes.suspect(FINDING, NOW_S)
    assert found is not None
    assert found.what == "optimizer 0 group 1: lr=0.1"


def test_what_was_undone_before_is_not_suspected_and_its_undo_is() -> None:
    undo = edit("e2", step=135, undo_of="e1")
    assert suspect_among(edit(), undo) == "e2"
    redone = edit("e3", step=136, undo_of="e2")
    assert suspect_among(edit(), undo, redone) == "e3"
    assert suspect_among(edit(), edit("e2", step=150, undo_of="e1")) == "e1"


def test_where_few_samples_are_known_only_edits_of_the_last_minutes_are_suspected() -> None:
    finding = replace(FINDING, onset=(-1, 140))
    assert suspect_among(edit(step=3), finding=finding) == "e1"
    old = edit(step=3, ended_s=NOW_S - UNKNOWN_S - 1)
    assert suspect_among(old, finding=finding) == ""


def test_an_alert_keeps_the_suspect_of_its_first_finding() -> None:
    changes = Changes(1)
    changes.add([edit()])
    book = Book(job="job", incarnation=1, suspect=changes.suspect)
    (alert,) = book.observe([FINDING], covered=lambda _: True, now_s=NOW_S)
    changes.add([edit("e2", step=139)])
    book.observe([FINDING], covered=lambda _: True, now_s=NOW_S + 1)
    assert [one.suspect for one in book.firing] == [alert.suspect]
    assert alert.suspect is not None
    assert alert.suspect.edit == "e1"


def test_the_cause_of_a_finding_lies_a_few_samples_before_the_first_that_shows_it() -> None:
    assert onset_of([10, 20, 30, 40, 50], 50) == (20, 50)
    assert onset_of([40, 50], 50) == (-1, 50)
    # After a rollback to 25 steps come again.
    assert onset_of([10, 20, 22, 50, 30], 30) == (10, 30)


def test_a_gradient_that_explodes_is_put_down_to_what_came_before_its_first_odd_sample() -> None:
    courses = Courses()
    for step in range(0, 100, 10):
        courses.take([Sampled(fqn="w1", norm=1.0)], step)
    found = [courses.take([Sampled(fqn="w1", norm=1e3)], step) for step in (100, 110, 120)]
    assert found[:2] == [[], []]
    ((finding,),) = found[2:]
    assert finding.onset == (70, 100)
    assert suspect_among(edit(step=99), edit("e2", step=101), finding=finding) == "e1"


def test_a_logged_number_is_put_down_to_what_came_within_its_last_values() -> None:
    numbers = NumberHistory([])
    numbers.judge(0, "loss", [(step, 1.0) for step in range(100)])
    (finding,) = numbers.judge(0, "loss", [(100, float("nan"))])
    assert finding.onset == (100 - WINDOW, 100)
