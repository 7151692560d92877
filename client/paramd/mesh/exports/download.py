"""Resumable download of full tensors of one step into a local safetensors file.

`.model.safetensors.part`, next to `model.safetensors`, is written from its begin to its end: its
length is the progress. The metadata of its header names the request and the snapshots of its
bytes. After an interruption the same call asks for the same header, and so for the same snapshots:
while their leases last the download continues where the file ends, and starts over otherwise. No
file ever holds bytes of two states. The complete file lacks that entry of the metadata.

The directory may be writable by others, such as /tmp. So the file is private (mode 0600)
until it is complete and renamed, and a file of another user, or a link, is refused.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import stat
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from xxhash import xxh3_128_hexdigest

from paramd.answers import parsed_json
from paramd.bounds import HEADER
from paramd.documents import Shown, read_document
from paramd.errors import (
    ConflictError,
    DeadlineError,
    ExhaustedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.layout.exports.safetensors import METADATA_KEY, TensorSpec, encode_header, file_order
from paramd.layout.exports.settings import NameMap
from paramd.layout.plan import consecutive
from paramd.layout.select import Pattern
from paramd.layout.types import Box
from paramd.mesh.exports.calls import Moved
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.grpc import LeaseEndedError, cancelled
from paramd.mesh.peers.sidecars import Pinned, RankPin, Sidecars, pinned_at
from paramd.mesh.reading.merging import Merger
from paramd.mesh.reading.pin import Pinner, choose, compared, samples_for, spans_of
from paramd.mesh.reading.stream import Reading, Transport, memory_at
from paramd.mesh.reading.transfer import Chosen, Transfer
from paramd.state import StateName

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

IDENTITY: Final = "paramd_part"
"""Entry of a partial file's metadata: the state of its bytes, as JSON."""


def is_resumable(path: Path) -> bool:
    """Whether a download to `path` was interrupted, so that the same call resumes it."""
    try:
        # The header is written at once; without it there is nothing to resume.
        return _part_of(path).stat().st_size > 0
    except OSError:
        return False


def _part_of(path: Path) -> Path:
    return path.parent / f".{path.name}.part"


class PartialFile:
    """The partial file of a download to `path`. Methods block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = _part_of(path)
        self._file = -1

    def check(self, *, overwrite: bool) -> None:
        """Fail early on what `publish` would refuse.

        Raises:
            UsageError: Without such a directory, or for one.
            ConflictError: If the file exists.
        """
        if not self.path.parent.is_dir():
            raise UsageError(f"{self.path}: there is no directory {self.path.parent}; create it")
        if self.path.is_dir():
            raise UsageError(f"{self.path} is a directory; expected a file")
        if not overwrite and os.path.lexists(self.path):
            raise self._taken()

    def _taken(self) -> ConflictError:
        return ConflictError(
            f"{self.path} exists; give another name, or replace it (overwrite=True, --overwrite)"
        )

    def header(self) -> bytes:
        """The header of an earlier attempt; empty without a whole one."""
        size_bytes = 8 + int.from_bytes(os.pread(self._file, 8, 0), "little")
        most_bytes = min(self.size_bytes, HEADER.most_bytes)
        return os.pread(self._file, size_bytes, 0) if size_bytes <= most_bytes else b""

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._file).st_size

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open and lock the file for the block; ConflictError if it is in use, or not ours."""
        import fcntl

        self._file = _open_ours(self._part)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    f"{self.path}: another process downloads to it; wait, or give another name"
                ) from None
            yield
        finally:
            os.close(self._file)
            self._file = -1

    def begin(self, header: bytes, whole_bytes: int) -> None:
        """Start over with a header; ExhaustedError without disk space for the whole file."""
        self.go_on(0)
        disk = os.fstatvfs(self._file)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < whole_bytes:
            raise ExhaustedError(
                f"{self.path}: needs {whole_bytes:,} bytes, of which {free_bytes:,} are free; free "
                "some space or write elsewhere"
            )
        self.append(memoryview(header))

    def go_on(self, begin: int) -> None:
        """Keep the bytes before `begin`, and append from there on."""
        os.ftruncate(self._file, begin)
        os.lseek(self._file, begin, os.SEEK_SET)

    def append(self, data: memoryview) -> None:
        """Append bytes; ExhaustedError if the write failed, for example on a full disk."""
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise ExhaustedError(f"{self.path}: {error.strerror}") from error

    def publish(self, header: bytes, *, overwrite: bool) -> None:
        """Give the complete file its final header, as long as before, and rename it, durably.

        Raises:
            ConflictError: If the file exists by now, or the partial file was replaced.
        """
        os.pwrite(self._file, header, 0)
        os.fsync(self._file)
        # In a directory that others can write, the name may no longer be our open file's.
        if not os.path.samestat(os.lstat(self._part), os.fstat(self._file)):
            raise ConflictError(f"{self._part} was replaced by another process; try again")
        if overwrite:
            os.replace(self._part, self.path)
        else:
            try:
                # link, unlike rename, fails if the name was taken since `check`.
                os.link(self._part, self.path)
            except FileExistsError:
                raise self._taken() from None
            except OSError:
                # A file system without hard links.
                if os.path.lexists(self.path):
                    raise self._taken() from None
                os.rename(self._part, self.path)
        with suppress(FileNotFoundError):
            self._part.unlink()
        # Last: the same command goes on from a partial file that is this user's alone.
        os.fchmod(self._file, 0o666 & ~_umask())
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _open_ours(path: Path) -> int:
    """Open, or create, a private file of this user for reading and writing.

    Raises ConflictError for a link, a file that is not regular or is hard-linked, and one that is
    another user's or open to one.
    """
    # O_NONBLOCK: opening a FIFO would block until its other end is opened.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            file = os.open(path, flags)
    except OSError as error:
        raise ConflictError(
            f"{path} cannot be used: {error.strerror}; remove it, or give another name"
        ) from None
    found = os.fstat(file)
    ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or found.st_mode & 0o077 or found.st_nlink != 1:
        os.close(file)
        raise ConflictError(
            f"{path} is not a file of this user alone (uid {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}, {found.st_nlink} links); remove it, or give "
            "another name"
        )
    return file


