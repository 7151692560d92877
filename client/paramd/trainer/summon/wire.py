"""Move parts of tensors between ranks with few, equally long collectives and little memory.

A *part* is one region of one tensor. A *stream* is what one rank sends: parts, or runs of their
elements, laid end to end. Streams are about equally long whatever the sharding, since a part
held by several ranks is divided among them. All are cut at the same byte offsets, so one
collective moves the next span of every stream. Every rank computes the same plan.

Everything travels as bytes, on the training's process group and a device its backend supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paramd.layout.types import Interval, boxes_of_interval

ALIGNMENT_BYTES = 16
"""Runs and spans begin at multiples of this, so that no element is cut."""

MIN_DIVIDED_BYTES = 1 << 16
"""Smaller parts are sent by one holder; dividing them saves nothing."""

MIN_SPAN_BYTES = 1 << 18
MAX_SPAN_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class Part:
    numel: int
    item_bytes: int
    senders: tuple[int, ...]
    """Ranks able to send it, ascending."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `[begin, end)` of a part, row-major, at a place in a stream."""

    part: int
    begin: int
    end: int
    at_bytes: int
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        return (self.end - self.begin) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements `[begin, end)` of a part, at byte `at` of a span."""

    part: int
    begin: int
    end: int
    at: int


def plan_streams(parts: Sequence[Part], world_size: int) -> list[list[Run]]:
    streams: list[list[Run]] = [[] for _ in range(world_size)]
    ends = [0] * world_size
    for index, part in enumerate(parts):
        for rank, begin, end in _shares(part, ends):
            run = Run(index, begin, end, ends[rank], part.item_bytes)
            streams[rank].append(run)
            ends[rank] = _aligned(run.at_bytes + run.size_bytes)
    return streams


def _shares(part: Part, ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    size_bytes = part.numel * part.item_bytes
    if len(part.senders) == 1 or size_bytes < MIN_DIVIDED_BYTES:
        yield min(part.senders, key=lambda rank: ends[rank]), 0, part.numel
        return
    step = -(-part.numel // len(part.senders))
    for index, rank in enumerate(part.senders):
        begin, end = min(index * step, part.numel), min((index + 1) * step, part.numel)
        if begin < end:
            yield rank, begin, end


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def stream_bytes(stream: Sequence[Run]) -> int:
    return stream[-1].at_bytes + stream[-1].size_bytes if stream else 0


def span_bytes(
    world_size: int, budget_bytes: int, longest_bytes: int, max_bytes: int = MAX_SPAN_BYTES
) -> int:
    """Bytes of each stream moved by one collective, at most `max_bytes`.

    `world_size + 1` spans are in memory at once; they stay within the budget, except for a
    floor that keeps the number of collectives down.
    """
    wanted = min(budget_bytes // (world_size + 1), max_bytes, longest_bytes)
    return max(_aligned(max(wanted, min(MIN_SPAN_BYTES, longest_bytes))), ALIGNMENT_BYTES)


def spans(stream: Iterable[Run], size_bytes: int, count: int) -> list[list[Cut]]:
    """The stream cut into `count` spans of `size_bytes`; those past its end are empty."""
    found: list[list[Cut]] = [[] for _ in range(count)]
    for run in stream:
        item, at, begin = run.item_bytes, run.at_bytes, run.begin
        while begin < run.end:
            span, offset = divmod(at, size_bytes)
            numel = min(run.end - begin, (size_bytes - offset) // item)
            found[span].append(Cut(run.part, begin, begin + numel, offset))
            begin, at = begin + numel, at + numel * item
    return found


MAX_THRIFTY_BYTES = 1 << 20
"""Largest span where memory matters: gloo copies spans, and its threads keep several copies."""

Views = Mapping[int, torch.Tensor]
"""Tensors by part index; parts a rank neither has nor wants are missing."""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by itemsize, to compare bits: equal floats may differ in theirs."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The ranks taking part, and how their bytes travel."""

    world_size: int
    index: int
    """Position of this rank."""
    group: dist.ProcessGroup | None
    """None when this rank is alone."""
    device: torch.device

    def exchange(self, message: bytes) -> list[bytes]:
        """All ranks' messages, by position. Collective."""
        if self.group is None:
            return [message]
        size = torch.tensor([len(message)], dtype=torch.int64, device=self.device)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=self.device)
        _all_gather(sizes, size, self.group)
        lengths: list[int] = sizes.tolist()
        # Padded to the longest message, since all-gather wants equal parts.
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        everybody = torch.empty(
            self.world_size * max(lengths), dtype=torch.uint8, device=self.device
        )
        _all_gather(everybody, mine.to(self.device), self.group)
        rows = everybody.view(self.world_size, -1).cpu()
        return [rows[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def gather(
        self,
        streams: Sequence[Sequence[Run]],
        sources: Views,
        targets: Views,
        *,
        only_to_first: bool,
        budget_bytes: int,
    ) -> None:
        """Send every stream, the same by position on all ranks, to all ranks or only to the first.

        Collective. `sources`: the parts of this rank's own stream; `targets`: those it wants;
        `budget_bytes`: approximate memory for data in flight.
        """
        plan = self._spans(streams, budget_bytes, thrifty=only_to_first)
        if plan is None:
            return
        size, count, cuts = plan
        receives = not only_to_first or self.index == 0
        outgoing = torch.empty(size, dtype=torch.uint8, device=self.device)
        incoming = torch.empty(
            self.world_size if receives else 0, size, dtype=torch.uint8, device=self.device
        )
        for span in range(count):
            data = _packed(cuts[self.index][span], sources, outgoing)
            if only_to_first:
                rows = list(incoming) if receives else None
                dist.gather(data, rows, group=self.group, group_dst=0)
            else:
                _all_gather(incoming.view(-1), data, self.group)
            if receives:
                for row, of_rank in zip(incoming, cuts, strict=True):
                    _unpack(of_rank[span], row, targets, torch.Tensor.copy_)

    def scatter(
        self, streams: Sequence[Sequence[Run]], sources: Views, targets: Views, budget_bytes: int
    ) -> None:
        """Send each rank its stream from the first rank. Collective."""
        plan = self._spans(streams, budget_bytes)
        if plan is None:
            return
        size, count, cuts = plan
        first = self.index == 0
        incoming = torch.empty(size, dtype=torch.uint8, device=self.device)
        outgoing = torch.empty(
            self.world_size if first else 0, size, dtype=torch.uint8, device=self.device
        )
        for span in range(count):
            rows = None
            if first:
                rows = [
                    _packed(of_rank[span], sources, row)
                    for row, of_rank in zip(outgoing, cuts, strict=True)
                ]
            dist.scatter(incoming, rows, group=self.group, group_src=0)
            _unpack(cuts[self.index][span], incoming, targets, write_changes)

    def broadcast(
        self, stream: Sequence[Run], sources: Views, targets: Views, budget_bytes: int
    ) -> None:
        """Send one stream from the first rank to all. Collective."""
        plan = self._spans([stream], budget_bytes)
        if plan is None:
            return
        size, count, (cuts,) = plan
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        for span in range(count):
            data = buffer
            if self.index == 0:
                data = _packed(cuts[span], sources, buffer)
            dist.broadcast(data, group=self.group, group_src=0)
            if self.index != 0:
                _unpack(cuts[span], buffer, targets, write_changes)

    def _spans(
        self, streams: Sequence[Sequence[Run]], budget_bytes: int, *, thrifty: bool = True
    ) -> tuple[int, int, list[list[list[Cut]]]] | None:
        longest = max(map(stream_bytes, streams), default=0)
        if longest == 0:
            return None
        ceiling = MAX_THRIFTY_BYTES if thrifty and self.device.type == "cpu" else MAX_SPAN_BYTES
        size = span_bytes(self.world_size, budget_bytes, longest, ceiling)
        count = -(-longest // size)
        return size, count, [spans(stream, size, count) for stream in streams]


def _all_gather(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    # The old name warns since torch 2.13; the new one does not exist before.
    gather = getattr(dist, "all_gather_single", None)
    (gather if gather is not None else dist.all_gather_into_tensor)(output, mine, group=group)


def _packed(cuts: Sequence[Cut], sources: Views, buffer: torch.Tensor) -> torch.Tensor:
    """The bytes of one span: packed into the buffer, or in place if already laid out so."""
    if len(cuts) == 1:
        piece = next(_pieces(sources[cuts[0].part], cuts[0]))
        fills = piece.numel() * piece.itemsize == buffer.numel()
        if fills and piece.is_contiguous() and piece.device == buffer.device:
            return piece.view(-1).view(torch.uint8)
    for cut in cuts:
        at = cut.at
        for piece in _pieces(sources[cut.part], cut):
            _typed(buffer, at, piece).copy_(piece)
            at += piece.numel() * piece.itemsize
    return buffer


def write_changes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy unless the bytes are equal: an unneeded write would break a pending backward, since
    autograd refuses tensors written after it saved them.
    """
    same = _INTEGERS.get(target.itemsize)
    if same is not None and source.dtype == target.dtype:
        there, here = target.detach().view(same), source.detach().view(same)
        if torch.equal(there, here.to(there.device)):
            return
    target.copy_(source)


def _unpack(
    cuts: Sequence[Cut],
    buffer: torch.Tensor,
    targets: Views,
    write: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    for cut in cuts:
        if cut.part not in targets:
            continue
        at = cut.at
        for piece in _pieces(targets[cut.part], cut):
            write(piece, _typed(buffer, at, piece))
            at += piece.numel() * piece.itemsize


def _pieces(view: torch.Tensor, cut: Cut) -> Iterator[torch.Tensor]:
    """The elements of a cut, row-major, as few views of the tensor as its memory allows."""
    if view.is_contiguous():
        yield view.view(-1)[cut.begin : cut.end]
        return
    for box in boxes_of_interval(Interval(cut.begin, cut.end), view.shape):
        yield view[tuple(map(slice, box.begin, box.end))]


def _typed(buffer: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[at : at + like.numel() * like.itemsize].view(like.dtype).view(like.shape)
