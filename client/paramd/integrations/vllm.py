"""A `WeightSource` for vLLM's own senders: the weights of a running training, without its ranks.

    frames = mesh.follow("*", every=10, deltas=True)
    source = weight_source(frames)
    sender = WeightTransferTrainerFactory.trainer_init(..., client=client, source=source)
    while source.advance():
        sender.send_weights()

vLLM's sources gather from the trainer's ranks, all of which must iterate in lockstep. This one runs
in any process that reaches the job, with the GPU that the sender needs; no rank knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paramd.errors import ConflictError, UsageError
from paramd.integrations.engines import named, version_of
from paramd.layout.exports.settings import NameMap

if TYPE_CHECKING:
    import torch

    from paramd.mesh.frames.frames import ParamFrame

BASE = "vllm.distributed.weight_transfer.base"


class _Frames:
    """The newest frame, under the names of the engine's checkpoint."""

    def __init__(self, frames: Iterator[ParamFrame], names: NameMap) -> None:
        self._frames = frames
        self._names = names
        self._frame: ParamFrame | None = None

    @property
    def frame(self) -> ParamFrame:
        """The frame to send; ConflictError if the training ended before there was one."""
        if self._frame is None and not self.advance():
            raise ConflictError("the training has ended, and there is no frame to send")
        assert self._frame is not None
        return self._frame

    @property
    def version(self) -> str:
        """JOB-RUN-STEP, for `finish_weight_update`."""
        return version_of(self.frame)

    def advance(self) -> bool:
        """Wait for the next frame, which is sent from now on; False: the training has ended."""
        found = next(self._frames, None)
        if found is not None:
            self._frame = found
        return found is not None

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors, see `named`."""
        return iter(named(self.frame, self._names).items())


def weight_source(frames: Iterator[ParamFrame], name_map: dict[str, str] | None = None) -> Any:
    """A `vllm.distributed.weight_transfer.base.WeightSource` over frames of `mesh.follow`.

    It has `advance()` and `version` beside vLLM's own methods, and serves both forms of the class:
    of 0.32 (`metadata()` and iteration) and of 0.33 (`metadata` and `iter_full()`).

    Args:
        frames: the result of `mesh.follow`; the source is its only reader.
        name_map: renames, as in `export`, e.g. {"module.*": "*"}.

    Raises:
        UsageError: vLLM is not installed, or has no such class.
    """
    try:
        base = import_module(BASE)
        source, meta = base.WeightSource, base.ParamMeta
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"this needs vLLM 0.32 or newer in this environment ({error}); without it use "
            "`paramd follow --to vllm`, which needs only the engine's URL"
        ) from error
    held = _Frames(frames, NameMap.of(name_map if name_map is not None else {}))

    def metadata(_self: Any) -> list[Any]:
        return [meta(name, one.dtype, tuple(one.shape)) for name, one in held.pairs()]

    members: dict[str, Any] = {
        "advance": lambda _self: held.advance(),
        "version": property(lambda _self: held.version),
        "__doc__": "The weights of a running training.",
    }
    if hasattr(source, "iter_full"):
        cached = cached_property(metadata)
        cached.__set_name__(source, "metadata")
        members |= {"metadata": cached, "iter_full": lambda _self: held.pairs()}
    else:
        members |= {"metadata": metadata, "__iter__": lambda _self: held.pairs()}
    return type("MeshSource", (source,), members)()
