"""Flag before PARAMD_* before paramd.toml, and no token where others can read it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from paramd.cli import settings
from paramd.cli.settings import Flags
from paramd.errors import UsageError

NO_INPUT = io.StringIO("")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory and a config directory of the test's own."""
    for name in ("here", "config/paramd"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("PARAMD_OUTPUT", raising=False)


def write(tmp_path: Path, where: str, text: str) -> None:
    (tmp_path / where / "paramd.toml").write_text(text)


def test_each_source_wins_over_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Flags()
    assert settings.load(flags, stdin=NO_INPUT).job is None
    write(tmp_path, "config/paramd", 'job = "own-file"\nurl = "http://far.example:8470"')
    assert settings.load(flags, stdin=NO_INPUT).job == "own-file"
    write(tmp_path, "here", 'job = "here-file"')
    assert settings.load(flags, stdin=NO_INPUT).job == "here-file"
    assert settings.load(flags, stdin=NO_INPUT).url == "http://far.example:8470"
    monkeypatch.setenv("PARAMD_JOB", "environment")
    assert settings.load(flags, stdin=NO_INPUT).job == "environment"
    assert settings.load(Flags(job="flag"), stdin=NO_INPUT).job == "flag"


def test_a_flag_after_the_command_wins_over_one_before_it() -> None:
    before = Flags(job="before", url="http://127.0.0.1:1")
    merged = Flags(job="after").over(before)
    assert (merged.job, merged.url) == ("after", "http://127.0.0.1:1")


def test_a_literal_token_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="visible to other users") as caught:
        settings.load(Flags(token="s3cr3t"), stdin=NO_INPUT)
    assert "s3cr3t" not in str(caught.value)


def test_tokens_come_from_stdin_file_environment_and_own_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\nsecond line\n")
    assert settings.load(Flags(token=f"@{file}"), stdin=NO_INPUT).token == "from-file"
    assert settings.load(Flags(token="-"), stdin=io.StringIO(" typed \n")).token == "typed"
    write(tmp_path, "config/paramd", f'token_file = "{file}"')
    assert settings.load(Flags(), stdin=NO_INPUT).token == "from-file"
    monkeypatch.setenv("PARAMD_TOKEN", "from-environment")
    assert settings.load(Flags(), stdin=NO_INPUT).token == "from-environment"
    assert settings.load(Flags(token=f"@{file}"), stdin=NO_INPUT).token == "from-file"
    assert "from-environment" not in repr(settings.load(Flags(), stdin=NO_INPUT))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('token_file = "/etc/passwd"', "read only from"),
        ('url = "http://collector.example"', "must point to this machine"),
        ('url = "http://127.0.0.1.collector.example"', "must point to this machine"),
        ('url = "http://127.0.0.1@collector.example"', "must point to this machine"),
        ('token = "s3cr3t"', "does not belong here"),
    ],
)
def test_a_file_in_the_working_directory_cannot_send_a_token_elsewhere(
    tmp_path: Path, text: str, complaint: str
) -> None:
    write(tmp_path, "here", text)
    with pytest.raises(UsageError, match=complaint) as caught:
        settings.load(Flags(), stdin=NO_INPUT)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_file_in_the_working_directory_may_name_this_machine(tmp_path: Path, host: str) -> None:
    write(tmp_path, "here", f'url = "http://{host}:8470"')
    assert settings.load(Flags(), stdin=NO_INPUT).url == f"http://{host}:8470"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("job = ", "not TOML"),
        ('jobb = "x"', "did you mean 'job'"),
        ("job = 3", "must be a string"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    write(tmp_path, "config/paramd", text)
    with pytest.raises(UsageError, match=complaint) as caught:
        settings.load(Flags(), stdin=NO_INPUT)
    assert "paramd.toml" in str(caught.value)


def test_tables_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "config/paramd", '[destinations]\ncheckpoints = "s3://bucket"')
    assert settings.load(Flags(), stdin=NO_INPUT).job is None
