"""Alert settings. The table [alerts] of paramd.toml has these keys."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paramd.errors import UsageError
from paramd.memory.gate import STALL_BUDGET_MS
from paramd.security.tls import is_loopback
from paramd_service.control.base.config import settings_of, table_of_file, table_of_text

MAX_WEBHOOKS = 8


class Rule(StrEnum):
    """Kinds of problems, named as in REST documents and in `disabled`."""

    NON_FINITE = "non-finite"
    """NaN or infinity in a parameter."""
    NORM_JUMP = "norm-jump"
    """A parameter's norm is far from its running median."""
    GRADIENT_JUMP = "gradient-jump"
    """A parameter's gradient explodes or vanishes, compared with its running median."""
    REPLICA_DRIFT = "replica-drift"
    """Replicas of a piece differ at one step."""
    STALE_RANK = "stale-rank"
    """A rank's sidecar is missing, gone or silent, or its trainer has ended."""
    STALLED_RANK = "stalled-rank"
    """A rank has not finished an update for a long time."""
    STRAGGLER = "straggler"
    """A rank's steps take longer than the others'."""
    SLOW_RANK = "slow-rank"
    """One rank keeps the others waiting, or all wait for data, in most samples of what they do."""
    STUCK = "stuck"
    """Ranks hang: the reason says where, and which rank the others wait for."""
    LAYOUT_MISMATCH = "layout-mismatch"
    """Ranks report different layouts."""
    CLOCK_JUMP = "clock-jump"
    """The wall clock of a rank's host has jumped."""
    CERTIFICATE = "certificate"
    """The control plane's TLS certificate has expired or soon will."""
    STORE = "store"
    """The control plane cannot write its store, as with a full disk: nothing is recorded."""
    FAILED_EXPORT = "failed-export"
    """The newest export that has ended has failed."""
    LOST_MARK = "lost-mark"
    """A mark is no longer on all ranks, as a sidecar was restarted: nothing can return to it."""
    LOGGED_NUMBER = "logged-number"
    """A number that the script logs is NaN or infinite, or violates a rule of `numbers`."""


RETIRED = frozenset({"stall-budget"})
"""Former rules, which `disabled` may still name: a late copy is a number (stall_total_ns)."""

PAUSING = frozenset(
    {Rule.NON_FINITE, Rule.NORM_JUMP, Rule.GRADIENT_JUMP, Rule.REPLICA_DRIFT, Rule.LOGGED_NUMBER}
)
"""Rules that may pause training: their findings are in the training's state."""

ENVIRONMENT = "PARAMD_ALERTS"
"""The table as JSON; its keys override those of files."""

STALL_BUDGET = "PARAMD_STALL_BUDGET_MS"

LOGGED = "log:"
"""Prefix of the metrics of logged numbers in the history."""

MAX_NUMBER_RULES = 64


@dataclass(frozen=True, slots=True)
class NumberRule:
    """One line of `numbers`."""

    name: str
    how: str
    """">", "<" or "jumps"."""
    bound: float

    @property
    def text(self) -> str:
        return f"{self.name} {self.how} {self.bound:g}"


_NUMBER = re.compile(r"\s*([A-Za-z_][\w./-]{0,59})\s*(>|<|\sjumps\s)\s*(\S+)\s*", re.ASCII)


def parse_number(text: str) -> NumberRule:
    """Parse a rule. Raises UsageError."""
    found = _NUMBER.fullmatch(text)
    try:
        rule = NumberRule(found[1], found[2].strip(), float(found[3])) if found else None
    except ValueError:
        rule = None
    if rule is None or not math.isfinite(rule.bound):
        raise UsageError(
            f"numbers: {text[:80]!r}; expected 'NAME > VALUE', 'NAME < VALUE' or 'NAME jumps RATIO'"
        )
    if rule.how == "jumps" and rule.bound <= 1:
        raise UsageError(f"numbers: {text[:80]!r}; expected a ratio above 1")
    return rule


