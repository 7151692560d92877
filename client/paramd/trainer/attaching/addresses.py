"""The address at which each rank's helpers are reached when the ranks are on several hosts.

Every rank inspects its host and shares the result. Each then picks its own address, the one by
which the process group reaches its host, in this order:

    PARAMD_ADDRESS               a name or an address of this host
    PARAMD_SIDECAR_LISTEN        if it names another address than loopback
    GLOO_SOCKET_IFNAME           the address of that interface (then NCCL_SOCKET_IFNAME)
    the route to MASTER_ADDR     this host's address on the route to rank 0's
    MASTER_ADDR as others see it on rank 0's host, where the name may mean loopback
    the host's name              if it resolves to an address that is not loopback

Loopback is never a fallback: there, ranks would reach other jobs' processes.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paramd import places
from paramd.errors import UsageError
from paramd.security.tls import is_loopback
from paramd.state_files import same_network
from paramd.trainer.settings import AttachSettings

_SIOCGIFADDR = 0x8915
_DISCARD_PORT = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class HostView:
    """A rank's view of its host. Absent values are empty."""

    host_id: str
    hostname: str
    own_files: bool = False
    """PARAMD_TLS_CERT is set."""
    wanted: str = ""
    """PARAMD_ADDRESS, or the host of PARAMD_SIDECAR_LISTEN beyond loopback."""
    interface: str = ""
    """Address of the interface that the process group uses."""
    from_here: str = ""
    """The address from which this host speaks to MASTER_ADDR."""
    master: str = ""
    """The address of MASTER_ADDR, as this host resolves it."""


@dataclass(frozen=True, slots=True)
class HostAddress:
    """The address at which a rank's helpers are reached."""

    name: str
    """An address, or a name that other hosts resolve."""
    ip: str
    """The address of this host to listen on."""
    reason: str
    """Which rule chose it."""


def look(settings: AttachSettings, environment: Mapping[str, str] = os.environ) -> HostView:
    """This rank's view of its host. Asks the resolver; sends nothing else."""
    master = _master(environment)
    resolved = _resolve(master) if master else ""
    listen_host = settings.sidecar_listen.rpartition(":")[0].strip("[]")
    wanted = settings.address or ("" if is_loopback(listen_host) else listen_host)
    return HostView(
        host_id=places.host_id(),
        hostname=socket.gethostname(),
        own_files=bool(environment.get("PARAMD_TLS_CERT")),
        wanted=wanted,
        interface=_interface_address(environment),
        from_here=_source_towards(resolved) if resolved else "",
        master=resolved,
    )


def needs_own_tls(views: Sequence[HostView]) -> bool:
    """Whether several hosts need paramd's TLS; UsageError if only some ranks have TLS files."""
    if all(same_network(view.host_id, views[0].host_id) for view in views):
        return False
    without = [rank for rank, view in enumerate(views) if not view.own_files]
    if without and len(without) < len(views):
        have = next(rank for rank, view in enumerate(views) if view.own_files)
        raise UsageError(
            f"PARAMD_TLS_CERT is set on host {views[have].hostname} (rank {have}), but not on "
            f"{views[without[0]].hostname} (rank {without[0]}); set it on all hosts, or on none, "
            "and the job makes certificates of its own"
        )
    return bool(without)


def choose(rank: int, views: Sequence[HostView]) -> HostAddress:
    """This host's address for others, by the rules above; UsageError says how to name one."""
    mine = views[rank]
    here = f"rank {rank} on host {mine.hostname}"
    if mine.wanted:
        ip = _resolve(mine.wanted)
        if not _usable(ip):
            raise UsageError(
                f"{here}: PARAMD_ADDRESS or PARAMD_SIDECAR_LISTEN says {mine.wanted!r}, which is "
                f"{'no address of this host' if ip else 'a name that does not resolve here'}; "
                "give one under which the other hosts reach it"
            )
        return HostAddress(mine.wanted, ip, "PARAMD_ADDRESS")
    found = []
    for ip, reason in _candidates(mine, views):
        if _usable(ip):
            return HostAddress(ip, ip, reason)
        found.append((ip, reason))
    tried = ", ".join(f"{ip or 'nothing'} ({reason})" for ip, reason in found)
    raise UsageError(
        f"{here}: no address of this host is known under which the other hosts reach it (found "
        f"{tried}); set PARAMD_ADDRESS to one, on this host alone"
    )


