"""The addresses of a control plane: sockets, ports, and the endpoint file that names them."""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramd import bounds, places
from paramd.accepting import Listener
from paramd.answers import read_file
from paramd.errors import ConflictError, NotFoundError, UnreachableError, UsageError
from paramd.places import Endpoint
from paramd.security.loopback import listener_beside
from paramd.state_files import kernel_of, replace
from paramd_service.control.base.config import Bootstrap, ControlConfig
from paramd_service.tls import advertised, check_exposure, grpc_address, tls_files

if TYPE_CHECKING:
    import grpc
    import grpc.aio

PORTS_TRIED = 100
DEFAULT_PORT = 8470
DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"

HANDOVER = signal.SIGURG
"""Asks a control plane to leave its ports to the job's next run. Older versions ignore it, as every
process does by default."""
HANDOVER_S = 3.0
"""Seconds for which the next run waits, and a request is valid."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """Addresses of a running control plane."""

    url: str
    grpc_address: str
    listen: str
    """Where REST listens, for a restarted control plane to reuse."""
    grpc_listen: str
    exports: tuple[Mapping[str, Any], ...] = ()
    """The last whole exports of the one job that it is for, newest first."""


class Claim:
    """The ports of a control plane, and the addresses that others get.

    Taken before the rest is loaded, which costs more than a second of CPU: meanwhile REST's
    connections wait in the backlog, and sidecars try again until gRPC answers them.
    """

    def __init__(self, config: ControlConfig, bootstrap: Bootstrap | None) -> None:
        """Take the wanted ports.

        One that was named is taken or refused: clients know it, and would ask whoever has it
        instead of us. Any other one gives way to the next free port. `close` it.

        Raises:
            UsageError: If an address cannot be used.
            ConflictError: If a named port is in use.
            UnreachableError: If no port is free.
        """
        self.files = tls_files(config.tls_cert, config.tls_key, config.tls_client_ca)
        self.of_job = self.files is None and bootstrap is not None and bootstrap.own_tls
        """Whether it serves TLS with the job's CA."""
        self._tls = self.of_job or self.files is not None
        self._advertise = config.advertise
        self.endpoint: Endpoint | None = None
        """The announced endpoint."""
        # A site's address is known to its clients, named or not.
        is_named = bool(config.listen) or bootstrap is None
        text = config.listen or config.listen_near or DEFAULT_LISTEN
        option = "--listen-near" if config.listen_near else "--listen (PARAMD_LISTEN)"
        wanted = parse_listen(text, option=option, tls=self._tls)
        if not is_named:
            wanted = Address(wanted.host, _same_port(wanted.port, bootstrap))
        self.listener, self.http = open_listener(wanted, exact=is_named)
        try:
            next_to_it = Address(self.http.host, self.http.port + 1)
            grpc_text = config.grpc_listen or config.grpc_listen_near
            if grpc_text:
                next_to_it = parse_listen(grpc_text, option="--grpc-listen", tls=self._tls)
            self._kept, self.grpc = open_listener(next_to_it, exact=bool(config.grpc_listen))
        except BaseException:
            self.listener.close()
            raise
        self.beside = None if self._tls else listener_beside(self.http.host, self.http.port)
        """Where this user's clients on this host call REST, in a folder that others cannot enter;
        None with TLS, whose certificate identifies the server."""

    def whereabouts(self, exports: tuple[Mapping[str, Any], ...] = ()) -> Whereabouts:
        """All addresses."""
        host = advertised(self.http.host, self._advertise, tls=self._tls)
        return Whereabouts(
            url=f"{'https' if self._tls else 'http'}://{Address(host, self.http.port)}",
            grpc_address=grpc_address(host, self.grpc.port, tls=self._tls, of_job=self.of_job),
            listen=str(self.http),
            grpc_listen=str(self.grpc),
            exports=exports,
        )

    def announce(self, bootstrap: Bootstrap) -> None:
        """Announce the addresses to the job's programs. Idempotent. Raises as `announce`."""
        if self.endpoint is None:
            self._announce(bootstrap)

    def announce_next(self, bootstrap: Bootstrap) -> None:
        """Announce the next incarnation at the same addresses. Raises as `announce`; the last
        one's announcement then stays, by which this process knows when to end."""
        if self.endpoint is not None and self.endpoint.incarnation < bootstrap.incarnation:
            self._announce(bootstrap)

    def _announce(self, bootstrap: Bootstrap) -> None:
        where = self.whereabouts()
        self.endpoint = announce(
            bootstrap,
            where.url,
            where.grpc_address,
            with_ca=self.of_job,
            socket=self.beside.getsockname() if self.beside is not None else "",
        )
        if not bootstrap.ended:
            with suppress(OSError):
                replace(_port_file(bootstrap), f"{self.http.port}\n")

    @property
    def listeners(self) -> list[Listener]:
        """All listeners of REST."""
        return [self.listener, *([self.beside] if self.beside is not None else [])]

    def give_grpc(self) -> Address:
        """Release gRPC's port, for gRPC to bind it right away."""
        self._kept.close()
        return self.grpc

    def withdraw(self) -> None:
        """Remove the announcement, unless it was replaced. Idempotent."""
        if self.endpoint is not None:
            places.remove_endpoint(self.endpoint)

    def close(self) -> None:
        """Withdraw it, and close the sockets. Idempotent."""
        self.withdraw()
        self.listener.close()
        self._kept.close()
        if self.beside is not None:
            self.beside.close()


