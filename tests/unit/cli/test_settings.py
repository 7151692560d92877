"""Flag before PARAMD_* before paramd.toml, and no token where others can read it."""

import io
import json
import os
from pathlib import Path

import pytest

from paramd import places
from paramd.cli import settings
from paramd.cli.main import main
from paramd.cli.options import Target
from paramd.cli.settings import Flags, Settings
from paramd.errors import UsageError

LAB, LOCAL = "https://lab.example:8470", "http://127.0.0.1:8470"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory and a config directory of the test's own."""
    for name in ("here", "config/paramd"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("PARAMD_OUTPUT", "PARAMD_CONTEXT", "PARAMD_TLS_CA"):
        monkeypatch.delenv(name, raising=False)


def write(tmp_path: Path, where: str, text: str) -> None:
    (tmp_path / where / "paramd.toml").write_text(text)


def load(**flags: str) -> Settings:
    return settings.load(Flags(**flags), stdin=io.StringIO(""))


def test_each_source_wins_over_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().job is None
    write(tmp_path, "config/paramd", 'job = "own-file"\nurl = "http://far.example:8470"')
    assert load().job == "own-file"
    write(tmp_path, "here", 'job = "here-file"')
    assert load().job == "here-file"
    assert load().url == "http://far.example:8470"
    monkeypatch.setenv("PARAMD_JOB", "environment")
    assert load().job == "environment"
    assert load(job="flag").job == "flag"


def test_a_literal_token_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="visible to other users") as caught:
        load(token="s3cr3t")
    assert "s3cr3t" not in str(caught.value)


def test_tokens_come_from_stdin_file_environment_and_own_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\nsecond line\n")
    file.chmod(0o600)
    assert load(token=f"@{file}").token == "from-file"
    assert settings.load(Flags(token="-"), stdin=io.StringIO(" typed \n")).token == "typed"
    write(tmp_path, "config/paramd", f'token_file = "{file}"')
    assert load().token == "from-file"
    monkeypatch.setenv("PARAMD_TOKEN", "from-environment")
    assert load().token == "from-environment"
    assert load(token=f"@{file}").token == "from-file"
    assert "from-environment" not in repr(load())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('token_file = "/etc/passwd"', "read only from"),
        ('url = "http://collector.example"', "must point to this machine"),
        ('url = "http://127.0.0.1.collector.example"', "must point to this machine"),
        ('url = "http://127.0.0.1@collector.example"', "must point to this machine"),
        ('token = "s3cr3t"', "does not belong here"),
        ('context = "lab"', "read only from"),
        (f'[contexts.lab]\nurl = "{LAB}"', "read only from"),
    ],
)
def test_a_file_in_the_working_directory_cannot_send_a_token_elsewhere(
    tmp_path: Path, text: str, complaint: str
) -> None:
    write(tmp_path, "here", text)
    with pytest.raises(UsageError, match=complaint) as caught:
        load()
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_file_in_the_working_directory_may_name_this_machine(tmp_path: Path, host: str) -> None:
    write(tmp_path, "here", f'url = "http://{host}:8470"')
    assert load().url == f"http://{host}:8470"


def test_a_url_of_the_working_directory_gets_no_token_of_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    file.chmod(0o600)
    write(tmp_path, "config/paramd", f'url = "{LAB}"\ntoken_file = "{file}"')
    write(tmp_path, "here", f'url = "{LOCAL}"')
    monkeypatch.setenv("PARAMD_TOKEN", "from-environment")
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    assert (load().url, load().token) == (LOCAL, None)
    with pytest.raises(UsageError, match="is no job that you run on this host"):
        Target(load()).reached()
    # What the user names at this call is the user's own choice.
    assert load(url=LAB).token == "from-environment"
    monkeypatch.setenv("PARAMD_URL", LAB)
    assert Target(load()).reached().token == "from-environment"


def test_a_url_of_the_working_directory_may_choose_among_our_own_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PARAMD_TOKEN", "from-environment")
    endpoint = places.Endpoint(
        url=LOCAL, token="token-of-job", pid=os.getpid(), job="mine", grpc_address="127.0.0.1:1"
    )
    places.write_endpoint(endpoint)
    write(tmp_path, "here", f'url = "{LOCAL}/"')
    assert Target(load()).reached().token == "token-of-job"
    with pytest.raises(UsageError, match="is no job that you run"):
        Target(load(job="another")).reached()


