"""Which sidecar is asked, and the proof that it was the one that answered.

An address proves nothing: ports are used again, and loopback is another place on every host. So
a call names the rank that it is for, a sidecar refuses what is not for it, and the header of
every answer is compared with what was asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from paramd import errors
from paramd.errors import ConflictError, DeniedError, UnreachableError
from paramd.memory.handover import Message
from paramd.security.tickets import claimed
from paramd.security.tls import SCHEME, is_loopback
from paramd.state_files import host_id, same_network
from paramd.v1 import common_pb2


class RankUnreachableError(UnreachableError):
    """The sidecar of one rank does not answer."""

    def __init__(self, rank: int, text: str, *, stopped: bool = False) -> None:
        super().__init__(text)
        self.rank = rank
        """Whose sidecar."""
        self.stopped = stopped
        """It was given time and did not answer; trying again at once would take as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One rank's sidecar in one incarnation of a job, and where it is said to be."""

    job: str
    epoch: int
    rank: int
    address: str
    layout_digest: str = ""
    """Empty when the caller does not rely on a layout."""

    @property
    def who(self) -> str:
        """Names it in errors."""
        return f"rank {self.rank} ({self.address})"

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call to it takes along, beside a ticket of its job and epoch."""
        return ((errors.RANK_KEY, str(self.rank)), *errors.metadata())

    def check(self, header: common_pb2.Header | None) -> None:
        """Raises unless an answer with this header is its own.

        Raises:
            RankUnreachableError: another rank or job answers at its address.
            ConflictError: it is in another epoch, or has another layout.
        """
        if header is None or (header.job, header.rank) != (self.job, self.rank):
            answerer = f"rank {header.rank} of job {header.job!r}" if header else "a stranger"
            raise RankUnreachableError(
                self.rank,
                f"{self.who} of job {self.job!r} is not there: {answerer} answers at that address",
            )
        known = self.layout_digest and header.layout_digest
        if header.epoch != self.epoch or (known and header.layout_digest != self.layout_digest):
            raise ConflictError(
                f"{self.who} is in epoch {header.epoch} with layout "
                f"{header.layout_digest[:12]!r}; asked was epoch {self.epoch}, "
                f"{self.layout_digest[:12]!r}; try again in a moment"
            )


def no_way(rank: int, address: str, host: str, here: str) -> str:
    """Why `address` leads nowhere from here: it is loopback of another host. Empty when it is not.

    Args:
        host: `host_id` of the process that listens there; empty when nobody knows.
        here: our own.
    """
    name = address.removeprefix(SCHEME).rpartition(":")[0]
    if not host or not is_loopback(name) or same_network(host, here):
        return ""
    return (
        f"rank {rank} listens on {address}, which is loopback on its own host and cannot be "
        "reached from this one; start it with PARAMD_SIDECAR_LISTEN=<its address>:0 and TLS "
        "(PARAMD_TLS_CERT, PARAMD_TLS_KEY), or ask on its host"
    )


def check_way(rank: int, address: str, host: str) -> None:
    """Raises RankUnreachableError with what `no_way` says of an address, if anything.

    Whoever listens there on this host is somebody else.
    """
    if reason := no_way(rank, address, host, host_id()):
        raise RankUnreachableError(rank, reason)


def check_handover(answer: Message, ticket: str, rank: int) -> None:
    """Raises unless a sidecar's answer on its Unix socket is that of `rank`.

    Raises:
        RankUnreachableError: somebody else's socket stands at that path.
    """
    try:
        job, epoch = claimed(ticket)
    except DeniedError:
        job, epoch = "", 0
    if (answer.get("job"), answer.get("epoch"), answer.get("rank")) != (job, epoch, rank):
        raise RankUnreachableError(
            rank,
            f"rank {rank} of job {job!r}, epoch {epoch}, is not at its Unix socket: rank "
            f"{answer.get('rank')} of job {answer.get('job')!r}, epoch {answer.get('epoch')}, "
            "answers there",
        )