def parse_listen(text: str, *, option: str, tls: bool = False) -> Address:
    """Parse "host:port".

    Raises:
        UsageError: Malformed, or open to other hosts without TLS.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"{option}: {text!r}; expected host:port, for example 127.0.0.1:8470")
    if host == "localhost":
        return Address("127.0.0.1", int(port))
    check_exposure(host, option=option, tls=tls)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(f"{option}: {host!r}; expected an IP address of this host") from None
    return Address(host, int(port))


def open_listener(wanted: Address, *, exact: bool = False) -> tuple[Listener, Address]:
    """A listening socket on the wanted port or, unless `exact`, the next free one. Raises as
    `bind_grpc`; ConflictError: the exact port is in use."""
    ports = [wanted.port] if exact else _candidates(wanted.port)
    for port in ports:
        listener = _try_listen(Address(wanted.host, port))
        if listener is not None:
            return listener, Address(wanted.host, listener.getsockname()[1])
    if exact:
        raise ConflictError(
            f"{wanted} is in use by another process, and a port that was named is never replaced; "
            "end that process (ss -tlnp shows it), or name another port (--listen, PARAMD_LISTEN)"
        )
    raise UnreachableError(_none_free(wanted))


def bind_grpc(
    server: grpc.aio.Server,
    wanted: Address,
    credentials: Callable[[], grpc.ServerCredentials] | None = None,
) -> Address:
    """Bind a gRPC server to the wanted port or the next free one.

    The server must have been created with `grpc.so_reuseport` 0, or a taken port looks free.
    `credentials` returns new ones for each port (see `ServerTls.grpc_credentials`).

    Raises:
        UnreachableError: None of the ports tried is free.
    """
    for port in _candidates(wanted.port):
        try:
            text = str(Address(wanted.host, port))
            if credentials is None:
                return Address(wanted.host, server.add_insecure_port(text))
            return Address(wanted.host, server.add_secure_port(text, credentials()))
        except RuntimeError:
            continue
    raise UnreachableError(_none_free(wanted))


def announce(
    bootstrap: Bootstrap, url: str, grpc_address: str, *, with_ca: bool = False, socket: str = ""
) -> Endpoint:
    """Write the job's endpoint file, replacing an older incarnation's; `with_ca` if the job's CA
    signed the certificate of `url`, for clients to trust; `socket`: path of REST's Unix socket.

    Raises:
        ConflictError: A newer incarnation of the job is already running.
        UsageError: The state dir cannot be used.
    """
    endpoint = Endpoint(
        url=url,
        token=bootstrap.token,
        pid=os.getpid(),
        job=bootstrap.job,
        grpc_address=grpc_address,
        incarnation=bootstrap.incarnation,
        pid_start=places.process_start(os.getpid()),
        host_id=places.host_id(),
        ca=bootstrap.certificates.authority.pem.decode() if with_ca else "",
        ca_pin=bootstrap.certificates.authority.pin if with_ca else "",
        socket=socket,
    )
    places.write_endpoint(endpoint, past=bootstrap.ended)
    return endpoint


def _port_file(bootstrap: Bootstrap) -> Path:
    return places.job_dir(bootstrap.job) / places.PORT_FILE


def _same_port(wanted: int, mine: Bootstrap | None) -> int:
    """The port that the job had, so that its address stays, instead of the default one."""
    if mine is None or not (mine.ended or wanted == DEFAULT_PORT):
        return wanted
    with suppress(OSError, ValueError):
        port = int(read_file(_port_file(mine), bounds.SMALL_FILE))
        return port if 0 < port < 65_536 else wanted
    return wanted


def end_past(job: str, *, timeout_s: float = 5.0) -> None:
    """End the process of this host that shows the job's records, so that its port is free."""
    past = places.past_endpoint(job)
    if past is not None:
        _signal(past, signal.SIGTERM, timeout_s)


