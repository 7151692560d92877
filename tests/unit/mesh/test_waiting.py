"""A call that waits for all ranks says for which one, in words that are read once."""

import pytest

from paramd.mesh.peers import sidecars
from paramd.v1 import common_pb2


def test_the_rank_that_all_wait_for_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sidecars, "TELL_S", 0.0)
    late = common_pb2.RankState(phase=common_pb2.PHASE_UPDATE, step=26, boundary_age_ns=9 * 10**9)
    early = common_pb2.RankState(phase=common_pb2.PHASE_UPDATE, step=27, boundary_age_ns=10**7)
    sidecars._Waiting().on([(0, early), (1, late), (2, None)])
    assert caplog.messages == [
        "paramd: waiting 0 s for all ranks to reach a step boundary; rank 1 is late (in update, "
        "step 26)"
    ]
