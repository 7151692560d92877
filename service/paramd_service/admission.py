"""Admission: shares of a cap, the revocation list, and a place for every gRPC call.

A quarter of every cap is reserved for the control plane and the owner. One token gets at most
half of the rest, so that its holder can exhaust only its own share. Calls that need no ticket have
separate places, so that strangers who hold streams open cannot lock out ticket holders.

Tickets are verified offline, so verifiers must learn which tokens were revoked. An id is kept
only as long as tickets of its token can be valid. When the list overflows, every ticket issued
for a token before that moment is refused: holders of good tokens get new ones, and no revoked
token works again.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paramd.answers import has_over
from paramd.clock import now_s
from paramd.errors import DeniedError, ExhaustedError, ParamdError, UsageError, codes_of
from paramd.security.tickets import OF_RANKS, Claims

_M_ARENA_MAX = -8
_LOOK_S = 2.0
"""Seconds between two checks of the heap."""
_GROWN_BYTES = 16 << 20
"""Heap growth that triggers a trim, in bytes."""

Who: TypeAlias = str | None
"""A token id; None: the control plane or the owner."""

CALLER: ContextVar[Who] = ContextVar("paramd_caller_token", default=None)
"""Caller that this task works for, inherited by tasks it starts."""


ENDED: ContextVar[asyncio.Future[None] | None] = ContextVar("paramd_ended", default=None)
"""Done once the caller's token or session has ended; None: neither can."""


async def while_permitted(waiting: Awaitable[object], timeout_s: float) -> None:
    """Wait for something on behalf of the caller, up to `timeout_s` seconds. Raises DeniedError at
    once when its token or session ends meanwhile."""
    ended, task = ENDED.get(), asyncio.ensure_future(waiting)
    both: set[asyncio.Future[Any]] = {task} | ({ended} if ended is not None else set())
    try:
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ended is not None and ended.done():
            raise DeniedError(
                "the token or session of this call has ended while it waited; what it asked for "
                "goes on"
            )
        if task.done():
            task.result()
    finally:
        task.cancel()


def covers(jobs: str, job: str) -> bool:
    """Return whether a token for `jobs` (its patterns, joined by commas; empty: all) is for
    `job`."""
    return not jobs or any(fnmatchcase(job, pattern) for pattern in jobs.split(","))


