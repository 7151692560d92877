"""Copies the data of an edit from another rank's sidecar on this host that has it staged.

The peer hands over its edit memory, read-only; the bytes are copied into our own, verified
there, and must match the digests that the peer reports.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

from paramd.errors import (
    ConflictError,
    DataLossError,
    NotFoundError,
    UnreachableError,
    UsageError,
    error_of_grpc,
)
from paramd.memory import handover
from paramd.mesh.asked import check_handover
from paramd.state_files import host_id, kernel_of
from paramd_service.sidecar.edits.entry import Entry, Phase
from paramd_service.sidecar.edits.receive import Fill
from paramd_service.sidecar.rank import RankSidecar

BLOCK_BYTES = 2 << 20
_ANSWER_S = 5.0


async def copy_from_peer(rank: RankSidecar, entry: Entry, peer_rank: int, ticket: str) -> None:
    """Stage what is missing of an edit from the sidecar of `peer_rank`.

    Raises:
        UsageError: that rank is not on this host, or its data has another size.
        NotFoundError, ConflictError: it does not have the edit staged.
        DataLossError: its digests do not match the copied bytes.
        UnreachableError: its sidecar does not answer.
    """
    if entry.phase is not Phase.STAGING:
        return
    path = _socket_of(rank, peer_rank)
    descriptor, answer = await asyncio.to_thread(_shared, path, ticket, entry.edit_id, peer_rank)
    try:
        begin, size_bytes = int(answer["begin"]), int(answer["size_bytes"])
        if size_bytes != entry.size_bytes:
            raise UsageError(
                f"copy_from_rank: rank {peer_rank} has {size_bytes:,} bytes of this edit, rank "
                f"{rank.config.rank} needs {entry.size_bytes:,}; they do not hold the same pieces"
            )
        while (offset := entry.staged_bytes) < size_bytes:
            size = min(BLOCK_BYTES, size_bytes - offset)
            await rank.edits.take(entry, [(offset, size, _reading(descriptor, begin + offset))])
    finally:
        os.close(descriptor)
    # The peer may have dropped the edit and reused its memory while we copied.
    if [digest.hex() for digest in entry.data_digests] != answer["data_digests"]:
        await rank.edits.drop(entry.edit_id)
        raise DataLossError(
            f"copy_from_rank: what rank {peer_rank} has staged changed while it was copied; "
            "stage it again"
        )


def share_message(entry: Entry) -> handover.Message:
    """The answer to a peer that wants the data of an edit.

    Raises:
        ConflictError: it is not staged, or an undo that has no data.
    """
    if entry.phase not in (Phase.STAGED, Phase.READY) or entry.body is None:
        raise ConflictError(
            f"edit {entry.edit_id} is {entry.phase.name}; only what is STAGED can be copied"
        )
    return {
        "op": "shared",
        "begin": entry.body.data_begin,
        "size_bytes": entry.size_bytes,
        "data_digests": [digest.hex() for digest in entry.data_digests],
    }


def _socket_of(rank: RankSidecar, peer_rank: int) -> Path:
    peers = {peer.rank: peer for peer in rank.ready_mesh().peers}
    peer, own = peers.get(peer_rank), peers.get(rank.config.rank)
    host = own.host_id if own is not None else host_id()
    if peer is None or peer_rank == rank.config.rank or not peer.socket_path:
        raise UsageError(f"copy_from_rank: {peer_rank} is no other rank of this mesh")
    if kernel_of(peer.host_id) != kernel_of(host):
        raise UsageError(f"copy_from_rank: rank {peer_rank} is on another host; send its data")
    return Path(peer.socket_path)


def _shared(path: Path, ticket: str, edit_id: str, peer_rank: int) -> tuple[int, handover.Message]:
    connection = handover.connect(path, timeout_s=_ANSWER_S)
    try:
        message = {"op": "share", "ticket": ticket, "rank": peer_rank, "edit_id": edit_id}
        handover.send(connection, message)
        answer, descriptors = handover.receive(connection)
    except (EOFError, OSError) as error:
        raise UnreachableError(f"the sidecar of rank {peer_rank} does not answer") from error
    finally:
        connection.close()
    try:
        if answer["op"] == "shared" and len(descriptors) == 1:
            check_handover(answer, ticket, peer_rank)
            return descriptors.pop(), answer
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    kind = error_of_grpc(str(answer.get("code"))) if answer["op"] == "error" else NotFoundError
    raise kind(f"rank {peer_rank}: {answer.get('message', answer['op'])}")


def _reading(descriptor: int, position: int) -> Fill:
    def fill(address: int, begin: int, size_bytes: int) -> None:
        target = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
        done = 0
        while done < size_bytes:
            moved = os.preadv(descriptor, [target[done:]], position + begin + done)
            if not moved:
                raise DataLossError("copy_from_rank: the peer's memory is shorter than it says")
            done += moved

    return fill
