"""Downloads: the same bytes as a summon, resumed after a break, begun anew when they must."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paramd.errors import UnreachableError
from paramd.memory.control_page import Word
from paramd.mesh.exports import download
from paramd.mesh.mesh import Mesh
from paramd.mesh.peers.sidecars import Pinned
from tests.integration.client_job import Rank
from tests.integration.export_job import ExportingJob, exporting_job
from tests.integration.test_client import write_arenas


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExportingJob]:
    with exporting_job(tmp_path_factory.mktemp("downloads")) as found:
        yield found


def parameters(site: ExportingJob) -> dict[str, torch.Tensor]:
    return {name: one for name, one in site.whole.items() if name != "running"}


class Break(Exception):
    """What ends a program in the middle."""


def breaking(after_calls: int) -> Callable[[int, int], object]:
    calls = 0

    def moved(done_bytes: int, size_bytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after_calls:
            raise Break

    return moved


def halves(part: Path) -> tuple[bytes, bytes]:
    """The header and the data of a partial file."""
    found = part.read_bytes()
    end = 8 + int.from_bytes(found[:8], "little")
    return found[:end], found[end:]


def state_of(part: Path) -> Pinned:
    """The snapshots that a partial file is of."""
    found = download.pinned_of(halves(part)[0])
    assert found is not None
    return found


def test_a_download_holds_what_a_summon_has(site: ExportingJob, mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    moves: list[tuple[int, int]] = []
    found = mesh.download(path, progress=lambda *move: moves.append(move))
    tensors = load_file(path)
    assert set(tensors) == set(parameters(site))
    for name, tensor in parameters(site).items():
        assert torch.equal(tensors[name], tensor), name
    assert moves[-1] == (found.size_bytes, path.stat().st_size)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert about["tied"] == "rows"
    assert (about["format"], about["paramd_step"]) == ("pt", str(found.step))
    assert download.IDENTITY not in about, "snapshots that are gone mean nothing to a reader"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_after_a_break_it_goes_on_with_the_same_step(
    site: ExportingJob, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "BATCH_BYTES", 100)
    path = tmp_path / "all.safetensors"
    with pytest.raises(Break):
        mesh.download(path, progress=breaking(3))
    assert not path.exists()
    part = tmp_path / ".all.safetensors.part"
    pinned = state_of(part)
    # Cut within a tensor, as by a full disk: what is kept ends with a whole one.
    header_bytes, whole_bytes = len(halves(part)[0]), part.stat().st_size
    os.truncate(part, whole_bytes - 1)

    def overwrite(rank: Rank, step: int) -> None:
        rank.arena.buffer[:256] = bytes(256)

    site.job.update(overwrite)  # training goes on meanwhile
    told: list[str] = []
    with site.connect() as another:
        found = another.download(path, on_message=told.append)
    assert header_bytes < found.resumed_bytes < whole_bytes
    assert any("resuming at step" in text for text in told), told
    tensors = load_file(path)
    for name, tensor in parameters(site).items():
        assert torch.equal(tensors[name], tensor), name
    assert found.step == pinned.state.step < site.job.ranks[0].page[Word.STEP]
    write_arenas(site.job)


def test_a_part_of_another_state_is_never_gone_on_with(
    site: ExportingJob, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "BATCH_BYTES", 100)
    path, part = tmp_path / "all.safetensors", tmp_path / ".all.safetensors.part"
    with pytest.raises(Break):
        mesh.download(path, progress=breaking(3))
    header, data = halves(part)
    snapshot_id = next(iter(state_of(part).pins.values())).snapshot_id.encode()
    for old, new, reason in (
        (b'paramd_step":"', b'paramd_step":"9', "another download"),
        (snapshot_id, snapshot_id[::-1], "has expired"),
        (b"{", b"", "another download"),
    ):
        other = header[8:].replace(old, new, 1)
        part.write_bytes(len(other).to_bytes(8, "little") + other + bytes(len(data)))
        part.chmod(0o600)
        told: list[str] = []
        found = mesh.download(path, overwrite=True, on_message=told.append)
        assert found.resumed_bytes == 0
        assert any(reason in text for text in told), told
        tensors = load_file(path)
        assert all(torch.equal(tensors[name], one) for name, one in parameters(site).items())
    part.write_bytes(header[:-1])  # cut off, it names nothing
    part.chmod(0o600)
    assert mesh.download(path, overwrite=True).resumed_bytes == 0


def test_another_slice_of_the_same_shape_is_another_download(
    site: ExportingJob, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "BATCH_BYTES", 100)
    path = tmp_path / "part.safetensors"
    with pytest.raises(Break):
        mesh.download(path, "columns[1:3]", "turned", progress=breaking(1))
    assert mesh.download(path, "columns[0:2]", "turned").resumed_bytes == 0
    assert torch.equal(load_file(path)["columns"], site.whole["columns"][0:2])


def test_a_dead_sidecar_ends_it_after_some_patience_and_keeps_what_came(
    site: ExportingJob, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "BATCH_BYTES", 100)
    monkeypatch.setattr(download, "PATIENCE_S", 0.5)
    path, rank = tmp_path / "all.safetensors", site.job.ranks[1]

    def kill(done_bytes: int, size_bytes: int) -> None:
        if done_bytes and rank.process.poll() is None:
            rank.process.kill()
            rank.process.wait()

    with pytest.raises(UnreachableError, match="are kept"):
        mesh.download(path, progress=kill)
    assert state_of(tmp_path / ".all.safetensors.part").pins
