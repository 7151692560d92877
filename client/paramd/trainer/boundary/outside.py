"""What a script changes between updates, noted for those who make an update again and compare.

    after an update      until its state settles: weights are clamped, or averaged ones brought back
    before the next one  from there until the optimizer reads them: weights, its own state, and the
                         hyper-parameters, which the state's record has as they were

Such a change looks like damage to whoever expects nothing but the update's arithmetic. So the
trainer compares what an update has left with what settles, and what has settled with what the next
update begins with: version counters and addresses, which damage does not touch, and samples. It
does so only while somebody waits for an update's state or gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from paramd.memory.control_page import (
    NO_CHANGES,
    UNCHANGED,
    Changed,
    Changes,
    ControlPage,
    Word,
    in_time,
    note_changes,
)
from paramd.trainer.model.dtensor import split

if TYPE_CHECKING:
    from paramd.trainer.home.watch import Contents, Left

log = logging.getLogger("paramd")

_ARM_STEP = int(Word.ARM_STEP)
_ARM_SLOT0, _ARM_SLOT1 = int(Word.ARM_SLOT0), int(Word.ARM_SLOT1)


class Outside:
    """One rank's notes. Called where updates begin, end and settle; never raises."""

    def __init__(
        self,
        page: ControlPage,
        contents: Callable[[], Contents | None],
        states: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        """`states`: returns the tensors of all optimizers' state."""
        self.recorded: Callable[[], bool] = lambda: True
        """Whether the last record of a state has the hyper-parameters as they are now."""
        self._page = page
        self._words = page.words
        self._contents = contents
        self._states = states
        self._left: tuple[int, Left] | None = None
        """A step that somebody waits for, and what its update has left."""
        self._settled: tuple[int, Left] | None = None
        """The same of what has settled, with the edits of its boundary."""
        self._settled_states: tuple[int, ...] = ()
        """Version counters of the optimizers' state then."""
        self._after: tuple[int, Changed] | None = None
        """What the script changed between the two."""
        self._between = UNCHANGED
        """What the script changed between the times that this state settled, if more than once."""
        self._began = NO_CHANGES
        """What was changed before the present update."""

    def update_begins(self, step: int) -> None:
        """The update after `step` begins."""
        self._began = NO_CHANGES
        if self._settled is None and self._after is None:
            return
        after = self._after
        resting = after[1] if after is not None and after[0] == step else UNCHANGED
        before = self._since(self._settled, step) | self._between | self._states_since()
        self._began = Changes(before=before, resting=resting)

    def consumes(self) -> None:
        """An optimizer of the present update reads its hyper-parameters next."""
        if self._settled is not None and not self._is_recorded():
            before = self._began.before | Changed.INPUTS
            self._began = self._began._replace(before=before)

    def update_is_over(self, step: int) -> None:
        """It is over, as number `step`; the script has not gone on."""
        words = self._words
        self._left = self._settled = self._after = None
        self._between = UNCHANGED
        if words[_ARM_STEP] or words[_ARM_SLOT0] or words[_ARM_SLOT1]:
            self._left = self._now(step)
            if self._left is not None:
                self._note(step, self._began)

    def settles(self, step: int, *, moved: bool) -> None:
        """Its state settles next. `moved`: other tensors had taken the parameters' place."""
        if self._left is None:
            return
        how = self._since(self._left, step) | (Changed.WRITTEN if moved else UNCHANGED)
        if how:
            self._after = step, how
            self._note(step, self._began._replace(after=how))

    def settles_again(self, step: int) -> None:
        """A state that has settled settles once more, since the script had not finished the step.

        Whoever has copied it before lacks what the script has changed in between.
        """
        how = self._since(self._settled, step) | self._states_since()
        if how:
            self._between |= how
            known = self._after[1] if self._after is not None else UNCHANGED
            self._note(step, self._began._replace(after=known | self._between))

    def has_settled(self, step: int) -> None:
        """Its state has settled, and edits of its boundary were applied."""
        if self._left is not None and self._left[0] == step:
            self._settled = self._now(step)
            self._settled_states = self._state_versions()

    def forget(self) -> None:
        """The parameters are of another step now."""
        self._left = self._settled = self._after = None
        self._between, self._began = UNCHANGED, NO_CHANGES

    def _is_recorded(self) -> bool:
        try:
            return self.recorded()
        except Exception:
            log.debug("paramd: hyper-parameters cannot be compared", exc_info=True)
            return False

    def _states_since(self) -> Changed:
        """Whether the optimizers' state was written since the parameters settled."""
        if self._settled is None or self._state_versions() == self._settled_states:
            return UNCHANGED
        return Changed.INPUTS

    def _state_versions(self) -> tuple[int, ...]:
        try:
            # Twice for each update that somebody follows, and there may be thousands of tensors.
            return tuple(
                tensor._version if type(tensor) is torch.Tensor else split(tensor)[0]._version
                for tensor in self._states()
            )
        except Exception:
            # Tensors made in inference mode count no writes.
            log.debug("paramd: the optimizer's state cannot be recorded", exc_info=True)
            return ()

    def _note(self, step: int, found: Changes) -> None:
        moment = in_time(step, rewound=self._words[Word.REWOUND])
        note_changes(self._page, moment, found)

    def _now(self, step: int) -> tuple[int, Left] | None:
        contents = self._contents()
        try:
            return (step, contents.left()) if contents is not None else None
        except Exception:
            # A module has given a parameter up: nobody is served this state.
            log.debug("paramd: the parameters cannot be recorded", exc_info=True)
            return None

    def _since(self, before: tuple[int, Left] | None, step: int) -> Changed:
        contents = self._contents()
        if before is None or contents is None or before[0] != step:
            return UNCHANGED
        try:
            return contents.changed_since(before[1])
        except Exception:
            log.debug("paramd: the parameters cannot be compared", exc_info=True)
            return Changed.WRITTEN
