"""Chunk bytes, faults, configuration, attach decisions, limits, who may call, reconnect pauses."""

import dataclasses
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paramd.errors import ConflictError, DeniedError, UsageError
from paramd.memory.control_page import Word
from paramd.memory.descriptors import is_pidfd_of_elsewhere, pidfd, same_object
from paramd.security.tickets import Claims, Role
from paramd.state_files import socket_path
from paramd.trainer.settings import LIMITS, AttachSettings
from paramd.v1 import sidecar_pb2 as pb
from paramd.version import __version__
from paramd_service.sidecar import calls
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.host import asked_for
from paramd_service.sidecar.main import parse
from paramd_service.sidecar.owner import (
    AttachRequest,
    Ownership,
    check_sidecar,
    check_successor,
    ownership_after_end,
    parse_attach,
)

REQUEST = AttachRequest(
    job="job", incarnation=3, rank=1, world_size=2, pid=10, start=100, arena_bytes=64,
    public_key=bytes(32), rank_ticket="t", version=__version__,
)  # fmt: skip


def test_the_first_trainer_and_the_same_one_may_attach() -> None:
    check_sidecar("job", 1, REQUEST)
    check_successor(REQUEST, Ownership.OWNED, REQUEST)
    check_successor(REQUEST, Ownership.OWNED, replace(REQUEST, incarnation=4))


def test_pids_of_another_container_prove_nothing_but_the_page_does() -> None:
    check_successor(REQUEST, Ownership.OWNED, REQUEST, elsewhere=True, holds_page=True)
    later = replace(REQUEST, incarnation=4)
    with pytest.raises(ConflictError, match=r"\(pid 10 in its container\)"):
        check_successor(REQUEST, Ownership.OWNED, later, elsewhere=True)
    with pytest.raises(ConflictError, match="run 3 is stale"):
        check_successor(REQUEST, Ownership.ORPHANED, REQUEST, elsewhere=True)


