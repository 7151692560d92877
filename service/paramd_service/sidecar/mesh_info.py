"""What the trainers found out together at attach, as the "mesh" message tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paramd.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerInfo:
    """Where one rank's sidecar is found."""

    rank: int
    address: str
    socket_path: str
    host_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """What the trainers found out together at attach."""

    peers: tuple[PeerInfo, ...]
    control_address: str
    layout_digest: str
    layout: bytes
    """A serialized paramd.v1.Layout."""


def parse_mesh(message: dict[str, Any], layout: bytes) -> Mesh:
    """The mesh in a "mesh" message. Raises UsageError."""
    try:
        peers = tuple(
            PeerInfo(
                rank=int(peer["rank"]),
                address=str(peer["address"]),
                socket_path=str(peer["socket_path"]),
                host_id=str(peer["host_id"]),
            )
            for peer in message["peers"]
        )
        control_address, digest = message["control_address"], message["layout_digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"mesh: {error!r} is missing or of a wrong type") from None
    if not isinstance(control_address, str | None) or not isinstance(digest, str):
        raise UsageError("mesh: control_address and layout_digest must be text")
    return Mesh(
        peers=tuple(sorted(peers, key=lambda peer: peer.rank)),
        control_address=control_address or "",
        layout_digest=digest,
        layout=layout,
    )
