"""The first stages: what to attach, the state to resume from, and each rank's identity."""

from __future__ import annotations

import base64
import ctypes
import json
import logging
import socket
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from paramd import errors, extras, places
from paramd.errors import ConflictError, UsageError
from paramd.layout.codec import decode_local, encode_layout, encode_local
from paramd.layout.merge import check_replicas, layout_digest, merge_layouts, whole_parameters
from paramd.layout.types import TensorKind
from paramd.security.tickets import new_token
from paramd.security.tls import Pems
from paramd.state_files import same_network
from paramd.trainer import faults
from paramd.trainer.attaching.addresses import Meeting, meet
from paramd.trainer.attaching.checks import (
    check_attachable,
    check_versions,
    optimizers_of,
    resolve,
    steps_done,
)
from paramd.trainer.attaching.exchange import Exchange, take_incarnation
from paramd.trainer.helpers.control_link import ControlLink, TakenIncarnation
from paramd.trainer.helpers.sidecar_link import Identity, OwnTls
from paramd.trainer.home.mirrored import home_of
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.model.hub import described
from paramd.trainer.model.local_shard import LocalShard
from paramd.trainer.resume.agreeing import agreed_choice
from paramd.trainer.resume.choice import RankOffer
from paramd.trainer.resume.copies import buddies
from paramd.trainer.resume.keeper import check_keep
from paramd.trainer.resume.succession import Succession, new_lineage
from paramd.trainer.settings import AttachSettings
from paramd.version import __version__

Answer = dict[str, Any]
"""A stage's JSON answer to the other ranks."""

log = logging.getLogger("paramd")

_SAME = ("resume", "keep_every", "standing_every", "replicas")
"""Settings that must be the same on every rank."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The model to attach, as agreed by all ranks."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    home: ParameterStorage
    layout: bytes
    """All ranks' layouts in one: a serialized paramd.v1.Layout."""
    layout_digest: str
    first_step: int


