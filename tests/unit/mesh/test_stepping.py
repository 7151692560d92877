"""When a subscription ends because its job is another one by now, and when it does not."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from paramd.errors import ConflictError, UnreachableError
from paramd.mesh.frames.stepping import StepStream, StreamOverError
from paramd.mesh.peers.control import parse_job
from tests.unit.mesh.test_rest import document


class Heard:
    """A reach that has heard what the test says."""

    def __init__(self) -> None:
        self.document = parse_job(document())

    async def refresh(self) -> None:
        pass


def subscribed(reach: Heard) -> StepStream[Any, Any]:
    nobody: Any = None
    return StepStream(reach, nobody, nobody, every=1)  # type: ignore[arg-type]


def test_an_incarnation_that_went_on_ends_it_by_its_number() -> None:
    reach = Heard()
    stream = subscribed(reach)
    reach.document = replace(reach.document, incarnation=2)
    with pytest.raises(ConflictError, match="run 1 has ended, the job is in run 2"):
        stream._check_identity()


def test_a_rank_that_is_away_for_a_while_does_not_end_it() -> None:
    reach = Heard()
    stream, before = subscribed(reach), reach.document
    for digest in ("", before.layout_digest):
        reach.document = replace(before, layout_digest=digest)
        stream._check_identity()
    reach.document = replace(before, layout_digest="another")
    with pytest.raises(ConflictError, match="the layout of run 1 is not the one"):
        stream._check_identity()


def test_sidecars_that_left_with_the_training_end_it_and_others_are_waited_for() -> None:
    reach = Heard()
    stream = subscribed(reach)
    away = UnreachableError("rank 0 has no sidecar now")
    asyncio.run(stream._after(away))
    reach.document = replace(reach.document, state="ended", peers={})
    with pytest.raises(StreamOverError):
        asyncio.run(stream._after(away))
