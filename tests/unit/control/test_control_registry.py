"""The registry: only this incarnation's ranks speak, each through one stream at a time."""

import pytest

from paramd.errors import ConflictError, UnreachableError, UsageError
from paramd.v1 import common_pb2
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.origin import Origin
from paramd_service.control.mesh.registry import MAX_TEXT_CHARS, Membership, Registry, State
from tests.unit.control.reports import join_request as request

BOOTSTRAP = Bootstrap(job="run", incarnation=3, world_size=2, private_key=bytes(32), token="t" * 32)

HERE = Origin("127.0.0.1")


@pytest.fixture
def registry() -> Registry:
    return Registry(BOOTSTRAP, silent_after_s=10.0)


@pytest.mark.parametrize(
    ("spoilt", "error"),
    [
        ({"header.job": "other"}, ConflictError),
        ({"header.incarnation": 2}, ConflictError),
        ({"world_size": 3}, UsageError),
        ({"header.rank": 2, "peer.rank": 2, "state.rank": 2}, UsageError),
        ({"header.rank": -1, "peer.rank": -1, "state.rank": -1}, UsageError),
        ({"state.rank": 1}, UsageError),
        ({"version": "x" * (MAX_TEXT_CHARS + 1)}, UsageError),
        ({"state.unserved_reason": "x" * (MAX_TEXT_CHARS + 1)}, UsageError),
        ({"state.stands": [common_pb2.Stand()] * 100}, UsageError),
        ({"state.stands": [common_pb2.Stand(cause="x" * 1000)]}, UsageError),
        ({"peer.address": "127.0.0.1"}, UsageError),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else value.__name__,
)
def test_a_foreign_or_malformed_report_is_refused_first_and_later(
    registry: Registry, spoilt: dict[str, object], error: type[Exception]
) -> None:
    bad = request()
    for path, value in spoilt.items():
        part, _, field = path.rpartition(".")
        of = getattr(bad, part) if part else bad
        getattr(of, field).extend(value) if isinstance(value, list) else setattr(of, field, value)
    with pytest.raises(error):
        registry.join(bad, HERE)
    assert registry.peers() == []
    member = registry.join(request(), HERE)
    with pytest.raises(error):
        registry.update(member, bad)
    assert [peer.address for peer in registry.peers()] == ["127.0.0.1:9000"]


@pytest.mark.parametrize("step", [0, -1, -(2**63), 2**63 - 1])
def test_a_rank_that_lies_about_its_step_harms_nobody(registry: Registry, step: int) -> None:
    registry.join(request(0), HERE)
    liar, lie = registry.join(request(1), HERE), request(1)
    lie.header.step = step
    lie.state.step_time_ns = lie.state.boundary_age_ns = -(2**63)
    registry.update(liar, lie)
    assert [rank.report.step for rank in registry.view().ranks if rank.report] == [1, step]
    registry.update(liar, request(1))
    assert registry.last_step == 1


def test_a_later_stream_takes_the_rank_over(registry: Registry) -> None:
    old = registry.join(request(port=9000), HERE)
    new = registry.join(request(port=9001), HERE)
    with pytest.raises(ConflictError, match="another sidecar"):
        registry.update(old, request(port=9000))
    registry.lose(old)
    registry.update(new, request(port=9001))
    assert [peer.address for peer in registry.peers()] == ["127.0.0.1:9001"]


def test_farewell_lost_and_silent_are_told_apart() -> None:
    now_s = [100.0]
    registry = Registry(BOOTSTRAP, silent_after_s=10.0, clock=lambda: now_s[0])
    one, two = registry.join(request(0), HERE), registry.join(request(1), HERE)
    now_s[0] += 11.0
    assert [r.membership for r in registry.view().ranks] == [Membership.SILENT] * 2
    registry.update(one, request(0, leaving=True))
    registry.lose(one)
    registry.lose(two)
    memberships = [r.membership for r in registry.view().ranks]
    assert memberships == [Membership.LEFT, Membership.GONE]


def test_a_rank_on_loopback_of_another_host_is_down_with_the_cure_and_never_called(
    registry: Registry,
) -> None:
    elsewhere = request(1)
    elsewhere.peer.host_id = "another-kernel/1"
    registry.join(request(0), HERE)
    registry.join(elsewhere, HERE)
    view = registry.view()
    assert [rank.state for rank in view.ranks] == [State.OK, State.DOWN]
    assert "PARAMD_SIDECAR_LISTEN" in view.ranks[1].reason
    assert "rank 1" in view.reason
    good, bad = view.joined
    assert good.address == "127.0.0.1:9000"
    with pytest.raises(UnreachableError, match="rank 1 listens on"):
        _ = bad.address
