"""Who keeps whose copies, and from where a lost rank gets its own back."""

import json

import pytest

from paramd.trainer.resume.choice import HeldCopy, Mark, RankOffer, choose
from paramd.trainer.resume.copies import OWN, Damaged, buddies, ways, with_copies

OLD, NEW, NEWER = Mark(4, 1, 0), Mark(8, 1, 0), Mark(12, 1, 0)
LOST = RankOffer(absent="no sidecar of an earlier incarnation is here")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", []),
        ("aaa", []),
        ("ab", [1, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        # A ring: c keeps b's, and a keeps c's.
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        # The ranks of a small host take turns.
        ("aaab", [3, 3, 3, 0]),
        ("abbb", [1, 0, 0, 0]),
    ],
)
def test_copies_are_kept_on_the_next_host(hosts: str, expected: list[int]) -> None:
    assert buddies([f"{host}/1" for host in hosts]) == expected


def test_containers_of_one_kernel_are_one_host() -> None:
    assert buddies(["k1/10", "k1/11"]) == []
    assert buddies(["k1/10", "k1/11", "k2/10"]) == [2, 2, 0]


def held(*snapshots: Mark, copies: tuple[HeldCopy, ...] = (), step: int = 13) -> RankOffer:
    return RankOffer(step=step, why_not_live="torn", snapshots=snapshots, copies=copies)


def copy(rank: int, mark: Mark) -> HeldCopy:
    return HeldCopy(rank, mark, 100)


def test_a_lost_rank_has_what_is_kept_of_it_elsewhere() -> None:
    offers = [LOST, held(OLD, NEW, copies=(copy(0, OLD), copy(0, NEW)))]
    choice = choose(with_copies(offers, ()))
    assert (choice.how, choice.mark, choice.lost_steps) == ("snapshot", NEW, 5)
    assert ways(offers, NEW, ()) == {0: 1}
    assert choice.reason == f"rank 0: {LOST.absent}"


def test_without_a_common_step_nothing_is_put_together() -> None:
    offers = [LOST, held(NEWER, copies=(copy(0, OLD), copy(0, NEW)))]
    choice = choose(with_copies(offers, ()))
    assert (choice.how, choice.lost_steps) == ("fresh", 13)


def test_copies_at_different_steps_lead_to_the_newest_that_all_have() -> None:
    """Three hosts: of rank 0 and rank 1 two different copies are whole."""
    offers = [
        LOST,
        held(OLD, NEW, copies=(copy(0, OLD), copy(0, NEW))),
        held(OLD, NEWER, NEW, copies=(copy(1, NEW), copy(1, NEWER))),
    ]
    assert choose(with_copies(offers, ())).mark == NEW


def test_a_rank_prefers_its_own_and_takes_a_copy_when_its_own_is_damaged() -> None:
    offers = [held(NEW), held(NEW, copies=(copy(0, NEW),))]
    assert ways(offers, NEW, ()) == {}
    own = Damaged(0, OWN, NEW)
    assert choose(with_copies(offers, {own})).mark == NEW
    assert ways(offers, NEW, {own}) == {0: 1}


def test_a_damaged_copy_is_passed_over_for_an_older_one() -> None:
    offers = [LOST, held(OLD, NEW, copies=(copy(0, OLD), copy(0, NEW)))]
    bad = Damaged(0, 1, NEW)
    assert choose(with_copies(offers, {bad})).mark == OLD
    assert choose(with_copies(offers, {bad, Damaged(0, 1, OLD)})).how == "fresh"


def test_another_rank_may_have_the_same_copy_undamaged() -> None:
    offers = [LOST, held(NEW, copies=(copy(0, NEW),)), held(NEW, copies=(copy(0, NEW),))]
    assert ways(offers, NEW, {Damaged(0, 1, NEW)}) == {0: 2}


def test_offers_with_copies_survive_the_way_between_ranks() -> None:
    offer = held(OLD, copies=(copy(3, NEW),))
    assert RankOffer.from_message(json.loads(json.dumps(offer.to_message()))) == offer
