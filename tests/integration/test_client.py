"""A mesh against real sidecars: what it answers is right, whole and at one step."""

import asyncio
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import paramd
from paramd.errors import (
    CapacityError,
    DeadlineError,
    DeniedError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.mesh import Mesh
from paramd.mesh.reading.stream import Transport
from tests.integration.client_job import Job, running_job

TRANSPORTS = ("grpc", "same-host")
PARAMETER, BUFFER = TensorKind.PARAMETER, TensorKind.BUFFER


def layout() -> Layout:
    """Two ranks; every way in which a piece may lie."""
    rows = (Piece(0, 0, Box((0, 0), (3, 4))), Piece(1, 0, Box((3, 0), (5, 4))))
    columns = (Piece(0, 64, Box((0, 0), (6, 2))), Piece(1, 64, Box((0, 2), (6, 5))))
    flat = (Piece(0, 192, Interval(0, 7)), Piece(1, 192, Interval(7, 15)))
    both = (Piece(0, 256, Box((0,), (9,))), Piece(1, 256, Box((0,), (9,))))
    turned = (Piece(1, 320, Box((0, 0), (4, 6)), strides=(1, 4)),)
    return Layout(
        world_size=2,
        arena_bytes=(1024, 1024),
        tensors=(
            TensorLayout("rows", "float32", (5, 4), PARAMETER, rows, ("tied",), "Shard(0) over 2"),
            TensorLayout("columns", "float32", (6, 5), PARAMETER, columns),
            TensorLayout("flat", "float32", (3, 5), PARAMETER, flat),
            TensorLayout("both", "float32", (9,), PARAMETER, both),
            TensorLayout("turned", "float32", (4, 6), PARAMETER, turned),
            TensorLayout("scalar", "int64", (), PARAMETER, (Piece(0, 512, Box((), ())),)),
            TensorLayout("empty", "bfloat16", (0, 3), PARAMETER, ()),
            TensorLayout("flags", "bool", (3,), PARAMETER, (Piece(0, 521, Box((0,), (3,))),)),
            TensorLayout("running", "float32", (2,), BUFFER, (Piece(0, 600, Box((0,), (2,))),)),
        ),
    )


def write_arenas(job: Job) -> dict[str, torch.Tensor]:
    """Puts known tensors into the arenas piece by piece; returns them whole."""
    generator = torch.Generator().manual_seed(7)
    whole: dict[str, torch.Tensor] = {}
    for tensor in job.layout.tensors:
        dtype = getattr(torch, tensor.dtype)
        values = torch.randint(0, 100, tensor.shape, generator=generator).to(dtype)
        whole[tensor.fqn] = values
        for piece in tensor.pieces:
            arena = torch.frombuffer(job.ranks[piece.rank].arena.buffer, dtype=torch.uint8)
            if isinstance(piece.region, Interval):
                part = values.flatten()[piece.region.begin : piece.region.end]
            else:
                begin, end = piece.region.begin, piece.region.end
                part = values[tuple(slice(b, e) for b, e in zip(begin, end, strict=True))]
            if piece.strides is not None:
                part = part.T
            data = part.contiguous().flatten().view(torch.uint8)
            arena[piece.arena_begin : piece.arena_begin + data.numel()] = data
    return whole


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(tmp_path_factory.mktemp("client")))
        yield patch


@pytest.fixture(scope="module")
def job(state: pytest.MonkeyPatch) -> Iterator[Job]:
    with running_job(layout()) as job:
        yield job


@pytest.fixture(scope="module")
def whole(job: Job) -> dict[str, torch.Tensor]:
    return write_arenas(job)


