"""Exports of a token for some jobs, in directories: what is another job's stays as it is."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from paramd.errors import ConflictError, DeniedError, NotFoundError
from paramd.v1.export_pb2 import ExportTarget
from paramd_service.destinations import directory
from paramd_service.destinations.destinations import MANIFEST, Place, check_below
from paramd_service.destinations.open import open_place

MINE = "team-a-*,shared"
OURS, THEIRS = "team-a-run", "team-b-run"
ID, OTHER_ID = "ab" * 16, "cd" * 16


def nothing(_: str) -> None:
    pass


def target(root: Path, key: str, **fields: object) -> ExportTarget:
    given = {"export_id": ID, "overwrite": True, "jobs": MINE, "job": OURS, **fields}
    return ExportTarget(destination="checkpoints", root=str(root), key=key, **given)  # type: ignore[arg-type]


def manifest(job: str, export_id: str) -> dict[str, bytes]:
    told = {"job": job, "export_id": export_id, "files": [{"name": "model.safetensors"}]}
    return {MANIFEST: json.dumps(told).encode()}


def write(place: Place, job: str, export_id: str, content: bytes) -> None:
    """A whole export with one file."""
    place.begin(len(content))
    sink = place.create("model.safetensors", len(content))
    sink.write(memoryview(content))
    sink.finish()
    place.commit(manifest(job, export_id), {"model.safetensors": len(content)}, nothing)


def theirs(root: Path, key: str) -> Path:
    """An export of another job at the key, as a token for all jobs writes it."""
    write(open_place(target(root, key, export_id=OTHER_ID, jobs="")), THEIRS, OTHER_ID, b"theirs")
    return root / key


def stands(folder: Path) -> None:
    assert (folder / "model.safetensors").read_bytes() == b"theirs"
    assert json.loads((folder / MANIFEST).read_text())["job"] == THEIRS


@pytest.mark.parametrize(
    "key",
    ["team-b-run/best", "team-a-run", "team-a-{step}/x", "Team-a-run/x", "x/team-a-run/y", "best"],
)
def test_a_token_for_some_jobs_writes_below_their_folders_alone(key: str, tmp_path: Path) -> None:
    with pytest.raises(DeniedError, match="writes only below"):
        check_below(key, MINE)
    check_below(key, "")
    if "{" not in key:
        with pytest.raises(DeniedError, match="writes only below"):
            open_place(target(tmp_path, key)).begin(1)
    assert not list(tmp_path.iterdir()), "refused before anything is looked at"


@pytest.mark.parametrize("key", ["team-a-run/best", "shared/a/b", "team-a-2/step-{step}"])
def test_below_a_job_of_its_own_it_writes(key: str) -> None:
    check_below(key, MINE)


def test_an_export_of_its_own_jobs_is_replaced(tmp_path: Path) -> None:
    write(open_place(target(tmp_path, "team-a-run/best")), "team-a-other", ID, b"first")
    again = open_place(target(tmp_path, "team-a-run/best", export_id=OTHER_ID))
    write(again, OURS, OTHER_ID, b"second")
    assert (tmp_path / "team-a-run/best/model.safetensors").read_bytes() == b"second"


@pytest.mark.parametrize("overwrite", [False, True])
def test_another_jobs_export_is_not_replaced(overwrite: bool, tmp_path: Path) -> None:
    there = theirs(tmp_path, "team-a-run/best")
    with pytest.raises(ConflictError, match="exists"):
        open_place(target(tmp_path, "team-a-run/best", overwrite=overwrite)).begin(1)
    stands(there)


@pytest.mark.parametrize("how", ["begun", "checked", "no exchange"])
def test_another_jobs_export_that_comes_meanwhile_is_not_replaced(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the begin, or between the last check and the exchange."""
    key = "team-a-run/best"
    write(open_place(target(tmp_path, key, export_id="ef" * 16)), OURS, "ef" * 16, b"old")
    late = open_place(target(tmp_path, key))
    late.begin(1)
    come = partial(theirs, tmp_path, key)
    at_point = nothing
    if how == "begun":
        at_point = lambda _: bool(come())  # noqa: E731
    else:
        at_the_exchange(come, monkeypatch, exchanges=how == "checked")
    with pytest.raises(ConflictError, match="not an export of your jobs"):
        late.commit(manifest(OURS, ID), {}, at_point)
    monkeypatch.undo()
    stands(tmp_path / key)
    late.drop([], finished=True)
    stands(tmp_path / key)
    assert os.listdir(tmp_path / "team-a-run") == ["best"], "nothing hidden is left"


def at_the_exchange(
    come: Callable[[], object], monkeypatch: pytest.MonkeyPatch, *, exchanges: bool
) -> None:
    """Have the other export come right before the first exchange, or, on a file system that
    exchanges nothing, right before the old export is moved away."""
    real, flags_of_exchange, came = directory.rename, directory.EXCHANGE, []

    def rename(parent: int, source: str, goal: str, flags: int) -> bool:
        if flags == flags_of_exchange and not came:
            came.append(True)
            come()
            came.append(True)
        if flags == flags_of_exchange and not exchanges and len(came) == 2:
            return False
        return real(parent, source, goal, flags)

    monkeypatch.setattr(directory, "rename", rename)


def test_nothing_is_written_within_another_jobs_export(tmp_path: Path) -> None:
    there = theirs(tmp_path, "team-a-run")
    with pytest.raises(ConflictError, match="not an export of your jobs"):
        open_place(target(tmp_path, "team-a-run/x/y")).begin(1)
    assert sorted(os.listdir(there)) == ["model.safetensors", MANIFEST]


def test_a_reader_sees_files_of_its_own_jobs_exports_alone_and_learns_of_no_other(
    tmp_path: Path,
) -> None:
    write(open_place(target(tmp_path, "team-a-run/best")), OURS, ID, b"ours")
    theirs(tmp_path, "team-b-run/best")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "team-b-run")
    file = open_place(target(tmp_path, "team-a-run/best")).open("model.safetensors", finished=True)
    assert file.read(0, 10) == b"ours"
    file.close()
    refused = set()
    for key in ("team-b-run/best", "team-b-run", "plain", "nowhere/best", "link/best", "link"):
        for name in ("model.safetensors", MANIFEST, "nothing"):
            with pytest.raises(NotFoundError) as caught:
                open_place(target(tmp_path, key)).open(name, finished=True)
            refused.add(str(caught.value).replace(key, "KEY"))
    (tmp_path / "team-a-run/best/private").write_bytes(b"x")
    with pytest.raises(NotFoundError) as caught:
        open_place(target(tmp_path, "team-a-run/best")).open("private", finished=True)
    refused.add(str(caught.value).replace("team-a-run/best", "KEY"))
    assert len(refused) == 1, refused


def test_a_reader_keeps_the_export_whose_manifest_it_was_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job's export takes the place between the manifest and the file."""
    key = "team-a-run/best"
    write(open_place(target(tmp_path, key)), OURS, ID, b"ours")
    real, came = directory.open_file, []

    def open_file(folder: int, name: str) -> int:
        if name != MANIFEST and not came:
            came.append(True)
            theirs(tmp_path, key)
        return real(folder, name)

    monkeypatch.setattr(directory, "open_file", open_file)
    # The folder that it opened is the replaced one, whose files are gone.
    with pytest.raises(NotFoundError):
        open_place(target(tmp_path, key)).open("model.safetensors", finished=True)
    stands(tmp_path / key)