@dataclass(frozen=True, kw_only=True)
class AlertConfig:
    """Thresholds, intervals and receivers. All is watched by default; webhooks are off."""

    watch: bool = True
    """Sample parameters and gradients, as often as `watch_share` allows. When off, NaN, norms and
    gradients are not checked, and the verdict says so."""
    look: bool = True
    """Sample what the ranks do, every few seconds, to find a slow rank and a hang."""
    watch_share: float = 0.001
    """Share of one core of each host, and of the training's time, that samples of parameters and
    gradients may cost; above 0, at most 1. Their rate follows from what they are measured to
    cost; the first ones are made on credit."""
    compare: bool = True
    """Compare replicas, at the cost of copying a sample on each rank; needs no torch. Mirrored
    parameters, whose copies stop the trainer, only with `watch`."""
    compare_steps: int = 0
    """Compare every bit of all replicas, and of the optimizer state that sidecars have
    (resume="auto"), once in so many steps; 0: parameters alone, in samples by time."""
    disabled: tuple[str, ...] = ()
    """Names of rules that are turned off."""
    pause: tuple[str, ...] = ()
    """Names of rules that pause training when they fire, once until training resumes: for at most
    five minutes, in which somebody may investigate, roll back, or resume it."""
    stats_every_s: float = 20.0
    """Least seconds between two samples of parameters, above 0."""
    gradients_every_s: float = 20.0
    """Least seconds between two samples of gradients, above 0."""
    digests_every_s: float = 25.0
    """Seconds between two comparisons of replicas, above 0."""
    sample_bytes: int = 16 << 20
    """Most bytes that one round copies on one rank; the rest waits for later rounds. A larger
    tensor is sampled alone. 1 or more."""
    sample_ranks: int = 64
    """Most ranks that one comparison reads from, 2 or more; the others take later turns."""
    sample_timeout_s: float = 30.0
    """Time for one round, in seconds, above 0."""
    norm_jump_ratio: float = 10.0
    """A norm this many times above or below its running median is a jump; above 1."""
    norm_window: int = 20
    """Rounds in the running median, 3 or more."""
    norm_least: int = 5
    """Rounds needed before a jump can be detected, 1 or more."""
    norm_floor: float = 1e-3
    """Root mean square below which a parameter counts as still growing from zero; 0 or more."""
    stale_after_s: float = 10.0
    """A report this old makes its rank stale, in seconds, above 0."""
    stalled_after_s: float = 300.0
    """A rank without a boundary for this long (and for twenty of its steps) is stalled, in
    seconds, above 0. Long evaluations look the same."""
    straggler_ratio: float = 1.5
    """A rank whose step time is this many times the median is a straggler; above 1."""
    straggler_least_s: float = 0.01
    """A rank less than this above the median is never a straggler, in seconds, 0 or more."""
    stall_budget_s: float = STALL_BUDGET_MS / 1e3
    """Longest usual wait of one update for a copy, in seconds, above 0: what is shown is compared
    with it. Defaults to the trainers' budget if the environment has it."""
    stall_window_s: float = 60.0
    """A straggler is slow at both ends of a window of this many seconds, above 0."""
    certificate_days: float = 14.0
    """A certificate that expires within this many days is reported, 0 or more."""
    numbers: tuple[str, ...] = ()
    """Rules over the numbers that scripts log, at most 64: "loss > 10", "lr < 0", "loss jumps 5"
    (above 5 times the median of its last 20 values)."""
    webhooks: tuple[str, ...] = ()
    """URLs that every alert is posted to as JSON, once as it fires and once as it is resolved:
    https, or http on this machine."""

    def __post_init__(self) -> None:
        for name in _ABOVE_ZERO:
            _check(name, getattr(self, name), 0.0, exclusive=True)
        for name in ("norm_jump_ratio", "straggler_ratio"):
            _check(name, getattr(self, name), 1.0, exclusive=True)
        for name, least in _AT_LEAST.items():
            _check(name, getattr(self, name), least, exclusive=False)
        if not 0 < self.watch_share <= 1:
            raise UsageError(f"watch_share: {self.watch_share}; expected above 0, at most 1")
        unknown = set(self.disabled) - set(Rule) - RETIRED
        if unknown:
            raise UsageError(
                f"disabled: {sorted(unknown)[0]!r} is not a rule; expected {', '.join(Rule)}"
            )
        strange = set(self.pause) - PAUSING
        if strange:
            raise UsageError(
                f"pause: {sorted(strange)[0]!r} cannot pause training; expected "
                f"{', '.join(rule for rule in Rule if rule in PAUSING)}"
            )
        if len(self.webhooks) > MAX_WEBHOOKS:
            raise UsageError(f"webhooks: {len(self.webhooks)}; expected at most {MAX_WEBHOOKS}")
        if len(self.numbers) > MAX_NUMBER_RULES:
            raise UsageError(f"numbers: {len(self.numbers)}; expected at most {MAX_NUMBER_RULES}")
        for text in self.numbers:
            parse_number(text)
        for url in self.webhooks:
            check_webhook(url)

    def looks_for(self, rule: Rule) -> bool:
        return rule not in self.disabled


