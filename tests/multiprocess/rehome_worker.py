"""Parameters in an arena without a sidecar, and what all ranks' arenas say they are."""

from __future__ import annotations

import mmap
import warnings

import torch
import torch.distributed as dist

from paramd.layout.merge import LocalLayout, merge_layouts
from paramd.layout.types import Box, Piece, TensorKind, TensorLayout, row_major
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.model.dtensor import split
from paramd.trainer.model.shards import find_shards
from tests.multiprocess.kinds import Built, full_parameters


class Arena:
    """Anonymous memory in an arena's place."""

    def __init__(self, size_bytes: int) -> None:
        self.map = mmap.mmap(-1, max(size_bytes, 1))
        self.memory = memoryview(self.map)
        probe = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.begin, self.end = probe.data_ptr(), probe.data_ptr() + len(self.memory)

    def holds(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        return self.begin <= begin and begin + storage.nbytes() <= self.end

    def close(self) -> None:
        """Raises BufferError when anything still refers to the memory."""
        self.memory.release()
        self.map.close()


def move_in(built: Built, optimizer: torch.optim.Optimizer) -> tuple[ParameterStorage, Arena]:
    home = ParameterStorage(built.model)
    arena = Arena(home.arena_bytes)
    before = fingerprint(built, optimizer)
    home.move_in(arena.memory)
    assert fingerprint(built, optimizer) == before
    return home, arena


def fingerprint(built: Built, optimizer: torch.optim.Optimizer) -> list[object]:
    """What moving must not change: identities, sizes, strides, grads, versions, randomness."""
    facts: list[object] = [hash(bytes(torch.get_rng_state().tolist()))]
    for group in optimizer.param_groups:
        for param in group["params"]:
            local, _ = split(param)
            grad = None if param.grad is None else id(param.grad)
            storage = local.untyped_storage().nbytes()
            facts.append((id(param), id(local), param.requires_grad, grad, param._version))
            facts.append((tuple(local.shape), local.stride(), local.storage_offset(), storage))
    facts.extend((name, id(param)) for name, param in built.model.named_parameters())
    return facts


def check_inside(
    built: Built, home: ParameterStorage, arena: Arena, optimizer: torch.optim.Optimizer
) -> None:
    """All memory lies in the arena, and all ranks' pieces make up what torch says."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            local, _ = split(param)
            assert local.numel() == 0 or arena.holds(local)
    home.copy_buffers()
    check_buffers(built, home, arena)
    gathered: list[tuple[LocalLayout, bytes]] = [None] * dist.get_world_size()  # type: ignore[list-item]
    rank = dist.get_rank()
    dist.all_gather_object(gathered, (home.local_layout(rank), bytes(arena.memory)))
    full = full_parameters(built.model)
    layout = merge_layouts([local for local, _ in gathered])
    arenas = [memory for _, memory in gathered]
    named = {
        name: assembled(tensor, arenas)
        for tensor in layout.tensors
        if tensor.kind is TensorKind.PARAMETER
        for name in (tensor.fqn, *tensor.aliases)
    }
    assert_same_tensors(named, full)


def check_buffers(built: Built, home: ParameterStorage, arena: Arena) -> None:
    """This rank's buffers in the arena are those of its own state."""
    rank = dist.get_rank()
    memory = [b""] * rank + [bytes(arena.memory)]
    live = {s.fqn: s.tensor for s in find_shards(built.model) if s.kind is TensorKind.BUFFER}
    seen = {
        t.fqn: TensorLayout(t.fqn, t.dtype, t.shape, t.kind, t.pieces)
        for t in home.local_layout(rank).tensors
        if t.kind is TensorKind.BUFFER
    }
    assert_same_tensors({name: assembled(t, memory) for name, t in seen.items()}, live)


def assembled(tensor: TensorLayout, arenas: list[bytes]) -> torch.Tensor:
    """The full tensor out of all arenas; every replica must have the same bytes."""
    dtype = getattr(torch, tensor.dtype)
    full = torch.empty(tensor.shape, dtype=dtype)
    for again in (False, True):
        for piece in tensor.pieces:
            source = read_piece(piece, dtype, arenas[piece.rank])
            if isinstance(piece.region, Box):
                spans = zip(piece.region.begin, piece.region.end, strict=True)
                target = full[tuple(slice(b, e) for b, e in spans)]
            else:
                target = full.view(-1)[piece.region.begin : piece.region.end]
            if again:
                assert same_bytes(target, source), f"replicas of {tensor.fqn} differ"
            target.copy_(source)
    return full


def read_piece(piece: Piece, dtype: torch.dtype, arena: bytes) -> torch.Tensor:
    numel = piece.region.numel
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(arena, dtype=dtype, count=numel, offset=piece.arena_begin)
    if not isinstance(piece.region, Box):
        return flat
    sizes = piece.region.sizes
    strides = piece.strides if piece.strides is not None else row_major(sizes)
    return flat.as_strided(sizes, strides)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = [t.detach().clone(memory_format=torch.contiguous_format).view(-1) for t in (one, other)]
    return torch.equal(raw[0].view(torch.uint8), raw[1].view(torch.uint8))


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs), sorted(set(ours) ^ set(theirs))
    different = [name for name in ours if not same_bytes(ours[name], theirs[name])]
    assert not different, f"differ: {different}"
