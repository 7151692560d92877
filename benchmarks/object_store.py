"""moto's S3 server in a process of its own, and a plain put beside our exports.

The server is Python and slow: it says what we add to a plain put of the same bytes, and
nothing about a real store.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BUCKET = "bench"
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}

_SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
import threading
threading.Event().wait()
"""


@dataclass(frozen=True, slots=True)
class Store:
    """The server."""

    options: dict[str, Any]

    def put(self, name: str, data: bytearray) -> float:
        """obstore's own put, as it comes. Seconds."""
        import obstore

        store = self._client()
        begin_s = time.perf_counter()
        obstore.put(store, name, memoryview(data))
        return time.perf_counter() - begin_s

    def clear(self) -> None:
        """Removes all objects."""
        import obstore

        store = self._client()
        for batch in obstore.list(store).collect():
            obstore.delete(store, batch["path"])

    def _client(self) -> Any:
        from obstore.store import S3Store

        config: Any = {k: v for k, v in self.options.items() if k != "allow_http"}
        return S3Store(BUCKET, config=config, client_options={"allow_http": True})


@contextmanager
def object_store() -> Iterator[Store]:
    """A server with an empty bucket; this process's environment has keys to it from now on."""
    import boto3

    os.environ.update(KEYS)
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
            options = {"endpoint": endpoint, "region": "us-east-1", "allow_http": True}
            client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
            client.create_bucket(Bucket=BUCKET)
            client.close()
            yield Store(options)
        finally:
            server.kill()
