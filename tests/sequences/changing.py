"""Operations that change the training: edits, undo and redo, holds, rollbacks, exports."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

from paramd.errors import ConflictError, ExhaustedError, NotFoundError
from paramd.mesh.edits.calls import Edit
from tests.longer import busy
from tests.sequences.model import COUNT, SHAPES, TIED, TRACE
from tests.sequences.reading import sliced
from tests.sequences.reference import Event, Incarnation, Index, Op, same, touches, undone, value
from tests.sequences.session import CALL_S, STARVED, DefectError, NotNowError, Session, wait_for

MOST_MARKS = 3
OLDEST_MARK = 150
"""Steps after which a mark is forgotten: what follows a rollback is waited for."""


def edit(s: Session, rng: Random) -> str:
    """One edit of one or several parameters, of any kind; perhaps only at a certain step."""
    targets = _targets(s, rng)
    kind = rng.choice(["fill", "add", "add data", "mul", "set", "lerp", "clamp"])
    reset, note = rng.random() < 0.2, s.note()
    arguments, ops = _edit_of(kind, targets, rng)
    if_step = s.held_at if s.held_at is not None and rng.random() < 0.5 else None
    event = Event(kind, ops, reset)

    def call() -> Edit:
        return s.mesh.edit(
            *arguments["patterns"], **arguments["options"], reset_moments=reset, note=note,
            if_step=if_step, timeout=CALL_S,
        )  # fmt: skip

    done = s.change(event, call, note, refused=None if s.disturbed else False)
    if if_step is not None and done.step != if_step:
        raise DefectError(f"applied at step {done.step}, asked for {if_step}")
    return f"{kind} {sorted({op.name for op in ops})} reset={reset}, step {done.step}"


def _targets(s: Session, rng: Random) -> list[tuple[str, Index]]:
    """Names and regions; one region, or several whole parameters."""
    names = [n for n in s.subjects if n in s.shown] or s.shown
    if rng.random() < 0.3:
        found = rng.sample(names, min(len(names), rng.randint(2, 3)))
        distinct = {TIED.get(n, n): n for n in found}
        return [(n, _whole(n)) for n in distinct.values()]
    last = s.now.events[-1]
    # Edits of the same elements are what undo has to tell apart.
    again = last is not None and last.ops and not s.subjects and rng.random() < 0.5
    name = last.ops[0].name if last is not None and again else rng.choice(names)
    shape = SHAPES[TIED.get(name, name)]
    if not shape or rng.random() < 0.5:
        return [(name, _whole(name))]
    return [(name, tuple(_some(size, rng) for size in shape))]


def _whole(name: str) -> Index:
    return tuple(slice(0, size) for size in SHAPES[TIED.get(name, name)])


def _some(size: int, rng: Random) -> slice:
    begin = rng.randrange(size)
    return slice(begin, rng.randint(begin + 1, size))


def _edit_of(
    kind: str, targets: list[tuple[str, Index]], rng: Random
) -> tuple[dict[str, Any], list[Op]]:
    """What `mesh.edit` is given, and what it is to do."""
    number = rng.choice([-1.5, -0.5, 0.25, 0.5, 2.0])
    patterns = [n if i == _whole(n) else sliced(n, i) for n, i in targets]
    effects: dict[str, Callable[[torch.Tensor], object]] = {
        "fill": lambda x: x.fill_(number),
        "add": lambda x: x.add_(number),
        "mul": lambda x: x.mul_(number),
        "clamp": lambda x: x.clamp_(-abs(number), abs(number)),
    }
    if kind in effects:
        options = {kind: number if kind != "clamp" else (-abs(number), abs(number))}
        undo = (lambda x: x.add_(-number)) if kind == "add" else None
        ops = [Op(TIED.get(n, n), i, effects[kind], undo) for n, i in targets]
        return {"patterns": patterns, "options": options}, ops
    word = kind.partition(" ")[0]
    factor = {"add": 0.5, "lerp": 0.25, "set": None}[word]
    operands, ops = {}, []
    for (name, index), pattern in zip(targets, patterns, strict=True):
        size = tuple(i.stop - i.start for i in index)
        data = torch.tensor(
            [rng.randint(-32, 32) / 8 for _ in range(int(torch.Size(size).numel()))]
        ).reshape(size)
        operands[pattern] = data
        ops.append(_with_data(word, TIED.get(name, name), index, data))
    more = {"weight": factor} if factor is not None else {}
    if len(targets) > 1:
        return {"patterns": [], "options": {word: operands, **more}}, ops
    return {"patterns": patterns, "options": {word: operands[patterns[0]], **more}}, ops


def _with_data(word: str, name: str, index: Index, data: torch.Tensor) -> Op:
    if word == "set":
        return Op(name, index, lambda x: x.copy_(data))
    if word == "lerp":
        return Op(name, index, lambda x: x.lerp_(data.to(x.dtype), 0.25))
    return Op(
        name, index,
        lambda x: x.add_(data.to(x.dtype), alpha=0.5),
        lambda x: x.add_(data.to(x.dtype), alpha=-0.5),
    )  # fmt: skip


def edit_late(s: Session, rng: Random) -> str:
    """An edit for a step that is past: to be refused, and to change nothing."""
    note = s.note()
    event = Event("edit of a past step", [Op("one.weight", (slice(0, 1),), lambda x: x.fill_(9))])
    s.change(
        event, lambda: s.mesh.edit("one.weight", fill=9.0, if_step=1, note=note, timeout=CALL_S),
        note, refused=True,
    )  # fmt: skip
    return "applied"


def edit_dry(s: Session, rng: Random) -> str:
    """What an edit would do."""
    if s.mirrored:
        raise NotNowError("mirrored")
    done = s.ask(
        "dry run", lambda: s.mesh.edit("frozen.weight", mul=2.0, dry_run=True, timeout=CALL_S)
        if "frozen.weight" in s.names
        else s.mesh.edit("one.weight", mul=2.0, dry_run=True, timeout=CALL_S)
    )  # fmt: skip
    if done.before is None or done.after is None:
        raise DefectError(f"dry run: {done} has no ranges")
    return f"norm {done.before.norm:.4g} to {done.after.norm:.4g}"


def edit_without_waiting(s: Session, rng: Random) -> str:
    """Committed and let go; perhaps aborted, which the trainers may have overtaken."""
    note, number = s.note(), rng.choice([0.5, 3.0])
    name = rng.choice([n for n in s.subjects if n in s.names] or s.names)
    event = Event("add, not waited for", [
        Op(name, _whole(name), lambda x: x.add_(number), lambda x: x.add_(-number))
    ])  # fmt: skip
    aborts = rng.random() < 0.5

    def call() -> Edit:
        begun = s.mesh.edit(name, add=number, note=note, wait=False, timeout=CALL_S)
        if aborts:
            try:
                return s.mesh.abort_edit(begun.id)
            except ConflictError:
                pass
        return s.mesh.get_edit(begun.id, wait=True, timeout=CALL_S)

    done = s.change(event, call, note, refused=None if aborts else False)
    return f"{name}, step {done.step}"


def undo(s: Session, rng: Random) -> str:
    """Undoes an edit, an undo, a rollback or hyper-parameters, of the last ones made."""
    events = [e for e in s.now.events[-6:] if e is not None and e.id]
    # What was undone and done again is undone by undoing the last of these.
    events = [e for e in events if not any(o is not None and o.undoes is e for o in s.now.events)]
    if not events:
        raise NotNowError("there is nothing to undo")
    target = rng.choice(events)
    if target.lives != s.lives:
        raise NotNowError("a sidecar that knew how has ended")
    later = s.now.events[s.now.events.index(target) + 1 :]
    overlapping = [e for e in later if e is not None and touches(target, e, SHAPES)]
    # An original edit that is in effect; undos are in pairs with what they undo.
    in_effect = [e for e in overlapping if e.undoes is None and not _is_undone(s, e)]
    force = bool(overlapping) and rng.random() < 0.3
    refused = None if overlapping and not in_effect else bool(in_effect)
    event = undone(target)
    done = s.change(
        event, lambda: s.mesh.undo(target.id, force=force, timeout=CALL_S), target.id,
        refused=False if force and target.back_to is None else None if force else refused,
    )  # fmt: skip
    if event.back_to is not None:
        s.counts.rollbacks += 1
    return f"of {target.what}, force={force}, step {done.step}"


def _is_undone(s: Session, event: Event) -> bool:
    return any(e is not None and e.undoes is event and not _is_undone(s, e) for e in s.now.events)


def hyperparameters(s: Session, rng: Random) -> str:
    """Another rate, or another momentum."""
    values = rng.choice([{"lr": 2.0**-7}, {"lr": 2.0**-5}, {"momentum": 0.25}, {"momentum": 0.5}])
    note = s.note()
    done = s.change(
        Event("rates", rates=values),
        lambda: s.mesh.set_hyperparameters("group 0", note=note, timeout=CALL_S, **values),
        note,
    )
    return f"{values}, step {done.step}"


def mark(s: Session, rng: Random) -> str:
    """Keeps the present state, and forgets old ones."""
    if s.resume != "auto":
        raise NotNowError("states are not kept")
    for name, (step, _, _) in list(s.marks.items()):
        if len(s.marks) >= MOST_MARKS or s.ask("step", s.mesh.status).step > step + OLDEST_MARK:
            s.ask("unmark", lambda: s.mesh.unmark(name))  # noqa: B023
            del s.marks[name]
    name = f"mark {s.note()}"
    fit = (ConflictError, ExhaustedError) if s.disturbed or s.held_at is not None else ()
    found = s.ask("mark", lambda: s.mesh.mark(name, timeout=CALL_S), fit=fit)
    s.marks[name] = (found.step, s.now.state(s.now.edits, found.step), s.lives)
    return f"step {found.step}"


def rollback(s: Session, rng: Random) -> str:
    """Back to a mark."""
    names = [n for n, (_, _, lives) in s.marks.items() if lives == s.lives]
    if not names:
        raise NotNowError("no mark that surely lives")
    name, note = rng.choice(names), s.note()
    step, state, _ = s.marks[name]
    done = s.change(
        Event("rollback", back_to=(step, state)),
        lambda: s.mesh.rollback(name, note=note, timeout=CALL_S), note,
    )  # fmt: skip
    s.counts.rollbacks += 1
    if s.held_at is not None:
        s.held_at = step
    return f"to step {step} from {done.step}"


def rollback_standing(s: Session, rng: Random) -> str:
    """Back to a state that the sidecars keep by themselves."""
    if s.resume != "auto":
        raise NotNowError("states are not kept")
    s.running()
    kept = [m for m in s.ask("marks", s.mesh.marks) if not m.name and m.whole]
    if not kept:
        raise NotNowError("there is none")
    (to, note), history = (rng.choice(kept).step, s.note()), s.now
    # Until it is known which state of that step it was, any counts as gone back to.
    event = Event("rollback to a step", back_to=(to, s.reference.first))
    try:
        done = s.change(
            event, lambda: s.mesh.rollback(to, note=note, timeout=CALL_S), note, refused=None
        )
    except NotFoundError as error:
        raise NotNowError(f"the next one has replaced it meanwhile: {error}") from error
    s.counts.rollbacks += 1
    s.held_at = None
    found = s.ask("an answer", lambda: s.mesh.summon("*", timeout=CALL_S))
    for edits in range(history.edits - 1, -1, -1):
        if not history.had(edits, to):
            continue
        state = history.state(edits, to)
        there = Incarnation(to, state).state(0, found.step)
        if all(same(x, value(there, n)) for n, x in found.items()):
            event.back_to = history.begins[-1] = (to, state)
            history.forget(history.edits)
            return f"to step {to}, edits {edits}, from {done.step}"
    raise DefectError(f"rollback to step {to} from {done.step} led to no state of that step")


def pause(s: Session, rng: Random) -> str:
    """Holds the training."""
    if s.held_at is not None:
        raise NotNowError("it is held")
    hold = s.ask("pause", lambda: s.mesh.pause(lease=2.0 * s.slower(), timeout=CALL_S))
    s.held_at = hold.step
    return f"at step {hold.step}"


def step(s: Session, rng: Random) -> str:
    """Some updates of a held training."""
    if s.held_at is None:
        raise NotNowError("it runs")
    # On a starved machine the lease, which is short, ends before it is renewed.
    count, fit = rng.randint(1, 5), (ConflictError,) if s.disturbed or busy() > STARVED else ()
    try:
        hold = s.ask("step", lambda: s.mesh.step(count, timeout=CALL_S), fit=fit)
    except NotNowError:
        s.running()
        raise
    if hold.step != s.held_at + count and not s.disturbed:
        raise DefectError(f"step({count}) from {s.held_at} led to {hold.step}")
    s.held_at = hold.step
    return f"{count}, to step {hold.step}"


def resume(s: Session, rng: Random) -> str:
    """Lets it go."""
    if s.held_at is None:
        raise NotNowError("it runs")
    s.running()
    return ""


def writeback(s: Session, rng: Random) -> str:
    """Summons, changes in place, writes back: paused, or as differences."""
    pause, note = rng.random() < 0.6, s.note()
    name = rng.choice([n for n in s.subjects if n in s.names] or s.names)
    number = rng.choice([0.5, -1.0, 2.0])
    if s.held_at is not None:
        s.running()
    event = Event("writeback", [Op(name, _whole(name), lambda x: x)])

    def call() -> Edit:
        with s.mesh.writeback(name, pause=pause, note=note, timeout=CALL_S) as found:
            before = found[name].clone()
            found[name].mul_(number)
            after = found[name].clone()
            change = after - before
        if pause:
            event.ops = [Op(name, _whole(name), lambda x: x.copy_(after))]
        else:
            event.ops = [Op(name, _whole(name), lambda x: x.add_(change), lambda x: x.sub_(change))]
        rows = s.mesh.edits(limit=5)
        return next(row for row in rows if row.note == note)

    done = s.change(event, call, note)
    return f"{name} pause={pause}, step {done.step}"


def export(s: Session, rng: Random) -> str:
    """A checkpoint of one step, read back; perhaps cancelled."""
    key = f"disk/{s.note().replace(' ', '-')}"
    s.running()
    edits = range(s.now.edits, s.now.edits + 1)
    fit = (ConflictError, NotFoundError) if s.disturbed else ()
    include = ("parameters", "buffers", "optimizer") if rng.random() < 0.5 else ("parameters",)

    def run() -> Any:
        begun = s.mesh.export(key, include=include, tied="keep")
        if rng.random() < 0.1:
            begun.cancel()
        return begun.wait(2 * CALL_S)

    found = s.ask("export", run, fit=(*fit, ConflictError))
    _judge_export(s, key, found, edits)
    return f"{key}, step {found.step}"


def export_ended(s: Session, begun: Any) -> str:
    """The end of an export that was begun before; a fault may have cost it."""
    struck = s.disturbed
    found = s.ask("export", lambda: s.mesh.export_ended(begun.info, 2 * CALL_S))
    if str(found.state) != "DONE":
        if not struck:
            raise DefectError(f"export {found.destination} is {found.state}: {found.reason}")
        raise NotNowError(f"{found.state}: {found.reason[:80]}")
    history = s.reference.incarnations[found.incarnation]
    _judge_export(s, found.destination, found, range(history.edits + 1))
    return f"step {found.step}"


def _judge_export(s: Session, key: str, found: Any, edits: range) -> None:
    folder = s.folder / "exports" / found.destination.partition("/")[2]
    told = json.loads((folder / "paramd-export.json").read_text())
    if (told["incarnation"], told["step"]) != (found.incarnation, found.step):
        raise DefectError(f"export {key}: {told['step']} in the manifest, {found.step} in the list")
    got: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        got |= {n: x for n, x in load_file(file).items() if n in (*s.shown, TRACE, COUNT)}
    state = s.judge(f"export {found.destination}", found, got, edits=edits)
    s.exports[found.destination] = (found.step, state)


def restore(s: Session, rng: Random) -> str:
    """The parameters of an export, as one edit."""
    if not s.exports:
        raise NotNowError("there is no export")
    key = rng.choice(sorted(s.exports))
    (_, state), note = s.exports[key], s.note()

    def put(name: str) -> Op:
        return Op(name, _whole(name), lambda x: x.copy_(value(state, name)))

    done = s.change(
        Event("restore", [put(name) for name in s.names]),
        lambda: s.mesh.restore(key, note=note, timeout=2 * CALL_S), note,
    )  # fmt: skip
    return f"{key}, step {done.step}"


def schedule(s: Session, rng: Random) -> str:
    """Exports at each so many steps, until the next `schedule_end`."""
    if s.schedules:
        raise NotNowError("there is one")
    every, key = rng.choice([60, 20]), f"disk/every-{s.note().replace(' ', '-')}"
    made = s.ask("schedule", lambda: s.mesh.create_export_schedule(key, every_steps=every))
    s.schedules.append((made["id"], key, s.struck_s))
    s.scheduled_since = s.now.edits  # type: ignore[attr-defined]
    s.scheduled_in = s.incarnation  # type: ignore[attr-defined]
    return f"{key} each {every} steps"


def schedule_end(s: Session, rng: Random) -> str:
    """What a schedule has written is read back; none of it failed."""
    if not s.schedules:
        raise NotNowError("there is none")
    number, key, struck_s = s.schedules[0]
    s.running()
    since: int = s.scheduled_since  # type: ignore[attr-defined]
    undisturbed = struck_s == s.struck_s and s.incarnation == s.scheduled_in  # type: ignore[attr-defined]
    if undisturbed:
        wait_for(lambda: any(e.schedule == number and e.ended for e in s.mesh.exports()),
                 "a scheduled export ends", 3 * CALL_S)  # fmt: skip
    s.ask("delete", lambda: s.mesh.delete_export_schedule(number), fit=(NotFoundError,))
    s.schedules.clear()
    rows = [e for e in s.ask("exports", s.mesh.exports) if e.schedule == number]
    done = [s.mesh.export_ended(e, 2 * CALL_S) if not e.ended else e for e in rows]
    for one in done:
        if str(one.state) == "FAILED" and undisturbed:
            raise DefectError(f"scheduled export {one.destination} failed: {one.reason}")
        if str(one.state) == "DONE" and one.incarnation == s.incarnation:
            history = s.reference.incarnations[one.incarnation]
            begin = since if undisturbed else 0
            _judge_export(s, one.destination, one, range(begin, history.edits + 1))
    return f"{key}: {[(e.step, str(e.state)) for e in done]}"


CHANGING: dict[Callable[[Session, Random], str], int] = {
    edit: 12, edit_late: 1, edit_dry: 2, edit_without_waiting: 3, undo: 10, hyperparameters: 4,
    mark: 5, rollback: 6, rollback_standing: 2, pause: 4, step: 5, resume: 4, writeback: 3,
    export: 3, restore: 1, schedule: 2, schedule_end: 2,
}  # fmt: skip
