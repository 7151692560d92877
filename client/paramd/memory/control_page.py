"""The control page: memory shared by a trainer and its sidecar.

One page of aligned 8-byte words, **one writer per word**. Readers never wait for writers.
Times are CLOCK_MONOTONIC nanoseconds, which processes on one host share.

Only `SEQ` validates a copy: it is odd from the start of an update (or edit) until the state is
settled, so bytes copied between two reads of the same even value belong to the state named by
`STEP`, `EDITS` and `ITERATION`. A resting state, not yet settled, can be read too: the same
`REST` before and after proves only that no update began, and the answer says so. All other
words merely make copies likely to succeed (gate.py).

Besides `Word`, the trainer writes four areas: settled states that were changed without an update;
the last requests agreed, from which even a respawned sidecar can tell the outcome of a request; a
text; and samples, positions of arena
words chosen once. Their digest costs microseconds and differs when all parameters change, as
with averaged, merged or perturbed weights; it proves nothing about a few elements. It is
published for resting and for settled states, so that readers can look for themselves.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Sequence
from enum import Enum, IntEnum, IntFlag, unique
from typing import NamedTuple, Protocol

from paramd.state import Settling

PAGE_BYTES = 4096
MAGIC = 0x7061_7261_6D64_0001

_FIRST_AGREED_WORD = 128
KEPT = 64
"""Agreed requests kept."""

_STRAY_WORDS = range(112, 128)
STRAYS_KEPT = len(_STRAY_WORDS)
"""Settled states kept in which parameters changed outside of updates."""

TEXT_WORD, TEXT_WORDS = 192, 128
TEXT_BYTES = 8 * (TEXT_WORDS - 1)
"""Most bytes of UTF-8 in the text."""

COUNT_WORD = 320
FIRST_SAMPLE_WORD = 321
MAX_SAMPLES = 128


class Page(Protocol):
    """The words of a control page, as a view of 64-bit integers."""

    @property
    def words(self) -> memoryview: ...


def write_text(page: Page, text: str) -> None:
    """Publish a text to the sidecar, cut to `TEXT_BYTES`; an empty one clears it.

    The length is 0 while the text changes, so a reader sees no text rather than a mixture.
    """
    words = page.words
    encoded = text.encode()[:TEXT_BYTES].decode(errors="ignore").encode()
    words[TEXT_WORD] = 0
    begin = 8 * (TEXT_WORD + 1)
    words.cast("B")[begin : begin + len(encoded)] = encoded
    words[TEXT_WORD] = len(encoded)


def read_text(page: Page) -> str:
    """The trainer's text; empty when there is none or it is being changed."""
    words = page.words
    size = words[TEXT_WORD]
    if not 0 < size <= TEXT_BYTES:
        return ""
    begin = 8 * (TEXT_WORD + 1)
    text = bytes(words.cast("B")[begin : begin + size])
    return text.decode(errors="replace") if words[TEXT_WORD] == size else ""


STANDS_IN = 2
"""Value of UNSERVED while other weights replace the training's; the text is their label. Both
change only while nothing rests, or right before nothing does."""


def label_of(page: Page) -> str:
    """Label of the weights that replace the training's; empty: the training's own."""
    if page.words[Word.UNSERVED] != STANDS_IN:
        return ""
    label = read_text(page)
    return label if label else "unnamed"


BUFFERS_REFUSED = -2
"""In BUFFERS_STEP: they can never be copied as this attachment knows them; the text says why."""


def unserved_reason(page: Page) -> str:
    """Why the parameters are not served; empty when they are."""
    label = label_of(page)
    if not label:
        return read_text(page) if page.words[Word.UNSERVED] else ""
    return (
        f"the weights are {label!r}, which temporarily replace the training's "
        "(attachment.swapped_weights); try again later, or read them as they are with "
        "unsettled=True (--unsettled)"
    )


def write_samples(page: Page, indices: Sequence[int]) -> None:
    """Publish which words of the arena to sample; at most `MAX_SAMPLES`, once per incarnation."""
    words = page.words
    for place, index in enumerate(indices, start=FIRST_SAMPLE_WORD):
        words[place] = index
    words[COUNT_WORD] = len(indices)


