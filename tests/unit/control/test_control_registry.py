"""The registry: only this incarnation's ranks speak, each through one stream at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paramd.errors import ConflictError, UnreachableError, UsageError
from paramd.v1 import common_pb2, control_pb2
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.registry import MAX_TEXT_CHARS, Membership, Registry, State

BOOTSTRAP = Bootstrap(job="run", incarnation=3, world_size=2, private_key=bytes(32), token="t" * 32)


class Clock:
    """Time that moves when told to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(rank: int = 0, *, port: int = 9000, leaving: bool = False) -> control_pb2.JoinRequest:
    return control_pb2.JoinRequest(
        header=common_pb2.Header(job="run", incarnation=3, step=1, rank=rank, layout_digest="d"),
        world_size=2,
        peer=common_pb2.Peer(rank=rank, address=f"127.0.0.1:{port}"),
        state=common_pb2.RankState(rank=rank, agreement_works=True),
        leaving=leaving,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry(BOOTSTRAP, silent_after_s=10.0, clock=clock)


def foreign_job(r: control_pb2.JoinRequest) -> None:
    r.header.job = "other"


def old_incarnation(r: control_pb2.JoinRequest) -> None:
    r.header.incarnation = 2


def other_world(r: control_pb2.JoinRequest) -> None:
    r.world_size = 3


def rank_too_high(r: control_pb2.JoinRequest) -> None:
    r.header.rank = r.peer.rank = r.state.rank = 2


def rank_negative(r: control_pb2.JoinRequest) -> None:
    r.header.rank = r.peer.rank = r.state.rank = -1


def two_ranks(r: control_pb2.JoinRequest) -> None:
    r.state.rank = 1


def long_text(r: control_pb2.JoinRequest) -> None:
    r.version = "x" * (MAX_TEXT_CHARS + 1)


def no_port(r: control_pb2.JoinRequest) -> None:
    r.peer.address = "127.0.0.1"


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (foreign_job, ConflictError),
        (old_incarnation, ConflictError),
        (other_world, UsageError),
        (rank_too_high, UsageError),
        (rank_negative, UsageError),
        (two_ranks, UsageError),
        (long_text, UsageError),
        (no_port, UsageError),
    ],
)
def test_a_foreign_or_malformed_report_is_refused_first_and_later(
    registry: Registry,
    spoil: Callable[[control_pb2.JoinRequest], None],
    error: type[Exception],
) -> None:
    bad = request()
    spoil(bad)
    with pytest.raises(error):
        registry.join(bad)
    assert registry.peers() == []
    member = registry.join(request())
    with pytest.raises(error):
        registry.update(member, bad)
    assert [peer.address for peer in registry.peers()] == ["127.0.0.1:9000"]


@pytest.mark.parametrize("step", [0, -1, -(2**63), 2**63 - 1])
def test_a_rank_that_lies_about_its_step_harms_nobody(registry: Registry, step: int) -> None:
    registry.join(request(0))
    liar = registry.join(request(1))
    lie = request(1)
    lie.header.step = step
    lie.state.step_time_ns = lie.state.boundary_age_ns = -(2**63)
    registry.update(liar, lie)
    assert [rank.report.step for rank in registry.view().ranks if rank.report] == [1, step]
    registry.update(liar, request(1))
    assert registry.last_step == 1


def test_a_stream_speaks_for_its_own_rank_only(registry: Registry) -> None:
    member = registry.join(request(0))
    with pytest.raises(UsageError, match="rank 1 on the stream of rank 0"):
        registry.update(member, request(1))


def test_a_later_stream_takes_the_rank_over(registry: Registry) -> None:
    old = registry.join(request(port=9000))
    new = registry.join(request(port=9001))
    with pytest.raises(ConflictError, match="another sidecar"):
        registry.update(old, request(port=9000))
    registry.lose(old)
    registry.update(new, request(port=9001))
    assert [peer.address for peer in registry.peers()] == ["127.0.0.1:9001"]


def test_peers_are_ordered_by_rank(registry: Registry) -> None:
    registry.join(request(1, port=9001))
    member = registry.join(request(0))
    assert [peer.rank for peer in registry.peers()] == [0, 1]
    registry.lose(member)
    assert [peer.rank for peer in registry.peers()] == [1]


def test_the_digest_that_is_kept_is_the_one_that_a_look_at_all_ranks_gives(
    registry: Registry,
) -> None:
    def same() -> str:
        assert registry.layout_digest == registry.view().layout_digest
        return registry.layout_digest

    assert same() == ""
    zero, one = registry.join(request(0)), registry.join(request(1))
    assert same() == "d"
    other = request(1)
    other.header.layout_digest = "other"
    registry.update(one, other)
    assert same() == ""
    registry.update(zero, request(0, leaving=True))
    assert same() == "other"
    registry.lose(one)
    registry.lose(zero)
    assert same() == ""


def test_a_registry_is_empty_from_the_last_ranks_end_on(registry: Registry, clock: Clock) -> None:
    assert registry.empty_since_s == 100.0
    zero, one = registry.join(request(0)), registry.join(request(1))
    assert registry.empty_since_s is None
    clock.now_s = 110.0
    registry.lose(zero)
    assert registry.empty_since_s is None
    clock.now_s = 120.0
    registry.update(one, request(1, leaving=True))
    assert registry.empty_since_s == 120.0


def test_farewell_lost_and_silent_are_told_apart(registry: Registry, clock: Clock) -> None:
    one, two = registry.join(request(0)), registry.join(request(1))
    clock.now_s += 11.0
    assert [r.membership for r in registry.view().ranks] == [Membership.SILENT] * 2
    registry.update(one, request(0, leaving=True))
    registry.lose(one)
    registry.lose(two)
    memberships = [r.membership for r in registry.view().ranks]
    assert memberships == [Membership.LEFT, Membership.GONE]


def test_it_knows_since_when_it_is_empty(registry: Registry, clock: Clock) -> None:
    assert registry.empty_since_s == 100.0
    member = registry.join(request())
    assert registry.empty_since_s is None
    clock.now_s = 150.0
    registry.update(member, request(leaving=True))
    assert registry.empty_since_s == 150.0
    clock.now_s = 160.0
    registry.lose(member)
    assert registry.empty_since_s == 150.0


def test_a_rank_on_loopback_of_another_host_is_down_with_the_cure_and_never_called(
    registry: Registry,
) -> None:
    elsewhere = request(1)
    elsewhere.peer.host_id = "another-kernel/1"
    registry.join(request(0))
    registry.join(elsewhere)
    view = registry.view()
    assert [rank.state for rank in view.ranks] == [State.OK, State.DOWN]
    assert "PARAMD_SIDECAR_LISTEN" in view.ranks[1].reason
    assert "rank 1" in view.reason
    good, bad = view.joined
    assert good.address == "127.0.0.1:9000"
    with pytest.raises(UnreachableError, match="rank 1 listens on"):
        _ = bad.address
