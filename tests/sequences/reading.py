"""Operations that read: every lane and form, and streams that outlive other operations."""

from __future__ import annotations

import asyncio
import math
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from paramd.errors import ConflictError, ParamdError
from paramd.integrations.trackers import Following, Histogram, Tracker
from paramd.mesh.connect import async_connect
from paramd.mesh.frames.frames import ParamFrame
from tests.sequences.model import COUNT, FROZEN, SHAPES, TIED, TRACE, State
from tests.sequences.reference import Index, value
from tests.sequences.session import (
    CALL_S,
    JOB,
    RETRYABLE,
    DefectError,
    NotNowError,
    Session,
    Stream,
    patience_s,
)
from tests.sequences.training import LABEL

LANES: list[Literal["auto", "same-host", "stream", "grpc"]] = [
    "auto",
    "same-host",
    "stream",
    "grpc",
]
SLICED = "wide.weight"
CLOSE = 1e-5
SILENT_S = 4.0
"""Within this time a log of a training that goes on has two more looks."""
BURST = 40
"""Reads of one burst."""
WRITES = True
"""Whether followers write into their frames."""


def summon(s: Session, rng: Random) -> str:
    """Full tensors, by one of the lanes, perhaps cast, or into memory at hand, with buffers."""
    patterns, lane = s.patterns(rng), rng.choice(LANES)
    dtype = rng.choice([None, None, torch.float64])
    options: dict[str, Any] = {"transport": lane, "dtype": dtype}
    if rng.random() < 0.2 and "*" in patterns:
        s.running()
        options["buffers"] = True
    elif dtype is None and rng.random() < 0.3:
        options["into"] = _room(s, patterns)
    found = s.ask("summon", lambda: s.mesh.summon(*patterns, timeout=CALL_S, **options))
    s.judge(f"summon {patterns} by {lane}", found, wanted=_cast(dtype))
    if found.edits != s.now.edits:
        raise DefectError(f"summon: {found.edits} edits, expected {s.now.edits}")
    s.in_order(found.incarnation, found.step)
    if dtype is None and "buffers" not in options:
        s.summoned = [*s.summoned[-3:], found]
    return f"{patterns} {[*options]} by {lane}, step {found.step}"


def summon_slice(s: Session, rng: Random) -> str:
    """Rows and columns of one tensor."""
    first, last = sorted(rng.sample(range(65), 2))
    index = (slice(first, last), slice(rng.randrange(40), 40 + rng.randrange(1, 57)))
    pattern = sliced(SLICED, index)
    found = s.ask("slice", lambda: s.mesh.summon(pattern, timeout=CALL_S))
    s.judge(f"summon {pattern}", found, wanted=lambda state, _: value(state, SLICED)[index])
    return f"{pattern}, step {found.step}"


def unsettled(s: Session, rng: Random) -> str:
    """What there is right now, perhaps not before other weights stand in."""
    patterns = s.patterns(rng)
    if s.mirrored:
        raise NotNowError("read at boundaries alone")
    until_s = time.monotonic() + rng.choice([0.0, 3.0])
    while True:
        found = s.ask("unsettled", lambda: s.mesh.summon(*patterns, unsettled=True, timeout=CALL_S))
        if found.label not in ("", LABEL):
            raise DefectError(f"unsettled: label {found.label!r}")
        turned = (lambda state, n: -value(state, n)) if found.label else value
        s.judge(f"unsettled ({found.label or 'own'})", found, wanted=turned)
        if found.label or time.monotonic() > until_s:
            return f"step {found.step} {found.label}"


def stats(s: Session, rng: Random) -> str:
    """Statistics of parameters, computed where they are."""
    patterns = s.patterns(rng)
    table = s.ask("stats", lambda: s.mesh.stats(*patterns, timeout=CALL_S))
    s.judge("stats", table, {row.name: row.summary for row in table}, differs=summary_differs)
    return f"{patterns}, step {table.step}"


def summary_differs(got: Any, wanted: torch.Tensor) -> str:
    x = wanted.double()
    for name, number in (
        ("count", x.numel()), ("zero_count", int((x == 0).sum())), ("min", float(x.min())),
        ("max", float(x.max())), ("mean", float(x.mean())), ("norm", float(x.norm())),
    ):  # fmt: skip
        # The mean of what nearly cancels is as close as its parts are.
        near = 1e-9 if name != "mean" else 1e-9 + 1e-8 * float(x.abs().max())
        if not math.isclose(getattr(got, name), number, rel_tol=CLOSE, abs_tol=near):
            return f"{name} {getattr(got, name)!r}, expected {number!r}"
    return ""


