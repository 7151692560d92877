"""What a part of a mesh is, and all that it may reach."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from paramd.mesh.loop import Timeout, deadline
from paramd.mesh.peers.control import RestClient
from paramd.mesh.peers.discovery import JobRest, SidecarFinder
from paramd.mesh.reading.transfer import Transfer


@dataclass(frozen=True, slots=True)
class MeshHost:
    """One job, as its parts reach it. Shared by all parts of a mesh, which owns and closes it."""

    rest: RestClient
    """The control plane."""
    job_rest: JobRest
    """The same, below the job's own path."""
    reach: SidecarFinder
    """The job's layout and sidecars."""
    transfer: Transfer
    """Threads and memory that bytes are read with."""
    timeout_s: float
    """Of calls that give none; infinity: no limit."""

    memory: ExitStack = field(default_factory=ExitStack)
    """What is given back last of all: threads of `transfer` may use it until they have ended."""

    def deadline(self, timeout: Timeout) -> float:
        """On the monotonic clock, in seconds.

        Raises:
            UsageError: For a bad timeout.
        """
        return deadline(timeout, self.timeout_s)


class MeshPart:
    """The methods of one subject of a mesh; `AsyncMesh` inherits from all of them.

    Made without I/O, on any thread. Methods run on one event loop, many at a time, until `_closed`,
    which may run before the mesh has begun, and twice. A part keeps its own state in private
    attributes, and reaches the job through `_host` alone. Both methods call `super()`'s.
    """

    def __init__(self, host: MeshHost) -> None:
        self._host = host

    async def _closed(self) -> None:
        """Release what this part holds: connections and memory go after all parts."""
