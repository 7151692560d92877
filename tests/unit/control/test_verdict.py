"""The verdict of `paramd why`, from evidence made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paramd_service.control.insight.verdict import Evidence, OpenCollective, verdict_of


def running(rank: int, **changes: object) -> Evidence:
    usual = Evidence(rank=rank, step=7, boundary_age_s=0.2, kind="forward", what="in a forward")
    return replace(usual, **changes)  # type: ignore[arg-type]


def waiting(rank: int, sequence: int = 4711, name: str = "nccl:all_gather") -> Evidence:
    made = OpenCollective(name=name, group="default_pg", sequence=sequence, age_s=40.0)
    return running(
        rank, overdue=True, boundary_age_s=42.0, seen_for_s=40.0, kind="collective",
        what="in all_gather", open=(made,),
    )  # fmt: skip


def loading(rank: int) -> Evidence:
    return running(
        rank, overdue=True, boundary_age_s=42.0, seen_for_s=41.0, kind="dataloader",
        what="in DataLoader.next", where="data.py:12 in read",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([], "No rank is known."),
        (
            [running(0), running(1, boundary_age_s=0.5, step=8)],
            "Nothing is stuck: steps 7 to 8; the last boundary of rank 1 was 500 ms ago.",
        ),
        (
            [
                running(0, kind="backward", what="in backward"),
                running(1, kind="backward", what="in backward"),
                running(2, kind="other", what="at train.py:14 in <module>"),
            ],
            "Nothing is stuck: step 7; the last boundary of rank 0 was 200 ms ago. At this look "
            "ranks 0 and 1 were in backward, and rank 2 at train.py:14 in <module>: if it is the "
            "same rank when you ask again, it slows the others.",
        ),
        (
            [
                running(0, kind="backward", what="in backward"),
                running(1, kind="other", what="at a.py:1 in f"),
                running(2, kind="other", what="at a.py:1 in f"),
            ],
            "Nothing is stuck: step 7; the last boundary of rank 0 was 200 ms ago.",
        ),
        (
            [running(0, held=True), running(1, held=True)],
            "Training is paused on request; paramd resume continues it.",
        ),
        (
            [waiting(0), waiting(1), waiting(2), loading(3)],
            "Ranks 0 to 2 wait in all_gather #4711 for rank 3, which is in DataLoader.next "
            "(data.py:12 in read) since at least 41 s.",
        ),
        (
            [waiting(0), running(1, gone="its trainer has ended")],
            "Rank 0 waits in all_gather #4711 for rank 1: its trainer has ended.",
        ),
        (
            [waiting(0), running(1, stopped=True)],
            "Rank 0 waits in all_gather #4711 for rank 1, which is stopped by a signal "
            "(kill -CONT continues).",
        ),
        (
            [waiting(0), waiting(1)],
            "All ranks wait in all_gather #4711 since at least 40 s: look at the network between "
            "them.",
        ),
        (
            [waiting(0), waiting(1, name="nccl:all_reduce")],
            "Rank 0 waits in all_gather #4711; rank 1 waits in all_reduce #4711: the ranks do not "
            "call the same collectives in the same order (compare their stacks).",
        ),
        (
            [loading(0), loading(1)],
            "Ranks 0 and 1, which are in DataLoader.next (data.py:12 in read) since at least 41 s.",
        ),
    ],
)
def test_the_verdict_names_who_keeps_the_others_waiting(
    ranks: list[Evidence], verdict: str
) -> None:
    assert verdict_of(ranks) == verdict


def test_a_rank_with_an_open_collective_that_loads_data_is_not_said_to_wait() -> None:
    made = OpenCollective(name="gloo:all_reduce", group="g", sequence=1, age_s=1.0)
    assert not replace(loading(0), open=(made,)).waits
    assert replace(loading(0), kind="backward", open=(made,)).waits
