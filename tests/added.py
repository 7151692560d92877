"""Packages that add parts, as pip leaves them in a folder."""

from pathlib import Path

from paramd.parts import GROUP


def package(folder: Path, code: str, **entries: str) -> Path:
    """A folder as pip leaves it: a module `greeting`, and the metadata of its package."""
    folder.mkdir()
    (folder / "greeting.py").write_text(code)
    metadata = folder / "greeting-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    return folder
