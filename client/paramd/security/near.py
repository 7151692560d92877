"""HTTP to a control plane of this user on this host: over its Unix socket, else over its port."""

from __future__ import annotations

import ssl

import httpx2

from paramd.security.loopback import socket_beside


class NearTransport(httpx2.AsyncBaseTransport):
    """httpx's transport for one url. Takes the Unix socket beside its loopback port while our own
    server listens there, because no other user can take that place or crowd it; else the port."""

    def __init__(self, url: str, verify: ssl.SSLContext | bool) -> None:
        """No I/O. `verify`: for https."""
        self._url = url
        self._port = httpx2.AsyncHTTPTransport(verify=verify, trust_env=False)
        self._near: dict[str, httpx2.AsyncHTTPTransport] = {}
        """By path, which depends on the state dir of the environment."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request."""
        if path := socket_beside(self._url):
            if path not in self._near:
                self._near[path] = httpx2.AsyncHTTPTransport(uds=path, trust_env=False)
            try:
                return await self._near[path].handle_async_request(request)
            except httpx2.ConnectError:
                # Left over, or its folder was removed. Nothing of the request was sent.
                pass
        return await self._port.handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        for transport in (*self._near.values(), self._port):
            await transport.aclose()
