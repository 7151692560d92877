"""A listening socket that a flood of strangers costs little.

Whoever opens connections and drops them at once fills a server's backlog faster than a server makes
anything of them, and the owner's connection waits behind them, or is not even taken in. So what is
gone by the time that it is accepted is closed right there, for microseconds instead of the
protocol, tasks and timers of a connection. And without a descriptor left, something gives way at
once; asyncio would look away for a second, and then find the same.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted, as far as it lets us
(net.core.somaxconn)."""

AT_ONCE = 16
"""Connections accepted before others on the event loop get their turn: pass it to a server as its
backlog, which asyncio takes for both, and call `keep_backlog` once it listens."""

GONE_AT_ONCE = 1024
"""Of those that are gone already, likewise."""

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(socket.socket):
    """Non-blocking, for asyncio, which calls `accept`. Event loop only."""

    def __init__(self, family: int) -> None:
        """No address yet: as a plain socket, `bind` it and call `keep_backlog`."""
        # asyncio sets TCP_NODELAY on connections only if the listener's protocol says TCP.
        protocol = socket.IPPROTO_TCP if family != socket.AF_UNIX else 0
        super().__init__(family, socket.SOCK_STREAM, protocol)
        self.setblocking(False)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.is_full: Callable[[], bool] = lambda: False
        """Whether another connection would take a descriptor that others in the process need."""
        self.on_full: Callable[[], bool] = lambda: False
        """Called when it is full, or no descriptor is left: whether a connection has been closed
        for the next."""

    def keep_backlog(self) -> None:
        """Listen, or go on listening, with the kernel's own backlog."""
        self.listen(BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection whose peer is still there.

        Raises:
            BlockingIOError: No connection waits.
        """
        if self.is_full() and self.on_full():
            # One in each turn of the event loop: those that are let in get theirs.
            raise BlockingIOError
        for _ in range(GONE_AT_ONCE):
            try:
                connection, address = super().accept()
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not self.on_full() and not self._turn_away():
                    raise
                # What was closed is free once the event loop has had its turn.
                raise BlockingIOError from error
            if not _is_gone(connection):
                return connection, address
            connection.close()
        raise BlockingIOError

    def close(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        super().close()

    def _turn_away(self) -> bool:
        """Close the next connection, which would otherwise keep the event loop busy for ever.

        Returns whether the spare descriptor made room for that. Another thread, or process, may
        take its place meanwhile; the number is theirs then, and the next call looks for another.
        """
        had, self._spare = self._spare, -1
        if had >= 0:
            os.close(had)
            with suppress(OSError):
                super().accept()[0].close()
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return had >= 0


def _is_gone(connection: socket.socket) -> bool:
    """Whether the peer has hung up and sent nothing: no request can come of it."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
