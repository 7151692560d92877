"""Rank 0 obtains the job's next epoch, from a site's control plane or from this host."""

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
"""Pause before asking an unresponsive control plane again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenEpoch:
    """An epoch, with its keys and its ranks' tickets."""

    epoch: int
    public_key: bytes
    """Verifies the epoch's tickets."""
    rank_tickets: list[str] = field(repr=False)
    """By rank; each lets one sidecar join as that rank."""
    private_key: bytes | None = field(default=None, repr=False)
    """Signs the epoch's tickets; None when a site's control plane keeps it."""
    site: Registration | None = None
    """The site's registration; None when there is no site, or it did not answer."""


def take_epoch(settings: AttachSettings, *, job: str, world_size: int) -> TakenEpoch:
    """Take the next epoch, above any this host knows of; rank 0 only.

    An unresponsive control plane costs this epoch the service, not the training.

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
            # Remember it here too, so that a later epoch of this host's own stays above it.
            places.last_epoch(job, at_least=found.epoch)
            return TakenEpoch(
                epoch=found.epoch,
                public_key=found.public_key,
                rank_tickets=found.rank_tickets,
                site=found,
            )
    return _own_epoch(job, world_size)


def _registered(settings: AttachSettings, *, job: str, world_size: int) -> Registration:
    """Register the job, retrying while the control plane may be coming back.

    Safe although `register` is not idempotent: a lost answer leaves an epoch that no rank ever
    joins, and the next one is above it.
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
