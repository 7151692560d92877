"""TLS without sockets: who may listen where, whom a client talks to, which files are taken."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from paramd.cli import settings
from paramd.cli.main import main as paramd_command
from paramd.errors import ConflictError, DeniedError, UsageError
from paramd.security import authority
from paramd.security.tls import ClientTls, check_address, https_context, open_channel
from paramd.trainer.helpers.control_link import token_of
from paramd.trainer.settings import AttachSettings
from paramd_service.control.base import site
from paramd_service.control.base.endpoint import Address, parse_listen
from paramd_service.sidecar.main import parse
from paramd_service.tls import ServerTls, TlsFiles

BEYOND = ["0.0.0.0", "[::]", "10.0.0.7", "192.168.1.5", "[2001:db8::1]"]


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    authority.write(tmp_path, names=["localhost", "127.0.0.1"], days=30)
    return TlsFiles(cert=tmp_path / "server.pem", key=tmp_path / "server.key")


@pytest.mark.parametrize("host", BEYOND)
def test_beyond_loopback_both_servers_want_tls(host: str, files: TlsFiles) -> None:
    listen = f"{host}:8470"
    arguments = ["--job", "j", "--rank", "0", "--socket", "s", "--listen", listen]
    with pytest.raises(UsageError, match="there is no TLS"):
        parse_listen(listen, option="--listen")
    with pytest.raises(UsageError, match="there is no TLS"):
        parse(arguments)
    assert parse_listen(listen, option="--listen", tls=True) == Address(host.strip("[]"), 8470)
    given = ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
    assert parse([*arguments, *given]).tls_files == files


@pytest.mark.parametrize("address", ["10.0.0.7:1", "example.org:1", "0.0.0.0:1", "127.0.0.1.x:1"])
async def test_no_ticket_goes_to_another_host_in_the_clear(address: str) -> None:
    with pytest.raises(DeniedError, match="unencrypted"):
        open_channel(address, ClientTls())


async def test_no_token_goes_to_another_host_in_the_clear() -> None:
    for url in ("http://10.0.0.7:8470", "http://example.org"):
        with pytest.raises(UsageError, match="unencrypted"):
            https_context(url)
    assert https_context("http://127.0.0.1:8470") is True


@pytest.mark.parametrize(
    "address",
    ["unix:a.sock", "dns:///127.0.0.1:1", "127.0.0.1", "127.0.0.1:", ":1", "a b:1", "a:1\n",
     "grpcs://dns:///a:1", "http://a:1", "grpcs://a:1/x", "ipv4:127.0.0.1:1"],
)  # fmt: skip
def test_other_targets_of_grpc_are_no_addresses(address: str) -> None:
    with pytest.raises(UsageError, match="expected host:port"):
        check_address(address)


def test_replaced_files_are_taken_up_when_they_fit(files: TlsFiles, tmp_path: Path) -> None:
    tls = ServerTls(files)
    assert tls.names == {"localhost", "127.0.0.1"}
    assert tls.expires_s == pytest.approx(time.time() + 30 * 86_400, abs=600)
    assert not tls.refresh()
    authority.write(tmp_path, names=["other.example"], days=60)
    assert tls.refresh()
    assert tls.names == {"other.example"}
    before_s = tls.expires_s
    files.cert.write_bytes(b"-----BEGIN CERTIFICATE-----\nsecret\n")
    assert not tls.refresh()
    assert tls.expires_s == before_s
    assert "not readable PEM" in tls.failure
    assert "secret" not in tls.failure
    files.cert.unlink()
    assert not tls.refresh()
    authority.write(tmp_path, names=["third.example"], days=60)
    assert tls.refresh()
    assert tls.failure == ""
    assert isinstance(tls.grpc_credentials(), grpc.ServerCredentials)


def test_a_key_of_another_certificate_is_refused_at_the_start(
    files: TlsFiles, tmp_path: Path
) -> None:
    authority.write(tmp_path / "other", names=["x.example"], days=1)
    with pytest.raises(UsageError, match="not the key"):
        ServerTls(TlsFiles(cert=files.cert, key=tmp_path / "other" / "server.key"))
    with pytest.raises(UsageError, match="cannot be read"):
        ServerTls(TlsFiles(cert=files.cert, key=tmp_path / "missing"))


def test_certs_init_writes_private_keys_for_us_alone_and_keeps_its_ca(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "certs"
    assert paramd_command(["certs", "init", str(directory), "--name", "10.0.0.7"]) == 0
    written = capsys.readouterr().out.split()
    assert len(written) == 6
    for path in written:
        assert os.stat(path).st_mode & 0o777 == (0o600 if path.endswith(".key") else 0o644)
    ca = (directory / "ca.pem").read_bytes()
    server = ServerTls(TlsFiles(cert=directory / "server.pem", key=directory / "server.key"))
    assert {"localhost", "127.0.0.1", "::1", "10.0.0.7"} <= server.names
    assert paramd_command(["certs", "init", str(directory)]) == 0
    assert (directory / "ca.pem").read_bytes() == ca
    assert server.refresh()
    assert paramd_command(["certs", "init", str(directory), "--name", "ü"]) == 2
    (directory / "ca.key").write_bytes(b"x")
    with pytest.raises(ConflictError, match="cannot be read"):
        authority.write(directory, names=["x"], days=1)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o666, 0o602])
def test_a_key_or_token_that_every_user_can_read_is_refused(
    files: TlsFiles, tmp_path: Path, mode: int
) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    uses: list[tuple[Path, Callable[[], object]]] = [
        (files.key, files.read),
        (files.key, ClientTls(cert=files.cert, key=files.key).ssl_context),
        (files.key, ClientTls(cert=files.cert, key=files.key).channel_credentials),
        (token, lambda: site.read_token(str(token))),
        (token, lambda: settings.read_token(f"@{token}", stdin=sys.stdin)),
        (token, lambda: token_of(AttachSettings(token_file=str(token)))),
    ]
    for secret, use in uses:
        for good in (0o400, 0o600, 0o440):
            secret.chmod(good)
            use()
        secret.chmod(mode)
        with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600"):
            use()
        secret.chmod(0o600)
