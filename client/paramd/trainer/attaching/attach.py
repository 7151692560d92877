"""`paramd.attach`: its stages in order, and how they are undone after a failure."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from paramd import errors, places
from paramd.errors import ConflictError, ParamdError, UsageError
from paramd.layout.codec import decode_local, encode_layout, encode_local
from paramd.layout.merge import layout_digest, merge_layouts
from paramd.layout.types import Layout
from paramd.memory.arena import HostArena
from paramd.memory.control_page import MAGIC, ControlPage, Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.forking import private_in_children
from paramd.memory.handover import Descriptors
from paramd.security.tickets import new_token
from paramd.trainer import faults
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.attaching.checks import (
    Missing,
    changes_in_forward,
    check_attachable,
    check_given,
    optimizers_of,
    steps_done,
)
from paramd.trainer.attaching.exchange import (
    Exchange,
    TakenIncarnation,
    collective_timeout_s,
    take_incarnation,
)
from paramd.trainer.boundary.agreement import Agreement
from paramd.trainer.boundary.boundary import Boundary
from paramd.trainer.boundary.edits import Editor
from paramd.trainer.boundary.gradients import GradientCapture
from paramd.trainer.boundary.hold import cap_s
from paramd.trainer.boundary.moments import Moments
from paramd.trainer.helpers.sidecar_link import ControlLink, Identity, SidecarLink
from paramd.trainer.helpers.site_link import Registration
from paramd.trainer.home.mirrored import MirroredHome, home_of
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.settings import AttachSettings

log = logging.getLogger("paramd")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What to attach, as agreed by all ranks."""

    optimizers: list[torch.optim.Optimizer]
    home: ParameterStorage
    layout: Layout
    first_step: int


