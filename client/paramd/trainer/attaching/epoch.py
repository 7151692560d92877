"""Rank 0 takes the job's next epoch: from a site's control plane, or from this host."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from paramd import places
from paramd.errors import UnreachableError
from paramd.security.tickets import RANK_TICKET_TTL_S, Role, Signer, new_private_key
from paramd.trainer.helpers.site_link import Registration, register
from paramd.trainer.settings import AttachSettings

log = logging.getLogger("paramd")

AGAIN_S = 0.5
"""Pause before a control plane that does not answer is asked again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenEpoch:
    """An epoch, and who may speak for its ranks."""

    epoch: int
    public_key: bytes
    """Verifies the epoch's tickets."""
    rank_tickets: list[str] = field(repr=False)
    """By rank; each lets one sidecar join as that rank."""
    private_key: bytes | None = field(default=None, repr=False)
    """Signs the epoch's tickets; None when a site's control plane keeps it."""
    site: Registration | None = None
    """The site's control plane; None when there is none, or it did not answer."""


def take_epoch(settings: AttachSettings, *, job: str, world_size: int) -> TakenEpoch:
    """The next epoch, above all that this host knows of; on rank 0 only.

    A control plane that does not answer costs this epoch the service, not the training.

    Raises:
        DeniedError, ConflictError, UsageError: the control plane refused the job.
        UsageError, ConflictError: the state dir cannot be used.
    """
    if settings.control:
        try:
            found = _registered(settings, job=job, world_size=world_size)
        except UnreachableError as error:
            log.warning(
                "paramd: %s; training goes on without a control plane until it attaches again",
                error,
            )
        else:
            places.last_epoch(job, at_least=found.epoch)
            return TakenEpoch(
                epoch=found.epoch,
                public_key=found.public_key,
                rank_tickets=found.rank_tickets,
                site=found,
            )
    return _own_epoch(job, world_size)


def _registered(settings: AttachSettings, *, job: str, world_size: int) -> Registration:
    """Registers the job, asking again while the control plane may be coming back.

    An answer that was lost on its way leaves an epoch that no rank ever joins; the next one is
    above it.
    """
    deadline_s = time.monotonic() + settings.control_timeout_s
    told = False
    while True:
        try:
            floor = places.last_epoch(job)
            return register(settings, job=job, world_size=world_size, epoch_floor=floor)
        except UnreachableError as error:
            if time.monotonic() >= deadline_s:
                raise
            if not told:
                log.warning("paramd: %s; asking again for %g s", error, settings.control_timeout_s)
                told = True
            time.sleep(AGAIN_S)


def _own_epoch(job: str, world_size: int) -> TakenEpoch:
    epoch, private_key = places.next_epoch(job), new_private_key()
    signer = Signer(private_key)
    tickets = [
        signer.mint(job=job, epoch=epoch, role=Role.SIDECAR, rank=rank, ttl_s=RANK_TICKET_TTL_S)
        for rank in range(world_size)
    ]
    return TakenEpoch(
        epoch=epoch,
        public_key=signer.public_key,
        rank_tickets=tickets,
        private_key=private_key,
    )