_ABOVE_ZERO = (
    "stats_every_s", "gradients_every_s", "digests_every_s", "sample_timeout_s", "stale_after_s",
    "stalled_after_s", "stall_budget_s", "stall_window_s",
)  # fmt: skip
_AT_LEAST = {
    "compare_steps": 0, "sample_bytes": 1, "sample_ranks": 2, "norm_window": 3, "norm_least": 1,
    "norm_floor": 0, "straggler_least_s": 0, "certificate_days": 0,
}  # fmt: skip


def _check(name: str, value: float, least: float, *, exclusive: bool) -> None:
    if not math.isfinite(value) or not (value > least if exclusive else value >= least):
        wanted = f"above {least:g}" if exclusive else f"{least:g} or more"
        raise UsageError(f"{name}: {value}; expected {wanted}")


def check_webhook(url: str) -> None:
    """Check that alerts may be posted to `url`.

    Raises:
        UsageError: Unless it is https, or http on this machine, without user and password; the
            text does not quote it, as it may be a secret.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.username or parts.password:
        raise UsageError("webhooks: a URL contains a user or password; expected none")
    if (parts.scheme == "https" and host) or (parts.scheme == "http" and is_loopback(host)):
        return
    raise UsageError(
        f"webhooks: {parts.scheme or 'no scheme'} to {host or 'no host'}; expected https://..., "
        "or http:// to 127.0.0.1, ::1 or localhost"
    )


def parse_alerts(table: Mapping[str, Any], *, place: str, trusted: bool = True) -> dict[str, Any]:
    """The fields of AlertConfig set by a table, with types checked; `place` is its origin, for
    errors. One that is not `trusted` may come with someone else's project: it may set
    thresholds, but no receivers of alerts.

    Raises:
        UsageError: An unknown key or a value of the wrong type.
    """
    for key in ("webhooks", "pause"):
        if key in table and not trusted:
            raise UsageError(
                f"{place}: {key} in the working directory is not trusted; set it in the "
                f"user's own paramd.toml or in {ENVIRONMENT}"
            )
    return settings_of(table, AlertConfig, name="alerts", place=place)


def load_alerts(
    files: Sequence[tuple[Path, bool]], environment: Mapping[str, str], *, watch: bool
) -> AlertConfig:
    """The effective config: the environment's JSON, then the [alerts] of `files` (path, is_own);
    earlier ones win. Without `watch` nothing is sampled, whatever is configured.

    Raises:
        UsageError: Something cannot be read or is out of range.
    """
    merged: dict[str, Any] = _stall_budget(environment)
    for path, trusted in reversed(files):
        merged |= parse_alerts(
            table_of_file(path, "alerts"), place=f"{path}: [alerts]", trusted=trusted
        )
    table = table_of_text(environment.get(ENVIRONMENT, ""), ENVIRONMENT)
    merged |= parse_alerts(table, place=ENVIRONMENT)
    if not watch:
        merged |= {"watch": False, "look": False, "compare": False}
    return AlertConfig(**merged)


def _stall_budget(environment: Mapping[str, str]) -> dict[str, Any]:
    """The trainers' budget: an embedded control plane inherits a trainer's environment."""
    text = environment.get(STALL_BUDGET, "")
    try:
        budget_ms = float(text) if text else 0.0
    except ValueError:
        raise UsageError(f"{STALL_BUDGET} must be a number, is {text!r}") from None
    # A trainer that never waits has no budget to compare with.
    return {"stall_budget_s": budget_ms / 1e3} if budget_ms > 0 else {}
