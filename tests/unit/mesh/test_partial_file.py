"""Partial files in a directory that others write too: what is planted there is never used."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paramd.errors import ConflictError, ExhaustedError
from paramd.mesh.exports.download import PartialFile

NAME = "model.safetensors"
HEADER = (2).to_bytes(8, "little") + b"{}"
OTHER_UID = 65534


def _open_to_all(path: Path, precious: Path) -> None:
    path.touch()
    path.chmod(0o666)


def _another_users(path: Path, precious: Path) -> None:
    """As an attacker leaves it: his own, so that he can write into it at any time."""
    child = os.fork()
    if child == 0:
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "linked": lambda path, precious: path.symlink_to(precious),
    "dangling": lambda path, precious: path.symlink_to(precious.parent / "not-there"),
    "hard linked": lambda path, precious: os.link(precious, path),
    "fifo": lambda path, precious: os.mkfifo(path, 0o600),
    "directory": lambda path, precious: path.mkdir(),
    "open to all": _open_to_all,
    "another user's": _another_users,
}


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.timeout(30)
def test_what_others_planted_is_refused_and_left_alone(kind: str, tmp_path: Path) -> None:
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can plant a file as another user")
    os.chmod(tmp_path, 0o1777)
    for parent in tmp_path.parents[:-1]:
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o011)
    precious = tmp_path / "precious"
    precious.write_text("0600 of root")
    precious.chmod(0o600)
    PLANTS[kind](tmp_path / f".{NAME}.part", precious)
    file = PartialFile(tmp_path / NAME)
    with pytest.raises(ConflictError, match="remove it, or give another name"), file.opened():
        file.begin(HEADER, 10)
    assert precious.read_text() == "0600 of root"
    assert not (tmp_path / NAME).exists()
    assert not (tmp_path / "not-there").exists()


def test_only_the_whole_file_has_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    path, before = tmp_path / NAME, os.umask(0o027)
    try:
        file = PartialFile(path)
        with file.opened():
            assert file.header() == b""
            file.begin(HEADER, 14)
            file.append(memoryview(b"abcd"))
            modes = {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()}
            assert modes == {f".{NAME}.part": 0o600}
        again = PartialFile(path)
        with again.opened():
            assert (again.header(), again.size_bytes) == (HEADER, 14)
            again.go_on(12)
            again.append(memoryview(b"xy"))
            again.publish(HEADER.replace(b"{}", b"[]"), overwrite=False)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_bytes() == HEADER.replace(b"{}", b"[]") + b"abxy"
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_bytes_that_could_not_get_their_name_are_gone_on_from(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"taken meanwhile")
    file = PartialFile(tmp_path / NAME)
    with file.opened():
        file.begin(HEADER, 10)
        with pytest.raises(ConflictError, match="exists"):
            file.publish(HEADER, overwrite=False)
    with file.opened():
        assert file.header() == HEADER


def test_a_partial_file_that_was_swapped_does_not_get_the_name(tmp_path: Path) -> None:
    file = PartialFile(tmp_path / NAME)
    with file.opened():
        file.begin(HEADER, 14)
        part = tmp_path / f".{NAME}.part"
        part.rename(tmp_path / "taken")
        part.write_bytes(b"evil")
        with pytest.raises(ConflictError, match="replaced by another process"):
            file.publish(HEADER, overwrite=True)
    assert not (tmp_path / NAME).exists()


def test_a_file_that_cannot_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    file = PartialFile(tmp_path / NAME)
    with file.opened(), pytest.raises(ExhaustedError, match="free some space"):
        file.begin(HEADER, 1 << 60)
