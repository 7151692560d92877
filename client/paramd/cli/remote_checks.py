"""What `paramd doctor` looks at beyond this machine: clocks and certificates of control planes."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paramd.cli.checks import Finding, Verdict
from paramd.cli.output import seconds
from paramd.errors import ParamdError, UsageError
from paramd.tickets import CLOCK_SKEW_S
from paramd.tls import ClientTls, https_context, read_pem

TIMEOUT_S = 5.0
NOTABLE_SKEW_S = 5.0
"""The Date header has whole seconds; what is above this is no rounding and no network."""

SOON_S = 7 * 86_400.0
"""A certificate that ends within this time is a warning."""

CERTIFICATES = ("PARAMD_TLS_CERT", "PARAMD_TLS_CLIENT_CERT", "PARAMD_TLS_CLIENT_CA")
KEYS = ("PARAMD_TLS_KEY", "PARAMD_TLS_CLIENT_KEY")


def control_plane(url: str, tls_ca: str | None) -> Iterator[Finding]:
    """Its clock against ours and, with https, its certificate. No token is sent."""
    parts = urlsplit(url)
    host = parts.netloc
    try:
        tls = ClientTls.from_environment(tls_ca)
        if parts.scheme == "https":
            certificate = _certificate(host, parts.hostname or "", parts.port or 443, tls)
            yield certificate
            if certificate.verdict is Verdict.FAILED:
                return
        yield _clock(host, url, tls)
    except (ParamdError, OSError) as error:
        yield Finding(
            check=f"control plane {host}",
            verdict=Verdict.FAILED,
            detail=str(error),
            advice="is it running, and is the port reachable from here?",
        )


def _clock(host: str, url: str, tls: ClientTls) -> Finding:
    import httpx2

    before_s = time.time()
    try:
        answer = httpx2.get(
            url.rstrip("/") + "/healthz",
            verify=https_context(url, tls),
            timeout=TIMEOUT_S,
            trust_env=False,
        )
    except httpx2.HTTPError as error:
        raise OSError(f"{url} does not answer ({error})") from error
    return clock_finding(host, answer.headers.get("date"), (before_s + time.time()) / 2)


def clock_finding(host: str, date: str | None, now_s: float) -> Finding:
    """What a Date header says about our clock, which showed `now_s` when it was written."""
    check = f"clock of {host}"
    try:
        # Cut to whole seconds, so half a second is missing on average.
        theirs_s = parsedate_to_datetime(date or "").timestamp() + 0.5
    except ValueError:
        return Finding(
            check=check,
            verdict=Verdict.WARNING,
            detail=f"it says no time (Date: {date!r})",
            advice="is it a paramd control plane? A proxy may have taken the header away",
        )
    ahead_s = now_s - theirs_s
    skew_s = abs(ahead_s)
    if skew_s <= NOTABLE_SKEW_S:
        return Finding(check=check, verdict=Verdict.OK, detail="as ours, to a few seconds")
    advice = "tickets and tokens would be refused" if skew_s > CLOCK_SKEW_S else "more is too much"
    return Finding(
        check=check,
        verdict=Verdict.FAILED if skew_s > CLOCK_SKEW_S else Verdict.WARNING,
        detail=f"ours is {seconds(skew_s)} {'ahead' if ahead_s > 0 else 'behind'}",
        advice=f"set the clocks (NTP); {advice}",
    )


def _certificate(host: str, name: str, port: int, tls: ClientTls) -> Finding:
    check = f"TLS of {host}"
    context = tls.ssl_context()
    try:
        with (
            socket.create_connection((name, port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            found = secure.getpeercert()
    except ssl.SSLCertVerificationError as error:
        return Finding(
            check=check,
            verdict=Verdict.FAILED,
            detail=error.verify_message,
            advice=_verify_advice(error.verify_code, tls),
        )
    except ssl.SSLError as error:
        return Finding(
            check=check,
            verdict=Verdict.FAILED,
            detail=str(error),
            advice="does it speak TLS there? It may ask for a client certificate: "
            "PARAMD_TLS_CLIENT_CERT and PARAMD_TLS_CLIENT_KEY",
        )
    assert found is not None
    parts: Any = found["issuer"]
    issuer = ", ".join(value for part in parts for _, value in part)
    end_s = float(ssl.cert_time_to_seconds(str(found["notAfter"])))
    return expiry_finding(check, f"issued by {issuer}", end_s, time.time())


def _verify_advice(code: int, tls: ClientTls) -> str:
    expired, not_yet, wrong_name, wrong_ip = 10, 9, 62, 64
    if code in (expired, not_yet):
        return "renew its certificate, or set this machine's clock"
    if code in (wrong_name, wrong_ip):
        return "use a name that its certificate has, or issue it for this one"
    used = f"{tls.ca} is not its CA" if tls.ca is not None else "the system does not know its CA"
    return f"{used}; give the right one with --tls-ca FILE or PARAMD_TLS_CA"


def expiry_finding(check: str, what: str, end_s: float, now_s: float) -> Finding:
    """Whether a certificate that ends at `end_s` is good at `now_s` and for a while."""
    left_s = end_s - now_s
    day = time.strftime("%Y-%m-%d", time.gmtime(end_s))
    verdict = Verdict.OK if left_s > SOON_S else Verdict.WARNING
    if left_s <= 0:
        verdict = Verdict.FAILED
    return Finding(
        check=check,
        verdict=verdict,
        detail=f"{what}, {'valid until' if left_s > 0 else 'ended on'} {day}",
        advice="" if verdict is Verdict.OK else "renew it; servers take up new files by themselves",
    )


def tls_files(tls_ca: str | None) -> Iterator[Finding]:
    """The files that PARAMD_TLS_* and --tls-ca name: their dates, and who can read the keys."""
    named = {name: os.environ.get(name) for name in (*CERTIFICATES, *KEYS)}
    named["TLS CA"] = tls_ca if tls_ca is not None else os.environ.get("PARAMD_TLS_CA")
    for name, text in named.items():
        if not text:
            continue
        path = Path(text).expanduser()
        try:
            yield _key_file(name, path) if name in KEYS else _certificate_file(name, path)
        except (UsageError, OSError, ValueError) as error:
            advice = "name a PEM file that this user can read"
            yield Finding(check=name, verdict=Verdict.FAILED, detail=str(error), advice=advice)


def _key_file(name: str, path: Path) -> Finding:
    read_pem(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        return Finding(
            check=name,
            verdict=Verdict.FAILED,
            detail=f"{path} is open to other users",
            advice=f"chmod 600 {path}",
        )
    return Finding(check=name, verdict=Verdict.OK, detail=f"{path}, for its owner alone")


def _certificate_file(name: str, path: Path) -> Finding:
    data = read_pem(path)
    try:
        from cryptography import x509
    except ModuleNotFoundError:
        detail = f"{path}; its dates are looked at with paramd[service] installed"
        return Finding(check=name, verdict=Verdict.OK, detail=detail)
    found = x509.load_pem_x509_certificates(data)
    end_s = min(certificate.not_valid_after_utc.timestamp() for certificate in found)
    return expiry_finding(name, str(path), end_s, time.time())
