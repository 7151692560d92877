"""The later stages: start sidecars and control plane, choose an export to resume from, and move the
parameters in.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from paramd import places
from paramd.errors import ConflictError, ParamdError
from paramd.layout.codec import decode_layout
from paramd.memory.arena import HostArena
from paramd.memory.control_page import MAGIC, ControlPage, Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.handover import Descriptors
from paramd.trainer.attaching.addresses import summary
from paramd.trainer.attaching.attachment import Attachment, Parts
from paramd.trainer.attaching.checks import changes_in_forward
from paramd.trainer.attaching.discovering import Answer, Discovering, Found
from paramd.trainer.attaching.exchange import collective_timeout_s
from paramd.trainer.boundary.agreement import Agreement
from paramd.trainer.boundary.boundary import Boundary
from paramd.trainer.boundary.edits import Editor
from paramd.trainer.boundary.gradients import GradientCapture
from paramd.trainer.boundary.hold import cap_s
from paramd.trainer.helpers.control_link import ControlLink
from paramd.trainer.helpers.sidecar_link import Identity, SidecarLink
from paramd.trainer.home.device import DeviceMemory, DeviceState
from paramd.trainer.home.mirrored import MirroredHome
from paramd.trainer.model import partitions
from paramd.trainer.model.coming import coming_bytes
from paramd.trainer.model.extra_state import ExtraState, names_of
from paramd.trainer.resume.exported import Exported, Offered, opened
from paramd.trainer.resume.keeper import Keeper
from paramd.trainer.resume.optimizer_home import OptimizerHome
from paramd.trainer.resume.rewinding import Rewinder
from paramd.trainer.resume.state_record import CopiedState, MovedState, StateRecord
from paramd.trainer.resume.succession import Resumed
from paramd.v1 import layout_pb2

log = logging.getLogger("paramd")


class Stages(Discovering):
    """The stages of attaching; after each, every rank knows the outcome on all."""

    _sidecar: SidecarLink | None = None
    _url = ""
    _exports: Sequence[Offered] = ()
    """The last complete exports of this job, newest first."""
    _exported: Exported | None = None
    """The export to resume from."""

    def take_helpers(self, sidecar: SidecarLink, control: ControlLink | None, url: str) -> None:
        """Keep the helpers of this training's present incarnation; `close` ends them."""
        self._sidecar, self._control, self._url = sidecar, control, url
        if control is not None:
            self._undo.callback(control.close)
        self._undo.callback(self._let_go_of_sidecar)

    def leave(self, attachment: Attachment) -> None:
        """Move this training's parameters out of the memory that they are served from."""

        def stage() -> dict[str, Any]:
            attachment._leave_memory()
            return {}

        self._together(stage)

    def open(self, identity: Identity, found: Found) -> dict[str, Any]:
        """Bring up the sidecars and the control plane; return the sidecars' mesh message."""
        kept = self._sidecar

        def stage() -> dict[str, Any]:
            path = places.socket_path(self._job, identity.rank)
            if self._control is not None:
                self._control.goes_on(identity)
            elif identity.rank == 0 and not self._settings.control:
                self._control = ControlLink(
                    identity, self._settings, directory=path.parent, token=identity.control_token
                )
                self._undo.callback(self._control.close)
            self._sidecar = SidecarLink(
                identity,
                self._settings,
                socket_path=path,
                arena_bytes=found.home.arena_bytes,
                device=found.home.device,
                former=kept,
            )
            if kept is None:
                # Undone before the control plane, which exits after the last sidecar.
                self._undo.callback(self._let_go_of_sidecar)
            self._take_over(self._sidecar, identity, found)
            if self._control is not None and kept is None:
                resumed = self._succession is not None and self._succession.resumed is not None
                _fail_open(partial(self._control.open, resumes=resumed))
            _fail_open(self._sidecar.open)
            self._pass("opened")
            self._sidecar.own_descriptors()
            there = self._site if self._site is not None else self._control
            return {
                "peer": {
                    "rank": identity.rank,
                    "address": self._sidecar.address,
                    "socket_path": str(path),
                    "host_id": places.host_id(),
                },
                "control_address": there.control_address if there is not None else "",
                "url": there.url if there is not None else "",
                "exports": self._control.exports if self._control is not None else [],
            }

        answers = self._together(stage)
        told = answers[0]
        self._url = told["url"]
        self._exports = [Offered(**one) for one in told["exports"]]
        if identity.rank == 0 and kept is None:
            meeting, where = self._meeting, self._url or "no control plane yet"
            if meeting is not None:
                where += (
                    f", over TLS of its own; hosts: {summary(meeting.addresses, meeting.views)}"
                )
            print(f"paramd: job {self._job!r} is at {where}", file=sys.stderr, flush=True)
            if self._control is not None and not self._url:
                self._control.when_up(partial(_say_where, self._job, self._control))
        return {
            "op": "mesh",
            "peers": [answer["peer"] for answer in answers],
            "control_address": told["control_address"],
            "layout_digest": found.layout_digest,
            "buddies": list(self._buddies),
        }

    def look_at_exports(self, found: Found) -> Found:
        """If nothing is left in memory, agree on an export to resume from; change nothing."""
        if self._succession is None or self._succession.resumed is not None:
            return found
        if self._control is not None and not self._url:
            log.warning(
                "paramd: job %r: whether it has exports to continue from is not known, because its "
                "control plane did not start; start the training again to have them looked at",
                self._job,
            )
        for offered in self._exports:
            if offered.step <= found.first_step:
                # The script's own start, such as a checkpoint that it loaded, is no older.
                return found
            why = self._take_export(offered, found)
            if self._exchange.rank == 0 and why:
                log.warning(
                    "paramd: job %r: its export of %s is passed over: %s", self._job, offered, why
                )
            elif self._exchange.rank == 0:
                log.warning("paramd: job %r %s", self._job, self._exported_said(found))
            if not why:
                return replace(found, first_step=offered.step)
        return found

    def move_in(
        self,
        found: Found,
        identity: Identity,
        mesh: dict[str, Any],
        again: Attachment | None = None,
    ) -> Attachment:
        """Move the parameters into the arena and serve them, on all ranks or none.

        `again`: the attachment that goes on with them; None: a new one.
        """
        sidecar = self._sidecar
        assert sidecar is not None
        shared = sidecar.own_descriptors()
        page = ControlPage(shared.page)
        self._undo.callback(page.close)
        arena = found.home.open_arena(shared.arena, page)
        self._undo.callback(arena.close)

        succession = self._succession
        optimizer_memory = SparseMemory(shared.optimizer)
        state_memory: DeviceState | None = None
        # Where parameters stay in the trainer's own memory, the optimizers' state does, too.
        stays = found.home.mirrored or found.model in partitions.declared
        moves = succession is not None or not stays

        def move() -> dict[str, Any]:
            nonlocal state_memory
            self._undo.callback(found.home.move_out)
            if moves:
                most_bytes = optimizer_memory.size_bytes
                state_memory = found.home.open_state(shared.state, most_bytes, sidecar.add_state)
            if succession is None or succession.resumed is None:
                arena.populate()
                found.home.move_in(arena.buffer)
                if self._exported is not None:
                    self._exported.fill(arena.buffer)
                    found.home.restore_buffers()
            else:
                if succession.survived is None:
                    arena.populate()
                    succession.fill(arena, optimizer_memory, state_memory)
                found.home.adopt(arena.buffer)
            self._pass("moved")
            return {}

        made: list[Attachment] = []

        def begin() -> dict[str, Any]:
            state = None
            if moves:
                state = self._optimizer_home(optimizer_memory, state_memory, page, found)
            page[Word.MOMENTS_LIVE] = int(moves)
            page[Word.COMING_BYTES] = coming_bytes(found.model.parameters(), found.optimizers)
            self._introduce(page, identity, found.first_step)
            made.append(
                self._attachment(
                    found, identity, page, arena, shared, optimizer_memory, state, again
                )
            )
            self._undo.callback(made[0].detach)
            if succession is not None and succession.resumed is not None:
                # Before that: a failed resume must not end the sidecar that has the state.
                self._undo.callback(self._let_go_of_sidecar)
            made[0]._follow(found.optimizers)
            sidecar.serve(mesh, found.layout)
            return {}

        # Two stages, so that no rank serves before all have moved in.
        self._together(move)
        self._together(begin)
        # Attached on all ranks: point of no return.
        self._undo.pop_all()
        if self._resumed is not None:
            # What the script has gathered before, by an evaluation, has the values of its start.
            found.home.gather_again()
        self._go_on(made[0], found.first_step)
        return made[0]

    def _take_export(self, offered: Offered, found: Found) -> str:
        """Resume from this export if all ranks can; else return why they cannot."""
        rank = self._exchange.rank
        here = [other for other, host in enumerate(self._hosts) if host == self._hosts[rank]]
        share = here.index(rank), len(here)
        mine: list[Exported] = []

        def look() -> Answer:
            if found.home.computes():
                return {"why": "FSDP is in a forward or backward", "digest": ""}
            layout = decode_layout(layout_pb2.Layout.FromString(found.layout))
            export, told = opened(offered, layout, rank, found.optimizers, share)
            if export is not None:
                mine.append(export)
                self._undo.callback(export.close)
            return told

        why = _why_not(self._together(look))
        for export in mine:
            if why:
                export.close()
            else:
                self._exported = export
        return why

    def _exported_said(self, found: Found) -> str:
        """One line for the log: the chosen export, and the state that it lacks."""
        assert self._exported is not None
        parts, without = ["parameters"], []
        if found.optimizers and self._exported.has_optimizer:
            parts.append("optimizer state")
        elif found.optimizers:
            without.append("optimizer state")
        if missing := self._exported.missing_buffers():
            without.append(f"{missing} buffers")
        if names := self._exported.extra_state:
            log.warning(
                "paramd: the export has extra state that is not loaded (%s%s); give it to "
                "set_extra_state",
                ", ".join(names[:4]),
                " ..." * (len(names) > 4),
            )
        named = (f"extra_state[{name!r}]" for name in self._keep)
        without += ["random states", "hyper-parameters", *named]
        return (
            f"continues from its export of {self._exported.offered}, since nothing is left in "
            f"memory: {' and '.join(parts)} are loaded; not in it, and as this script made them, "
            f"are {', '.join(without)}"
        )

    def _take_over(self, sidecar: SidecarLink, identity: Identity, found: Found) -> None:
        """Hand the sidecar an earlier trainer's memory, if training resumes in it."""
        succession = self._succession
        if succession is None or succession.resumed is None:
            return
        sidecar.continues = (*self._lineage, found.first_step)
        if succession.survived is None:
            return
        arena_bytes = found.home.arena_bytes
        shared = Descriptors.create(arena_bytes, survived=succession.survived)
        sidecar.descriptors = shared
        # Now, so that dying from here on leaves a state that can be resumed as it was.
        page = ControlPage(shared.page)
        self._introduce(page, identity, found.first_step)
        page.close()

    def _let_go_of_sidecar(self) -> None:
        assert self._sidecar is not None
        succession = self._succession
        if succession is not None and succession.resumed is not None:
            self._sidecar.abandon()
        else:
            self._sidecar.close()

    def _introduce(self, page: ControlPage, identity: Identity, first_step: int) -> None:
        words = page.words
        words[Word.MAGIC] = MAGIC
        words[Word.INCARNATION] = identity.incarnation
        words[Word.STEP] = first_step
        words[Word.TRAINER_PID] = os.getpid()
        words[Word.TRAINER_START] = places.process_start(os.getpid())
        succession = self._succession
        if succession is not None:
            succession.introduce(words)
            # Last: from now on the memory can be resumed.
            words[Word.LINEAGE] = self._lineage[1]

    @property
    def _resumed(self) -> Resumed | None:
        """How this training is resumed."""
        if self._exported is not None and self._succession is not None:
            step = self._exported.offered.step
            lost = max(self._succession.steps_known - step, 0)
            return Resumed(step, "export", lost, "nothing is left in memory")
        return self._succession.resumed if self._succession is not None else None

    def _optimizer_home(
        self, memory: SparseMemory, on_device: DeviceState | None, page: ControlPage, found: Found
    ) -> OptimizerHome:
        resumable = self._succession is not None
        state = OptimizerHome(memory, page, found.optimizers, on_device, resumable=resumable)
        self._undo.callback(state.close)
        if self._succession is not None:
            self._succession.restore(state)
        if self._exported is not None:
            begin, size_bytes = found.home.arena_address, found.home.arena_bytes
            self._exported.restore(found.optimizers, begin, size_bytes)
            self._exported.close()
        return state

    def _go_on(self, attachment: Attachment, first_step: int) -> None:
        """Let the training continue with the random states it had. Last of all."""
        succession, keeper = self._succession, attachment.keeper
        if keeper is None or succession is None:
            return
        if succession.resumed is None:
            keeper.begin(first_step)
        else:
            succession.go_on(keeper)
        succession.close()

    def _attachment(
        self,
        found: Found,
        identity: Identity,
        page: ControlPage,
        arena: HostArena | DeviceMemory,
        shared: Descriptors,
        optimizer_memory: SparseMemory,
        state: OptimizerHome | None,
        again: Attachment | None,
    ) -> Attachment:
        assert self._sidecar is not None
        agreement = Agreement(
            self._exchange.group,
            timeout_s=self._settings.agreement_timeout_s,
            edit_timeout_s=self._settings.attach_timeout_s,
        )
        model, home = found.model, found.home
        mirror = home if isinstance(home, MirroredHome) else None
        page[Word.MIRRORED] = int(mirror is not None)
        keeper, rewinder = None, None
        record: StateRecord | None = None
        records = SparseMemory(shared.continuation)
        if state is not None and self._succession is not None:
            standing = self._settings.standing_every
            keeper = Keeper(
                records,
                page,
                home,
                state,
                keep=self._keep,
                every=int(self._settings.keep_every),
                standing_every=int(standing) if standing is not None else None,
                agreed=agreement.standing,
                copies=agreement.copies if self._buddies else None,
            )
            rewinder = Rewinder(
                page,
                arena,
                home=home,
                state=state,
                keeper=keeper,
                keep=self._keep,
                copied=bool(self._buddies),
                at_point=self._at_point,
            )
        # How readers learn of the optimizers' state where no later trainer needs it.
        elif state is not None:
            record = MovedState(records, page, home, state)
        else:
            locator = mirror.locator if mirror is not None else None
            record = CopiedState(records, optimizer_memory, page, home, locator=locator)
        extra = ExtraState(records, page.words, model, lambda: names_of(home.local_layout(0)))
        edits = SparseMemory(shared.edits)
        editor = Editor(
            page, arena, edits, at_point=self._at_point, mirror=mirror, finish=home.finish
        )
        changes = changes_in_forward(model)
        if changes:
            log.warning(
                "paramd: %s: parameters are read at boundaries alone, while training waits within "
                "its stall budget (PARAMD_STALL_BUDGET_MS)",
                changes,
            )
        boundary = Boundary(
            page,
            shared.wake,
            home,
            agreement,
            editor=editor,
            copy_state=record.copy_for if record is not None else lambda _: None,
            note_extra=extra.note_for,
            hold_cap_s=cap_s(collective_timeout_s()),
            stall_budget_ns=round(self._settings.stall_budget_ms * 1e6),
            mirror=mirror,
            order=home.device.publish if home.device is not None else None,
            device=home.device,
            settles=record.settle if record is not None else lambda _: None,
            always_strict=changes,
            after_edit=partial(partitions.refresh, model),
        )
        parts = Parts(
            model,
            identity,
            page=page,
            arena=arena,
            home=home,
            boundary=boundary,
            editor=editor,
            record=record,
            keeper=keeper,
            state=state,
            rewinder=rewinder,
            resumed=self._resumed,
            gradients=GradientCapture(
                page,
                shared.wake,
                shared.gradients,
                arena_bytes=home.arena_bytes,
                pieces=home.pieces,
                departed=home.departed,
                lossless_budget_ns=round(self._settings.lossless_budget_ms * 1e6),
                partitioned=model in partitions.declared,
            ),
            exchange=self._exchange,
            sidecar=self._sidecar,
            control=self._control,
            url=self._url,
            settings=self._settings,
        )
        if again is None:
            return Attachment(parts)
        again._take(parts)
        return again


def _say_where(job: str, control: ControlLink) -> None:
    print(f"paramd: job {job!r} is now at {control.url}", file=sys.stderr, flush=True)


def _why_not(answers: Sequence[Answer]) -> str:
    """Why an export cannot be used on all ranks; empty if it can."""
    for rank, answer in enumerate(answers):
        if answer["why"]:
            return f"rank {rank}: {answer['why']}"
        if answer["digest"] != answers[0]["digest"]:
            return f"rank {rank} finds a different export there than rank 0"
    return ""


def _fail_open(start: Callable[[], None]) -> None:
    """Log, don't raise, when a helper process does not start: training comes first.

    A conflict is raised, since only the user can resolve it (the name is taken).
    """
    try:
        start()
    except ConflictError:
        raise
    except (ParamdError, OSError, EOFError) as error:
        log.warning("paramd: %s; training continues, paramd retries", error)
