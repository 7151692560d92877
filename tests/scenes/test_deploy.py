"""What lies in deploy/ runs, or passes its checkers."""

import json
import os
import re
import runpy
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from paramd.cli.main import main
from paramd.errors import UsageError
from paramd_service.alerts.config import Rule
from paramd_service.control.base.site import read_token
from tests.launch import ROOT
from tests.needs import program

pytestmark = pytest.mark.usefixtures("grpc_is_up")

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "paramd-control.service"
ALERTMANAGER = DEPLOY / "alertmanager.yaml"
EXPOSURE_LIMIT = 2.0
PATIENCE_S = 90.0


def exports(text: str) -> dict[str, str]:
    """The variables that local-mesh tells its reader to set, as a shell would set them."""
    found = dict(re.findall(r"(PARAMD_(?:URL|JOB))=(\S+)", text))
    (token_file,) = re.findall(r'PARAMD_TOKEN="\$\(cat (\S+)\)"', text)
    assert stat.S_IMODE(os.stat(token_file).st_mode) == 0o600
    return {**found, "PARAMD_TOKEN": Path(token_file).read_text().strip()}


def test_the_local_mesh_is_read_as_it_says_and_ends_on_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        mesh = subprocess.Popen(
            [DEPLOY / "local-mesh", "--ranks", "2", "--listen", "127.0.0.1:0"],
            stdout=stdout,
            stderr=stderr,
        )
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while "Ctrl-C stops everything." not in out.read_text():
            assert mesh.poll() is None, err.read_text()
            assert time.monotonic() < deadline_s, err.read_text()
            time.sleep(0.1)
        for name, value in exports(out.read_text()).items():
            monkeypatch.setenv(name, value)
        assert main(["status", "-o", "json"]) == 0
        ranks = json.loads(capsys.readouterr().out)["ranks"]
        assert [(rank["rank"], rank["reason"]) for rank in ranks] == [(0, ""), (1, "")]
        token = os.environ["PARAMD_TOKEN"]
        assert token not in out.read_text() + err.read_text()
    finally:
        mesh.send_signal(signal.SIGINT)
        code = mesh.wait(PATIENCE_S)
    # That no process is left is what the leak check looks at.
    assert code == 0, err.read_text()
    assert list(tmp_path.glob("paramd-mesh-*")) == []


@pytest.mark.parametrize("text", ["", "short\n", "with a blank in it, long\n", "ünicode" * 4])
def test_a_file_without_a_good_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="token_file") as caught:
        read_token(str(path))
    assert not text.strip() or text.strip() not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(str(tmp_path / "none"))
    assert read_token("") is None


def test_the_unit_is_sound_and_little_exposed(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    text = UNIT.read_text()
    (python,) = re.findall(r"^ExecStart=(\S+)", text, re.MULTILINE)
    unit.write_text(text.replace(python, sys.executable))
    verified = analyze("verify", str(unit))
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    scored = analyze("security", "--offline=true", "--no-pager", str(unit))
    (score,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", scored.stdout)
    assert float(score) <= EXPOSURE_LIMIT


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("systemd-analyze"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run(
        [hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout) == (0, "")
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["10001"]
    sent = [
        one[1:] for one in (DEPLOY.parent / ".dockerignore").read_text().split() if one[0] == "!"
    ]
    copied = re.findall(r"^COPY ((?!--from)[^\n]*) \S+$", text, re.MULTILINE)
    for path in " ".join(copied).split():
        assert any(path == one or path.startswith(f"{one}/") for one in sent), f"{path} is not sent"


def test_the_image_installs_all_it_needs_by_hash() -> None:
    lock = runpy.run_path(str(DEPLOY / "lock.py"))
    version, lines = lock["pins"](), lock["LOCK"].read_text().splitlines()[1:]
    pinned = [f"{name}=={version[name]}" for name in lock["names"]()]
    assert [line.split()[0] for line in lines] == pinned
    assert all(re.fullmatch(r"\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    installs = re.findall(r"pip install (.*)", (DEPLOY / "Dockerfile").read_text())
    assert all("--no-deps" in one for one in installs), "nothing comes that the lock does not name"


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_the_compose_file_opens_no_port_and_gives_no_rights(compose: Any) -> None:
    for service in compose["services"].values():
        assert "ports" not in service
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_compose_files_command_serves_and_its_healthcheck_says_so(
    compose: Any, tmp_path: Path
) -> None:
    service = compose["services"]["control"]
    kind, python, dash_c, program = service["healthcheck"]["test"]
    assert (kind, python, dash_c) == ("CMD", "python", "-c")
    token = tmp_path / "token"
    token.write_text("a-token-of-the-compose-file\n")
    token.chmod(0o600)
    here = {"127.0.0.1:8470": "127.0.0.1:0", "127.0.0.1:8471": "127.0.0.1:0"}
    here["/run/secrets/token"] = str(token)
    arguments = []
    for word in service["command"]:
        option, equals, value = word.partition("=")
        # Each address and path is one that the rest of the file relies on.
        arguments.append(f"{option}={here.pop(value, value)}" if equals else word)
        assert not equals or value not in here
    paramd = Path(sys.executable).with_name("paramd")
    with subprocess.Popen([paramd, *arguments], stdout=subprocess.PIPE, text=True) as control:
        try:
            assert control.stdout is not None
            url = json.loads(control.stdout.readline())["url"]
            probe = program.replace("http://127.0.0.1:8470", url)
            assert probe != program
            subprocess.run([sys.executable, "-c", probe], check=True, timeout=30)
            bearer = {"authorization": f"Bearer {token.read_text().strip()}"}
            assert httpx2.get(f"{url}/api/v1/jobs", headers=bearer).json() == {"jobs": []}
        finally:
            control.terminate()
        assert control.wait(PATIENCE_S) == 0


def amtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        [program("amtool"), *arguments],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_alertmanager_has_a_way_for_every_rule() -> None:
    amtool("check-config", ALERTMANAGER)
    rules = yaml.safe_load((DEPLOY / "helm/paramd-control/files/rules.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert {rule["labels"]["severity"] for rule in alerts} == {"warning", "critical"}
    asked = [(rule["alert"], rule["labels"]["severity"], "") for rule in alerts]
    asked += [("ParamdAlertFiring", "warning", rule.value) for rule in Rule]
    test = ("config", "routes", "test", "--config.file", ALERTMANAGER)
    for name, severity, rule in asked:
        loud = severity == "critical" or rule in ("non-finite", "replica-drift")
        labels = [f"alertname={name}", f"severity={severity}", f"rule={rule}", "job=run"]
        assert amtool(*test, *labels).strip() == ("pager" if loud else "chat"), labels
