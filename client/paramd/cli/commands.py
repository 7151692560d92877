"""The parts of the command line, by name, and the commands that they add.

A part is imported when one of its commands is run. Packages are searched for parts when all
commands are listed, or a command is none of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Final

from paramd import parts
from paramd.cli.parts import CommandPart, Commands
from paramd.cli.shell import say

PROCESS: Final = "command"

OWN: Final = {
    "paramd.cli.status:Status": ("jobs", "status"),
    "paramd.cli.dashboard:Dashboard": ("dashboard",),
    "paramd.cli.insight:Activity": ("why", "logs"),
    "paramd.cli.status:Alerts": ("alerts", "watch"),
    "paramd.cli.tensors:Tensors": ("params", "stats", "grads"),
    "paramd.cli.insight:Weights": ("updates", "spectrum", "verify", "diff"),
    "paramd.cli.integrations:Integrations": ("track", "follow"),
    "paramd.cli.summon:Summon": ("summon",),
    "paramd.cli.edit:Edits": ("edit", "edits", "undo"),
    "paramd.cli.exports:Restores": ("restore",),
    "paramd.cli.marks:Marks": ("mark", "marks", "unmark", "rollback", "set-hyperparameters"),
    "paramd.cli.edit:Pauses": ("pause", "step", "resume"),
    "paramd.cli.exports:Exports": ("export", "exports", "export-schedule"),
    "paramd.cli.integrations:Agents": ("mcp",),
    "paramd.cli.ended:Cleanup": ("cleanup",),
    "paramd.cli.connect:Connect": ("connect",),
    "paramd.cli.doctor:Doctor": ("doctor",),
    "paramd.cli.demo:Demo": ("demo",),
    "paramd.cli.audit:Audit": ("audit",),
    "paramd.cli.serve:Serve": ("control", "sidecar"),
    "paramd.cli.token:Tokens": ("token",),
    "paramd.cli.context_command:Contexts": ("context",),
    "paramd.cli.serve:Certs": ("certs",),
}
"""Our parts and the names of their commands, in the order in which the help lists these."""


class PartCommands(MutableMapping[str, Any]):
    """Commands by name: ours, then those of installed packages."""

    def __init__(self) -> None:
        self._own = {name: part for part, names in OWN.items() for name in names}
        self._made: dict[str, Any] = {}
        self._searched = False

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name in self._own:
                self._made |= _commands_of(parts.loaded(self._own[name], CommandPart))
            else:
                self._add_installed()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        self._add_installed()
        yield from self._own
        yield from [name for name in self._made if name not in self._own]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name}: commands are not taken away")

    def _add_installed(self) -> None:
        if self._searched:
            return
        self._searched = True
        for entry in parts.installed(PROCESS):
            whose = f"{entry.name} of {entry.package}"
            try:
                added = _commands_of(parts.loaded(entry.value, CommandPart))
            # Whatever a package does as it is imported: our own commands work on.
            except Exception as error:
                say(f"{whose} adds no commands: {type(error).__name__}: {error}")
                continue
            for name, command in added.items():
                if name in self._own or name in self._made:
                    say(f"{whose} adds no command {name}, which there is already")
                else:
                    self._made[name] = command


def _commands_of(kind: type[CommandPart]) -> dict[str, Any]:
    commands = Commands()
    parts.traced(kind(), CommandPart, _tell_call).add_to(commands)
    return dict(commands.made().commands)


def _tell_call(part: str, method: str, took_s: float) -> None:
    say(f"part {part}: {method} took {1e6 * took_s:.0f} us")
