"""Connections of strangers and of tokens' holders: who makes place for whom."""

import asyncio
import resource

import pytest

from paramd_service.admission import Shares
from paramd_service.control.access.doorway import LEFT_FREE, Doorway


class FakeDoor:
    def __init__(self, doorway: Doorway, host: str) -> None:
        self.host = host
        self.is_shut = False
        self._doorway = doorway
        doorway.opened(self)

    def shut(self) -> None:
        self.is_shut = True
        self._doorway.closed(self)

    def carry(self, tunnel: asyncio.Protocol) -> asyncio.Transport:
        raise NotImplementedError


def doors(doorway: Doorway, count: int, host: str = "a") -> list[FakeDoor]:
    return [FakeDoor(doorway, host) for _ in range(count)]


def shut(found: list[FakeDoor]) -> list[int]:
    return [number for number, door in enumerate(found) if door.is_shut]


def test_the_stranger_that_came_first_makes_place() -> None:
    doorway = Doorway(places=4)
    assert shut(doors(doorway, 6)) == [0, 1]


def test_strangers_of_one_address_push_out_none_of_another() -> None:
    doorway = Doorway(places=4)
    other, many = doors(doorway, 1, "b"), doors(doorway, 50)
    assert (shut(other), shut(many)) == ([], list(range(47)))
    third = doors(doorway, 1, "c")
    assert (shut(third), shut(other), len(shut(many))) == ([], [], 48)


def test_strangers_never_push_out_who_has_shown_a_token() -> None:
    doorway = Doorway(places=4)
    (known,) = doors(doorway, 1)
    for _ in range(2):
        doorway.shown(known)
    first = doors(doorway, 50)
    assert not known.is_shut
    assert len(shut(first)) == 46
    for _ in range(2):
        doorway.closed(known)
        doorway.closed(first[-1])
    assert shut(doors(doorway, 1)) == []
    assert len(shut(first)) == 46


def test_idle_connections_of_the_token_with_the_most_make_room_and_the_owners_last() -> None:
    doorway = Doorway(places=16)
    found = {who: doors(doorway, count, who) for who, count in (("", 3), ("few", 1), ("many", 2))}
    for who, of in found.items():
        for door in of:
            doorway.shown(door, who or None)
            doorway.waits(door)
    doorway.works(found["many"][0])
    for _ in range(5):
        assert doorway.make_room()
    assert {who: shut(of) for who, of in found.items()} == {"": [0, 1, 2], "few": [0], "many": [1]}
    # The one that has a request stays.
    assert not doorway.make_room()
    doorway.waits(found["many"][0])
    assert doorway.make_room()
    assert shut(found["many"]) == [0, 1]


def test_it_is_full_while_others_still_find_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    doorway = Doorway()
    found = doors(doorway, 256 - LEFT_FREE)
    assert len(shut(found)) == len(found) - 64
    known = [door for door in found if not door.is_shut]
    for door in known:
        doorway.shown(door, "many")
    assert not doorway.is_full()
    # A tunnel takes two more.
    for door in known:
        doorway.tunnels.add(door)
    assert doorway.is_full()
    doorway.closed(known[0])
    assert not doorway.is_full()


@pytest.mark.parametrize("capacity", range(1, 40))
def test_one_token_never_takes_all_unless_there_is_one_only(capacity: int) -> None:
    shares = Shares(capacity, "calls")
    assert 1 <= shares.share <= capacity
    assert shares.share < capacity or capacity == 1
