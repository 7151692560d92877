"""`paramd alerts` against a real control plane: once, and as it happens."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.control_process import (
    TOKEN,
    Control,
    FakeSidecar,
    control_plane,
    joined,
    serving,
    until,
)

pytestmark = pytest.mark.usefixtures("grpc_is_up")


def command(control: Control, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "paramd.cli", "alerts", "--url", control.url, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PARAMD_TOKEN": TOKEN}


@contextmanager
def following(control: Control, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    with out.open("wb") as stdout:
        process = subprocess.Popen(
            command(control, "-w", "-o", "jsonl"),
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environment(),
        )
    assert process.stderr is not None
    try:
        with process.stderr:
            yield process
    finally:
        process.kill()
        process.wait()


def rows(out: Path) -> list[tuple[str, str, list[int]]]:
    whole = out.read_text().rpartition("\n")[0]
    found = [json.loads(line) for line in whole.splitlines()]
    return [(row["rule"], row["state"], row["ranks"]) for row in found]


async def run(control: Control, *arguments: str) -> tuple[bytes, bytes]:
    """Data and messages of one command, which must end well."""
    process = await asyncio.create_subprocess_exec(
        *command(control, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    data, messages = await process.communicate()
    assert process.returncode == 0, messages
    return data, messages


async def test_alerts_are_listed_and_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("PARAMD_ALERTS", json.dumps({"stale_after_s": 60}))
    zero, one = FakeSidecar(0), FakeSidecar(1)
    async with serving(zero), serving(one):
        with control_plane("--no-watch") as control:
            async with joined(control, zero):
                async with joined(control, one):
                    await until(lambda: control.job()["reason"] == "")
                with following(control, out):
                    await until(lambda: rows(out) == [("stale-rank", "firing", [1])])
                    data, messages = await run(control, "-o", "json")
                    document = json.loads(data)
                    assert [alert["ranks"] for alert in document["alerts"]] == [[1]]
                    assert b"1 firing; parameters are not being sampled" in messages
                    table, _ = await run(control, "--all")
                    head = table.decode().splitlines()[0].split()
                    assert head[:3] == ["SEVERITY", "RULE", "STATE"]
                    async with joined(control, one):
                        over = [("stale-rank", "resolved", [1])]
                        await until(lambda: rows(out)[1:] == over)
