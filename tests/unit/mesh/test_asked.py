"""An answer counts when it is of the rank that was asked; an address, when it leads there."""

from typing import Any

import pytest

from paramd.errors import ConflictError
from paramd.mesh.peers.grpc import Asked, RankUnreachableError, no_way
from paramd.v1.common_pb2 import Header

ASKED = Asked(job="run", incarnation=3, rank=1, address="127.0.0.1:4000", layout_digest="abc")


def header(**other: Any) -> Header:
    return Header(**{"job": "run", "incarnation": 3, "rank": 1, "layout_digest": "abc", **other})


@pytest.mark.parametrize("other", [{"rank": 0}, {"rank": -1}, {"job": "walk"}, {"job": ""}])
def test_an_answer_of_another_rank_or_job_is_none(other: dict[str, Any]) -> None:
    with pytest.raises(RankUnreachableError, match=r"rank 1 \(127.0.0.1:4000\) of job 'run'") as e:
        ASKED.check(header(**other))
    assert e.value.rank == 1


def test_an_answer_without_a_header_is_none() -> None:
    for nothing in (None, Header()):
        with pytest.raises(RankUnreachableError, match="is not there"):
            ASKED.check(nothing)


@pytest.mark.parametrize(
    "other", [{"incarnation": 2}, {"incarnation": 4}, {"layout_digest": "abd"}]
)
def test_an_answer_of_another_incarnation_or_layout_is_stale(other: dict[str, Any]) -> None:
    with pytest.raises(ConflictError, match="expected run 3, 'abc'; try again"):
        ASKED.check(header(**other))


@pytest.mark.parametrize(
    ("address", "host", "leads"),
    [
        ("127.0.0.1:1", "k/1", True),
        ("127.0.0.1:1", "k", True),
        ("127.0.0.1:1", "", True),
        ("127.0.0.1:1", "k/2", False),
        ("127.0.0.1:1", "other/1", False),
        ("127.0.0.1:1", "other", False),
        ("127.8.0.1:1", "other/1", False),
        ("grpcs://127.0.0.1:1", "k/2", False),
        ("grpcs://localhost:1", "other/1", False),
        ("[::1]:1", "other/1", False),
        ("grpcs://[::1]:1", "k/2", False),
        ("grpcs://10.0.0.7:1", "other/1", True),
        ("grpcs://node7:1", "k/2", True),
    ],
)
def test_loopback_of_another_host_leads_nowhere(address: str, host: str, leads: bool) -> None:
    reason = no_way(5, address, host, here="k/1")
    assert (reason == "") is leads
    if not leads:
        assert "rank 5" in reason
        assert address in reason
        assert "PARAMD_SIDECAR_LISTEN" in reason
