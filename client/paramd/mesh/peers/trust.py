"""Which CA a control plane's certificate is checked against."""

from __future__ import annotations

import os

from paramd.places import running_jobs
from paramd.security.tls import ClientTls, Pems


def client_tls(url: str, ca: str | os.PathLike[str] | None = None) -> ClientTls:
    """What to trust for `url`: `ca`, else PARAMD_TLS_CA, else the CA in a running job's endpoint.

    Raises:
        UsageError: as `ClientTls.from_environment`.
    """
    found = ClientTls.from_environment(ca)
    if found.ca is None and not found.pin:
        for endpoint in running_jobs():
            if endpoint.ca and endpoint.url == url.rstrip("/"):
                return ClientTls(pems=Pems(ca=endpoint.ca.encode()))
    return found
