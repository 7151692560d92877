"""What is known of a call before it is served: who makes it, for whom, whether it was ordered."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from paramd import errors
from paramd.errors import DeniedError, UnreachableError, UsageError
from paramd.security.tickets import Claims, Role, Told
from paramd_service import admission
from paramd_service.sidecar import calls
from paramd_service.sidecar.orders import ReplayedError

PIN, REACH = f"/{calls.SERVICE}/PinSnapshot", f"/{calls.SERVICE}/ReachBoundary"
OPEN = "/grpc.health.v1.Health/Check"
DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
AWAY = grpc.StatusCode.UNAVAILABLE


class Door:
    """An interceptor whose tickets are names of roles, and what it notes."""

    def __init__(self, told: str = "") -> None:
        self.told = told
        self.refused: list[tuple[str, str]] = []
        self.allowed: list[str] = []
        note = lambda method, reason: self.refused.append((method, reason))  # noqa: E731
        self._door = calls.AuthInterceptor(
            self._verify, self._check_meant, note, self.allowed.append
        )

    def _verify(self, ticket: str) -> Claims:
        if ticket in ("bad", "again"):
            raise {"bad": DeniedError, "again": ReplayedError}[ticket](f"it is {ticket}")
        role = Role(ticket)
        return Claims(job="j", incarnation=1, role=role, expires_s=1.0, ticket_id="1",
                      token_id="mine", told=self.told)  # fmt: skip

    def _check_meant(self, rank: object) -> None:
        if rank not in (None, "0"):
            raise UnreachableError(f"rank {rank} is elsewhere")

    async def call(self, method: str, *metadata: tuple[str, str], serve: Callable[..., Any]) -> Any:
        """What `serve` gives within the call, or the code and text that it was refused with."""

        async def served(_details: object) -> Any:
            found = serve()
            return await found if asyncio.iscoroutine(found) else found

        async def abort(code: grpc.StatusCode, text: str) -> None:
            said.extend((code, text))

        said: list[Any] = []
        details = cast(Any, SimpleNamespace(method=method, invocation_metadata=metadata))
        found = await asyncio.create_task(self._door.intercept_service(served, details))
        if not isinstance(found, grpc.RpcMethodHandler):
            return found
        assert found.request_streaming
        assert found.response_streaming
        await found.stream_stream(None, SimpleNamespace(abort=abort))
        return tuple(said)


def of(role: str) -> tuple[str, str]:
    return "authorization", f"Bearer {role}"


async def test_who_calls_is_known_while_the_call_is_served() -> None:
    def seen() -> tuple[Any, ...]:
        return calls.CALLER.get().role.value, admission.CALLER.get(), errors.asked_by.get()

    door, asked = Door(), (errors.ASKED_BY_KEY, "asker")
    assert await door.call(PIN, of("reader"), serve=seen) == ("reader", "mine", "mine")
    # Ranks act for nobody, the control plane for whom it names.
    assert await door.call(PIN, of("control"), asked, serve=seen) == ("control", "asker", "asker")
    assert await door.call(PIN, of("control"), serve=seen) == ("control", None, "")
    assert door.allowed == [PIN] * 3
    assert await door.call(OPEN, serve=lambda: "open") == "open"
    assert (len(door.allowed), door.refused) == (3, [])


@pytest.mark.parametrize(
    ("method", "metadata", "code", "text"),
    [
        (PIN, [of("viewer")], DENIED, "this token's role is viewer; this call needs reader. Ask"),
        (REACH, [of("editor")], DENIED, "a ticket of role editor may not call this"),
        (PIN, [of("copier")], DENIED, "a ticket of role copier may not call this"),
        (PIN, [], UNKNOWN, "the call has no ticket"), (PIN, [of("bad")], UNKNOWN, "it is bad"),
        (PIN, [of("reader"), of("reader")], UNKNOWN, "the call has no ticket"),
        (PIN, [of("again")], AWAY, "it is again"), ("/x.Y/Z", [of("control")], DENIED, "'/x.Y/Z'"),
        (PIN, [of("reader"), (errors.RANK_KEY, "1")], AWAY, "rank 1 is elsewhere"),
    ],
)  # fmt: skip
async def test_who_is_refused_is_told_why_and_noted(
    method: str, metadata: list[tuple[str, str]], code: grpc.StatusCode, text: str
) -> None:
    door = Door()
    found = await door.call(method, *metadata, serve=lambda: pytest.fail("it was served"))
    assert found[0] is code
    assert found[1].startswith(text)
    # What was meant for another rank is no denial.
    noted = [] if errors.RANK_KEY in dict(metadata) else [(method, found[1])]
    assert (door.refused, door.allowed) == (noted, [])


async def test_an_order_is_for_its_method_its_asker_and_its_messages_alone() -> None:
    told = Told(REACH, "asker", "pass")
    told.add(b"one")
    told.add(b"two")
    door, more = Door(told.digest), [(errors.ASKED_BY_KEY, "asker"), (errors.READS_KEY, "pass")]

    def serve(*messages: bytes) -> Callable[[], Any]:
        def obey() -> list[bytes]:
            last = len(messages) - 1
            return [calls.as_ordered(one, last=at == last) for at, one in enumerate(messages)]

        return obey

    order = of("control"), *more
    assert await door.call(REACH, *order, serve=serve(b"one", b"two")) == [b"one", b"two"]
    for method, metadata, messages in (
        (REACH, order, (b"one", b"tw0")), (REACH, order, (b"one",)), (PIN, order, (b"one", b"two")),
        (REACH, order[:2], (b"one", b"two")), (REACH, order[::2], (b"one", b"two")),
    ):  # fmt: skip
        with pytest.raises(DeniedError, match="ordered another thing"):
            await door.call(method, *metadata, serve=serve(*messages))
    # No order, so nothing it must say; and no other call is one.
    assert await Door().call(PIN, of("reader"), serve=serve(b"any", b"thing")) == [b"any", b"thing"]


@pytest.mark.parametrize(("role", "more"), [("control", 1), ("control", 0), ("editor", 1)])
async def test_nothing_follows_what_was_ordered_alone(role: str, more: int) -> None:
    async def rest() -> AsyncIterator[bytes]:
        for _ in range(more):
            yield b"more"

    called = Door().call(REACH if role == "control" else PIN, of(role),
                         serve=lambda: calls.whole_if_ordered(rest()))  # fmt: skip
    if role == "control" and more:
        with pytest.raises(DeniedError, match="comes alone"):
            await called
    else:
        assert await called is None


async def test_others_are_read_with_what_the_caller_sent_for_it() -> None:
    reads = errors.READS_KEY, "ticket~seed"
    assert await Door().call(PIN, of("reader"), reads, serve=calls.handed_over) == "ticket~seed"
    with pytest.raises(DeniedError, match="send the field `reads`"):
        await Door().call(PIN, of("reader"), serve=calls.handed_over)


@pytest.mark.parametrize(
    ("remaining_s", "left_s"), [(None, None), (11.1, None), (11.0, 10.75), (1.0, 0.9), (-1.0, 0.0)]
)
def test_a_call_has_a_deadline_and_answers_before(
    remaining_s: float | None, left_s: float | None
) -> None:
    if left_s is not None:
        assert calls.check_deadline(remaining_s, 10.0) == pytest.approx(left_s)
        return
    given = "no deadline" if remaining_s is None else "a deadline in 11 s"
    with pytest.raises(UsageError, match=f"has {given}; set one of at most 10 s"):
        calls.check_deadline(remaining_s, 10.0)


def test_ranges_and_leases_are_those_there_are() -> None:
    assert calls.check_range(0, 0, 10) == calls.check_range(0, 10, 10) == (0, 10)
    assert (calls.check_range(3, 2, 10), calls.check_range(10, 0, 10)) == ((3, 5), (10, 10))
    for offset, size in ((-1, 1), (11, 0), (3, 8), (0, -1)):
        with pytest.raises(UsageError, match=f"{offset}, {size}; expected a range within 10 bytes"):
            calls.check_range(offset, size, 10)
    leases = [calls.granted_lease_s(ms, 3.0, 9.0) for ms in (0, 500, 9000, 90_000)]
    assert leases == [3.0, 0.5, 9.0, 9.0]
    with pytest.raises(UsageError, match="lease_ms: -1"):
        calls.granted_lease_s(-1, 3.0, 9.0)
