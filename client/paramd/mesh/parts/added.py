"""Parts that installed packages add to a mesh: `mesh.parts.NAME`."""

from __future__ import annotations

import logging
from typing import Any, Final

from paramd import parts
from paramd.mesh.parts.host import MeshHost, MeshPart

PROCESS: Final = "client"

log = logging.getLogger("paramd")


class AddedParts:
    """The parts by name, each imported and made when it is first asked for."""

    def __init__(self, host: MeshHost) -> None:
        self._host = host
        self._made: dict[str, MeshPart] = {}

    def __dir__(self) -> list[str]:
        return [part.name for part in parts.installed(PROCESS)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # What protocols such as pickling look for is no part.
            raise AttributeError(name)
        if name not in self._made:
            self._made[name] = self._found(name)
        return self._made[name]

    def _found(self, name: str) -> MeshPart:
        added = parts.installed(PROCESS)
        for part in added:
            if part.name == name:
                return parts.loaded(part.value, MeshPart)(self._host)
        known = ", ".join(part.name for part in added) or "none"
        raise AttributeError(
            f"no installed package adds a part {name!r} to a mesh; installed parts: {known}"
        )

    async def close(self) -> None:
        """Close those that were made, the last one first."""
        while self._made:
            name, part = self._made.popitem()
            try:
                await part._closed()
            # A stranger's: our own parts are closed all the same, which lets a paused training go
            # on.
            except Exception:
                log.exception("paramd: the part %s of a mesh was not closed", name)
