"""Live reads of a real sidecar's memory: who may, what they get, and what a mesh makes of it."""

import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import paramd
from paramd.errors import ParamdError, error_of_grpc
from paramd.layout.merge import layout_digest
from paramd.memory import handover
from paramd.memory.control_page import PAGE_BYTES, Word
from paramd.security.tickets import Role
from tests.integration.client_job import Job, running_job
from tests.integration.fake_trainer import FakeTrainer, layout_of
from tests.integration.sidecar_process import SidecarProcess, ticket
from tests.integration.test_client import layout, write_arenas

ARENA_BYTES = 1 << 20
DIGEST = layout_digest(layout_of(ARENA_BYTES))


@pytest.fixture
def trainer(trainer: FakeTrainer) -> FakeTrainer:
    trainer.update()
    return trainer


def asking(role: Role = Role.READER, **changes: object) -> dict[str, Any]:
    message = {
        "op": "live",
        "ticket": ticket(role),
        "rank": 0,
        "incarnation": 1,
        "layout_digest": DIGEST,
        **changes,
    }
    return {key: value for key, value in message.items() if value is not None}


def asked(path: Path, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    with closing(handover.connect(path, timeout_s=10)) as connection:
        handover.send(connection, message)
        return handover.receive(connection)


@contextmanager
def given(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptors of page and arena."""
    answer, descriptors = asked(path, asking())
    try:
        assert answer == {
            "op": "live",
            "arena_bytes": ARENA_BYTES,
            "job": "job",
            "incarnation": 1,
            "rank": 0,
        }
        page, arena = descriptors
        yield page, arena
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def refused(path: Path, message: dict[str, Any]) -> str:
    answer, descriptors = asked(path, message)
    assert descriptors == []
    assert answer["op"] == "error", answer
    assert issubclass(error_of_grpc(answer["code"]), ParamdError)
    return str(answer["code"])


def test_page_and_arena_can_be_read_and_not_written(
    process: SidecarProcess, trainer: FakeTrainer
) -> None:
    with given(process.socket_path) as (page, arena):
        assert os.pread(arena, 8, 0) == (1).to_bytes(8, "little")
        assert os.fstat(page).st_size >= PAGE_BYTES
        for descriptor, size_bytes in ((page, PAGE_BYTES), (arena, ARENA_BYTES)):
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(descriptor, b"x", 0)
            with pytest.raises(OSError, match=r"Invalid argument|Operation not permitted"):
                os.ftruncate(descriptor, 0)
            with mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ) as mapped:
                assert len(mapped) == size_bytes
        trainer.update()
        assert os.pread(arena, 8, 0) == (2).to_bytes(8, "little")


BAD: list[tuple[dict[str, object], str]] = [
    ({"incarnation": None}, "INVALID_ARGUMENT"),
    ({"incarnation": "1"}, "INVALID_ARGUMENT"),
    ({"incarnation": True}, "INVALID_ARGUMENT"),
    ({"incarnation": 1.0}, "INVALID_ARGUMENT"),
    ({"incarnation": [1]}, "INVALID_ARGUMENT"),
    ({"incarnation": 2}, "FAILED_PRECONDITION"),
    ({"incarnation": -(10**400)}, "FAILED_PRECONDITION"),
    ({"layout_digest": None}, "FAILED_PRECONDITION"),
    ({"layout_digest": {"a": 1}}, "FAILED_PRECONDITION"),
    ({"layout_digest": "other"}, "FAILED_PRECONDITION"),
    ({"rank": 1}, "UNAVAILABLE"),
    ({"ticket": None}, "PERMISSION_DENIED"),
    ({"ticket": "nonsense"}, "PERMISSION_DENIED"),
    ({"ticket": ticket(Role.VIEWER)}, "PERMISSION_DENIED"),
    ({"ticket": ticket(Role.READER, incarnation=2)}, "PERMISSION_DENIED"),
    ({"ticket": ticket(Role.READER, job="other")}, "PERMISSION_DENIED"),
]


def test_any_other_request_is_refused_in_our_words(
    process: SidecarProcess, trainer: FakeTrainer
) -> None:
    for changes, code in BAD:
        assert refused(process.socket_path, asking(**changes)) == code, changes
    with given(process.socket_path):
        pass  # the next one is served
    assert "handover-failed" not in process.log


@pytest.fixture
def job() -> Iterator[Job]:
    with running_job(layout()) as found:
        yield found


def words(job: Job) -> list[dict[str, int]]:
    return [{word.name: rank.page[word] for word in Word} for rank in job.ranks]


def changed(job: Job, before: list[dict[str, int]]) -> list[tuple[str, int, int]]:
    return [
        (name, then[name], value)
        for then, now in zip(before, words(job), strict=True)
        for name, value in now.items()
        # Who asked at the socket counts as a client for a while, which the sidecar notes.
        if then[name] != value and name != "CLIENTS_UNTIL_NS"
    ]


def settle(job: Job) -> None:
    """An update and its boundary; nothing is sampled, so the digest is 0."""
    for rank in job.ranks:
        rank.gate.begin_update()
        rank.gate.settle(rank.page[Word.STEP] + 1, 0, proven=True)
        rank.page[Word.SETTLED_SEQ] = rank.page[Word.SEQ]


@pytest.mark.parametrize("transport", ["auto", "same-host"])
def test_a_summon_reads_settled_ranks_without_a_copy_and_without_a_trace(
    job: Job, transport: Any
) -> None:
    whole = write_arenas(job)
    # Of what several ranks hold, samples are compared, which are copied.
    names = ("rows", "columns", "flat", "turned")
    with paramd.connect(job.url, job.token) as mesh:
        settle(job)
        before, found = words(job), mesh.summon(*names, transport=transport)
        assert changed(job, before) == [], "neither sidecar nor reader wrote a word"
        assert found.step == 1
        for name in names:
            assert torch.equal(found[name], whole[name]), name
        converted = mesh.summon("rows[1:3]", "turned", transport=transport, dtype=torch.float64)
        assert torch.equal(converted["rows"], whole["rows"][1:3].double())
        assert torch.equal(converted["turned"], whole["turned"].double())
        assert changed(job, before) == []


def test_a_dead_socket_of_a_living_sidecar_is_no_reason_to_fail(job: Job) -> None:
    whole = write_arenas(job)
    settle(job)
    with paramd.connect(job.url, job.token) as mesh:
        path = job.ranks[1].socket_path
        os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.bind(str(path))
            assert torch.equal(mesh.summon("rows")["rows"], whole["rows"])
