"""The trainer's end of its sidecar, as far as it needs no sidecar's process."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramd.errors import UnreachableError
from paramd.memory import handover
from paramd.memory.handover import Descriptors
from paramd.trainer.helpers import sidecar_link
from paramd.trainer.helpers.sidecar_link import Identity, SidecarLink
from paramd.trainer.settings import AttachSettings


class Link:
    """A link that is connected to this test."""

    def __init__(self) -> None:
        identity = Identity(
            job="j", incarnation=1, rank=0, world_size=1, public_key=b"", rank_ticket=""
        )
        self.link = SidecarLink(
            identity, AttachSettings(), socket_path=Path("/nowhere"), arena_bytes=64
        )
        self.sidecar, trainer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link._connection = trainer
        self.shared = self.link.descriptors = Descriptors.create(64)

    def asked(self) -> handover.Message:
        return handover.receive(self.sidecar)[0]

    def answer(self, number: int, size_bytes: int) -> None:
        memory = os.memfd_create("state")
        answer = {"op": "state", "number": number, "size_bytes": size_bytes}
        handover.send(self.sidecar, answer, [memory])
        os.close(memory)

    def close(self) -> None:
        self.sidecar.close()
        self.link.close()


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.close()


def test_an_answer_that_came_too_late_is_not_taken_for_the_next(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_link, "STATE_TIMEOUT_S", 0.05)
    with pytest.raises(UnreachableError, match="does not answer"):
        link.link.add_state(4096)
    first = link.asked()
    assert (first["known"], first["size_bytes"]) == (0, 4096)
    link.answer(first["number"], 4096)
    monkeypatch.setattr(sidecar_link, "STATE_TIMEOUT_S", 60.0)

    def serve() -> None:
        link.answer(link.asked()["number"], 8192)

    thread = threading.Thread(target=serve)
    thread.start()
    link.link.add_state(8192)
    thread.join()
    assert [one.size_bytes for one in link.shared.state] == [8192]
    assert link.shared.as_list()[-1] == link.shared.state[0].descriptor
