"""The contender of the sidecar process: the same sidecar in a thread of the trainer."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from paramd import places
from paramd.memory import handover
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.main import keep_memory
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.control_link import Joining
from paramd_service.sidecar.rpc.grpc_server import GrpcServer
from paramd_service.sidecar.rpc.unix_server import UnixServer
from paramd_service.sidecar.snapshots.store import BlockMaker


class InsideSidecar:
    """All of a sidecar (servers, copying thread, joining) but its process.

    `attach` finds it by its socket, as it finds a sidecar that was started beforehand.
    """

    def __init__(self, job: str, rank: int) -> None:
        places.job_dir(job)
        self._config = SidecarConfig(job=job, rank=rank, socket_path=places.socket_path(job, rank))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inside-sidecar", daemon=True)
        keep_memory()
        self._thread.start()
        if not self._ready.wait(20.0):
            raise RuntimeError("the sidecar inside the trainer did not start")

    def close(self) -> None:
        """Waits for its end, which `detach` has asked for."""
        self._thread.join(10.0)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        config = self._config
        with ThreadPoolExecutor(1) as memory, ThreadPoolExecutor(1) as stats:
            rank = RankSidecar(
                config,
                blocks=BlockMaker(memory),
                executor=memory,
                stats_executor=stats,
                faults=Faults(""),
                log=Log(fields={"inside": True}),
            )
            listener = handover.listen(config.socket_path)
            server = GrpcServer(rank)
            unix = UnixServer(rank, listener, lambda: server.address)
            await server.start()
            unix.start()
            joining = Joining(rank, address=server.address)
            joining.start()
            rank.wait_for_trainer()
            self._ready.set()
            await rank.leaving.wait()
            await server.say_not_serving()
            unix.stop_listening()
            await joining.stop()
            await server.stop(1.0)
            await unix.close()
            await rank.close()
