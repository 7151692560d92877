"""The seam between boundary requests and edits: who makes an edit ready, who learns its fate."""

from __future__ import annotations

from typing import Protocol


class ReadyEdits(Protocol):
    """Edits of one possession, as `boundaries.py` needs them. On the event loop's thread.

    Life of a request: `make_ready` before READY is written, then the trainers agree or the
    request is withdrawn, then `settle` as soon as the page may tell what became of it.
    """

    def make_ready(self, edit_id: str, *, boundary: int, token: int) -> int:
        """Declares a staged edit ready for a boundary request; idempotent for the same one.

        From now on its memory stays until the page says that nobody can apply it any more.

        Returns:
            Word.ARGUMENT: where its program begins in the memory of edits.

        Raises:
            NotFoundError: nothing is known of it.
            ConflictError: it is not complete, was applied already, or is in doubt for
                another request.
        """

    def settle(self) -> None:
        """Looks at the page: a ready edit was applied, or nobody can apply it any more."""

    def withdrawn(self, boundary: int) -> None:
        """Withdrawing found for certain that this rank will never take part in a request.

        Its edit may be dropped, or made ready for another request, at once.
        """
