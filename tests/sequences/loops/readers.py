"""Threads that read without a pause beside the operations of a loop.

Each has a client of its own and compares every answer, by the whole name that it carries, with what
the ranks have recorded. It knows nothing of the operations beside it: a refusal is counted, a wrong
value, a state that never was, an older state than the one before, and any other error is a finding.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

import paramd
from paramd.errors import ConflictError, ParamdError
from paramd.mesh.mesh import Mesh
from paramd.mesh.results import OptimizerState, Summoned
from tests.sequences.loops.streams import Streams
from tests.sequences.model import COUNT, SHAPES, TIED, TRACE, State
from tests.sequences.reading import LANES, SLICED, sliced, summary_differs
from tests.sequences.reference import value
from tests.sequences.session import JOB, RETRYABLE, DefectError

if TYPE_CHECKING:
    from tests.sequences.loops.session import LoopSession

CALL_S = 4.0
"""Deadline of a read. Short: some wait for a boundary, which a script at rest does not come to."""
AFTER_REFUSAL_S = 0.1
ENDS_S = 3.0
"""How long the end waits for a call that has begun. Its thread ends with it, and holds nothing."""
READERS_OF_A_STREAM = 2
"""So many threads that read stand beside one subscription."""
HELD_SHARE = 0.2
"""Of reads that wait for a boundary, how many are made while the training is held."""


class Reader(threading.Thread):
    """One of them."""

    def __init__(self, session: LoopSession, number: int) -> None:
        super().__init__(daemon=True)
        self._session, self._number = session, number
        self._rng = Random(f"reader {session.loop} {number}")
        self._newest = (0, 0, 0)
        self.ends = threading.Event()
        self.failed: Exception | None = None
        self.answers: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def run(self) -> None:
        while not self.ends.is_set() and self.failed is None:
            try:
                mesh = paramd.connect(job=JOB, timeout=15)
            except RETRYABLE as error:
                self._refuse(error)
                continue
            except Exception as error:
                self._fail("connect", error)
                return
            with mesh:
                while not self.ends.is_set() and self.failed is None:
                    self._read(mesh, self._rng.choices(list(READS), list(READS.values()))[0])

    def end(self) -> None:
        """Has it end."""
        self.ends.set()

    def _read(self, mesh: Mesh, read: Read) -> None:
        disturbed = self._session.disturbed
        try:
            read(self, mesh)
        except (*RETRYABLE, ConflictError) as error:
            self._refuse(error)
        except DefectError as error:
            self._fail(read.__name__, error)
        except ParamdError as error:
            # After a fault there may be nobody who knows the job.
            if disturbed or self._session.disturbed:
                self._refuse(error)
            else:
                self._fail(read.__name__, error)
        except Exception as error:
            self._fail(read.__name__, error)
        else:
            self.answers[read.__name__] += 1

    def _refuse(self, error: Exception) -> None:
        self.refused[type(error).__name__] += 1
        self.ends.wait(AFTER_REFUSAL_S)

    def _fail(self, what: str, error: Exception) -> None:
        # The end of a session breaks calls, but makes no answer wrong.
        if isinstance(error, DefectError) or not self.ends.is_set():
            self.failed = DefectError(f"reader {self._number}, {what}: {error!r}")

    # Reads

    def summon(self, mesh: Mesh) -> None:
        """Full tensors by one of the lanes."""
        patterns, lane = self._patterns(), self._rng.choice(LANES)
        found = mesh.summon(*patterns, transport=lane, timeout=CALL_S)
        self._judge(f"summon {patterns} by {lane}", found)
        self._in_order(found)

    def summon_slice(self, mesh: Mesh) -> None:
        """Rows of one tensor."""
        first, last = sorted(self._rng.sample(range(65), 2))
        index = (slice(first, last), slice(0, 96))
        found = mesh.summon(sliced(SLICED, index), timeout=CALL_S)
        self._judge(f"rows {first}:{last}", found, wanted=lambda s, _: value(s, SLICED)[index])
        self._in_order(found)

    def buffers(self, mesh: Mesh) -> None:
        """Parameters and buffers of one boundary, by one of the lanes."""
        if self._waits():
            return self.stats(mesh)
        lane = self._rng.choice(LANES)
        found = mesh.summon("*", buffers=True, transport=lane, timeout=CALL_S)
        self._judge(f"buffers by {lane}", found)
        self._in_order(found)

    def unsettled(self, mesh: Mesh) -> None:
        """What there is right now, but not what stands in."""
        if self._session.mirrored:
            return self.summon(mesh)
        patterns = self._patterns()
        found = mesh.summon(*patterns, unsettled=True, timeout=CALL_S)
        if not found.label:
            self._judge(f"unsettled {patterns}", found)

    def stats(self, mesh: Mesh) -> None:
        """Statistics of parameters."""
        table = mesh.stats(*self._patterns(), timeout=CALL_S)
        rows = {row.name: row.summary for row in table}
        self._judge("stats", table, rows, differs=summary_differs)

    def view(self, mesh: Mesh) -> None:
        """Shards in the sidecars' own memory, those of whole tensors."""
        with mesh.view(*self._patterns(), timeout=CALL_S) as found:
            whole = {n: found.tensor(n).clone() for n in found if len(found[n]) == 1}
        self._judge("view", found, whole)

    def download(self, mesh: Mesh) -> None:
        """A file of full tensors."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.safetensors"
            said = mesh.download(path, *self._patterns(), timeout=CALL_S)
            self._judge("download", said, load_file(path))

    def optimizer(self, mesh: Mesh) -> None:
        """Momentum of one step, perhaps with the parameters of it."""
        if self._waits():
            return self.stats(mesh)
        patterns = self._patterns()
        if self._rng.random() < 0.5:
            both = mesh.summon(*patterns, optimizer=True, timeout=CALL_S)
            self._judge("summon(optimizer)", both)
            assert both.optimizer is not None
            state: OptimizerState = both.optimizer
            if state.step != both.step:
                raise DefectError(f"optimizer of step {state.step}, parameters of {both.step}")
        else:
            state = mesh.optimizer(*patterns, timeout=CALL_S)
        moments = {n: x["momentum_buffer"] for n, x in state.items() if "momentum_buffer" in x}
        self._judge("optimizer", state, moments, wanted=_moment)

    def params(self, mesh: Mesh) -> None:
        """Names and shapes."""
        rows = mesh.params(buffers=True, timeout=CALL_S)
        found = {name: tuple(row.shape) for row in rows for name in row.names}
        wanted = {name: SHAPES[TIED.get(name, name)] for name in self._session.shown}
        wanted |= {TRACE: SHAPES["traced.weight"]}
        if self._session.kind != "pipeline":
            # Which has modules of the ranks alone, no module around them.
            wanted[COUNT] = ()
        if found != wanted:
            raise DefectError(f"params: {set(found.items()) ^ set(wanted.items())}")

    def _patterns(self) -> list[str]:
        shown = self._session.shown
        return self._rng.choice(
            [["*"], ["*"], ["blocks.*"], [self._rng.choice(shown)], self._rng.sample(shown, 3)]
        )

    def _waits(self) -> bool:
        """Whether a read would wait for a boundary that does not come soon."""
        return self._session.held_at is not None and self._rng.random() > HELD_SHARE

    def _judge(self, what: str, found: Any, got: Any = None, **how: Any) -> None:
        self._session.judge_by_name(what, found, got if got is not None else found, **how)

    def _in_order(self, found: Summoned) -> None:
        """The same reader never sees a lower step of a history."""
        name = (found.incarnation, found.history, found.step)
        if name < self._newest and not self._session.disturbed:
            raise DefectError(f"{name} after {self._newest}")
        self._newest = max(self._newest, name)


def _moment(state: State, name: str) -> torch.Tensor:
    return state.momentum.get(TIED.get(name, name), torch.tensor(float("nan")))


Read = Callable[[Reader, Mesh], None]
READS: dict[Read, int] = {
    Reader.summon: 10, Reader.summon_slice: 3, Reader.buffers: 5, Reader.unsettled: 4,
    Reader.stats: 4, Reader.view: 4, Reader.download: 2, Reader.optimizer: 3, Reader.params: 1,
}  # fmt: skip
"""Reads, with how often they come."""


class Readers:
    """All of one session: threads with a client each, and subscriptions of one more."""

    def __init__(self, session: LoopSession, count: int) -> None:
        self._readers = [Reader(session, number) for number in range(count)]
        streams = Streams(session, -(-count // READERS_OF_A_STREAM))
        self._all: list[Reader | Streams] = [*self._readers, streams]

    def start(self) -> None:
        """Starts them."""
        for one in self._all:
            one.start()

    @property
    def failed(self) -> Exception | None:
        """The first finding."""
        return next((one.failed for one in self._all if one.failed is not None), None)

    @property
    def answers(self) -> Counter[str]:
        """Answers that were compared and right, by the kind of read."""
        return sum((one.answers for one in self._all), Counter())

    @property
    def refused(self) -> Counter[str]:
        """Refusals, by the kind of error."""
        return sum((one.refused for one in self._all), Counter())

    def end(self) -> None:
        """Ends them."""
        for one in self._all:
            one.end()
        for one in self._all:
            if one.is_alive():
                one.join(ENDS_S)
