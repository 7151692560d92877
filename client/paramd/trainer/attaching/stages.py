"""The stages of attaching, and how they are undone after a failure."""

from __future__ import annotations

import base64
import json
import logging
import os
import secrets
import socket
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paramd import errors, extras, places
from paramd.errors import ConflictError, ParamdError, UsageError
from paramd.layout.codec import decode_layout, decode_local, encode_layout, encode_local
from paramd.layout.merge import check_replicas, layout_digest, merge_layouts, whole_parameters
from paramd.memory.arena import HostArena
from paramd.memory.control_page import MAGIC, ControlPage, Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.handover import Descriptors
from paramd.security.tickets import new_token
from paramd.security.tls import Pems
from paramd.state_files import same_network
from paramd.trainer import faults
from paramd.trainer.attaching.addresses import Meeting, meet, summary
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.attaching.checks import (
    changes_in_forward,
    check_attachable,
    check_versions,
    optimizers_of,
    steps_done,
)
from paramd.trainer.attaching.contents import contents
from paramd.trainer.attaching.exchange import (
    Exchange,
    TakenIncarnation,
    collective_timeout_s,
    take_incarnation,
)
from paramd.trainer.attaching.given import resolve
from paramd.trainer.boundary.agreement import Agreement
from paramd.trainer.boundary.boundary import Boundary
from paramd.trainer.boundary.edits import Editor
from paramd.trainer.boundary.gradients import GradientCapture
from paramd.trainer.boundary.hold import cap_s
from paramd.trainer.boundary.moments import Moments
from paramd.trainer.helpers.control_link import ControlLink
from paramd.trainer.helpers.sidecar_link import Identity, OwnTls, SidecarLink
from paramd.trainer.helpers.site_link import Registration
from paramd.trainer.home.device import DeviceMemory
from paramd.trainer.home.mirrored import MirroredHome, home_of
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.model import zero
from paramd.trainer.resume.choice import RankOffer
from paramd.trainer.resume.copies import buddies
from paramd.trainer.resume.exported import Exported, Offered, opened
from paramd.trainer.resume.keeper import Keeper, check_keep
from paramd.trainer.resume.optimizer_home import OptimizerHome
from paramd.trainer.resume.rewinding import Rewinder
from paramd.trainer.resume.succession import Resumed, Succession, agreed_choice, new_lineage
from paramd.trainer.settings import AttachSettings
from paramd.v1 import layout_pb2
from paramd.version import __version__

log = logging.getLogger("paramd")

Answer = dict[str, Any]
"""What a stage tells the other ranks, JSON."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What to attach, as agreed by all ranks."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    home: ParameterStorage
    layout: bytes
    """All ranks' layouts as one: a serialized paramd.v1.Layout."""
    layout_digest: str
    first_step: int


