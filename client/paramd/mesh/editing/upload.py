"""Operands to the sidecars that need them: each host once, all ranks at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paramd.layout.select import NameIndex
from paramd.mesh.editing.words import Op
from paramd.mesh.sidecars import Sidecars
from paramd.mesh.transfer import Transfer

Progress = Callable[[int, int], None]
"""Called with bytes sent and bytes in all."""


class Uploads:
    """Sends the operands of one edit."""

    def __init__(self, sidecars: Sidecars, transfer: Transfer, progress: Progress | None) -> None:
        self._sidecars = sidecars
        self._transfer = transfer
        self._progress = progress

    async def send(
        self,
        index: NameIndex,
        document: Mapping[str, Any],
        ops: Sequence[Op],
        deadline_s: float,
    ) -> None:
        """Stages the operands of `ops` on every rank that holds a part of what they change."""
