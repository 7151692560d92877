"""What the doctor says of clocks and certificates."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

from paramd.cli import doctor
from paramd.cli.doctor import Finding, Verdict
from paramd.security import authority

NOW_S = 1_800_000_000.5
DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("ahead_s", "verdict", "text"),
    [
        (0.0, Verdict.OK, "within a few seconds"),
        (4.0, Verdict.OK, "within a few seconds"),
        (-30.0, Verdict.WARNING, "30.0 s behind"),
        (30.0, Verdict.WARNING, "30.0 s ahead"),
        (3600.0, Verdict.FAILED, "1 h 0 min ahead"),
    ],
)
def test_a_clock_that_differs_from_the_control_planes_is_found(
    ahead_s: float, verdict: Verdict, text: str
) -> None:
    date = formatdate(int(NOW_S), usegmt=True)
    found = doctor.clock_finding("host", date, NOW_S + ahead_s)
    assert (found.verdict, bool(found.advice)) == (verdict, verdict is not Verdict.OK)
    assert text in found.detail


@pytest.mark.parametrize("date", [None, "", "yesterday"])
def test_a_control_plane_that_says_no_time_is_a_warning(date: str | None) -> None:
    assert doctor.clock_finding("host", date, NOW_S).verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("left_s", "verdict"),
    [
        (30 * DAY_S, Verdict.OK),
        (6 * DAY_S, Verdict.WARNING),
        (-1.0, Verdict.FAILED),
    ],
)
def test_the_end_of_a_certificate_is_seen_before_it_comes(left_s: float, verdict: Verdict) -> None:
    found = doctor.expiry_finding("TLS", "x", NOW_S + left_s, NOW_S)
    assert (found.verdict, bool(found.advice)) == (verdict, verdict is not Verdict.OK)


@contextmanager
def tls_server(directory: Path) -> Iterator[int]:
    """Shakes hands and answers one request with a Date of an hour ago; yields its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem", directory / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as secure:
                    if secure.recv(65_536):
                        date = formatdate(usegmt=True).replace(" GMT", " -0100")
                        answer = f"HTTP/1.1 200 OK\r\ndate: {date}\r\ncontent-length: 0\r\n"
                        secure.sendall(f"{answer}connection: close\r\n\r\n".encode())
            except OSError:
                plain.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def looked_at(port: int, ca: Path) -> list[Finding]:
    return list(doctor.control_plane(f"https://127.0.0.1:{port}", str(ca)))


def test_certificate_and_clock_of_a_server_are_looked_at_over_tls(tmp_path: Path) -> None:
    authority.write(tmp_path / "a", names=["127.0.0.1"], days=30)
    authority.write(tmp_path / "b", names=["127.0.0.1"], days=30)
    authority.write(tmp_path / "named", names=["control.example"], days=30)
    with tls_server(tmp_path / "a") as port:
        certificate, clock = looked_at(port, tmp_path / "a" / "ca.pem")
        assert certificate.verdict is Verdict.OK
        assert "valid until" in certificate.detail
        assert (clock.verdict, "59 min" in clock.detail or "1 h" in clock.detail) == (
            Verdict.FAILED, True,
        )  # fmt: skip
        (foreign,) = looked_at(port, tmp_path / "b" / "ca.pem")
        assert foreign.verdict is Verdict.FAILED
        assert "--tls-ca" in foreign.advice
    with tls_server(tmp_path / "named") as port:
        (misnamed,) = looked_at(port, tmp_path / "named" / "ca.pem")
        assert misnamed.verdict is Verdict.FAILED
        assert "a name in its certificate" in misnamed.advice


def test_nobody_there_is_a_finding_and_not_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for scheme in ("http", "https"):
        (found,) = doctor.control_plane(f"{scheme}://127.0.0.1:{port}", None)
        assert found.verdict is Verdict.FAILED
        assert found.advice


def test_files_of_tls_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*doctor.CERTIFICATES, *doctor.KEYS, "PARAMD_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    assert list(doctor.tls_files(None)) == []
    authority.write(tmp_path, names=["localhost"], days=3)
    monkeypatch.setenv("PARAMD_TLS_CERT", str(tmp_path / "server.pem"))
    monkeypatch.setenv("PARAMD_TLS_KEY", str(tmp_path / "server.key"))
    monkeypatch.setenv("PARAMD_TLS_CLIENT_CERT", str(tmp_path / "none.pem"))
    found = {f.check: f.verdict for f in doctor.tls_files(str(tmp_path / "ca.pem"))}
    assert found == {
        "PARAMD_TLS_CERT": Verdict.WARNING,
        "PARAMD_TLS_KEY": Verdict.OK,
        "PARAMD_TLS_CLIENT_CERT": Verdict.FAILED,
        "TLS CA": Verdict.OK,
    }
    os.chmod(tmp_path / "server.key", 0o644)
    again = {f.check: f for f in doctor.tls_files(None)}
    assert again["PARAMD_TLS_KEY"].advice == f"chmod 600 {tmp_path / 'server.key'}"