def sample_digest(page: Page, arena: memoryview) -> int:
    """The digest of the samples in `arena`, the bytes of the whole arena, as they are now."""
    words = page.words
    count = min(max(words[COUNT_WORD], 0), MAX_SAMPLES)
    found = b"".join(
        arena[8 * index : 8 * index + 8]
        for index in words[FIRST_SAMPLE_WORD : FIRST_SAMPLE_WORD + count]
    )
    return digest_of(found)


def digest_of(samples: bytes) -> int:
    """The digest of gathered samples, in the order of their places."""
    return zlib.crc32(samples)


@unique
class Word(IntEnum):
    """Index of each word; the comments give its writer and meaning."""

    MAGIC = 0  # sidecar: layout version of this page

    # Trainer's words.
    INCARNATION = 8
    STEP = 9  # finished updates
    SEQ = 10  # odd inside an update
    ANNOUNCE = 11  # counts announced boundaries; each is followed by a wake
    AGREED = 12  # last boundary request agreed by all trainers
    AGREED_STEP = 13  # step of that boundary
    BUFFERS_STEP = 14  # step at which buffers were last copied into the arena; BUFFERS_REFUSED
    BOUNDARY_NS = 15  # time of the last boundary
    STEP_TIME_NS = 16  # smoothed time between boundaries
    STALL_COUNT = 17
    STALL_TOTAL_NS = 18
    STALL_MAX_NS = 19
    AGREEMENT_STATE = 20  # 1 works, 2 gave up
    TRAINER_PID = 21
    TRAINER_START = 22  # start time from /proc, to detect a reused pid
    EDITS = 23  # edits applied in this incarnation; changes only while SEQ is odd
    PROMISED = 24  # request contributed to the round in flight; 0 none
    ROUNDS_LAUNCHED = 25
    ROUNDS_COLLECTED = 26
    AGREED_TOKEN = 27
    EDIT_AGREED = 28  # request of the last edit agreed; written before any change
    EDIT_APPLIED = 29  # request of the last edit fully applied
    EDIT_TOKEN = 30  # its token
    EDIT_STEP = 31  # its step
    EDIT_NS = 32  # how long it held up the trainer
    HELD = 33  # 0 runs, 1 paused, 2 stepping within a pause
    HOLD_STEPS_LEFT = 34
    REFUSED = 35  # request this trainer cannot carry out and will never promise
    EDIT_FAILED = 36  # request of an edit that failed half way; SEQ stays odd from then on
    SLOT_DONE0 = 40  # update (`in_time`) whose gradients slot 0 holds
    SLOT_DONE1 = 41
    MOMENTS_FOR = 42  # request that optimizer state was last copied for; 0 while being written
    GRADIENTS_STEP = 43  # last update before which the ARM_SLOT words were read
    MIRRORED = 44  # 1: the arena is a copy of parameters that live elsewhere (arena.py)
    MIRRORED_FOR = 45  # request the copy was made for; 0 while being written
    MIRRORED_STEP = 46  # step of that copy
    MIRRORED_EDITS = 47  # edits of that copy
    ROUND_ITERATION = 38  # this rank's iteration in the last round
    MIRRORED_ITERATION = 37  # iteration of that copy

    ITERATION = 48  # backward passes seen before the update that produced STEP began
    REST = 49  # rises with each rest (update over but not settled); 0 when nothing rests
    REST_STEP = 50  # step the resting state will have
    REST_NS = 51  # when the rest began
    REST_DIGEST = 52  # of the samples when the rest began
    REST_ITERATION = 53  # iteration the resting state will have
    STRAY_COUNT = 54  # settled spans in which parameters changed
    BUFFERS_FOR = 55  # request that buffers were last copied for; 0 once anything else writes them
    STRICT = 56  # 1: SEQ is even only at boundaries, since parameters change in between
    UNSERVED = 57  # 1: the parameters cannot be served, the page's text says why; 2: STANDS_IN
    APART_LOW = 58  # lowest and highest iteration in the last round;
    APART_HIGH = 59  # equal when ranks are in lock-step
    REFUSED_STEP = 60  # step of the boundary where REFUSED missed its `if_step`; or a `Refusal`
    REFUSED_IF_STEP = 61  # the step it was for
    REST_SEEN_NS = 62  # start of the last check that found the whole resting state in place
    SETTLED_SEQ = 39  # SEQ of the settled state whose samples were digested
    SETTLED_DIGEST = 63  # that digest: reveals parameters changed since, before any update

    # Sidecar's words.
    SIDECAR_PID = 64
    WANT = 65  # counts requests for the next boundary of this rank alone
    READY = 66  # boundary request this rank is ready for; 0 none
    BUFFERS_WANTED = 67  # boundary request that needs buffers
    SERVED = 68  # last ANNOUNCE handled
    COPY_BEGUN = 69  # counts copies begun
    COPY_ENDED = 70  # counts copies ended, good or abandoned
    TOKEN = 71  # of request READY
    ACTION = 72  # what request READY asks for: a BoundaryAction
    ARGUMENT = 73  # EDIT: where its program begins in the edit memory; STEP: boundaries to pass
    HIGHEST = 74  # highest request this rank was ever ready for in this incarnation
    HOLD_UNTIL_NS = 75  # end of the pause's lease
    MOMENTS_WANTED = 76  # request with optimizer state that the trainer copies, or waits for
    EXTRA_WANTED = 77  # request that needs the model's extra state
    ARM_STEP = 80  # announce the boundary of this step; 0 none
    ARM_SLOT0 = 81  # update (`in_time`) whose gradients are wanted in slot 0; 0 none
    ARM_SLOT1 = 82
    LOSSLESS_EVERY = 83  # updates between frames of lossless readers; 0 no such reader
    LOSSLESS_UNTIL_NS = 84  # until when there is a lossless reader
    EXPECTED_NS = 85  # until when a request is expected soon, such as an edit being uploaded
    LOOK_WANTED = 87  # counts copies at rest, each waiting for a check by the trainer
    EDIT_HOLES = 86  # counts ranges of edit memory whose pages were given back
    PROGRAMS = 93  # counts gradient programs written in this incarnation, each one's version
    STANDING_NS = 89  # how long the last standing snapshot took to copy
    STANDING_MADE = 90  # when the last whole standing snapshot is of (`in_time`); 0 none
    COPIED = 91  # step of the last one that is whole on another host too; 0 none
    COPY_SETTLED = 92  # step of the last one that was sent, or is not going to be
    CLIENTS_UNTIL_NS = 88  # until when the last caller counts as a client that may ask again
    ORDERED = 94  # highest number of an order of the control plane's that this rank took

    # Trainer's words again: inputs of resuming (trainer/resume).
    LINEAGE = 96  # number of this training's history: the same as long as no step is lost; 0 none
    EDITS_BEFORE = 97  # edits applied in earlier incarnations of this history
    OPTIMIZER_BYTES = 98  # bytes of the optimizer memory in use, in host memory
    STANDING = 99  # counts standing snapshots asked for; each with an announced boundary
    STANDING_STEP = 100  # step of the last of them
    STANDING_COMMON = 101  # lowest STANDING_MADE of all ranks, as they last agreed
    COPIES_STEP = 102  # step of the last one of which all ranks have copies elsewhere; 0 none
    RECORD_STEP = 103  # step of the last whole continuation record
    REWINDABLE = 104  # whether a rollback may come (trainer/resume): 0 no, 1 yes, 2 never: copies
    REWOUND = 105  # counts how often there was one; steps come again after that
    MOMENTS_LIVE = 106  # 1: optimizer state lies in the optimizer memory; 0: copies, on request
    DEVICE_FENCE = (
        107  # the device's number behind all work of the published state (device_arena.py)
    )
    STATE_BYTES = 108  # bytes of the optimizer's state on the device
    EXTRA_FOR = 109  # request that extra state was last noted for; 0 while being written
    COMING_BYTES = 110  # of gradients and state that the first steps make in host memory
    SLOTS_EMPTY = 111  # by slot, a byte each: why its last update had no frame (`NoFrame`)

    # Words 112 to 127 are the trainer's: SEQs of settled states that have strayed.
    # Words 128 to 191 are the trainer's: the last requests agreed.
    # Words 192 to 448 are the trainer's: its text and its sample places.
    # Words 449 to 460 are the trainer's: what held up its updates besides copies (`Stand`).
    # Words 461 to 492 are the trainer's: its last rollbacks (`Rewind`).
    CHANGES = 493  # update (`in_time`) with its `Changes`; while its state is waited for
    SETTLED_AS = 494  # last update (`in_time`) whose state has settled, and whether changed before


