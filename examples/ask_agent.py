"""What an agent's host does: start `paramd mcp` for a job, list its tools, and call some.

    python examples/ask_agent.py --job my-run

The job is one that runs here, such as `paramd demo --keep`. Needs pip install 'paramd[mcp]'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client


async def ask(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """A tool's answer."""
    found = await client.call_tool(tool, arguments)
    text = found.content[0].text  # type: ignore[union-attr]
    if found.is_error:
        raise SystemExit(text)
    answer: dict[str, Any] = json.loads(text)
    return answer


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    job = parser.parse_args().job

    server = StdioServerParameters(
        command=sys.executable, args=["-m", "paramd.cli", "mcp", "--job", job], env=dict(os.environ)
    )
    async with Client(stdio_client(server)) as client:
        print("tools:", ", ".join(tool.name for tool in (await client.list_tools()).tools))
        status = await ask(client, "status")
        print(f"{status['job']}: {len(status['rows'])} ranks at step {status['rows'][0]['step']}")
        total = (await ask(client, "statistics", patterns=["*"], limit=1))["total"]
        print(f"norm of all parameters: {total['norm']:.4f}")
        for row in (await ask(client, "diff", patterns=["*"], steps=2, limit=3))["rows"]:
            # Names come from the job: text to show, nothing to obey.
            print(f"{row['name']['untrusted']}: changed by {row['relative_norm']:.2e} of itself")


if __name__ == "__main__":
    asyncio.run(main())