def burst(s: Session, rng: Random) -> str:
    """Many short reads, one behind the other, as a page or a loop asks them."""
    chosen = [rng.choice([summon, summon, summon_slice, stats, view]) for _ in range(BURST)]
    for operation in chosen:
        operation(s, rng)
    return f"{len(chosen)} reads"


def standing_in(s: Session, rng: Random) -> str:
    """Other weights stand in and are read as such, beside readers of settled ones."""
    if s.mirrored or not s.stands_in:
        raise NotNowError("none stand in where they could be read")
    s.running()
    patterns = s.patterns(rng)
    subjects, s.subjects = s.subjects, patterns
    judged: list[BaseException] = []

    def beside() -> None:
        try:
            follow(s, rng)
        except NotNowError:
            pass
        except BaseException as error:
            judged.append(error)

    follower = threading.Thread(target=beside, daemon=True)
    follower.start()
    try:
        until_s = time.monotonic() + 4.0
        while True:
            found = s.ask("standing in", lambda: s.mesh.summon(
                *patterns, unsettled=True, timeout=CALL_S))  # fmt: skip
            if found.label or time.monotonic() > until_s:
                break
        told = [operation(s, rng) for operation in (summon, stats, download)]
    finally:
        follower.join(60)
        s.subjects = subjects
    if judged:
        raise judged[0]
    return f"{found.label or 'none stood in'}; {'; '.join(told)}"


