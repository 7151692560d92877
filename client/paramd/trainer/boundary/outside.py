"""What a script changes between updates, noted for those who make an update again and compare.

    after an update      until its state settles: weights are clamped, or averaged ones brought back
    before the next one  from there until the optimizer reads them

Such a change looks like damage to whoever expects nothing but the update's arithmetic. So the
trainer compares what an update has left with what settles, and what has settled with what the next
update begins with: version counters, which damage does not touch, and samples. It does so only
while somebody waits for an update's state or gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from paramd.trainer.home.watch import Contents, Left

log = logging.getLogger("paramd")

_ARM_STEP = int(Word.ARM_STEP)
_ARM_SLOT0, _ARM_SLOT1 = int(Word.ARM_SLOT0), int(Word.ARM_SLOT1)


class Outside:
    """One rank's notes. Called where updates begin, end and settle; never raises."""

    def __init__(self, page: ControlPage, contents: Callable[[], Contents | None]) -> None:
        self._page = page
        self._words = page.words
        self._contents = contents
        self._left: tuple[int, Left] | None = None
        """A step that somebody waits for, and what its update has left."""
        self._settled: tuple[int, Left] | None = None
        """The same of what has settled, with the edits of its boundary."""
        self._after: tuple[int, Changed] | None = None
        """What the script changed between the two."""
        self._began = NO_CHANGES
        """What was changed before the present update."""

    def update_begins(self, step: int) -> None:
        """The update after `step` begins."""
        self._began = NO_CHANGES
        if self._settled is None and self._after is None:
            return
        after = self._after
        resting = after[1] if after is not None and after[0] == step else UNCHANGED
        self._began = Changes(before=self._since(self._settled, step), resting=resting)

    def update_is_over(self, step: int) -> None:
        """It is over, as number `step`; the script has not gone on."""
        words = self._words
        self._left = self._settled = self._after = None
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

    def has_settled(self, step: int) -> None:
        """Its state has settled, and edits of its boundary were applied."""
        if self._left is not None and self._left[0] == step:
            self._settled = self._now(step)

    def forget(self) -> None:
        """The parameters are of another step now."""
        self._left = self._settled = self._after = None
        self._began = NO_CHANGES

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