class Shares:
    """How much of a cap is taken, and by which token. Not thread-safe."""

    def __init__(self, capacity: int, what: str) -> None:
        """`what` names the counted things in errors, for example "calls"."""
        self.capacity = capacity
        self._what = what
        self._for_tokens = capacity - capacity // 4
        self.share = max(self._for_tokens - self._for_tokens // 2, 1)
        """Most that one token may take."""
        self._taken: Counter[Who] = Counter()

    @property
    def taken(self) -> int:
        """Taken by all callers together."""
        return self._taken.total()

    def check(self, who: Who, amount: int = 1) -> None:
        """Raise ExhaustedError, naming the limit hit, if `amount` more is not available."""
        taken = self.taken
        if taken + amount > self.capacity:
            raise ExhaustedError(
                f"{taken:,} of {self.capacity:,} {self._what} are taken, and {amount:,} more are "
                "requested; try again when others have ended"
            )
        if who is None:
            return
        if self._taken[who] + amount > self.share:
            raise ExhaustedError(
                f"your token has {self._taken[who]:,} {self._what} of its share of {self.share:,} "
                f"(of {self.capacity:,} in all), {amount:,} more requested; end some first"
            )
        if taken - self._taken[None] + amount > self._for_tokens:
            raise ExhaustedError(
                f"tokens have {taken - self._taken[None]:,} {self._what}, and the rest of "
                f"{self.capacity:,} is reserved for the control plane and the owner; try again "
                "shortly"
            )

    def count(self, who: Who, amount: int = 1) -> None:
        """Count an amount that is already taken, even beyond the cap."""
        self._taken[who] += amount

    def take(self, who: Who, amount: int = 1) -> None:
        """Take `amount` until `give_back`. Raises as `check`."""
        self.check(who, amount)
        self._taken[who] += amount

    def give_back(self, who: Who, amount: int = 1) -> None:
        """Return an amount that was taken."""
        self._taken[who] -= amount
        assert self._taken[who] >= 0
        if not self._taken[who]:
            del self._taken[who]

    @contextmanager
    def one(self, who: Who) -> Iterator[None]:
        """Take one for the duration of a block. Raises as `check`."""
        self.take(who)
        try:
            yield
        finally:
            self.give_back(who)


MAX_REVOKED: Final = 4096
"""Ids kept at once."""
MAX_ID_CHARS: Final = 64


class TokenRevokedError(DeniedError):
    """The ticket is genuine and unexpired, but its token was revoked or has expired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Revocations that a listener has not received yet."""

    token_ids: tuple[str, ...]
    keep_s: float
    """How long to keep the ids, from now on; 0 if there are none."""
    refused_before_s: float
    """Tickets issued for a token before this are refused; seconds since the Unix epoch, or 0."""
    serial: int
    """The listener's serial after applying it."""


class RevokedTokens:
    """The revocation list. Not thread-safe."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = now_s,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        # (expiry on the monotonic clock, serial), in the order of arrival.
        self._kept: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self.refused_before_s = 0.0
        """Tickets issued for a token before this time are refused; 0: none."""
        self.serial = 0
        """Rises with every change."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, token_id: str) -> bool:
        known = self._kept.get(token_id)
        return known is not None and self._clock() < known[0]

    def learn(self, keep_s: Mapping[str, float], *, refused_before_s: float = 0.0) -> bool:
        """Refuse tickets of these tokens, each for its seconds; return whether any is new."""
        now_s, before = self._clock(), self.serial
        for token_id in [key for key, (until_s, _) in self._kept.items() if until_s <= now_s]:
            del self._kept[token_id]
        for token_id, for_s in keep_s.items():
            known = self._kept.get(token_id)
            self.serial += 1 if known is None else 0
            until_s, heard = known if known is not None else (now_s, self.serial)
            self._kept[token_id] = (max(until_s, now_s + for_s), heard)
        while len(self._kept) > MAX_REVOKED:
            # Forgetting an id would readmit its tickets: refuse all issued until now.
            self._kept.popitem(last=False)
            refused_before_s = max(refused_before_s, self._wall_clock())
        if refused_before_s > self.refused_before_s:
            self.refused_before_s = refused_before_s
            self.serial += 1
        return self.serial > before

    def since(self, serial: int) -> Notice:
        """Revocations after `serial`; 0: all still kept."""
        now_s = self._clock()
        news = [
            (token_id, until_s - now_s)
            for token_id, (until_s, heard) in self._kept.items()
            if heard > serial and until_s > now_s
        ]
        return Notice(
            token_ids=tuple(token_id for token_id, _ in news),
            keep_s=max((left_s for _, left_s in news), default=0.0),
            refused_before_s=self.refused_before_s,
            serial=self.serial,
        )

    def refuses(self, claims: Claims) -> bool:
        if claims.token_id is None:
            return False
        # Ranks' tickets cannot be renewed: their token is looked up when they join.
        early = claims.issued_s < self.refused_before_s and claims.role not in OF_RANKS
        return claims.token_id in self or early

    def check(self, claims: Claims) -> None:
        """Raise TokenRevokedError if `refuses` says so."""
        if self.refuses(claims):
            raise TokenRevokedError(
                "the token behind this ticket has been revoked or has expired; ask an admin for a "
                "new one (paramd token create), then connect again"
            )


_HEALTH: Final = frozenset(f"/grpc.health.v1.Health/{m}" for m in ("Check", "List", "Watch"))

OPEN_METHODS: Final = _HEALTH | {
    "/paramd.v1.ControlService/ProveControl",
    "/paramd.v1.SidecarService/FindControl",
}
"""They reveal only whether the server is serving, as probes have no ticket, and where the control
plane is, as ranks show theirs to no other server."""

MAX_OPEN_CALLS: Final = 64
"""Concurrent calls of methods that need no ticket."""

CONNECTION_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # Drop connections that stay silent: no HTTP/2, or no call.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Bounds what a stranger can hold by resetting streams and opening new ones.
    ("grpc.max_concurrent_streams", 256),
    # Metadata that an unknown caller may send: two tickets of 1 KiB, and a call's other keys.
    ("grpc.max_metadata_size", 4 << 10),
    ("grpc.absolute_max_metadata_size", 4 << 10),
)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[
    [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
]


def few_heaps() -> None:
    """Limit glibc to two heaps; otherwise each of gRPC's threads gets one, and together they keep
    what a flood of calls took. Call it before threads are started."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)


async def give_back_memory() -> None:
    """Give back what the heap keeps of a burst of calls; in a pod it counts as the trainer's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    kept = _private_bytes() + _free_bytes()
    while trim is not None:
        await asyncio.sleep(_LOOK_S)
        if _private_bytes() + _free_bytes() > kept + _GROWN_BYTES:
            await asyncio.to_thread(trim, 0)
            kept = _private_bytes() + _free_bytes()
        kept = min(kept, _private_bytes() + _free_bytes())


def _private_bytes() -> int:
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * mmap.PAGESIZE


class _Mallinfo(ctypes.Structure):
    _fields_ = (
        ("before", ctypes.c_size_t * 8),
        ("free", ctypes.c_size_t),
        ("top", ctypes.c_size_t),
    )


def _free_bytes() -> int:
    """What the heap has free, given back or not: what a call freed after a trim, as one that was
    in progress, shows here alone. 0 where libc does not tell (glibc before 2.33, musl)."""
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        return 0
    info.restype = _Mallinfo
    return int(info().free)


def raise_descriptor_limit() -> None:
    """Raise the soft limit on descriptors to the hard one: gRPC has no cap on connections, and idle
    strangers soon use up a shell's default of 1,024 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(kw_only=True, eq=False)
class Doors(grpc.aio.ServerInterceptor):
    """Admits calls. Must run after the interceptor that identifies the caller."""

    counted: Callable[[str], bool]
    """Whether a method that needs a ticket takes a place of `calls`."""
    calls: Shares
    who: Callable[[], Who]
    """The current caller."""

    def __post_init__(self) -> None:
        self._watches = Shares(MAX_OPEN_CALLS, "calls without a ticket")
        # A cap of their own: health watchers never end, and must not keep ranks out.
        self._questions = Shares(4 * MAX_OPEN_CALLS, "calls without a ticket")

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = str(handler_call_details.method)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if method in OPEN_METHODS:
            places = self._watches if method in _HEALTH else self._questions
            return _Guarded(handler, method, lambda: places.one(None)).handler()
        if self.counted(method):
            return _Guarded(handler, method, lambda: self.calls.one(self.who())).handler()
        return _Guarded(handler, method, nullcontext).handler()


class _Guarded:
    """Parses a handler's requests, and holds its place while it runs. gRPC itself would log a
    traceback for each malformed request, and answer UNKNOWN."""

    def __init__(
        self, inner: Handler, method: str, place: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._inner = inner
        self._method = method
        self._place = place

    def handler(self) -> Handler:
        """The handler to serve instead."""
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[self._inner.request_streaming, self._inner.response_streaming]
        serve = self._many if self._inner.response_streaming else self._one
        served: Handler = make(serve, response_serializer=self._inner.response_serializer)
        return served

    async def _one(self, incoming: Any, context: Any) -> Any:
        inner = self._inner
        behavior: Any = inner.stream_unary if inner.request_streaming else inner.unary_unary
        async with _forgotten(incoming):
            try:
                with self._place():
                    return await behavior(self._requests(incoming, context), context)
            except (UsageError, ExhaustedError) as error:
                await _abort(context, error)

    async def _many(self, incoming: Any, context: Any) -> None:
        inner = self._inner
        behavior: Any = inner.stream_stream if inner.request_streaming else inner.unary_stream
        async with _forgotten(incoming):
            try:
                with self._place():
                    answers = behavior(self._requests(incoming, context), context)
                    if not hasattr(answers, "__aiter__"):
                        await answers  # writes by itself
                        return
                    async for answer in answers:
                        await context.write(answer)
            except (UsageError, ExhaustedError) as error:
                await _abort(context, error)

    def _requests(self, incoming: Any, context: Any) -> Any:
        if self._inner.request_deserializer is None:
            return incoming  # it parses its own bytes
        if self._inner.request_streaming:
            return self._parsed_stream(incoming, context)
        return self._parsed(incoming)

    async def _parsed_stream(self, incoming: AsyncIterator[Any], context: Any) -> Any:
        async for data in incoming:
            try:
                request = self._parsed(data)
            except UsageError as error:
                await _abort(context, error)
            yield request

    def _parsed(self, data: Any) -> Any:
        parse: Any = self._inner.request_deserializer
        check_parts(parse.__self__.DESCRIPTOR, data)
        try:
            return parse(data)
        except DecodeError:
            raise UsageError(f"the request is not a message of {self._method[:128]}") from None


MAX_PARTS: Final = 1 << 17
"""Most fields of a serialized message; each takes tens of bytes of memory, and as few as two here:
a message of 4 MiB would become 160."""


def check_parts(kind: Any, data: bytes) -> None:
    """Raise UsageError if a request of this descriptor has too many fields, before it is parsed."""
    if has_over(kind, data, MAX_PARTS):
        raise UsageError(
            f"the request has more than {MAX_PARTS:,} parts; split it into several calls"
        )


@asynccontextmanager
async def _forgotten(incoming: Any) -> AsyncIterator[None]:
    """Drop a finished call's requests now; reference cycles would keep them until the next garbage
    collection. gRPC keeps the error of an aborted call, whose frames have the requests and the call
    itself, and raises it again. From Python 3.12 on, an error that passed through an asynchronous
    context manager is kept by its own frames. The stream that requests are read from keeps the last
    one, and is kept by it."""
    try:
        yield
    except grpc.aio.AbortError as error:
        drop_frames(error)
    finally:
        if hasattr(incoming, "__aiter__"):
            with suppress(RuntimeError):  # it is being read
                await aiter(incoming).aclose()


def drop_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of those that it replaced, and what their frames hold."""
    while error is not None:
        replaced = error.__context__
        error.__context__ = error.__cause__ = error.__traceback__ = None
        error = replaced


async def _abort(context: Any, error: ParamdError) -> None:
    await context.abort(grpc.StatusCode[codes_of(error).grpc], str(error))