def _candidates(mine: HostView, views: Sequence[HostView]) -> Iterator[tuple[str, str]]:
    yield mine.interface, "GLOO_SOCKET_IFNAME"
    yield mine.from_here, "the route to MASTER_ADDR"
    for ip in dict.fromkeys([v.master for v in views if not same_network(v.host_id, mine.host_id)]):
        yield ip, "MASTER_ADDR as other hosts see it"
    # Last: a broken resolver takes seconds to fail.
    yield _resolve(mine.hostname), "the host's name"


def summary(addresses: Sequence[HostAddress], views: Sequence[HostView]) -> str:
    """Hosts and their addresses as text; at most eight of them."""
    hosts: dict[str, tuple[str, HostAddress, int]] = {}
    for address, view in zip(addresses, views, strict=True):
        name, first, count = hosts.get(view.host_id, (view.hostname, address, 0))
        hosts[view.host_id] = (name, first, count + 1)
    told = [
        f"{name} {address.name} (from {address.reason}; {count} rank{'s' * (count > 1)})"
        for name, address, count in hosts.values()
    ]
    more = f", and {len(told) - 8} more" if len(told) > 8 else ""
    return ", ".join(told[:8]) + more


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    addresses: Sequence[HostAddress]
    views: Sequence[HostView]


Together = Callable[[Callable[[], dict[str, Any]]], list[dict[str, Any]]]
"""Runs a stage on every rank and returns all answers by rank; raises on all if one fails."""


def meet(together: Together, rank: int, settings: AttachSettings) -> Meeting | None:
    """All ranks' addresses, or None without own TLS. Collective. As `needs_own_tls`, `choose`."""
    views = [HostView(**told) for told in together(lambda: asdict(look(settings)))]
    if not needs_own_tls(views):
        return None
    chosen = together(lambda: asdict(choose(rank, views)))
    return Meeting(addresses=[HostAddress(**told) for told in chosen], views=views)


def _usable(ip: str) -> bool:
    """Whether other hosts can reach this host at `ip`."""
    try:
        found = ipaddress.ip_address(ip)
    except ValueError:
        return False
    if found.is_loopback or found.is_unspecified or found.is_link_local or found.is_multicast:
        return False
    family = socket.AF_INET6 if found.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def _master(environment: Mapping[str, str]) -> str:
    """The host of the process group's store: MASTER_ADDR, else the store's own."""
    named = environment.get("MASTER_ADDR", "")
    if named or not (dist.is_available() and dist.is_initialized()):
        return named
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        while not hasattr(store, "host") and hasattr(store, "underlying_store"):
            store = store.underlying_store
        return str(store.host)
    except (AttributeError, RuntimeError, ValueError):
        # Another torch, or a store in a file.
        return ""


def _resolve(name: str) -> str:
    """The first address of a name or address; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return str(found[0][4][0]) if found else ""


def _source_towards(ip: str) -> str:
    """This host's source address on the route to `ip`. Sends nothing."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, _DISCARD_PORT))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _interface_address(environment: Mapping[str, str]) -> str:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL's lists may exclude (^) or ask for exact names (=).
        for name in environment.get(variable, "").removeprefix("=").split(","):
            if name and (found := _ipv4_of(name) or _ipv6_of(name)):
                return found
    return ""


def _ipv4_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(
                probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15])
            )
        except (OSError, ValueError):
            return ""
    return socket.inet_ntoa(packed[20:24])


def _ipv6_of(interface: str) -> str:
    """The interface's first address that is not link-local."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        packed, *_, name = line.split()
        found = ipaddress.IPv6Address(bytes.fromhex(packed))
        if name == interface and not found.is_link_local:
            return str(found)
    return ""
