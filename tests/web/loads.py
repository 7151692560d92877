"""Runs the lines that the page shows for a checkpoint, on a plain model and on an FSDP2 one.

    python -m tests.web.loads LINES OUT SHARD

Writes the full state dicts of both to OUT, by kind. Then it takes SHARD, one of the checkpoint's
files, away: without its tensors the lines must fail.
"""

import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from tests.web.training import Model


def loaded(lines: str, model: Model) -> dict[str, Any]:
    """The full state dict of a model after `lines` have run on it."""
    runpy.run_path(lines, {"model": model})
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def check_strict(lines: str, shard: Path) -> None:
    """Without a file no model is filled in part."""
    shard.unlink()
    with pytest.raises(KeyError, match="lacks"):
        loaded(lines, Model())


def main(lines: str, out: str, shard: str) -> None:
    """Load both models, then fail to load what is not whole."""
    torch.set_num_threads(1)
    torch.manual_seed(99)
    found = {"plain": loaded(lines, Model())}
    with tempfile.TemporaryDirectory(prefix="paramd-loads-") as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/s", rank=0, world_size=1)
        model = Model()
        fully_shard(model)
        found["fsdp2"] = loaded(lines, model)
        dist.destroy_process_group()
    torch.save(found, out)
    check_strict(lines, Path(shard))


if __name__ == "__main__":
    main(*sys.argv[1:])
