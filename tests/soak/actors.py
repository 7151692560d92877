"""Users of a job, each a thread that does one thing again and again until the episode is over.

A refusal (any ParamdError) is counted and tried again; everything else fails the episode.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors.torch import load_file

from paramd.errors import ConflictError, DeadlineError, DeniedError, NotFoundError, ParamdError
from paramd.mesh.edits.calls import Edit, EditState
from paramd.mesh.mesh import Mesh
from tests.soak.oracle import GROUPS, Oracle, WrongError, held
from tests.soak.stage import Job, Stage, patience_s
from tests.soak.trainer import mark, role_of

PAUSE_S = 0.1
EDIT_TIMEOUT_S = 8.0
FATE_S = 60.0
REVOKED_S = 2.0
GREATEST = 100_000.0
"""Edited values stay below, so that what they are multiplied with stays finite."""

Work = Callable[["Actor", Mesh], None]


class UnknownError(ParamdError):
    """The training, or the episode, ended before an edit did."""


class Actor(threading.Thread):
    """One user."""

    def __init__(self, lane: str, stage: Stage, job: Job, oracle: Oracle, work: Work) -> None:
        super().__init__(name=f"actor {lane}", daemon=True)
        self.lane, self.stage, self.job, self.oracle = lane, stage, job, oracle
        self.chance = random.Random(f"{stage.plan.number}/{lane}")
        self.rounds = 0
        """How often it has done its work, right."""
        self.failure = ""
        self.last_refusal = ""
        self._work = work
        self._over = threading.Event()

    def stop(self) -> None:
        """Ends it after the work that is under way. Idempotent."""
        self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def run(self) -> None:
        while not self.over:
            try:
                with self.stage.connect(self.job.name) as mesh:
                    while not self.over:
                        self._work(self, mesh)
                        self.rounds += 1
                        self._over.wait(PAUSE_S)
            except ParamdError as error:
                self.refused(error)
            except Exception:
                self.failure = f"{self.lane}: {traceback.format_exc()}"
                return

    def refused(self, error: ParamdError) -> None:
        """Counts it, and gives the job a moment."""
        self.last_refusal = f"{type(error).__name__}: {error}"
        if type(error) is ParamdError:
            # No case that the library knows: the fault that it comes with should explain it.
            print(f"\n  {self.lane}: {error}", flush=True)
        self.oracle.tally.count(self.oracle.tally.refused, type(error).__name__)
        self._over.wait(PAUSE_S)


def summoning(**options: Any) -> Work:
    """Reads everything by one transport."""

    def work(actor: Actor, mesh: Mesh) -> None:
        question = actor.oracle.ask()
        found = mesh.summon("*", **options)
        parameters = {n: t for n, t in found.items() if t.is_floating_point()}
        actor.oracle.judge(actor.lane, question, found.incarnation, found.step, parameters)

    return work


def viewing(actor: Actor, mesh: Mesh) -> None:
    """Shards where they lie."""
    question = actor.oracle.ask()
    with mesh.view("*") as shards:
        values = {
            f"{name}[{i}]": tensor
            for name in shards
            for i, (_, tensor) in enumerate(shards[name])
            if tensor.numel()
        }
        actor.oracle.judge(actor.lane, question, shards.incarnation, shards.step, values)


def reducing(actor: Actor, mesh: Mesh) -> None:
    """Statistics: smallest and largest of each tensor."""
    question = actor.oracle.ask()
    table = mesh.stats("*", histogram=actor.chance.random() < 0.3)
    ranges = {r.name: (r.summary.min, r.summary.max) for r in table if r.summary.count}
    actor.oracle.judge_ranges(actor.lane, question, table.incarnation, table.step, ranges)


def picturing(actor: Actor, mesh: Mesh) -> None:
    """A heatmap of a stamped parameter; its numbers have seven digits."""
    name = actor.chance.choice(["blocks.0.up.weight", "blocks.1.down.weight"])
    question = actor.oracle.ask()
    found = rest(actor.stage, "GET", f"/jobs/{actor.job.name}/params/heatmap", name=name)
    cells = torch.tensor([v for v in found["values"] if v is not None])
    # Seven digits tell all stamps apart, and are exact for what is edited here.
    exact = (cells * 4096).round() / 4096 if role_of(name) == "stamped" else cells
    actor.oracle.judge(actor.lane, question, found["incarnation"], found["step"], {name: exact})


def following(actor: Actor, mesh: Mesh) -> None:
    """Parameters after every third update."""
    last = 0
    for number, frame in enumerate(mesh.follow("blocks.*", every=3)):
        values = dict(frame)
        question = actor.oracle.ask()
        actor.oracle.judge(actor.lane, question, frame.incarnation, frame.step, values, fresh=False)
        _rising(actor, frame.step, last)
        last = frame.step
        if actor.over or number >= 20:
            return


def differentiating(kind: str, transport: str) -> Work:
    """Gradients, frame by frame; those of edited parameters are marked."""

    def work(actor: Actor, mesh: Mesh) -> None:
        last = 0
        stream = mesh.grads("blocks.*", kind=kind, transport=transport)  # type: ignore[arg-type]
        for number, frame in enumerate(stream):
            _rising(actor, frame.step, last)
            last = frame.step
            for name, value in frame.items():
                if role_of(name) == "edited" and value is not None:
                    seen = _seen(value)
                    if seen - {mark(frame.step)}:
                        raise WrongError(
                            f"{actor.lane}: gradient of {name} for update {frame.step} holds "
                            f"{sorted(seen)[:4]}, not {mark(frame.step)}"
                        )
            actor.oracle.tally.count(actor.oracle.tally.answers, actor.lane)
            if actor.over or number >= 20:
                return

    return work


def _seen(value: Any) -> set[float]:
    if isinstance(value, torch.Tensor):
        return set(value.flatten().tolist())
    return {value.min, value.max} if value.count else set()


def _rising(actor: Actor, step: int, last: int) -> None:
    if step <= last:
        raise WrongError(f"{actor.lane}: frame of step {step} after that of {last}")


class Editor:
    """Edits one group, undoes, and knows of every edit whether it was applied."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._number = 0
        self._undoable: tuple[str, float, int] | None = None
        """Edit that can be undone, the value before it, its incarnation."""

    def __call__(self, actor: Actor, mesh: Mesh) -> None:
        """One edit, and what can be read after it."""
        with actor.oracle.locks[self._group]:
            self._edit(actor, mesh)

    def _edit(self, actor: Actor, mesh: Mesh) -> None:
        oracle, salt = actor.oracle, actor.job.now.salt
        now_s = time.monotonic()
        values = oracle.ledger.allowed(self._group, salt, now_s, now_s)
        if len(values) != 1:
            raise UnknownError("an edit was lost with its training; the next one begins anew")
        (value,) = values
        self._number += 1
        undo, self._undoable = self._undoable, None
        if undo is not None and undo[2] == salt and actor.chance.random() < 0.4:
            edit_id, new, _ = undo
            anew = new
            sights = {new: oracle.ledger.begin(self._group, new)}
            edit = ended(
                actor,
                lambda: mesh.undo(edit_id, timeout=EDIT_TIMEOUT_S),
                lambda e: e.undo_of == edit_id,
            )
        else:
            note = f"{self._group}{self._number} of {id(self):x}"
            what, change = self._chosen(actor, value)
            # Training may be restarted meanwhile; then it is its zeros that are changed.
            new, anew = change(value), change(0.0)
            sights = {v: oracle.ledger.begin(self._group, v) for v in {new, anew}}
            edit = ended(actor, lambda: self._ask(mesh, what, note), lambda e: e.note == note)
        oracle.tally.count(
            oracle.tally.edits, edit.state.value if edit is not None else "never begun"
        )
        if edit is None or edit.state is EditState.ABORTED:
            for sight in sights.values():
                oracle.ledger.refused(sight)
        elif edit.state is EditState.APPLIED:
            where = actor.job.start_of(edit.incarnation).salt
            oracle.ledger.applied(self._group, sights.pop(new if where == salt else anew), where)
            for sight in sights.values():
                oracle.ledger.refused(sight)
            if not edit.undo_of:
                self._undoable = (edit.id, value if where == salt else 0.0, where)
        else:
            for sight in sights.values():
                sight.salt = actor.job.start_of(edit.incarnation).salt
            return
        self._read_back(actor, mesh)

    def _chosen(
        self, actor: Actor, value: float
    ) -> tuple[dict[str, Any], Callable[[float], float]]:
        """An operation, and what it makes of a value."""
        fresh = float(self._number % int(GREATEST))
        choices: list[tuple[dict[str, Any], Callable[[float], float]]] = [
            ({"fill": fresh}, lambda _: fresh),
            ({"set": fresh}, lambda _: fresh),
            ({"clamp": (fresh, fresh)}, lambda _: fresh),
            ({"add": 3.0}, lambda before: before + 3.0),
        ]
        if value < GREATEST / 2:
            choices.append(({"mul": 2.0}, lambda before: before * 2.0))
        return actor.chance.choice(choices)

    def _ask(self, mesh: Mesh, what: dict[str, Any], note: str) -> Edit:
        pattern = f"{self._group}*"
        if "set" not in what:
            return mesh.edit(pattern, **what, note=note, timeout=EDIT_TIMEOUT_S)
        tensors = {i.name: torch.full(i.shape, what["set"]) for i in mesh.params(pattern)}
        transport = "grpc" if self._number % 2 else "auto"
        return mesh.edit(set=tensors, transport=transport, note=note, timeout=EDIT_TIMEOUT_S)  # type: ignore[arg-type]

    def _read_back(self, actor: Actor, mesh: Mesh) -> None:
        question = actor.oracle.ask()
        found = mesh.summon(f"{self._group}*")
        actor.oracle.judge(actor.lane, question, found.incarnation, found.step, dict(found))


