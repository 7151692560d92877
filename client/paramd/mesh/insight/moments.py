"""Optimizer state of steps to come, pinned by the sidecars that have it in their memory."""

from __future__ import annotations

import json
import time
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from paramd.errors import DataLossError
from paramd.mesh.frames.stepping import CAPTURE_LEASE_S, PinnedStep, hold_step
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.state import At
from paramd.v1 import sidecar_pb2 as pb

MAX_FACTS_BYTES = 256 << 20
MAX_WAIT_S = 500.0
"""Longest wait for a step to come, and longest time that it is then held; sidecars accept no
longer call."""

Spans = Mapping[int, Sequence[tuple[int, int]]]
"""Byte ranges of arenas, by rank."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank says of its optimizers; see `paramd.v1.PinSnapshotResponse.optimizer`."""

    threads: int
    classes: Sequence[str]
    groups: Sequence[Sequence[Mapping[str, Any]]]
    keys: Sequence[str]
    params: Sequence[Mapping[str, Any]]
    """By first byte in the arena."""

    @classmethod
    def parse(cls, data: bytes) -> Facts:
        """Raises DataLossError: not what a sidecar sends."""
        try:
            found = json.loads(zlib.decompressobj().decompress(data, MAX_FACTS_BYTES))
            return cls(
                *(found[name] for name in ("threads", "classes", "groups", "keys", "params"))
            )
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise DataLossError(f"a sidecar described its optimizer state badly: {error}") from None

    def param_at(self, arena_byte: int) -> Mapping[str, Any] | None:
        """The optimizer's parameter that has this byte of the arena."""
        index = bisect_right(self.params, arena_byte, key=lambda one: one["begin"]) - 1
        if index < 0 or arena_byte >= self.params[index]["end"]:
            return None
        return self.params[index]

    def group_of(self, param: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its hyper-parameters."""
        found: Mapping[str, Any] = self.groups[param["optimizer"]][param["group"]]
        return found

    def class_of(self, param: Mapping[str, Any]) -> str:
        """Its optimizer's class, with the module."""
        found: str = self.classes[param["optimizer"]]
        return found


async def pin_at(
    stack: AsyncExitStack, sidecars: Sidecars, spans: Spans, key: str, at: At, deadline_s: float
) -> Pinned:
    """Pin spans of parameters, or with a `key` their optimizer state, at a step to come.

    Raises: as `pin_moments_at`.
    """
    if key:
        return (await pin_moments_at(stack, sidecars, spans, key, at, deadline_s)).pinned
    held = await hold(stack, sidecars, spans, pb.PinSnapshotRequest(), at, deadline_s)
    return Pinned.at(held.state, held.pins)


@dataclass(frozen=True, slots=True)
class HeldMoments:
    """One kind of state at one step."""

    pinned: Pinned
    facts: Mapping[int, Facts]
    """By rank."""


async def pin_moments_at(
    stack: AsyncExitStack,
    sidecars: Sidecars,
    spans: Spans,
    key: str,
    at: At,
    deadline_s: float,
) -> HeldMoments:
    """Pin one kind of state at a step to come; `stack` releases it. Bytes are laid out as those of
    parameters with the same spans.

    Raises:
        AbortedError: a rank missed the step.
        ConflictError: a rank does not keep its state in shared memory.
        NotFoundError: its optimizer has no such state.
        ParamdError: as `hold_step`.
    """
    template = pb.PinSnapshotRequest(source=pb.SOURCE_MOMENTS, state_key=key)
    held = await hold(stack, sidecars, spans, template, at, deadline_s)
    facts = {rank: Facts.parse(answer.optimizer) for rank, answer in held.answers.items()}
    return HeldMoments(Pinned.at(held.state, held.pins), facts)


async def hold(
    stack: AsyncExitStack,
    sidecars: Sidecars,
    spans: Spans,
    template: pb.PinSnapshotRequest,
    at: At,
    deadline_s: float,
) -> PinnedStep:
    """Pin what `template` says at a step to come, by the ranks of `spans`; `stack` releases it.

    Raises: as `hold_step`.
    """
    document = sidecars.document
    templates = {}
    for rank, of in spans.items():
        templates[rank] = request = pb.PinSnapshotRequest(
            incarnation=document.incarnation,
            layout_digest=document.layout_digest,
            spans=[pb.Span(begin=begin, end=end) for begin, end in of],
            lease_ms=int(1000 * CAPTURE_LEASE_S),
        )
        request.MergeFrom(template)
    left_s = min(deadline_s - time.monotonic(), MAX_WAIT_S)
    held = await hold_step(sidecars, templates, at, left_s, hold_s=left_s)
    stack.callback(held.release)
    return held