def _umask() -> int:
    """The process's umask. Not os.umask, which would change it for other threads meanwhile."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077


DOWNLOAD_LEASE_S: Final = 120.0
"""How long, in seconds, the snapshot survives an interruption."""
BATCH_BYTES: Final = 64 << 20
"""Most bytes of tensors in memory. A larger tensor is read in parts, unless an adapter is merged
into it."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The contents of the file, resolved against a layout."""

    chosen: Chosen
    dtype: torch.dtype | None
    names: Mapping[str, str]
    """From names in the model to names in the file."""
    metadata: Mapping[str, str]
    """The header's metadata; incarnation and step are added."""
    key: str
    """Equal for equal requests."""
    merger: Merger | None = None
    """None: tensors are written as they are."""

    def result_bytes(self, index: int) -> int:
        """Bytes of a tensor while it is read and in the file, whichever are more."""
        tensor = self.chosen.plan.tensors[index]
        item = self.dtype.itemsize if self.dtype is not None else 0
        return max(math.prod(tensor.shape) * item, tensor.size_bytes)

    def parts(self, index: int) -> list[Box | None]:
        """Parts of a tensor that follow each other in the file, each small enough for memory; None:
        it is small enough as a whole."""
        shape, size_bytes = self.chosen.plan.tensors[index].shape, self.result_bytes(index)
        if size_bytes <= BATCH_BYTES:
            return [None]
        return [*consecutive(shape, math.prod(shape) * BATCH_BYTES // size_bytes)]

    @property
    def written(self) -> list[int]:
        """Indexes in the plan of what is in the file."""
        tensors = self.chosen.plan.tensors
        if self.merger is None:
            return list(range(len(tensors)))
        return [n for n, one in enumerate(tensors) if self.merger.name(one.fqn) is not None]


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    header: bytes
    """Header of the partial file; names the state."""
    final_header: bytes
    """Header of the complete file; equally long."""
    order: Sequence[int]
    """Indexes in the plan, in file order."""
    ends: Sequence[int]
    """One past the last byte of each of these tensors."""

    @property
    def size_bytes(self) -> int:
        return self.ends[-1] if self.ends else len(self.header)

    def whole(self, size_bytes: int) -> int:
        """Number of complete tensors in a file of that length."""
        return bisect_right(self.ends, size_bytes)

    def end_of(self, count: int) -> int:
        """One past the last byte of the first `count` tensors."""
        return self.ends[count - 1] if count else len(self.header)


def file_layout(wanted: Wanted, pinned: Pinned) -> FileLayout:
    plan = wanted.chosen.plan
    by_name: dict[str, int] = {}
    specs = []
    cast = str(wanted.dtype).removeprefix("torch.") if wanted.dtype is not None else None
    for index in wanted.written:
        tensor = plan.tensors[index]
        name = wanted.names[wanted.chosen.names[index][0]]
        by_name[name] = index
        dtype = tensor.dtype if cast is None else cast
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tensor.shape))
    ordered = file_order(specs)
    metadata = {
        **wanted.metadata,
        "paramd_incarnation": str(pinned.state.incarnation),
        "paramd_step": str(pinned.state.step),
        **({"paramd_unsettled": "true"} if pinned.unsettled else {}),
    }
    header = encode_header(ordered, {**metadata, IDENTITY: identity(wanted.key, pinned)})
    sizes = (spec.size_bytes for spec in ordered)
    return FileLayout(
        header=header,
        final_header=encode_header(ordered, metadata, size_bytes=len(header)),
        order=[by_name[spec.name] for spec in ordered],
        ends=list(accumulate(sizes, initial=len(header)))[1:],
    )


