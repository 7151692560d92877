"""What a rank records: states right before they are published, and the gradients consumed.

The names of states are paramd's (incarnation, rollbacks, step, edits); the values are read from
the script's own objects. Nothing here is computed, so a loop may do what no replay repeats. How
many updates there were is counted by the loop itself: where the attachment counts another number,
that is recorded as wrong.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paramd.memory.control_page import Word
from paramd.memory.gate import TrainerGate
from tests.sequences.loops.packing import Packed, packed
from tests.sequences.model import COUNT, TIED, TRACE

MOST_BYTES = 8 << 20
"""Of one file; the reader removes those that it has read."""
Gradients = dict[str, torch.Tensor | None]
"""By name; None: a parameter has none."""
CONSUMERS = (torch.optim.SGD, torch.optim.AdamW)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Recorder:
    """One rank's record. Made before the training attaches."""

    def __init__(self, folder: Path, rank: int, net: nn.Module) -> None:
        self._folder, self._rank = folder, rank
        self._file, self._number = -1, 0
        self._net = net
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step = 0
        """Updates, as the loop counts them."""
        self._words: Any = None
        self._consumed: Gradients | None = None
        self._names: dict[int, str] = {}
        self._kept: list[nn.Parameter] = []
        """So that no id is another one's."""
        self.parameters_changed()
        self._open()
        self._follow_the_gate()
        for optimizer in CONSUMERS:
            self._follow_consumption(optimizer)

    def parameters_changed(self) -> None:
        """The module has other parameters than before."""
        # A stage begins with the tied one.
        named = self._net.named_parameters(remove_duplicate=False)
        self.named = {name: value for name, value in named if name not in TIED}
        # Those that were are known on: what reads their gradients reads wrong ones.
        self._names |= {id(value): name for name, value in self.named.items()}
        self._kept += self.named.values()

    @contextmanager
    def update(self, *, consumed: Gradients | None = None) -> Iterator[None]:
        """A block that is one update, unless it raises.

        Args:
            consumed: Its gradients, where the optimizer's own code cannot be followed.
        """
        self._consumed = dict(consumed) if consumed is not None else {}
        words = self._words
        before = (words[Word.INCARNATION], words[Word.REWOUND])
        try:
            yield
            found, self._consumed = self._consumed, None
        except BaseException:
            self._consumed = None
            raise
        self.step += 1
        self._put("gradients", *before, self.step, packed(found or {}))

    def check(self, step: int) -> None:
        """After an update: the attachment has counted what the loop has."""
        if step != self.step:
            self._put("wrong", f"attachment.step is {step} after {self.step} updates")
            self.step = step

    def went_back(self, step: int) -> None:
        """After a rollback."""
        self.step = step

    def wrong(self, text: str) -> None:
        """Something that the script itself has seen."""
        self._put("wrong", text)

    def variant(self) -> None:
        """The script has changed weights that rest: what is read now may be these."""
        words = self._words
        name = (words[Word.INCARNATION], words[Word.REWOUND], self.step, words[Word.EDITS])
        self._put("resting", *name, *self._values())

    # Where it is read from

    def _follow_the_gate(self) -> None:
        recorder = self
        settle, rest, end_edit = TrainerGate.settle, TrainerGate.rest, TrainerGate.end_edit

        def put(gate: TrainerGate, kind: str, step: int, edits: int) -> None:
            recorder._words = words = gate._words
            name = (words[Word.INCARNATION], words[Word.REWOUND], step, words[Word.EDITS] + edits)
            recorder._put(kind, *name, *recorder._values())

        def settle_(self: TrainerGate, step: int, iteration: int, *, proven: bool) -> None:
            if proven and self._words[Word.SEQ] & 1:
                put(self, "settled", step, 0)
            settle(self, step, iteration, proven=proven)

        def rest_(self: TrainerGate, step: int, iteration: int, digest: int) -> None:
            put(self, "resting", step, 0)
            rest(self, step, iteration, digest)

        def end_edit_(self: TrainerGate) -> None:
            put(self, "settled", self._words[Word.STEP], 1)
            end_edit(self)

        TrainerGate.settle, TrainerGate.rest = settle_, rest_  # type: ignore[method-assign]
        TrainerGate.end_edit = end_edit_  # type: ignore[method-assign]

    def _follow_consumption(self, optimizer: type[Any]) -> None:
        """`_init_group` gathers the gradients that the very next lines of `step` use."""
        gather = optimizer._init_group

        def _init_group(self_: Any, group: dict[str, Any], *rest: Any) -> Any:
            if self._consumed is not None:
                self._consumed |= self.gradients(group["params"])
            return gather(self_, group, *rest)

        optimizer._init_group = _init_group

    def gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        """Of these parameters, as they are now."""
        return {
            self._names[id(p)]: local(p.grad).detach().clone() if p.grad is not None else None
            for p in parameters
            if id(p) in self._names
        }

    def _values(self) -> tuple[Packed, Packed, Packed, int | None, dict[str, float]]:
        """Parameters, momentum, the buffer that remembers, the one that counts, and rates."""
        moments: dict[str, torch.Tensor | None] = {}
        for optimizer in self.optimizers:
            for value, state in list(optimizer.state.items()):
                moment = state.get("momentum_buffer")
                if moment is not None and id(value) in self._names:
                    moments[self._names[id(value)]] = local(moment)
        buffers = dict(self._net.named_buffers())
        group = self.optimizers[0].param_groups[0]
        return (
            packed({name: local(value) for name, value in self.named.items()}),
            packed(moments),
            packed({TRACE: local(buffers[TRACE])} if TRACE in buffers else {}),
            int(buffers[COUNT]) if COUNT in buffers else None,
            {name: float(group[name]) for name in ("lr", "momentum")},
        )

    def _open(self) -> None:
        path = self._folder / f"truth-{self._rank}-{self._number:06}"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._size = 0

    def _put(self, *row: Any) -> None:
        if self._size > MOST_BYTES:
            os.close(self._file)
            self._number += 1
            self._open()
        data = pickle.dumps(row)
        # Whole: a reader takes a row once its length is there.
        os.write(self._file, len(data).to_bytes(8, "little") + data)
        self._size += len(data)
