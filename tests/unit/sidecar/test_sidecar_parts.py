"""Chunk bytes, faults, configuration, attach decisions, limits, who may call, reconnect pauses."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import xxhash

from paramd import errors
from paramd.errors import (
    ConflictError,
    DeniedError,
    ParamdError,
    TornError,
    UnreachableError,
    UsageError,
    reason_of,
)
from paramd.memory.control_page import Word
from paramd.memory.descriptors import is_pidfd_of_elsewhere, pidfd, same_object
from paramd.security.tickets import Claims, Role
from paramd.state_files import socket_path
from paramd.trainer.settings import LIMITS, AttachSettings
from paramd.v1 import sidecar_pb2 as pb
from paramd.version import __version__
from paramd.wire import data_chunk, summon_chunk, varint
from paramd_service import admission
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.faults import POINTS, Faults
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
from paramd_service.sidecar.rpc import auth
from paramd_service.sidecar.rpc.control_link import LAST_BACKOFF_S, backoff_s


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (0, 127), (5, 300), (0, 70_000)])
def test_a_chunk_written_by_hand_is_the_message(begin: int, end: int) -> None:
    data = bytes(number * 7 % 256 for number in range(70_000))
    chunk = pb.ReadSnapshotResponse.FromString(data_chunk(memoryview(data)[begin:end], begin))
    assert chunk.data == data[begin:end]
    assert chunk.offset_bytes == begin
    assert chunk.xxh3 == xxhash.xxh3_64_intdigest(data[begin:end], seed=begin)
    part = pb.SummonResponse.FromString(summon_chunk(memoryview(data)[begin:end]))
    assert (part.data, part.xxh3) == (chunk.data, xxhash.xxh3_64_intdigest(chunk.data))


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2**35, 2**62])
def test_a_varint_is_read_back(value: int) -> None:
    message = pb.ReadSnapshotResponse.FromString(b"\x18" + varint(value))
    assert message.offset_bytes == value


def test_faults_act_at_the_named_pass_once() -> None:
    done: list[signal.Signals] = []
    faults = Faults("copy-moved:kill@2, read-chunk:stop", act=done.append)
    for point in ("copy-moved", "read-chunk", "copy-begun", "read-chunk"):
        faults.at(point)
    assert done == [signal.SIGSTOP]
    faults.at("copy-moved")
    faults.at("copy-moved")
    assert done == [signal.SIGSTOP, signal.SIGKILL]


@pytest.mark.parametrize(
    "text", ["nowhere:kill", "copy-moved", "copy-moved:crash", "copy-moved:kill@0"]
)
def test_faults_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="PARAMD_FAULTS"):
        Faults(text)


def test_without_faults_points_do_nothing() -> None:
    for point in POINTS:
        Faults().at(point)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.0.0.1:80", "example.org:1", "[::]:0"])
def test_only_loopback_may_be_listened_on(listen: str) -> None:
    with pytest.raises(UsageError, match="no loopback address"):
        parse(["--job", "j", "--rank", "0", "--socket", "s", "--listen", listen])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rank", "-1"),
        ("--linger-s", "0"),
        ("--listen", "127.0.0.1"),
        ("--listen", "127.0.0.1:70000"),
        ("--budget-bytes", "0"),
        ("--max-calls", "0"),
        ("--max-lease-s", "1"),
        ("--grace-s", "-1"),
        ("--job", "../x"),
    ],
)
def test_options_out_of_range_are_refused_by_name(option: str, value: str) -> None:
    arguments = ["--job", "j", "--rank", "0", "--socket", "s", option, value]
    with pytest.raises(UsageError, match=option.removeprefix("--").replace("-", "_")):
        parse(arguments)


def test_options_reach_the_config() -> None:
    arguments = "--job j --rank 3 --socket /x/s --listen [::1]:7 --linger-s 5 --budget-bytes 9"
    assert parse(arguments.split()) == SidecarConfig(
        job="j", rank=3, socket_path=Path("/x/s"), listen="[::1]:7", linger_s=5, budget_bytes=9
    )


REQUEST = AttachRequest(
    job="job",
    incarnation=3,
    rank=1,
    world_size=2,
    pid=10,
    start=100,
    arena_bytes=64,
    public_key=bytes(32),
    rank_ticket="t",
    version=__version__,
)


def test_the_first_trainer_and_the_same_one_may_attach() -> None:
    check_sidecar("job", 1, REQUEST)
    check_successor(REQUEST, Ownership.OWNED, REQUEST)
    check_successor(REQUEST, Ownership.OWNED, replace(REQUEST, incarnation=4))


def test_pids_of_another_container_prove_nothing_but_the_page_does() -> None:
    check_successor(REQUEST, Ownership.OWNED, REQUEST, elsewhere=True, holds_page=True)
    later = replace(REQUEST, incarnation=4)
    with pytest.raises(ConflictError, match=r"\(pid 10 in its container\)"):
        check_successor(REQUEST, Ownership.OWNED, later, elsewhere=True)
    with pytest.raises(ConflictError, match="incarnation 3 is stale"):
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
        (Ownership.OWNED, {"incarnation": 2}, "incarnation 2 is stale"),
        (Ownership.ORPHANED, {"pid": 11}, "incarnation 3 is stale"),
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
    message: dict[str, object] = {
        "job": "job",
        "incarnation": 3,
        "rank": 1,
        "world_size": 2,
        "pid": 10,
        "start": 100,
        "arena_bytes": 64,
        "public_key": bytes(32).hex(),
        "rank_ticket": "t",
        "version": __version__,
    }
    assert parse_attach(message) == REQUEST
    with pytest.raises(UsageError, match=next(iter(changes))):
        parse_attach({**message, **changes})


def test_what_is_kept_back_of_a_deadline() -> None:
    assert auth.check_deadline(1.0, 600) == pytest.approx(0.9)
    assert auth.check_deadline(60.0, 600) == pytest.approx(59.75)
    assert auth.check_deadline(601.0, 600) == pytest.approx(600.75)
    assert auth.check_deadline(0.0, 600) == 0.0
    assert auth.check_deadline(-1.0, 600) == 0.0


@pytest.mark.parametrize(
    ("remaining_s", "given"),
    [(None, "no deadline"), (601.01, "a deadline in 601 s"), (1e6, "a deadline in 1000000 s")],
)
def test_a_call_without_an_end_in_sight_is_refused(remaining_s: float | None, given: str) -> None:
    with pytest.raises(UsageError) as refused:
        auth.check_deadline(remaining_s, 600)
    assert str(refused.value) == f"the call has {given}; set one of at most 600 s (timeout=)"


def spans_of(pairs: list[tuple[int, int]]) -> list[pb.Span]:
    return [pb.Span(begin=begin, end=end) for begin, end in pairs]


@pytest.mark.parametrize("pairs", [[], [(0, 1)], [(0, 10)], [(0, 4), (4, 10)], [(2, 3), (5, 6)]])
def test_spans_in_order_within_the_arena_are_taken(pairs: list[tuple[int, int]]) -> None:
    assert auth.check_spans(spans_of(pairs), 10) == tuple(pairs)


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
        auth.check_spans(spans_of(pairs), 10)


def test_spans_are_counted_before_they_are_looked_at() -> None:
    pairs = [(begin, begin + 1) for begin in range(auth.MAX_SPANS)]
    assert auth.check_spans(spans_of(pairs), auth.MAX_SPANS) == tuple(pairs)
    with pytest.raises(UsageError, match="spans: 100,001; expected at most 100,000"):
        auth.check_spans([pb.Span()] * (auth.MAX_SPANS + 1), auth.MAX_SPANS)


@pytest.mark.parametrize(
    ("offset", "size", "total", "found"),
    [
        (0, 0, 10, (0, 10)),
        (0, 10, 10, (0, 10)),
        (0, 1, 10, (0, 1)),
        (1, 0, 10, (1, 10)),
        (2, 3, 10, (2, 5)),
        (3, 7, 10, (3, 10)),
        (10, 0, 10, (10, 10)),
        (0, 0, 0, (0, 0)),
        (-1, 0, 10, None),
        (11, 0, 10, None),
        (0, -1, 10, None),
        (0, 11, 10, None),
        (3, 8, 10, None),
        (10, 1, 10, None),
        (0, 2**63 - 1, 10, None),
    ],
)
def test_a_read_stays_within_its_snapshot(
    offset: int, size: int, total: int, found: tuple[int, int] | None
) -> None:
    if found is not None:
        assert auth.check_range(offset, size, total) == found
        return
    with pytest.raises(UsageError, match=rf"{offset}, {size}; expected .* within {total} bytes"):
        auth.check_range(offset, size, total)


@pytest.mark.parametrize(
    ("lease_ms", "granted_s"),
    [(0, 30.0), (1, 0.001), (1500, 1.5), (59_999, 59.999), (60_000, 60.0), (60_001, 60.0)],
)
def test_a_lease_is_as_long_as_asked_for_up_to_the_cap(lease_ms: int, granted_s: float) -> None:
    assert auth.granted_lease_s(lease_ms, 30.0, 60.0) == granted_s


def test_a_negative_lease_is_refused() -> None:
    with pytest.raises(UsageError, match="lease_ms: -1; expected 0"):
        auth.granted_lease_s(-1, 30.0, 60.0)


def test_pauses_grow_to_a_cap_and_are_spread() -> None:
    assert backoff_s(0, 0.0) == pytest.approx(0.1)
    assert backoff_s(1, 1.0) == pytest.approx(0.4)
    assert backoff_s(1000, 1.0) == LAST_BACKOFF_S


def test_an_error_names_its_reason() -> None:
    assert reason_of(TornError("x")) == "TORN"
    assert reason_of(ParamdError("x")) == "PARAMD"


def test_a_later_file_replaces_an_earlier_one_and_an_empty_one_calls_it_off(tmp_path: Path) -> None:
    done: list[signal.Signals] = []
    later = tmp_path / "rank-0.sock"
    faults = Faults("mapped:stop", later=later, act=done.append)
    for text in ("copy-moved:kill", "read-chunk:stop", ""):
        later.write_text(text)
        faults.at("pool")
        assert not later.exists()
    faults.at("copy-moved")
    faults.at("read-chunk")
    assert done == []
    faults.at("mapped")
    assert done == [signal.SIGSTOP]


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


def test_attach_refuses_the_lingering_time_that_its_sidecar_would_refuse() -> None:
    with pytest.raises(UsageError, match="linger_s must be above 0, is 0"):
        AttachSettings(linger_s=0)


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

    method = f"/{auth.SERVICE}/PinSnapshot"
    known = auth.authorize(method, [("other", "x"), ("authorization", "bearer good")], verify)
    assert known is not None
    assert known[0] == "good"
    with pytest.raises(DeniedError):
        auth.authorize(method, [("authorization", value) for value in values], verify)
    with pytest.raises(DeniedError, match="role reader may not"):
        auth.authorize(f"/{auth.SERVICE}/ReachBoundary", [("authorization", "Bearer good")], verify)
    with pytest.raises(DeniedError, match="not a method"):
        auth.authorize(f"/{auth.SERVICE}/Nothing", [("authorization", "Bearer good")], verify)
    assert auth.authorize("/grpc.health.v1.Health/Check", [], verify) is None


GET_MESH, PIN, REACH = (f"/{auth.SERVICE}/{n}" for n in ("GetMesh", "PinSnapshot", "ReachBoundary"))
HEALTH = "/grpc.health.v1.Health/"
NO_TICKET = (
    "the call has no ticket; send metadata 'authorization: Bearer <ticket>' once "
    "(the control plane gives tickets out)"
)


def claims_of(role: Role, token_id: str | None = None) -> Claims:
    return Claims(
        job="j", incarnation=1, role=role, expires_s=0.0, ticket_id="1", rank=2, token_id=token_id
    )


def bearer(ticket: str) -> tuple[str, str]:
    return "authorization", f"Bearer {ticket}"


class Call:
    """One call to a sidecar with the interceptor. A ticket is a role, and maybe a token's id."""

    def __init__(self) -> None:
        self.served: list[dict[str, Any]] = []
        self.told: list[tuple[str, str]] = []
        self.end: tuple[grpc.StatusCode, str] | None = None
        self.gate = auth.AuthInterceptor(
            self.verify, lambda method, reason: self.told.append((method, reason))
        )

    def verify(self, ticket: str) -> Claims:
        if ticket == "early":
            raise UnreachableError("no trainer has attached yet")
        role, _, token_id = ticket.partition("/")
        if role not in {known.value for known in Role}:
            raise DeniedError(f"not a ticket: {ticket}")
        return claims_of(Role(role), token_id or None)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.end = code, details

    async def make(self, method: str, metadata: Any) -> Any:
        """Make the call; what the gate let it have."""
        details = SimpleNamespace(method=method, invocation_metadata=metadata)

        async def serve(found: Any) -> str:
            assert found is details
            self.served.append(
                {
                    "ticket": auth.CALLER_TICKET.get(None),
                    "claims": auth.CALLER.get(None),
                    "share": admission.CALLER.get(),
                    "asked by": errors.asked_by.get(),
                }
            )
            return "served"

        # A task, as gRPC has for each call.
        found = await asyncio.create_task(self.gate.intercept_service(serve, details))  # type: ignore[arg-type]
        if not self.served:
            assert found.request_streaming, "it would wait for a request"
            await found.stream_stream(None, self)
            return None
        return found


