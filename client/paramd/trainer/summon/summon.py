"""`summon_full_params`: meet, gather, swap; on the way out swap back, agree, write back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch import nn

from paramd.trainer import exit
from paramd.trainer.summon import guards
from paramd.trainer.summon.arguments import Arguments, timeout_from
from paramd.trainer.summon.call import Call


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    *,
    timeout_s: float | None = None,
) -> Iterator[dict[str, nn.Parameter]]:
    """Inside the block the parameters of `module` are plain full tensors, under their names.

    For plain, DDP, FSDP1, FSDP2, HSDP and tensor-parallel modules and their compositions,
    attached to a sidecar or not. Collective: every rank calls it at the same place, between
    two steps, with the same arguments. Inside, `module.named_parameters()` are full
    `nn.Parameter`s in the precision that the optimizer sees; afterwards the very same objects
    are registered as before, whatever happened inside. Buffers are not touched.

    Edits are copies until the block ends: then they are on all ranks or on none. None keeps
    them when the block raised on any rank. For an attached module they are one update: the
    step rises by one, and nobody who reads through the sidecar sees a part of them.

    Args:
        module: the root, or any module of the tree.
        recurse: False leaves out what FSDP modules below `module` manage.
        writeback: keep edits of values, and with `with_grads` of gradients. Assigning
            another tensor of the same shape counts as an edit.
        rank0_only: the first rank alone gets full tensors, and its edits reach all ranks. The
            others keep their shards, and need hardly any memory.
        offload_to_cpu: the full tensors are in host memory.
        with_grads: full parameters have full gradients; those that are None stay None.
        timeout_s: longest wait for the other ranks to come, in seconds; None takes
            `PARAMD_SUMMON_TIMEOUT_S`, else 60.

    Yields:
        The full parameters by the names of a state dict, tied ones under each name; empty
        where this rank gets none.

    Raises:
        ConflictError: in a forward or backward, in a region of torch.compile, nested on the
            same parameters, different arguments, or a parameter that cannot be gathered.
        DeadlineError: ranks did not come; the message names them. Nothing has changed.
        AbortedError: the block raised on another rank, so no edit was kept.
        UsageError: a parameter or gradient was removed or got another shape in the block.

    Source: `FullyShardedDataParallel.summon_full_params` of PyTorch.
    """
    guards.check_not_compiling()
    arguments = Arguments(
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )
    if dist.is_available() and dist.is_initialized():
        exit.settle_at_exit()
    call = Call(module, arguments)
    call.meet(timeout_from(timeout_s))
    with ExitStack() as inside:
        params = call.show(inside)
        try:
            yield params
        except BaseException as error:
            call.abandon(error)
            raise
        edits = call.edits()
    call.finish(edits)