def batches(
    items: Iterable[Result], size_bytes: Callable[[Result], int], most_bytes: int
) -> Iterator[list[Result]]:
    """Consecutive items of at most `most_bytes`; a larger one is alone."""
    batch: list[Result] = []
    batch_bytes = 0
    for item in items:
        more = size_bytes(item)
        if batch and batch_bytes + more > most_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += more
    if batch:
        yield batch


def identity(key: str, pinned: Pinned) -> str:
    """Name of the bytes: the request, and the snapshots of each rank."""
    told = {"key": key, "pins": [asdict(pin) for pin in pinned.pins.values()]}
    return json.dumps(told, separators=(",", ":"))


def pinned_of(header: bytes) -> Pinned | None:
    """The snapshots that a partial file's header names; None without any."""
    try:
        told = parsed_json(parsed_json(header[8:], HEADER)[METADATA_KEY][IDENTITY], HEADER)
        pins = [_pin_of(one) for one in told["pins"]]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return pinned_at(pins[0].state, pins) if pins else None


def _pin_of(told: Mapping[str, Any]) -> RankPin:
    *numbers, label = told["state"]
    incarnation, history, step, edits = map(int, numbers)
    state = StateName(incarnation, history, step, edits, str(label))
    return read_document(RankPin, told, state=state)


PATIENCE_S: Final = 60.0
"""How long, in seconds, an outage may last before the call fails."""
MAX_BEGINNINGS: Final = 3

_AGAIN_S: Final = 0.5

