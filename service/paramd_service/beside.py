"""A gRPC server on loopback listens at a Unix socket, too, where its own user's clients find it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paramd.errors import ParamdError
from paramd.security.loopback import MAX_PATH_BYTES, plain_ip
from paramd.security.tls import is_loopback
from paramd.state_files import beside_port, sockets_dir

if TYPE_CHECKING:
    import grpc.aio

log = logging.getLogger("paramd")


def listen_beside(server: grpc.aio.Server, host: str, port: int) -> bool:
    """Listen at `beside_port`, before the server starts; return whether it does.

    Without it (a long path, a file system without sockets) clients use the port. The socket stays
    when the server ends: so its port is not asked in its place, whoever has that by then.
    """
    if not is_loopback(host):
        return False
    path = beside_port(str(plain_ip("127.0.0.1" if host == "localhost" else host)), port)
    if len(bytes(path)) > MAX_PATH_BYTES:
        return False
    try:
        sockets_dir()
        # Another server of ours had the port before, or gRPC could not bind the name.
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError, ParamdError) as error:
        log.info("no Unix socket beside port %d: %s", port, error)
        return False
    return True
