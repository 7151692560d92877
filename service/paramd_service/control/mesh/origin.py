"""Which listen address of a sidecar to believe: the control plane dials it for others, so it
accepts only the address that the Join stream comes from, and those that the operator allows."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from paramd.errors import UsageError
from paramd.security.tls import check_address, host_of

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Networks: TypeAlias = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]


class Origin(NamedTuple):
    """Where a sidecar is."""

    host: str
    """IP address to dial; empty when there is none."""
    barred: str = ""
    """Why there is no address."""


def parse_networks(text: str) -> Networks:
    """Networks such as "10.0.0.0/8", separated by commas. Raises UsageError."""
    try:
        return [ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UsageError(
            f"sidecar_networks (PARAMD_SIDECAR_NETWORKS): {error}; expected networks such as "
            "10.0.0.0/8, separated by commas"
        ) from None


async def origin_of(rank: int, address: str, peer: str, networks: Networks = ()) -> Origin:
    """Where the sidecar is that joins from `peer`, as gRPC calls it ("ipv4:10.0.0.7:41234"), and
    reports that it listens on `address`. The operator allows `networks` besides the host of
    `peer`.

    Raises:
        UsageError: `address` is malformed.
    """
    host, came = host_of(check_address(address)), _ip_of_peer(peer)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return Origin("", f"rank {rank} says that it listens on {address}: {error}")
    for entry in found:
        ip = _ip(str(entry[4][0]))
        if ip is not None and _permitted(ip, came, networks):
            return Origin(str(ip))
    return Origin(
        "",
        f"rank {rank} says that it listens on {address}, but it joins from "
        f"{came if came is not None else peer}; if that is right, start the control plane with "
        "PARAMD_SIDECAR_NETWORKS=<networks of its sidecars>, never link-local ones",
    )


def _permitted(ip: Ip, came: Ip | None, networks: Networks) -> bool:
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return False
    if ip == came or (came is not None and _is_here(ip) and _is_here(came)):
        return True
    return not ip.is_loopback and any(ip in network for network in networks)


def _is_here(ip: Ip) -> bool:
    """Whether this host has the address: only its own can be bound."""
    with socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return False
    return True


def _ip_of_peer(peer: str) -> Ip | None:
    try:
        return _ip(urlsplit(f"//{unquote(peer).partition(':')[2]}").hostname or "")
    except ValueError:
        return None


def _ip(text: str) -> Ip | None:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped if mapped is not None else ip
