"""Whatever a rank, a store or a file says, no command lets it drive a terminal."""

import asyncio
import io
import json
import logging
import sqlite3
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paramd.cli.main import app, main
from paramd.cli.output import json_text
from paramd.cli.shell import run, say
from paramd.errors import ParamdError
from paramd.v1 import common_pb2, control_pb2, sidecar_pb2
from tests.integration.control_process import (
    JOB,
    TOKEN,
    Control,
    FakeSidecar,
    control_plane,
    joined,
    serving,
)
from tests.longer import share

FORGED = "paramd: job run, all ranks healthy"
EVIL = (
    f"\x1b]52;c;cm0gLXJmIH4K\x07\x1b]0;pwned\x07\x1b[2K\r{FORGED}\x1b[8m\x9b31m\u202e\n{FORGED}\n"
)
"""Sets the clipboard and the title, clears a line, hides what follows, turns it around; and a line
of its own."""

WALKED: dict[str, tuple[str, ...]] = {
    "jobs": (), "status": (), "why": (), "logs": ("0",), "alerts": (), "params": (),
    "watch": (), "stats": (), "diff": ("1", "2"), "summon": ("*",), "marks": (), "exports": (),
    "edits": (),
    "audit list": (), "audit verify": (), "doctor": (), "spectrum": ("w",),
    "verify": (), "updates": (), "edit": ("w",),
    "pause": (), "unmark": ("m",), "rollback": ("m",), "undo": ("1" * 32,),
    "restore": ("export:" + "1" * 32,), "step": ("1",), "resume": (), "mark": ("m",),
    "set-hyperparameters": ("lr=1",), "export": ("checkpoints/k",),
    "export-schedule list": (), "token list": (), "context list": (),
}  # fmt: skip
"""Commands, and what they are called with; that they fail is no matter, what they print is."""

NOT_WALKED = {
    "grads": "never ends by itself; its rows are a table's",
    "track": "never ends by itself, and prints its own words",
    "follow": "never ends by itself; its rows are JSON",
    "dashboard": "never ends by itself; prints a link",
    "connect": "test_hosts.py: another host's endpoint is parsed, not printed",
    "cleanup": "ends what the others are asked of; prints as they do",
    "mcp": "speaks JSON to a program",
    "demo": "prints what its own training prints",
    "control": "no command of a client", "sidecar": "no command of a client",
    "certs": "no command of a client",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> None:
    """Not looked at here: the fake sidecar's server takes threads and connections when asked."""


def is_plain(text: str) -> bool:
    """Whether nothing in it drives a terminal, and no line of others looks like one of ours."""
    marks = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
    return not marks and not any(line.startswith(FORGED) for line in text.splitlines())


def test_a_message_is_cleaned_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"rank 0 says {EVIL}")
    err = capsys.readouterr().err
    assert is_plain(err)
    assert "pwned" in err


def test_a_warning_and_a_traceback_are_cleaned_line_by_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told() -> None:
        log = logging.getLogger("paramd.of-a-rank")
        log.propagate = False  # as in the program, whose log has no handler
        log.warning("paramd: no frame comes: %s", EVIL)
        raise ParamdError(EVIL)

    assert run(told, debug=True) == 1
    err = capsys.readouterr().err
    assert is_plain(err)
    assert "no frame comes" in err
    assert "Traceback" in err


def test_half_a_character_in_a_document_ends_no_command() -> None:
    assert json_text({"name": "\ud83d"}).encode() == b'{"name": "\\ud83d"}'


class Liar(FakeSidecar):
    """Says `EVIL` wherever a sidecar has text."""

    def report(self, *, incarnation: int = 1, leaving: bool = False) -> control_pb2.JoinRequest:
        found = super().report(incarnation=incarnation, leaving=leaving)
        found.state.phase = common_pb2.PHASE_STALLED
        lie(found.state)
        return found

    async def GetLog(self, request: Any, context: Any) -> Any:
        return lie(sidecar_pb2.GetLogResponse(header=self.header(1, 0)))

    async def InspectTrainer(self, request: Any, context: Any) -> Any:
        return lie(sidecar_pb2.InspectTrainerResponse(header=self.header(1, 0)))

    async def GetMetrics(self, request: Any, context: Any) -> Any:
        return lie(sidecar_pb2.GetMetricsResponse(header=self.header(1, 0)))


