"""Move a model's local parameters into an arena, and keep them there.

    home = ParameterStorage(model)         # inspects, changes nothing
    local = home.local_layout(rank)        # the layout of an arena of home.arena_bytes
    home.move_in(memory)                   # the parameters now live in the arena
    home.check(); home.take_back()         # when an update settles: detect, bring back what left
    home.contents.strayed()                # before the next one: detect changes in between
    home.copy_buffers()                    # buffers are copied on request
    home.move_out()                        # private memory again

Every storage keeps its size and its tensors' offsets; only its address changes. So code that
compares storages (FSDP), saves a single tensor (`torch.save`) or views several tensors of one
storage sees no difference. Storages in the arena cannot be resized; FSDP resizes only unsharded
and low-precision memory, which stays where it is.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import nn

from paramd.errors import ConflictError, UsageError
from paramd.layout.merge import LocalLayout
from paramd.layout.types import Piece, TensorKind, TensorLayout
from paramd.memory.arena import HostArena, private_in_children
from paramd.trainer.home import moving
from paramd.trainer.home.arena_plan import ALIGN_BYTES, ArenaPlan, plan_arena
from paramd.trainer.home.moving import BufferCopies, Escaped, Memory, Range, Ranges
from paramd.trainer.home.watch import Contents, Watch, Watched
from paramd.trainer.model import fsdp
from paramd.trainer.model.dtensor import split
from paramd.trainer.model.local_shard import LocalShard
from paramd.trainer.model.shards import find_shards

if TYPE_CHECKING:
    from paramd.memory.control_page import ControlPage
    from paramd.memory.device_arena import TrainerDevice
    from paramd.memory.handover import Allocation
    from paramd.trainer.home.device import DeviceMemory, DeviceState


def _are_its_parts(tensors: Sequence[torch.Tensor], shard: LocalShard) -> bool:
    """Whether all are tensors that the shard is a part of, in the shard's own storage."""
    wholes = {id(whole) for whole in shard.part_of}
    if not wholes.issuperset(map(id, tensors)):
        return False
    return all(moving.storage(tensor) == moving.storage(shard.tensor) for tensor in tensors)