@pytest.fixture
def mesh(job: Job, whole: dict[str, torch.Tensor]) -> Iterator[Mesh]:
    with paramd.connect(job.url, job.token) as mesh:
        yield mesh


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_kind_of_piece_is_byte_equal(
    mesh: Mesh, whole: dict[str, torch.Tensor], transport: str
) -> None:
    found = mesh.summon("*", transport=transport)  # type: ignore[arg-type]
    assert set(found) == set(whole) - {"running"} | {"tied"}
    assert found["tied"] is found["rows"]
    for name, expected in whole.items():
        if name != "running":
            assert found[name].dtype == expected.dtype
            assert torch.equal(found[name], expected), name
    assert (found.incarnation, found.step, found.job) == (1, 0, "client-test")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_given_tensors_are_filled_whatever_their_strides(
    mesh: Mesh, whole: dict[str, torch.Tensor], transport: str
) -> None:
    rows, flat = torch.zeros(4, 5).T, torch.zeros(3, 10)[:, ::2]
    columns = torch.zeros(6, 5, requires_grad=True)
    into = {"tied": rows, "flat": flat, "columns": columns}
    found = mesh.summon("rows", "tied", "flat", "columns", into=into, transport=transport)  # type: ignore[arg-type]
    assert torch.equal(rows, whole["rows"])
    assert torch.equal(flat, whole["flat"])
    assert torch.equal(columns, whole["columns"])
    assert found["rows"].data_ptr() == rows.data_ptr()


