"""What a user sees of a job: its verdict, asked over REST once a second."""

from __future__ import annotations

import json
import resource
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

import paramd
from benchmarks.verdicts.training import JOB

BAD = frozenset({"warning", "degraded", "critical", "down"})
"""Words of a verdict that make somebody look."""

_TIMEOUT_S = 10.0
_MOST_SERIES = 150


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The first line at one time."""

    s: float
    """Seconds of the steady clock."""
    word: str
    text: str
    rule: str = ""
    ranks: tuple[int, ...] = ()
    name: str = ""
    step: int = -1
    """Since which step."""
    at_step: int = -1
    """The job's step when it was read."""

    @property
    def is_bad(self) -> bool:
        return self.word in BAD

    @property
    def place(self) -> tuple[str, str, tuple[int, ...], str]:
        """What makes it another line than the one before: numbers in its text change."""
        return self.word, self.rule, self.ranks, self.name


@dataclass(slots=True)
class Job:
    """A running case, as somebody with its state dir sees it."""

    state_dir: Path
    lines: list[Line] = field(default_factory=list)
    """Each other verdict, once."""
    unreached_count: int = 0

    def look(self) -> Line | None:
        """Read the verdict; None while there is no control plane."""
        try:
            line = self._line(self.get(f"/api/v1/jobs/{JOB}"))
        except (OSError, ValueError, KeyError):
            self.unreached_count += 1
            return None
        if not self.lines or self.lines[-1].place != line.place:
            self.lines.append(line)
        return line

    def _line(self, found: dict[str, Any]) -> Line:
        verdict = found["verdict"]
        alert = self._alert(verdict["cause"]) if verdict["cause"] else {}
        return Line(
            s=time.monotonic(),
            word=verdict["word"],
            text=verdict["line"],
            rule=alert.get("rule", ""),
            ranks=tuple(alert.get("ranks", ())),
            name=alert.get("name", ""),
            step=verdict["step"],
            at_step=found["step"],
        )

    def _alert(self, number: str) -> dict[str, Any]:
        """The alert of this id; empty if it is over meanwhile. Raises as `get`."""
        alerts = self.get(f"/api/v1/jobs/{JOB}/alerts")["alerts"]
        return next((one for one in alerts if one["id"] == number), {})

    def get(self, path: str) -> dict[str, Any]:
        """GET of the job's control plane, with the owner's token. Raises OSError, ValueError or
        KeyError."""
        endpoint = json.loads((self.state_dir / JOB / "endpoint.json").read_text())
        request = urllib.request.Request(
            f"{endpoint['url']}{path}", headers={"Authorization": f"Bearer {endpoint['token']}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                document: dict[str, Any] = json.load(answer)
        except urllib.error.URLError as error:
            raise OSError(str(error)) from error
        return document

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups, by an edit."""
        with paramd.connect(job=JOB) as mesh:
            mesh.set_hyperparameters("group 0", lr=lr)

    def export(self) -> None:
        """Export all parameters to the job's own destination; the outcome is not waited for."""
        with paramd.connect(job=JOB) as mesh:
            mesh.export()

    def limit_files(self, most_bytes: int) -> None:
        """Let the sidecars write no file beyond this size."""
        for one in psutil.process_iter():
            try:
                command = one.cmdline()
                if "paramd_service.sidecar" in command and str(self.state_dir) in " ".join(command):
                    one.rlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
            except psutil.Error:
                continue

    def record(self) -> dict[str, Any]:
        """All lines, the alerts and the sampled series, for whoever asks why."""
        document: dict[str, Any] = {"lines": [asdict(one) for one in self.lines]}
        for name, path in (("alerts", "alerts"), ("series", "history/series"), ("ranks", "ranks")):
            try:
                document[name] = self.get(f"/api/v1/jobs/{JOB}/{path}")
            except (OSError, ValueError, KeyError) as error:
                document[name] = str(error)
        series = document["series"]["series"] if isinstance(document["series"], dict) else []
        for one in series[:_MOST_SERIES]:
            query = urllib.parse.urlencode({key: one[key] for key in ("metric", "subject")})
            try:
                one["points"] = self.get(f"/api/v1/jobs/{JOB}/history?{query}")["points"]
            except (OSError, ValueError, KeyError) as error:
                one["points"] = str(error)
        return document
