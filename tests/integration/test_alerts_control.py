"""A real control plane tells what is wrong: over REST, to a webhook, in its log; and no secret."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paramd.v1 import control_pb2
from tests.integration.control_process import (
    Control,
    FakeSidecar,
    control_plane,
    joined,
    serving,
    until,
)

pytestmark = pytest.mark.usefixtures("grpc_is_up")


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """A real HTTP server on a loopback port; gives its URL and the bodies that it took."""
    taken: list[dict[str, object]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        assert head.startswith("post /hook/secret-path ")
        assert "authorization" not in head
        taken.append(body)
        # It refuses what begins: an alert's end is posted all the same.
        status = "503 No" if body["state"] == "firing" else "200 OK"
        writer.write(
            f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/hook/secret-path", taken
    finally:
        server.close()
        await server.wait_closed()


def alerts(control: Control, state: str = "firing") -> list[dict[str, object]]:
    answer = control.get(f"/api/v1/jobs/run/alerts?state={state}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, object]] = answer.json()["alerts"]
    return found


@asynccontextmanager
async def reporting(control: Control, sidecar: FakeSidecar) -> AsyncIterator[None]:
    """A joined sidecar that goes on to report: a silent one is lost, too, after ten seconds."""

    async def report(write: Callable[[control_pb2.JoinRequest], Any]) -> None:
        while True:
            await asyncio.sleep(0.5)
            await write(sidecar.report())

    async with joined(control, sidecar) as write:
        task = asyncio.create_task(report(write))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


@pytest.mark.in_turns
async def test_a_lost_rank_is_told_everywhere_and_is_over_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero, one = FakeSidecar(0), FakeSidecar(1)
    async with receiver() as (url, taken), serving(zero), serving(one):
        monkeypatch.setenv("PARAMD_ALERTS", json.dumps({"webhooks": [url]}))
        with control_plane("--no-watch") as control:
            async with reporting(control, zero):
                async with reporting(control, one):
                    await until(lambda: control.job()["reason"] == "")
                    assert alerts(control) == []
                await until(lambda: alerts(control))
                (alert,) = alerts(control)
                assert (alert["rule"], alert["ranks"]) == ("stale-rank", [1])
                assert alert["severity"] == "critical"
                text = control.get("/metrics").text
                assert 'paramd_alerts_firing{job="run",rule="stale-rank"} 1.0' in text
                await until(lambda: len(taken) == 1)
                async with reporting(control, one):
                    await until(lambda: not alerts(control))
                    await until(lambda: alerts(control, "resolved"))
                    (over,) = alerts(control, "resolved")
                    assert over["id"] == alert["id"]
                    await until(lambda: len(taken) == 2)
                    posts = [
                        f'paramd_webhook_posts_total{{ok="{ok}"}} 1.0' for ok in ("false", "true")
                    ]
                    await until(
                        lambda: set(posts) <= set(control.get("/metrics").text.splitlines())
                    )
            log = control.log.read_text()
        told = taken[:2]  # it may fire again as the test ends
        assert [body["state"] for body in told] == ["firing", "resolved"]
        assert {body["id"] for body in told} == {alert["id"]}
        lines = [json.loads(line) for line in log.splitlines()]
        told = [line["event"] for line in lines if line["logger"] == "paramd.control.alerts"]
        assert len([event for event in told if "stale-rank fires" in event]) == 1
        assert "secret-path" not in log


async def test_a_config_that_cannot_be_does_not_stop_an_embedded_control_plane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARAMD_ALERTS", '{"no_such_key": 1}')
    with control_plane("--no-watch") as control:
        assert alerts(control) == []
        assert "unknown key 'no_such_key'" in control.log.read_text()
