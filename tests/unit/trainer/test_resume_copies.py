"""Who keeps whose copies, and from where a lost rank gets its own back."""

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paramd.memory import handover
from paramd.trainer.resume.choice import HeldCopy, Mark, RankOffer, choose
from paramd.trainer.resume.copies import OWN, Copies, Damaged, buddies, ways, with_copies
from paramd.trainer.resume.succession import Succession

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


LABEL = {
    "lineage": 1, "before": [], "step": 8, "edits": 0,
    "arena_bytes": 8, "optimizer_bytes": 8, "record_bytes": 8, "table_bytes": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"copies": 7},
        {"copies": [7]},
        {"copies": [{"rank": 1}]},
        {"copies": [{"rank": 1, "label": {}}]},
        {"copies": [{"rank": "x", "label": LABEL}]},
        {"copies": [{"rank": 1, "label": LABEL | {"before": 3}}]},
        {"copies": [{"rank": 1, "label": LABEL | {"step": None}}]},
        {"copies": [{"rank": 1, "label": LABEL | {"arena_bytes": -(1 << 70)}}]},
        # Without a digest nothing can be checked, and a longer label is not sent.
        {"copies": [{"rank": 1, "label": LABEL}]},
        {"copies": [{"rank": 1, "label": LABEL | {"digest": 1, "before": [1 << 60] * 300}}]},
        {"copies": [{"rank": 1, "label": LABEL}], "ownership": 3},
    ],
)
def test_a_sidecar_whose_copies_cannot_be_read_offers_none(
    tmp_path: Path, told: dict[str, Any]
) -> None:
    path = tmp_path / "rank-0.sock"
    listener = handover.listen(path)
    listener.settimeout(60)

    def serve() -> None:
        with suppress(OSError, EOFError):
            connection, _ = listener.accept()
            with connection:
                handover.receive(connection)
                handover.send(connection, {"op": "copies", **told})

    server = threading.Thread(target=serve)
    server.start()
    try:
        offer = Copies(job="job", rank=0, sockets={0: path}).look()
    finally:
        listener.close()
        server.join(60)
    assert offer.living_pid == 0
    assert offer.copies == ()


def test_a_copy_of_a_size_that_no_memory_has_is_damaged() -> None:
    copies = Copies(job="job", rank=0, sockets={})
    offers = [LOST, held(NEW, copies=(HeldCopy(0, NEW, 1 << 70),))]
    assert copies.prepare(NEW, {0: 1}, offers) == [Damaged(0, 1, NEW)]


@pytest.mark.parametrize(
    "label", [{}, {"arena_bytes": "x"}, LABEL, LABEL | {"digest": []}, LABEL | {"before": None}]
)
def test_a_copy_with_a_label_that_cannot_be_read_is_damaged_and_the_next_way_is_taken(
    tmp_path: Path, label: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    succession = Succession(
        job="job", rank=0, world_size=2, optimizers=[], keep={}, layout_digest="",
        socket_path=tmp_path / "rank-0.sock", hosts=["a/1", "b/1"],
    )  # fmt: skip
    offers = [LOST, held(OLD, NEW, copies=(HeldCopy(0, NEW, 32),))]
    succession.decide(with_copies(offers, ()), [])
    ways_there = ways(offers, NEW, ())
    assert succession.ready(ways_there, offers) == []
    # What a rank on another host sends, over the training's process group.
    monkeypatch.setattr(Copies, "exchange", lambda *_: (label, memoryview(bytearray(32))))
    damaged = succession.fetch(None)
    assert damaged == [Damaged(0, 1, NEW)]
    assert ways(offers, NEW, damaged) == {}
