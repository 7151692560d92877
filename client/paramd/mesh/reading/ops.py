"""Operations of a sidecar's Unix socket, for clients on its host."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paramd.errors import ConflictError, ParamdError, UnreachableError, error_of_grpc
from paramd.memory import handover
from paramd.memory.descriptors import close_all
from paramd.mesh.peers.control import PeerAddress
from paramd.mesh.peers.grpc import check_handover
from paramd.mesh.peers.sidecars import Sidecars
from paramd.state_files import host_id, kernel_of

ANSWER_S: Final = 1.5
"""Seconds for an answer: a sidecar responds within milliseconds; a stopped one must be detected
soon."""


def is_same_host(peer: PeerAddress) -> bool:
    """Whether the peer's sidecar runs on our kernel and its socket is visible here.

    Containers of one host share the kernel, but not necessarily the path.
    """
    same_kernel = kernel_of(peer.host_id) == kernel_of(host_id())
    return bool(peer.socket_path) and same_kernel and os.path.exists(peer.socket_path)


async def ask_op(
    sidecars: Sidecars, rank: int, op: str, fields: Mapping[str, Any], *, timeout_s: float = 60.0
) -> Mapping[str, Any]:
    """The answer to an operation that a part of the rank's sidecar serves.

    Args:
        op: Name of the operation, and of its answer.
        fields: The request beside the ticket. Request and answer are JSON, 128 KiB at most.
        timeout_s: Seconds until the answer.

    Raises:
        ConflictError: The rank is on another host.
        UnreachableError: Its sidecar does not answer.
        ParamdError: As it refused: UsageError if none of its parts has such an operation.
    """
    peer, ticket = sidecars.document.peer(rank), sidecars.document.shown(rank)
    if not is_same_host(peer):
        raise ConflictError(f"{op}: rank {rank} is on another host; run this on its host")
    message = {**fields, "op": op, "ticket": ticket, "rank": rank}

    def answered() -> Mapping[str, Any]:
        with handover.connect(Path(peer.socket_path), timeout_s=timeout_s) as connection:
            return asked(connection, message, op, 0)[0]

    return await asyncio.to_thread(answered)


def asked(
    connection: socket.socket, message: handover.Message, wanted: str, count: int
) -> tuple[handover.Message, list[int]]:
    """Send a request with a ticket; return the answer, and its `count` descriptors."""
    rank = message["rank"]
    try:
        handover.send(connection, message)
        answer, descriptors = handover.receive(connection)
    except EOFError as error:
        raise UnreachableError(f"rank {rank}: its sidecar closed the socket") from error
    except OSError as error:
        if isinstance(error, ParamdError):
            raise
        raise UnreachableError(f"rank {rank}: its sidecar does not answer") from error
    try:
        if answer["op"] == wanted and len(descriptors) == count:
            check_handover(answer, str(message["ticket"]), rank)
            found, descriptors = descriptors, []
            return answer, found
    finally:
        close_all(descriptors)
    if answer["op"] == "error":
        raise error_of_grpc(str(answer.get("code")))(f"rank {rank}: {answer.get('message')}")
    raise UnreachableError(f"rank {rank}: unexpected {answer['op']!r} at its Unix socket")
