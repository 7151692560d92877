"""The changes of a range of bytes: the changed elements and their positions, or the whole range.

Made by sidecars, applied by followers. Elements are compared bit by bit, as unsigned integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from paramd.errors import DataLossError, UsageError
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Elements = NDArray[np.unsignedinteger[Any]]
    Mask = NDArray[np.bool_]
    Places = NDArray[np.int64]

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

    Args:
        new: The bytes that a follower shall have.
        base: Those that it has.
        element_bytes: Bytes of an element, one of `ELEMENT_BYTES`.

    Raises:
        UsageError: For unsupported elements, or a length that is no whole number of them.
    """
    now, before = _elements(new, element_bytes), _elements(base, element_bytes)
    numel = len(now)
    changed, stretches = _changes(now, before, len(new))
    if not changed:
        return Delta(pb.DELTA_FORM_SAME, 0)
    offsets_bytes, bitmap_bytes = _offsets_bytes(numel, changed), _bitmap_bytes(numel)
    if min(offsets_bytes, bitmap_bytes) + changed * element_bytes >= len(new):
        return Delta(pb.DELTA_FORM_UNSPECIFIED, changed)
    values = [stretch.values for stretch in stretches]
    if bitmap_bytes < offsets_bytes:
        bits = _bitmap_of(stretches, numel)
        return Delta(pb.DELTA_FORM_BITMAP, changed, b"".join((bits, *values)))
    offsets = _offsets_of(stretches, numel)
    return Delta(pb.DELTA_FORM_OFFSETS, changed, b"".join((*offsets, *values)))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The changes of at most `STRETCH` elements, of which some changed."""

    first: int
    """Index of its first element."""
    differs: Mask
    values: bytes
    """The new values of those that differ."""


def _changes(now: Elements, before: Elements, most_bytes: int) -> tuple[int, list[_Stretch]]:
    """How many elements differ, and the stretches with some; without those from which on the
    values alone have `most_bytes`."""
    import numpy as np

    stretches: list[_Stretch] = []
    changed = 0
    for first in range(0, len(now), STRETCH):
        part = now[first : first + STRETCH]
        differs = part != before[first : first + STRETCH]
        if count := int(np.count_nonzero(differs)):
            changed += count
            if changed * now.itemsize >= most_bytes:
                continue  # counted to the end, since readers get the number
            values = part[np.flatnonzero(differs)].tobytes()
            stretches.append(_Stretch(first, differs, values))
    return changed, stretches


def _groups(numel: int) -> int:
    return -(-numel // GROUP)


def _offsets_bytes(numel: int, changed: int) -> int:
    """Length of a count for each group, and of an offset for each change."""
    return 4 * _groups(numel) + 2 * changed


def _bitmap_bytes(numel: int) -> int:
    return -(-numel // 8)


def _bitmap_of(stretches: Sequence[_Stretch], numel: int) -> bytes:
    """A bit for each element."""
    import numpy as np

    bits = np.zeros(_bitmap_bytes(numel), dtype=np.uint8)
    for stretch in stretches:
        packed = np.packbits(stretch.differs)
        bits[stretch.first // 8 : stretch.first // 8 + len(packed)] = packed
    return bits.tobytes()


def _offsets_of(stretches: Sequence[_Stretch], numel: int) -> list[bytes]:
    """The changes of each group, counted, and then their offsets in their groups."""
    import numpy as np

    counts = np.zeros(_groups(numel), dtype="<u4")
    offsets: list[bytes] = []
    for stretch in stretches:
        places = np.flatnonzero(stretch.differs)
        within = np.bincount(places // GROUP, minlength=_groups(len(stretch.differs)))
        counts[stretch.first // GROUP : stretch.first // GROUP + len(within)] = within
        offsets.append((places % GROUP).astype("<u2").tobytes())
    return [counts.tobytes(), *offsets]


def apply_delta(target: memoryview, delta: Delta, element_bytes: int) -> None:
    """Change `target`, which contains the base, in place.

    Args:
        target: As long as the range of the delta; writable.
        delta: As `make_delta` made it, with changes and without the whole range.
        element_bytes: As it was made with.

    Raises:
        DataLossError: If the data do not fit (`target` is unchanged).
        UsageError: As `make_delta`.
    """
    import numpy as np

    elements, data, changed = _elements(target, element_bytes), delta.data, delta.changed_count
    numel = len(elements)
    offsets = delta.form == pb.DELTA_FORM_OFFSETS
    ahead = _offsets_bytes(numel, changed) if offsets else _bitmap_bytes(numel)
    known = delta.form in (pb.DELTA_FORM_OFFSETS, pb.DELTA_FORM_BITMAP)
    if not known or changed < 1 or len(data) != ahead + changed * element_bytes:
        raise DataLossError(
            f"{len(data):,} bytes of {changed:,} changes in form {delta.form} do not fit "
            f"{numel:,} elements"
        )
    values = np.frombuffer(data, dtype=f"<u{element_bytes}", offset=ahead)
    places = _places_of_offsets(delta, numel) if offsets else _places_of_bitmap(delta, numel)
    elements[places] = values


def _places_of_bitmap(delta: Delta, numel: int) -> Places:
    """Indices of the changed elements; DataLossError if they are not as many as it says."""
    import numpy as np

    packed = np.frombuffer(delta.data, dtype=np.uint8, count=_bitmap_bytes(numel))
    bits = np.unpackbits(packed, count=numel)
    count = np.count_nonzero(bits)
    if count != delta.changed_count:
        raise DataLossError(f"a bitmap of {count:,} changes, not {delta.changed_count:,}")
    return np.flatnonzero(bits.view(np.bool_))


def _places_of_offsets(delta: Delta, numel: int) -> Places:
    """Indices of the changed elements; DataLossError if they are not as many as it says, or
    beyond the range."""
    import numpy as np

    groups, changed = _groups(numel), delta.changed_count
    counts = np.frombuffer(delta.data, dtype="<u4", count=groups).astype(np.int64)
    if int(counts.sum()) != changed:
        raise DataLossError(f"offsets of {int(counts.sum()):,} changes, not {changed:,}")
    places = np.repeat(np.arange(groups, dtype=np.int64) * GROUP, counts)
    places += np.frombuffer(delta.data, dtype="<u2", count=changed, offset=4 * groups)
    if int(places[-1]) >= numel:
        raise DataLossError(f"a change of element {int(places[-1]):,} of {numel:,}")
    return places


def _elements(data: memoryview, element_bytes: int) -> Elements:
    import numpy as np

    if element_bytes not in ELEMENT_BYTES or len(data) % max(element_bytes, 1):
        raise UsageError(
            f"element_bytes: {element_bytes} in a range of {len(data):,} bytes; expected one of "
            f"{', '.join(map(str, ELEMENT_BYTES))}, and whole elements"
        )
    elements: Elements = np.frombuffer(data, dtype=f"<u{element_bytes}")
    return elements
