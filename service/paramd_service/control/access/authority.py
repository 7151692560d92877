"""The identity of a REST caller: tokens (the process's own or the store's) and browser sessions.

A session is a cookie plus a key, both required, in place of a token presented once. The cookie is
HttpOnly and SameSite=Strict, so no script can read it and no other site can use it. But cookies
ignore ports: the browser sends them to every server on the same host. So the page also sends a
key, kept in storage that only its own origin can read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final

from paramd.answers import parsed_json, read_file
from paramd.bounds import OWN_FILE
from paramd.clock import now_s
from paramd.errors import UsageError
from paramd.security import loopback
from paramd.security.tickets import MAX_TOKEN_CHARS, holds_token, new_token
from paramd.state_files import replace
from paramd_service.admission import covers
from paramd_service.control.access.roles import Action, UserRole, may
from paramd_service.control.store.tokens import TokenRow, TokenStore

MAX_OF_TOKEN = 16
"""Sessions per token; past the cap, its least recently used one is dropped."""
MAX_SESSIONS = 256
"""Sessions in total; past the cap, the token with the most loses one."""
IDLE_S = 12 * 3600.0
"""Idle time after which a session expires."""
SAVED_EVERY_S = 600.0
"""Longest delay of the time of last use in the file that keeps sessions."""
KEY_HEADER = "x-paramd-session"

CODE_S, MAX_CODE_S = 60.0, 3600.0
"""Validity of a sign-in code, which works once."""
MAX_CODES = 64
"""Unused codes; past the cap the token with the most loses its oldest."""

DEFAULT_TTL_S = 30 * 86_400.0
MAX_TTL_S = 366 * 86_400.0
MAX_NAME_CHARS = 64
MAX_JOBS_CHARS = 256
KEPT_S = 2.0
"""How long a token stays valid here after another control plane of the store has revoked it."""

_KEPT = 1024
_JOBS = re.compile(r"[A-Za-z0-9._*?-]+(,[A-Za-z0-9._*?-]+)*")
_MAX_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The two halves of a new session."""

    cookie: str
    key: str


@dataclass(slots=True)
class _Session:
    key_digest: bytes
    token_digest: str
    used_s: float


