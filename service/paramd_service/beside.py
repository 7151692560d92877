"""A gRPC server on loopback listens at a Unix socket, too, where its own user's clients find it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paramd.errors import ParamdError
from paramd.security.loopback import place_beside

if TYPE_CHECKING:
    import grpc.aio

log = logging.getLogger("paramd")


def listen_beside(server: grpc.aio.Server, host: str, port: int) -> bool:
    """Listen at `place_beside`, before the server starts; return whether it does."""
    try:
        path = place_beside(host, port)
        if path is None:
            return False
        server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError, ParamdError) as error:
        log.info("no Unix socket beside port %d: %s", port, error)
        return False
    return True
