"""Settings of the control plane, and the job that its parent passes on stdin."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, get_type_hints

from paramd import gone
from paramd.errors import UsageError
from paramd.places import check_job_name
from paramd.security.tickets import Role, Signer, key_from_hex, key_root
from paramd.state_files import file_places, read_toml
from paramd_service.control.base.certificates import JobCertificates

if TYPE_CHECKING:
    from paramd.mesh.peers.grpc import Asked

MAX_BOOTSTRAP_BYTES = 16 << 20
MAX_WORLD_SIZE = 1 << 16
MIN_TOKEN_CHARS = 16

Loaded = TypeVar("Loaded")

log = logging.getLogger("paramd.control")


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """Settings of one control plane. Every field is a command-line option."""

    job: str = ""
    """Name of the one job, whose secrets come on stdin; empty: a site, where jobs register."""
    listen: str = ""
    """host:port of REST, and no other; port 0: any; empty: PARAMD_LISTEN, else 127.0.0.1:8470."""
    listen_near: str = ""
    """With --job and no --listen: host:port of REST, or the next free one if that is taken."""
    grpc_listen: str = ""
    """host:port of gRPC, and no other; empty: the next free port above REST's."""
    grpc_listen_near: str = ""
    """host:port of gRPC, or the next free one if that is taken."""
    advertise: str = ""
    """Host that others reach it at; empty: PARAMD_ADVERTISE, else the one it listens on."""
    tls_cert: str = ""
    """File with the server's certificate chain; empty: PARAMD_TLS_CERT."""
    tls_key: str = ""
    """File with its private key; empty: PARAMD_TLS_KEY."""
    tls_client_ca: str = ""
    """Clients must present a certificate from this CA; empty: PARAMD_TLS_CLIENT_CA."""
    empty_end_s: float = 60.0
    """With --job, exit after this long without a joined sidecar, in seconds, above 0; ten times as
    long before the first has joined."""
    report_s: float = 2.0
    """Time between two reports of a sidecar, in seconds, 0.05 to 60; 2.5 times as long in meshes
    of more than 1,024 ranks, like the next one."""
    silent_after_s: float = 4.5
    """A sidecar that has not reported for so many seconds, above report_s, is shown as silent."""
    ticket_ttl_s: float = 600.0
    """Validity of a reader's ticket, in seconds, 1 to 86400."""
    no_watch: bool = False
    """Never sample or compare parameters for alerts; sidecars' own reports are still checked."""
    readonly: bool = False
    """Refuse to change parameters, pause training, export or create tokens, whatever the role;
    jobs still register. Same as PARAMD_READONLY=1."""
    store: str = field(default="", repr=False)
    """URL of the store, sqlite:////path or postgresql://user@host/database (a password only in
    PARAMD_STORE_URL); empty: control.sqlite in the directory of the job or the site."""
    token_file: str = field(default="", repr=False)
    """File with a site's own token, role admin, such as a mounted secret; empty: a generated
    token in _site/token of the state dir."""
    sidecar_networks: str = ""
    """Networks such as 10.0.0.0/8, separated by commas: where sidecars may be that join from
    elsewhere, as behind a proxy; empty: PARAMD_SIDECAR_NETWORKS, else none."""
    drain_s: float = 5.0
    """Time for calls in progress to finish at shutdown, in seconds, 0 or more."""

    def __post_init__(self) -> None:
        if self.job:
            check_job_name(self.job)
        if not self.empty_end_s > 0:
            raise UsageError(f"empty_end_s: {self.empty_end_s}; expected above 0")
        if not 0.05 <= self.report_s <= 60:
            raise UsageError(f"report_s: {self.report_s}; expected 0.05 to 60")
        if not self.silent_after_s > self.report_s:
            raise UsageError(
                f"silent_after_s: {self.silent_after_s}; expected above report_s ({self.report_s})"
            )
        if not 1 <= self.ticket_ttl_s <= 86_400:
            raise UsageError(f"ticket_ttl_s: {self.ticket_ttl_s}; expected 1 to 86400")
        if self.listen and self.listen_near:
            raise UsageError("listen_near: give it or --listen, not both")
        if self.job and self.token_file:
            raise UsageError("token_file: only for a site; with --job the token comes on stdin")
        if not 0 <= self.drain_s <= 600:
            raise UsageError(f"drain_s: {self.drain_s}; expected 0 to 600")

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> ControlConfig:
        """Parse the command line; `--listen` defaults to PARAMD_LISTEN unless there is
        `--listen-near`, `--store` to PARAMD_STORE_URL.

        Raises:
            UsageError: If a value is out of range.
        """
        parser = argparse.ArgumentParser(
            prog="python -m paramd_service.control",
            description="Run the control plane of a site, where jobs register; with --job, the "
            "embedded one of that job, whose secrets are read from stdin.",
            allow_abbrev=False,
        )
        kinds = get_type_hints(cls)
        for option in fields(cls):
            default = option.default
            if option.name == "store":
                default = os.environ.get("PARAMD_STORE_URL") or default
            if option.name == "sidecar_networks":
                default = os.environ.get("PARAMD_SIDECAR_NETWORKS") or default
            name = f"--{option.name.replace('_', '-')}"
            if kinds[option.name] is bool:
                wanted = option.name == "readonly" and os.environ.get("PARAMD_READONLY") == "1"
                parser.add_argument(name, action="store_true", default=wanted)
                continue
            read = float if kinds[option.name] is float else str
            parser.add_argument(name, type=read, default=default)
        gone.check_options(arguments)
        given = parser.parse_args(arguments)
        if not given.listen and not given.listen_near:
            given.listen = os.environ.get("PARAMD_LISTEN") or ""
        if given.store != os.environ.get("PARAMD_STORE_URL"):
            _check_no_password(given.store)
        return cls(**vars(given))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:
    """One incarnation of a job and its secrets, as passed by the parent on stdin."""

    job: str
    """Name of the job."""
    incarnation: int
    """Number of the incarnation, 1 or more."""
    world_size: int
    """Number of ranks, 1 or more."""
    private_key: bytes = field(repr=False)
    """Signs the job's tickets; on the wire in hexadecimal digits."""
    token: str = field(repr=False)
    """Bearer token of the REST side, with the role admin."""
    own_tls: bool = False
    """Serve over TLS with the job's own CA; for jobs on several hosts."""
    resumes: bool = False
    """The training continues from memory: announce the addresses as soon as they are claimed."""
    ended: bool = False
    """The incarnation is over: show its records, and change nothing."""
    parent: int = 0
    """With `ended`, the process that it ends with."""
    certified: int = 0
    """The incarnation whose CA the job has; 0: this one. A training that attaches its parameters
    anew begins its next incarnation with the keys and the CA of the last."""
    certificates: JobCertificates = field(init=False, repr=False, compare=False)
    """Issued by the job's own CA."""

    def __post_init__(self) -> None:
        of = self.certified or self.incarnation
        made = JobCertificates(self.private_key, job=self.job, incarnation=of)
        object.__setattr__(self, "certificates", made)

    def succeeded(self, incarnation: int) -> Bootstrap:
        """That of a later incarnation of the same training, with the same secrets."""
        certified = self.certified or self.incarnation
        return replace(self, incarnation=incarnation, certified=certified, resumes=False)

    @property
    def signer(self) -> Signer:
        """Signer of this incarnation's tickets."""
        return Signer(self.private_key)

    def ticket_seed(self, token_id: str | None, use: str = "") -> str:
        """Of the keys of a token's tickets for that use; the same at each control plane of the
        incarnation. A rank that is handed one knows the keys of no other use."""
        label = f"paramd ticket keys\0{self.job}\0{self.incarnation}\0{token_id}\0{use}"
        return hmac.digest(self.private_key, label.encode(), hashlib.sha256).hex()

    def keyed_ticket(
        self, role: Role, *, ttl_s: float, now_s: float, token_id: str | None = None, use: str = ""
    ) -> tuple[str, str]:
        """A ticket of a role that has keys, and the seed of them. Takes 0.1 s for 65,536 ranks, the
        first time for each token and use."""
        seed = self.ticket_seed(token_id, use)
        ticket = self.signer.mint(
            job=self.job,
            incarnation=self.incarnation,
            role=role,
            ttl_s=ttl_s,
            token_id=token_id,
            keys=key_root(seed, self.world_size),
            now_s=now_s,
        )
        return ticket, seed

    def asked(self, rank: int, address: str) -> Asked:
        """One rank's sidecar as the target of a call."""
        from paramd.mesh.peers.grpc import Asked

        return Asked(job=self.job, incarnation=self.incarnation, rank=rank, address=address)


