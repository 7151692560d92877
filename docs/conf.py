"""Sphinx' settings of the manual; `make manual` builds it (docs/build.py)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from docs import from_code  # noqa: E402
from paramd.version import __version__  # noqa: E402

project = "paramd"
copyright = "the paramd authors; Apache-2.0"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
LEFT_OUT = ("faults.md", "decisions.md", "reports.md")
"""For those who work on paramd: in the repository, not in the manual."""

exclude_patterns = ["_static", "decisions/*", *LEFT_OUT]
root_doc = "index"

smartquotes = False

html_theme = "furo"
html_favicon = "../client/web/public/favicon.svg"
html_title = f"paramd {__version__}"
html_static_path = ["_static"]
html_js_files = [("trusted.js", {"priority": 1})]
html_copy_source = False
html_show_sphinx = False
html_use_index = True

myst_enable_extensions = ["deflist"]
# Addresses of examples, and of servers on the reader's own machine.
linkcheck_ignore = [r"https?://(127\.0\.0\.1|localhost|10\.|[\w.-]*\.?example)"]
linkcheck_timeout = 15
# Forges draw the anchors of their pages by script.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]

myst_heading_anchors = 4
# A link that leads nowhere fails the build.
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_preprocess_types = False

_OUT = re.compile(
    r"\[(`?)([^]`]*)`?\]\("
    rf"((?:\.\./)+[^)#]*|{'|'.join(map(re.escape, LEFT_OUT))})(?:#[^)]*)?\)"
)
_MARK = re.compile(r"^<!-- from the code: (\w+) -->$", re.MULTILINE)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _as_code)


def _as_code(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Docstrings have code between single backticks, as Markdown has."""
    text = re.sub(r"(?<![`:\w])`([^`]+)`(?!`)(\w?)", _literal, "\n".join(lines))
    lines[:] = text.split("\n")


def _literal(found: re.Match[str]) -> str:
    return f"``{found[1]}``" + (f"\\ {found[2]}" if found[2] else "")


def _read(app: Any, name: str, source: list[str]) -> None:
    """Put in what is generated, and name files of the checkout that are no pages of the manual."""
    text = _MARK.sub(lambda found: from_code.MARKDOWN[found[1]](), source[0])
    folder = (HERE / name).parent

    def told(found: re.Match[str]) -> str:
        target = (folder / found[3]).resolve()
        if HERE in target.parents and found[3] not in LEFT_OUT:
            return found[0]
        path = target.relative_to(HERE.parent).as_posix()
        return f"`{path}`" if found[2] in path else f"{found[2]} (`{path}`)"

    source[0] = _OUT.sub(told, text)
