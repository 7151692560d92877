"""All ranks agree on the state to resume from: what one of them finds damaged, none takes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paramd.trainer.resume import copies
from paramd.trainer.resume.choice import Choice, How, Mark, RankOffer

if TYPE_CHECKING:
    import torch.distributed as dist

    from paramd.trainer.resume.succession import Succession

log = logging.getLogger("paramd")


def agreed_choice(
    succession: Succession,
    offers: Sequence[RankOffer],
    together: Callable[[Callable[[], dict[str, Any]]], list[dict[str, Any]]],
    group: dist.ProcessGroup | None,
) -> Choice:
    """The newest state that all ranks have and that none found damaged.

    Args:
        succession: This rank's side.
        offers: All ranks' states.
        together: Runs a stage on all ranks and returns their messages.
        group: All ranks, for copies that come back.

    Raises:
        ConflictError: On all ranks; see choice.py.
    """
    live: list[tuple[How, Mark]] = []
    damaged: set[copies.Damaged] = set()
    while True:
        choice = succession.decide(copies.with_copies(offers, damaged), live)
        ways = copies.ways(offers, choice.mark, damaged) if choice.how == "snapshot" else {}
        answers = together(partial(_examined, succession, ways, offers))
        texts = [answer["damage"] for answer in answers]
        bad = _damaged(answers)
        for rank, text in enumerate(texts):
            if text and choice.how == "live":
                live.append((choice.how, choice.mark))
            elif text:
                bad.append(copies.Damaged(rank, copies.OWN, choice.mark))
        if ways and not bad and not any(texts):
            # Its own stage: what is given has been checked on all ranks.
            bad = _damaged(together(partial(_fetched, succession, group)))
        if not bad and not any(texts):
            return choice
        texts += _words_on_copies(bad)
        log.warning("paramd: %s", next(filter(None, texts)))
        damaged.update(bad)


def _examined(
    succession: Succession, ways: dict[int, int], offers: Sequence[RankOffer]
) -> dict[str, Any]:
    """This rank's message about the chosen state: its own damage, and that of copies it gives."""
    own = succession.damage()
    bad = succession.ready(ways, offers)
    return {"damage": own, "copies": [dataclasses.astuple(copy) for copy in bad]}


def _fetched(succession: Succession, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """This rank's message about the copies that have come back to it."""
    return {"copies": [dataclasses.astuple(copy) for copy in succession.fetch(group)]}


def _words_on_copies(damaged: Sequence[copies.Damaged]) -> list[str]:
    return [
        f"rank {copy.holder}'s copy of rank {copy.rank}'s step {copy.mark.step} is damaged"
        for copy in damaged
        if copy.holder != copies.OWN
    ]


def _damaged(answers: Sequence[dict[str, Any]]) -> list[copies.Damaged]:
    return [
        copies.Damaged(rank, holder, Mark(*mark))
        for answer in answers
        for rank, holder, mark in answer["copies"]
    ]