class ParameterStorage:
    """The place of one model's local parameters. Training thread only, except `in_place`.

    States: *outside* (after the constructor and after `move_out`: parameters in private
    memory) and *inside* (after `move_in`: in the arena).
    """

    mirrored = False
    """Whether the arena is a copy, and the parameters stay where they are (mirrored.py)."""

    device: TrainerDevice | None = None
    """The arena's device; None: in host memory."""

    _align_bytes = ALIGN_BYTES

    def __init__(self, model: nn.Module) -> None:
        """Inspect the model and plan an arena for it; change nothing. ConflictError names a tensor
        that cannot be served.
        """
        self._model = model
        self._shards = find_shards(model)
        self._plan = self._planned(self._shards)
        self._bases: list[torch.Tensor] = []
        self._buffers: BufferCopies | None = None
        self._arena_address = 0
        self._watch: Watch | None = None
        self.contents: Contents | None = None
        """Samples of the arena's contents; None when outside or mirrored."""
        self.states: Callable[[], Iterable[torch.Tensor]] = tuple
        """Tensors that the optimizers keep, which may share a parameter's new memory."""

    def _planned(self, shards: Sequence[LocalShard]) -> ArenaPlan:
        return self._plan_for(shards, self._alive())

    def _plan_for(self, shards: Sequence[LocalShard], alive: Sequence[torch.Tensor]) -> ArenaPlan:
        for shard in shards:
            self._check_movable(shard)
        return plan_arena(shards, alive, self._align_bytes)

    def _check_movable(self, shard: LocalShard) -> None:
        """Raise ConflictError for a tensor outside host memory, or used by other processes."""
        if shard.tensor.device.type != "cpu":
            raise ConflictError(
                f"tensor {shard.fqn!r}: parameters on {shard.tensor.device}: only those in host "
                "memory can be moved into an arena"
            )
        if shard.kind is TensorKind.PARAMETER and shard.tensor.is_shared():
            raise ConflictError(
                f"parameter {shard.fqn!r} is in memory shared with other processes "
                "(share_memory), which would stop seeing its updates; attach before sharing it "
                "or do not share it"
            )

    def _alive(self) -> list[torch.Tensor]:
        """All tensors that may use the parameters' memory."""
        return list(moving.live_tensors())

    def open_arena(self, descriptor: int, page: ControlPage) -> HostArena | DeviceMemory:
        """Map the arena into this process. The descriptor stays the caller's."""
        arena = HostArena(descriptor, self.arena_bytes)
        private_in_children(arena)
        return arena

    def open_state(
        self, allocations: Sequence[Allocation], size_bytes: int, add: Callable[[int], object]
    ) -> DeviceState | None:
        """Memory for optimizer state beside these parameters; None: they are in host memory."""
        return None

    def finish(self) -> None:
        """Wait until a device has done what training queued; nothing to do in host memory."""

    @property
    def arena_bytes(self) -> int:
        """Arena size that `move_in` needs."""
        return self._plan.arena_bytes

    @property
    def arena_address(self) -> int:
        """The arena's address; 0 when outside."""
        return self._arena_address

    @property
    def shards(self) -> list[LocalShard]:
        """This rank's shards, in module tree order."""
        return list(self._shards)

    def pieces(self) -> list[tuple[LocalShard, int]]:
        """Parameters with elements on this rank, each with its first arena byte."""
        return self._placed(TensorKind.PARAMETER)

    def departed(self) -> list[LocalShard]:
        """The shards as the model has them now, if any is not where it belongs; none if all are.

        Raises:
            ConflictError: For a tensor of a kind that cannot be served.
        """
        assert self._watch is not None, "move_in comes first"
        return [] if self._watch.in_place() else find_shards(self._model)

    def local_layout(self, rank: int) -> LocalLayout:
        """All tensors, with this rank's pieces at their arena places."""
        tensors: dict[str, TensorLayout] = {}
        for shard, begin in zip(self._shards, self._plan.begins, strict=True):
            known = tensors.get(shard.fqn)
            pieces = known.pieces if known is not None else ()
            tensors[shard.fqn] = TensorLayout(
                pieces=pieces if begin is None else (*pieces, _piece(shard, rank, begin)),
                fqn=shard.fqn,
                dtype=shard.dtype,
                shape=shard.shape,
                kind=shard.kind,
                placement=shard.placement,
                aliases=shard.aliases,
                trainable=shard.trainable,
            )
        return LocalLayout(rank=rank, arena_bytes=self.arena_bytes, tensors=tuple(tensors.values()))

    def move_in(self, arena: Memory) -> None:
        """Copy every parameter's storage into `arena` and point all its tensors there.

        Only between steps, and once: a model that moved out needs a new object. All or nothing: on
        error no tensor has moved. Draws no random numbers; preserves gradients, `requires_grad` and
        the identity of parameters. `arena`: writable, page-aligned memory of at least
        `arena_bytes`, referenced until `move_out`, and for as long as any tensor in it is alive.

        Raises:
            UsageError: If it is too small or read-only.
            ConflictError: If the model has changed since the constructor, or is already inside.
        """
        self._move(arena, filled=True)

    def adopt(self, arena: Memory) -> None:
        """As `move_in`, but with the values in `arena`; no parameter's bytes are touched."""
        self._move(arena, filled=False)

    def _move(self, arena: Memory, *, filled: bool) -> None:
        if self._bases:
            raise ConflictError("the parameters are already in an arena; detach first")
        check_arena(arena, self.arena_bytes)
        shards = find_shards(self._model)
        alive = self._alive()
        if self._plan_for(shards, alive) != self._plan or moving.differences(self._shards, shards):
            raise ConflictError(
                "the model's parameters changed while they were being attached; attach again"
            )
        self._shards = []
        tensors = moving.users(shards, alive, Ranges(self._plan.ranges))
        if gc.get_freeze_count() and moving.has_unseen_users(tensors):
            raise ConflictError(
                "gc.freeze() hides tensors that use the parameters' memory and would stop "
                "following them; call gc.unfreeze() before paramd.attach"
            )
        bases = self._bases_of(arena, tensors, filled=filled)
        moving.repoint([(t, moving.moved(t, bases[moving.storage_range(t)])) for t in tensors])
        self._arena_address = address_of(arena)
        self._bases = sorted(bases.values(), key=moving.address)
        self._shards = find_shards(self._model)
        self._buffers = BufferCopies(arena, self._placed(TensorKind.BUFFER))
        if filled:
            self._buffers.refresh()
        else:
            self._buffers.restore()
        self.contents = self._contents_of(arena)
        self._rewatch()

    def _contents_of(self, arena: Memory) -> Contents:
        assert isinstance(arena, memoryview)
        return Contents(
            arena, [(begin, begin + moving.span_bytes(s.tensor)) for s, begin in self.pieces()]
        )

    def _rewatch(self) -> None:
        """Watch the model's present tensors."""
        if self._watch is not None:
            self._watch.close()
        # Glances keep storages alive: harmless in an arena, which frees nothing; not elsewhere.
        self._watch = Watch(self._watched(), self._model, glances=not self.mirrored)
        if self.contents is not None:
            self.contents.watch(self._watch.plain_slots, self._watch.distributed_slots)

    def _bases_of(
        self, arena: Memory, tensors: Sequence[torch.Tensor], *, filled: bool
    ) -> dict[Range, torch.Tensor]:
        """The arena span of each storage that `tensors` use; `filled`: with its bytes copied."""
        starts = dict(zip(self._plan.ranges, self._plan.starts, strict=True))
        homes = Ranges(starts)
        bases: dict[Range, torch.Tensor] = {}
        for tensor in tensors:
            old = moving.storage_range(tensor)
            if old not in bases:
                home = homes.at(old.begin)
                assert home is not None
                assert old.end <= home.end
                begin = starts[home] + old.begin - home.begin
                bases[old] = moving.bytes_at(arena, begin, old.end - old.begin)
                if filled:
                    bases[old].copy_(moving.bytes_of(tensor.untyped_storage()))
        return bases

    def in_place(self) -> bool:
        """Whether everything is still where it was; changes nothing. Any thread may call."""
        assert self._watch is not None, "move_in comes first"
        return self._watch.in_place()

    def check(self, full: bool = False) -> list[str]:
        """Return names of parameters that left the arena; usually none.

        Costs some 0.1 us per tensor and module. With `full`, or when something was added to the
        module tree, the whole model is inspected again: that takes milliseconds, and also
        detects what `take_back` will refuse.
        """
        assert self._watch is not None, "move_in comes first"
        left = self._watch.look()
        if not (full or self._watch.added):
            return left
        try:
            shards = self._arranged()
        except ConflictError:
            if not left:
                raise
            return left
        if changed := moving.differences(self._shards, shards):
            return list(dict.fromkeys([*left, *changed]))
        self._shards = shards
        self._rewatch()
        return list(dict.fromkeys(departed.shard.fqn for departed in self._departed()))

    def take_back(self) -> list[str]:
        """Bring departed parameters back into the arena with their current values; return their
        names.

        Only inside an update, since it writes the arena. Raises ConflictError, with nothing done,
        if names, shape, dtype, strides or placement changed, parameters newly share memory, or
        something else still uses the memory a parameter left.
        """
        assert self._watch is not None, "move_in comes first"
        shards = self._found_again()
        # First drop the old watch: it keeps replaced tensors alive, and `bring_back` would
        # mistake them for someone else's.
        self._shards = shards
        self._rewatch()
        left = self._departed()
        for departed in left:
            self._check_movable(departed.shard)
        moving.bring_back(left, self._bases, shards)
        self._shards = self._arranged()
        self._rewatch()
        return list(dict.fromkeys(departed.shard.fqn for departed in left))

    @torch.inference_mode(False)
    def copy_back(self) -> list[str]:
        """As `take_back`, where parameters only got other memory (`p.data = ...`); a few
        microseconds for each. Return no names, with nothing done, if it takes a search of the
        process: parameters or modules were replaced, or somebody else uses their old or new memory.
        """
        assert self._watch is not None, "move_in comes first"
        if self._watch.added or not self._watch.modules_in_place():
            return []
        ours = self._own_tensors()
        departed = self._given_other_memory(ours)
        if not departed:
            return []
        left = [(param, home) for _, param, home in departed]
        # Each once: the parameters of a flat one have it in common.
        distinct = {id(tensor): tensor for tensor in ours}.values()
        known = Counter(map(moving.storage, distinct))
        targets = self._alone(left, known)
        if not targets:
            return []
        with torch.no_grad():
            for param, home in left:
                home.copy_(param)
        moving.repoint(targets)
        return [name for name, _, _ in departed]

    def _own_tensors(self) -> list[torch.Tensor]:
        """The tensors here that refer to the arena's storages."""
        # A glance refers to storages: `look` has dropped it when it found something out of place.
        ours = [*self._bases]
        # Also those of parameters of which this rank holds nothing, as FSDP1 has them. A view keeps
        # what it is a view of: of FSDP1's shards a tensor that nobody else has.
        views = [s.tensor for s in self._shards if s.kind is TensorKind.PARAMETER]
        ours += views
        ours += (view._base for view in views if view._base is not None)
        return ours

    def _given_other_memory(
        self, ours: list[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, parameter and view in the arena of each that has other memory; none if something
        else has changed. The tensors that parameters and we have there are added to `ours`.
        """
        placed = self._placed(TensorKind.PARAMETER)
        params = [shard.slot.owner.get(shard.slot.key) for shard, _ in placed]
        each = {id(param) for param in params}
        departed: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for (shard, begin), param in zip(placed, params, strict=True):
            home = shard.tensor
            if param is None or not any(holder is param for holder in shard.holders):
                return []
            # A tied parameter holds it too, and has its own turn in this loop.
            beside = [held for held in shard.holders if held.numel() and id(held) not in each]
            if not _are_its_parts(beside, shard):
                return []
            ours += beside
            if moving.address(param) == self._arena_address + begin:
                ours.append(param)
                continue
            if home.shape != param.shape and home.numel() == param.numel():
                home = home.view(param.shape)
                ours.append(home)
            if not moving.alike(param, home):
                return []
            departed.append((shard.fqn, param, home))
        return departed

    def _alone(
        self, left: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Counter[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The departed parameters (`left`, each with its view in the arena), and what optimizers
        keep in their memory, with its own; none if anything else uses the memory that they left or
        that they have. `known`: our references to storages.
        """
        targets = list(left)
        # One reference more than tensors: the storage object made to query it.
        olds = [moving.storage(home) for _, home in targets]
        if any(moving.use_count(old) > known[old] + 1 for old in olds):
            return []
        homes = {moving.extent(param): home for param, home in targets}
        if not moving.disjoint(homes) or len(homes) < len(targets):
            return []
        users = Counter(moving.storage(param) for param, _ in targets)
        shared = {key for key, count in users.items() if moving.use_count(key) > count + 1}
        states = self.states() if shared else ()
        for tensor in states:
            key = moving.storage(tensor)
            if key not in shared:
                continue
            home = homes.get(moving.extent(tensor))
            if home is None or not moving.alike(tensor, home):
                return []
            users[key] += 1
            targets.append((tensor, home))
        if any(moving.use_count(key) > users[key] + 1 for key in shared):
            return []
        return targets

    def _found_again(self) -> list[LocalShard]:
        """The shards as they are now. Raises ConflictError if their layout has changed."""
        shards = self._arranged()
        if changed := moving.differences(self._shards, shards):
            raise ConflictError(
                f"parameters changed their layout in training: {_said(changed)}; "
                "attachment.refresh() serves them as they are now"
            )
        return shards

    def _arranged(self) -> list[LocalShard]:
        """The shards as they are now, in the order of the arena's plan."""
        return moving.arranged(self._shards, find_shards(self._model))

    def _departed(self) -> list[Escaped]:
        """Shards whose memory is not where it belongs."""
        return [
            Escaped(shard, self._arena_address + begin)
            for shard, begin in self._placed(TensorKind.PARAMETER)
            if moving.address(shard.tensor) != self._arena_address + begin
        ]

    def computes(self) -> bool:
        """Whether FSDP is in a forward or backward, on gathered parameters that miss writes to
        shards.
        """
        return fsdp.computes(self._model.modules())

    def gather_again(self) -> None:
        """Have what FSDP left gathered follow the shards, which were written. Collective if there
        is any; only while it does not compute.
        """
        fsdp.gather_again(self._model.modules())

    def restore_buffers(self) -> None:
        """Copy the arena's values into all persistent buffers. Raises as `copy_buffers`."""
        assert self._buffers is not None, "move_in comes first"
        self._buffers.restore()

    def copy_buffers(self) -> None:
        """Copy all persistent buffers into the arena; ConflictError if one no longer fits."""
        assert self._buffers is not None, "move_in comes first"
        self._buffers.refresh()

    def move_out(self) -> None:
        """Move all tensors that Python knows to private memory, same bytes. Idempotent."""
        self._close_watch()
        inside = Ranges(moving.storage_range(base) for base in self._bases)
        if not inside.items:
            return
        shards = self._shards
        with suppress(ConflictError):
            # Even a model that can no longer be served must get its memory back.
            shards = [*shards, *find_shards(self._model)]
        self._bases, self._buffers, self._shards = [], None, []
        tensors = moving.users(shards, self._alive(), inside)
        copies: dict[Range, torch.Tensor] = {}
        for tensor in tensors:
            old = moving.storage_range(tensor)
            if old not in copies:
                copies[old] = moving.bytes_of(tensor.untyped_storage()).clone()
        moving.repoint([(t, moving.moved(t, copies[moving.storage_range(t)])) for t in tensors])

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self.contents is not None:
            self.contents.close()
        self._watch, self.contents = None, None

    def _placed(self, kind: TensorKind) -> list[tuple[LocalShard, int]]:
        """Non-empty shards with their first arena bytes."""
        return [
            (shard, begin)
            for shard, begin in zip(self._shards, self._plan.begins, strict=True)
            if shard.kind is kind and begin is not None
        ]

    def _watched(self) -> list[Watched]:
        """Each slot once, with the address its tensor must have."""
        watched: dict[tuple[int, str], Watched] = {}
        for shard, begin in self._placed(TensorKind.PARAMETER):
            slot = shard.slot
            local, _spec = split(slot.tensor())
            place = (id(slot.owner), slot.key)
            if place not in watched:
                belongs = local.data_ptr() + self._way_home(shard, begin)
                watched[place] = Watched(shard.fqn, slot, belongs)
        return list(watched.values())

    def _way_home(self, shard: LocalShard, begin: int) -> int:
        """Byte distance a shard's memory would have to move; 0 when at home."""
        return self._arena_address + begin - moving.address(shard.tensor)


def _piece(shard: LocalShard, rank: int, begin: int) -> Piece:
    # Buffers are copied row-major, whatever their own strides.
    strides = moving.strides_of(shard) if shard.kind is TensorKind.PARAMETER else None
    return Piece(rank=rank, arena_begin=begin, region=shard.region, strides=strides)


def _said(changed: dict[str, str]) -> str:
    words = [f"{name!r} {change}" for name, change in changed.items()]
    more = f"; and {len(words) - 3} more" if len(words) > 3 else ""
    return "; ".join(words[:3]) + more


def check_arena(arena: Memory, needed_bytes: int) -> None:
    usable = not isinstance(arena, memoryview) or (arena.contiguous and not arena.readonly)
    if not usable or arena.nbytes < needed_bytes:
        raise UsageError(
            f"the arena is {'' if usable else 'read-only, '}{arena.nbytes} bytes; "
            f"expected at least {needed_bytes} writable, contiguous bytes"
        )
    if address_of(arena) % ALIGN_BYTES:
        raise UsageError(f"the arena's address is not a multiple of {ALIGN_BYTES}; expected a map")


def address_of(arena: Memory) -> int:
    # A rank may hold no elements, and then needs no memory.
    return moving.address(moving.bytes_at(arena, 0, 1)) if arena.nbytes else 0
