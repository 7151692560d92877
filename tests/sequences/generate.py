"""Sequences by seed: drawn, run, shrunk, told.

What an operation draws depends on the seed and its own number alone, so dropping others changes
nothing of it but the state that it meets.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import psutil

from tests.leaks import open_files
from tests.sequences.changing import CHANGING
from tests.sequences.loops.loops import LOOPS
from tests.sequences.loops.session import OPERATIONS, LoopSession
from tests.sequences.reading import READING
from tests.sequences.session import Counts, DefectError, NotNowError, Session, bounded, patience_s
from tests.sequences.striking import STRIKING

Operation = Callable[[Session, Random], str]
ALL: dict[Operation, int] = {**READING, **CHANGING, **STRIKING}
BY_NAME = {operation.__name__: operation for operation in ALL}
OF_LOOPS = {operation.__name__: operation for operation in OPERATIONS}
HANG_S = 90.0
MOST_TRIES = 10
"""Runs that look for a shorter sequence; each starts a training."""
LOOK_S, WARM_LOOKS, ENOUGH_LOOKS = 60.0, 5, 20
GROWN_BYTES, GROWN_FILES = 32 << 20, 4
"""More than this from the first quarter of a process' life to its last is a leak."""


@dataclass(frozen=True)
class Item:
    """One operation of a sequence, and its number, which is what it draws by."""

    number: int
    name: str


@dataclass
class Failure:
    """What went wrong, and what was run until then."""

    error: BaseException
    items: Sequence[Item]


@dataclass
class Beside:
    """What ran beside the operations of loops: answers, refusals and verified updates."""

    answers: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    verified: Counter[str] = field(default_factory=Counter)

    def add(self, session: LoopSession) -> None:
        """Those of one session."""
        if session.readers is not None:
            self.answers += session.readers.answers
            self.refused += session.readers.refused
        if session.verifier is not None:
            self.verified += session.verifier.told


class Watch:
    """Private memory and descriptors, but snapshots', of a job's processes, each minute."""

    def __init__(self) -> None:
        self.looks: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._next_s = 0.0

    def look(self, session: Session) -> None:
        """Once a minute; those of the client are descriptors alone: the reference is in it."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_S
        found = [("rank", psutil.Process(rank.process.pid)) for rank in session.ranks]
        found += [(name, one) for name in ("sidecar", "control") for one in session.helpers(name)]
        found.append(("client", psutil.Process()))
        for name, process in found:
            with suppress(psutil.Error):
                size = 0 if name == "client" else process.memory_full_info().uss
                looks = self.looks.setdefault((name, process.pid), [])
                # How many snapshots are kept is what the sequence asked for, within a budget.
                files = [x for x in open_files(process.pid).values() if "paramd-snapshot" not in x]
                looks.append((size, len(files)))

    def tell(self) -> list[str]:
        """Rows of those that lived long enough, early and late; those that grew say so."""
        rows = []
        for (name, _), all_looks in self.looks.items():
            looks = all_looks[WARM_LOOKS:]
            if len(looks) < ENOUGH_LOOKS:
                continue
            part = len(looks) // 4
            (early, files), (late, files_late) = (
                (statistics.median(x for x, _ in some), statistics.median(x for _, x in some))
                for some in (looks[:part], looks[-part:])
            )
            grew = late > early + GROWN_BYTES or files_late > files + GROWN_FILES
            rows.append(
                f"{name:8} {len(looks)} min: {early / 2**20:.1f} -> {late / 2**20:.1f} MiB, "
                f"{files:.0f} -> {files_late:.0f} descriptors{' GREW' * grew}"
            )
        return rows


def drawn(seed: int, count: int, loop: str = "") -> list[Item]:
    """The first operations of a seed; `loop`: of a training with that one."""
    rng = random.Random(f"sequence {seed}")
    operations = OPERATIONS if loop else ALL
    names = rng.choices([o.__name__ for o in operations], list(operations.values()), k=count)
    if loop:
        names = ["idle" if name in LOOPS[loop].without else name for name in names]
    return [Item(number, name) for number, name in enumerate(names)]


def run(
    kind: str, seed: int, items: Sequence[Item], *, loop: str = "", verifies: bool = False,
    reader_count: int = 0, until_s: float = float("inf"), tell: Callable[[str], object] = print,
    counts: Counts | None = None, beside: Beside | None = None,
) -> Failure | None:  # fmt: skip
    """Runs a sequence on a new training.

    Args:
        loop: What it does in its loop; empty: what `training.py` does.
        verifies: Whether its updates are verified all the time beside the operations.
        reader_count: Threads that read all the time beside the operations, of a loop.
        beside: What these did is added here, however the sequence ends.
    """
    done: list[Item] = []
    watch, counts = Watch(), counts if counts is not None else Counts()
    made = (
        LoopSession(kind, counts=counts, loop=loop, verifies=verifies, reader_count=reader_count)
        if loop
        else Session(kind, counts=counts)
    )
    try:
        with made as session:
            for item in items:
                if time.monotonic() > until_s:
                    break
                done.append(item)
                watch.look(session)
                try:
                    tell(f"{item.number:5} {item.name:22} {_one(session, seed, item, loop)}")
                    session.check_beside()
                except NotNowError as reason:
                    tell(f"{item.number:5} {item.name:22} - {reason}")
                except Exception as error:
                    tell(f"{item.number:5} {item.name:22} FAILED {error}")
                    tell(_logs(session))
                    raise
            if isinstance(session, LoopSession):
                session.end_beside()
                session.check_beside()
            rows = watch.tell()
            for row in rows:
                tell(row)
            if any("GREW" in row for row in rows):
                raise DefectError("\n".join(rows))
    except Exception as error:
        return Failure(error, done)
    finally:
        if isinstance(made, LoopSession) and beside is not None:
            beside.add(made)
    return None


def _one(session: Session, seed: int, item: Item, loop: str) -> str:
    rng = Random(f"{seed} {item.number} {item.name}")
    operation = OF_LOOPS[item.name] if loop else BY_NAME[item.name]
    return bounded(lambda: operation(session, rng), patience_s(HANG_S))


def _logs(session: Session) -> str:
    told = []
    for path in session.folder.glob("state/*/*.log"):
        lines = path.read_text(errors="replace").splitlines()
        told += [f"  {path.name}: {x[:300]}" for x in lines if '"error"' in x or "Error" in x][-3:]
    told += [f"  rank {r.rank}: {x[:300]}" for r in session.ranks
             for x in r.stderr.splitlines() if "Error" in x][-6:]  # fmt: skip
    return "\n".join(told)


def shrunk(
    kind: str, seed: int, failure: Failure, tell: Callable[[str], object], loop: str = ""
) -> Failure:
    """A shorter sequence that fails, too: its end alone if that does, then less of that."""
    best, tries = failure, 0

    def fails(items: Sequence[Item]) -> bool:
        nonlocal best, tries
        tries += 1
        found = run(kind, seed, items, loop=loop, tell=lambda _: None)
        if found is not None and isinstance(found.error, DefectError):
            tell(f"  {len(found.items)} operations fail, too: {str(found.error)[:160]}")
            best = found
            return True
        return False

    size = 4
    while size < len(best.items) and tries < MOST_TRIES // 2:
        if fails(failure.items[-size:]):
            break
        size *= 3
    part = max(1, len(best.items) // 2)
    while part and tries < MOST_TRIES:
        for begin in range(0, len(best.items) - 1, part):
            rest = [*best.items[:begin], *best.items[begin + part :]]
            if tries >= MOST_TRIES or (rest and fails(rest)):
                break
        else:
            part //= 2
    return best
