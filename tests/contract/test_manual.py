"""The built manual fits the dashboard's content security policy, the wheel, and a host offline."""

import re

import pytest

from paramd_service.control.api.guard import MANUAL
from tests.needs import missing

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
