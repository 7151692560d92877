"""Move into the memory of a trainer that has ended.

look       ask this rank's surviving sidecar for its states
decide     compare all ranks' answers (choice.py, agreeing.py)
fetched    a copy of this rank's snapshot, if its own was lost with its host (copies.py)
survived   live: the memory itself, which the new attachment takes over as it is
fill       snapshot: its bytes are copied into new memory
restore    optimizer state, hyper-parameters and kept objects
go_on      random states, last of all
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paramd.errors import ConflictError, ParamdError, UnreachableError
from paramd.memory.arena import HostArena
from paramd.memory.continuation import CHECK_S, check_left, digest_of, read_pair
from paramd.memory.control_page import Word, Words
from paramd.memory.descriptors import SparseMemory, close_all, pages
from paramd.memory.handover import Allocation, Survived, continuation_bytes
from paramd.trainer.home.device import DeviceMemory, DeviceState
from paramd.trainer.home.moving import bytes_at
from paramd.trainer.resume import copies
from paramd.trainer.resume.choice import (
    OVER_AN_EXPORT,
    Choice,
    How,
    Mark,
    RankOffer,
    choose,
    signature_difference,
)
from paramd.trainer.resume.codec import check_random_state, decode, legible, set_random_state
from paramd.trainer.resume.keeper import Keeper, read_record
from paramd.trainer.resume.optimizer_home import OptimizerHome, signature

log = logging.getLogger("paramd")

NO_SIDECAR = "no sidecar of an earlier run is here"


@dataclass(frozen=True, slots=True)
class Resumed:
    """How this training was resumed."""

    step: int
    """Updates that are done: the next one is `step + 1`."""
    how: str
    """"live": nothing was lost; "snapshot": from a standing snapshot; "export": from an export,
    which has parameters, perhaps the optimizers' state, and nothing else."""
    lost_steps: int
    """Steps that some rank had made and that are repeated, as far as they are known: if memory is
    gone, only the steps that sidecars still report."""
    reason: str


@dataclass(frozen=True, slots=True)
class _State:
    """A state on offer: its record, its table, and its bytes."""

    mark: Mark
    record: dict[str, Any]
    table: dict[str, Any]
    parts: tuple[memoryview, ...]
    """Arena and optimizer memory of a live state; one part for a snapshot."""
    arena_bytes: int
    optimizer_bytes: int
    digest: int = 0
    """XXH3 of a snapshot's bytes; 0: unknown."""
    digests: tuple[int, ...] = ()
    """Digests of a live state's pieces (memory/continuation.py); empty: unknown."""


