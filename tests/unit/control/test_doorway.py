"""Connections of strangers and of tokens' holders: who makes place for whom."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paramd.errors import ExhaustedError
from paramd_service.admission import Shares
from paramd_service.control.access.doorway import Doorway


@dataclass(eq=False)
class FakeDoor:
    address: tuple[str, int]
    is_busy: bool = False
    is_shut: bool = False

    def shut(self) -> None:
        self.is_shut = True


def doors(doorway: Doorway, count: int, host: str = "a") -> list[FakeDoor]:
    found = [FakeDoor((host, port)) for port in range(1, count + 1)]
    for door in found:
        doorway.opened(door)
    return found


def shut(found: list[FakeDoor]) -> list[int]:
    return [door.address[1] for door in found if door.is_shut]


def test_the_stranger_that_came_first_makes_place() -> None:
    doorway = Doorway(max_strangers=4, max_of_address=3)
    many = doors(doorway, 5)
    assert shut(many) == [1, 2]
    other = doors(doorway, 1, "b")
    assert (shut(other), shut(many)) == ([], [1, 2])
    another = doors(doorway, 1, "c")
    assert (shut(another), shut(other), shut(many)) == ([], [], [1, 2, 3])
    assert doorway.stranger_count == 4


def test_strangers_never_push_out_who_has_shown_a_token() -> None:
    doorway = Doorway(max_strangers=4, max_of_address=4)
    (known,) = doors(doorway, 1)
    doorway.shown(known.address, "token")
    strangers = [FakeDoor(("a", port)) for port in range(2, 50)]
    for one in strangers:
        doorway.opened(one)
    assert not known.is_shut
    assert doorway.stranger_count == 4


def test_of_one_tokens_connections_the_idle_one_used_longest_ago_makes_place() -> None:
    doorway = Doorway(max_of_token=2)
    mine = doors(doorway, 4)
    mine[0].is_busy = True
    for door in mine[:3]:
        doorway.shown(door.address, "one")
    assert shut(mine) == [2]
    doorway.shown(mine[3].address, "two")
    assert shut(mine) == [2]
    doorway.closed(mine[1])  # tells of its end late
    for door in mine:
        doorway.closed(door)
        doorway.closed(door)
    assert doorway.stranger_count == 0
    doors(doorway, 4)


def test_a_late_end_does_not_take_who_has_the_address_now() -> None:
    doorway = Doorway(max_of_address=1)
    first = FakeDoor(("a", 1))
    doorway.opened(first)
    doorway.opened(FakeDoor(("a", 2)))
    again = FakeDoor(("a", 1))
    doorway.opened(again)
    doorway.closed(first)
    assert doorway.stranger_count == 1
    doorway.shown(again.address, "token")
    assert doorway.stranger_count == 0


def test_a_token_takes_its_share_and_all_tokens_leave_the_reserve() -> None:
    shares = Shares(8, "calls")
    for _ in range(3):
        shares.take("a")
    with pytest.raises(ExhaustedError, match=r"your token has 3 calls of its share of 3 \(of 8"):
        shares.take("a")
    for _ in range(3):
        shares.take("b")
    with pytest.raises(ExhaustedError, match="reserved for the control plane and the owner"):
        shares.take("c")
    shares.take(None, 2)
    with pytest.raises(ExhaustedError, match="8 of 8 calls are taken"):
        shares.take(None)
    shares.give_back("a")
    shares.take("c")
    assert shares.taken == 8


@pytest.mark.parametrize("capacity", range(1, 40))
def test_one_token_never_takes_all_unless_there_is_one_only(capacity: int) -> None:
    shares = Shares(capacity, "calls")
    assert 1 <= shares.share <= capacity
    assert shares.share < capacity or capacity == 1