class Log(threading.Thread):
    """What `paramd track` writes into a tracker: statistics under their run's name and step."""

    def __init__(self, s: Session) -> None:
        super().__init__(daemon=True)
        self.incarnation, self.since = s.incarnation, s.now.edits
        self.rows: list[tuple[str, int, Mapping[str, float]]] = []
        self._loop = asyncio.new_event_loop()
        self._run = ""

    def run(self) -> None:
        with suppress(ParamdError, asyncio.CancelledError):
            self._loop.run_until_complete(self._log())
        self._loop.close()

    async def _log(self) -> None:
        async with async_connect(job=JOB) as mesh:
            following = Following(mesh, self._opened, ["*"])
            self._task = asyncio.current_task()
            await following.run(0.05)

    def _opened(self, run: str, history: int) -> Tracker:
        self._run = f"{run}-r{history}"
        return self

    def end(self) -> None:
        with suppress(RuntimeError, AttributeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.join(10)

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append((self._run, step, values))

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        raise AssertionError("not asked for")

    def note(self, text: str, step: int) -> None: ...

    def close(self) -> None: ...


def logged(s: Session, rng: Random) -> str:
    """What a tracker is given meanwhile: never silent, never of another state."""
    s.running()
    if s.log is not None and (not s.log.is_alive() or s.log.incarnation != s.incarnation):
        s.end_log()
    if s.log is None:
        s.log = Log(s)
        s.log.start()
    log, seen = s.log, len(s.log.rows)
    disturbed = s.disturbed
    until_s = time.monotonic() + patience_s(SILENT_S if s.log.rows else CALL_S)
    while len(log.rows) < seen + 2 and log.is_alive() and time.monotonic() < until_s:
        time.sleep(0.02)
    rows, log.rows = log.rows, []
    segments = range(log.since, s.now.edits + 1)
    log.since = s.now.edits
    for run, step, values in rows:
        _judge_logged(s, f"{run}, step {step}", step, values, segments)
    if len(rows) < 2 and not disturbed and not s.disturbed:
        raise DefectError(f"the log is silent: {len(rows)} looks since the last time")
    return f"{len(rows)} looks, steps {[step for _, step, _ in rows][-3:]}"


def _is_logged(values: Mapping[str, float], name: str, norm: float) -> bool:
    # Under the first of its names that the training has: a stage begins with the head.
    names = [name, *(tied for tied, of in TIED.items() if of == name)]
    found = next((values[f"{one}/norm"] for one in names if f"{one}/norm" in values), None)
    if found is None:
        # What is not finite is left out: trackers draw nothing of it.
        return not math.isfinite(norm)
    return math.isclose(found, norm, rel_tol=CLOSE, abs_tol=1e-9)


def _judge_logged(
    s: Session, what: str, step: int, values: Mapping[str, float], segments: range
) -> None:
    said: list[str] = []
    for edits in reversed(segments):
        if not s.now.had(edits, step):
            continue
        state = s.now.state(edits, step)
        bad = [
            name
            for name in s.names
            if not _is_logged(values, name, float(value(state, name).double().norm()))
        ]
        if not bad:
            s.counts.answers += 1
            return
        said = said or bad
    raise DefectError(f"log {what}: norms of {said[:4]} are of no state there was")


def optimizer(s: Session, rng: Random) -> str:
    """Momentum and hyper-parameters, perhaps with the parameters of the same step."""
    patterns = s.patterns(rng)
    s.running()
    if rng.random() < 0.5:
        both = s.ask("optimizer", lambda: s.mesh.summon(*patterns, optimizer=True, timeout=CALL_S))
        s.judge("summon(optimizer)", both)
        state = both.optimizer
        assert state is not None
        if state.step != both.step:
            raise DefectError(f"optimizer of step {state.step}, parameters of {both.step}")
    else:
        state = s.ask("optimizer", lambda: s.mesh.optimizer(*patterns, timeout=CALL_S))
    moments = {n: x["momentum_buffer"] for n, x in state.items() if "momentum_buffer" in x}
    nothing = torch.tensor(math.nan)
    here = s.judge("optimizer", state, moments,
                   wanted=lambda found, n: found.momentum.get(TIED.get(n, n), nothing))  # fmt: skip
    if missing := {n for n in state if TIED.get(n, n) in here.momentum} - moments.keys():
        raise DefectError(f"optimizer: no momentum of {missing} at step {state.step}")
    for name, rate in here.rates.items():
        if any(group[name] != rate for group in state.groups):
            raise DefectError(f"optimizer: {name} in {state.groups}, expected {rate}")
    return f"step {state.step}"


def view(s: Session, rng: Random) -> str:
    """Shards in the sidecars' own memory, those of whole tensors."""
    patterns = s.patterns(rng)

    def read() -> tuple[Any, dict[str, torch.Tensor]]:
        with s.mesh.view(*patterns, timeout=CALL_S) as found:
            return found, {n: found.tensor(n).clone() for n in found if len(found[n]) == 1}

    found, whole = s.ask("view", read)
    s.judge("view", found, whole)
    return f"{len(whole)} whole, step {found.step}"


def grads(s: Session, rng: Random) -> str:
    """A new subscription to gradients, of some frames."""
    how = _grads_options(s, rng)
    return subscribed(s, rng, "grads", how["patterns"], how["options"])


def subscribed(
    s: Session, rng: Random, kind: str, patterns: list[str], options: dict[str, Any]
) -> str:
    """A new subscription, of some frames that the reader then writes into."""
    if kind == "follow" and s.mirrored:
        raise NotNowError("mirrored parameters are not followed")
    s.running()
    # After a rollback, so many that the steps that were left are made again.
    count, writes = rng.choice([20, 1, 2, 3]), rng.random() < 0.5
    since, seen = (s.incarnation, s.now.edits), []

    def read() -> None:
        frames = getattr(s.mesh, kind)(*patterns, **options)
        try:
            for frame in islice(frames, count):
                _judge_frame(s, frame, since, options)
                seen.append(frame.step)
                if writes and kind == "follow":
                    spoil(frame)
        finally:
            frames.close()

    s.ask(kind, read, fit=(ConflictError,) if s.disturbed else ())
    return f"{patterns} {options} writes={writes}, updates {seen}"


def _grads_options(s: Session, rng: Random) -> dict[str, Any]:
    patterns = s.patterns(rng)
    kind = rng.choice(["full", "full", "full", "stats"])
    options: dict[str, Any] = {"kind": kind, "every": rng.choice([1, 1, 2])}
    if kind == "full":
        options["dtype"] = rng.choice([None, None, torch.bfloat16])
        options["transport"] = rng.choice(LANES)
    return {"patterns": patterns, "options": options}


def made_again(s: Session, rng: Random) -> str:
    """The very update that a subscription was given last, when a rollback has it made again."""
    kind = rng.choice(["grads", "follow"])
    last = s.captured.get(kind, 0)
    s.running()
    ahead = last - s.ask("status", lambda: s.mesh.status(timeout=CALL_S)).step
    if not 4 < ahead < 100 or s.disturbed:
        raise NotNowError(f"{ahead} updates from {last}")
    hold = s.ask("pause", lambda: s.mesh.pause(timeout=CALL_S))
    # A subscription begins with the second update from now.
    if (ahead := last - 2 - hold.step) > 0:
        s.ask("step", lambda: s.mesh.step(ahead, timeout=2 * CALL_S))
    going_on = threading.Timer(rng.choice([0.7, 0.1]), lambda: s.mesh.resume(timeout=CALL_S))
    going_on.start()
    try:
        return subscribed(s, rng, kind, s.patterns(rng), {})
    finally:
        going_on.join()


def spoil(frame: Any) -> None:
    """What a reader may do with what it was given."""
    for tensor in frame.values() if WRITES else ():
        tensor.zero_()


def _judge_frame(
    s: Session, frame: Any, since: tuple[int, int], options: Mapping[str, Any]
) -> None:
    """Of whatever segment there was since the last frame."""
    s.captured["follow" if isinstance(frame, ParamFrame) else "grads"] = frame.step
    history = s.reference.incarnations.get(frame.incarnation)
    begin = since[1] if since[0] == frame.incarnation else 0
    edits = range(begin, history.edits + 1 if history is not None else 0)
    if isinstance(frame, ParamFrame):
        s.judge(f"follow {dict(options)}", frame, edits=edits)
        return
    got = {n: frame[n] for n in frame if TIED.get(n, n) not in FROZEN}
    if options.get("kind") == "stats":
        s.judge_gradients("grads stats", frame, got, edits, differs=summary_differs)
        return
    dtype = options.get("dtype")
    s.judge_gradients(f"grads {dict(options)}", frame, got, edits,
                      cut=lambda x: x.to(dtype) if dtype is not None else x)  # fmt: skip


def follow(s: Session, rng: Random) -> str:
    """A new subscription to parameters."""
    return subscribed(s, rng, "follow", s.patterns(rng), {"deltas": rng.random() < 0.5})


def open_stream(s: Session, rng: Random) -> str:
    """A subscription that other operations will find open."""
    kind = rng.choice(["grads", "follow", "follow"]) if not s.mirrored else "grads"
    if len(s.streams) >= 3:
        raise NotNowError("there are three")
    s.running()
    name, patterns = s.note(), s.patterns(rng)
    if kind == "grads":
        how = _grads_options(s, rng)
        frames: Iterator[Any] = s.mesh.grads(*how["patterns"], **how["options"])
    else:
        how = {"patterns": patterns, "options": {"deltas": rng.random() < 0.5}}
        frames = s.mesh.follow(*patterns, **how["options"])
    s.streams[name] = Stream(frames, kind, (s.incarnation, s.now.edits), how, s.lives)
    return f"{kind} {how['patterns']} {how['options']}: " + next_frames(s, rng, name)


def next_frames(s: Session, rng: Random, name: str | None = None) -> str:
    """The next frames of a stream that was opened before."""
    if not s.streams:
        raise NotNowError("there is no stream")
    name = name if name is not None else rng.choice(sorted(s.streams))
    stream = s.streams[name]
    s.running()
    seen = []
    for _ in range(rng.choice([10, 1, 2, 3])):
        disturbed = s.disturbed or stream.since[0] != s.incarnation or stream.lives != s.lives
        try:
            frame = next(stream.frames)
        except (StopIteration, *RETRYABLE, ConflictError) as error:
            s.drop(name)
            if disturbed:
                raise NotNowError(f"the stream ended: {str(error)[:80]}") from error
            raise DefectError(f"{stream.kind}: the stream ended: {error!r}") from error
        _judge_frame(s, frame, stream.since, stream.how["options"])
        if stream.kind == "follow" and rng.random() < 0.3:
            spoil(frame)
        s.counts.answers += 1
        stream.since = (frame.incarnation, min(stream.since[1], s.now.edits))
        seen.append(frame.step)
    stream.since = (s.incarnation, stream.since[1])
    return f"{stream.kind} {stream.how['patterns']} updates {seen}"


def close_stream(s: Session, rng: Random) -> str:
    """Ends one."""
    if not s.streams:
        raise NotNowError("there is no stream")
    s.drop(rng.choice(sorted(s.streams)))
    return f"{len(s.streams)} are left"


def diff(s: Session, rng: Random) -> str:
    """What was read before and now, or a mark and now, tensor by tensor."""
    patterns = s.patterns(rng)
    if s.marks and rng.random() < 0.4:
        name = rng.choice(sorted(s.marks))
        _, old, lives = s.marks[name]
        if lives != s.lives:
            raise NotNowError("the mark may have ended with a sidecar")
        source: Any = f"mark:{name}"
        held = set(s.shown)
    elif s.summoned:
        source = rng.choice(s.summoned)
        old = s.reference.incarnations[source.incarnation].state(source.edits, source.step)
        held = set(source)
    else:
        raise NotNowError("nothing was read yet")
    found = s.ask("diff", lambda: s.mesh.diff(source, "now", *patterns, timeout=CALL_S))
    asked = _matching_names(s, patterns)
    if extra := {row.name for row in found} - asked:
        raise DefectError(f"diff with {patterns} has rows of {sorted(extra)[:4]}")
    now = s.now.state(s.now.edits, _step_of(found.b))
    for row in found:
        if row.name in held and not row.problem:
            _judge_difference(f"diff {found.a}, {found.b}", row, old, now)
    return f"{found.a}, {found.b}: {len(found)} rows"


def diff_ahead(s: Session, rng: Random) -> str:
    """Two steps to come."""
    patterns = s.patterns(rng)
    if s.mirrored:
        raise NotNowError("mirrored")
    s.running()
    first, last = "+1", f"+{rng.randint(2, 6)}"
    found = s.ask("diff", lambda: s.mesh.diff(first, last, *patterns, timeout=2 * CALL_S))
    one, other = (s.now.state(s.now.edits, _step_of(label)) for label in (found.a, found.b))
    for row in found:
        _judge_difference(f"diff {found.a}, {found.b}", row, one, other)
    return f"{found.a}, {found.b}"


def _judge_difference(what: str, row: Any, old: State, now: State) -> None:
    a, b = value(old, row.name).double(), value(now, row.name).double()
    changed, largest = int((a != b).sum()), float((b - a).abs().max())
    if row.changed != changed or not math.isclose(row.max_abs, largest, rel_tol=CLOSE):
        raise DefectError(
            f"{what}: {row.name} changed {row.changed} by up to {row.max_abs!r}, expected "
            f"{changed} by up to {largest!r}"
        )


def updates(s: Session, rng: Random) -> str:
    """What the next updates do to each parameter."""
    patterns, steps = s.patterns(rng), rng.choice([1, 1, 3])
    if s.mirrored:
        raise NotNowError("mirrored")
    s.running()
    found = s.ask("updates", lambda: s.mesh.updates(*patterns, steps=steps, timeout=CALL_S))
    for row in found:
        old, now = (s.now.state(s.now.edits, step) for step in (row.step - steps, row.step))
        a, b = value(old, row.name).double(), value(now, row.name).double()
        changed, norm = int((a != b).sum()), float((b - a).norm())
        if row.changed != changed or not math.isclose(row.norm, norm, rel_tol=1e-4, abs_tol=1e-9):
            raise DefectError(
                f"updates: {row.name}, step {row.step}: changed {row.changed}, norm {row.norm!r}; "
                f"expected {changed}, {norm!r}"
            )
    return f"{patterns}, step {found[0].step if found else '-'}"


def spectrum(s: Session, rng: Random) -> str:
    """Singular values of one weight."""
    name = rng.choice(["embed.weight", "wide.weight", "blocks.1.up.weight"])
    found = s.ask("spectrum", lambda: s.mesh.spectrum(name, 3, timeout=CALL_S))
    state = s.now.state(s.now.edits, found.step)
    wanted = torch.linalg.svdvals(value(state, name).double())[:3].tolist()
    if any(
        abs(a - b) > 1e-3 * wanted[0] for a, b in zip(found.singular_values, wanted, strict=False)
    ):
        raise DefectError(
            f"spectrum of {name}, step {found.step}: {found.singular_values}, expected {wanted}"
        )
    return f"{name}, step {found.step}"


def replay(s: Session, rng: Random) -> str:
    """An update of one rank, made again."""
    rank = rng.randrange(s.world_size)
    s.running()
    unshared = s.mirrored or s.kind in ("device", "partial", "deepspeed")
    refusals = (ConflictError,) if unshared else ()
    found = s.ask("replay", lambda: s.mesh.verify(rank=rank, timeout=CALL_S), fit=refusals)
    if found.differing:
        raise DefectError(f"replay: {found.summary()}; {found.differing[:3]}")
    return f"rank {rank}, step {found.step}"


def download(s: Session, rng: Random) -> str:
    """A file of full tensors."""
    patterns = s.patterns(rng)
    with tempfile.TemporaryDirectory(dir=s.folder) as folder:
        path = Path(folder) / "found.safetensors"
        said = s.ask("download", lambda: s.mesh.download(path, *patterns, timeout=CALL_S))
        got = load_file(path)
    s.judge("download", said, got)
    return f"{patterns}, step {said.step}"


def listing(s: Session, rng: Random) -> str:
    """Names, shapes and status."""
    rows = s.ask("params", lambda: s.mesh.params(buffers=True, timeout=CALL_S))
    found = {name: tuple(row.shape) for row in rows for name in row.names}
    wanted = {n: SHAPES[TIED.get(n, n)] for n in s.shown}
    wanted |= {TRACE: SHAPES["traced.weight"]}
    if s.kind != "pipeline":
        # Which has modules of the ranks alone, no module around them.
        wanted[COUNT] = ()
    if found != wanted:
        raise DefectError(f"params: {set(found.items()) ^ set(wanted.items())}")
    table = s.ask("status", lambda: s.mesh.status(timeout=CALL_S))
    return f"step {table.step}, phases {[row.phase for row in table]}"


def together(s: Session, rng: Random) -> str:
    """Readers of different parameters, at the same time."""
    chosen = [rng.choice(TOGETHER) for _ in range(rng.randint(2, 3))]
    said: list[str] = []
    failed: list[BaseException] = []
    s.running()
    before, same_ones = s.subjects, s.patterns(rng)
    if rng.random() < 0.5:
        s.subjects = same_ones

    def run(number: int, operation: Callable[[Session, Random], str]) -> None:
        try:
            said.append(f"{operation.__name__}: {operation(s, Random(seeds[number]))}")
        except NotNowError as error:
            said.append(str(error))
        except BaseException as error:
            failed.append(error)

    seeds = [rng.random() for _ in chosen]
    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(chosen)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    s.subjects = before
    if failed:
        raise DefectError(f"{[o.__name__ for o in chosen]} at once: {failed[0]}") from failed[0]
    if any(thread.is_alive() for thread in threads):
        raise DefectError(f"{[o.__name__ for o in chosen]} at once: hangs")
    return "; ".join(said)


def sliced(name: str, index: Index) -> str:
    """A pattern."""
    return f"{name}[{', '.join(f'{i.start}:{i.stop}' for i in index)}]"


def _matching_names(s: Session, patterns: list[str]) -> set[str]:
    from fnmatch import fnmatchcase

    return {n for n in s.shown if any(fnmatchcase(n, p) for p in patterns)}


def _room(s: Session, patterns: list[str]) -> dict[str, torch.Tensor]:
    names = _matching_names(s, patterns)
    if any(n in names for n in TIED) or any(n in names for n in TIED.values()):
        names -= {*TIED, *TIED.values()}
    return {n: torch.empty_like(value(s.reference.first, n)) for n in names}


def _cast(dtype: torch.dtype | None) -> Callable[[State, str], torch.Tensor]:
    return lambda state, n: value(state, n).to(dtype) if dtype is not None else value(state, n)


def _step_of(label: str) -> int:
    found = re.search(r"step (\d+)", label)
    assert found is not None, label
    return int(found[1])


TOGETHER = [summon, stats, grads, follow, unsettled, optimizer, updates, view]
READING: dict[Callable[[Session, Random], str], int] = {
    summon: 10, summon_slice: 3, unsettled: 4, stats: 5, optimizer: 5, view: 3, grads: 9,
    follow: 7, made_again: 6, open_stream: 4, next_frames: 8, close_stream: 2, diff: 5,
    diff_ahead: 2, updates: 4, spectrum: 2, replay: 4, download: 3, listing: 1, together: 5,
    burst: 6, standing_in: 3, logged: 4,
}  # fmt: skip
"""Operations, with how often they come."""