def read_bootstrap(stdin: BinaryIO, *, job: str) -> Bootstrap:
    """Read the one JSON line `{"job", "incarnation", "world_size", "private_key", "token"}`;
    `"own_tls"`, `"resumes"` and so on are false unless given.

    Raises:
        UsageError: If it is missing, too long, malformed or about another job; the text never
            quotes it.
    """
    line = stdin.readline(MAX_BOOTSTRAP_BYTES + 1)
    if not line or len(line) > MAX_BOOTSTRAP_BYTES:
        raise UsageError(
            "stdin: expected one JSON line with job, incarnation, world_size, private_key, token"
        )
    try:
        found = json.loads(line)
        bootstrap = Bootstrap(
            job=str(found["job"]),
            incarnation=int(found["incarnation"]),
            world_size=int(found["world_size"]),
            private_key=key_from_hex(found, "private_key"),
            token=str(found["token"]),
            own_tls=found.get("own_tls") is True,
            resumes=found.get("resumes") is True,
            ended=found.get("ended") is True,
            parent=int(found.get("parent", 0)),
            certified=int(found.get("certified", 0)),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"stdin: cannot be read ({type(error).__name__})") from None
    if bootstrap.job != job:
        raise UsageError(f"stdin: the job is {bootstrap.job!r}; expected {job!r} as in --job")
    if bootstrap.incarnation < 1:
        raise UsageError(f"stdin: run {bootstrap.incarnation}; expected 1 or more")
    if not 1 <= bootstrap.world_size <= MAX_WORLD_SIZE:
        raise UsageError(
            f"stdin: world_size {bootstrap.world_size}; expected 1 to {MAX_WORLD_SIZE}"
        )
    if len(bootstrap.token) < MIN_TOKEN_CHARS or not bootstrap.token.isascii():
        raise UsageError(f"stdin: token is not {MIN_TOKEN_CHARS} or more ASCII characters")
    return bootstrap


