"""Builds the dashboard into wheels, so that installing one needs no Node; adds the built manual.

An editable install leaves the page alone: `make web` builds it. Without npm the package is
made without the page, and the control plane says how to build it. The manual (`make manual`) is
built from the installed package, so it is only taken along. A source archive has sources only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PAGE = Path("service/paramd_service/control/web")
MANUAL = Path("service/paramd_service/control/manual")
SOURCE = Path("client/web")
SKIP = "PARAMD_PAGE"
"""Set to "skip", it makes a package without the page where npm is there but cannot be used."""


class PageHook(BuildHookInterface[Any]):
    """Runs npm when the page has not been built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the files are gathered."""
        if version == "editable" or self.target_name != "wheel":
            return
        root = Path(self.root)
        if not (root / PAGE / "index.html").is_file():
            self._build(root / SOURCE)
        if not (root / MANUAL / "index.html").is_file():
            self.app.display_warning("the manual is left out: it has not been built (make manual)")
        build_data["artifacts"] += [f"/{PAGE.as_posix()}/**", f"/{MANUAL.as_posix()}/**"]

    def _build(self, source: Path) -> None:
        npm = shutil.which("npm")
        if npm is None or os.environ.get(SKIP) == "skip" or not source.is_dir():
            self.app.display_warning(
                "the dashboard is left out: it has not been built, and npm is not here (make web)"
            )
            return
        for arguments in (["ci"], ["run", "build"]):
            done = subprocess.run([npm, *arguments], cwd=source, check=False)
            if done.returncode:
                raise RuntimeError(
                    f"npm {' '.join(arguments)} failed in {source}, see above; "
                    f"{SKIP}=skip makes a package without the dashboard"
                )