def ask_for_ports(bootstrap: Bootstrap) -> None:
    """Ask the control plane of the job's last run, if it lives on this host, to leave its ports to
    this run; return when it has left, or after `HANDOVER_S`. It leaves if no trainer of its run may
    be alive; see `ControlPlane.hand_over`."""
    with suppress(NotFoundError, UnreachableError):
        found = places.read_endpoint(bootstrap.job)
        here = kernel_of(found.host_id) == kernel_of(places.host_id())
        if here and not found.via and found.incarnation < bootstrap.incarnation:
            _signal(found, HANDOVER, HANDOVER_S)


def _signal(whom: Endpoint, number: signal.Signals, timeout_s: float) -> None:
    """Send a signal to a process of this host; wait until it has ended, or the time is over."""
    with suppress(OSError):
        process = os.pidfd_open(whom.pid)
        try:
            # Checked after opening: from here on the descriptor names that very process.
            if places.process_start(whom.pid) == whom.pid_start:
                signal.pidfd_send_signal(process, number)
                poll = select.poll()
                poll.register(process, select.POLLIN)
                poll.poll(timeout_s * 1000)
        finally:
            os.close(process)


def successor(mine: Endpoint) -> Endpoint | None:
    """The live control plane of this host that has taken over the job's endpoint file, if any."""
    try:
        found = places.read_endpoint(mine.job)
    except (NotFoundError, UnreachableError):
        return None
    # Not one of another host, or of `paramd connect`: neither ends a control plane here.
    here = not found.host_id or kernel_of(found.host_id) == kernel_of(mine.host_id)
    later = found.pid != mine.pid and found.incarnation >= mine.incarnation
    return found if here and later and not found.via else None


def _candidates(port: int) -> range:
    return range(port, min(port + PORTS_TRIED, 65_536)) if port else range(1)


def _none_free(wanted: Address) -> str:
    return (
        f"none of the ports {wanted.port} to {wanted.port + PORTS_TRIED - 1} of {wanted.host} "
        "is free; set PARAMD_LISTEN to another one"
    )


def _try_listen(address: Address) -> Listener | None:
    listener = Listener(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((address.host, address.port))
        # With SO_REUSEADDR two sockets may bind a port; only `listen` decides who gets it.
        listener.keep_backlog()
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise UsageError(f"cannot listen on {address}: {error}") from error
    return listener
