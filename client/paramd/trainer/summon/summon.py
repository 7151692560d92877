"""`summon_full_params`: meet, gather, swap; on the way out swap back, agree, write back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch import nn

from paramd.trainer import exit
from paramd.trainer.summon import guards
from paramd.trainer.summon.call import Call
from paramd.trainer.summon.guards import Arguments, timeout_from


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
    """Make the parameters of `module` plain full tensors, under their names, inside the block.

    For plain, DDP, FSDP1, FSDP2, HSDP and tensor-parallel modules and their compositions,
    attached to a sidecar or not. Collective: every rank calls it at the same point, between
    two steps, with the same arguments. Inside, `module.named_parameters()` are full
    `nn.Parameter`s in the precision the optimizer sees; afterwards the original objects are
    registered again, whatever happened inside. Buffers are left alone.

    Edits are made to copies and applied when the block ends, on all ranks or none: if the block
    raised on any rank, no rank keeps them. For an attached module they are one update: the step
    rises by one, and readers never see a part of them.

    Args:
        module: the root, or any module in the tree.
        recurse: False leaves out what FSDP modules below `module` manage.
        writeback: keep edits of values, and with `with_grads` of gradients. Assigning
            another tensor of the same shape counts as an edit.
        rank0_only: only the first rank gets full tensors, and its edits reach all ranks. The
            others keep their shards and need hardly any memory.
        offload_to_cpu: put the full tensors in host memory.
        with_grads: full parameters have full gradients; those that are None stay None.
        timeout_s: longest wait for the other ranks, in seconds; None takes
            `PARAMD_SUMMON_TIMEOUT_S`, else 60.

    Yields:
        The full parameters by state dict name, tied ones under each name; empty where this rank
        gets none.

    Raises:
        ConflictError: in a forward or backward, in a region of torch.compile, nested on the
            same parameters, different arguments, or a parameter that cannot be gathered.
        DeadlineError: ranks did not arrive; the message names them. Nothing has changed.
        AbortedError: the block raised on another rank, so no edit was kept.
        UsageError: a parameter or gradient was removed or changed shape in the block.

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
