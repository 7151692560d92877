"""The verdict of `paramd why`, from evidence made by hand."""

from dataclasses import replace

import pytest

from paramd.mesh.insight.reports import Collective
from paramd_service.control.mesh.evidence import Evidence, culprits, verdict_of


def running(rank: int, **changes: object) -> Evidence:
    usual = Evidence(rank=rank, step=7, boundary_age_s=0.2, kind="forward", what="in a forward")
    return replace(usual, **changes)  # type: ignore[arg-type]


def waiting(rank: int, sequence: int = 4711, name: str = "nccl:all_gather") -> Evidence:
    made = Collective(done=False, name=name, group="default_pg", sequence=sequence, age_s=40.0)
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
            [running(0, gone="exited", ended_s=3.0), running(1, gone="killed", ended_s=3.4)],
            "Rank 1: killed; rank 0: exited.",
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
    made = Collective(done=False, name="gloo:all_reduce", group="g", sequence=1, age_s=1.0)
    assert not replace(loading(0), open=(made,)).waits
    assert replace(loading(0), kind="backward", open=(made,)).waits


def look(**elsewhere: str) -> list[Evidence]:
    """Three ranks in backward, but for those that are said to be elsewhere."""
    meeting = [running(rank, kind="backward", what="in backward") for rank in range(3)]
    for rank, kind in elsewhere.items():
        number = int(rank[1:])
        meeting[number] = running(number, kind=kind, what=f"in {kind}")
    return meeting


DATA = {"r0": "dataloader", "r1": "dataloader", "r2": "dataloader"}
SLOWS = "rank 2 was in other while ranks 0 and 1 waited for it: it slows the others."


@pytest.mark.parametrize(
    ("looks", "verdict"),
    [
        ([look(r2="other")] * 7 + [look()], f"In 7 of 8 looks {SLOWS}"),
        ([look()] + [look(r2="other")] * 7, f"In 7 of 8 looks {SLOWS}"),
        # Chance, jitter of all ranks, several elsewhere, and what a rank is meant to do alone.
        ([look(r2="other")] * 4 + [look()] * 4, ""),
        ([look(r2="other")] * 5 + [look(r1="other")] * 3, ""),
        ([look(r1="other", r2="other")] * 8, ""),
        ([look(r0="checkpoint")] * 8, ""),
        (
            [look(**DATA)] * 8,
            "In 8 of 8 looks ranks 0 to 2 waited for data: reading it slows training.",
        ),
    ],
)
def test_several_looks_tell_a_slow_rank_from_chance(
    looks: list[list[Evidence]], verdict: str
) -> None:
    at = "Nothing is stuck: step 7; the last boundary of rank 0 was 200 ms ago."
    assert verdict_of(looks[-1], looks[:-1]) == f"{at} {verdict}".strip()


def test_who_is_waited_for_is_told_apart_from_who_waits() -> None:
    assert culprits([waiting(0), waiting(1), loading(2)]) == (2,)
    assert culprits([waiting(0), waiting(1)]) == (0, 1)