Said = Callable[[str], object]
"""Called with a message when a download resumes, retries or starts over."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Downloaded(Shown):
    """A finished download."""

    path: Path
    job: str
    incarnation: int
    step: int
    name_count: int
    """Number of names, including those of tied tensors."""
    size_bytes: int
    resumed_bytes: int
    """Bytes reused from an earlier attempt."""
    seconds: float
    unsettled: bool = False
    """As in `Summoned`."""
    replicas_differ: tuple[str, ...] | None = None
    """As in `Summoned`; None also of a download that was resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The requested contents; see `AsyncMesh.download`."""

    patterns: Sequence[Pattern]
    dtype: torch.dtype | None
    buffers: bool
    name_map: NameMap
    replica: int | None = None
    merge: bool = False
    adapter: str = ""

    async def wanted(self, reach: SidecarFinder, sidecars: Sidecars) -> Wanted:
        """Resolve the request against the current layout. Raises as `choose`."""
        merger, patterns = None, self.patterns
        if self.merge:
            merger = Merger(await reach.index(sidecars), self.adapter)
            patterns = merger.with_inputs(self.patterns, buffers=self.buffers)
        chosen = await choose(reach, sidecars, patterns, buffers=self.buffers, replica=self.replica)
        # By the name in memory, all names that the tensor has without the name map.
        own = {item[0]: item for item in chosen.names}
        if merger is not None:
            items = zip(chosen.plan.tensors, chosen.names, strict=True)
            own = {item[0]: merger.names(tensor.fqn, item) for tensor, item in items}
        mapped = self.name_map.apply(of[0] for of in own.values() if of)
        names = {name: mapped[of[0]] for name, of in own.items() if of}
        aliases = {alias: mapped[of[0]] for of in own.values() for alias in of[1:]}
        job, digest = sidecars.document.job, sidecars.document.layout_digest
        plan, dtype = chosen.plan, str(self.dtype)
        # Equal for equal requests against equal layouts.
        told = repr((job, digest, dtype, sorted(names.items()), plan.tensors, plan.ranks))
        told += f"merge {self.adapter}" * self.merge
        return Wanted(
            chosen=chosen,
            dtype=self.dtype,
            names=names,
            metadata={**aliases, "format": "pt", "paramd_job": job},
            key=xxh3_128_hexdigest(told.encode()),
            merger=merger,
        )


async def _renewed(sidecars: Sidecars, pinned: Pinned) -> None:
    await asyncio.gather(*(sidecars.renew(pin, DOWNLOAD_LEASE_S) for pin in pinned.pins.values()))


def _released(sidecars: Sidecars, pinned: Pinned | None) -> None:
    """What was pinned would stand in the way of what is pinned next."""
    if pinned is None:
        return
    for pin in (*pinned.pins.values(), *pinned.beside.values()):
        sidecars.release(pin)


@dataclass(kw_only=True)
class Download:
    """One download; `run` may be called once."""

    reach: SidecarFinder
    transfer: Transfer
    file: PartialFile
    overwrite: bool
    transport: Transport
    moved: Moved
    said: Said
    _resumed_bytes: int = 0
    _differ: tuple[str, ...] | None = None

    async def run(self, content: Content, deadline_s: float) -> Downloaded:
        """Download `content` at one step.

        Raises:
            UnreachableError: If a sidecar was unreachable for too long (call again to resume).
            ExhaustedError: Without disk space.
            ConflictError: If the file exists, else as `AsyncMesh.summon`.
        """
        began_s = time.monotonic()
        with self.file.opened():
            for beginning in range(MAX_BEGINNINGS):
                try:
                    wanted, pinned, layout = await self._whole(content, deadline_s)
                except LeaseEndedError:
                    if beginning + 1 == MAX_BEGINNINGS:
                        raise
                    self.said("the snapshot has expired; starting over")
                    continue
                publish = partial(self.file.publish, layout.final_header, overwrite=self.overwrite)
                await self.transfer.run(publish)
                return Downloaded(
                    path=self.file.path,
                    job=self.reach.document.job,
                    incarnation=pinned.state.incarnation,
                    step=pinned.state.step,
                    name_count=sum(len(wanted.chosen.names[n]) for n in wanted.written),
                    size_bytes=layout.size_bytes,
                    resumed_bytes=self._resumed_bytes,
                    seconds=time.monotonic() - began_s,
                    unsettled=pinned.unsettled,
                    replicas_differ=self._differ,
                )
        raise AssertionError("the last attempt returns or raises")

    async def _whole(
        self, content: Content, deadline_s: float
    ) -> tuple[Wanted, Pinned, FileLayout]:
        async def attempt(sidecars: Sidecars) -> tuple[Wanted, Pinned]:
            wanted = await content.wanted(self.reach, sidecars)
            pinned = await self._resumed(sidecars, wanted)
            if pinned is None:
                pinned = await self._pin(sidecars, wanted, deadline_s)
            return wanted, pinned

        wanted, pinned = await self.reach.attempts(attempt, deadline_s)
        layout = file_layout(wanted, pinned)
        keeping = asyncio.create_task(self._keep(pinned), name="paramd-download-leases")
        try:
            await self._read(wanted, pinned, layout, deadline_s)
        finally:
            await cancelled(keeping)
        # Not on an error: the next attempt resumes from these snapshots.
        _released(await self.reach.sidecars(), pinned)
        return wanted, pinned, layout

    async def _resumed(self, sidecars: Sidecars, wanted: Wanted) -> Pinned | None:
        header = await asyncio.to_thread(self.file.header)
        if not header:
            return None
        pinned = pinned_of(header)
        layout = file_layout(wanted, pinned) if pinned is not None else None
        if pinned is None or layout is None or layout.header != header:
            self.said("the partial file is of another download; starting over")
            _released(sidecars, pinned)
            return None
        try:
            await _renewed(sidecars, pinned)
        except (NotFoundError, ConflictError):
            self.said(f"the snapshot of step {pinned.state.step} has expired; starting over")
            _released(sidecars, pinned)
            return None
        # Nothing of a truncated tensor is kept: its pieces come from several ranks.
        self._resumed_bytes = layout.end_of(layout.whole(self.file.size_bytes))
        await asyncio.to_thread(self.file.go_on, self._resumed_bytes)
        self.said(
            f"resuming at step {pinned.state.step}: {self._resumed_bytes:,} of "
            f"{layout.size_bytes:,} bytes are already here"
        )
        return pinned

    async def _pin(self, sidecars: Sidecars, wanted: Wanted, deadline_s: float) -> Pinned:
        chosen = wanted.chosen
        samples = samples_for(self.reach, sidecars, chosen.tensors)
        pinned = await Pinner(
            sidecars,
            backoff=self.reach.backoff,
            samples=samples,
            waits_for_itself=sidecars.waits_for_itself,
        ).pin(
            spans_of(sidecars, chosen.plan), deadline_s=deadline_s, with_buffers=chosen.at_boundary
        )
        try:
            await _renewed(sidecars, pinned)
            self._differ = await compared(self.reach, sidecars, pinned, samples)
            layout = file_layout(wanted, pinned)
            await asyncio.to_thread(self.file.begin, layout.header, layout.size_bytes)
        except BaseException:
            _released(sidecars, pinned)
            raise
        self._resumed_bytes = 0
        return pinned

    async def _keep(self, pinned: Pinned) -> None:
        while True:
            await asyncio.sleep(DOWNLOAD_LEASE_S / 5)
            # Whatever fails: a snapshot is gone only once its lease has run out.
            with suppress(ParamdError):
                await _renewed(await self.reach.sidecars(), pinned)

    async def _read(
        self, wanted: Wanted, pinned: Pinned, layout: FileLayout, deadline_s: float
    ) -> None:
        self.moved(self.file.size_bytes, layout.size_bytes)
        missing = layout.order[layout.whole(self.file.size_bytes) :]
        for batch in batches(missing, wanted.result_bytes, BATCH_BYTES):
            parts = [None] if len(batch) > 1 or wanted.merger else wanted.parts(batch[0])
            for part in parts:
                await self._append(wanted, batch, part, pinned, deadline_s)
                self.moved(self.file.size_bytes, layout.size_bytes)

    async def _append(
        self,
        wanted: Wanted,
        batch: Sequence[int],
        part: Box | None,
        pinned: Pinned,
        deadline_s: float,
    ) -> None:
        """Read tensors, or a part of one, and append them to the file.

        On their own, so that they are gone before others are read.
        """
        found = await self._patiently(wanted, batch, part, pinned, deadline_s)
        for index in batch:
            tensor = found[wanted.chosen.names[index][0]]
            data = memory_at(tensor.data_ptr(), tensor.nbytes)
            await self.transfer.run(partial(self.file.append, data))

    async def _merged(
        self, wanted: Wanted, merger: Merger, batch: Sequence[int], reading: Reading
    ) -> dict[str, torch.Tensor]:
        plan = wanted.chosen.plan
        numbers = {one.fqn: number for number, one in enumerate(plan.tensors)}
        beside = {numbers[name] for n in batch for name in merger.inputs(plan.tensors[n].fqn)}
        read = [*batch, *sorted(beside.difference(batch))]
        # Cast once merged: PEFT adds in the base's own dtype.
        found = await self.transfer.tensors(reading, wanted.chosen, read, dtype=None)
        tensors = {plan.tensors[n].fqn: found[wanted.chosen.names[n][0]] for n in read}

        def merge() -> dict[str, torch.Tensor]:
            made = {}
            for number in batch:
                base = found[wanted.chosen.names[number][0]]
                merger.merge_(plan.tensors[number].fqn, base, tensors)
                cast = base if wanted.dtype is None else base.to(wanted.dtype)
                made[wanted.chosen.names[number][0]] = cast.contiguous()
            return made

        return await self.transfer.run(merge)

    async def _patiently(
        self,
        wanted: Wanted,
        batch: Sequence[int],
        part: Box | None,
        pinned: Pinned,
        deadline_s: float,
    ) -> dict[str, torch.Tensor]:
        began_s = time.monotonic()
        while True:
            try:
                reading = Reading(await self.reach.sidecars(), pinned, deadline_s, self.transport)
                if wanted.merger is not None:
                    return await self._merged(wanted, wanted.merger, batch, reading)
                if part is not None:
                    return await self.transfer.part(
                        reading, wanted.chosen, batch[0], part, dtype=wanted.dtype
                    )
                return await self.transfer.tensors(
                    reading, wanted.chosen, batch, dtype=wanted.dtype
                )
            except UnreachableError as error:
                if time.monotonic() > min(deadline_s, began_s + PATIENCE_S):
                    raise UnreachableError(
                        f"{error}; the bytes so far are kept: run the same command within "
                        f"{DOWNLOAD_LEASE_S:.0f} s to resume"
                    ) from error
                self.said(f"{error}; retrying")
                await asyncio.sleep(_AGAIN_S)
                try:
                    await self.reach.refresh()
                except (UnreachableError, DeadlineError):
                    continue
