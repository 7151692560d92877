"""A finished export's parameters written back into the running training, as one edit.

A separate process reads the files and uploads them, as any client would: torch and tensors stay out
of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paramd.errors import ConflictError, DataLossError, DeadlineError, ParamdError
from paramd_service.admission import CALLER, Shares
from paramd_service.control.base.processes import ask_process

UPLOAD_S = 240.0
"""Time to read the export and to send it to the sidecars, in seconds."""
MAX_CONCURRENT = 2
"""Most exports that are read at a time; each takes the memory of the whole model."""

PROCESS = "paramd_service.exports.load_process"


class Loading:
    """Reads exports into edits, a few at a time. Event loop only."""

    def __init__(self) -> None:
        self._shares = Shares(MAX_CONCURRENT, "exports being loaded")
        self._edits: set[str] = set()

    @contextmanager
    def place(self, edit_id: str | None) -> Iterator[None]:
        """Take one of the places for a load, before its edit exists.

        A load that fails aborts its edit, so a repeated request must not load beside the first.

        Args:
            edit_id: Id that the caller chose for the edit, if any.

        Raises:
            ExhaustedError: other exports are being loaded.
            ConflictError: the edit with this id is being loaded already.
        """
        if edit_id in self._edits:
            raise ConflictError(
                f"edit {edit_id} is being loaded already; ask for the edit (paramd edits)"
            )
        with self._shares.one(CALLER.get()):
            if edit_id is not None:
                self._edits.add(edit_id)
            try:
                yield
            finally:
                if edit_id is not None:
                    self._edits.discard(edit_id)

    async def upload(
        self,
        *,
        job: str,
        document: Mapping[str, Any],
        path: str,
        label: str,
        export_id: str,
        edit: Mapping[str, Any],
    ) -> None:
        """Send an export's parameters to the sidecars, as the operands of an edit that waits for
        them. Call it in a `place`.

        Args:
            job: Its name.
            document: Its document, with the caller's ticket.
            path: Directory of the export on this host.
            label: The export's name for callers, who never see a path.
            export_id: Id of the export that is expected there.
            edit: Its `id`, and `reset_moments` and `note` as it was created.

        Raises:
            NotFoundError, UsageError: the export is not of this model.
            ConflictError: a file is not what was exported, another export lies there by now, or it
                takes longer than `UPLOAD_S`.
        """
        asked = {
            "job": job,
            "document": document,
            "path": path,
            "label": label,
            "export": export_id,
            "edit": edit,
            "timeout_s": UPLOAD_S,
        }
        try:
            await ask_process(PROCESS, asked, timeout_s=UPLOAD_S)
        except (TimeoutError, DeadlineError) as error:
            raise ConflictError(
                f"{label} was not read and sent within {UPLOAD_S:.0f} s; use paramd restore, "
                "which waits longer"
            ) from error
        except DataLossError as error:
            # No server error: another checkpoint can be chosen.
            raise ConflictError(f"{str(error).replace(path, label)}; choose another") from error
        except ParamdError as error:
            raise type(error)(str(error).replace(path, label)) from error
