"""What is offered to a shell that completes: nothing that it would interpret."""

import shlex

import pytest
import typer
from typer.main import get_command

from paramd.cli.completion import Item, _completer

PLAIN = ("layers.0.weight", "a/b-1", "group:0", "\u00fcber.w", "step=3", "0a1b", "me@lab", "a,b")
HOSTILE = (
    "$(id)", "`id`", "a;id", "a|id", "a&id", "a>f", "<(id)", "a\\", "'a", '"a', "{a,b}", "a*", "a?",
    "a[0]", "~root", "!1", "#a", "^a", "a b", "a\nb", "a\x1b[2K", "--url=http://x", "@f", "", "=ls",
)  # fmt: skip


def offered(*items: Item) -> list[Item]:
    context = typer.Context(get_command(typer.Typer(callback=lambda: None)))
    return _completer(lambda _, __: items)(context, "")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_a_shell_would_interpret_is_not_offered(name: str) -> None:
    assert offered((name, ""), ("w", "")) == [("w", "")]


def test_plain_names_are_offered_and_a_shell_takes_them_as_they_are() -> None:
    assert offered(*((name, "") for name in PLAIN)) == [(name, "") for name in PLAIN]
    for name in PLAIN:
        assert shlex.split(name) == [name]


def test_a_help_text_keeps_its_words_alone() -> None:
    note = "lr 1e-3 (`id`) $(id) \"x\" 'y' \\ \x1b[0m <(id) \u00fc"
    assert offered(("w", note)) == [("w", "lr 1e-3 id id x y 0m id \u00fc")]
