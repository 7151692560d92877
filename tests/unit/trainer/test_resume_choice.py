"""From what ranks hold to how a training goes on."""

import pytest

from paramd.errors import ConflictError
from paramd.trainer.resume.choice import Mark, RankOffer, choose

AT_7, AT_8, OLD, OLDER = Mark(7, 1, 0), Mark(8, 1, 0), Mark(4, 1, 0), Mark(2, 1, 0)


def held(live: Mark | None, *snapshots: Mark, step: int = 7, why: str = "torn") -> RankOffer:
    return RankOffer(
        step=step, live=live, why_not_live="" if live is not None else why, snapshots=snapshots
    )


def test_ranks_at_the_same_step_lose_nothing() -> None:
    choice = choose([held(AT_7, OLD), held(AT_7)])
    assert (choice.how, choice.mark, choice.lost_steps) == ("live", AT_7, 0)


def test_ranks_a_step_apart_go_on_from_the_newest_common_snapshot() -> None:
    choice = choose([held(AT_7, OLDER, OLD), held(AT_8, OLD, OLDER, AT_7, step=8)])
    assert (choice.how, choice.mark, choice.lost_steps) == ("snapshot", OLD, 4)
    assert choice.reason == "the ranks stand at steps 7, 8"


def test_a_torn_rank_is_named() -> None:
    choice = choose([held(AT_7, OLD), held(None, OLD, why="it ended inside an update")])
    assert choice.how == "snapshot"
    assert choice.reason == "rank 1: it ended inside an update"


@pytest.mark.parametrize("other", [Mark(7, 2, 0), Mark(7, 1, 1)])
def test_the_same_step_of_another_history_or_edit_is_another_state(other: Mark) -> None:
    assert choose([held(AT_7, OLD), held(other, OLD)]).how == "snapshot"


def test_a_damaged_state_is_passed_over() -> None:
    offers = [held(AT_7, OLD, OLDER), held(AT_7, OLD, OLDER)]
    choice = choose(offers, [("live", AT_7), ("snapshot", OLD)])
    assert (choice.how, choice.mark, choice.lost_steps) == ("snapshot", OLDER, 5)


def after_rollback(lineage: int, *snapshots: Mark) -> RankOffer:
    return RankOffer(step=6, lineage=lineage, why_not_live="torn", snapshots=snapshots)


def test_after_a_rollback_what_was_left_is_taken_only_if_there_is_nothing_else() -> None:
    left, back = Mark(20, 1, 0), Mark(5, 2, 1)
    choice = choose([after_rollback(2, left, back), after_rollback(2, back, left)])
    assert (choice.mark, choice.lost_steps) == (back, 1)
    choice = choose([after_rollback(2, left, back), after_rollback(2, left)])
    assert choice.mark == left
    assert "nothing was kept since the rollback" in choice.reason
    # One rank never heard of it: it did not happen.
    assert choose([after_rollback(2, left, back), after_rollback(1, left)]).mark == left


def test_nothing_in_common_is_a_fresh_start_that_says_what_it_loses() -> None:
    choice = choose([held(AT_7), RankOffer(absent="no sidecar is here")])
    assert (choice.how, choice.lost_steps) == ("fresh", 7)
    assert "rank 1: no sidecar is here" in choice.reason


def test_a_first_start_loses_nothing() -> None:
    choice = choose([RankOffer(absent="no sidecar is here")] * 2)
    assert (choice.how, choice.lost_steps) == ("fresh", 0)


def test_a_living_trainer_and_a_changed_script_are_refused() -> None:
    with pytest.raises(ConflictError, match=r"rank 1 still runs \(pid 12\)"):
        choose([held(AT_7), RankOffer(living_pid=12)])
    with pytest.raises(ConflictError, match="on rank 0 the world size was 2 and is 1; start it"):
        choose([RankOffer(refusal="the world size was 2 and is 1", live=AT_7)])