class Changed(IntFlag):
    """Evidence that a script changed what an update reads or writes, outside of it."""

    WRITTEN = 1
    """torch has counted writes to them, or other tensors took their place."""
    SAMPLES = 2
    """Samples differ: of a write that torch does not count, but also of damage."""
    INPUTS = 4
    """Hyper-parameters or optimizer state are not those that the state's record has."""


UNCHANGED = Changed(0)


class Changes(NamedTuple):
    """What a trainer knows of such changes around one update."""

    after: Changed = UNCHANGED
    """After the update, before its state settled."""
    before: Changed = UNCHANGED
    """Between the settled state before the update and the update."""
    resting: Changed = UNCHANGED
    """As `after`, of the update before: who has copied its state at rest may lack them."""


NO_CHANGES = Changes()


def note_changes(page: Page, moment: int, found: Changes) -> None:
    """Trainer's side: publish what is known of this update (`in_time`)."""
    bits = found.resting << 6 | found.before << 3 | found.after
    page.words[Word.CHANGES] = moment << 9 | bits


def changes_of(words: memoryview, moment: int) -> Changes:
    """What the trainer has published of this update; nothing, once it has of another."""
    word = words[Word.CHANGES]
    if word >> 9 != moment:
        return NO_CHANGES
    return Changes(*(Changed(word >> shift & 7) for shift in (0, 3, 6)))