class Sessions:
    """Open sessions, which outlive a restart with `keep`. Single event loop."""

    def __init__(self, *, clock: Callable[[], float] = now_s) -> None:
        self._clock = clock
        self._path: Path | None = None
        self._own_digest = ""
        self._port = 0
        self._saved_s = -math.inf
        self._open: OrderedDict[bytes, _Session] = OrderedDict()
        self._followers: dict[bytes, set[asyncio.Future[None]]] = {}
        self._codes: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def keep(self, path: Path, own_digest: str, *, port: int) -> None:
        """Resume the sessions of an earlier process that had the same port, and keep these in the
        same file: digests alone, which open nothing. An unreadable or unwritable file only costs a
        sign-in.

        The earlier process may be of the job's last run, whose own token was another one: sessions
        of the owner are of the own token of this run, with `own_digest`, from now on.

        Those of another port end: whoever has that port now, perhaps another user of this host, is
        sent both halves of them by each page that is still open."""
        self._path, self._own_digest, self._port = path, own_digest, port
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            kept = parsed_json(read_file(path, OWN_FILE), OWN_FILE)
            if kept["port"] != port:
                self._save()
                return
            for name, (key, token, used_s, is_own) in kept["open"].items():
                digest = own_digest if is_own else str(token)
                session = _Session(bytes.fromhex(key), digest, float(used_s))
                self._open[bytes.fromhex(name)] = session

    def _save(self) -> None:
        self._saved_s = self._clock()
        if self._path is not None:
            told = {
                name.hex(): (
                    one.key_digest.hex(),
                    one.token_digest,
                    one.used_s,
                    one.token_digest == self._own_digest,
                )
                for name, one in self._open.items()
            }
            with suppress(OSError):
                replace(self._path, json.dumps({"port": self._port, "open": told}))

    def open(self, token_digest: str) -> Opened:
        """Open a session for the token with this digest, already checked to be valid."""
        opened = Opened(cookie=secrets.token_urlsafe(32), key=secrets.token_urlsafe(32))
        session = _Session(_secret_digest(opened.key), token_digest, self._clock())
        self._open[_secret_digest(opened.cookie)] = session
        counts = Counter(one.token_digest for one in self._open.values())
        if counts[token_digest] > MAX_OF_TOKEN:
            self._end_oldest(token_digest)
        elif len(self._open) > MAX_SESSIONS:
            self._end_oldest(counts.most_common(1)[0][0])
        self._save()
        return opened

    def token_digest(self, cookie: str, key: str) -> str:
        """Digest of the session's token; empty when there is no such session. Look the token up on
        each request: it may have been revoked."""
        if not cookie or not key:
            return ""
        name = _secret_digest(cookie)
        session = self._open.get(name)
        if session is None or not hmac.compare_digest(session.key_digest, _secret_digest(key)):
            return ""
        now_s = self._clock()
        if now_s - session.used_s >= IDLE_S:
            self._end(name)
            return ""
        session.used_s = now_s
        self._open.move_to_end(name)
        if now_s - self._saved_s >= SAVED_EVERY_S:
            self._save()
        return session.token_digest

    def invite(self, token_digest: str, ttl_s: float = CODE_S) -> str:
        """A code that opens one session for this token, checked to be valid, within that time. It
        may be in a URL's fragment: it expires before anybody reads a history."""
        self._forget_codes()
        if len(self._codes) >= MAX_CODES:
            # The oldest of the token with the most, so that no token's codes displace another's.
            ((most, _),) = Counter(of for of, _ in self._codes.values()).most_common(1)
            del self._codes[next(key for key, (of, _) in self._codes.items() if of == most)]
        code = secrets.token_urlsafe(32)
        self._codes[_secret_digest(code)] = (token_digest, self._clock() + ttl_s)
        return code

    def redeem(self, code: str) -> str:
        """Digest of the token that the code stands for; empty when it is unknown, used or expired.
        In any case, the code is invalid from now on."""
        self._forget_codes()
        found = self._codes.pop(_secret_digest(code), None)
        return found[0] if found is not None else ""

    def take_back(self, code: str, token_digest: str) -> None:
        """Make a code valid again that was redeemed and opened no session."""
        self._codes[_secret_digest(code)] = token_digest, self._clock() + CODE_S

    def _forget_codes(self) -> None:
        now_s = self._clock()
        for name in [name for name, (_, end_s) in self._codes.items() if now_s >= end_s]:
            del self._codes[name]

    def _end_oldest(self, token_digest: str) -> None:
        of_token = (n for n, one in self._open.items() if one.token_digest == token_digest)
        self._end(next(of_token))

    def _end(self, name: bytes) -> bool:
        """End a session, and what was opened with it; whether it was open."""
        for ended in self._followers.pop(name, ()):
            if not ended.done():
                ended.set_result(None)
        return self._open.pop(name, None) is not None

    @contextmanager
    def following(self, cookie: str, ended: asyncio.Future[None]) -> Iterator[None]:
        """Set `ended` once the cookie's session has ended: it signed out, was not used for
        `IDLE_S`, or made room for another one."""
        name, loop = _secret_digest(cookie), ended.get_loop()
        timer: list[asyncio.TimerHandle] = []

        def look() -> None:
            session = self._open.get(name)
            left_s = session.used_s + IDLE_S - self._clock() if session is not None else 0.0
            if left_s <= 0:
                self._end(name)
            else:
                timer[:] = [loop.call_later(left_s, look)]

        self._followers.setdefault(name, set()).add(ended)
        look()
        try:
            yield
        finally:
            for one in timer:
                one.cancel()
            mine = self._followers.get(name, set())
            mine.discard(ended)
            if not mine:
                self._followers.pop(name, None)

    def close(self, cookie: str) -> None:
        """End a session. Idempotent."""
        if self._end(_secret_digest(cookie)):
            self._save()


def cookie_name(host: str, *, is_tls: bool) -> str:
    """Name of the cookie of an origin, given its Host header. The port is part of it, because
    cookies ignore ports otherwise."""
    name, colon, port = host.rpartition(":")
    shown = port if colon and port.isdecimal() and not name.endswith(":") else "default"
    return f"{'__Host-' if is_tls else ''}paramd-{shown}"


