"""Which snapshots are of one update, before it is made again."""

import pytest

from paramd.errors import AbortedError, UsageError
from paramd.memory.control_page import Changed, Changes
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.snapshots.store import Key, Snapshot
from paramd_service.sidecar.statistics.replay import (
    CHANGED_AFTER,
    CHANGED_BEFORE,
    FEW,
    OTHER_INPUTS,
    without_the_scripts,
)
from paramd_service.statistics.sidecar import ReplaySnapshots, _check, changes_around

SPANS = ((0, 64),)


def captured() -> dict[str, Snapshot]:
    """Of the update from step 4 to 5, in history 2, after 3 edits."""

    def one(step: int, source: int = 0, key: str = "", spans: object = SPANS) -> Snapshot:
        found = Snapshot(Key(1, spans, source, key), at_boundary=False)  # type: ignore[arg-type]
        found.step, found.history, found.edits, found.iteration = step, 2, 3, 10 * step
        return found

    moments = pb.SOURCE_MOMENTS
    found = {
        "before": one(4),
        "state before": one(4, moments, "exp_avg"),
        "after": one(5),
        "state after": one(5, moments, "exp_avg"),
        "gradients": one(5, pb.SOURCE_GRADIENTS),
        "facts": one(4, moments, "any", ()),
    }
    found["gradients"].edits, found["facts"].optimizer = -1, b"facts"
    return found


def check(found: dict[str, Snapshot]) -> None:
    _check(
        ReplaySnapshots(
            before={"": found["before"], "exp_avg": found["state before"]},
            after={"": found["after"], "exp_avg": found["state after"]},
            gradients=found["gradients"],
            facts=found["facts"],
        )
    )


def test_what_was_captured_of_one_update_is_taken() -> None:
    check(captured())


@pytest.mark.parametrize("which", captured())
@pytest.mark.parametrize("what", ["history", "edits", "iteration"])
def test_another_history_edit_or_accumulation_is_captured_again(which: str, what: str) -> None:
    found = captured()
    if (which, what) == ("gradients", "edits"):
        pytest.skip("an edit leaves gradients as they are")
    setattr(found[which], what, getattr(found[which], what) + 1)
    with pytest.raises(AbortedError, match="try again"):
        check(found)


@pytest.mark.parametrize("which", captured())
def test_another_step_is_a_mistake_of_the_caller(which: str) -> None:
    found = captured()
    found[which].step += 1
    with pytest.raises(UsageError, match="expected"):
        check(found)


FEW_DIFFER, MANY_DIFFER = 3, FEW + 1


@pytest.mark.parametrize(
    ("changes", "count", "key", "refused"),
    [
        (Changes(), MANY_DIFFER, "", ""),
        (Changes(after=Changed.WRITTEN), FEW_DIFFER, "", CHANGED_AFTER),
        # An optimizer does not read what is changed after it.
        (Changes(after=Changed.WRITTEN), MANY_DIFFER, "exp_avg", ""),
        (Changes(after=Changed.SAMPLES), MANY_DIFFER, "", CHANGED_AFTER),
        # A flipped bit may hit a sample.
        (Changes(after=Changed.SAMPLES), FEW_DIFFER, "", ""),
        (Changes(before=Changed.WRITTEN), FEW_DIFFER, "exp_avg", CHANGED_BEFORE),
        (Changes(before=Changed.SAMPLES), FEW_DIFFER, "", ""),
        (Changes(resting=Changed.SAMPLES), MANY_DIFFER, "", CHANGED_BEFORE),
        (Changes(before=Changed.INPUTS), FEW_DIFFER, "", OTHER_INPUTS),
        (Changes(before=Changed.INPUTS), MANY_DIFFER, "exp_avg", OTHER_INPUTS),
        (Changes(after=Changed.INPUTS), FEW_DIFFER, "exp_avg", CHANGED_AFTER),
        (Changes(after=Changed.INPUTS), FEW_DIFFER, "", ""),
    ],
)
def test_what_differs_is_no_damage_where_the_script_may_have_changed_it(
    changes: Changes, count: int, key: str, refused: str
) -> None:
    rows = [
        pb.ReplayedTensor(arena_begin=8, state_key=key, numel=100, differing_count=count),
        pb.ReplayedTensor(arena_begin=16, numel=100),
    ]
    found, whole = without_the_scripts(rows, changes)
    assert (found.refused, found.differing_count) == (refused, 0 if refused else count)
    assert whole == rows[1]


def test_what_a_state_lacks_that_was_copied_at_rest_counts_for_it_alone() -> None:
    found = captured()
    found["after"].changes = Changes(resting=Changed.WRITTEN)
    snapshots = ReplaySnapshots(
        before={"": found["before"]}, after={"": found["after"]},
        gradients=found["gradients"], facts=found["facts"],
    )  # fmt: skip
    assert changes_around(snapshots) == Changes()
    found["before"].unsettled = True
    assert changes_around(snapshots) == Changes(resting=Changed.WRITTEN)