def note_settled(page: Page, moment: int, *, changed: bool) -> None:
    """Trainer's side: publish that the state of this update (`in_time`) has settled.

    `changed`: whether it differs from what the update left; remembered for as long as the state is.
    """
    known = page.words[Word.SETTLED_AS]
    before = known & 1 if known >> 1 == moment else 0
    page.words[Word.SETTLED_AS] = moment << 1 | before | changed


def settling_of(words: memoryview, moment: int, *, rests: bool) -> Settling:
    """How far the state of this update has come. `rests`: of a resting state."""
    word = words[Word.SETTLED_AS]
    if word >> 1 == moment:
        return Settling.CHANGED if word & 1 else Settling.KEPT
    return Settling.LEFT if rests else Settling.UNKNOWN


class Stand(IntEnum):
    """Why updates stand because of paramd, besides waits for copies (the STALL words)."""

    EDIT = 0  # an edit, a rollback or new hyper-parameters are applied
    STATE = 1  # buffers, optimizer state or mirrored parameters are copied for a reader
    ROUND = 2  # the last round is collected, which takes long when another rank is late
    PAUSE = 3  # training is paused on request


_FIRST_STAND_WORD = 449


def note_stand(page: Page, why: Stand, took_ns: int) -> None:
    """Count a wait of an update."""
    words, at = page.words, _FIRST_STAND_WORD + 3 * why
    words[at] += 1
    words[at + 1] += took_ns
    words[at + 2] = max(words[at + 2], took_ns)


def stands_of(page: Page) -> dict[str, tuple[int, int, int]]:
    """By cause: the number of waits of updates, their sum and their maximum, in nanoseconds."""
    words = page.words
    places = {one.name.lower(): _FIRST_STAND_WORD + 3 * one for one in Stand}
    found = {name: (words[at], words[at + 1], words[at + 2]) for name, at in places.items()}
    stalls = words[Word.STALL_COUNT], words[Word.STALL_TOTAL_NS], words[Word.STALL_MAX_NS]
    return {"copy": stalls, **found}


_FIRST_REWIND_WORD = 461
REWINDS_KEPT = 16
"""Rollbacks kept."""


class Rewind(NamedTuple):
    """One rollback, or the undo of one: after it steps come again."""

    history: int
    """The history that it began."""
    from_step: int
    """Step at which the history before it ended."""
    to_step: int
    """Step that training was put back to."""


def note_rewind(page: Page, to_step: int) -> None:
    """Trainer's side, before it writes STEP and REWOUND: record the rollback that comes next."""
    words = page.words
    at = _FIRST_REWIND_WORD + 2 * ((words[Word.REWOUND] + 1) % REWINDS_KEPT)
    words[at], words[at + 1] = words[Word.STEP], to_step


def rewinds_of(page: Page) -> list[Rewind]:
    """The last rollbacks, oldest first. Meanwhile others may come: those that they may have
    overwritten are left out."""
    words = page.words
    last = words[Word.REWOUND]
    first = max(1, last - REWINDS_KEPT + 1)
    places = {n: _FIRST_REWIND_WORD + 2 * (n % REWINDS_KEPT) for n in range(first, last + 1)}
    found = [Rewind(n, words[at], words[at + 1]) for n, at in places.items()]
    # The next one may be half written although REWOUND does not tell of it yet.
    return [one for one in found if one.history > words[Word.REWOUND] + 1 - REWINDS_KEPT]


