"""A job in a notebook: its ranks, its parameters, and one parameter's histogram over steps, live.

    from paramd.integrations.notebook import show

    show(mesh)

The widget needs anywidget (`pip install 'paramd[notebook]'`). Without it, and where widgets are not
drawn (a saved notebook, a page made of it, a terminal), the same is shown once, without updates.
"""

from __future__ import annotations

import html
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramd.errors import ParamdError, UsageError
from paramd.integrations.versions import require
from paramd.layout.stats import Summary
from paramd.mesh.results import MeshStatus, Params, html_table, shape_text, text_table

if TYPE_CHECKING:
    from paramd.mesh.mesh import Mesh

MAX_RANKS = 256
"""Ranks that are drawn one by one; of more only how many there are in each phase."""

MAX_NAMES = 2000
"""Names that a widget is given; a filter finds the others."""

MAX_COLUMNS = 120
"""Steps of the histogram that are kept, the newest ones."""

LEAST_S = 0.5
SHOWN_NAMES = 20
_PARAMS = ("name", "shape", "dtype")
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Column:
    """The histogram of one tensor at one step."""

    step: int
    summary: Summary

    @property
    def begin(self) -> int:
        """The binary exponent, floor(log2(|x|)), of the elements that are counted first."""
        return self.summary.exponents[0][0] if self.summary.exponents else 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of this exponent and of each next one; empty without finite nonzero ones."""
        return tuple(count for _, count in self.summary.exponents)

    @property
    def bad_count(self) -> int:
        """Elements that are not finite."""
        return self.summary.nan_count + self.summary.inf_count

    def document(self) -> dict[str, Any]:
        """For the page."""
        return {
            "step": self.step,
            "begin": self.begin,
            "counts": list(self.counts),
            # JSON has no NaN.
            "norm": f"{self.summary.norm:.6g}",
            "zeros": self.summary.zero_count,
            "bad": self.bad_count,
        }


@dataclass(kw_only=True)
class View:
    """A notebook's view of a job at one moment. Prints as text and as HTML."""

    status: MeshStatus
    params: Params
    """All parameters that match."""
    name: str
    """The parameter whose histogram is shown; empty: none."""
    columns: list[Column] = field(default_factory=list)
    """Histograms of `name`, the oldest first."""
    problem: str = ""
    """Why it is not current; empty while it is."""
    at_s: float = 0.0
    """Time of the view, in seconds since the Unix epoch."""

    def __repr__(self) -> str:
        params = text_table(_PARAMS, _param_rows(self.params), _param_below(self.params))
        parts = [repr(self.status), "", params]
        if self.columns:
            last = self.columns[-1]
            parts += ["", self._caption(), _bars(last)]
        return "\n".join(filter(None, [self.problem, *parts]))

    def _repr_html_(self) -> str:
        rows = _param_rows(self.params)
        parts = [
            f"<p><strong>{html.escape(self.problem)}</strong></p>" if self.problem else "",
            self.status._repr_html_(),
            html_table(_PARAMS, rows, _param_below(self.params)),
        ]
        if self.columns:
            parts.append(f"<p>{html.escape(self._caption())}</p>{_svg(self.columns)}")
        return "".join(parts)

    def _caption(self) -> str:
        first, last = self.columns[0], self.columns[-1]
        steps = f"steps {first.step} to {last.step}" if first is not last else f"step {last.step}"
        return (
            f"{self.name}: binary exponents at {steps}; norm {last.summary.norm:.6g}, "
            f"{last.summary.zero_count} zeros, {last.bad_count} not finite"
        )


class Watched:
    """A job that is sampled repeatedly. Not thread-safe but for `look`."""

    def __init__(self, mesh: Mesh, patterns: Sequence[str], name: str) -> None:
        """Looks once. Raises as `Mesh.status`, `Mesh.params` and `Mesh.stats`."""
        self._mesh = mesh
        self._patterns = tuple(patterns)
        self._lock = threading.Lock()
        status, params = mesh.status(), mesh.params(*patterns)
        if not name and params:
            name = params[0].name
        self.view = View(status=status, params=params, name=name)
        self._look_at(self.view)

    def choose(self, name: str) -> None:
        """Show another parameter's histogram, from now on."""
        with self._lock:
            if name != self.view.name:
                self.view = View(status=self.view.status, params=self.view.params, name=name)

    def look(self) -> View:
        """Look again: adds a column when the step has risen. Never raises for the job's sake."""
        with self._lock:
            view = self.view
            try:
                before, view.status = view.status.incarnation, self._mesh.status()
                if view.status.incarnation != before:
                    view.columns = []
                    view.params = self._mesh.params(*self._patterns)
                self._look_at(view)
                view.problem = ""
            except ParamdError as error:
                since = time.strftime("%H:%M:%S", time.localtime(view.at_s))
                view.problem = f"As of {since}: {error}"
            return view

    @property
    def mesh_is_closed(self) -> bool:
        """Whether nothing will ever be seen again."""
        return not self._mesh._end.alive

    def _look_at(self, view: View) -> None:
        last = view.columns[-1].step if view.columns else -1
        if view.name and view.status.step > last:
            stats = self._mesh.stats(view.name, buffers=True, histogram=True)
            found = Column(stats.step, stats.total.summary)
            if found.step > last:
                view.columns = [*view.columns[1 - MAX_COLUMNS :], found]
        view.at_s = time.time()


