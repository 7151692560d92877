"""Jobs whose trainers have all ended, though their sidecars still serve the last step."""

from __future__ import annotations

from paramd.errors import ParamdError
from paramd.memory import handover
from paramd.memory.descriptors import close_all
from paramd.state_files import job_dir, socket_path

ANSWER_S = 1.0
"""Longest wait for a sidecar's answer, in seconds."""


def has_ended(job: str, world_size: int) -> bool:
    """Whether the sidecars of all ranks are on this host, and say that their trainers have ended.

    False also if that is not known: ranks of other hosts, a sidecar that hangs, or one of an older
    version. /proc does not tell, as sidecars hide from it what is theirs.
    """
    return world_size > 0 and all(_is_left(job, rank) for rank in range(world_size))


def _is_left(job: str, rank: int) -> bool:
    try:
        # The directory is checked first: nobody else's socket may say that a job has ended.
        job_dir(job)
        with handover.connect(socket_path(job, rank), timeout_s=ANSWER_S) as connection:
            handover.check_peer(connection)
            handover.send(connection, {"op": "where"})
            answer, descriptors = handover.receive(connection)
            close_all(descriptors)
    except (ParamdError, OSError, EOFError):
        return False
    return answer.get("ended") is True
