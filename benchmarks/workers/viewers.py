"""Viewers of a job's events: streams of server-sent events, read until the process is killed.

    python -m benchmarks.workers.viewers COUNT < {"url", "token", "job"}

Says "watching" when every stream has had its first event.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping

import httpx2


async def _view(client: httpx2.AsyncClient, path: str, begun: asyncio.Event) -> None:
    async with client.stream("GET", path) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                begun.set()


async def _run(said: Mapping[str, str], count: int) -> None:
    headers = {"authorization": f"Bearer {said['token']}"}
    limits = httpx2.Limits(max_connections=count)
    async with (
        httpx2.AsyncClient(
            base_url=said["url"], headers=headers, timeout=60.0, limits=limits, trust_env=False
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        begun = [asyncio.Event() for _ in range(count)]
        for event in begun:
            group.create_task(_view(client, f"/api/v1/jobs/{said['job']}/events", event))
        for event in begun:
            await event.wait()
        print("watching", flush=True)


if __name__ == "__main__":
    asyncio.run(_run(json.load(sys.stdin), int(sys.argv[1])))
