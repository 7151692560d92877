"""Settings of `attach`, read once from the environment."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields

from paramd.errors import UsageError
from paramd.extras import TRACKERS
from paramd.memory.gate import STALL_BUDGET_MS

CHOICES = {
    "arena": ("auto", "host", "device", "mirror"),
    "resume": ("never", "auto"),
    "sidecar": ("own", "external"),
}
"""Settings that take one of a few words."""

_MAY_BE_ZERO = frozenset(
    {
        "stream_port",
        "grace_s",
        "idle_memory_s",
        "edit_pool_bytes",
        "undo_budget_bytes",
        "delta_budget_bytes",
        "host_reserve",
    }
)


@dataclass(frozen=True, kw_only=True)
class AttachSettings:
    """Settings of `attach`. Every field has a `PARAMD_*` variable."""

    stall_budget_ms: float = STALL_BUDGET_MS
    """Longest wait of one update for a copy, in milliseconds; 0 never waits. It covers no edits,
    copies of buffers and optimizer state, rounds or holds: paramd_rank_stand_* tells of each."""
    lossless_budget_ms: float = 0.0
    """Longest wait of one update for a reader that wants every gradient, in milliseconds; 0
    never waits, and the answers count the frames that these readers missed."""
    agreement_timeout_s: float = 30.0
    """Longest wait for the slowest rank, in seconds; after that the incarnation stops agreeing."""
    attach_timeout_s: float = 300.0
    """Longest wait for the other ranks while attaching, in seconds."""
    control_timeout_s: float = 20.0
    """How long attach keeps asking a site's control plane that does not answer (it may be
    restarting), in seconds; 0 asks once."""
    sidecar: str = "own"
    """Where the sidecar runs. "own": the trainer starts it. "external": `paramd sidecar host` of
    the same PARAMD_STATE_DIR starts it, in another container of the pod."""
    sidecar_start_timeout_s: float = 20.0
    """How long attach waits for a new sidecar or control plane to come up, in seconds, above 0. One
    that is later is not ended: training begins without it, and paramd goes on waiting."""
    arena: str = "auto"
    """Where parameters are served from. "auto": those in host memory move into an arena owned by
    the sidecar; if any is on a device, all stay where they are and are copied into the arena at
    agreed boundaries that ask for it. "host": always an arena in host memory, which is what
    "auto" uses too. "device": those on one CUDA or HIP device move into memory there that the
    sidecar owns (docs/gpu.md); where that cannot be had, as "mirror".
    "mirror": all stay where they are, even in host memory."""
    resume: str = "never"
    """"auto": keep what resuming needs, and resume from memory when started again; "never":
    keep nothing, and start afresh."""
    keep_every: float = 1
    """Steps between continuation records, 1 or more. A training can be resumed without loss only
    at these steps."""
    standing_every: float | None = None
    """Steps between standing snapshots; 0 makes none. None: as many as keep copying them below a
    hundredth of the training's time, at least 10."""
    replicas: float = 0
    """Copies of each standing snapshot on other hosts: 0 or 1. With 1 the loss of a whole host
    costs the steps since the last copied one. Needs resume="auto"."""
    address: str = ""
    """Name or address at which other hosts reach this one; empty: the one that the process
    group uses. Only jobs on several hosts need it."""
    sidecar_listen: str = "127.0.0.1:0"
    """Where the sidecar's gRPC server listens; port 0 picks a free one."""
    listen: str = ""
    """Where the embedded control plane listens: that very port, or it does not start. Empty: the
    job's last port, else 127.0.0.1:8470, and the next free one if that is taken."""
    control: str = ""
    """URL of a site's control plane to register with; empty starts one next to rank 0."""
    token: str = field(default="", repr=False)
    """Token to register with at `control`."""
    token_file: str = ""
    """File that holds the token, when `token` is empty."""
    log: str = ""
    """Trackers that rank 0 starts `paramd track` for, separated by commas, see docs/gradients.md:
    "tensorboard", "wandb", "mlflow", "trackio", "prometheus"; empty: none."""
    linger_s: float = 600.0
    """How long a sidecar serves the last step after its trainer has ended, in seconds, above 0."""

    stream_port: float | None = None
    """TCP port of the sidecar's bulk streams, for hosts behind forwarded ports; 0 and None pick a
    free one. Each rank of a host needs a different one."""
    budget_bytes: float | None = None
    """Most bytes of snapshots on a rank, above 0. None, here and below: the sidecar's default,
    see `paramd sidecar serve -- --help`."""
    default_lease_s: float | None = None
    """Lease of a snapshot when the request names none, in seconds, above 0."""
    max_lease_s: float | None = None
    """Longest lease granted, in seconds, above 0."""
    grace_s: float | None = None
    """How long running calls may finish while a sidecar drains, in seconds; 0 or more."""
    max_calls: float | None = None
    """Calls served at once by a sidecar; 1 or more."""
    max_deadline_s: float | None = None
    """Longest deadline of a call, in seconds, above 0."""
    idle_memory_s: float | None = None
    """How long freed snapshot memory is kept for the next one, in seconds; 0 or more."""
    edit_pool_bytes: float | None = None
    """Shared memory kept ready for small edits; 0 or more."""
    edit_budget_bytes: float | None = None
    """Most bytes of edits not yet applied on a rank, above 0."""
    undo_budget_bytes: float | None = None
    """Most bytes kept on a rank to undo applied edits; 0 or more."""
    edit_expiry_s: float | None = None
    """How long an idle staged edit is kept, in seconds, above 0."""
    standing_budget_bytes: float | None = None
    """Most bytes of standing snapshots on a rank, above 0. Two of the whole state are kept at
    most; with room for one, a trainer that dies during its copy leaves none. Copies for ranks of
    other hosts share the rest."""
    copy_rate_bytes: float | None = None
    """Most bytes a second at which a rank sends copies to another host, above 0."""
    host_reserve: float | None = None
    """Bytes of the host's memory, and of each cgroup's, that stay free for the training; 0 or more.
    None: 5 % of it, or what one more step has been seen to take, if that is more."""
    marks_budget_bytes: float | None = None
    """Most bytes of marks (`mesh.mark`) on a rank, above 0."""
    delta_budget_bytes: float | None = None
    """Most bytes kept on a rank for followers that read deltas; 0 or more, 0 keeps nothing."""

    def __post_init__(self) -> None:
        for name in ("stall_budget_ms", "lossless_budget_ms", "control_timeout_s"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, is {getattr(self, name)}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                words = " or ".join(f'"{word}"' for word in known)
                raise UsageError(f"{name} must be {words}, not {getattr(self, name)!r}")
        for name, least in (("keep_every", 1), ("standing_every", 0)):
            value = getattr(self, name)
            if value is not None and not (
                math.isfinite(value) and value >= least and value == int(value)
            ):
                raise UsageError(f"{name} must be a whole number from {least} on, is {value}")
        if self.replicas not in (0, 1):
            raise UsageError(f"replicas must be 0 or 1, is {self.replicas}")
        if self.replicas and self.standing_every == 0:
            raise UsageError(
                "replicas=1 copies standing snapshots, and standing_every=0 makes none; leave "
                "one of them out"
            )
        for name in (
            "agreement_timeout_s",
            "attach_timeout_s",
            "sidecar_start_timeout_s",
            "linger_s",
        ):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be above 0, is {getattr(self, name)}")
        self._check_limits()

    def _check_limits(self) -> None:
        for name in self.trackers:
            if name not in TRACKERS:
                raise UsageError(f"log must be some of {', '.join(TRACKERS)}, is {name!r}")
        for name in LIMITS:
            value = getattr(self, name)
            if value is None or (value == 0 and name in _MAY_BE_ZERO):
                continue
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} must be a number above 0, is {value}")

    @property
    def trackers(self) -> list[str]:
        """The names in `log`, each once."""
        return list(dict.fromkeys(name.strip() for name in self.log.split(",") if name.strip()))

    def sidecar_options(self) -> list[str]:
        """The sidecar limits that are set, as command line options."""
        options = []
        for name in LIMITS:
            value = getattr(self, name)
            if value is not None:
                text = str(float(value)) if name.endswith("_s") else str(int(value))
                options += [f"--{name.replace('_', '-')}", text]
        return options

    @classmethod
    def from_environment(cls) -> AttachSettings:
        """Read PARAMD_STALL_BUDGET_MS, PARAMD_LISTEN and so on; others keep their defaults.

        Raises:
            UsageError: A value is not a number or out of range.
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


LIMITS = tuple(
    one.name
    for one in fields(AttachSettings)
    if one.default is None and one.name != "standing_every"
)
"""Limits passed on to the sidecar; None leaves its own default."""
