"""The peer of a snapshot: DCP's asynchronous save, and how long the training waits for it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save

KINDS = ("plain", "cached", "background")
"""The default; memory shared and kept for the next save; the same, copied by a thread."""


class Saver:
    """Saves again and again with one stager."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        # The saving thread must not mix its messages with the training's.
        self._group = dist.new_group(backend="gloo")
        self._stager: DefaultStager | None = None
        if kind != "plain":
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=True,
                    use_async_staging=kind == "background",
                    use_non_blocking_copy=False,
                )
            )

    def save(self, model: nn.Module, directory: Path, step: Callable[[], Any]) -> float:
        """Saves once; returns the seconds that training stood still.

        That is the call, and for background staging also the wait for it where the next
        update would begin, after the work of one `step`.
        """
        state = get_model_state_dict(model)
        begin_s = time.perf_counter()
        answer: Any = async_save(
            state,
            storage_writer=FileSystemWriter(directory, sync_files=False),
            process_group=self._group,
            async_stager=self._stager,
        )
        blocked_s = time.perf_counter() - begin_s
        saved: Future[Any] = answer
        if not isinstance(answer, Future):
            saved = answer.upload_completion
            step()
            begin_s = time.perf_counter()
            answer.staging_completion.result()
            blocked_s += time.perf_counter() - begin_s
        saved.result()
        shutil.rmtree(directory, ignore_errors=True)
        return blocked_s

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        dist.destroy_process_group(self._group)
