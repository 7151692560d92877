"""Edits of a running mesh: on all ranks at one step, or on none, whoever dies meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paramd.errors import ParamdError
from paramd.mesh.edits.calls import EditState
from paramd.mesh.mesh import Mesh
from tests.longer import sample
from tests.longer import seconds as longer
from tests.multiprocess.frozen import Held, edit_to, frozen
from tests.multiprocess.truth import connect_to

SECONDS = longer(2.0, 60.0)

CASES = [
    ("ddp", 2, "auto"),
    ("fsdp1-full", 2, "auto"),
    ("fsdp1-full-orig", 3, "auto"),
    ("fsdp1-full-orig", 2, "mirror"),
    ("fsdp2", 2, "auto"),
    ("hsdp", 4, "auto"),
    ("tp-fsdp2", 4, "auto"),
    ("tp-fsdp2", 4, "mirror"),
    ("tp-ddp", 4, "auto"),
]
SAMPLE = [("fsdp1-full", 2, "auto"), ("tp-fsdp2", 4, "mirror")]


@dataclass(slots=True)
class Seen:
    """What readers saw while edits went."""

    answers: int = 0
    values: set[float] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def read_all(mesh: Mesh, seen: Seen, lock: threading.Lock, end: threading.Event) -> None:
    """Reads everything again and again: each answer must hold one value, never an older one."""
    newest = float("-inf")
    while not end.is_set():
        try:
            found = mesh.summon("*")
        except ParamdError as error:
            with lock:
                seen.wrong.append(f"refused: {error}")
            continue
        values = {float(v) for tensor in found.values() for v in tensor.float().unique()}
        with lock:
            seen.answers += 1
            seen.values |= values
            if len(values) != 1:
                seen.wrong.append(f"step {found.step} mixes {sorted(values)[:4]}")
            elif min(values) < newest:
                seen.wrong.append(f"{min(values)} after {newest}")
        newest = max(values)


def enough(seen: Seen, seconds: float) -> bool:
    """Whether readers have seen edits come and go; a busy machine takes longer."""
    return seconds > SECONDS and (len(seen.values) > 4 or seconds > 20 * SECONDS)


@pytest.mark.parametrize(("kind", "world_size", "arena"), sample(CASES, SAMPLE))
def test_every_read_is_uniform_while_edits_go(
    kind: str, world_size: int, arena: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_ARENA", arena)
    held: Held = []
    seen, lock, end = Seen(), threading.Lock(), threading.Event()
    with (
        frozen(tmp_path, kind, world_size, held=held) as ranks,
        connect_to(ranks.state_dir, "frozen") as editor,
        connect_to(ranks.state_dir, "frozen") as reader,
    ):
        readers = [
            threading.Thread(target=read_all, args=(reader, seen, lock, end)) for _ in range(2)
        ]
        for thread in readers:
            thread.start()
        value, begin_s = 0, time.monotonic()
        try:
            while not enough(seen, time.monotonic() - begin_s):
                value += 1
                assert edit_to(editor, value).state is EditState.APPLIED
        finally:
            end.set()
            for thread in readers:
                thread.join()
        last = editor.summon("*")
        assert all(bool((tensor == value).all()) for tensor in last.values())
        assert {row.state for row in editor.edits(limit=1000)} == {EditState.APPLIED}
    print(f"{kind} x{world_size} {arena}: {value} edits, {seen.answers} answers")
    assert seen.wrong == []
    assert seen.values <= set(map(float, range(value + 1)))
    assert len(seen.values) > 2
    # Behind a flat parameter lies padding, which no edit reaches.
    allowed = {value, 0} if kind == "fsdp1-full" else {value}
    assert all(value in found and set(found) <= allowed for r in held for found in r.values())
