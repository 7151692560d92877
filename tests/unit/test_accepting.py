"""A listener gives only connections that are still there, and makes room when none is left."""

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paramd.accepting import Listener


@pytest.fixture
def listener() -> Iterator[Listener]:
    with contextlib.closing(Listener(socket.AF_INET)) as found:
        found.bind(("127.0.0.1", 0))
        found.keep_backlog()
        yield found


def connected(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.getsockname())


def test_whoever_is_gone_is_passed_over(listener: Listener) -> None:
    for _ in range(50):
        connected(listener).close()
    with connected(listener) as waits, connected(listener) as asks:
        asks.sendall(b"GET")
        asks.shutdown(socket.SHUT_WR)
        first, _ = listener.accept()
        second, _ = listener.accept()
        with first, second:
            assert first.getpeername() == waits.getsockname()
            # It has hung up, too, but not before it had asked.
            assert second.recv(8) == b"GET"
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_who_is_full_makes_room_before_it_accepts_one_a_turn(listener: Listener) -> None:
    rooms = [True, False]
    listener.is_full = lambda: True
    listener.on_full = lambda: rooms.pop(0)
    with connected(listener) as waits:
        with pytest.raises(BlockingIOError):
            listener.accept()
        # Nothing could make room: it is let in, as there are descriptors.
        with listener.accept()[0] as accepted:
            assert accepted.getpeername() == waits.getsockname()
    assert not rooms


FULL = """
import contextlib, resource, socket, sys
from paramd.accepting import Listener
listener = Listener(socket.AF_INET)
listener.bind(("127.0.0.1", 0))
listener.keep_backlog()
waiting = [socket.create_connection(listener.getsockname()) for _ in range(3)]
held = [socket.socket() for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(s.fileno() for s in held) + 1,) * 2)
if sys.argv[1] == "room":
    listener.on_full = lambda: not held.pop().close()
for _ in range(2):
    with contextlib.suppress(BlockingIOError):
        kept = listener.accept()[0]
        print("accepted", kept.getpeername() == waiting[0].getsockname())
        break
else:
    print("turned away", [one.recv(1) for one in waiting[:2]])
"""


@pytest.mark.parametrize(
    ("how", "said"), [("room", "accepted True"), ("none", "turned away [b'', b'']")]
)
def test_without_a_descriptor_left_something_gives_way_at_once(how: str, said: str) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 16
    done = subprocess.run(
        [sys.executable, "-c", FULL, how], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == said


TAKEN = """
import os, resource, socket
from paramd.accepting import Listener
listener = Listener(socket.AF_INET)
listener.bind(("127.0.0.1", 0))
listener.keep_backlog()
waiting = socket.create_connection(listener.getsockname())
spare, (before, most) = listener._spare, resource.getrlimit(resource.RLIMIT_NOFILE)
def tried():
    # No number below the spare one is free, and that one is none too once it is free.
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, most))
    try:
        return listener.accept()[0]
    except OSError as error:
        return type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
print(tried())
theirs = os.open(os.devnull, os.O_RDONLY)
print(theirs == spare, tried(), os.fstat(theirs).st_size)
print(listener.accept()[0].getpeername() == waiting.getsockname())
"""


def test_a_descriptor_that_others_take_in_its_place_stays_theirs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TAKEN], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["BlockingIOError", "True OSError 0", "True"]
