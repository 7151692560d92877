"""The hash chain of the audit: links between records, and the check of a chain. Pure.

A record's body is canonical JSON text; its hash is sha256(previous hash || body). Both are kept
and sent verbatim, so anyone can check a chain without our JSON writer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64
"""The previous hash of the first record."""


@dataclass(frozen=True, slots=True)
class Link:
    """One record of a chain."""

    seq: int
    """Position in the chain, 1 for the first."""
    body: str
    """Canonical JSON of the record, as it was hashed."""
    hash: str
    """64 hexadecimal digits."""


def canonical(record: Mapping[str, Any]) -> str:
    """The canonical JSON text of a record.

    Raises:
        ValueError: For NaN and infinities.
    """
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def link_hash(previous: str, body: str) -> str:
    """Hash of a record that follows the one with hash `previous`."""
    return hashlib.sha256(bytes.fromhex(previous) + body.encode()).hexdigest()


class ChainCheck:
    """Checks a chain record by record: feed it with `take` from the first record on."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.count = 0
        """Number of good records, from the first on."""
        self.hash = GENESIS
        """Hash of the last good record; a chain that was cut off later no longer has it."""
        self.bad_seq: int | None = None
        """The first changed or missing record; None when all is well so far."""
        self.reason = ""
        """Why; empty when all is well."""

    @property
    def good(self) -> bool:
        """Whether no record was changed, and none removed before another."""
        return self.bad_seq is None

    def take(self, link: Link) -> bool:
        """Check the next record; False once something is wrong."""
        if self.bad_seq is not None:
            return False
        seq = self.count + 1
        if link.seq != seq:
            return self._fail(seq, f"record {seq} is missing; {link.seq} stands in its place")
        claimed = _claims(link, self._job)
        if claimed is None:
            return self._fail(seq, f"record {seq} is not a record of this chain")
        if link_hash(claimed, link.body) != link.hash:
            return self._fail(seq, f"record {seq} was changed: its hash is another one")
        if claimed != self.hash:
            # This record is intact and names the previous hash: blame the previous record.
            return self._fail(max(seq - 1, 1), f"record {seq} does not follow record {seq - 1}")
        self.count, self.hash = seq, link.hash
        return True

    def _fail(self, seq: int, reason: str) -> bool:
        self.bad_seq, self.reason = seq, reason
        return False


def _claims(link: Link, job: str) -> str | None:
    """The previous hash claimed in the record's body; None when it is not this job's record."""
    try:
        body = json.loads(link.body)
        matches = body["seq"] == link.seq and body["job"] == job
        previous = str(body["prev"])
        whole = len(bytes.fromhex(previous)) == 32
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return previous if matches and whole else None
