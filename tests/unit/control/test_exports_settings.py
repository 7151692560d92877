"""Destinations as an operator names them, what a request asks for, small files beside."""

import asyncio
import base64
import os
from pathlib import Path

import pytest

from paramd.errors import ConflictError, DeniedError, ExhaustedError, NotFoundError, UsageError
from paramd.mesh.exports.calls import located
from paramd_service.control.records.events import EventBus
from paramd_service.control.records.records import Records
from paramd_service.destinations.destinations import Destination, parse_destinations
from paramd_service.exports import documents as assets_module
from paramd_service.exports.documents import ADDED, Assets, load_added, load_destinations
from paramd_service.exports.service import ExportService

OWNER = "ab" * 16
JOB = "team-a.run"


def test_destinations_are_the_operators_or_the_jobs_own(tmp_path: Path) -> None:
    file = tmp_path / "paramd.toml"
    file.write_text('job = "x"\n')

    own = tmp_path / "checkpoints"
    assert load_destinations([(file, False)], {}) == {}
    assert load_destinations([(file, False)], {"PARAMD_DESTINATIONS": "{}"}, own) is None
    (found,) = load_destinations([(file, False)], {}, own).values()
    assert (found.name, found.root) == ("checkpoints", str(own))
    assert own.stat().st_mode & 0o777 == 0o700
    file.write_text("[destinations]\n")
    assert load_destinations([(file, True)], {}, own) is None, "an empty table is a word, too"
    assert load_destinations([(file, False)], {}, own) is not None
    file.write_text('[destinations]\nmine = "/home/somebody"\n')
    with pytest.raises(UsageError, match="working directory"):
        load_destinations([(file, False)], {}, own)


def test_where_none_is_meant_the_error_says_so() -> None:
    with pytest.raises(UsageError, match="destination: none; an admin"):
        located(None, [])


async def test_admins_add_destinations_for_good(tmp_path: Path) -> None:
    def service(given: dict[str, Destination] | None) -> ExportService:
        records = Records("", tmp_path, chain="run")
        return ExportService(records, given, load_added(file), publish=EventBus().publish)

    file = tmp_path / ADDED
    exports = service({})
    wanted = parse_destinations({name: f"/{name}" for name in "abcd"})
    await asyncio.gather(*map(exports.add_destination, [*wanted.values(), wanted["a"]]))
    assert service({}).destinations == exports.destinations == load_added(file) == wanted
    assert not service(None).destinations
    with pytest.raises(DeniedError, match="PARAMD_DESTINATIONS"):
        await service(None).add_destination(wanted["a"])
    for damaged in ("", "[]", '{"x": "rel"}'):
        file.write_text(damaged)
        with pytest.raises(UsageError, match=str(file)):
            await exports.add_destination(Destination(name="e", kind=wanted["a"].kind, root="/e"))
        assert file.read_text() == damaged
    file.write_text('{"e": "/mended"}')
    with pytest.raises(ConflictError, match="'e' is '/mended' for good"):
        await exports.add_destination(Destination(name="e", kind=wanted["a"].kind, root="/e"))


def put(assets: Assets, name: str, data: bytes, offset_bytes: int = 0, owner: str = OWNER) -> int:
    return assets.put(JOB, owner, name, offset_bytes, base64.b64encode(data).decode())


def test_small_files_come_in_parts_and_go(tmp_path: Path) -> None:
    assets = Assets(tmp_path)
    assert put(assets, "config.json", b"abc") == 3
    assert put(assets, "config.json", b"def", 3) == 6
    assert put(assets, "config.json", b"def", 3) == 6, "the same part may come again"
    assert put(assets, "empty", b"") == 0
    found = assets.read(JOB, OWNER, ["config.json", "empty"])
    assert found == {"config.json": b"abcdef", "empty": b""}
    with pytest.raises(ConflictError, match="begins at byte 9"):
        put(assets, "config.json", b"x", 9)
    with pytest.raises(NotFoundError):
        assets.read(JOB, OWNER, ["other"])
    assets.sweep([])
    assert assets.read(JOB, OWNER, ["empty"]), "what has just come may still be claimed"
    assets.forget(JOB, OWNER)
    with pytest.raises(NotFoundError):
        assets.read(JOB, OWNER, ["empty"])


@pytest.mark.parametrize(
    "name",
    ["../x", ".hidden", "a/b", "model.safetensors", "x.index.json", "__0_0.distcp", "a\0b", ""],
)
def test_names_that_are_no_plain_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        put(Assets(tmp_path), name, b"x")
    assert not list(tmp_path.rglob("*"))


def test_small_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assets = Assets(tmp_path)
    monkeypatch.setattr(assets_module, "MAX_ASSETS_BYTES", 10)
    monkeypatch.setattr(assets_module, "MAX_ASSETS", 2)
    monkeypatch.setattr(assets_module, "MAX_OWNERS", 1)
    put(assets, "a", bytes(6))
    with pytest.raises(ExhaustedError):
        put(assets, "b", bytes(6))
    with pytest.raises(ExhaustedError):
        put(assets, "a", bytes(6), 6)
    put(assets, "b", b"x")
    with pytest.raises(ExhaustedError):
        put(assets, "c", b"x")
    with pytest.raises(ExhaustedError):
        put(assets, "a", b"x", owner="cd" * 16)


def test_small_files_of_a_job_are_not_anothers(tmp_path: Path) -> None:
    assets = Assets(tmp_path)
    put(assets, "config.json", b"ours")
    assets.put("team-b-run", OWNER, "config.json", 0, base64.b64encode(b"theirs").decode())
    assert assets.read(JOB, OWNER, ["config.json"]) == {"config.json": b"ours"}
    assets.forget("team-b-run", OWNER)
    assert assets.read(JOB, OWNER, ["config.json"]) == {"config.json": b"ours"}
    with pytest.raises(NotFoundError):
        assets.read("team-b-run", OWNER, ["config.json"])


def test_small_files_of_an_earlier_version_are_found_and_kept(tmp_path: Path) -> None:
    earlier = tmp_path / "export-assets" / OWNER
    earlier.mkdir(parents=True)
    (earlier / "config.json").write_bytes(b"{}")
    os.utime(earlier, (0, 0))
    assets = Assets(tmp_path)
    assets.sweep([OWNER])
    assert assets.read(JOB, OWNER, ["config.json"]) == {"config.json": b"{}"}
    assets.forget(JOB, OWNER)
    assert not earlier.exists()
