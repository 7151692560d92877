"""`paramd doctor` at a site's control plane, over TLS, by the name of a context."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paramd.cli.main import main
from paramd.security import authority
from tests.integration.control_process import site_plane, site_token

pytestmark = pytest.mark.usefixtures("grpc_is_up")


def test_the_doctor_looks_at_a_site_over_tls_by_the_name_of_a_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main([*arguments, "doctor", "-o", "json"])
        return code, {row["check"]: row for row in json.loads(capsys.readouterr().out)["checks"]}

    for name in ("PARAMD_TLS_CA", "PARAMD_CONTEXT", "PARAMD_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    authority.write(tmp_path / "c", names=["127.0.0.1"], days=30)
    files = [f"{tmp_path}/c/server.pem", f"{tmp_path}/c/server.key"]
    with site_plane("--tls-cert", files[0], "--tls-key", files[1]) as site:
        (tmp_path / "paramd").mkdir()
        (tmp_path / "token").write_text(site_token())
        (tmp_path / "paramd" / "paramd.toml").write_text(
            f'[contexts.here]\nurl = "{site.url}"\n'
            f'token_file = "{tmp_path}/token"\ntls_ca = "{tmp_path}/c/ca.pem"\n'
        )
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        host = site.url.removeprefix("https://")
        code, found = doctor("--context", "here")
        assert code == 0, found
        assert "valid until" in found[f"TLS of {host}"]["detail"]
        assert found[f"clock of {host}"]["verdict"] == "ok"
        assert found["jobs"]["detail"] == f"none at {site.url}"
        # A job whose ranks never came is not well.
        answer = httpx2.post(
            f"{site.url}/api/v1/jobs",
            json={"job": "run", "world_size": 2},
            headers={"authorization": f"Bearer {site_token()}"},
            verify=authority_context(tmp_path),
            trust_env=False,
        )
        assert answer.status_code == 201
        code, found = doctor("--context", "here")
        assert code == 1
        assert found["job run rank 1"]["verdict"] == "failed"


def authority_context(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "c" / "ca.pem")