class Succession:
    """One rank's side of resuming. Training thread only."""

    def __init__(
        self,
        *,
        job: str,
        rank: int,
        world_size: int,
        optimizers: Sequence[torch.optim.Optimizer],
        keep: Mapping[str, Any],
        layout_digest: str,
        socket_path: Path,
        hosts: Sequence[str],
        device: str = "",
    ) -> None:
        """`hosts`: each rank's `host_id`. `device`: UUID of the device where the parameters are, in
        hex; empty: in host memory."""
        self._device = device
        self._job, self._rank, self._world_size = job, rank, world_size
        self._optimizers = list(optimizers)
        self._keep = dict(keep)
        self._layout_digest = layout_digest
        self._socket_path = socket_path
        self._descriptors: list[int] = []
        self._allocations: list[Allocation] = []
        """Optimizer state on the device that came with the live state."""
        self._live: _State | None = None
        self._snapshots: list[_State] = []
        self._choice: Choice | None = None
        self._chosen: _State | None = None
        self._incarnation = 0
        sockets = copies.left_behind(socket_path, rank, hosts) | {rank: socket_path}
        self._copies = copies.Copies(job=job, rank=rank, sockets=sockets)
        self._ways: dict[int, int] = {}

    def look(self) -> RankOffer:
        """Ask the sidecars here for their states; change nothing."""
        offer, looked = self._looked(), self._copies.look()
        if looked.living_pid and not offer.living_pid:
            return RankOffer(living_pid=looked.living_pid)
        return dataclasses.replace(
            offer,
            step=max(offer.step, looked.step),
            copies=looked.copies,
            incarnation=looked.incarnation,
        )

    def _looked(self) -> RankOffer:
        try:
            offer, self._descriptors = self._asked()
        except UnreachableError:
            return RankOffer(absent=NO_SIDECAR)
        except (ParamdError, OSError, EOFError) as error:
            return RankOffer(absent=f"its sidecar gave no answer ({error})")
        if offer["ownership"] == "OWNED":
            return RankOffer(living_pid=int(offer["pid"]))
        if offer["ownership"] == "WAITING" and not offer["snapshots"]:
            return RankOffer(absent=NO_SIDECAR)
        self._incarnation = int(offer["incarnation"])
        why_not = str(offer["why_not_live"])
        descriptors = list(self._descriptors)
        if not why_not:
            why_not, descriptors = self._look_at_live(offer, descriptors)
        self._look_at_snapshots(offer["snapshots"], descriptors)
        states = [*([self._live] if self._live is not None else []), *self._snapshots]
        return RankOffer(
            refusal=self._difference(states[0], offer) if states else "",
            step=max(int(offer["step"]), int(offer["reached"])),
            lineage=int(offer["lineage"]),
            live=self._live.mark if self._live is not None else None,
            why_not_live=why_not,
            snapshots=tuple(state.mark for state in self._snapshots),
        )

    def _look_at_live(
        self, offer: dict[str, Any], descriptors: Sequence[int]
    ) -> tuple[str, list[int]]:
        """Read the live state; why it cannot be used, and the descriptors that are not its."""
        sizes = [int(size) for size in offer["allocations"]]
        self._allocations = list(map(Allocation, descriptors[3:], sizes))
        others = list(descriptors[3 + len(sizes) :])
        mark = Mark(int(offer["step"]), int(offer["lineage"]), int(offer["edits"]))
        try:
            return self._read_live(offer, descriptors[2], mark), others
        except ParamdError as error:
            return str(error), others

    def _look_at_snapshots(
        self, labels: Sequence[Mapping[str, Any]], descriptors: Sequence[int]
    ) -> None:
        """Read the snapshots; one that cannot be read is none."""
        for label, descriptor in zip(labels, descriptors, strict=True):
            with suppress(ParamdError, LookupError, TypeError, ValueError, OSError):
                self._snapshots += _snapshots_in(
                    copies.mapped(descriptor, sum(copies.sizes_of(label))), label
                )

    def decide(self, offers: Sequence[RankOffer], damaged: Sequence[tuple[How, Mark]]) -> Choice:
        """Choose, as all ranks do.

        Raises:
            ConflictError: As `choose`.
        """
        choice = choose(offers, damaged)
        states = [self._live] if choice.how == "live" else self._snapshots
        self._choice = choice
        self._chosen = next((s for s in states if s is not None and s.mark == choice.mark), None)
        return choice

    def ready(self, ways: dict[int, int], offers: Sequence[RankOffer]) -> list[copies.Damaged]:
        """Make ready to give and get copies; what it would have to give and found damaged."""
        assert self._choice is not None, "decide comes first"
        self._ways = ways
        return self._copies.prepare(self._choice.mark, ways, offers)

    def fetch(self, group: dist.ProcessGroup | None) -> list[copies.Damaged]:
        """Get this rank's copy, and give others theirs; return arrived copies that are damaged.

        Raises:
            ConflictError: If the copy is of another script.
        """
        got = self._copies.exchange(self._ways, group)
        if got is None:
            return []
        assert self._choice is not None, "decide comes first"
        label, memory = got
        mark = self._choice.mark
        damaged = copies.Damaged(self._rank, self._ways[self._rank], mark)
        try:
            with legible():
                states = [one for one in _snapshots_in(memory, label) if one.mark == mark]
                refusal = self._difference(states[0], label) if states else ""
        except ParamdError:
            return [damaged]
        if not states or digest_of(*states[0].parts) != states[0].digest:
            return [damaged]
        if refusal:
            raise ConflictError(f"resume: on rank {self._rank} {refusal}; {OVER_AN_EXPORT}")
        state = states[0]
        self._snapshots.append(state)
        self._chosen = state
        return []

    def damage(self) -> str:
        """Known damage of the chosen state's bytes; empty if none."""
        state, choice = self._chosen, self._choice
        if state is None or choice is None:
            return ""
        if choice.how == "live":
            damaged = self._left_damaged(state)
        else:
            damaged = bool(state.digest) and digest_of(*state.parts) != state.digest
        if not damaged:
            return ""
        return f"the {choice.how} state of step {state.mark.step} is damaged on rank {self._rank}"

    def _left_damaged(self, state: _State) -> bool:
        if not state.digests:
            if not self._device:
                log.warning(
                    "paramd: rank %d: its sidecar has no digests of step %d yet; only samples and "
                    "the record are checked",
                    self._rank,
                    state.mark.step,
                )
            return False
        found = check_left(state.parts, state.digests)
        if found.piece_count < found.of_count:
            log.info(
                "paramd: rank %d: %d of %d pieces of step %d were checked in %.0f s",
                self._rank,
                found.piece_count,
                found.of_count,
                state.mark.step,
                CHECK_S,
            )
        return found.damaged

    @property
    def survived(self) -> Survived | None:
        """The former trainer's memory, if it is taken over as it is."""
        if self._choice is None or self._choice.how != "live":
            return None
        arena, optimizer, continuation = self._descriptors[:3]
        return Survived(
            arena=arena, optimizer=optimizer, continuation=continuation, state=self._allocations
        )

    @property
    def resumed(self) -> Resumed | None:
        """How the training is resumed; None for a fresh start."""
        choice = self._choice
        if choice is None or choice.how == "fresh":
            return None
        return Resumed(choice.mark.step, choice.how, choice.lost_steps, choice.reason)

    @property
    def steps_known(self) -> int:
        """The last step that is known to have been made, when a fresh start was chosen."""
        return self._choice.lost_steps if self._choice is not None else 0

    def introduce(self, words: Words) -> None:
        """Publish on the page what came with the chosen state, if any."""
        state, choice = self._chosen, self._choice
        if state is not None and choice is not None:
            words[Word.EDITS_BEFORE] = state.mark.edits
            words[Word.OPTIMIZER_BYTES], words[Word.STATE_BYTES] = _used_bytes(state.table)
            words[Word.STANDING_MADE] = words[Word.STANDING_COMMON] = choice.common_step

    def said(self) -> str:
        """One line for the log: the choice, the losses, and the reason."""
        choice = self._choice
        assert choice is not None, "decide comes first"
        if choice.how == "live":
            return (
                f"resumes at step {choice.mark.step} from memory (run "
                f"{self._incarnation}); no step is lost"
            )
        if choice.how == "snapshot":
            return (
                f"resumes at step {choice.mark.step} from a standing snapshot; "
                f"{choice.lost_steps} steps are repeated, because {choice.reason}"
                f"{self._from_copies()}"
            )
        if not choice.lost_steps:
            return f"starts afresh: {choice.reason}"
        return f"starts afresh and loses {choice.lost_steps} steps: {choice.reason}"

    def _from_copies(self) -> str:
        origins = [f"that of rank {rank} was kept by rank {h}" for rank, h in self._ways.items()]
        more = f" and {len(origins) - 8} more" if len(origins) > 8 else ""
        return f"; {', '.join(origins[:8])}{more}" if origins else ""

    def fill(
        self,
        arena: HostArena | DeviceMemory,
        optimizer: SparseMemory,
        on_device: DeviceState | None = None,
    ) -> None:
        """Copy a snapshot's bytes into new memory."""
        state = self._chosen
        if state is None:
            return
        host_bytes, device_bytes = _used_bytes(state.table)
        source = torch.frombuffer(state.parts[0], dtype=torch.uint8)
        begin = state.arena_bytes
        if begin:
            bytes_at(arena.buffer, 0, begin).copy_(source[:begin])
        if host_bytes:
            optimizer.reserve(0, pages(host_bytes))
            ctypes.memmove(optimizer.address, source.data_ptr() + begin, host_bytes)
        if device_bytes:
            assert on_device is not None, "else `_difference` has refused it"
            on_device.reserve(0, pages(device_bytes))
            begin += host_bytes
            bytes_at(on_device, 0, device_bytes).copy_(source[begin : begin + device_bytes])

    def restore(self, home: OptimizerHome) -> None:
        """Give optimizers and kept objects the state that was chosen."""
        state = self._chosen
        if state is None:
            return
        home.adopt(state.table, state.record["others"])
        give_back(state.record, self._optimizers, self._keep)

    def go_on(self, keeper: Keeper) -> None:
        """Continue the random states, and let the keeper begin. Last of all."""
        state = self._chosen
        if state is None:
            return
        early: bytes = state.record["early"]
        set_random_state(decode(early)["random"])
        keeper.begin(state.mark.step, early=early, forward=state.record["random_forward"])

    def close(self) -> None:
        """Release what the offer came with. Idempotent."""
        self._live = self._chosen = None
        self._snapshots = []
        self._copies.close()
        close_all(self._descriptors)
        self._descriptors = []

    def _asked(self) -> tuple[dict[str, Any], list[int]]:
        message = {"op": "offer", "job": self._job, "rank": self._rank}
        answer, descriptors = copies.asked(self._socket_path, message)
        if answer["op"] != "offered":
            close_all(descriptors)
            raise UnreachableError(str(answer.get("message", answer["op"])))
        return answer, descriptors

    def _read_live(self, offer: dict[str, Any], continuation: int, mark: Mark) -> str:
        """Read the live state's record and table; return why it cannot be used."""
        pair = read_pair(copies.mapped(continuation, continuation_bytes()))
        record = read_record(pair[0]) if pair is not None else {"step": -1}
        if pair is None or record["step"] != mark.step:
            return (
                f"its trainer ended after update {mark.step} and before what goes with it was kept"
            )
        if offer["device"] != self._device:
            return f"it is {_place(offer['device'])}, and this script's is {_place(self._device)}"
        sizes = int(offer["arena_bytes"]), int(offer["optimizer_bytes"])
        # Memory on a device is not mapped here, and has no digests to check it by.
        on = int(bool(self._device))
        self._live = _State(
            mark,
            record,
            _checked(record, decode(pair[1])),
            parts=tuple(
                copies.mapped(descriptor, size)
                for descriptor, size in zip(self._descriptors[on:2], sizes[on:], strict=True)
                if size
            ),
            arena_bytes=sizes[0],
            optimizer_bytes=sizes[1],
            digests=tuple(map(int, offer["digests"])),
        )
        return ""

    def _difference(self, state: _State, offer: Mapping[str, Any]) -> str:
        """How this script differs from the state's; empty if it does not."""
        if offer["world_size"] != self._world_size:
            return f"the world size was {offer['world_size']} and is {self._world_size}"
        if offer["layout_digest"] != self._layout_digest:
            return "the model's parameters, or how they are sharded, are not those in memory"
        if (was := bool(state.table["on_device"])) != bool(self._device):
            where = ("in host memory", "on a device")
            return f"the parameters were {where[was]} and are {where[not was]}"
        if found := signature_difference(state.table["optimizers"], signature(self._optimizers)):
            return found
        return keep_difference(state.record, self._keep)