def lie(message: Any) -> Any:
    """`message` with `EVIL` in each text that is empty, those of inner messages too."""
    for field in message.DESCRIPTOR.fields:
        if field.name == "header":
            continue
        if field.type == field.TYPE_STRING and not field.is_repeated:
            if not getattr(message, field.name):
                setattr(message, field.name, EVIL)
        elif field.type == field.TYPE_STRING:
            getattr(message, field.name).append(EVIL)
    return message


@pytest.fixture(scope="module")
def lying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(folder))
        with control_plane("--empty-end-s", "900") as control:
            told, end = threading.Event(), threading.Event()

            async def lies() -> None:
                async with serving(Liar(0)) as one, joined(control, one):
                    told.set()
                    await asyncio.to_thread(end.wait)

            thread = threading.Thread(target=lambda: asyncio.run(lies()))
            thread.start()
            try:
                assert told.wait(60)
                fill_store(folder / JOB / "control.sqlite")
                (folder / JOB / "rank-0.log").write_text(EVIL)
                yield control
            finally:
                end.set()
                thread.join()


def fill_store(path: Path) -> None:
    """What somebody who can write to the store could put there."""
    alert = {
        "id": "1", "job": JOB, "incarnation": 1, "rule": EVIL, "subject": EVIL, "reason": EVIL,
        "severity": EVIL, "state": "resolved", "ranks": [], "name": EVIL, "step": 1,
        "first_seen_s": 1.0, "last_seen_s": 1.0, "resolved_s": 1.0,
    }  # fmt: skip
    with sqlite3.connect(path) as store:
        store.execute("pragma busy_timeout = 10000")
        store.execute(
            "insert into alerts (id, job, incarnation, resolved_s, body) values (?, ?, 1, 1, ?)",
            ("1", JOB, json.dumps(alert)),
        )
        (seq,) = store.execute("select max(seq) from audit where job = ?", (JOB,)).fetchone()
        if seq is not None:
            body = store.execute(
                "select body from audit where job = ? and seq = ?", (JOB, seq)
            ).fetchone()[0]
            lied = {k: EVIL if isinstance(v, str) else v for k, v in json.loads(body).items()}
            store.execute(
                "update audit set body = ? where job = ? and seq = ?",
                (json.dumps(lied), JOB, seq),
            )
    store.close()


def names() -> set[str]:
    """All commands, as they are typed."""
    found = set()
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if name in NOT_WALKED or not hasattr(command, "commands"):
            found.add(name)
        else:
            found |= {f"{name} {inner}" for inner in command.commands}
    return found


CHANGES_NOTHING_FOREIGN = {
    "token create", "token revoke", "context show", "export-schedule create",
    "export-schedule delete",
}  # fmt: skip
"""Print what was given to them."""


def test_no_command_is_forgotten() -> None:
    assert names() == WALKED.keys() | NOT_WALKED.keys() | CHANGES_NOTHING_FOREIGN


@pytest.mark.parametrize("form", share(["table", "json"], 2))
def test_no_command_prints_what_drives_a_terminal(
    form: str, lying: Control, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_OUTPUT", form)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for name, value in (("URL", lying.url), ("TOKEN", TOKEN), ("JOB", JOB)):
        monkeypatch.setenv(f"PARAMD_{name}", value)
    monkeypatch.setenv("PARAMD_STATE_DIR", str(lying.log.parent))
    seen = ""
    for command, arguments in WALKED.items():
        main([*command.split(), *arguments])
        captured = capsys.readouterr()
        assert is_plain(captured.out), (command, captured.out)
        assert is_plain(captured.err), (command, captured.err)
        seen += captured.out + captured.err
    assert "pwned" in seen, "somebody's lie was printed, harmless"
