"""`summon_full_params`: meet, gather, swap; on the way out swap back, agree, write back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn

from paramd.errors import ParamdError, UsageError
from paramd.trainer import exit
from paramd.trainer.attaching.attachment import attached
from paramd.trainer.model.local_shard import LocalShard
from paramd.trainer.summon import guards, meeting
from paramd.trainer.summon.full import FullTensors, Local, Swap
from paramd.trainer.summon.guards import Arguments, FlatParameters, ShardedParameters
from paramd.trainer.summon.meeting import GradientHolding, LocalParam

NAME = "summon_full_params"
GRADIENT = "gradient of "
REFUSAL_TIMEOUT_S = 10.0
"""Longest wait, in seconds, of a rank that refuses, until the others have its reason."""


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
    call.meet(guards.timeout_from(timeout_s))
    with ExitStack() as inside:
        params = call.show(inside)
        try:
            yield params
        except BaseException as error:
            call.abandon(error)
            raise
        edits = call.edits()
    call.finish(edits)


class Call:
    """One rank's side. Call `meet`, `show`, then `abandon`, or `edits` and `finish`."""

    def __init__(self, module: nn.Module, arguments: Arguments) -> None:
        self._module = module
        self._arguments = arguments
        self._modules = list(module.modules())
        self._flat = FlatParameters(self._modules)
        self._sharded = ShardedParameters(self._modules)
        self._ranks = meeting.find_party(self._flat, self._sharded)
        self._rendezvous = meeting.Rendezvous(NAME, self._ranks)
        self._number = 0
        self._holdings: list[LocalParam] = []
        self._gradients: dict[str, GradientHolding] = {}
        self._params: dict[str, nn.Parameter] = {}
        self._swap = Swap()
        self._full: FullTensors | None = None

    def meet(self, timeout_s: float) -> None:
        """Check the module and wait for the other ranks; change nothing else."""
        try:
            guards.check_idle(self._module)
            self._flat.check_idle()
            self._sharded.check_idle()
            self._flat.settle()
            self._holdings = meeting.find_holdings(self._module, recurse=self._arguments.recurse)
            guards.check_not_summoned(p for holding in self._holdings for p in holding.places)
            if self._arguments.with_grads:
                meeting.check_gradients(self._holdings, self._flat, self._sharded)
        except ParamdError as refusal:
            # Meet all the same: the others learn the reason instead of waiting out their timeout.
            try:
                self._rendezvous.enter(
                    "", str(refusal), timeout_s=min(timeout_s, REFUSAL_TIMEOUT_S)
                )
            except ParamdError:
                raise refusal from None
        question = f"{self._arguments}, parameters {meeting.digest(self._holdings)}"
        self._number = self._rendezvous.enter(question, timeout_s=timeout_s)

    @torch.no_grad()
    def show(self, inside: ExitStack) -> dict[str, nn.Parameter]:
        """Gather and swap in full tensors; `inside` receives the undo steps. Collective."""
        arguments = self._arguments
        locals = [_local(h.names[0], h, h.shards) for h in self._holdings]
        if arguments.with_grads:
            for holding in self._holdings:
                name = holding.names[0]
                gradient = meeting.find_gradient(holding, self._flat, self._sharded)
                self._gradients[name] = gradient
                locals.append(_local(GRADIENT + name, holding, gradient.shards))
        self._full = FullTensors(
            meeting.wire_of(self._ranks, [holding.device for holding in self._holdings]),
            locals,
            rank0_only=arguments.rank0_only,
            device=torch.device("cpu") if arguments.offload_to_cpu else None,
        )
        full = self._full.fill()
        inside.callback(self._swap.restore)
        inside.enter_context(guards.forwards_refused(self._modules))
        for holding in self._holdings:
            self._swap.announce(holding.places, holding.names[0])
        if not self._full.shows:
            return {}
        inside.enter_context(self._flat.under_usual_names(self._places()))
        for place in self._flat.hidden(self._places()):
            self._swap.hide(place)
        for holding in self._holdings:
            self._put(holding, full)
        return {name: self._params[h.names[0]] for h in self._holdings for name in h.names}

    def edits(self) -> dict[str, torch.Tensor] | UsageError:
        """The block's tensor in each parameter's place, or why it cannot be written back."""
        found: dict[str, torch.Tensor] = {}
        if not self._arguments.writeback:
            return found
        try:
            holdings = self._holdings if self._params else ()
            for holding in holdings:
                value = self._value(holding)
                found[holding.names[0]] = value
                if self._arguments.with_grads:
                    grad = self._gradient(holding, value)
                    if grad is not None:
                        found[GRADIENT + holding.names[0]] = grad
        except UsageError as problem:
            return problem
        return found

    def abandon(self, error: BaseException) -> None:
        """Report to the other ranks that the block raised here, so that no rank keeps edits."""
        if self._arguments.writeback:
            self._rendezvous.leave(self._number, f"raised {type(error).__name__} in its block")

    @torch.no_grad()
    def finish(self, edits: Mapping[str, torch.Tensor] | UsageError) -> None:
        """Write the edits back, on all ranks or none. Collective if `writeback`."""
        if not self._arguments.writeback:
            return
        failed = isinstance(edits, UsageError)
        # No rank writes before all have ended their blocks well: all or none.
        self._rendezvous.leave(self._number, f"cannot: {edits}" if failed else "")
        if isinstance(edits, UsageError):
            raise edits
        assert self._full is not None
        with _updates(self._modules):
            self._full.write_back(edits)
            for gradient in self._gradients.values():
                if gradient.commit is not None:
                    gradient.commit()
        self._flat.refresh()
        self._sharded.refresh()

    def _places(self) -> Iterator[tuple[nn.Module, str]]:
        for holding in self._holdings:
            yield from holding.places

    def _put(self, holding: LocalParam, full: Mapping[str, torch.Tensor]) -> None:
        name = holding.names[0]
        param = nn.Parameter(full[name], requires_grad=holding.requires_grad)
        gradient = self._gradients.get(name)
        present = gradient is not None and (gradient.shards or not gradient.expected)
        if present and GRADIENT + name in full:
            param.grad = full[GRADIENT + name].to(param.dtype)
        self._params[name] = param
        for place in holding.places:
            self._swap.put(place, param)

    def _value(self, holding: LocalParam) -> torch.Tensor:
        """The value now, assigned in any of its places; UsageError: removed, or another shape."""
        name, ours = holding.names[0], self._params[holding.names[0]]
        value: torch.Tensor = ours
        for place in holding.places:
            found = self._swap.found(place)
            if found is None:
                raise UsageError(
                    f"parameter {name!r} was removed inside {NAME}; its shards stay, so edit it "
                    "in place"
                )
            if found is not ours:
                value = found
        if tuple(value.shape) != holding.shape:
            raise UsageError(
                f"parameter {name!r} of shape {list(holding.shape)} got shape "
                f"{list(value.shape)} inside {NAME}; shapes cannot change"
            )
        return value

    def _gradient(self, holding: LocalParam, value: torch.Tensor) -> torch.Tensor | None:
        name, ours = holding.names[0], self._params[holding.names[0]]
        grad = value.grad if value.is_leaf else None
        if grad is None and value is not ours:
            grad = ours.grad
        has = self._full is not None and GRADIENT + name in self._full.names
        if has and grad is None:
            raise UsageError(
                f"the gradient of {name!r} was removed inside {NAME}; zero it in place instead"
            )
        if grad is not None and not has:
            raise UsageError(
                f"{name!r} got a gradient inside {NAME} but had none; make gradients by backward"
            )
        return grad


def _local(name: str, holding: LocalParam, shards: tuple[LocalShard, ...]) -> Local:
    dtype = shards[0].tensor.dtype if shards else holding.dtype
    return Local(name, holding.shape, dtype, holding.device, shards)


@contextmanager
def _updates(modules: list[nn.Module]) -> Iterator[None]:
    """Open an update window of every attachment that serves one of these modules."""
    mine = {id(module) for module in modules}
    with ExitStack() as windows:
        for attachment in list(attached.values()):
            if any(id(module) in mine for module in attachment._model.modules()):
                windows.enter_context(attachment.update())
        yield