def _check_no_password(store: str) -> None:
    # Imported only for a store on the command line: SQLAlchemy is slow to load.
    from paramd_service.control.store.engine import holds_password

    if holds_password(store):
        raise UsageError(
            "store: a password on the command line is visible to other users of this machine; "
            "set PARAMD_STORE_URL, or keep it in ~/.pgpass"
        )


def table_of_file(path: Path, name: str) -> Mapping[str, Any]:
    """The table `[name]` of a paramd.toml; empty when the table or the file is missing.

    Raises:
        UsageError: If the file cannot be read, or `name` is not a table.
    """
    table = read_toml(path).get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {name} is not a table; write [{name}]")
    return table


def table_of_text(text: str, name: str) -> Mapping[str, Any]:
    """A table given as JSON in the environment variable `name`; empty for "".

    Raises:
        UsageError: If it is not a JSON object.
    """
    try:
        table = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise UsageError(f"{name}: expected a JSON object")
    return table


def loaded(load: Callable[..., Loaded], *, strict: bool, otherwise: Loaded, told: str) -> Loaded:
    """The result of `load` for the current files and environment. With `strict`, an invalid source
    raises UsageError. A training's embedded control plane is not strict: it logs `told` with the
    error, and continues with `otherwise`."""
    try:
        return load(file_places(), os.environ)
    except UsageError as error:
        if strict:
            raise
        log.error("%s: %s", told, error)
        return otherwise


def settings_of(
    table: Mapping[str, Any], kind: type[Any], *, name: str, place: str
) -> dict[str, Any]:
    """The fields that a table sets of a config of this `kind`, whose defaults determine the types.

    `name` and `place`: the table's, for errors.

    Raises:
        UsageError: Unknown key or wrong type.
    """
    defaults = {one.name: one.default for one in fields(kind)}
    for key in table:
        if key not in defaults:
            gone.check("setting", f"{name}.{key}", f"{place}: {key!r}")
            raise UsageError(f"{place}: unknown key {key!r}; expected one of {', '.join(defaults)}")
    return {key: _value(place, key, value, defaults[key]) for key, value in table.items()}


def _value(place: str, key: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UsageError(f"{place}: {key} is not a list of strings")
    if isinstance(default, bool) or isinstance(value, bool):
        good = isinstance(value, bool) and isinstance(default, bool)
    elif isinstance(default, int):
        good = isinstance(value, int)
    else:
        good = isinstance(value, int | float)
    if not good:
        raise UsageError(f"{place}: {key} is {value!r}; expected {type(default).__name__}")
    return value