class Discovering:
    """One attempt to attach: state shared by all stages, and the stages that change nothing yet."""

    _succession: Succession | None = None
    _lineage = (0, 0)
    _hosts: Sequence[str] = ()
    """Each rank's `host_id`."""
    _buddies: Sequence[int] = ()
    """Each rank's keeper of its standing snapshots' copies; empty without replicas."""
    _control: ControlLink | None = None
    _site: TakenIncarnation | None = None
    _meeting: Meeting | None = None
    """The ranks' addresses if they are on several hosts and paramd makes certificates."""

    def __init__(
        self,
        exchange: Exchange,
        settings: AttachSettings,
        job: str | None,
        keep: Mapping[str, Any],
        former: Identity | None = None,
    ) -> None:
        """`former`: this training's present incarnation, if it attaches its parameters anew."""
        self._former = former
        self._known_incarnation = former.incarnation if former is not None else 0
        """The last incarnation that a rank's sidecar served: the host that counted them may be
        lost."""
        self._exchange = exchange
        self._settings = settings
        self._keep = keep
        # `discover` refuses a missing one, on all ranks, before it is used.
        self._job: str = job  # type: ignore[assignment]
        self._at_point = faults.from_environment(exchange.rank)
        self._undo = ExitStack()
        """Undoes everything begun so far, last first."""
        self._undo.callback(exchange.close)

    def close(self) -> None:
        """Undo the stages after a failure; the caller re-raises that failure."""
        try:
            self._undo.close()
        except Exception:
            log.exception("paramd: a failed attach could not be undone completely")

    def discover(self, model: Any, optimizer: Any, accelerator: Any, step: int | None) -> Found:
        """Inspect the model and agree on layout and first step; change nothing."""
        optimizers: list[torch.optim.Optimizer] = []
        modules: list[torch.nn.Module] = []
        homes: list[ParameterStorage] = []
        local: list[bytes] = []

        def stage() -> dict[str, Any]:
            # Fail here rather than in the helper processes' logs.
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
            local.append(encode_local(described(module, home.local_layout(self._exchange.rank))))
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
            }

        answers = self._together(stage)
        check_versions(answers)
        for name in ("job", *_SAME):
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
                "boundaries; a trainer that hangs or has ended cannot be read"
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
        """All ranks' layouts in one, and its digest. Merged once: it has pieces of all ranks."""
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

    def begin_anew(self, found: Found) -> None:
        """With resume="auto", begin a history of its own; nothing before it can be resumed."""
        if self._settings.resume == "never":
            return
        answers = self._together(lambda: {"lineage": new_lineage()})
        self._succession = self._successor_of(found)
        self._lineage = (0, answers[0]["lineage"])

    def _successor_of(self, found: Found) -> Succession:
        device = found.home.device
        succession = Succession(
            job=self._job,
            rank=self._exchange.rank,
            world_size=self._exchange.world_size,
            optimizers=found.optimizers,
            keep=self._keep,
            layout_digest=found.layout_digest,
            socket_path=places.socket_path(self._job, self._exchange.rank),
            hosts=self._hosts,
            device=device.request.uuid.hex() if device is not None else "",
        )
        self._undo.callback(succession.close)
        return succession

    def look_back(self, found: Found) -> Found:
        """Agree on the state of an earlier incarnation to resume from; change nothing."""
        if self._settings.resume == "never":
            return found
        exchange = self._exchange

        def look() -> dict[str, Any]:
            self._succession = self._successor_of(found)
            return {"offer": self._succession.look().to_message(), "lineage": new_lineage()}

        answers = self._together(look)
        succession = self._succession
        assert succession is not None
        offers = [RankOffer.from_message(answer["offer"]) for answer in answers]
        self._known_incarnation = max(offer.incarnation for offer in offers)
        choice = agreed_choice(succession, offers, self._together, exchange.group)
        self._pass("looked")
        # History branches where steps were lost; a fresh start has no lineage.
        new = choice.mark.lineage if choice.how == "live" else answers[0]["lineage"]
        self._lineage = (choice.mark.lineage, new)
        if exchange.rank == 0:
            # A warning, because most scripts set up no logging and would not show an info.
            tell = log.info if choice.how == "fresh" and not choice.lost_steps else log.warning
            tell("paramd: job %r %s", self._job, succession.said())
        return found if choice.how == "fresh" else replace(found, first_step=choice.mark.step)

    def identify(self) -> Identity:
        """Rank 0 obtains the next incarnation, the job's keys, and a ticket for each rank."""
        exchange = self._exchange
        taken: list[TakenIncarnation] = []

        def stage() -> dict[str, Any]:
            places.job_dir(self._job)
            if exchange.rank != 0:
                return {}
            meeting = self._meeting
            mine = take_incarnation(
                self._settings,
                job=self._job,
                world_size=exchange.world_size,
                hosts=[one.name for one in meeting.addresses] if meeting is not None else (),
                above=self._known_incarnation,
                former=self._former,
                control=self._control,
            )
            taken.append(mine)
            self._site = mine if mine.url else None
            return {"incarnation": mine.incarnation, "public_key": mine.public_key.hex()}

        first = self._together(stage)[0]
        token = self._former.control_token if self._former is not None else ""
        # Scattered, not gathered: a rank learns only its own ticket, and no private key of others.
        mine = json.loads(exchange.scatter(_secrets(taken[0], token) if taken else None))
        own_tls = None
        if self._meeting is not None and "tls" in mine:
            here = self._meeting.addresses[exchange.rank]
            own_tls = OwnTls(name=here.name, ip=here.ip, pems=Pems.of_json(mine["tls"]))
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
            own_tls=own_tls,
            certified=mine.get("certified", 0),
        )

    def _pass(self, point: str) -> None:
        if self._at_point is not None:
            self._at_point(point)

    def _together(self, stage: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        return together(self._exchange, stage)


def together(exchange: Exchange, stage: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a stage on every rank; a failure on one is raised on all."""
    failure: Exception | None = None
    try:
        message = stage()
    except Exception as error:
        failure = error
        message = {"error": str(error), "kind": type(error).__name__}
    # Also after a failure: gathering is collective, and the others would hang without us.
    answers = exchange.gather(message)
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if "error" in answer:
            kind = getattr(errors, answer["kind"], ConflictError)
            raise kind(f"rank {rank}: {answer['error']}")
    return answers


def contents(shards: Sequence[LocalShard], names: Collection[str]) -> array[int]:
    """A digest of each parameter's values, in the order of `shards`."""
    wanted = set(names)
    return array(
        "Q",
        (
            _digest(shard.tensor)
            for shard in shards
            if shard.kind is TensorKind.PARAMETER and shard.fqn in wanted
        ),
    )


def _digest(tensor: torch.Tensor) -> int:
    # Row-major: memory orders may differ between ranks.
    values = tensor.detach().to("cpu").contiguous()
    size_bytes = values.numel() * values.itemsize
    if not size_bytes:
        return 0
    return xxh3_64_intdigest((ctypes.c_char * size_bytes).from_address(values.data_ptr()))


def _secrets(taken: TakenIncarnation, control_token: str) -> list[str]:
    """Each rank's ticket and certificate, as JSON; for rank 0 the control plane's secrets, with a
    new token unless it has one."""
    told: list[dict[str, Any]] = [{"ticket": ticket} for ticket in taken.rank_tickets]
    for one, ticket in zip(told, taken.copy_tickets, strict=False):
        one["copy_ticket"] = ticket
    for one, pems in zip(told, taken.rank_pems, strict=False):
        one["tls"] = pems.to_json()
    if taken.private_key is not None:
        told[0] |= {
            "private_key": taken.private_key.hex(),
            "control_token": control_token or new_token(),
            "certified": taken.certified,
        }
    return [json.dumps(one) for one in told]


def _check_resumable(
    settings: AttachSettings, home: ParameterStorage, keep: Mapping[str, Any]
) -> None:
    """Raise UsageError if `resume` is requested and cannot work here."""
    if settings.resume == "never" and settings.replicas:
        raise UsageError("replicas=1 needs resume='auto', whose snapshots it copies")
    if settings.resume == "never":
        return
    if home.mirrored:
        raise UsageError(
            "resume='auto' does not work with parameters on devices or with arena='mirror', which "
            "are not in the arena; leave it out, or keep the parameters in host memory"
        )
    check_keep(keep)