def cookie_value(header: str, name: str) -> str:
    """The cookie's value in a Cookie header; empty when absent or malformed."""
    if len(header) > _MAX_CHARS:
        return ""
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _secret_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def token_id(row: TokenRow) -> str:
    """A token's id in its tickets: 64 bits of its digest, not a secret."""
    return row.digest[:16]


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request."""

    name: str
    """Name of the token; for the audit."""
    role: UserRole
    token_id: str | None = field(default=None, compare=False)
    """The token's id in tickets; None for the process's token, which cannot be revoked."""
    expires_s: float | None = field(default=None, compare=False)
    """When the token expires, in seconds since the Unix epoch; None: never."""
    jobs: str | None = field(default=None, compare=False)
    """As in `TokenRow`."""

    def may(self, action: Action) -> bool:
        """Whether the role permits the action."""
        return may(self.role, action)

    def sees(self, job: str) -> bool:
        return covers(self.jobs or "", job)


OWNER = Principal("owner", UserRole.ADMIN)
"""The holder of the process's own token, from endpoint.json or the site's token file."""

Mutation = Callable[[Principal, str, dict[str, object]], AbstractAsyncContextManager[object]]
"""Records a mutation around its effect: caller, operation, arguments."""


Denied = Callable[[str, str, str, str], None]
"""Refusal callback: actor (empty when unknown), role, operation, reason."""


class Tokens:
    """The authority on tokens. Single event loop."""

    def __init__(
        self,
        own_token: str,
        store: TokenStore,
        *,
        recorded: Mutation = lambda by, operation, detail: nullcontext(),
        on_revoked: Callable[[TokenRow], None] = lambda row: None,
        clock: Callable[[], float] = now_s,
    ) -> None:
        """`own_token` is the process owner's, with role admin; it is never stored. `on_revoked` is
        called for each token revoked here, before `revoke` returns."""
        self._own_digest = loopback.token_digest(own_token)
        self._own_chars = len(own_token)
        self._store = store
        self._recorded = recorded
        self._on_revoked = on_revoked
        self._clock = clock
        self._found: dict[str, tuple[TokenRow, float]] = {}
        self._revoked_count = 0
        self._ids = _Ids(self._digests)

    async def _digests(self) -> list[str]:
        return await self._store.digests(now_s=self._clock())

    def is_secret(self, text: str) -> bool:
        """Whether `text` is or contains a token, so must not appear in a URL or a log."""
        return holds_token(text) or self._is_own(text)

    async def principal(self, offered: str) -> Principal | None:
        """The principal of a token; None when it is unknown, expired or revoked.

        Digests are compared in constant time; any text may be offered.

        Raises:
            UnreachableError: When the store cannot be reached.
        """
        if not offered or len(offered) > MAX_TOKEN_CHARS:
            return None
        if not holds_token(offered) and not self._is_own(offered):
            return None
        return await self.principal_of_digest(loopback.token_digest(offered))

    @property
    def own_digest(self) -> str:
        """Digest of the process owner's token."""
        return self._own_digest

    def digest(self, token: str) -> str:
        """Digest that a session keeps instead of its token."""
        return loopback.token_digest(token)

    async def principal_of_digest(self, digest: str) -> Principal | None:
        """Like `principal`, from the digest of a token seen before."""
        if hmac.compare_digest(digest, self._own_digest):
            return OWNER
        row = await self._row(digest)
        return _principal(row, self._clock()) if row is not None else None

    async def proof(self, token_id: str, nonce: str, host: str, port: int) -> str | None:
        """The proof (`security/loopback.py`) that we know the token with this id, were reached at
        this address; None when no valid token has it.

        Raises:
            UnreachableError: As `principal`.
        """
        digest = self._own_digest
        if not hmac.compare_digest(token_id, digest[: loopback.ID_CHARS]):
            digest = await self._ids.digest(token_id)
            if not digest or await self.principal_of_digest(digest) is None:
                return None
        return loopback.proof_of(digest, nonce, host, port)

    async def create(
        self,
        by: Principal,
        *,
        role: UserRole,
        ttl_s: float = DEFAULT_TTL_S,
        name: str | None = None,
        jobs: str | None = None,
    ) -> tuple[TokenRow, str]:
        """Create a token; return its row and the token, which is not kept and never shown again.

        `TokenRequest` has checked the arguments.

        Raises:
            UsageError: The name is the owner's, or a token; or the patterns of jobs are
                invalid.
            ConflictError: The name has been used.
            UnreachableError: The store or the audit cannot be written.
        """
        name = name if name is not None else f"{role}-{secrets.token_hex(4)}"
        if holds_token(name) or name == OWNER.name:
            raise UsageError(
                f"name: {name[:64]!r}; expected 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 . _ @ - "
                "beginning with a letter or digit, and not 'owner'"
            )
        if jobs is not None and (
            role == UserRole.ADMIN or len(jobs) > MAX_JOBS_CHARS or not _JOBS.fullmatch(jobs)
        ):
            raise UsageError(
                f"jobs: {jobs[:64]!r}, role {role}; expected patterns such as team-a-*, "
                "separated by commas, and another role than admin, whose tokens are for all jobs"
            )
        token, now_s = new_token(), self._clock()
        row = TokenRow(
            name=name,
            digest=loopback.token_digest(token),
            role=str(role),
            created_s=now_s,
            expires_s=now_s + ttl_s,
            jobs=jobs,
        )
        detail: dict[str, object] = {"name": name, "role": str(role), "ttl_s": ttl_s}
        if jobs is not None:
            detail["jobs"] = jobs
        async with self._recorded(by, "token.create", detail):
            await self._store.create(row)
        self._ids.forget()
        return row, token

    async def list(self) -> list[TokenRow]:
        """All tokens in the store, including expired and revoked ones. Raises UnreachableError."""
        return await self._store.list()

    async def revoke(self, by: Principal, name: str) -> TokenRow:
        """Revoke a token permanently, effective at once. Idempotent.

        Raises:
            NotFoundError: If there is no such token.
            UnreachableError: If the store or the audit cannot be written.
        """
        async with self._recorded(by, "token.revoke", {"name": name[:MAX_NAME_CHARS]}):
            row = await self._store.revoke(name, now_s=self._clock())
        # Only once the store has it: before that, a concurrent lookup would cache the old row.
        self._found.pop(row.digest, None)
        self._revoked_count += 1
        self._on_revoked(row)
        return row

    def _is_own(self, offered: str) -> bool:
        # Every part of every request's URL is checked, and a hash costs more than a comparison. The
        # length of a token is no secret.
        if len(offered) != self._own_chars:
            return False
        return hmac.compare_digest(loopback.token_digest(offered), self._own_digest)

    async def _row(self, digest: str) -> TokenRow | None:
        now_s = time.monotonic()
        kept = self._found.get(digest)
        if kept is not None and now_s < kept[1]:
            return kept[0]
        self._found.pop(digest, None)
        before = self._revoked_count
        row = await self._store.find(digest)
        if row is None or not hmac.compare_digest(row.digest, digest):
            return None
        if self._revoked_count != before:
            return row  # possibly read before a concurrent revocation: do not cache it
        if len(self._found) >= _KEPT:
            self._found.clear()
        self._found[digest] = (row, now_s + KEPT_S)
        return row


