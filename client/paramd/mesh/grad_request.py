"""What a reader of gradients may ask for, and why it may get none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from paramd.errors import UsageError
from paramd.mesh.frames import KINDS, Kind
from paramd.mesh.transfer import Transport
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

REASONS: Final = {
    pb.NO_GRADIENT_NONE: "its grad is None",
    pb.NO_GRADIENT_OTHER_OPTIMIZER: "another optimizer updates it",
    pb.NO_GRADIENT_PLACEMENT: "it is placed otherwise than its parameter",
    pb.NO_GRADIENT_UNSUPPORTED: "it is no dense tensor that fits its parameter",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GradRequest:
    """What a reader of gradients wants."""

    patterns: tuple[str, ...]
    every: int = 1
    """Updates between two frames; 1 or more. Frames come at its multiples."""
    kind: Kind = "full"
    dtype: torch.dtype | None = None
    """Of whole gradients; None keeps each parameter's own."""
    rows: int | None = None
    """Rows of the first dim that are sampled, evenly; None: all."""
    lossless: bool = False
    """Updates wait for this reader, as far as the trainer's operator allows it."""
    transport: Transport = "auto"

    def __post_init__(self) -> None:
        if not self.patterns:
            raise UsageError("no pattern was given; expected at least one, '*' means all")
        if self.every < 1:
            raise UsageError(f"every: {self.every}; expected 1 or more")
        if self.kind not in KINDS:
            raise UsageError(f"kind: {self.kind!r}; expected one of {', '.join(KINDS)}")
        if self.kind != "full" and self.dtype is not None:
            raise UsageError("dtype: only frames of kind 'full' are cast")