class Stages:
    """The stages of attaching; after each, every rank knows the outcome on all."""

    def __init__(
        self,
        exchange: Exchange,
        settings: AttachSettings,
        job: str | None,
        keep: Mapping[str, Any],
    ) -> None:
        self._exchange = exchange
        self._settings = settings
        self._keep = keep
        self._at_point = faults.from_environment(exchange.rank)
        self._succession: Succession | None = None
        self._lineage = (0, 0)
        self._known_incarnation = 0
        """The last one that a rank's sidecar served: the host that counted them may be lost."""
        self._hosts: list[str] = []
        """By rank, its `host_id`."""
        self._buddies: list[int] = []
        """By rank, who keeps copies of its standing snapshots; empty: nobody."""
        # `discover` refuses a missing one, on all ranks, before it is used.
        self._job: str = job  # type: ignore[assignment]
        self._sidecar: SidecarLink | None = None
        self._control: ControlLink | None = None
        self._site: Registration | None = None
        self._url = ""
        self._exports: list[Offered] = []
        """The last whole exports of this job, newest first."""
        self._exported: Exported | None = None
        """The one to go on from."""
        self._meeting: Meeting | None = None
        """The ranks' addresses if they are on several hosts and paramd makes certificates."""
        self._at_point = faults.from_environment(exchange.rank)
        self._undo = ExitStack()
        """Undoes everything begun so far, last first."""
        self._undo.callback(exchange.close)

    def discover(self, model: Any, optimizer: Any, accelerator: Any, step: int | None) -> Found:
        """Inspect the model and agree on layout and first step; change nothing."""
        optimizers: list[torch.optim.Optimizer] = []
        modules: list[torch.nn.Module] = []
        homes: list[ParameterStorage] = []
        local: list[bytes] = []

        def stage() -> dict[str, Any]:
            # The helper processes need them: better said here than in their logs.
            extras.need("paramd.attach", "service")
            module, given = resolve(model, optimizer, self._job, accelerator)
            modules.append(module)
            optimizers.extend(optimizers_of(given))
            check_attachable(module, optimizers, self._job)
            home = home_of(module, self._settings.arena)
            homes.append(home)
            if home.device is not None:
                self._undo.callback(home.device.close)
            _check_resumable(self._settings, home, self._keep)
            local.append(encode_local(home.local_layout(self._exchange.rank)))
            return {
                "job": self._job,
                "version": __version__,
                "host_id": places.host_id(),
                "hostname": socket.gethostname(),
                "mirrored": home.mirrored,
                "step": step if step is not None else steps_done(optimizers),
                "resume": self._settings.resume,
                "keep_every": self._settings.keep_every,
                "standing_every": self._settings.standing_every,
                "replicas": self._settings.replicas,
                "optimizer": self._settings.optimizer,
            }

        answers = self._together(stage)
        check_versions(answers)
        for name in ("job", "resume", "keep_every", "standing_every", "replicas", "optimizer"):
            for rank, answer in enumerate(answers):
                if answer[name] != answers[0][name]:
                    raise UsageError(
                        f"{name} must be the same on every rank: rank 0 says "
                        f"{answers[0][name]!r}, rank {rank} says {answer[name]!r}"
                    )
        self._hosts = hosts = [str(answer["host_id"]) for answer in answers]
        if not all(same_network(host, hosts[0]) for host in hosts):
            self._meeting = meet(self._together, self._exchange.rank, self._settings)
        self._buddies = self._found_buddies(hosts)
        mirrored = any(answer["mirrored"] for answer in answers)
        if mirrored and self._exchange.rank == 0:
            log.info(
                "paramd: parameters stay where they are and are copied into host memory at agreed "
                "boundaries; a trainer that hangs or has ended is not read"
            )
        layout, digest = self._merged(local[0], homes[0], mirrored=mirrored)
        return Found(
            model=modules[0],
            optimizers=optimizers,
            home=homes[0],
            layout=layout,
            layout_digest=digest,
            first_step=max(answer["step"] for answer in answers),
        )

    def _merged(self, local: bytes, home: ParameterStorage, *, mirrored: bool) -> tuple[bytes, str]:
        """All ranks' layouts as one, and its digest; merged once, as it has pieces of all ranks."""
        found = self._exchange.collect(local)
        mine = contents(home.shards, whole_parameters(decode_local(local)))
        digests = self._exchange.collect(mine.tobytes())

        def stage() -> dict[str, Any]:
            if not found:
                return {}
            locals_ = [decode_local(one) for one in found]
            layout = merge_layouts(locals_, mirrored=mirrored)
            names = [whole_parameters(one) for one in locals_]
            check_replicas(
                [
                    dict(zip(known, array("Q", told), strict=True))
                    for known, told in zip(names, digests, strict=True)
                ]
            )
            told = base64.b64encode(encode_layout(layout).SerializeToString()).decode()
            return {"layout": told, "digest": layout_digest(layout)}

        first = self._together(stage)[0]
        return base64.b64decode(first["layout"]), first["digest"]

    def _found_buddies(self, hosts: list[str]) -> list[int]:
        found = buddies(hosts) if self._settings.replicas else []
        if self._settings.replicas and not found and self._exchange.rank == 0:
            log.warning(
                "paramd: replicas=1, but all ranks are on one host: no copies of standing "
                "snapshots are kept elsewhere, and what this host holds is lost with it"
            )
        return found

    @property
    def _resumes(self) -> bool:
        return self._settings.resume != "never"

    def look_back(self, found: Found) -> Found:
        """Agree on the state of an earlier incarnation to go on from; change nothing."""
        if not self._resumes:
            return found
        exchange = self._exchange

        device = found.home.device

        def look() -> dict[str, Any]:
            self._succession = Succession(
                job=self._job,
                rank=exchange.rank,
                world_size=exchange.world_size,
                optimizers=found.optimizers,
                keep=self._keep,
                layout_digest=found.layout_digest,
                socket_path=places.socket_path(self._job, exchange.rank),
                hosts=self._hosts,
                device=device.request.uuid.hex() if device is not None else "",
            )
            self._undo.callback(self._succession.close)
            return {"offer": self._succession.look().to_message(), "lineage": new_lineage()}

        answers = self._together(look)
        succession = self._succession
        assert succession is not None
        offers = [RankOffer.from_message(answer["offer"]) for answer in answers]
        self._known_incarnation = max(offer.incarnation for offer in offers)
        choice = agreed_choice(succession, offers, self._together, exchange.group)
        self._pass("looked")
        # History branches where steps were lost; a fresh start has none.
        new = choice.mark.lineage if choice.how == "live" else answers[0]["lineage"]
        self._lineage = (choice.mark.lineage, new)
        if exchange.rank == 0:
            # A warning, because most scripts set up no logging and would not show an info.
            nothing = choice.how == "fresh" and not choice.lost_steps
            tell = log.info if nothing else log.warning
            tell("paramd: job %r %s", self._job, succession.said())
        if choice.how == "fresh":
            return found
        return replace(found, first_step=choice.mark.step)

    def identify(self) -> Identity:
        """Rank 0 obtains the next incarnation, the job's keys, and a ticket for each rank."""
        exchange = self._exchange
        taken: list[TakenIncarnation] = []
        mark = secrets.token_hex(8)

        def stage() -> dict[str, Any]:
            places.job_dir(self._job)
            served = {"served": places.generation(self._job)}
            if exchange.rank != 0:
                return served
            meeting = self._meeting
            if meeting is not None:
                places.mark_state_dir(self._job, mark)
            mine = take_incarnation(
                self._settings,
                job=self._job,
                world_size=exchange.world_size,
                hosts=[one.name for one in meeting.addresses] if meeting is not None else (),
                above=self._known_incarnation,
            )
            taken.append(mine)
            self._site = mine.site
            public = {"incarnation": mine.incarnation, "public_key": mine.public_key.hex()}
            return {**served, **public, "own": mine.private_key is not None, "mark": mark}

        answers = self._together(stage)
        first = answers[0]
        leader, standby = 0, None
        if self._meeting is not None and first["own"]:
            leader, standby = self._control_ranks(
                [answer["served"] for answer in answers], first["mark"]
            )
        # Scattered, not gathered: a rank learns only its own ticket, and no private key of others.
        holders = [leader] if standby is None else [leader, standby]
        mine = json.loads(exchange.scatter(_secrets(taken[0], holders) if taken else None))
        return Identity(
            job=self._job,
            incarnation=first["incarnation"],
            rank=exchange.rank,
            world_size=exchange.world_size,
            public_key=bytes.fromhex(first["public_key"]),
            rank_ticket=mine["ticket"],
            copy_ticket=mine.get("copy_ticket", ""),
            private_key=bytes.fromhex(mine["private_key"]) if "private_key" in mine else None,
            control_token=mine.get("control_token", ""),
            leader=leader,
            standby=standby,
            own_tls=self._own_tls(mine.get("tls")),
        )

    def _control_ranks(self, served: Sequence[int], mark: str) -> tuple[int, int | None]:
        """Who starts the control plane, and who the standby. Collective.

        Args:
            served: By rank, how new the store of its host is: the newest is gone on with.
            mark: Of rank 0's state dir: a shared one has one store, which nobody can copy.
        """
        answers = self._together(lambda: {"mark": places.mark_of_state_dir(self._job)})
        shared = [rank for rank, answer in enumerate(answers) if answer["mark"] == mark]
        # The first rank of each host; other ranks of a host share its files.
        first = {host: rank for rank, host in reversed(list(enumerate(self._hosts)))}
        ranks = sorted(first.values())
        leader = max(ranks, key=lambda rank: (served[rank], -rank))
        if leader in shared:
            ranks = [leader, *(rank for rank in ranks if rank not in shared)]
        return leader, next((rank for rank in ranks if rank != leader), None)

    def _own_tls(self, pems: dict[str, str] | None) -> OwnTls | None:
        if self._meeting is None or pems is None:
            return None
        mine = self._meeting.addresses[self._exchange.rank]
        return OwnTls(name=mine.name, ip=mine.ip, pems=Pems.of_json(pems))

    def open(self, identity: Identity, found: Found) -> dict[str, Any]:
        """Bring up the sidecars and the control plane; return the sidecars' mesh message."""

        def stage() -> dict[str, Any]:
            path = places.socket_path(self._job, identity.rank)
            if identity.rank == identity.leader and not self._settings.control:
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
        told = answers[identity.leader]
        self._url = told["url"]
        self._exports = [Offered(**one) for one in told["exports"]]
        if identity.standby is not None:
            self._stand_by(identity, answers)
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
            "buddies": self._buddies,
        }

    def _stand_by(self, identity: Identity, answers: Sequence[Answer]) -> None:
        """Start the standby, and tell the control plane whom to ask before it starts again."""
        peers = [str(answer["peer"]["address"]) for answer in answers]
        if self._control is not None:
            self._control.know(peers)
        if identity.rank != identity.standby:
            return
        self._control = ControlLink(
            identity,
            self._settings,
            directory=places.job_dir(self._job),
            token=identity.control_token,
        )
        self._undo.callback(self._control.close)
        leader = answers[identity.leader]["control_address"]
        _fail_open(partial(self._control.stand_by, peers, leader))

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

    @property
    def _resumed(self) -> Resumed | None:
        """How this training is resumed."""
        if self._exported is not None and self._succession is not None:
            step = self._exported.offered.step
            lost = max(self._succession.steps_known - step, 0)
            return Resumed(step, "export", lost, "nothing is left in memory")
        return self._succession.resumed if self._succession is not None else None

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
            words[Word.OPTIMIZER_BYTES] = succession.optimizer_bytes
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

    def move_in(
        self,
        found: Found,
        identity: Identity,
        mesh: dict[str, Any],
    ) -> Attachment:
        """Move the parameters into the arena and serve them, on all ranks or none."""
        assert self._sidecar is not None
        shared = self._sidecar.own_descriptors()
        page = ControlPage(shared.page)
        self._undo.callback(page.close)
        arena = found.home.open_arena(shared.arena, page)
        self._undo.callback(arena.close)

        succession = self._succession
        optimizer_memory = SparseMemory(shared.optimizer)

        def move() -> dict[str, Any]:
            self._undo.callback(found.home.move_out)
            if succession is None or succession.resumed is None:
                arena.populate()
                found.home.move_in(arena.buffer)
                if self._exported is not None:
                    self._exported.fill(arena.buffer)
                    found.home.restore_buffers()
            else:
                if succession.survived is None:
                    arena.populate()
                    succession.fill(arena, optimizer_memory)
                found.home.adopt(arena.buffer)
            self._pass("moved")
            return {}

        made: list[Attachment] = []

        def begin() -> dict[str, Any]:
            state = self._optimizer_home(optimizer_memory, page, found)
            page[Word.MOMENTS_LIVE] = int(self._settings.reads_optimizer_live)
            self._introduce(page, identity, found.first_step)
            agreement = self._agreement()
            keeper = self._keeper(shared, page, found, state, agreement)
            made.append(
                self._attachment(found.model, found.home, identity, page, arena, shared, agreement)
            )
            self._undo.callback(made[0].detach)
            if succession is not None and succession.resumed is not None:
                # Before that: a failed resume must not end the sidecar that has the state.
                self._undo.callback(self._let_go_of_sidecar)
            made[0].keep_with(keeper, state, self._resumed)
            if keeper is not None and state is not None and succession is not None:
                made[0].rewind_with(self._rewinder(found, page, arena, state, keeper))
            made[0].follow(found.optimizers)
            self.serve(mesh, found.layout)
            return {}

        # Two stages, so that no rank serves before all have moved in.
        self._together(move)
        self._together(begin)
        # Attached on all ranks: point of no return.
        self._undo.pop_all()
        self._go_on(made[0], found.first_step)
        return made[0]

    def _optimizer_home(
        self, memory: SparseMemory, page: ControlPage, found: Found
    ) -> OptimizerHome | None:
        if self._succession is None and not self._settings.reads_optimizer_live:
            memory.close()
            return None
        state = OptimizerHome(memory, page, found.optimizers)
        self._undo.callback(state.move_out)
        if self._succession is not None:
            self._succession.restore(state)
        if self._exported is not None:
            begin, size_bytes = found.home.arena_address, found.home.arena_bytes
            self._exported.restore(found.optimizers, begin, size_bytes)
            self._exported.close()
        return state

    def _keeper(
        self,
        shared: Descriptors,
        page: ControlPage,
        found: Found,
        state: OptimizerHome | None,
        agreement: Agreement,
    ) -> Keeper | None:
        if state is None:
            return None
        resumable = self._succession is not None
        standing = self._settings.standing_every if resumable else 0
        return Keeper(
            SparseMemory(shared.continuation),
            page,
            found.home,
            state,
            keep=self._keep if resumable else {},
            every=int(self._settings.keep_every),
            standing_every=int(standing) if standing is not None else None,
            agreed=agreement.standing,
            copies=agreement.copies if self._buddies else None,
            resumable=resumable,
        )

    def _rewinder(
        self,
        found: Found,
        page: ControlPage,
        arena: HostArena | DeviceMemory,
        state: OptimizerHome,
        keeper: Keeper,
    ) -> Rewinder:
        return Rewinder(
            page,
            arena,
            home=found.home,
            state=state,
            keeper=keeper,
            keep=self._keep,
            copied=bool(self._buddies),
            at_point=self._at_point,
        )

    def _go_on(self, attachment: Attachment, first_step: int) -> None:
        """Let the training continue with the random states it had. Last of all."""
        succession, keeper = self._succession, attachment.keeper
        if keeper is None:
            return
        if succession is None:
            keeper.begin(first_step)
            return
        if succession.resumed is None:
            keeper.begin(first_step)
        else:
            succession.go_on(keeper)
        succession.close()

    def _attachment(
        self,
        model: torch.nn.Module,
        home: ParameterStorage,
        identity: Identity,
        page: ControlPage,
        arena: HostArena | DeviceMemory,
        shared: Descriptors,
        agreement: Agreement,
    ) -> Attachment:
        assert self._sidecar is not None
        mirror = home if isinstance(home, MirroredHome) else None
        page[Word.MIRRORED] = int(mirror is not None)
        edits = SparseMemory(shared.edits)
        editor = Editor(
            page, arena, edits, at_point=self._at_point, mirror=mirror, finish=home.finish
        )
        moments = Moments(page, arena, SparseMemory(shared.moments), mirror=mirror)
        boundary = Boundary(
            page,
            shared.wake,
            home,
            agreement,
            editor=editor,
            copy_buffers=home.copy_buffers,
            mirror_moments=moments.mirror,
            hold_cap_s=cap_s(collective_timeout_s()),
            stall_budget_ns=round(self._settings.stall_budget_ms * 1e6),
            mirror=mirror,
            order=home.device.publish if home.device is not None else None,
            always_strict=self._warned(changes_in_forward(model)),
            after_edit=partial(zero.refresh, model),
        )
        return Attachment(
            model,
            identity,
            page=page,
            arena=arena,
            home=home,
            boundary=boundary,
            editor=editor,
            moments=moments,
            gradients=self._gradients(page, shared, home),
            exchange=self._exchange,
            sidecar=self._sidecar,
            control=self._control,
            url=self._url,
        )

    @staticmethod
    def _warned(changes: str) -> str:
        if changes:
            log.warning(
                "paramd: %s: parameters are read at boundaries alone, while training waits within "
                "its stall budget (PARAMD_STALL_BUDGET_MS)",
                changes,
            )
        return changes

    def _gradients(
        self, page: ControlPage, shared: Descriptors, home: ParameterStorage
    ) -> GradientCapture:
        return GradientCapture(
            page,
            shared.wake,
            shared.gradients,
            arena_bytes=home.arena_bytes,
            pieces=home.pieces,
            lossless_budget_ns=round(self._settings.lossless_budget_ms * 1e6),
        )

    def _agreement(self) -> Agreement:
        return Agreement(
            self._exchange.group,
            timeout_s=self._settings.agreement_timeout_s,
            edit_timeout_s=self._settings.attach_timeout_s,
        )

    def serve(self, mesh: dict[str, Any], layout: bytes) -> None:
        """Let the sidecar serve, now that all trainers are ready."""
        assert self._sidecar is not None
        self._sidecar.serve(mesh, layout)

    def _pass(self, point: str) -> None:
        if self._at_point is not None:
            self._at_point(point)

    def close(self) -> None:
        """Undo the stages after a failure; the caller re-raises that failure."""
        try:
            self._undo.close()
        except Exception:
            log.exception("paramd: a failed attach could not be undone completely")

    def _together(self, stage: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run a stage on every rank; a failure on one is raised on all."""
        failure: Exception | None = None
        try:
            message = stage()
        except Exception as error:
            failure = error
            message = {"error": str(error), "kind": type(error).__name__}
        # Also after a failure: gathering is collective, and the others would hang without us.
        answers = self._exchange.gather(message)
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if "error" in answer:
                kind = getattr(errors, answer["kind"], ConflictError)
                raise kind(f"rank {rank}: {answer['error']}")
        return answers


def _secrets(taken: TakenIncarnation, holders: Sequence[int]) -> list[str]:
    """Each rank's ticket and certificate, as JSON; for `holders` the control plane's secrets."""
    told: list[dict[str, Any]] = [{"ticket": ticket} for ticket in taken.rank_tickets]
    for one, ticket in zip(told, taken.copy_tickets, strict=False):
        one["copy_ticket"] = ticket
    for one, pems in zip(told, taken.rank_pems, strict=False):
        one["tls"] = pems.to_json()
    if taken.private_key is not None:
        own = {"private_key": taken.private_key.hex(), "control_token": new_token()}
        for rank in holders:
            told[rank] |= own
    return [json.dumps(one) for one in told]


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


def _check_resumable(
    settings: AttachSettings, home: ParameterStorage, keep: Mapping[str, Any]
) -> None:
    """Raise UsageError if `resume` is wanted and cannot work here."""
    if settings.resume == "never" and settings.replicas:
        raise UsageError("replicas=1 needs resume='auto', which makes what is copied")
    if settings.optimizer == "arena" and home.mirrored:
        raise UsageError(
            "optimizer='arena' needs the parameters to live in the arena, which those on devices "
            "or with arena='mirror' do not; leave it out, or keep them in host memory"
        )
    if settings.resume == "never":
        return
    if home.mirrored:
        raise UsageError(
            "resume='auto' needs the parameters to live in the arena, which those on devices or "
            "with arena='mirror' do not; leave it out, or keep them in host memory"
        )
    check_keep(keep)