def ended(actor: Actor, ask: Callable[[], Edit], is_it: Callable[[Edit], bool]) -> Edit | None:
    """Edits, and finds out how it ended whatever the answer was. None: it never began."""
    try:
        return ask()
    except ParamdError as error:
        actor.refused(error)
    deadline_s = time.monotonic() + patience_s(FATE_S)
    while True:
        try:
            with actor.stage.connect(actor.job.name) as mesh:
                found = [e for e in mesh.edits(limit=40) if is_it(e)]
                if not found:
                    return None
                if found[0].state in (EditState.STAGING, EditState.STAGED):
                    # Given up between staging and commit, it would wait until it expires.
                    mesh.abort_edit(found[0].id)
                edit = mesh.get_edit(found[0].id, wait=True, timeout=2.0)
                if edit.ended:
                    return edit
        except ParamdError as error:
            actor.refused(error)
        if actor.over:
            actor.oracle.tally.count(actor.oracle.tally.edits, "over before its end was known")
            raise UnknownError("the episode is over before the edit")
        if time.monotonic() > deadline_s:
            raise WrongError(f"{actor.lane}: an edit has no end; last: {actor.last_refusal}")


class Operator:
    """Holds training, lets it step, edits by compare-and-swap, exports, restores."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, actor: Actor, mesh: Mesh) -> None:
        self._number += 1
        work = (self._hold_and_step, self._compare_and_swap, self._export, self._restore)
        work[self._number % len(work)](actor, mesh)
        actor.oracle.tally.count(actor.oracle.tally.answers, actor.lane)

    def _hold_and_step(self, actor: Actor, mesh: Mesh) -> None:
        with holding(mesh) as step:
            mesh.step(2)
            deadline_s = time.monotonic() + EDIT_TIMEOUT_S
            while (hold := mesh.pause_state()).state == "stepping":
                if time.monotonic() > deadline_s:
                    raise DeadlineError("the two steps are not done yet")
                time.sleep(PAUSE_S)
            if hold.paused and hold.step != step + 2:
                raise WrongError(f"held at {step}, after two steps at {hold.step}")

    def _compare_and_swap(self, actor: Actor, mesh: Mesh) -> None:
        """Edits what nothing else writes, to what it holds, at a step that is right or wrong."""
        # Training that is not held goes on meanwhile, so there it is refused nearly always.
        held_or_not = holding(mesh) if actor.chance.random() < 0.7 else at_step(mesh)
        with held_or_not as now:
            step = now + actor.chance.choice((-1, 0, 0, 0, 1))
            note = f"swap {self._number} of {id(self):x}"
            edit = ended(
                actor,
                lambda: mesh.edit("embed.weight", mul=1.0, if_step=step, note=note,
                                  timeout=EDIT_TIMEOUT_S),
                lambda e: e.note == note,
            )  # fmt: skip
        how = f"if_step {edit.state}" if edit is not None else "if_step never begun"
        if edit is not None and edit.state is EditState.APPLIED and edit.step != step:
            raise WrongError(f"an edit for step {step} alone was applied at {edit.step}")
        actor.oracle.tally.count(actor.oracle.tally.edits, how)

    def _export(self, actor: Actor, mesh: Mesh) -> None:
        key = f"free-{self._number}-{id(self):x}"
        exported(actor, mesh, key)

    def _restore(self, actor: Actor, mesh: Mesh) -> None:
        """What was exported while training was held is what it holds: nothing may change."""
        with held(actor.oracle.locks), holding(mesh) as step:
            key = f"held-{self._number}-{id(self):x}"
            exported(actor, mesh, key)
            note = f"restore {key}"
            edit = ended(
                actor,
                lambda: mesh.restore(f"exports/{key}", if_step=step, note=note,
                                     timeout=EDIT_TIMEOUT_S),
                lambda e: e.note == note,
            )  # fmt: skip
            state = edit.state if edit is not None else "never begun"
            actor.oracle.tally.count(actor.oracle.tally.edits, f"restore {state}")


@contextmanager
def holding(mesh: Mesh) -> Iterator[int]:
    """Training waits within the block; the step where."""
    hold = mesh.pause(lease=20.0, timeout=EDIT_TIMEOUT_S)
    try:
        yield hold.step
    finally:
        # Its lease may have ended, or another control plane knows of no hold.
        with suppress(ConflictError):
            mesh.resume(timeout=EDIT_TIMEOUT_S)


@contextmanager
def at_step(mesh: Mesh) -> Iterator[int]:
    """The step where a training is that goes on."""
    yield mesh.status().step


def exported(actor: Actor, mesh: Mesh, key: str) -> None:
    """Exports and judges the files; what is refused leaves nothing visible."""
    question = actor.oracle.ask()
    place = actor.stage.folder / "exports" / key
    info = mesh.export(
        f"exports/{key}",
        include=("parameters",),
        max_shard_size=1 << 14,
        assets=actor.stage.assets if key.startswith("free") else None,
    )
    try:
        done = info.wait(EDIT_TIMEOUT_S * 2)
    except DeadlineError:
        mesh.cancel_export(info.info.id)
        raise
    values = read_export(place)
    actor.oracle.judge("export", question, done.incarnation, done.step, values)


def read_export(place: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export."""
    found: dict[str, torch.Tensor] = {}
    for path in place.glob("*.safetensors"):
        found |= load_file(path)
    if not found:
        raise WrongError(f"an export that is DONE has no files: {place.name}")
    return found


