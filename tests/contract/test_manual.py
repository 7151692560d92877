"""The built manual fits the dashboard's content security policy, the wheel, and a host offline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.build import clean
from paramd_service.control.api.guard import MANUAL
from tests.needs import missing

MAX_BYTES = 3_500_000
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"([^\"]*)\"")


@pytest.fixture
def pages() -> dict[str, str]:
    if not (MANUAL / "index.html").is_file():
        missing("the manual (make manual)")
    return {str(path.relative_to(MANUAL)): path.read_text() for path in MANUAL.rglob("*.html")}


def test_no_page_of_the_manual_has_anything_inline(pages: dict[str, str]) -> None:
    assert len(pages) > 30
    for name, text in pages.items():
        assert not re.search(r"<style\b", text), name
        assert not re.search(r"<script(?![^>]*\bsrc=)", text), name
        tags = re.findall(r"<[a-z][^<>]*>", text)
        assert not [tag for tag in tags if re.search(r"\s(?:style|on[a-z]+)=", tag)], name


def test_the_manual_loads_nothing_from_elsewhere_and_only_what_is_there(
    pages: dict[str, str],
) -> None:
    for name, text in pages.items():
        for target in LOADED.findall(text):
            path = target.partition("?")[0].partition("#")[0]
            assert "://" not in path, (name, target)
            assert not path or (MANUAL / name).parent.joinpath(path).exists(), (name, target)


def test_the_manual_is_small(pages: dict[str, str]) -> None:
    found = sum(path.stat().st_size for path in MANUAL.rglob("*") if path.is_file())
    assert found < MAX_BYTES


def test_what_is_inline_becomes_a_file_with_the_same_content(tmp_path: Path) -> None:
    (tmp_path / "_static" / "styles").mkdir(parents=True)
    (tmp_path / "_static" / "styles" / "furo.css").write_text("body {}\n")
    (tmp_path / "below").mkdir()
    page = '<script>let a = 1;</script><style>b {c: d}</style><i class="x" style="e: f">g</i>'
    (tmp_path / "below" / "page.html").write_text(page)
    clean(tmp_path)
    text = (tmp_path / "below" / "page.html").read_text()
    (script,) = re.findall(r'<script src="\.\./(_static/inline-\w+\.js)"></script>', text)
    (style,) = re.findall(r'<link rel="stylesheet" href="\.\./(_static/inline-\w+\.css)">', text)
    assert (tmp_path / script).read_text() == "let a = 1;"
    assert (tmp_path / style).read_text() == "b {c: d}"
    (key,) = re.findall(r'<i class="x" data-style="(\w+)">', text)
    rules = (tmp_path / "_static" / "styles" / "furo.css").read_text()
    assert f'[data-style="{key}"]{{e: f}}' in rules
