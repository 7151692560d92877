"""`paramd.attach`: one line in the training script, on every rank."""

from __future__ import annotations

import base64
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from paramd import errors, places
from paramd.errors import ConflictError, ParamdError, UsageError
from paramd.layout.codec import decode_local, encode_layout, encode_local
from paramd.layout.merge import layout_digest, merge_layouts
from paramd.layout.types import Layout
from paramd.memory.arena import HostArena
from paramd.memory.control_page import MAGIC, ControlPage, Word
from paramd.memory.forking import private_in_children
from paramd.memory.sparse import SparseMemory
from paramd.tokens import new_token
from paramd.trainer import faults
from paramd.trainer.agreement import Agreement
from paramd.trainer.attachment import Attachment, attached
from paramd.trainer.boundary import Boundary
from paramd.trainer.control_link import ControlLink
from paramd.trainer.editing import Editor
from paramd.trainer.epoch import TakenEpoch, take_epoch
from paramd.trainer.exchange import Exchange, collective_timeout_s
from paramd.trainer.gradients import GradientCapture
from paramd.trainer.holding import cap_s
from paramd.trainer.mirror import MirroredHome, home_of
from paramd.trainer.moments import Moments
from paramd.trainer.rehome import Home
from paramd.trainer.settings import AttachSettings
from paramd.trainer.sidecar_link import Identity, SidecarLink
from paramd.trainer.site_link import Registration

log = logging.getLogger("paramd")

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def attach(
    model: torch.nn.Module,
    optimizer: Optimizers | None,
    *,
    job: str,
    step: int | None = None,
    control: str | None = None,
    arena: str | None = None,
    settings: AttachSettings | None = None,
) -> Attachment:
    """Puts the parameters of `model` under the care of a sidecar, one on each rank.

    Collective: every rank calls it at the same place, after wrapping the model (DDP,
    FSDP, TP), before the first step or between two steps. The training computes exactly
    what it would without. From then on anyone who may can read the parameters of the
    running job, whole and at one step, with `paramd.connect(job=...)`.

    Args:
        model: plain, DDP, FSDP1, FSDP2, HSDP, TP or a composition of them, in host memory or on
            CUDA devices.
        optimizer: the optimizer, or all of them; None when every change of parameters
            stands in `attachment.update()`.
        job: name of the job: letters, digits, `.`, `_`, `-`; the same on every rank.
        step: number of updates already done; None takes it from the optimizer's state.
        control: URL of a site's control plane, where rank 0 registers the job with the token
            in PARAMD_TOKEN or PARAMD_TOKEN_FILE. None takes `settings.control`; when that is
            empty too, rank 0 starts a control plane of the job's own. One that does not answer
            costs this epoch the service, never the training.
        arena: "auto", "host" or "mirror", as AttachSettings says; None takes `settings.arena`.
            Parameters on devices are always mirrored: they stay where they are, and are read at
            agreed boundaries only, never from a trainer that hangs or has ended.
        settings: None reads them from the environment (`PARAMD_*`).

    Returns:
        The attachment; `detach()` undoes everything.

    Raises:
        UsageError, ConflictError: on all ranks when an argument is wrong on any; the
            training is untouched.
        DeniedError: `control` refused the token; likewise.
        ExhaustedError: the machine has not the memory for the arena; likewise.
    """
    settings = settings if settings is not None else AttachSettings.from_environment()
    if control is not None:
        settings = replace(settings, control=control)
    if arena is not None:
        settings = replace(settings, arena=arena)
    exchange = Exchange(timeout_s=settings.attach_timeout_s)
    stages = _Stages(exchange, settings, job)
    try:
        optimizers = _as_list(optimizer)
        home, layout, first_step = stages.discover(model, optimizers, step)
        identity = stages.identify()
        mesh = stages.open(identity, home.arena_bytes, layout_digest(layout))
        attachment = stages.move_in(model, home, identity, first_step)
    except BaseException:
        stages.close()
        raise
    stages.serve(mesh, encode_layout(layout).SerializeToString())
    attachment.follow(optimizers)
    return attachment


