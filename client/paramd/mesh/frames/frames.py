"""Frames of a stream: what all ranks had at one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from paramd.layout.stats import Part, Stats, Summary, merge_all, summarize

if TYPE_CHECKING:
    import torch

Kind = Literal["full", "stats", "histogram"]
KINDS: tuple[Kind, ...] = ("full", "stats", "histogram")

Value = TypeVar("Value", covariant=True)


class Frame(Mapping[str, Value], Generic[Value]):
    """Values by name, all of one step of one epoch."""

    def __init__(self, *, job: str, epoch: int, step: int, dropped: int) -> None:
        self.job = job
        """Name of the job."""
        self.epoch = epoch
        """Incarnation of the job; the same in all frames of a stream."""
        self.step = step
        """Gradients: number of the update that consumes them. Parameters: finished updates."""
        self.dropped = dropped
        """Frames that should have come since the last one and did not."""


class GradFrame(Frame[Value]):
    """Gradients of all ranks before one update, or what was counted of them.

    `frame[name]` is None where there is no gradient; `frame.none` says why.
    """

    def __init__(
        self,
        values: Mapping[str, Callable[[], Value]],
        *,
        job: str,
        epoch: int,
        step: int,
        dropped: int,
        none: Mapping[str, str],
        scale: float,
        clip_factor: float | None,
        read_s: float = 0.0,
        parts: Mapping[str, Sequence[Part]] | None = None,
        bad_ranks: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Values are made when they are first looked at. `parts` are those of statistics."""
        super().__init__(job=job, epoch=epoch, step=step, dropped=dropped)
        self._make = values
        self._values: dict[str, Value] = {}
        self._parts = parts
        self.bad_ranks = bad_ranks if bad_ranks is not None else {}
        """Ranks that hold NaN or an infinity, by name; known of statistics alone."""
        self.none = none
        """Why there is no gradient, by name."""
        self.scale = scale
        """Factor (a loss scale) that the gradients are still multiplied with; 1 is none."""
        self.read_s = read_s
        """Seconds from when all ranks had captured it until it was here whole."""
        self.clip_factor = clip_factor
        """Factor that clipping multiplied them with; None when the trainer did not say."""

    def __getitem__(self, name: str) -> Value:
        if name not in self._values:
            self._values[name] = self._make[name]()
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)

    @cached_property
    def total(self) -> Summary:
        """Statistics of all gradients of the frame together; `total.norm` is the global norm.

        Raises:
            AttributeError: the frame holds whole gradients.
        """
        if self._parts is None:
            raise AttributeError('frames of kind "full" have no total; ask for kind="stats"')
        return summarize(merge_all(one for parts in self._parts.values() for one in parts))

    def merged(self, name: str) -> Stats | None:
        """Statistics that can be merged with others; None where there is no gradient."""
        if self._parts is None or name not in self._parts:
            return None
        return merge_all(self._parts[name])

    def document(self) -> dict[str, Any]:
        """Numbers as REST and `paramd grads -o jsonl` write them; NaN is None there."""
        rows = []
        for name in self:
            why = self.none.get(name)
            row: dict[str, Any] = {"fqn": name, "none": why}
            if why is None and self._parts is not None:
                row |= _numbers(summarize(merge_all(self._parts[name])))
                if name in self.bad_ranks:
                    row["bad_ranks"] = list(self.bad_ranks[name])
            rows.append(row)
        return {
            "job": self.job,
            "epoch": self.epoch,
            "step": self.step,
            "dropped": self.dropped,
            "clip": {"factor": self.clip_factor},
            "scale": self.scale,
            "total": _numbers(self.total),
            "params": rows,
        }

    def __repr__(self) -> str:
        return (
            f"<paramd.GradFrame of {self.job!r}: {len(self)} gradients that update {self.step} "
            f"consumes (epoch {self.epoch}), {len(self.none)} of them None, {self.dropped} frames "
            "dropped before>"
        )


class ParamFrame(Frame["torch.Tensor"]):
    """Parameters after one update. Unchanged tensors are those of the frame before."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        changed: Sequence[str],
        job: str,
        epoch: int,
        step: int,
        dropped: int,
    ) -> None:
        super().__init__(job=job, epoch=epoch, step=step, dropped=dropped)
        self._tensors = dict(tensors)
        self.changed = tuple(changed)
        """Names whose values differ from the frame before; all, in the first frame."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return (
            f"<paramd.ParamFrame of {self.job!r}: {len(self)} tensors after update {self.step} "
            f"(epoch {self.epoch}), {len(self.changed)} of them changed, {self.dropped} frames "
            "dropped before>"
        )


def _numbers(summary: Summary) -> dict[str, Any]:
    found: dict[str, Any] = summary.document()
    if summary.exponents:
        found["exponents"] = [list(bin_) for bin_ in summary.exponents]
    return found


def lazily_summed(parts: Sequence[Part]) -> Callable[[], Summary]:
    """The summary of all parts together, made when it is asked for."""
    return lambda: summarize(merge_all(parts))
