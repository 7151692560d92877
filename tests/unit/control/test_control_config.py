"""Settings and bootstrap: bounds are checked, secrets never show."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest

from paramd.errors import UsageError
from paramd_service.control.base.config import (
    MAX_BOOTSTRAP_BYTES,
    Bootstrap,
    ControlConfig,
    read_bootstrap,
)

GOOD: dict[str, Any] = {
    "job": "run",
    "incarnation": 3,
    "world_size": 2,
    "private_key": "ab" * 32,
    "token": "secret-token-of-the-user",
}


def read(line: bytes) -> Bootstrap:
    return read_bootstrap(io.BytesIO(line), job="run")


def test_the_bootstrap_line_is_read_and_its_secrets_do_not_show() -> None:
    found = read(json.dumps(GOOD).encode() + b"\n")
    assert (found.job, found.incarnation, found.world_size) == ("run", 3, 2)
    assert found.private_key == bytes.fromhex("ab" * 32)
    assert "secret-token" not in repr(found)
    assert "xab" not in repr(found)


@pytest.mark.parametrize(
    "changed",
    [
        {"job": "other"},
        {"incarnation": 0},
        {"incarnation": None},
        {"world_size": 0},
        {"world_size": 1 << 20},
        {"private_key": "ab"},
        {"private_key": "not hex"},
        {"private_key": 7},
        {"token": "short"},
        {"token": "ö" * 40},
    ],
)
def test_a_wrong_bootstrap_is_refused_without_showing_it(changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        read(json.dumps(GOOD | changed).encode())
    assert "ab" * 8 not in str(caught.value)
    assert "secret-token" not in str(caught.value)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"\xff", b"[" * 60_000, b"x" * (MAX_BOOTSTRAP_BYTES + 1)]
)
def test_garbage_on_stdin_is_a_usage_error(line: bytes) -> None:
    with pytest.raises(UsageError, match="stdin"):
        read(line)


def test_listen_comes_from_option_then_environment_then_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ControlConfig.from_arguments(["--job", "run"]).listen == "127.0.0.1:8470"
    monkeypatch.setenv("PARAMD_LISTEN", "127.0.0.1:9000")
    assert ControlConfig.from_arguments(["--job", "run"]).listen == "127.0.0.1:9000"
    chosen = ControlConfig.from_arguments(["--job", "run", "--listen", "[::1]:1"])
    assert chosen.listen == "[::1]:1"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--job", "../x"],
        ["--job", "run", "--empty-end-s", "0"],
        ["--job", "run", "--silent-after-s", "nan"],
        ["--job", "run", "--ticket-ttl-s", "0.5"],
        ["--job", "run", "--drain-s", "-1"],
    ],
)
def test_a_value_out_of_range_is_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        ControlConfig.from_arguments(arguments)


def test_it_starts_without_torch() -> None:
    code = "import sys, paramd_service.control.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60.0)