class Stages:
    """The stages of attaching; after each, every rank knows the outcome on all."""

    def __init__(self, exchange: Exchange, settings: AttachSettings, job: str | None) -> None:
        self._exchange = exchange
        self._settings = settings
        # `discover` refuses a missing one, on all ranks, before it is used.
        self._job: str = job  # type: ignore[assignment]
        self._sidecar: SidecarLink | None = None
        self._control: ControlLink | None = None
        self._site: Registration | None = None
        self._url = ""
        self._undo = ExitStack()
        """Undoes everything begun so far, last first."""
        self._undo.callback(exchange.close)

    def discover(self, model: torch.nn.Module, optimizer: Any, step: int | None) -> Found:
        """Inspect the model and agree on layout and first step; change nothing."""
        optimizers: list[torch.optim.Optimizer] = []
        homes = []

        def stage() -> dict[str, Any]:
            check_given(model, optimizer, self._job)
            optimizers.extend(optimizers_of(optimizer))
            check_attachable(model, optimizers, self._job)
            home = home_of(model, self._settings.arena)
            homes.append(home)
            local = encode_local(home.local_layout(self._exchange.rank))
            return {
                "job": self._job,
                "layout": base64.b64encode(local).decode(),
                "mirrored": home.mirrored,
                "step": step if step is not None else steps_done(optimizers),
            }

        answers = self._together(stage)
        for rank, answer in enumerate(answers):
            if answer["job"] != answers[0]["job"]:
                raise UsageError(
                    f"job must be the same on every rank: rank 0 says {answers[0]['job']!r}, "
                    f"rank {rank} says {answer['job']!r}"
                )
        layouts = [decode_local(base64.b64decode(answer["layout"])) for answer in answers]
        mirrored = any(answer["mirrored"] for answer in answers)
        if mirrored and self._exchange.rank == 0:
            log.info(
                "paramd: parameters stay where they are and are copied into host memory at agreed "
                "boundaries; a trainer that hangs or has ended is not read"
            )
        layout = merge_layouts(layouts, mirrored=mirrored)
        return Found(
            optimizers=optimizers,
            home=homes[0],
            layout=layout,
            first_step=max(answer["step"] for answer in answers),
        )

    def identify(self) -> Identity:
        """Rank 0 obtains the next incarnation, the job's keys, and a ticket for each rank."""
        exchange = self._exchange
        taken: list[TakenIncarnation] = []

        def stage() -> dict[str, Any]:
            places.job_dir(self._job)
            if exchange.rank != 0:
                return {}
            mine = take_incarnation(self._settings, job=self._job, world_size=exchange.world_size)
            taken.append(mine)
            self._site = mine.site
            return {"incarnation": mine.incarnation, "public_key": mine.public_key.hex()}

        first = self._together(stage)[0]
        # Scattered, not gathered: a rank learns only its own ticket, and no private key.
        return Identity(
            job=self._job,
            incarnation=first["incarnation"],
            rank=exchange.rank,
            world_size=exchange.world_size,
            public_key=bytes.fromhex(first["public_key"]),
            rank_ticket=exchange.scatter(taken[0].rank_tickets if taken else None),
            private_key=taken[0].private_key if taken else None,
        )

    def open(self, identity: Identity, arena_bytes: int, digest: str) -> dict[str, Any]:
        """Bring up the sidecars and the control plane; return the sidecars' mesh message."""

        def stage() -> dict[str, Any]:
            path = places.socket_path(self._job, identity.rank)
            if identity.rank == 0 and not self._settings.control:
                self._control = ControlLink(
                    identity,
                    self._settings,
                    directory=path.parent,
                    token=new_token(),
                )
                self._undo.callback(self._control.close)
            self._sidecar = SidecarLink(
                identity, self._settings, socket_path=path, arena_bytes=arena_bytes
            )
            # Undone before the control plane, which exits after the last sidecar.
            self._undo.callback(self._sidecar.close)
            if self._control is not None:
                _fail_open(self._control.open)
            _fail_open(self._sidecar.open)
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
            }

        answers = self._together(stage)
        self._url = answers[0]["url"]
        return {
            "op": "mesh",
            "peers": [answer["peer"] for answer in answers],
            "control_address": answers[0]["control_address"],
            "layout_digest": digest,
        }

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
        model: torch.nn.Module,
        found: Found,
        identity: Identity,
        mesh: dict[str, Any],
        layout: bytes,
    ) -> Attachment:
        """Move the parameters into the arena and serve them, on all ranks or none."""
        assert self._sidecar is not None
        shared = self._sidecar.own_descriptors()
        page = ControlPage(shared.page)
        arena = HostArena(shared.arena, found.home.arena_bytes)
        self._undo.callback(arena.close)
        self._undo.callback(page.close)
        private_in_children(arena)

        def move() -> dict[str, Any]:
            arena.populate()
            self._undo.callback(found.home.move_out)
            found.home.move_in(arena.buffer)
            return {}

        made: list[Attachment] = []

        def begin() -> dict[str, Any]:
            _introduce(page, identity, found.first_step)
            made.append(self._attachment(model, found.home, identity, page, arena, shared))
            self._undo.callback(made[0].detach)
            made[0].follow(found.optimizers)
            self.serve(mesh, layout)
            return {}

        # Two stages, so that no rank serves before all have moved in.
        self._together(move)
        self._together(begin)
        # Attached on all ranks: point of no return.
        self._undo.pop_all()
        return made[0]

    def _attachment(
        self,
        model: torch.nn.Module,
        home: ParameterStorage,
        identity: Identity,
        page: ControlPage,
        arena: HostArena,
        shared: Descriptors,
    ) -> Attachment:
        assert self._sidecar is not None
        mirror = home if isinstance(home, MirroredHome) else None
        page[Word.MIRRORED] = int(mirror is not None)
        at_point = faults.from_environment(identity.rank)
        editor = Editor(page, arena, SparseMemory(shared.edits), at_point=at_point, mirror=mirror)
        moments = Moments(page, arena, SparseMemory(shared.moments), mirror=mirror)
        boundary = Boundary(
            page,
            shared.wake,
            home,
            self._agreement(),
            editor=editor,
            copy_buffers=home.copy_buffers,
            mirror_moments=moments.mirror,
            hold_cap_s=cap_s(collective_timeout_s()),
            stall_budget_ns=round(self._settings.stall_budget_ms * 1e6),
            mirror=mirror,
            always_strict=self._warned(changes_in_forward(model)),
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


def _introduce(page: ControlPage, identity: Identity, first_step: int) -> None:
    words = page.words
    words[Word.MAGIC] = MAGIC
    words[Word.INCARNATION] = identity.incarnation
    words[Word.STEP] = first_step
    words[Word.TRAINER_PID] = os.getpid()
    words[Word.TRAINER_START] = places.process_start(os.getpid())


Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def attach(
    model: torch.nn.Module,
    optimizer: Optimizers | Missing | None = Missing.OPTIMIZER,
    *,
    job: str | None = None,
    step: int | None = None,
    control: str | None = None,
    arena: str | None = None,
    settings: AttachSettings | None = None,
) -> Attachment:
    """Serve the parameters of `model` through sidecars, one per rank.

    Collective: every rank calls it at the same point, after wrapping the model (DDP, FSDP, TP),
    before the first step or between two steps. The training computes exactly what it would
    without. From then on anyone with a reader token can read the running job's parameters, whole
    and at one step, with `paramd.connect(job=...)`.

    Args:
        model: plain, DDP, FSDP1, FSDP2, HSDP, TP or a composition of them, in host memory or on
            CUDA devices.
        optimizer: one optimizer or several, possibly in wrappers that keep it as `.optimizer`;
            None when all parameter changes happen inside `attachment.update()`.
        job: name of the job: letters, digits, `.`, `_`, `-`; the same on every rank.
        step: number of updates already done; None takes it from the optimizer's state.
        control: URL of a site's control plane, where rank 0 registers the job with the token
            in PARAMD_TOKEN or PARAMD_TOKEN_FILE. None takes `settings.control`; if that is
            empty too, rank 0 starts a control plane for this job alone. One that does not answer
            within `settings.control_timeout_s` costs this job its service, never the training.
        arena: "auto", "host" or "mirror", see AttachSettings; None takes `settings.arena`.
            Parameters on devices are always mirrored: they stay where they are and can be read
            only at agreed boundaries, never from a trainer that hangs or has ended.
        settings: None reads them from the environment (`PARAMD_*`).

    Returns:
        The attachment; `detach()` undoes everything.

    Raises:
        UsageError, ConflictError: on all ranks when an argument is wrong on any; the
            training is untouched.
        DeniedError: `control` refused the token; likewise.
        ExhaustedError: not enough memory for the arena; likewise.
        Exception: any other failure on any rank; likewise.
    """
    settings = settings if settings is not None else AttachSettings.from_environment()
    if control is not None:
        settings = replace(settings, control=control)
    if arena is not None:
        settings = replace(settings, arena=arena)
    exchange = Exchange(timeout_s=settings.attach_timeout_s)
    stages = Stages(exchange, settings, job)
    try:
        found = stages.discover(model, optimizer, step)
        identity = stages.identify()
        mesh = stages.open(identity, found.home.arena_bytes, layout_digest(found.layout))
        layout = encode_layout(found.layout).SerializeToString()
        return stages.move_in(model, found, identity, mesh, layout)
    except BaseException:
        stages.close()
        raise
