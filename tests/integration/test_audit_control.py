"""A real control plane's audit: over REST, over the command line, when its disk is full."""

import json
import resource
import sqlite3
import subprocess
import sys
import time
from typing import Any

import httpx2
import pytest

from paramd import places
from tests.integration.control_process import (
    JOB,
    PATIENCE_S,
    TOKEN,
    Control,
    control_plane,
    site_plane,
    site_token,
)
from tests.postgres import PASSWORD, postgres

pytestmark = pytest.mark.usefixtures("grpc_is_up")

LIMITLESS = resource.RLIM_INFINITY


def make_token(control: Control, name: str) -> httpx2.Response:
    return control.ask("POST", "/tokens", json={"role": "reader", "name": name})


def records(control: Control) -> list[dict[str, Any]]:
    """Oldest first."""
    found = control.get(f"/api/v1/jobs/{JOB}/audit?order=oldest&limit=1000").json()["records"]
    assert isinstance(found, list)
    return found


def paramd(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paramd.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def database() -> sqlite3.Connection:
    return sqlite3.connect(places.state_dir() / JOB / "control.sqlite", timeout=20)


def test_what_changes_something_is_recorded_with_who_did_it() -> None:
    with control_plane() as control:
        made = make_token(control, "ci")
        assert made.status_code == 201
        assert control.get("/api/v1/jobs", token="wrong").status_code == 401
        assert control.get("/api/v1/tokens", token=made.json()["token"]).status_code == 403
        assert make_token(control, "ci").status_code == 409
        begun, incarnation, *told = _without(records(control), "denied")
        assert (begun["method"], begun["actor"]) == ("control.start", "control plane")
        assert begun["detail"]["settings"]["job"] == JOB
        assert (incarnation["method"], incarnation["incarnation"]) == ("run.begin", 1)
        assert [(r["kind"], r["method"], r["actor"], r["role"], r["result"]) for r in told] == [
            ("intent", "token.create", "owner", "admin", None),
            ("outcome", "token.create", "owner", "admin", "done"),
            ("intent", "token.create", "owner", "admin", None),
            ("outcome", "token.create", "owner", "admin", "failed: conflict"),
        ]
        assert told[1]["of"] == told[0]["seq"]
        refused = [r for r in records(control) if r["method"] == "denied"]
        assert [(r["actor"], r["role"], r["detail"]["method"]) for r in refused] == [
            ("", "", "GET /api/v1/jobs"),
            ("ci", "reader", "list_tokens"),
        ]
        page = control.get(f"/api/v1/jobs/{JOB}/audit").text
        assert made.json()["token"] not in page
        assert TOKEN not in page


def _without(found: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    return [record for record in found if record["method"] != method]


def test_with_a_full_disk_tokens_are_refused_and_reading_goes_on() -> None:
    with control_plane() as control:
        assert make_token(control, "before").status_code == 201
        pid = control.process.pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, LIMITLESS))
        answer = make_token(control, "during")
        assert answer.status_code == 503
        assert answer.json()["type"] == "urn:paramd:error:audit-unavailable"
        assert answer.json()["detail"].startswith("audit: it cannot be written")
        assert "\nparamd_audit_ok 0.0\n" in control.get("/metrics").text
        for path in ("", "/ranks", "/audit"):
            assert control.get(f"/api/v1/jobs/{JOB}{path}").status_code == 200, path
        names = [token["name"] for token in control.get("/api/v1/tokens").json()["tokens"]]
        assert names == ["before"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMITLESS, LIMITLESS))
        assert make_token(control, "after").status_code == 201
        assert "\nparamd_audit_ok 1.0\n" in control.get("/metrics").text
        assert paramd("audit", "verify", "--job", JOB).returncode == 0


def test_the_command_line_lists_and_checks_and_names_the_first_bad_record() -> None:
    with control_plane() as control:
        for n in range(3):
            make_token(control, f"t{n}")
        bare, listed = paramd("audit", "-o", "json"), paramd("audit", "list", "-o", "json")
        assert bare.stdout == listed.stdout
        document = json.loads(listed.stdout)
        assert [r["seq"] for r in document["records"]] == list(range(8, 0, -1))
        good = paramd("audit", "verify", "-o", "json")
        assert good.returncode == 0, good.stderr
        check = json.loads(good.stdout)["checks"][0]
        assert (check["good"], check["hash"]) == (True, document["records"][0]["hash"])
        with database() as connection:
            connection.execute("UPDATE audit SET body = replace(body, 'owner', 'eve') WHERE seq=5")
        connection.close()
        bad = paramd("audit", "verify", "-o", "json")
        assert bad.returncode == 1
        assert json.loads(bad.stdout)["checks"][0]["bad_seq"] == 5
        assert "record 5 was changed" in bad.stderr


def test_a_postgresql_named_in_the_environment_keeps_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with postgres() as server:
        monkeypatch.setenv("PARAMD_STORE_URL", server.url())
        with control_plane() as control:
            token = make_token(control, "ci").json()["token"]
            control.process.terminate()
            control.wait()
            logs = control.log.read_text()
        with control_plane(incarnation=2) as control:
            assert control.get("/api/v1/jobs", token=token).status_code == 200
            assert control.get("/api/v1/tokens", token=token).status_code == 403
            assert paramd("audit", "verify").returncode == 0
            begun = records(control)[0]
            logs += control.log.read_text()
        assert begun["detail"]["store"] == "postgresql://paramd@/postgres"
        assert paramd("audit", "verify", "--job", JOB).returncode == 0
    assert PASSWORD not in logs
    assert "%3Aof%40" not in logs
    assert not (places.state_dir() / JOB / "control.sqlite").exists()


def test_a_site_has_an_audit_of_its_own_and_one_for_each_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with site_plane() as control:
        token = site_token()
        monkeypatch.setenv("PARAMD_URL", control.url)
        monkeypatch.setenv("PARAMD_TOKEN", token)
        registered = control.ask("POST", "/jobs", json={"job": "a", "world_size": 1})
        assert registered.status_code == 201
        own = control.get("/api/v1/audit", token=token).json()
        assert (own["job"], [r["method"] for r in own["records"]]) == ("", ["control.start"])
        deadline = time.monotonic() + PATIENCE_S
        while len(found := control.get("/api/v1/jobs/a/audit", token=token).json()["records"]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        methods = [(r["method"], r["incarnation"]) for r in found]
        assert methods == [("run.begin", 1), ("job.register", 1)]
        assert control.get("/api/v1/jobs/b/audit", token=token).status_code == 404
        for options in (["--site"], ["--job", "a"]):
            assert paramd("audit", "verify", *options).returncode == 0, options


def run_control(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paramd_service.control", *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL
    )


def test_a_password_on_the_command_line_is_refused_and_not_repeated() -> None:
    ended = run_control("--job", JOB, "--store", "postgresql://u:s3cr3t@h/d")
    assert ended.returncode == 2
    assert "set PARAMD_STORE_URL" in ended.stderr
    assert "s3cr3t" not in ended.stderr
