"""`paramd dashboard` against a real control plane: its link signs in once and holds no token."""

import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from paramd.cli.main import main
from tests.integration.client_job import JOB, Job, running_job
from tests.integration.test_client import layout

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    for name in ("PARAMD_URL", "PARAMD_TOKEN", "DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    with running_job(layout()) as job:
        yield job


def sign_in(job: Job, code: str) -> httpx2.Response:
    headers = {"authorization": f"Paramd-Code {code}"}
    return httpx2.post(f"{job.url}/api/v1/session", headers=headers, trust_env=False)


def test_the_link_signs_in_once_and_a_browser_is_given_a_private_file(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(["dashboard"]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), "within 60 s" in err) == (1, True)
    found = re.fullmatch(rf"{job.url}/#/sign-in/([A-Za-z0-9_-]+)/{JOB}\n", out)
    assert found is not None
    assert [sign_in(job, found[1]).status_code for _ in range(2)] == [201, 401]
    # With a browser: it is given the name of a file, and the link stands there alone.
    browser, given = tmp_path / "browser.py", tmp_path / "given"
    browser.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(given)!r}, 'w').write(' '.join(sys.argv[1:]))\n"
    )
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    assert main(["dashboard", "--job", JOB]) == 0
    link = capsys.readouterr().out.strip()
    page = tmp_path / "state" / "sign-in.html"
    assert given.read_text() == page.as_uri()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert link in page.read_text()
    logged = "".join(path.read_text() for path in (tmp_path / "state" / JOB).glob("*.log"))
    code = link.split("/")[-2]
    for told in (out, err, link, page.read_text(), logged):
        assert job.token not in told
    assert code not in logged