class _Ids:
    """Digests of valid tokens by id, for proofs that the control plane knows a token.

    Anyone may ask for any id. Therefore all requests with unknown ids share one query of the store
    per `LOOK_S`.
    """

    LOOK_S: Final = 1.0
    """Seconds between two queries; a new token is looked up at once."""

    def __init__(self, digests: Callable[[], Awaitable[list[str]]]) -> None:
        """`digests` reads the digests of all valid tokens."""
        self._digests = digests
        self._known: dict[str, str] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = -math.inf
        self._is_new = asyncio.Event()
        self._is_current = False
        """Whether no token was created since the last query began."""

    def forget(self) -> None:
        """Query at once for the next unknown id, because a token was created."""
        self._is_current = False
        self._is_new.set()

    async def digest(self, token_id: str) -> str:
        """Return the digest of the valid token with this id; empty if there is none."""
        while token_id not in self._known:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.ensure_future(self._look())
            # A cancelled request must not cancel the query that others wait for.
            await asyncio.shield(self._looking)
            if self._is_current:
                break
        return self._known.get(token_id, "")

    async def _look(self) -> None:
        left_s = self._looked_s + self.LOOK_S - time.monotonic()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_new.wait(), max(left_s, 0.0))
        self._is_new.clear()
        self._looked_s, self._is_current = time.monotonic(), True
        self._known = {one[: loopback.ID_CHARS]: one for one in await self._digests()}


def _principal(row: TokenRow, now_s: float) -> Principal | None:
    expired = row.expires_s is not None and now_s >= row.expires_s
    if expired or row.revoked_s is not None:
        return None
    try:
        return Principal(row.name, UserRole(row.role), token_id(row), row.expires_s, row.jobs)
    except ValueError:
        return None  # a role of a newer version: its permissions are unknown here
