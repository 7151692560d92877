"""Sidecars that die, stop or come back: an answer is right, or refused within seconds."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import torch

import paramd
from paramd.errors import UnreachableError
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.memory.control_page import Word
from paramd.mesh.mesh import Mesh
from tests.integration.client_job import DEADLINE_S, JOB, Job, Rank, compared, running_job

NOTICED_S = 5.0
MIB = 1 << 20


def layout() -> Layout:
    """`halves` needs both ranks, `both` and the buffer either of them."""
    half, kind = 2 * MIB, TensorKind.PARAMETER
    halves = (Piece(0, 0, Box((0,), (half,))), Piece(1, 0, Box((half,), (2 * half,))))
    both, seen = (
        tuple(Piece(rank, 4 * half + at, Box((0,), (100,))) for rank in range(2)) for at in (0, 512)
    )
    return Layout(
        world_size=2,
        arena_bytes=(5 * half, 5 * half),
        tensors=(
            TensorLayout("halves", "float32", (2 * half,), kind, halves),
            TensorLayout("both", "float32", (100,), kind, both),
            TensorLayout("seen", "float32", (100,), TensorKind.BUFFER, seen),
        ),
    )


@pytest.fixture
def job() -> Iterator[Job]:
    with running_job(layout()) as job:
        for rank in job.ranks:
            torch.frombuffer(rank.arena.buffer, dtype=torch.float32).fill_(3)
        yield job


@pytest.fixture
def mesh(job: Job) -> Iterator[Mesh]:
    with paramd.connect(job.url, job.token) as mesh:
        mesh.summon("*")
        yield mesh


def refused_within(mesh: Mesh, *patterns: str, transport: str = "auto") -> float:
    """Seconds until a summon was refused because a rank does not answer."""
    begin_s = time.monotonic()
    with pytest.raises(UnreachableError, match="rank 1"):
        mesh.summon(*patterns, transport=transport)  # type: ignore[arg-type]
    return time.monotonic() - begin_s


def test_a_dead_sidecar_is_refused_but_replicas_stand_in(job: Job, mesh: Mesh) -> None:
    job.ranks[1].process.kill()
    job.ranks[1].process.wait()
    assert bool((mesh.summon("both")["both"] == 3).all())
    assert refused_within(mesh, "halves") < NOTICED_S + 0.5


def test_replicas_that_differ_are_named_with_the_answer(job: Job, mesh: Mesh) -> None:
    job.update()
    live, copied = (
        compared(partial(mesh.summon, "*", transport=lane)) for lane in ("auto", "grpc")
    )
    assert live.replicas_differ == copied.replicas_differ
    arena = torch.frombuffer(job.ranks[1].arena.buffer, dtype=torch.float32)
    arena[2 * MIB + 99] = arena[2 * MIB + 128] = 1
    job.update()
    found = compared(lambda: mesh.summon("*", replica=1))
    assert (found.replica, found.replicas_differ, found["both"][-1].item()) == (1, ("both",), 1)
    assert "; other replicas differ in both" in repr(found)
    assert mesh.summon("halves").replicas_differ == ()

    def edited(rank: Rank, step: int) -> None:
        rank.page[Word.EDITS] += rank is job.ranks[1]

    job.update(edited)
    assert mesh.summon("both").replicas_differ is None, "one step, but not one state"
    job.ranks[0].page[Word.EDITS] += 1
    job.train(lambda rank, step: None, 0.02)
    buffers = compared(lambda: mesh.summon("halves", "seen", buffers=True))
    assert (buffers.replicas_differ, buffers["seen"][0].item()) == (("seen",), 3)
    job.rest()
    job.ranks[1].process.send_signal(signal.SIGSTOP)
    assert {mesh.summon("both", transport=t).replicas_differ for t in ("auto", "grpc")} == {None}


def test_the_control_plane_may_be_away(job: Job, mesh: Mesh) -> None:
    job.control.kill()
    job.control.wait()
    for transport in ("grpc", "same-host"):
        found = mesh.summon("halves", transport=transport)  # type: ignore[arg-type]
        assert bool((found["halves"] == 3).all())


def test_a_next_incarnation_at_another_address_is_found() -> None:
    with ExitStack() as stack:
        with running_job(layout()) as first:
            mesh = stack.enter_context(paramd.connect(job=JOB))
            assert mesh.summon("both").incarnation == 1
        with running_job(layout(), incarnation=2) as second:
            assert second.url != first.url
            found = mesh.summon("both", timeout=DEADLINE_S)
            assert (found.incarnation, mesh.incarnation) == (2, 2)
            assert mesh.status().incarnation == 2