class Refusal(IntEnum):
    """Why a trainer cannot carry out a request, in word REFUSED_STEP."""

    FAULTY = -1
    """The request is impossible or malformed; the trainer's log says more."""
    AWAY = -2
    """The parameters are not in the arena and will not be, or an edit has failed half way."""
    GATHERED = -3
    """The boundary lies in a forward on unsharded copies, which an edit would not reach."""
    NOT_HELD = -4
    """The request requires that training is paused, but the pause has ended."""


class Words(Protocol):
    """Words by index, read and written one at a time."""

    def __getitem__(self, word: int, /) -> int: ...
    def __setitem__(self, word: int, value: int, /) -> None: ...


_STEP_BITS = 40
NEVER_REWINDABLE = 2
"""In word REWINDABLE: not in a block either."""


def in_time(step: int, *, rewound: int) -> int:
    """A number that rises where steps come again; `rewound`: rollbacks so far (word REWOUND)."""
    return (rewound << _STEP_BITS) + step


def history_of(moment: int) -> int:
    """The rollbacks in a number of `in_time`."""
    return moment >> _STEP_BITS


def step_of(moment: int) -> int:
    """The step in a number of `in_time`."""
    return moment & ((1 << _STEP_BITS) - 1)


class ControlPage:
    """A view of the words in a mapped descriptor, shared by both sides."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self.words = memoryview(self._map).cast("q")

    def __getitem__(self, word: Word) -> int:
        return self.words[word]

    def __setitem__(self, word: Word, value: int) -> None:
        self.words[word] = value

    def close(self) -> None:
        """Unmap the page. Words must not be used afterwards."""
        self.words.release()
        self._map.close()


def note_stray(words: Words, seq: int) -> None:
    """Trainer's side: parameters changed under this even SEQ, so copies made under it are void."""
    if not is_stray(words, seq):
        words[min(_STRAY_WORDS, key=words.__getitem__)] = seq


def is_stray(words: Words, seq: int) -> bool:
    """Whether parameters changed under this SEQ, or it is too long ago to tell: then copies made
    under it count as void. Final once SEQ is another one.
    """
    kept = [words[word] for word in _STRAY_WORDS]
    # SEQs only rise. A 0 is a place never used: nothing has been forgotten yet.
    return seq > 0 and (seq in kept or seq < min(kept))


def note_apart(words: Words, iterations: tuple[int, int]) -> None:
    """Trainer's side: record the lowest and the highest iteration of a round.

    A sidecar may read between the two writes. What it reads then is a low above the high, which
    says nothing, as long as the ranks are in lock-step before and after.
    """
    lowest, highest = iterations
    if lowest >= words[Word.APART_LOW]:
        words[Word.APART_LOW] = lowest
        words[Word.APART_HIGH] = highest
    else:
        words[Word.APART_HIGH] = highest
        words[Word.APART_LOW] = lowest


class Past(Enum):
    """The fate of a request below the last one agreed."""

    DONE = "agreed and done"
    FAILED = "an edit that was agreed and failed on this rank"
    NEVER = "never agreed"
    FORGOTTEN = "too long ago to tell"


def note_agreed(words: Words, nth: int, number: int) -> None:
    """Trainer's side, before it writes AGREED: record `number` as the nth agreed request."""
    words[_FIRST_AGREED_WORD + nth % KEPT] = number


def note_failed(words: Words, nth: int, number: int) -> None:
    """Trainer's side: record that an edit failed on this rank, wholly or in part."""
    words[_FIRST_AGREED_WORD + nth % KEPT] = -number


def past_of(words: Words, number: int) -> Past:
    """The fate of a request above 0 and below AGREED; read AGREED first."""
    kept = [words[_FIRST_AGREED_WORD + index] for index in range(KEPT)]
    if number in kept:
        return Past.DONE
    if -number in kept:
        return Past.FAILED
    # Numbers only rise, so one above the oldest kept and not among them was never agreed.
    # A 0 is a slot never used: nothing has been forgotten yet.
    return Past.NEVER if min(map(abs, kept)) < number else Past.FORGOTTEN
