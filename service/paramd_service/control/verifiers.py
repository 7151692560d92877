"""Who may have signed a ticket: one public key for each epoch of a job."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from paramd.errors import DeniedError
from paramd.tickets import Signer, Verifier
from paramd_service.control.incarnation import Incarnation
from paramd_service.control.site import Site

MAX_VERIFIERS = 1024


class Verifiers:
    """Verifiers by job and epoch, the last ones used kept."""

    def __init__(self, site: Site | None, current: Mapping[str, Incarnation]) -> None:
        """`current` is looked at in each `get`: without a site only its epochs are ours."""
        self._site = site
        self._current = current
        self._kept: OrderedDict[tuple[str, int], Verifier] = OrderedDict()

    def get(self, job: str, epoch: int) -> Verifier:
        """Verifies tickets of an epoch. Raises DeniedError when no such epoch can be ours."""
        found = self._kept.get((job, epoch))
        if found is not None:
            self._kept.move_to_end((job, epoch))
            return found
        key = self._private_key(job, epoch)
        found = self._kept[job, epoch] = Verifier(Signer(key).public_key)
        if len(self._kept) > MAX_VERIFIERS:
            self._kept.popitem(last=False)
        return found

    def _private_key(self, job: str, epoch: int) -> bytes:
        if self._site is not None:
            # Of any epoch: a genuine ticket of a past one is told so, and not just denied.
            return self._site.private_key(job, epoch)
        present = self._current.get(job)
        if present is not None and present.epoch == epoch:
            return present.bootstrap.private_key
        raise DeniedError(
            f"the ticket is for job {job[:64]!r}, epoch {epoch}, which is not served here"
        )
