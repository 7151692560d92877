"""Rank 0 takes the job's next epoch: from a site's control plane, or from this host."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from paramd import places
from paramd.errors import UnreachableError
from paramd.security.tickets import RANK_TICKET_TTL_S, Role, Signer, new_private_key
from paramd.trainer.helpers.site_link import Registration, register
from paramd.trainer.settings import AttachSettings

log = logging.getLogger("paramd")


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
            found = register(
                settings, job=job, world_size=world_size, epoch_floor=places.last_epoch(job)
            )
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
