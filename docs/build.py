"""Builds the manual into the package, where the control plane serves it under /docs, offline.

Warnings are errors: links and anchors that lead nowhere, docstrings that cannot be read. What
Sphinx and the theme write inline is moved into files, for the dashboard's content security policy
allows neither inline scripts nor inline styles.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "service/paramd_service/control/manual"

UNUSED = (".buildinfo", "objects.inv", "**/*.map", "_static/file.png")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_STYLE = re.compile(r'(<[^<>]*?) style="([^"]*)"')


def main(arguments: Sequence[str]) -> int:
    """Build, clean, and put in place of what was there; with `--links`, check instead."""
    parser = argparse.ArgumentParser(prog="python -m docs.build")
    parser.add_argument(
        "--links",
        action="store_true",
        help="build nothing, but ask for every page elsewhere that the manual links to",
    )
    return _check_links() if parser.parse_args(arguments).links else _build()


def _check_links() -> int:
    """Print links that lead nowhere, or elsewhere for good; 1 if there are any. Needs a network."""
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as folder:
        failed = build_main(["-q", "-b", "linkcheck", "-d", f"{folder}/trees", str(HERE), folder])
        print((Path(folder) / "output.txt").read_text(), end="")
    return failed


def _build() -> int:
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "manual"
        trees = ["-d", str(Path(folder) / "trees")]
        failed = build_main(
            ["-q", "-W", "--keep-going", "-b", "html", *trees, str(HERE), str(built)]
        )
        if failed:
            return failed
        clean(built)
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(built, TARGET)
    size_bytes = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    print(f"{TARGET.relative_to(HERE.parent)}: {size_bytes / 1e6:.1f} MB")
    return 0


def clean(built: Path) -> None:
    """Remove what the pages do not load, and what is inline from them."""
    shutil.rmtree(built / "_sources", ignore_errors=True)
    for pattern in UNUSED:
        for path in built.glob(pattern):
            path.unlink()
    styles: dict[str, str] = {}
    for path in sorted(built.rglob("*.html")):
        top = "../" * (len(path.relative_to(built).parts) - 1)
        text = _without_inline(path.read_text(), built, top)
        text = _without_styles(text, styles)
        path.write_text(text)
    rules = "".join(f'[data-style="{key}"]{{{rule}}}\n' for key, rule in sorted(styles.items()))
    with (built / "_static/styles/furo.css").open("a") as file:
        file.write(f"\n{rules}")


def _without_inline(text: str, built: Path, top: str) -> str:
    """The page with its inline scripts and styles as files, in their places."""

    def moved(found: re.Match[str]) -> str:
        kind, content = found[1], found[2]
        suffix = "js" if kind == "script" else "css"
        name = f"_static/inline-{_key(content)}.{suffix}"
        (built / name).write_text(content)
        if kind == "script":
            return f'<script src="{top}{name}"></script>'
        return f'<link rel="stylesheet" href="{top}{name}">'

    return _INLINE.sub(moved, text)


def _without_styles(text: str, styles: dict[str, str]) -> str:
    """The page with a key for each style attribute; adds their rules to `styles`."""

    def named(found: re.Match[str]) -> str:
        key = _key(found[2])
        styles[key] = found[2]
        return f'{found[1]} data-style="{key}"'

    return _STYLE.sub(named, text)


def _key(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
