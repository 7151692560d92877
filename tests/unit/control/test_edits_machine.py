"""What an edit's machine concludes from single answers; histories are searched in tests/model."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from paramd_service.edits.machine import (
    Action,
    Applied,
    CallOff,
    Commit,
    EditMachine,
    EditState,
    Event,
    Forget,
    IncarnationEnded,
    NotReached,
    Outcome,
    Persist,
    Reach,
    Reached,
    Reported,
    Restarted,
    Show,
    Shown,
    Staged,
    Unreported,
    Withdraw,
)

GOOD = Applied(boundary=7, token=70, step=5, edits=1, manifest_digest=b"m", stop_ns=3)


def machine(**fields: object) -> EditMachine:
    return EditMachine(world_size=2, manifest_digest=b"m", **fields)  # type: ignore[arg-type]


def committed(**fields: object) -> EditMachine:
    found = machine(**fields)
    for rank in range(2):
        found.handle(Staged(rank, b"m", (b"d",)))
    assert found.handle(Commit(7, 70)) == [Persist(), Reach(0), Reach(1)]
    return found


def test_it_is_applied_once_every_rank_has_shown_the_same() -> None:
    found = committed()
    assert found.handle(Reached(0)) == [Show(0)]
    assert found.handle(Shown(0, GOOD)) == []
    assert found.state is EditState.COMMITTED
    assert found.handle(Reached(1)) == [Show(1)]
    assert found.handle(Shown(1, replace(GOOD, stop_ns=9))) == [Persist()]
    assert (found.state, found.step, found.edits, found.stop_ns) == (EditState.APPLIED, 5, 1, 9)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"token": 71}, "something else"),
        ({"boundary": 8}, "something else"),
        ({"manifest_digest": b"x"}, "something else"),
        ({"step": 6}, "different steps"),
        ({"edits": 2}, "different steps"),
        ({"data_digests": (b"x",)}, "replicas differ"),
    ],
)
def test_it_is_never_applied_when_ranks_show_different_things(
    changed: dict[str, object], why: str
) -> None:
    def same(digests: Mapping[int, tuple[bytes, ...]]) -> str:
        return "" if len(set(digests.values())) < 2 else "replicas differ"

    found = committed(same_data=same)
    found.handle(Shown(0, GOOD))
    assert found.handle(Shown(1, replace(GOOD, **changed))) == [Persist()]  # type: ignore[arg-type]
    assert found.state is EditState.LOST
    assert why in found.reason


def test_nothing_is_staged_while_replicas_were_sent_different_data() -> None:
    found = machine(same_data=lambda digests: "ranks 0, 1 differ")
    found.handle(Staged(0, b"m"))
    assert found.handle(Staged(1, b"m")) == [Persist(), Forget(0), Forget(1)]
    assert (found.state, found.reason) == (EditState.ABORTED, "ranks 0, 1 differ")


def test_the_token_is_made_of_all_data_in_the_order_of_ranks() -> None:
    found = machine()
    found.handle(Staged(1, b"m", (b"y", b"z")))
    found.handle(Staged(0, b"m", (b"x",)))
    assert found.data_digests == [b"x", b"y", b"z"]


BOTH = [Withdraw(0), Withdraw(1)]
OVER = [Persist(), Forget(0), Forget(1)]
LATER = [Withdraw(1, later=True)]


@pytest.mark.parametrize(
    ("before", "event", "actions", "state", "why"),
    [
        # Nobody is known to have agreed: called off, once.
        ([], CallOff("no"), BOTH, "COMMITTED", "no"),
        ([], NotReached(1, "away"), BOTH, "COMMITTED", "away"),
        (
            [], Restarted(), BOTH, "COMMITTED",
            "the control plane was restarted before it was agreed",
        ),
        ([CallOff("no")], NotReached(1, "away"), [], "COMMITTED", "no"),
        ([CallOff("no")], Reported(1, Outcome.WITHDRAWN), OVER, "ABORTED", "no"),
        # Somebody has: those who did not are asked until they have applied it.
        ([Reached(0)], CallOff("no"), [], "COMMITTED", ""),
        ([Reached(0)], NotReached(1, "away"), [Withdraw(1)], "COMMITTED", ""),
        ([Reported(0, Outcome.AGREED)], CallOff("no"), [], "COMMITTED", ""),
        ([Reported(0, Outcome.DONE)], CallOff("no"), [], "COMMITTED", ""),
        ([Shown(0, GOOD)], CallOff("no"), [], "COMMITTED", ""),
        ([Reached(0), Reported(0, Outcome.IN_DOUBT)], CallOff("no"), [], "COMMITTED", ""),
        ([], Reported(1, Outcome.DONE), [Show(1)], "COMMITTED", ""),
        *(
            ([Reached(0)], event, LATER, "COMMITTED", "")
            for event in (Reported(1, Outcome.AGREED), Unreported(1), Shown(1, None))
        ),
        ([], Reported(1, Outcome.IN_DOUBT), LATER, "COMMITTED", ""),
        (
            [Reached(0)], Reported(1, Outcome.WITHDRAWN), [Persist()], "LOST",
            "rank 1 will not apply what others have agreed on; the ranks' parameters differ: go "
            "back to a checkpoint",
        ),
        (
            [], Reported(1, Outcome.TORN), [Persist()], "LOST",
            "the trainer of rank 1 ended while it was being applied",
        ),
        (
            [], IncarnationEnded("over"), [Persist()], "LOST",
            "over, before all ranks had said whether it was applied",
        ),
    ],
)  # fmt: skip
def test_what_an_answer_to_a_commit_makes_of_it(
    before: list[Event], event: Event, actions: list[Action], state: str, why: str
) -> None:
    found = committed()
    for one in before:
        found.handle(one)
    assert found.handle(event) == actions
    assert (found.state.name, found.reason) == (state, why)


@pytest.mark.parametrize("event", [IncarnationEnded("over"), CallOff("over")])
def test_what_is_not_committed_is_aborted_and_hears_no_answers(event: Event) -> None:
    found = machine()
    for early in (Reached(0), Reported(0, Outcome.WITHDRAWN), Unreported(0), Shown(0, GOOD)):
        assert found.handle(early) == []
    assert found.handle(event) == OVER
    assert (found.state, found.reason) == (EditState.ABORTED, "over")
    other = machine()
    assert other.handle(Staged(1, b"x")) == OVER
    assert other.reason == "rank 1 has another manifest staged under this id; use a new one"
