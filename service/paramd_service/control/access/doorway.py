"""Connection limits of REST: strangers stay briefly, holders of a good token longer.

A stranger is a connection that has not shown a good token. Strangers have slots of their own;
when those are full, the oldest is evicted. So a client that sends its request at once gets
through however many others stall, and no stranger ever displaces a connection that has shown a
good token.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol, TypeAlias

Who: TypeAlias = str | None
"""Id of a token; None for the owner's."""

MAX_STRANGERS: Final = 128
MAX_OF_ADDRESS: Final = 64
"""Strangers from one address."""

MAX_OF_TOKEN: Final = 128
"""Connections that have shown the same token."""


class Door(Protocol):
    """One open connection."""

    @property
    def address(self) -> tuple[str, int]:
        """The peer's host and port, unique among open connections."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress on it."""
        ...

    def shut(self) -> None:
        """Close the connection at once; `Doorway.closed` may be called later."""
        ...


class Doorway:
    """All connections of one server. Event loop only."""

    def __init__(
        self,
        *,
        max_strangers: int = MAX_STRANGERS,
        max_of_address: int = MAX_OF_ADDRESS,
        max_of_token: int = MAX_OF_TOKEN,
    ) -> None:
        self._max_strangers = max_strangers
        self._max_of_address = max_of_address
        self._max_of_token = max_of_token
        self._strangers: OrderedDict[tuple[str, int], Door] = OrderedDict()
        self._by_host: dict[str, OrderedDict[tuple[str, int], Door]] = {}
        # For each token, least recently used first.
        self._known: dict[Who, OrderedDict[tuple[str, int], Door]] = {}
        self._who: dict[tuple[str, int], Who] = {}

    @property
    def stranger_count(self) -> int:
        """Connections that have not shown a good token."""
        return len(self._strangers)

    def opened(self, door: Door) -> None:
        """Add a new connection, as a stranger."""
        self._strangers[door.address] = door
        of_host = self._by_host.setdefault(door.address[0], OrderedDict())
        of_host[door.address] = door
        if len(of_host) > self._max_of_address:
            self._shut(next(iter(of_host.values())))
        elif len(self._strangers) > self._max_strangers:
            # Evict from the address with the most, so that one address cannot push out the rest.
            crowd = max(self._by_host.values(), key=len)
            self._shut(next(iter(crowd.values())))

    def shown(self, address: tuple[str, int], who: Who) -> None:
        """Record that the connection's current request carries a good token."""
        door = self._strangers.get(address)
        if door is None and address in self._who:
            door = self._known[self._who[address]][address]
        if door is None:
            return  # shut meanwhile
        self._forget(address)
        self._who[address] = who
        same = self._known.setdefault(who, OrderedDict())
        same[address] = door
        if len(same) > self._max_of_token:
            idle = next((one for one in same.values() if not one.is_busy), None)
            if idle is not None:
                self._shut(idle)

    def closed(self, door: Door) -> None:
        """Forget a connection that has ended. Idempotent."""
        held = self._strangers.get(door.address)
        if held is None and door.address in self._who:
            held = self._known[self._who[door.address]][door.address]
        # A shut door reports its end late, when a new connection may already own its address.
        if held is door:
            self._forget(door.address)

    def _shut(self, door: Door) -> None:
        self._forget(door.address)
        door.shut()

    def _forget(self, address: tuple[str, int]) -> None:
        if self._strangers.pop(address, None) is not None:
            of_host = self._by_host[address[0]]
            del of_host[address]
            if not of_host:
                del self._by_host[address[0]]
        if address in self._who:
            who = self._who.pop(address)
            del self._known[who][address]
            if not self._known[who]:
                del self._known[who]
