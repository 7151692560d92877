"""Runs the manual's notebook: `python -m docs.notebook [TARGET]`.

The tutorial's training must be running on this machine. The notebook with its outputs is written to
TARGET, by default to where it is; `markdown` makes the manual's page of it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("notebook.ipynb")
CELL_S = 120

_STYLES = re.compile(r"<style[^>]*>.*?</style>", re.DOTALL)


def main(target: Path) -> None:
    """Run every cell in a kernel of this interpreter; the first error is raised."""
    import nbformat
    from nbclient import NotebookClient

    found = nbformat.read(SOURCE, as_version=4)
    NotebookClient(found, timeout=CELL_S, kernel_name="python3").execute()
    for cell in found.cells:
        # When it was run says nothing, and would change every time.
        cell.metadata.pop("execution", None)
    found.metadata["language_info"] = {"name": "python"}
    nbformat.write(found, target)


def markdown() -> str:
    """The notebook as it was last run: text, code, and what each cell printed."""
    cells = json.loads(SOURCE.read_text())["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell))


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    # Not `python`: pages' python blocks are run one by one.
    yield f"```{{code-block}} python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/html" in data:
            found = _STYLES.sub("", "".join(data["text/html"]))
            yield f"```{{raw}} html\n{found}\n```"
        elif "text/plain" in data:
            yield f"```text\n{''.join(data['text/plain'])}\n```"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
