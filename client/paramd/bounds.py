"""One table: how much is read at most of what others say, and for how long.

Others are peers (control planes, sidecars, inference engines, receivers of alerts, object stores)
and files that another program may have written. `paramd.answers` reads by these bounds; a place
that reads in another way names its bound here. docs/security.md shows the table.

Pure: numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class OverBoundError(ValueError):
    """Somebody sends more than is read of them, or for longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What is read of one thing at most."""

    what: str
    """The thing, for errors and for the manual."""
    most_bytes: int
    within_s: float = math.inf
    """Seconds for all of it, after a wait that the caller asked for; infinite for local files."""
    parts: int = 1 << 17
    """Most values of a JSON document: a value of two bytes takes tens of bytes of memory."""

    def over(self) -> OverBoundError:
        """The error for more bytes than that."""
        return OverBoundError(f"{self.what} has more than {self.most_bytes:,} bytes")


# Answers over HTTP.
REST_ANSWER: Final = Bound(
    what="an answer of a control plane", most_bytes=64 << 20, within_s=60.0, parts=1 << 22
)
"""65,536 ranks with all that is known of each take 60 MiB."""
REST_FILE_PART: Final = Bound(what="a part of an export's file", most_bytes=16 << 20, within_s=60.0)
PROBLEM: Final = Bound(what="why a control plane refuses", most_bytes=1 << 20)
HEALTH: Final = Bound(what="an answer about a server's health", most_bytes=64 << 10, within_s=5.0)
ENGINE_ANSWER: Final = Bound(
    what="an answer of an inference engine", most_bytes=4 << 20, within_s=10.0
)
COMPLETION: Final = Bound(
    what="an answer for the shell's completion", most_bytes=4 << 20, within_s=0.95
)
PROOF: Final = Bound(
    what="a control plane's proof that it knows a token", most_bytes=16 << 10, within_s=5.0
)
CA_FILE: Final = Bound(what="the CA that a control plane shows", most_bytes=1 << 20, within_s=5.0)
TUNNEL_HEAD: Final = Bound(what="the head of a tunnel's answer", most_bytes=16 << 10, within_s=5.0)
TUNNEL_TEXT: Final = Bound(what="why a tunnel is refused", most_bytes=64 << 10, within_s=5.0)
WEBHOOK: Final = Bound(
    what="the answer of a receiver of alerts, its head alone", most_bytes=64 << 10, within_s=5.0
)
REMOTE_ENDPOINT: Final = Bound(
    what="the endpoint that ssh brings from another host", most_bytes=64 << 10, within_s=60.0
)

ENDPOINT: Final = Bound(what="a job's endpoint.json", most_bytes=64 << 10)

# What sidecars and control planes say over gRPC, message by message.
GRPC_ANSWER_BYTES: Final = 16 << 20
"""Bytes of one message; a channel takes no larger ones."""
GRPC_PARTS: Final = 1 << 19
"""Fields of one message."""
_SMALL: Final = 256 << 10
ANSWER_BYTES: Final[Mapping[str, int]] = {
    "Check": 64 << 10,
    "DropEdit": _SMALL,
    "DropExport": _SMALL,
    "DropMark": _SMALL,
    "FindControl": 64 << 10,
    "GetLogged": 8 << 20,
    "GetMetrics": 1 << 20,
    "GrantStream": _SMALL,
    "ProveControl": 64 << 10,
    "PutCopy": _SMALL,
    "ReleaseSnapshot": _SMALL,
    "RenewHold": _SMALL,
    "RenewSnapshot": _SMALL,
    "ScheduleBoundary": _SMALL,
    "WithdrawBoundary": _SMALL,
}
"""Less for methods whose answers are small, by name."""

# Counts in answers of sidecars.
LOGGED_RANKS: Final = 64
"""Ranks whose logged numbers are taken: the lowest that log."""
LOGGED_NAMES: Final = 256
"""Names of logged numbers per rank."""
LOGGED_NAME_CHARS: Final = 64
LOGGED_VALUES: Final = 64
"""Numbers of one entry."""
LOGGED_ENTRIES: Final = 1000
"""Entries of one answer."""
LOGGED_ANSWERS: Final = 10
"""Answers taken from one rank in a round."""
METRICS_BYTES: Final = 256 << 10
"""Of a sidecar's metrics, passed on by a control plane."""
METRICS_LINES: Final = 2000
LAYOUT_BYTES: Final = 256 << 20
LAYOUT_NAMES: Final = 250_000
LAYOUT_NAME_CHARS: Final = 4096
LAYOUT_NAMES_CHARS: Final = 64 << 20
"""Names of a layout times the length of the longest."""

# Stores and files.
MANIFEST: Final = Bound(what="an export's manifest", most_bytes=16 << 20, parts=1 << 20)
RESERVATION: Final = Bound(what="the reservation of a key", most_bytes=4 << 10)
LISTED: Final = 1_000_000
"""Most objects that are listed below one key of a store."""
OPTIMIZER_GROUPS: Final = Bound(
    what="the optimizer's settings in an export", most_bytes=64 << 20, parts=1 << 22
)
HEADER: Final = Bound(
    what="the header of a safetensors file", most_bytes=100_000_000, parts=1 << 23
)
OWN_FILE: Final = Bound(what="a file of the state directory", most_bytes=16 << 20, parts=1 << 20)
SMALL_FILE: Final = Bound(what="a file of one line", most_bytes=4 << 10)
FIGURES: Final = Bound(what="a rank's figures of its memory", most_bytes=4 << 10)
NAME_MAP: Final = Bound(what="a map of names", most_bytes=64 << 20, parts=1 << 22)
ASSET: Final = Bound(what="a file copied into an export", most_bytes=64 << 20)
FACTS: Final = Bound(
    what="what a sidecar keeps of a step, unpacked", most_bytes=256 << 20, parts=1 << 23
)

TABLE: Final[tuple[Bound, ...]] = tuple(one for one in list(vars().values()) if type(one) is Bound)
"""All of them, in the order of this file."""