def give_back(
    record: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer], keep: Mapping[str, Any]
) -> None:
    """Restore kept objects and parameter groups; ConflictError if an object refuses its state."""
    kept = _kept(record)
    for name, thing in keep.items():
        try:
            thing.load_state_dict(kept[name])
        except Exception as error:
            raise ConflictError(
                f"resume: extra_state[{name!r}], an object of class {type(thing).__name__}, did "
                f"not load the state that was recorded under this name ({type(error).__name__}: "
                f"{error}); {OVER_AN_EXPORT}"
            ) from error
    # After the kept objects: a scheduler may set hyper-parameters while it is loaded.
    for optimizer, groups in zip(optimizers, record["groups"], strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            _set_group(group, values)


def keep_difference(record: dict[str, Any], keep: Mapping[str, Any]) -> str:
    """How the names in `extra_state` differ from a record's; empty if they do not."""
    kept, now = set(_kept(record)), set(keep)
    return f"extra_state had {_names(kept)} and has {_names(now)}" if kept != now else ""


def new_lineage() -> int:
    """A number for a new lineage; never 0."""
    return secrets.randbits(62) | 1


def _snapshots_in(memory: memoryview, label: Mapping[str, Any]) -> list[_State]:
    """A snapshot, as a state of each lineage that it belongs to."""
    sizes = copies.sizes_of(label)
    begin = sizes[0] + sizes[1]
    record = read_record(bytes(memory[begin : begin + sizes[2]]))
    table = _checked(record, decode(bytes(memory[begin + sizes[2] : sum(sizes)])))
    return [
        _State(
            mark,
            record,
            table,
            parts=(memory,),
            arena_bytes=sizes[0],
            optimizer_bytes=sizes[1],
            digest=int(label["digest"]),
        )
        for mark in copies.marks_of(label)
    ]


def _checked(record: dict[str, Any], table: Any) -> dict[str, Any]:
    """The table, if it and the record have what resuming needs. Raises UsageError.

    A record whose digest is right can still be another program's, or made up by the host that kept
    it. What would fail later is therefore checked here, while another state can still be chosen.
    """
    with legible():
        bool(table["on_device"])
        host_bytes, device_bytes = _used_bytes(table)
        if min(host_bytes, device_bytes) < 0:
            raise ValueError(f"used_bytes {host_bytes}, {device_bytes}")
        for _kind, groups in table["optimizers"]:
            for group in groups:
                for _dtype, shape in group:
                    list(shape)
        for groups in record["groups"]:
            if not all(isinstance(group, dict) for group in groups):
                raise TypeError("a group of parameters is no dict")
        for name in ("others", "random_forward"):
            record[name]
        _kept(record)
        check_random_state(decode(record["early"])["random"])
    checked: dict[str, Any] = table
    return checked


def _used_bytes(table: dict[str, Any]) -> tuple[int, int]:
    host_bytes, device_bytes = (*map(int, table["used_bytes"]), 0)[:2]
    return host_bytes, device_bytes


def _kept(record: dict[str, Any]) -> dict[str, Any]:
    return {**decode(record["early"])["keep"], **decode(record["late"])}


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) if names else "nothing"


def _set_group(group: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        known = group.get(name)
        if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
            # In place: a scheduler or a graph may refer to it.
            with torch.no_grad():
                known.copy_(value)
        else:
            group[name] = value


def _place(device: str) -> str:
    return f"on device {device}" if device else "in host memory"
