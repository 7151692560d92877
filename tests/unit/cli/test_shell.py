"""How the program ends."""

import pytest
from typer import Abort

from paramd import errors
from paramd.cli import shell
from paramd.cli.main import main


def test_no_at_a_question_is_no_bug() -> None:
    assert shell.explain(Abort()) == ("aborted; nothing was changed", 1)


# Of some errors; contract/surface.txt has all.
EXIT_CODES = {
    errors.ParamdError: 1,
    errors.ConflictError: 5,
    errors.TornError: 5,
    errors.PartialError: 6,
}


@pytest.mark.parametrize(
    ("kind", "code"), EXIT_CODES.items(), ids=lambda v: getattr(v, "__name__", v)
)
def test_every_error_has_its_exit_code_and_sets_further_lines_in(
    kind: type[errors.ParamdError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind("what was wrong\nand what to do")

    assert shell.run(fail, debug=False) == code
    captured = capsys.readouterr()
    assert captured.err == "paramd: what was wrong\n        and what to do\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["stat"], "Did you mean 'stats', 'status'?"),
        (["staus", "--job", "end"], "No such command 'staus'"),
        (["sumon", "*"], "Did you mean 'summon'?"),
        (["grads"], "GLOB"),
        (["status", "--no-such"], "--no-such"),
        (["status", "-o", "yaml"], "'jsonl'"),
        (["summon", "*"], "--file"),
        (["summon", "*", "-f", "x.bin"], ".safetensors"),
        (["summon", "*", "-f", "no/such/dir/x.safetensors"], "no directory"),
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