def test_only_a_pidfd_of_another_container_introduces(tmp_path: Path) -> None:
    own = pidfd(os.getpid())
    with (tmp_path / "file").open("wb") as file:
        # The kernel names this process here: it is not elsewhere.
        assert not is_pidfd_of_elsewhere(own)
        assert not is_pidfd_of_elsewhere(file.fileno())
        assert same_object(own, own)
        assert not same_object(own, file.fileno())
    os.close(own)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"op": "stop"}, "expected start"),
        ({"op": "start", "arguments": "--job"}, "expected start"),
        ({"op": "start", "arguments": ["--job", 1]}, "must be text"),
        ({"op": "start", "arguments": ["--job", "j"], "stdin": 3}, "stdin must be text"),
        ({"op": "start", "arguments": ["--run", "sh"]}, "not those of a sidecar"),
        ({"op": "start", "arguments": ["--job", "j", "--rank", "0", "--socket", "/x/s"]}, "/x/s"),
    ],
)
def test_a_host_starts_only_sidecars_of_its_state_dir(message: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        asked_for(message)
    socket = str(socket_path("j", 3))
    arguments = ["--job", "j", "--rank", "3", "--socket", socket]
    config, passed, stdin = asked_for({"op": "start", "arguments": arguments})
    assert (config.rank, passed, stdin) == (3, arguments, None)


@pytest.mark.parametrize("ownership", [Ownership.ORPHANED, Ownership.TORN])
def test_a_newer_incarnation_may_have_what_an_ended_trainer_left(ownership: Ownership) -> None:
    check_successor(REQUEST, ownership, replace(REQUEST, incarnation=4, pid=11))


@pytest.mark.parametrize(
    ("ownership", "changes", "text"),
    [
        (Ownership.OWNED, {"incarnation": 4, "pid": 11}, r"another training process \(pid 10\)"),
        (Ownership.OWNED, {"incarnation": 4, "start": 101}, r"another training process \(pid 10\)"),
        (Ownership.OWNED, {"incarnation": 2}, "run 2 is stale"),
        (Ownership.ORPHANED, {"pid": 11}, "run 3 is stale"),
    ],
)
def test_who_may_not_attach_is_told_why(
    ownership: Ownership, changes: dict[str, object], text: str
) -> None:
    request = replace(REQUEST, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConflictError, match=text):
        check_successor(REQUEST, ownership, request)


def test_a_trainer_of_another_version_is_told_which() -> None:
    with pytest.raises(ConflictError, match=rf"runs paramd {__version__}, the trainer 2;"):
        check_sidecar("job", 1, replace(REQUEST, version="2"))


@pytest.mark.parametrize("changes", [{"job": "other"}, {"rank": 0}])
def test_another_rank_or_job_is_a_mistake(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="serves rank 1 of job 'job'"):
        check_sidecar("job", 1, replace(REQUEST, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seq", "agreed", "applied", "found"),
    [
        (6, 0, 0, Ownership.ORPHANED),
        (7, 0, 0, Ownership.TORN),
        (6, 4, 4, Ownership.ORPHANED),
        (6, 4, 3, Ownership.TORN),
        (7, 4, 3, Ownership.TORN),
    ],
)
def test_an_update_or_an_edit_that_has_not_ended_tears_a_rank(
    seq: int, agreed: int, applied: int, found: Ownership
) -> None:
    words = [0] * 128
    words[Word.SEQ], words[Word.EDIT_AGREED], words[Word.EDIT_APPLIED] = seq, agreed, applied
    assert ownership_after_end(words) is found


@pytest.mark.parametrize(
    "changes",
    [
        {"incarnation": 0},
        {"incarnation": True},
        {"arena_bytes": -1},
        {"public_key": "xyz"},
        {"rank_ticket": "t" * 1025},
        {"public_key": "00"},
        {"job": 1},
        {"version": None},
    ],
)
def test_an_attach_message_is_checked(changes: dict[str, object]) -> None:
    numbers = {"incarnation": 3, "rank": 1, "world_size": 2, "pid": 10, "start": 100}
    texts = {"job": "job", "rank_ticket": "t", "version": __version__, "public_key": "00" * 32}
    message: dict[str, object] = {**numbers, **texts, "arena_bytes": 64}
    assert parse_attach(message) == REQUEST
    with pytest.raises(UsageError, match=next(iter(changes))):
        parse_attach({**message, **changes})


def test_what_attach_is_set_to_reaches_every_limit_of_its_sidecar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # By attach itself.
    told = {"job", "rank", "socket_path", "listen", "linger_s", "job_tls", "trainer_pid"}
    inherited = {"advertise", "tls_cert", "tls_key", "tls_client_ca"}  # from its environment
    controls = {"report_s"}  # the control plane says so
    names = {one.name for one in dataclasses.fields(SidecarConfig)} - told - inherited - controls
    assert names == set(LIMITS)
    values = {name: 7.0 + number for number, name in enumerate(LIMITS)}
    for name, value in values.items():
        monkeypatch.setenv(f"PARAMD_{name.upper()}", str(value))
    options = AttachSettings.from_environment().sidecar_options()
    config = parse(["--job", "j", "--rank", "0", "--socket", "/x", *options])
    assert {name: getattr(config, name) for name in names} == values
    assert AttachSettings().sidecar_options() == []
    for name in LIMITS:
        with pytest.raises(UsageError, match=name):
            AttachSettings(**{name: -1.0})
        with pytest.raises(UsageError, match=name):
            AttachSettings(**{name: math.inf})


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["Bearer good", "Bearer good"],
        ["Bearer good", "Bearer bad"],
        [b"Bearer good"],
        ["Basic good"],
        ["good"],
        ["Bearer bad"],
        ["Bearer"],
    ],
)
def test_one_good_ticket_and_nothing_else_lets_a_call_in(values: list[str]) -> None:
    def verify(ticket: str) -> Claims:
        if ticket != "good":
            raise DeniedError("no good")
        return Claims(job="j", incarnation=1, role=Role.READER, expires_s=0.0, ticket_id="1")

    method = f"/{calls.SERVICE}/PinSnapshot"
    known = calls.authorize(method, [("other", "x"), ("authorization", "bearer good")], verify)
    assert known is not None
    assert known.ticket_id == "1"
    with pytest.raises(DeniedError):
        calls.authorize(method, [("authorization", value) for value in values], verify)
    with pytest.raises(DeniedError, match="role reader may not"):
        calls.authorize(
            f"/{calls.SERVICE}/ReachBoundary", [("authorization", "Bearer good")], verify
        )
    with pytest.raises(DeniedError, match="not a method"):
        calls.authorize(f"/{calls.SERVICE}/Nothing", [("authorization", "Bearer good")], verify)
    assert calls.authorize("/grpc.health.v1.Health/Check", [], verify) is None


def bearer(ticket: str) -> tuple[str, str]:
    return "authorization", f"Bearer {ticket}"


def spans_of(pairs: list[tuple[int, int]]) -> list[pb.Span]:
    return [pb.Span(begin=begin, end=end) for begin, end in pairs]


@pytest.mark.parametrize(
    ("pairs", "begin", "end", "after"),
    [
        ([(0, 11)], 0, 11, 0),
        ([(0, 5), (10, 11)], 10, 11, 5),
        ([(-1, 1)], -1, 1, 0),
        ([(3, 3)], 3, 3, 0),
        ([(4, 2)], 4, 2, 0),
        ([(0, 5), (4, 6)], 4, 6, 5),
        ([(5, 6), (0, 1)], 0, 1, 6),
    ],
)
def test_other_spans_are_refused_and_named(
    pairs: list[tuple[int, int]], begin: int, end: int, after: int
) -> None:
    text = f"spans: [{begin}, {end}) after byte {after}; expected non-empty, sorted"
    with pytest.raises(UsageError, match=re.escape(text) + r".* within \[0, 10\)"):
        calls.check_spans(spans_of(pairs), 10)


def test_spans_are_counted_before_they_are_looked_at() -> None:
    pairs = [(begin, begin + 1) for begin in range(calls.MAX_SPANS)]
    assert calls.check_spans(spans_of(pairs), calls.MAX_SPANS) == tuple(pairs)
    with pytest.raises(UsageError, match="spans: 100,001; expected at most 100,000"):
        calls.check_spans([pb.Span()] * (calls.MAX_SPANS + 1), calls.MAX_SPANS)
