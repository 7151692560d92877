"""Which exports lie on the way to the present state, after rollbacks and their undos."""

import pytest

from paramd.memory.edit_program import branch_of
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.store.edits import EditRow
from paramd_service.exports.documents import named_anew
from paramd_service.exports.histories import is_on_the_way

FIRST = 77
"""Lineage at the beginning of the incarnation, which no rollback began."""


def back(number: int, step: int, lineage: int = FIRST, *, undo_of: str = "") -> EditRow:
    """The `number`th edit, which put the training back to a step of a lineage."""
    manifest = pb.EditManifest(rollback=pb.Rollback(step=step, lineage=lineage))
    return EditRow(
        id=f"r{number}", job="run", incarnation=1, state="APPLIED", actor="ops", role="admin",
        created_s=1.0, digest="", edits=number, token=1000 + number, undo_of=undo_of,
        manifest=manifest.SerializeToString(),
    )  # fmt: skip


def after(number: int) -> int:
    """Lineage that the `number`th edit began."""
    return branch_of(1000 + number)


@pytest.mark.parametrize(
    ("rollbacks", "states"),
    [
        ([], {(7, 0): True}),
        ([back(1, 5)], {(5, 0): True, (7, 0): False, (7, 1): True, (900, 1): True}),
        # Twice to the same mark: what was made in between is left, too.
        ([back(1, 5), back(2, 5)], {(4, 0): True, (6, 1): False, (6, 2): True}),
        # To a mark of the branch.
        ([back(1, 5), back(2, 7, after(1))], {(5, 0): True, (7, 1): True, (8, 1): False}),
        # Back to the history that had been left.
        ([back(1, 5), back(2, 9)], {(9, 0): True, (10, 0): False, (6, 1): False}),
        # An undone rollback: as if it had not been, but for what was made within it.
        (
            [back(1, 5), back(2, 5, undo_of="r1")],
            {(5, 0): True, (10, 0): True, (6, 1): False, (11, 2): True},
        ),
        # A mark that was made after an undo is of the first lineage.
        (
            [back(1, 5), back(2, 5, undo_of="r1"), back(3, 12)],
            {(10, 0): True, (6, 1): False, (12, 2): True, (13, 2): False, (13, 3): True},
        ),
        # An edit of elements between counts, but begins no history.
        ([back(3, 5)], {(7, 2): False, (7, 3): True}),
    ],
)
def test_what_a_rollback_left_is_not_on_the_way(
    rollbacks: list[EditRow], states: dict[tuple[int, int], bool]
) -> None:
    assert {state: is_on_the_way(*state, rollbacks) for state in states} == states


def test_a_step_that_comes_again_has_a_key_of_its_own() -> None:
    taken: set[str] = set()
    for expected in ("d/step-7", "d/step-7-2", "d/step-7-3"):
        named = named_anew("d/step-{step}", incarnation=1, step=7, taken=taken)
        assert named == expected
        taken.add(named)
    assert named_anew("d/all", incarnation=1, step=7, taken={"d/all"}) == "d/all"
