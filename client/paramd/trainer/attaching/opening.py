"""The next stages: sidecars and control plane, and whether to go on from an export."""

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
from paramd.memory.control_page import MAGIC, ControlPage, Word
from paramd.memory.handover import Descriptors
from paramd.trainer.attaching.addresses import summary
from paramd.trainer.attaching.attempt import Answer
from paramd.trainer.attaching.discovering import Discovering, Found
from paramd.trainer.helpers.control_link import ControlLink
from paramd.trainer.helpers.sidecar_link import Identity, SidecarLink
from paramd.trainer.resume.exported import Exported, Offered, opened
from paramd.v1 import layout_pb2

log = logging.getLogger("paramd")


class Opening(Discovering):
    """Helper processes run; the parameters are where they were."""

    _sidecar: SidecarLink | None = None
    _control: ControlLink | None = None
    _url = ""
    _exports: Sequence[Offered] = ()
    """The last whole exports of this job, newest first."""
    _exported: Exported | None = None
    """The one to go on from."""

    def open(self, identity: Identity, found: Found) -> dict[str, Any]:
        """Bring up the sidecars and the control plane; return the sidecars' mesh message."""

        def stage() -> dict[str, Any]:
            path = places.socket_path(self._job, identity.rank)
            if identity.rank == 0 and not self._settings.control:
                self._control = ControlLink(
                    identity,
                    self._settings,
                    directory=path.parent,
                    token=identity.control_token,
                )
                self._undo.callback(self._control.close)
            self._sidecar = SidecarLink(
                identity,
                self._settings,
                socket_path=path,
                arena_bytes=found.home.arena_bytes,
                device=found.home.device,
            )
            # Undone before the control plane, which exits after the last sidecar.
            self._undo.callback(self._let_go_of_sidecar)
            self._take_over(self._sidecar, identity, found)
            if self._control is not None:
                resumed = self._succession is not None and self._succession.resumed is not None
                _fail_open(partial(self._control.open, resumes=resumed))
            _fail_open(self._sidecar.open)
            self._pass("opened")
            self._sidecar.own_descriptors()
            return {
                "peer": {
                    "rank": identity.rank,
                    "address": self._sidecar.address,
                    "socket_path": str(path),
                    "host_id": places.host_id(),
                },
                "control_address": self._control_address(),
                "url": self._control_url(),
                "exports": self._control.exports if self._control is not None else [],
            }

        answers = self._together(stage)
        told = answers[0]
        self._url = told["url"]
        self._exports = [Offered(**one) for one in told["exports"]]
        if self._meeting is not None and identity.rank == 0:
            hosts = summary(self._meeting.addresses, self._meeting.views)
            print(
                f"paramd: job {self._job!r} is at {self._url or 'no control plane yet'}, over TLS "
                f"of its own; hosts: {hosts}",
                file=sys.stderr,
                flush=True,
            )
        return {
            "op": "mesh",
            "peers": [answer["peer"] for answer in answers],
            "control_address": told["control_address"],
            "layout_digest": found.layout_digest,
            "buddies": list(self._buddies),
        }

    def look_at_exports(self, found: Found) -> Found:
        """Agree on an export to go on from, if nothing is left in memory; change nothing."""
        if self._succession is None or self._succession.resumed is not None:
            return found
        if self._control is not None and not self._url:
            log.warning(
                "paramd: job %r: whether it has exports to go on from is not known, because its "
                "control plane did not start; start the training again to have them looked at",
                self._job,
            )
        for offered in self._exports:
            if offered.step <= found.first_step:
                # What the script begins with is no older: a checkpoint that it loaded.
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

    def _take_export(self, offered: Offered, found: Found) -> str:
        """Go on from this export if all ranks can; else why they cannot."""
        rank = self._exchange.rank
        here = [other for other, host in enumerate(self._hosts) if host == self._hosts[rank]]
        share = here.index(rank), len(here)
        mine: list[Exported] = []

        def look() -> Answer:
            if found.home.gathered():
                return {"why": "fully_shard has unsharded parameters in use", "digest": ""}
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
        """One line for the log: what was chosen, and what was not in it."""
        assert self._exported is not None
        parts, without = ["parameters"], []
        if found.optimizers and self._exported.has_optimizer:
            parts.append("optimizer state")
        elif found.optimizers:
            without.append("optimizer state")
        if missing := self._exported.missing_buffers():
            without.append(f"{missing} buffers")
        without += ["random states", "hyper-parameters", *(f"keep[{n!r}]" for n in self._keep)]
        return (
            f"goes on from its export of {self._exported.offered}, since nothing is left in "
            f"memory: {' and '.join(parts)} are loaded; not in it, and as this script made them, "
            f"are {', '.join(without)}"
        )

    def _take_over(self, sidecar: SidecarLink, identity: Identity, found: Found) -> None:
        """Hand the sidecar the memory that a predecessor left, if training goes on in it."""
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
            words[Word.EDITS_BEFORE] = succession.edits_before
            words[Word.OPTIMIZER_BYTES], words[Word.STATE_BYTES] = succession.used_bytes
            words[Word.STANDING_MADE] = words[Word.STANDING_COMMON] = succession.common_step
            # Last: from now on the memory can be resumed.
            words[Word.LINEAGE] = self._lineage[1]

    def _control_address(self) -> str:
        if self._site is not None:
            return self._site.control_address
        return self._control.grpc_address if self._control is not None else ""

    def _control_url(self) -> str:
        if self._site is not None:
            return self._site.url
        return self._control.url if self._control is not None else ""


def _why_not(answers: Sequence[Answer]) -> str:
    """Why an export cannot be used on all ranks; empty if it can."""
    for rank, answer in enumerate(answers):
        if answer["why"]:
            return f"rank {rank}: {answer['why']}"
        if answer["digest"] != answers[0]["digest"]:
            return f"rank {rank} finds another export there than rank 0"
    return ""


def _fail_open(start: Callable[[], None]) -> None:
    """Log, don't raise, when a helper process does not start: training comes first.

    A conflict is raised, since only the user can solve it (the name is taken).
    """
    try:
        start()
    except ConflictError:
        raise
    except (ParamdError, OSError, EOFError) as error:
        log.warning("paramd: %s; training continues, paramd retries", error)