@pytest.mark.parametrize(
    ("into", "text"),
    [
        ({"rows": torch.zeros(4, 5)}, r"shape \[4, 5\]; expected \[5, 4\]"),
        ({"rows": torch.zeros(5, 4, dtype=torch.float64)}, "dtype torch.float64; expected"),
        ({"rows": torch.zeros(1, 4).expand(5, 4)}, "share memory"),
        ({"other": torch.zeros(5, 4)}, "'other' is not among"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(
    mesh: Mesh, into: dict[str, torch.Tensor], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        mesh.summon("rows", into=into)


def test_a_reader_without_memory_is_refused_and_its_own_tensors_are_filled(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = mesh.summon("*")
    # No host has that much to spare; the sidecars run already.
    monkeypatch.setenv("PARAMD_HOST_RESERVE", str(1 << 50))
    pinned = [one.snapshot_bytes for one in mesh.status()]
    for transport in ("auto", "same-host", "stream", "grpc"):
        with pytest.raises(CapacityError, match="stay free for the training"):
            mesh.summon("*", transport=cast("Transport", transport))
    for deltas in (False, True):
        with pytest.raises(CapacityError, match="stay free for the training"):
            next(iter(mesh.follow("*", deltas=deltas)))
    assert [one.snapshot_bytes for one in mesh.status()] == pinned
    again = mesh.summon("*", into=dict(found))
    assert set(again) == set(found)
    again.save(tmp_path / "saved.safetensors")
    saved = load_file(tmp_path / "saved.safetensors")
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], one) for name, one in found.items())


@pytest.mark.parametrize(
    ("pattern", "options", "text"),
    [
        ("rows[0:99]", {}, "rows"),
        ("flat[:, :, :, 0:1]", {}, "at most 2 slices"),
        ("*", {"transport": "carrier-pigeon"}, "grpc"),
        ("*", {"timeout": -1.0}, "more than 0"),
        ("*", {"timeout": "soon"}, "a number and ms, s"),
        ("*", {"dtype": "bfloat61"}, "such as 'bfloat16'"),
        ("*", {"dtyp": "float16"}, r"Mesh.summon\(\) .*did you mean dtype=\?"),
        ("rows", {"device": "cuda"}, "device: 'cuda'"),
        (torch.zeros(1), {}, "Tensor; expected a name or a glob"),
    ],
)
def test_wrong_requests_are_told_what_to_do(
    mesh: Mesh, pattern: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        mesh.summon(pattern, **options)


def test_a_view_has_the_shards_and_keeps_them(
    mesh: Mesh, job: Job, whole: dict[str, torch.Tensor]
) -> None:
    with mesh.view("*") as view:
        turned, shards = view.tensor("turned"), view["columns"]
        assert view.step == 0
        with pytest.raises(UsageError, match="2 shards"):
            view.tensor("columns")
    assert torch.equal(turned, whole["turned"])
    for region, shard in shards:
        assert isinstance(region, Box)
        part = tuple(slice(b, e) for b, e in zip(region.begin, region.end, strict=True))
        assert torch.equal(shard, whole["columns"][part])
    turned.fill_(-1)
    for _ in range(3):
        assert torch.equal(mesh.summon("turned")["turned"], whole["turned"])
    assert bool((turned == -1).all())


def test_closing_a_mesh_ends_its_views_but_not_their_tensors(
    job: Job, whole: dict[str, torch.Tensor]
) -> None:
    mesh = paramd.connect(job.url, job.token)
    with mesh.view("turned") as view:
        turned = view.tensor("turned")
        mesh.close()
        assert not view
    assert torch.equal(turned, whole["turned"])


def test_a_mesh_works_inside_a_running_loop_and_on_many_threads(
    mesh: Mesh, whole: dict[str, torch.Tensor]
) -> None:
    async def notebook() -> torch.Tensor:
        return mesh.summon("rows")["rows"]

    assert torch.equal(asyncio.run(notebook()), whole["rows"])
    found: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: found.append(mesh.summon("rows")["rows"])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(one, whole["rows"]) for one in found)


async def test_the_async_mesh_answers_the_same(job: Job, whole: dict[str, torch.Tensor]) -> None:
    async with paramd.aio.connect(job.url, job.token) as mesh:
        one, other = await asyncio.gather(mesh.summon("rows"), mesh.summon("flat"))
    mesh = await paramd.aio.connect(job.url, job.token)
    assert await mesh.edits(state="applied") == ()
    await mesh.close()
    assert torch.equal(one["rows"], whole["rows"])
    assert torch.equal(other["flat"], whole["flat"])


def test_buffers_while_training_rests_are_refused_with_the_reason(mesh: Mesh) -> None:
    with pytest.raises(DeadlineError, match="boundary"):
        mesh.summon("running", buffers=True, timeout=1.5)
    assert mesh.summon("rows").step == 0


def test_a_fork_is_refused_at_once_and_leaves_its_parents_mesh_alone(
    job: Job, mesh: Mesh, whole: dict[str, torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    assert torch.equal(mesh.summon("rows")["rows"], whole["rows"])
    ours, its = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(its, " | ".join(refusals_in_a_fork(job, mesh)).encode())
        finally:
            os._exit(0)
    os.close(its)
    try:
        assert select.select([ours], [], [], 60)[0], "the child hangs"
        told = os.read(ours, 4096).decode().split(" | ")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
    assert f"opened by process {os.getpid()}, of which {child} is a fork" in told[0]
    assert f"process {child} is a fork of one that was connected" in told[1]
    assert torch.equal(mesh.summon("rows")["rows"], whole["rows"])
    assert capfd.readouterr().err == ""


def refusals_in_a_fork(job: Job, mesh: Mesh) -> Iterator[str]:
    for attempt in (
        lambda: mesh.summon("rows", timeout=5),
        lambda: paramd.connect(job.url, job.token),
    ):
        try:
            attempt()
        except UsageError as error:
            yield str(error)
    mesh.close()


def test_a_wrong_token_and_a_wrong_url_say_what_to_do(job: Job) -> None:
    with pytest.raises(DeniedError, match=r"the owner has one in endpoint\.json; an admin") as told:
        paramd.connect(job.url, "wrong")
    assert str(told.value).count("endpoint.json") == 1
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:1"):
        paramd.connect("http://127.0.0.1:1", job.token)
    with pytest.raises(UsageError, match=r"no scheme; write 'http://127\.0\.0\.1:8470'"):
        paramd.connect("127.0.0.1:8470", job.token)
    with pytest.raises(UsageError, match="expected one like"):
        paramd.connect("ftp://127.0.0.1:8470", job.token)
    with pytest.raises(NotFoundError, match="other-job"):
        paramd.connect(job.url, job.token, job="other-job")