def rotating(actor: Actor, mesh: Mesh) -> None:
    """Makes a token, reads with it, revokes it; then it is worthless."""
    made = rest(actor.stage, "POST", "/tokens", body={"role": "reader", "ttl_s": 600})
    with actor.stage.connect(actor.job.name, made["token"]) as reader:
        question = actor.oracle.ask()
        found = reader.summon("blocks.0.*", transport="grpc")
        actor.oracle.judge(actor.lane, question, found.incarnation, found.step, dict(found))
        rest(actor.stage, "DELETE", f"/tokens/{made['name']}")
        revoked_s = time.monotonic()
        while True:
            served = False
            try:
                reader.summon("blocks.0.*", transport="grpc", timeout=5.0)
                served = True
            except DeniedError:
                return
            except ParamdError as error:
                actor.refused(error)
            # A sidecar that cannot hear of it is bound by the ticket's life alone.
            if time.monotonic() - revoked_s > patience_s(REVOKED_S + FATE_S):
                if served:
                    raise WrongError("a token that was revoked is still good")
                return  # its control plane ended with the incarnation: nobody is there to deny


def reattaching(actor: Actor, mesh: Mesh) -> None:
    """Reads the side job; now and then it detaches and attaches again, as a new incarnation."""
    summoning(transport="grpc")(actor, mesh)
    if actor.chance.random() < 0.02:
        (actor.job.now.folder / "detach").touch()