@pytest.mark.parametrize(
    ("method", "metadata", "code", "text"),
    [
        (PIN, None, grpc.StatusCode.UNAUTHENTICATED, NO_TICKET),
        (PIN, [("other", "Bearer reader")], grpc.StatusCode.UNAUTHENTICATED, NO_TICKET),
        (PIN, [bearer("reader")] * 2, grpc.StatusCode.UNAUTHENTICATED, NO_TICKET),
        (PIN, [bearer("x")], grpc.StatusCode.UNAUTHENTICATED, "not a ticket: x"),
        (PIN, [bearer("x reader")], grpc.StatusCode.UNAUTHENTICATED, "not a ticket: x reader"),
        (PIN, [bearer("")], grpc.StatusCode.UNAUTHENTICATED, "not a ticket: "),
        (PIN, [bearer("viewer")], grpc.StatusCode.PERMISSION_DENIED,
         "a ticket of role viewer may not call this; needed: control, editor, reader"),
        (REACH, [bearer("editor")], grpc.StatusCode.PERMISSION_DENIED,
         "a ticket of role editor may not call this; needed: control"),
        (GET_MESH, [bearer("sidecar")], grpc.StatusCode.PERMISSION_DENIED,
         "a ticket of role sidecar may not call this; needed: control, editor, reader, viewer"),
        (PIN + "s", [bearer("control")], grpc.StatusCode.PERMISSION_DENIED,
         f"'{PIN}s' is not a method of this server"),
        (HEALTH + "Other", [bearer("control")], grpc.StatusCode.PERMISSION_DENIED,
         f"'{HEALTH}Other' is not a method of this server"),
        ("/" + "x" * 300, [bearer("control")], grpc.StatusCode.PERMISSION_DENIED,
         f"'/{'x' * 127}' is not a method of this server"),
    ],
)  # fmt: skip
async def test_a_refused_call_has_its_status_and_is_counted(
    method: str, metadata: Any, code: grpc.StatusCode, text: str
) -> None:
    call = Call()
    assert await call.make(method, metadata) is None
    assert call.served == []
    assert call.end == (code, text)
    assert call.told == [(method, text)]


