"""Destinations and keys: what an attacker may write opens nothing."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest

from paramd.errors import DeniedError, UsageError
from paramd.v1 import export_pb2
from paramd.v1.common_pb2 import Header
from paramd.v1.export_pb2 import ExportTarget
from paramd_service.destinations.destinations import (
    Destination,
    DestinationKind,
    check_key,
    locate,
    parse_destinations,
)
from paramd_service.destinations.object_store import ObjectPlace
from paramd_service.destinations.open import open_place
from paramd_service.exports import files as export_service

EXPORT_ID = "0123456789abcdef" * 2
HERE: Any = {"destination": "here", "export_id": EXPORT_ID, "overwrite": True}


def attacks() -> Iterator[str]:
    """Keys that must be refused."""
    traversal = ["..", "../x", "a/..", "a/../b", "a/../../b", "../../etc/passwd", "./a", "a/.", "."]
    traversal += ["....//x", "..;/x", "a/..;/b", "...", "a/...", ".../a", "..\\x", "a\\..\\b"]
    traversal += ["%2e%2e/x", "%2E%2E%2Fx", "..%2fx", "..%252fx", "%252e%252e/x", "..%c0%afx"]
    traversal += ["%c0%ae%c0%ae/x", "..%5cx", "a/%2e%2e/b", "%2e", "a/%2e", "\u2024\u2024/x"]
    traversal += ["\uff0e\uff0e/x", "..\u2215x", "..\u2044x", "a\u2216b", "..\uff0fx", "a/\u2025"]
    yield from traversal
    yield from ["", "/", "//", "a//b", "/a", "a/", "//a", "a///b", "/etc/passwd", "//host/share"]
    yield from ["/..", "/.", "///etc", "/proc/self/root", "/dev/sda", "a/b/", "a/b//"]
    yield from [
        "~", "~/x", "~root", "~root/x", "a/~", "a/~/b", "$HOME/x", "${HOME}", "%HOME%", "`id`",
    ]  # fmt: skip
    yield from [
        "$(id)", "a;b", "a|b", "a&b", "a>b", "a<b", "a*b", "a?b", "a[b]", "{a,b}", "!a", "#a",
    ]  # fmt: skip
    schemes = ["s3", "gs", "file", "http", "https", "ftp", "az", "hf", "memory", "simplecache"]
    yield from [f"{scheme}://bucket/x" for scheme in schemes]
    yield from [f"{scheme}:x" for scheme in schemes]
    yield from [
        "a::b", "zip://a::file:///etc/passwd", "filecache::s3://b/x", "a:b", ":a", "a:", "::",
    ]  # fmt: skip
    yield from ["a/b::c", "blockcache::file:///x", "reference::x", "C:", "C:/x", "C:\\x", "c:x"]
    yield from ["\\\\host\\share", "\\\\?\\C:\\x", "\\\\.\\PhysicalDrive0", "a\\b", "\\a", "a\\"]
    devices = ["con", "CON", "prn", "aux", "nul", "NUL", "com1", "COM9", "lpt1", "LPT9", "Con.txt"]
    devices += ["nul.safetensors", "aux.tar.gz", "a/con", "con/a", "a/nul/b", "CONIN", "clock"]
    yield from devices
    yield from ["a.", "a..", "a ", " a", "a b", "a/ b", "a /b", "a./b", "a\t", "\ta", "a\u00a0b"]
    yield from [f"a{chr(code)}b" for code in range(0x20)]
    yield from [f"{chr(code)}" for code in (0, 0x7F, 0x80, 0x85, 0x9F)]
    yield from ["\x00", "a\x00", "\x00a", "a/\x00/b", "a\x00/../b", "a\r\nb", "a\nb/c"]
    yield from [f"a{mark}b" for mark in "\u200b\u200e\u202e\u2066\ufeff\u00ad\u2028\u2029\u0301"]
    yield from [
        "\u0430dmin", "\u00e9", "\u4e2d\u6587", "\U0001f600", "\ud800", "a\ud800b", "\uff41",
    ]  # fmt: skip
    yield from [
        ".hidden", "a/.hidden", ".git", ".paramd-export", "a/.ssh/id", ".a/b", "-a", "a/-rf",
    ]  # fmt: skip
    yield from ["--help", "-", "+a", "=a", "@a", "a@b", "a,b", "a'b", 'a"b', "a%b", "a%00b", "a^b"]
    yield from ["a" * 129, "a/" * 300 + "a", "a" * 600, "/".join("a" * 17), "b/" + "a" * 129]
    yield from ["x" * 4096, "a" * 100_000, "../" * 40 + "etc/passwd", "a/b/../../../c"]


PYTHON = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[3]))
ATTACKS = list(dict.fromkeys(attacks()))


def test_every_attack_is_refused_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = parse_destinations({"here": str(tmp_path)})

    def guarded(real: Callable[..., object]) -> Callable[..., object]:
        def opened(path: object, *args: object, **named: object) -> object:
            # Python itself may read its sources, to show where a warning comes from.
            if str(path).startswith(PYTHON):
                return real(path, *args, **named)
            raise AssertionError(f"opened {path}")

        return opened

    for name in ("open", "mkdir", "stat", "rename", "listdir"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    for key in ATTACKS:
        with pytest.raises(UsageError):
            check_key(key)
        with pytest.raises(UsageError):
            locate(known, f"here/{key}")
        # A message holds no lone surrogate: such a key cannot reach a sidecar at all.
        with pytest.raises((UsageError, UnicodeEncodeError)):
            open_place(ExportTarget(**HERE, root=str(tmp_path), key=key))


@pytest.mark.parametrize(
    "text", ["", "here", "/a", "Here/a", "../here/a", "s3://b/a", "he re/a", "here:/a", "-/a"]
)
def test_what_names_no_destination_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        locate(parse_destinations({"here": str(tmp_path)}), text)


def test_tables_are_read_from_json_and_checked() -> None:
    text = '{"a": "/data/", "b": {"root": "s3://bucket/pre", "region": "x", "allow_http": true}}'
    found = parse_destinations(json.loads(text))
    assert found["a"] == Destination(name="a", kind=DestinationKind.DIRECTORY, root="/data")
    assert found["b"].root == "s3://bucket/pre"
    assert found["b"].options == {"region": "x", "allow_http": "true"}
    for address in ("s3://KEY:SECRET@bucket/x", "s3://bucket/KEY:SECRET@x"):
        with pytest.raises(UsageError, match=r"^(?!.*SECRET).*expected an absolute path"):
            parse_destinations({"c": address})


@pytest.mark.parametrize("where", ["parent", "last", "staging", "file"])
def test_symbolic_links_below_the_root_are_never_followed(where: str, tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    place = open_place(ExportTarget(**HERE, root=str(root), key="run/key"))
    if where == "parent":
        (root / "run").symlink_to(outside)
        with pytest.raises(DeniedError):
            place.begin(1)
    elif where == "last":
        (root / "run").mkdir()
        (root / "run" / "key").symlink_to(outside)
        with pytest.raises(Exception, match="exists"):
            place.begin(1)
        with pytest.raises(DeniedError):
            place.open("model.safetensors", finished=True)
    elif where == "staging":
        (root / "run").mkdir()
        (root / "run" / f".key.{EXPORT_ID}.part").symlink_to(outside)
        with pytest.raises(DeniedError):
            place.begin(1)
        with pytest.raises(DeniedError):
            place.create("x", 1)
    else:
        place.begin(1)
        secret = outside / "secret"
        secret.write_text("s")
        (root / "run" / f".key.{EXPORT_ID}.part" / "x").symlink_to(secret)
        with pytest.raises(DeniedError):
            place.open("x", finished=False)
        sink = place.create("x", 1)
        sink.write(memoryview(b"y"))
        sink.finish()
        assert secret.read_text() == "s"
        place.drop(["x"], finished=False)
        assert secret.read_text() == "s"
    assert {path.name for path in outside.iterdir()} <= {"secret"}


@pytest.mark.parametrize("call", ["begin", "finish"])
async def test_a_removal_waits_for_what_still_runs(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, go, begun, loop = [], Event(), asyncio.Event(), asyncio.get_running_loop()

    def slow(*_: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        done.append(f"{call} {go.wait(10)}")

    place = Mock(begin=slow, commit=slow, drop=lambda *_, **__: done.append("drop"))
    exports = export_service.RankExports(MagicMock())
    exports._plans = AsyncMock(**{"plan.return_value": Mock(files=(), finish=lambda _: {})})
    monkeypatch.setattr(export_service, "open_place", lambda _: place)
    monkeypatch.setattr(export_service, "manifest", lambda *_, **__: b"")
    monkeypatch.setattr(export_service.messages, "header", lambda *_: Header())
    request = getattr(export_pb2, f"{call.title()}ExportRequest")()
    running = asyncio.create_task(getattr(exports, call)(request, 1.0))
    await begun.wait()
    dropping = asyncio.create_task(exports.drop(export_pb2.DropExportRequest(), 1.0))
    await asyncio.wait({dropping}, timeout=0.1)
    go.set()
    await asyncio.gather(running, dropping)
    assert done == [f"{call} True", "drop"]


@pytest.mark.parametrize(
    "files", [None, 7, "abc", {"name": "a"}, [], [None, 1, "a", ["a"]], [{"name": "a"}, {}]]
)
def test_a_manifest_in_a_bucket_may_list_anything(files: Any) -> None:
    names = ObjectPlace._names_of({"files": files})
    assert names == (["a", ""] if files == [{"name": "a"}, {}] else [])
