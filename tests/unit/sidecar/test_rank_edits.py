"""A rank's edits where there is no memory for them at first."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paramd.errors import NotFoundError, UnreachableError
from paramd.memory import left
from paramd.memory.left import Limit, Memory
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.edits.sidecar import RankEdits
from tests.unit.sidecar.test_device_state import attached_to
from tests.unit.sidecar.test_shortage import Watched

LITTLE = Memory((Limit("the host", 1 << 30, 100_000),))


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    with ThreadPoolExecutor(1) as thread:
        made = Watched(tmp_path, thread)
        try:
            yield made
        finally:
            made.rank.room.close()
            await made.rank.close()


async def test_memory_for_edits_that_was_refused_is_asked_for_again_at_each_edit(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the kernel has ended a sidecar, and its successor comes while memory is short."""
    edits, memory = RankEdits(watched.rank), attached_to(None, 4096)
    get = edits.calls()["GetEdit"].unary
    assert get is not None
    unknown = pb.GetEditRequest(edit_id=f"{1:032x}")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(left, "memory_now", lambda: LITTLE)
            await edits.attached(memory)
            for _ in range(2):
                with pytest.raises(UnreachableError, match="no memory for edits: 262,144 bytes"):
                    await get(unknown, 1.0)
        with pytest.raises(NotFoundError):
            await get(unknown, 1.0)
        text = watched.lines.text
        assert (text.count('"no-edits"'), text.count('"edits-again"')) == (1, 1)
    finally:
        await edits.released()
        memory.close()
    with pytest.raises(UnreachableError, match="try again when training runs"):
        await get(unknown, 1.0)
