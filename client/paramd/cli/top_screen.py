"""The screen of `paramd top`. All text is shown as plain text: names may contain markup."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from paramd.cli.output import seconds
from paramd.cli.shell import one_line
from paramd.cli.status import COLUMNS, Look, about_text, alert_line, cells
from paramd.errors import ParamdError

CLOCK_S = 0.5


def shown(ranks: list[dict[str, Any]], wanted: str) -> list[dict[str, Any]]:
    """Ranks whose number is `wanted`, or whose row contains it."""
    text = wanted.strip().lower()
    if not text:
        return ranks
    if text.isdecimal():
        return [rank for rank in ranks if str(rank["rank"]) == text]
    return [rank for rank in ranks if text in " ".join(cells(rank)).lower()]


class TopApp(App[None]):
    """Refreshes every `every_s`; the age shown keeps counting while the control plane is down."""

    TITLE = "paramd top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #about { height: 1; background: $primary-background; }
    #ranks { height: 2fr; }
    #alerts-pane { height: 1fr; border-top: solid $primary; }
    #filter { display: none; }
    #filter.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "all", "All ranks", priority=True),
    ]

    def __init__(
        self, look: Callable[[], Awaitable[Look]], *, first: Look, source: str, every_s: float
    ) -> None:
        """No I/O. `look` may raise ParamdErrors; `source` is the control plane's URL."""
        super().__init__()
        self._ask = look
        self._seen = first
        self._source = source
        self._every_s = every_s
        self._wanted = ""
        self._trouble = ""

    def compose(self) -> ComposeResult:
        yield Static(id="about", markup=False)
        yield DataTable[Text](id="ranks", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="alerts-pane", can_focus=False):
            yield Static(id="alerts", markup=False)
        yield Input(id="filter", placeholder="rank, phase or note; Enter applies, Escape clears")
        yield Footer()

    def on_mount(self) -> None:
        self._table.add_columns(*(column.heading for column in COLUMNS))
        self._table.focus()
        self._draw()
        self.set_interval(CLOCK_S, self._draw)
        self.set_interval(self._every_s, self._again)

    async def _again(self) -> None:
        try:
            self._seen = await self._ask()
        except ParamdError as error:
            self._trouble = one_line(str(error))
        else:
            self._trouble = ""
        self._draw()

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#ranks", DataTable)

    def _draw(self) -> None:
        # A reply may arrive while the screen is being torn down.
        if not self.query("#about"):
            return
        seen = self._seen
        age_s = max(time.monotonic() - seen.at_s, 0.0)
        age = seconds(age_s) if age_s >= 1 else "now"
        text = f"{about_text(seen)}  {age} old, from {self._source}"
        if self._wanted:
            text += f"  filter: {self._wanted}"
        if self._trouble:
            text += f"  {self._trouble}"
        self.query_one("#about", Static).update(one_line(text))
        lines = [alert_line(alert) for alert in seen.alerts]
        self.query_one("#alerts", Static).update("\n".join(lines) or "no alerts")
        self._draw_ranks()

    def _draw_ranks(self) -> None:
        table = self._table
        rows = {str(rank["rank"]): cells(rank) for rank in shown(self._seen.ranks, self._wanted)}
        if [key.value for key in table.rows] != list(rows):
            at = table.cursor_row
            table.clear()
            for key, row in rows.items():
                table.add_row(*map(Text, row), key=key)
            table.move_cursor(row=min(at, max(len(rows) - 1, 0)))
            return
        columns = list(table.columns)
        for key, row in rows.items():
            for column, cell in zip(columns, row, strict=True):
                if str(table.get_cell(key, column)) != cell:
                    table.update_cell(key, column, Text(cell))

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("open")
        box.focus()

    def action_all(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._wanted = ""
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._draw()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self._table.focus()
        self._draw()