def show(mesh: Mesh, *patterns: str, name: str = "", every_s: float = 2.0) -> Any:
    """A live widget of a job for the end of a notebook's cell; a `View` without anywidget.

    While it is live it asks the ranks for their state, and for one tensor's histogram when the step
    has risen, every `every_s`. It ends with `widget.close()`, or with the mesh.

    Args:
        mesh: From `paramd.connect`.
        patterns: Globs over names, as in `Mesh.params`; none means all parameters.
        name: The parameter whose histogram is shown first; default: the first that matches.
        every_s: Sampling interval in seconds, at least 0.5.

    Raises:
        UsageError: `every_s` is too short, or anywidget's version is not supported.
        NotFoundError: nothing matches. UnreachableError: the job does not respond.
    """
    if not every_s >= LEAST_S:
        raise UsageError(f"every_s: {every_s}; expected at least {LEAST_S} s")
    watched = Watched(mesh, patterns, name)
    if find_spec("anywidget") is None:
        return watched.view
    require("anywidget", at_least="0.9.18", below="1", extra="notebook")
    return _widget_class()(watched, every_s)


@cache
def _widget_class() -> Any:
    """The widget's class, made when it is first needed: anywidget takes a second to import."""
    import anywidget
    import traitlets

    class MeshWidget(anywidget.AnyWidget):
        """The widget of `show`. Traits are the page's input."""

        _esm = Path(__file__).with_name("notebook.js")
        _css = Path(__file__).with_name("notebook.css")

        status = traitlets.Dict().tag(sync=True)
        names = traitlets.List().tag(sync=True)
        name_count = traitlets.Int().tag(sync=True)
        name = traitlets.Unicode().tag(sync=True)
        columns = traitlets.List().tag(sync=True)
        filter = traitlets.Unicode().tag(sync=True)
        live = traitlets.Bool(True).tag(sync=True)

        def __init__(self, watched: Watched, every_s: float) -> None:
            self._watched = watched
            self._every_s = every_s
            self._over = threading.Event()
            self._turn = threading.Event()
            view = watched.view
            super().__init__(name=view.name, **_documents(view, ""))
            self.observe(self._asked, ["name", "filter", "live"])
            self._thread = threading.Thread(target=self._run, name="paramd-widget", daemon=True)
            self._thread.start()

        def close(self) -> None:
            """Stop looking, and take the widget off the page. Idempotent."""
            self._over.set()
            self._turn.set()
            if threading.current_thread() is not self._thread:
                self._thread.join()
            super().close()

        def _asked(self, change: Any) -> None:
            self._turn.set()

        def _run(self) -> None:
            while not self._over.is_set():
                self._turn.wait(self._every_s)
                self._turn.clear()
                if self._over.is_set():
                    return
                closed = self._watched.mesh_is_closed
                self._watched.choose(self.name)
                if self.live or not self._watched.view.columns:
                    self._watched.look()
                # Each by itself: a sync that is delayed would be delayed for the kernel's own
                # thread too.
                for trait, document in _documents(self._watched.view, self.filter).items():
                    setattr(self, trait, document)
                if closed:
                    return

        def _repr_mimebundle_(self, **options: Any) -> Any:
            found = super()._repr_mimebundle_(**options)
            data, about = found if isinstance(found, tuple) else (found or {}, {})
            view = self._watched.view
            return {**data, "text/plain": repr(view), "text/html": view._repr_html_()}, about

    return MeshWidget


def _documents(view: View, wanted: str) -> dict[str, Any]:
    """The widget's traits but those that the page sets."""
    status = view.status
    phases = dict(Counter(row.phase for row in status))
    ranks = [[row.rank, row.phase, row.step, row.reason] for row in status[:MAX_RANKS]]
    matching = [row for row in view.params if wanted.casefold() in row.name.casefold()]
    return {
        "status": {
            "job": status.job,
            "incarnation": status.incarnation,
            "step": status.step,
            "world_size": status.world_size,
            "summary": status.summary(),
            "phases": phases,
            "ranks": ranks if status.world_size <= MAX_RANKS else [],
            "problem": view.problem,
        },
        "names": [[row.name, shape_text(row.shape), row.dtype] for row in matching[:MAX_NAMES]],
        "name_count": len(matching),
        "columns": [column.document() for column in view.columns],
    }


def _param_rows(params: Params) -> list[list[str]]:
    return [[row.name, shape_text(row.shape), row.dtype] for row in params[:SHOWN_NAMES]]


def _param_below(params: Params) -> str:
    hidden = len(params) - SHOWN_NAMES
    return params.summary() + (f" ({hidden} not shown)" if hidden > 0 else "")


def _bars(column: Column) -> str:
    """One line of blocks, for terminals."""
    if not column.counts:
        return "no finite nonzero elements"
    top = max(column.counts)
    blocks = "".join(_BARS[-(-count * 8 // top)] for count in column.counts)
    return f"2^{column.begin} {blocks} 2^{column.begin + len(column.counts) - 1}"


def _svg(columns: Sequence[Column]) -> str:
    """Exponents (upwards) over steps, darker where more elements are. Attributes only: a page's
    policy may forbid styles."""
    filled = [column for column in columns if column.counts]
    if not filled:
        return "<p>no finite nonzero elements</p>"
    begin = min(column.begin for column in filled)
    end = max(column.begin + len(column.counts) for column in filled)
    wide, high = 480 / len(columns), 160 / (end - begin)
    cells = []
    for x, column in enumerate(columns):
        top = max(column.counts, default=0)
        for at, count in enumerate(column.counts):
            if count:
                y = end - 1 - (column.begin + at)
                cells.append(
                    f'<rect x="{x * wide:.2f}" y="{y * high:.2f}" width="{wide:.2f}" '
                    f'height="{high:.2f}" fill="#1f6feb" fill-opacity="{count / top:.3f}"/>'
                )
    label = f"binary exponents 2^{begin} to 2^{end - 1} over {len(columns)} steps"
    return (
        f'<svg role="img" aria-label="{label}" width="480" height="160" viewBox="0 0 480 160">'
        + "".join(cells)
        + "</svg>"
    )