def rest(stage: Stage, method: str, path: str, *, body: Any = None, **query: Any) -> Any:
    """One call of the REST side; what it refuses is a ParamdError as the library has it."""
    url, token = stage.door("main")
    try:
        answer = httpx2.request(
            method, f"{url}/api/v1{path}", json=body, params=query or None,
            headers={"authorization": f"Bearer {token}"}, timeout=20.0, trust_env=False,
        )  # fmt: skip
    except httpx2.HTTPError as error:
        raise DeadlineError(f"{method} {path}: {error!r}") from error
    if answer.status_code >= 500 and answer.status_code not in (503, 504):
        raise WrongError(f"{method} {path}: HTTP {answer.status_code}: {answer.text[:300]}")
    if answer.is_error:
        raise NotFoundError(f"{method} {path}: HTTP {answer.status_code}: {answer.text[:300]}")
    return answer.json()


def cast(stage: Stage, oracles: dict[str, Oracle]) -> list[Actor]:
    """Everybody who uses the jobs of a stage."""
    main, oracle = stage.main, oracles["main"]
    lanes: dict[str, Work] = {
        "grpc": summoning(transport="grpc"),
        "same-host": summoning(transport="same-host"),
        "stream": summoning(transport="stream"),
        "buffers": summoning(transport="grpc", buffers=True),
        "view": viewing,
        "stats": reducing,
        "heatmap": picturing,
        "follow": following,
        "gradients": differentiating("full", "grpc"),
        "gradient statistics": differentiating("stats", "auto"),
        "edit 0": Editor(GROUPS[0]),
        "edit 1": Editor(GROUPS[1]),
        "operator": Operator(),
        "token": rotating,
    }
    found = [Actor(lane, stage, main, oracle, work) for lane, work in lanes.items()]
    for job in stage.jobs[1:]:
        found.append(Actor(f"{job.name} job", stage, job, oracles[job.name], reattaching))
    return found
