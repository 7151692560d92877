"""TCP links of a job that can be cut, slowed down and reset.

Servers listen on 127.0.0.2 and say that they are at 127.0.0.1 (PARAMD_ADVERTISE); there a link
stands on the same port. So every connection goes through it, whoever dials.
"""

import asyncio
import threading
from contextlib import suppress
from enum import StrEnum

BEHIND, HOST = "127.0.0.2", "127.0.0.1"
CHUNK_BYTES = 64 << 10
SLOW_BYTES_S = 256 << 10
SLOW_DELAY_S = 0.05
POLL_S = 0.02


class Mode(StrEnum):
    """What a link does with bytes."""

    OPEN = "open"
    CUT = "cut"
    """Nothing arrives and nobody is told, as with a pulled cable; later it goes on."""
    SLOW = "slow"
    RESET = "reset"
    """Connections break, and new ones are refused at once."""


class Links:
    """The links of an episode, on a thread of their own."""

    def __init__(self) -> None:
        self._modes: dict[int, Mode] = {}
        self._streams: dict[int, set[asyncio.StreamWriter]] = {}
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links")
        self._thread.start()

    def add(self, port: int) -> None:
        """Opens the link to whoever listens, or will listen, on the port."""
        asyncio.run_coroutine_threadsafe(self._listen(port), self._loop).result(10)

    def set(self, port: int, mode: Mode) -> None:
        """What the port's link does from now on."""
        self._modes[port] = mode
        if mode is Mode.RESET:
            self._loop.call_soon_threadsafe(self._reset, port)

    def close(self) -> None:
        """Ends all links and the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self, port: int) -> None:
        self._modes[port], self._streams[port] = Mode.OPEN, set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # asyncio's callback asks the task for its exception, which a cancelled one raises.
            with suppress(asyncio.CancelledError):
                await self._serve(port, reader, writer)

        self._servers.append(await asyncio.start_server(serve, HOST, port))

    async def _serve(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        streams = self._streams[port]
        streams.add(writer)
        try:
            if self._modes[port] is Mode.RESET:
                return
            there, back = await asyncio.open_connection(BEHIND, port)
            streams.add(back)
            try:
                pumps = [self._pump(port, reader, back), self._pump(port, there, writer)]
                await asyncio.gather(*pumps)
            finally:
                streams.discard(back)
                back.transport.abort()
        except OSError:
            pass  # nobody listens, or the connection broke: the same for the other side
        finally:
            streams.discard(writer)
            writer.transport.abort()

    async def _pump(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            while self._modes[port] is Mode.CUT:
                await asyncio.sleep(POLL_S)
            if self._modes[port] is Mode.SLOW:
                await asyncio.sleep(SLOW_DELAY_S + len(data) / SLOW_BYTES_S)
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    def _reset(self, port: int) -> None:
        for stream in tuple(self._streams[port]):
            stream.transport.abort()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for port in self._modes:
            self._modes[port] = Mode.OPEN
            self._reset(port)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
