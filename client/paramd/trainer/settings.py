"""Settings of `attach`, read once from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from paramd.errors import UsageError

ARENAS = ("auto", "host", "mirror")


@dataclass(frozen=True, kw_only=True)
class AttachSettings:
    """How a trainer treats its sidecar. Every field has a `PARAMD_*` variable."""

    stall_budget_ms: float = 5.0
    """Longest wait of one update for a copy, in milliseconds; 0 never waits."""
    lossless_budget_ms: float = 0.0
    """Longest wait of one update for a reader that wants every gradient, in milliseconds; 0
    never waits, so that such readers are told how many frames they missed."""
    agreement_timeout_s: float = 30.0
    """Longest wait for the slowest rank's agreement, in seconds; then agreeing ends."""
    attach_timeout_s: float = 300.0
    """Longest wait for the other ranks while attaching, in seconds."""
    sidecar_start_timeout_s: float = 20.0
    """Longest wait for a new sidecar to answer, in seconds."""
    arena: str = "auto"
    """Where parameters are served from. "auto": those in host memory move into an arena that the
    sidecar owns; when any is on a device, all stay where they are and are copied into the arena
    at agreed boundaries that ask for it. "host": an arena in host memory in any case, which is
    what "auto" takes too. "mirror": all stay where they are, also in host memory."""
    sidecar_listen: str = "127.0.0.1:0"
    """Where the sidecar's gRPC listens; port 0 takes a free one."""
    listen: str = "127.0.0.1:8470"
    """Where the embedded control plane listens; the next free port if taken."""
    control: str = ""
    """URL of a control plane of a site, where the job registers; empty starts one beside rank 0."""
    token: str = field(default="", repr=False)
    """Token that the job registers with at `control`."""
    token_file: str = ""
    """File that holds the token, when `token` is empty."""
    linger_s: float = 600.0
    """How long a sidecar serves the last step after its trainer has ended, in seconds."""

    def __post_init__(self) -> None:
        for name in ("stall_budget_ms", "lossless_budget_ms", "linger_s"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, is {getattr(self, name)}")
        if self.arena not in ARENAS:
            raise UsageError(f"arena must be one of {', '.join(ARENAS)}, is {self.arena!r}")
        for name in ("agreement_timeout_s", "attach_timeout_s", "sidecar_start_timeout_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be above 0, is {getattr(self, name)}")

    @classmethod
    def from_environment(cls) -> AttachSettings:
        """Reads PARAMD_STALL_BUDGET_MS, PARAMD_LISTEN and so on; the rest keep their default.

        Raises:
            UsageError: a value is no number or out of range.
        """
        values: dict[str, float | str] = {}
        for name, option in cls.__dataclass_fields__.items():
            text = os.environ.get(f"PARAMD_{name.upper()}")
            if text is None:
                continue
            if option.type == "str":
                values[name] = text
                continue
            try:
                values[name] = float(text)
            except ValueError:
                raise UsageError(f"PARAMD_{name.upper()} must be a number, is {text!r}") from None
        return cls(**values)  # type: ignore[arg-type]