async def test_who_comes_before_the_trainer_is_told_to_try_again_and_not_counted() -> None:
    call = Call()
    await call.make(PIN, [bearer("early")])
    assert call.end == (grpc.StatusCode.UNAVAILABLE, "no trainer has attached yet")
    assert (call.served, call.told) == ([], [])


@pytest.mark.parametrize(
    ("ticket", "asked_by", "who"),
    [
        ("control", [], None),
        ("control", ["u"], "u"),
        ("control", ["u", "v"], None),
        ("control", ["u" * 65], None),
        ("reader/t", [], "t"),
        ("reader/t", ["u"], "t"),
    ],
)
async def test_a_call_takes_from_the_share_of_its_own_token(
    ticket: str, asked_by: list[str], who: str | None
) -> None:
    """Only the control plane's ticket, of no token, may name another's."""
    call = Call()
    named = [(errors.ASKED_BY_KEY, value) for value in asked_by]
    assert await call.make(PIN, [*named, bearer(ticket)]) == "served"
    assert call.served == [
        {"ticket": ticket, "claims": call.verify(ticket), "share": who, "asked by": who or ""}
    ]
    assert call.told == []


@pytest.mark.parametrize("name", ["Check", "List", "Watch"])
async def test_a_probe_of_health_needs_no_ticket_and_speaks_for_nobody(name: str) -> None:
    call = Call()
    assert await call.make(HEALTH + name, [(errors.ASKED_BY_KEY, "u")]) == "served"
    assert call.served == [{"ticket": None, "claims": None, "share": None, "asked by": ""}]


@pytest.mark.parametrize("role", Role)
def test_the_unix_socket_asks_for_the_same_roles(role: Role) -> None:
    for roles, allowed, needed in (
        (auth.READERS, {Role.READER, Role.EDITOR, Role.CONTROL}, "control, editor, reader"),
        (auth.EDITORS, {Role.EDITOR, Role.CONTROL}, "control, editor"),
    ):
        if role in allowed:
            auth.check_role(claims_of(role), roles)
            continue
        with pytest.raises(DeniedError) as refused:
            auth.check_role(claims_of(role), roles)
        text = f"a ticket of role {role.value} may not call this; needed: {needed}"
        assert str(refused.value) == text
