"""The changes of a range of bytes: the changed elements and their positions, or the whole range.

Made by sidecars, applied by followers. Elements are compared bit by bit, as unsigned integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from paramd.errors import DataLossError, UsageError
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Elements = NDArray[np.unsignedinteger[Any]]
    Mask = NDArray[np.bool_]

GROUP: Final = 1 << 16
"""Elements whose offsets are counted from one place, so that they fit 16 bits."""

STRETCH: Final = 4 * GROUP
"""Elements compared at a time: few enough to stay in the processor's cache."""

ELEMENT_BYTES: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Delta:
    """Changes of one range, as in `paramd.v1.DeltaPart`."""

    form: int
    """A `paramd.v1.DeltaForm`."""
    changed_count: int
    data: bytes = b""


def make_delta(new: memoryview, base: memoryview, element_bytes: int) -> Delta:
    """The delta that turns `base` into `new`, which have the same length.

    Uses the shorter of two encodings, or the whole range if that is no longer.

    Raises:
        UsageError: For unsupported elements, or a length that is no whole number of them.
    """
    import numpy as np

    now, before = _elements(new, element_bytes), _elements(base, element_bytes)
    numel = len(now)
    masks: list[tuple[int, Mask, bytes]] = []
    changed = 0
    for first in range(0, numel, STRETCH):
        part = now[first : first + STRETCH]
        differs = part != before[first : first + STRETCH]
        if count := int(np.count_nonzero(differs)):
            changed += count
            if changed * element_bytes >= len(new):
                continue  # counted to the end, since readers get the number
            masks.append((first, differs, part[np.flatnonzero(differs)].tobytes()))
    if not changed:
        return Delta(pb.DELTA_FORM_SAME, 0)
    groups = -(-numel // GROUP)
    offsets_bytes, bitmap_bytes = 4 * groups + 2 * changed, -(-numel // 8)
    if min(offsets_bytes, bitmap_bytes) + changed * element_bytes >= len(new):
        return Delta(pb.DELTA_FORM_UNSPECIFIED, changed)
    values = [found for _, _, found in masks]
    if bitmap_bytes < offsets_bytes:
        bits = np.zeros(bitmap_bytes, dtype=np.uint8)
        for first, mask, _ in masks:
            packed = np.packbits(mask)
            bits[first // 8 : first // 8 + len(packed)] = packed
        return Delta(pb.DELTA_FORM_BITMAP, changed, b"".join((bits.tobytes(), *values)))
    counts = np.zeros(groups, dtype="<u4")
    offsets = []
    for first, mask, _ in masks:
        found = np.flatnonzero(mask)
        within = np.bincount(found // GROUP, minlength=-(-len(mask) // GROUP))
        counts[first // GROUP : first // GROUP + len(within)] = within
        offsets.append((found % GROUP).astype("<u2").tobytes())
    return Delta(pb.DELTA_FORM_OFFSETS, changed, b"".join((counts.tobytes(), *offsets, *values)))


def apply_delta(target: memoryview, delta: Delta, element_bytes: int) -> None:
    """Change `target`, which contains the base, in place.

    Raises:
        DataLossError: If the data do not fit (`target` is unchanged).
        UsageError: As `make_delta`.
    """
    import numpy as np

    elements, data, changed = _elements(target, element_bytes), delta.data, delta.changed_count
    numel = len(elements)
    groups = -(-numel // GROUP)
    ahead = 4 * groups + 2 * changed if delta.form == pb.DELTA_FORM_OFFSETS else -(-numel // 8)
    known = delta.form in (pb.DELTA_FORM_OFFSETS, pb.DELTA_FORM_BITMAP)
    if not known or changed < 1 or len(data) != ahead + changed * element_bytes:
        raise DataLossError(
            f"{len(data):,} bytes of {changed:,} changes in form {delta.form} do not fit "
            f"{numel:,} elements"
        )
    values = np.frombuffer(data, dtype=f"<u{element_bytes}", offset=ahead)
    if delta.form == pb.DELTA_FORM_BITMAP:
        bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8, count=ahead), count=numel)
        if np.count_nonzero(bits) != changed:
            raise DataLossError(f"a bitmap of {np.count_nonzero(bits):,} changes, not {changed:,}")
        elements[np.flatnonzero(bits.view(np.bool_))] = values
        return
    counts = np.frombuffer(data, dtype="<u4", count=groups).astype(np.int64)
    if int(counts.sum()) != changed:
        raise DataLossError(f"offsets of {int(counts.sum()):,} changes, not {changed:,}")
    places = np.repeat(np.arange(groups, dtype=np.int64) * GROUP, counts)
    places += np.frombuffer(data, dtype="<u2", count=changed, offset=4 * groups)
    if int(places[-1]) >= numel:
        raise DataLossError(f"a change of element {int(places[-1]):,} of {numel:,}")
    elements[places] = values


def _elements(data: memoryview, element_bytes: int) -> Elements:
    import numpy as np

    if element_bytes not in ELEMENT_BYTES or len(data) % max(element_bytes, 1):
        raise UsageError(
            f"element_bytes: {element_bytes} in a range of {len(data):,} bytes; expected one of "
            f"{', '.join(map(str, ELEMENT_BYTES))}, and whole elements"
        )
    found: Elements = np.frombuffer(data, dtype=f"<u{element_bytes}")
    return found