def test_a_token_file_beside_a_url_is_for_that_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    file.chmod(0o600)
    write(tmp_path, "config/paramd", f'url = "{LAB}"\ntoken_file = "{file}"')
    assert load().token == load(url=LAB + "/").token == "from-file"
    assert load(url=LOCAL).token is None
    monkeypatch.setenv("PARAMD_URL", LOCAL)
    assert load().token is None


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of another user takes root to make")
@pytest.mark.parametrize("where", ["here", "config/paramd"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_of_another_user_is_ignored_and_says_so(
    where: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / where / "paramd.toml"
    if kind == "link":
        (tmp_path / "target").write_text('job = "theirs"')
        path.symlink_to(tmp_path / "target")
    else:
        path.write_text('job = "theirs"')
    os.chown(path, 65534, 65534, follow_symlinks=False)
    assert load().job is None
    (record,) = caplog.records
    assert f"{path} is ignored: it belongs to uid 65534" in record.getMessage()


@pytest.mark.parametrize(("mode", "who"), [(0o666, "every user"), (0o662, "every user")])
def test_a_file_that_others_may_write_is_ignored_and_says_so(
    mode: int, who: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "here", 'job = "theirs"')
    (tmp_path / "here/paramd.toml").chmod(mode)
    assert load().job is None
    (record,) = caplog.records
    assert who in record.getMessage()
    (tmp_path / "here/paramd.toml").chmod(0o644)
    assert load().job == "theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of another group takes root to make")
def test_a_group_of_others_may_not_write_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "here", 'job = "theirs"')
    path = tmp_path / "here/paramd.toml"
    path.chmod(0o664)
    assert load().job == "theirs", "root's own group has nobody else"
    os.chown(path, -1, 100)
    assert load().job is None
    assert "its group (gid 100) may write it" in caplog.text


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """A paramd.toml of the user's own, with two contexts and settings beside them."""
    for name in ("lab", "top"):
        (tmp_path / f"{name}.token").write_text(f"token-of-{name}\n")
        (tmp_path / f"{name}.token").chmod(0o600)
    path = tmp_path / "config" / "paramd" / "paramd.toml"
    path.write_text(f"""
        url = "http://127.0.0.1:1"
        token_file = "{tmp_path}/top.token"
        tls_ca = "top.pem"
        [contexts.lab]
        url = "{LAB}"
        token_file = "{tmp_path}/lab.token"
        job = "lab-job"
        tls_ca = "lab.pem"
        [contexts.local]
        url = "{LOCAL}"
    """)
    return path


def facts(found: Settings) -> tuple[str | None, ...]:
    return (found.url, found.job, found.token, found.tls_ca)


LAB_FACTS = (LAB, "lab-job", "token-of-lab", "lab.pem")


@pytest.mark.usefixtures("own_file")
def test_what_a_context_says_stands_where_it_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMD_JOB", "environment")
    monkeypatch.setenv("PARAMD_URL", LAB)
    monkeypatch.setenv("PARAMD_TOKEN", "token-of-environment")
    assert facts(load(context_name="lab")) == LAB_FACTS
    assert load(context_name="lab", job="flag").job == "flag"
    monkeypatch.setenv("PARAMD_CONTEXT", "lab")
    assert facts(load()) == (LAB, "environment", "token-of-environment", "lab.pem")


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_its_token_job_and_ca_go_to_its_url_alone(
    how: str, own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_file.write_text(own_file.read_text().replace("token_file", "# token_file", 1))
    named = {"context_name": "lab"} if how == "flag" else {}
    if how == "variable":
        monkeypatch.setenv("PARAMD_CONTEXT", "lab")
    assert facts(load(url="https://else.example", **named)) == (
        "https://else.example", None, None, "top.pem",
    )  # fmt: skip
    assert load(url=LAB + "/", **named).token == "token-of-lab"
    monkeypatch.setenv("PARAMD_URL", "https://else.example")
    expected = "token-of-lab" if how == "flag" else None
    assert load(**named).token == expected


@pytest.mark.usefixtures("own_file")
def test_tokens_and_cas_of_other_places_are_not_for_a_context() -> None:
    assert facts(load()) == ("http://127.0.0.1:1", None, "token-of-top", "top.pem")
    assert facts(load(context_name="local")) == (LOCAL, None, None, None)


@pytest.mark.usefixtures("own_file")
def test_list_marks_the_one_in_force_and_show_never_shows_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--context", "lab", "context", "list", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["contexts"]
    assert [(row["name"], row["in_force"]) for row in rows] == [("lab", True), ("local", False)]
    assert main(["context", "show", "lab"]) == 0
    shown = capsys.readouterr().out
    assert LAB in shown
    assert "token-of" not in shown
    (tmp_path / "lab.token").unlink()
    assert main(["context", "show", "--context", "lab", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["contexts"]
    assert row["token"] == "not readable"
    assert main(["context", "show"]) == 2
