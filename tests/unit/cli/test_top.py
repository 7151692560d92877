"""`paramd top` driven by keys: what it shows, filters and survives; `alerts -w`, `status -w`."""

import time
from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from paramd.cli.status import Look
from paramd.cli.top_screen import TopApp
from paramd.errors import UnreachableError


def rank(number: int, **changes: Any) -> dict[str, Any]:
    usual = {
        "rank": number, "membership": "joined", "phase": "constant", "step": 1200,
        "step_time_ns": 70_000_000, "stall_count": 2, "stall_total_ns": 3_000_000,
        "arena_bytes": 12_000_000, "snapshot_bytes": 0, "reason": "",
    }  # fmt: skip
    return usual | changes


class Service:
    """Answers what the test says."""

    def __init__(self, count: int) -> None:
        self.ranks = [rank(number) for number in range(count)]
        self.alerts: list[dict[str, Any]] = []
        self.away = False

    async def look(self) -> Look:
        if self.away:
            raise UnreachableError("nobody answers [bold]here[/bold]")
        return Look(
            job="run", incarnation=3, ranks=self.ranks, alerts=self.alerts, at_s=time.monotonic()
        )


def table(app: TopApp) -> list[list[str]]:
    found = app.query_one("#ranks", DataTable)
    return [[str(cell) for cell in found.get_row_at(at)] for at in range(found.row_count)]


def text(app: TopApp, name: str) -> str:
    return str(app.query_one(name, Static).content)


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "it did not show"
        await pilot.pause(0.02)


async def test_ranks_alerts_and_an_outage_are_shown_and_followed() -> None:
    service = Service(3)
    first = await service.look()
    app = TopApp(service.look, first=first, source="http://here", every_s=0.05)
    async with app.run_test(size=(140, 40)) as pilot:
        assert len(table(app)) == 3
        assert table(app)[0] == [
            "0", "constant", "1,200", "70 ms", "2", "3 ms", "12 MB", "0 B", "",
        ]  # fmt: skip
        assert "job run  run 3  step 1,200  3 ranks  0 alerts" in text(app, "#about")
        assert "http://here" in text(app, "#about")
        assert text(app, "#alerts") == "no alerts"
        service.ranks = [rank(n, step=1300 + n) for n in range(3)]
        service.ranks[1] = rank(1, membership="gone", reason="its sidecar was lost")
        told = {"reason": "w [red]at[/red] step 9: rank 1 differs\x1b[2J", "state": "firing"}
        service.alerts = [told | {"id": "a", "severity": "critical", "rule": "replica-drift"}]
        await until(pilot, lambda: "1 alerts" in text(app, "#about"))
        assert [row[1] for row in table(app)] == ["constant", "gone", "constant"]
        assert table(app)[2][2] == "1,302"
        # Markup and control characters of others are shown, not followed.
        assert "w [red]at[/red] step 9: rank 1 differs [2J" in text(app, "#alerts")
        service.away = True
        await until(pilot, lambda: "nobody answers [bold]here[/bold]" in text(app, "#about"))
        assert len(table(app)) == 3