class _Stages:
    """The stages of attaching; each ends with every rank knowing how it went on all."""

    def __init__(self, exchange: Exchange, settings: AttachSettings, job: str) -> None:
        self._exchange = exchange
        self._settings = settings
        self._job = job
        self._sidecar: SidecarLink | None = None
        self._control: ControlLink | None = None
        self._site: Registration | None = None
        self._url = ""

    def discover(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        step: int | None,
    ) -> tuple[Home, Layout, int]:
        """Looks at the model and agrees on the layout and the first step; changes nothing."""
        homes = []

        def stage() -> dict[str, Any]:
            _check(model, optimizers, self._job)
            home = home_of(model, self._settings.arena)
            homes.append(home)
            local = encode_local(home.local_layout(self._exchange.rank))
            return {
                "job": self._job,
                "layout": base64.b64encode(local).decode(),
                "mirrored": home.mirrored,
                "step": step if step is not None else _steps_done(optimizers),
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
        return homes[0], layout, max(answer["step"] for answer in answers)

    def identify(self) -> Identity:
        """Rank 0 takes the next epoch, the job's keys, and each rank's own ticket."""
        exchange = self._exchange
        taken: list[TakenEpoch] = []

        def stage() -> dict[str, Any]:
            places.job_dir(self._job)
            if exchange.rank != 0:
                return {}
            mine = take_epoch(self._settings, job=self._job, world_size=exchange.world_size)
            taken.append(mine)
            self._site = mine.site
            return {"epoch": mine.epoch, "public_key": mine.public_key.hex()}

        first = self._together(stage)[0]
        # Each rank gets its own ticket and no other: the private key stays where it is made.
        return Identity(
            job=self._job,
            epoch=first["epoch"],
            rank=exchange.rank,
            world_size=exchange.world_size,
            public_key=bytes.fromhex(first["public_key"]),
            rank_ticket=exchange.scatter(taken[0].rank_tickets if taken else None),
            private_key=taken[0].private_key if taken else None,
        )

    def open(self, identity: Identity, arena_bytes: int, digest: str) -> dict[str, Any]:
        """Brings up the sidecars and the control plane; returns what the sidecars are told."""

        def stage() -> dict[str, Any]:
            path = places.socket_path(self._job, identity.rank)
            self._sidecar = SidecarLink(
                identity, self._settings, socket_path=path, arena_bytes=arena_bytes
            )
            if identity.rank == 0 and not self._settings.control:
                self._control = ControlLink(
                    identity,
                    self._settings,
                    directory=path.parent,
                    token=new_token(),
                )
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
        self, model: torch.nn.Module, home: Home, identity: Identity, first_step: int
    ) -> Attachment:
        """Moves the parameters into the arena, on all ranks or on none."""
        assert self._sidecar is not None
        shared = self._sidecar.own_descriptors()
        page = ControlPage(shared.page)
        arena = HostArena(shared.arena, home.arena_bytes)
        private_in_children(arena)

        def stage() -> dict[str, Any]:
            arena.populate()
            home.move_in(arena.buffer)
            home.copy_buffers()
            return {}

        try:
            self._together(stage)
        except BaseException:
            home.move_out()
            page.close()
            arena.close()
            raise
        _introduce(page, identity, first_step)
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
        )
        gradients = GradientCapture(
            page,
            shared.wake,
            shared.gradients,
            arena_bytes=home.arena_bytes,
            pieces=home.pieces,
            lossless_budget_ns=round(self._settings.lossless_budget_ms * 1e6),
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
            gradients=gradients,
            exchange=self._exchange,
            sidecar=self._sidecar,
            control=self._control,
            url=self._url,
        )

    def _agreement(self) -> Agreement:
        return Agreement(
            self._exchange.group,
            timeout_s=self._settings.agreement_timeout_s,
            edit_timeout_s=self._settings.attach_timeout_s,
        )

    def serve(self, mesh: dict[str, Any], layout: bytes) -> None:
        assert self._sidecar is not None
        self._sidecar.serve(mesh, layout)

    def close(self) -> None:
        """Undoes what the stages began, after a failure."""
        if self._sidecar is not None:
            self._sidecar.close()
        if self._control is not None:
            self._control.close()
        self._exchange.close()

    def _together(self, stage: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Runs a stage on every rank; what failed on one is raised on all."""
        failure: Exception | None = None
        try:
            message = stage()
        except Exception as error:
            failure = error
            message = {"error": str(error), "kind": type(error).__name__}
        answers = self._exchange.gather(message)
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if "error" in answer:
                kind = getattr(errors, answer["kind"], ConflictError)
                raise kind(f"rank {rank}: {answer['error']}")
        return answers


def _as_list(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _check(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], job: str) -> None:
    places.check_job_name(job)
    if id(model) in attached:
        raise ConflictError(f"this model is attached already ({attached[id(model)]!r}); detach it")
    if any(other.job == job for other in attached.values()):
        raise ConflictError(
            f"another model is attached as job {job!r} in this process; detach it, or attach "
            "this one under another job name"
        )
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    updated: set[int] = set()
    for index, optimizer in enumerate(optimizers):
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not mine & parameters.keys():
            raise UsageError(
                f"optimizer {index} ({type(optimizer).__name__}) updates no parameter of this "
                "model; make the optimizer after wrapping the model, and pass that model"
            )
        updated |= mine
    if optimizers and not all(id(p) in updated for p in model.parameters() if p.requires_grad):
        warnings.warn(
            "paramd.attach: some trainable parameters belong to none of the given optimizers; "
            "pass all optimizers, or change those parameters inside attachment.update()",
            stacklevel=2,
        )


def _steps_done(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """The number of updates that the optimizers themselves have counted, 0 if they do not."""
    return max(
        (
            int(state["step"])
            for optimizer in optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict) and "step" in state
        ),
        default=0,
    )


def _fail_open(start: Callable[[], None]) -> None:
    """Whatever keeps a helper process from starting costs the service, not the training.

    A conflict is the user's to solve (somebody else owns that name), so it is raised.
    """
    try:
        start()
    except ConflictError:
        raise
    except (ParamdError, OSError, EOFError) as error:
        log.warning("paramd: %s; training goes on, it is tried again", error)


def _introduce(page: ControlPage, identity: Identity, first_step: int) -> None:
    words = page.words
    words[Word.MAGIC] = MAGIC
    words[Word.EPOCH] = identity.epoch
    words[Word.STEP] = first_step
    words[Word.TRAINER_PID] = os.getpid()
    words[Word.TRAINER_START] = places.process_start(os.getpid())
