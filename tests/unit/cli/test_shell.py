"""How the program ends."""

from __future__ import annotations

import pytest

from paramd import errors
from paramd.cli import shell
from paramd.cli.main import main

# Frozen: scripts rely on them.
EXIT_CODES = {
    errors.ParamdError: 1,
    errors.UsageError: 2,
    errors.UnreachableError: 3,
    errors.NotFoundError: 4,
    errors.ConflictError: 5,
    errors.TornError: 5,
    errors.PartialError: 6,
    errors.DeniedError: 7,
    errors.DeadlineError: 8,
}


@pytest.mark.parametrize(
    ("kind", "code"), EXIT_CODES.items(), ids=lambda v: getattr(v, "__name__", v)
)
def test_every_error_is_one_line_and_has_its_exit_code(
    kind: type[errors.ParamdError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind("what was wrong\nand what to do")

    assert shell.run(fail, debug=False) == code
    captured = capsys.readouterr()
    assert captured.err == "paramd: what was wrong and what to do\n"
    assert captured.out == ""


def test_a_traceback_is_shown_with_debug_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("odd")

    assert shell.run(fail, debug=False) == 1
    assert capsys.readouterr().err == (
        "paramd: RuntimeError: odd; this is a bug in paramd, --debug shows the traceback\n"
    )
    assert shell.run(fail, debug=True) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_has_its_own_code() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert shell.run(interrupted, debug=False) == shell.INTERRUPTED


@pytest.mark.parametrize(
    ("module", "extra"),
    [("torch", "torch"), ("cryptography.x509", "service"), ("textual", "top")],
)
def test_a_missing_package_says_what_to_install(
    capsys: pytest.CaptureFixture[str], module: str, extra: str
) -> None:
    def fail() -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    assert shell.run(fail, debug=False) == 1
    assert f"pip install 'paramd[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["stat"], "Did you mean 'stats', 'status'?"),
        (["sumon", "*"], "Did you mean 'summon'?"),
        (["stats"], "GLOB"),
        (["status", "--no-such"], "--no-such"),
        (["status", "-o", "yaml"], "'jsonl'"),
        (["summon", "*"], "--output"),
        (["summon", "*", "-o", "x.bin"], ".safetensors"),
        (["summon", "*", "-o", "no/such/dir/x.safetensors"], "no directory"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert expected in captured.err


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "Usage: paramd" in captured.out
    assert captured.err == ""


def test_an_output_format_of_the_environment_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARAMD_OUTPUT", "yaml")
    assert main(["doctor"]) == 2
    assert "expected one of table, wide, json, jsonl, name" in capsys.readouterr().err


def test_without_a_job_the_next_step_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("paramd: no job runs here; start one with paramd.attach(")


def test_options_may_stand_before_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--job", "early", "status"]) == 4
    assert "'early'" in capsys.readouterr().err
    assert main(["--job", "early", "status", "--job", "late"]) == 4
    assert "'late'" in capsys.readouterr().err
