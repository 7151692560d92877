"""Tickets as ours are: each good at one server, and the control plane's orders for one call.

`bound` makes any role's. That of an order stands for one until the call is known: `Ordering` signs
it then, as `ordered` does for calls of raw bytes.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import grpc

from paramd.errors import ASKED_BY_KEY, READS_KEY
from paramd.security.tickets import OF_RANKS, KeyTree, Role, Signer, Told, handed

Metadata = Sequence[tuple[str, str]]

SEED = bytes(range(32))
TREE = KeyTree(SEED, 64)
ORDER = "order "
_numbers = itertools.count(time.time_ns())


def bound(signer: Signer, role: Role, rank: int | None = 0, **claims: Any) -> str:
    """What the sidecar of `rank` is shown, or (None) the control plane; `claims` as of `mint`."""
    claims = {"job": "job", "incarnation": 1, "ttl_s": 60.0} | claims
    of_rank = claims | {"rank": 0 if rank is None else rank}
    if role is Role.CONTROL:
        return ORDER + json.dumps(of_rank)
    if role in OF_RANKS:
        return signer.mint(role=role, **of_rank)
    text = signer.mint(role=role, keys=TREE.root, **claims)
    return TREE.shown(text, 0 if rank is None else rank + 1)


def reads(signer: Signer, role: Role, world_size: int, **claims: Any) -> str:
    """What a rank is handed to read the others with."""
    claims = {"job": "job", "incarnation": 1, "ttl_s": 60.0} | claims
    keys = KeyTree(SEED, world_size).root
    return handed(signer.mint(role=role, keys=keys, **claims), SEED.hex())


def ordered(signer: Signer, path: str, metadata: Metadata, messages: Iterable[bytes]) -> Metadata:
    """The metadata, with an order signed for this call."""
    found = dict(metadata)
    scheme, _, claims = found.get("authorization", "").partition(f"Bearer {ORDER}")
    if scheme or not claims:
        return metadata
    told = Told(path, found.get(ASKED_BY_KEY, ""), found.get(READS_KEY, ""))
    for message in messages:
        told.add(message)
    order = {"number": next(_numbers), "told": told.digest} | json.loads(claims)
    text = signer.mint(role=Role.CONTROL, **order)
    return [("authorization", f"Bearer {text}"), *(one for one in metadata if ORDER not in one[1])]


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any = None
    wait_for_ready: bool | None = None
    compression: Any = None


class Ordering(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
):
    """Signs each order for its call: `grpc.intercept_channel(channel, Ordering(signer))`."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._details(details, [request]), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._details(details, [request]), request)

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        requests = list(requests)
        return continuation(self._details(details, requests), iter(requests))

    def _details(self, details: Any, messages: Iterable[Any]) -> Any:
        data = (one if isinstance(one, bytes) else one.SerializeToString() for one in messages)
        metadata = ordered(self._signer, details.method, details.metadata or (), data)
        return _Details(details.method, details.timeout, metadata)
