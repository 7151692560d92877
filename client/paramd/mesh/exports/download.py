"""Resumable download of full tensors of one step into a local safetensors file.

Next to `model.safetensors` stand `.model.safetensors.part`, with its disk space reserved, and
`.model.safetensors.journal`: a JSON line that names the snapshot, then one with the checksum of
each range written. After an interruption the same call resumes from the same snapshot while its
lease lasts, and starts over otherwise. Ranges with a broken line or a wrong checksum are read
again.

The directory may be writable by others, such as /tmp. So both files are private (mode 0600)
until the complete file is renamed, and a file of another user, or a link, is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_128_hexdigest

from paramd.errors import (
    ConflictError,
    DeadlineError,
    ExhaustedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.layout.exports.safetensors import TensorSpec, encode_header, file_order
from paramd.layout.exports.settings import NameMap
from paramd.layout.plan import ReadPlan, ResultTensor
from paramd.mesh.exports.restoring import in_file, read_batch
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.grpc import LeaseEndedError
from paramd.mesh.peers.sidecars import Pinned, RankPin, Sidecars
from paramd.mesh.reading.pin import Pinner, choose
from paramd.mesh.reading.stream import Transport
from paramd.mesh.reading.transfer import Chosen

if TYPE_CHECKING:
    import torch

PART_BYTES: Final = 16 << 20
"""Most bytes per checksummed range."""

Ranges = dict[tuple[int, int], str]
"""Checksums of half-open ranges of the file."""


def is_resumable(path: Path) -> bool:
    """Whether a download to `path` was interrupted, so that the same call resumes it."""
    try:
        # Without its first line, which names the snapshots, there is nothing to resume.
        return b"\n" in _journal_of(path).read_bytes()
    except OSError:
        return False


def _journal_of(path: Path) -> Path:
    return path.parent / f".{path.name}.journal"


class PartialFile:
    """The partial file of a download to `path`, and its journal. Methods block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.parent / f".{path.name}.part"
        self._journal = _journal_of(path)
        self._file = self._lines = -1

    def check(self, *, replace: bool) -> None:
        """Fail early on what `publish` would refuse.

        Raises:
            UsageError: no such directory. ConflictError: the file exists.
        """
        if not self.path.parent.is_dir():
            raise UsageError(f"{self.path}: there is no directory {self.path.parent}; create it")
        if not replace and os.path.lexists(self.path):
            raise ConflictError(f"{self.path} exists; give another name, or --force to replace it")

    def found(self) -> tuple[Mapping[str, Any], Ranges] | None:
        """An earlier attempt's (description of the snapshot, ranges); None without a journal."""
        try:
            lines = _contents(self._lines).split(b"\n")
            about = json.loads(lines[0])
            ranges: Ranges = {}
            for line in lines[1:-1]:
                one = json.loads(line)
                ranges[int(one["begin"]), int(one["end"])] = str(one["xxh3"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (about, ranges) if isinstance(about, dict) else None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open and lock the files for the block.

        Raises:
            ConflictError: another process downloads to this path, or a partial file is not
                ours.
        """
        import fcntl

        self._file = _open_ours(self._part)
        try:
            self._lines = _open_ours(self._journal)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    f"{self.path}: another process downloads to it; wait, or give another name"
                ) from None
            yield
        finally:
            for file in (self._file, self._lines):
                if file >= 0:
                    os.close(file)
            self._file = self._lines = -1

    def begin(self, about: Mapping[str, Any], size_bytes: int) -> None:
        """Start over, with disk space reserved for the whole file.

        Raises:
            ExhaustedError: not enough disk space.
        """
        try:
            # Zero it first: a range of the old download must never pass for this one's.
            os.ftruncate(self._file, 0)
            os.posix_fallocate(self._file, 0, max(size_bytes, 1))
            os.ftruncate(self._file, size_bytes)
        except OSError as error:
            raise ExhaustedError(
                f"{self.path}: cannot reserve {size_bytes:,} bytes ({error.strerror}); free some "
                "space or write elsewhere"
            ) from error
        self._rewrite(about)

    def go_on(self, about: Mapping[str, Any], ranges: Ranges) -> None:
        """Resume with these ranges; rewrites the journal to hold just them."""
        self._rewrite(about)
        for (begin, end), checksum in ranges.items():
            self._line({"begin": begin, "end": end, "xxh3": checksum})

    def checked(self, ranges: Ranges, size_bytes: int) -> Ranges:
        """Those of `ranges` whose bytes in the file match their checksum."""
        if os.fstat(self._file).st_size != size_bytes:
            return {}
        return {
            (begin, end): checksum
            for (begin, end), checksum in ranges.items()
            if 0 <= begin < end <= size_bytes
            and xxh3_128_hexdigest(os.pread(self._file, end - begin, begin)) == checksum
        }

    def write(self, begin: int, data: memoryview) -> None:
        """Write a range, and journal it part by part.

        Raises:
            ExhaustedError: the write failed, for example on a full disk.
        """
        for at in range(begin, begin + len(data), PART_BYTES):
            part = data[at - begin : at - begin + PART_BYTES]
            try:
                _write_all(self._file, part, at)
            except OSError as error:
                raise ExhaustedError(f"{self.path}: {error.strerror}") from error
            end = at + len(part)
            self._line({"begin": at, "end": end, "xxh3": xxh3_128_hexdigest(part)})

    def publish(self, *, replace: bool) -> None:
        """Rename the complete file to `path`, durably.

        Raises:
            ConflictError: the file exists by now, or the partial file was replaced.
        """
        os.fchmod(self._file, 0o666 & ~_umask())
        os.fsync(self._file)
        # In a directory that others can write, the name may no longer be our open file's.
        if not os.path.samestat(os.lstat(self._part), os.fstat(self._file)):
            raise ConflictError(f"{self._part} was replaced by another process; try again")
        if replace:
            os.replace(self._part, self.path)
        else:
            try:
                # link, unlike rename, fails if the name was taken since `check`.
                os.link(self._part, self.path)
            except FileExistsError:
                raise ConflictError(
                    f"{self.path} exists; give another name, or --force to replace it"
                ) from None
            except OSError:
                # A file system without hard links.
                if os.path.lexists(self.path):
                    raise ConflictError(f"{self.path} exists; give another name") from None
                os.rename(self._part, self.path)
        self.forget()
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def forget(self) -> None:
        """Remove the partial file and the journal. Idempotent."""
        for path in (self._part, self._journal):
            with suppress(FileNotFoundError):
                path.unlink()

    def _line(self, content: Mapping[str, Any]) -> None:
        if self._lines < 0:
            raise ParamdError(f"{self.path}: the download has not begun")
        os.write(self._lines, json.dumps(dict(content), separators=(",", ":")).encode() + b"\n")

    def _rewrite(self, about: Mapping[str, Any]) -> None:
        if self._lines < 0:
            raise ParamdError(f"{self.path}: the download has not begun")
        os.ftruncate(self._lines, 0)
        os.lseek(self._lines, 0, os.SEEK_SET)
        self._line(about)


def _open_ours(path: Path) -> int:
    """Open, or create, a private file of this user for reading and writing.

    Raises:
        ConflictError: a link, not a regular file, hard-linked, or another user's or open to one.
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


def _contents(file: int) -> bytes:
    """The whole file; leaves the position at its end, for appending."""
    os.lseek(file, 0, os.SEEK_SET)
    return b"".join(iter(lambda: os.read(file, 1 << 20), b""))


def _umask() -> int:
    """The process's umask. Not os.umask, which would change it for other threads meanwhile."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done


DOWNLOAD_LEASE_S: Final = 120.0
"""How long the snapshot survives an interruption."""
BATCH_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The contents of the file, resolved against a layout."""

    chosen: Chosen
    dtype: torch.dtype | None
    names: Mapping[str, str]
    """From names in the model to names in the file."""
    metadata: Mapping[str, str]
    """Of the header; incarnation and step are added."""
    key: str
    """Equal for equal requests."""


@dataclass
class FileLayout:
    """The file's layout at one step."""

    header: bytes
    begins: dict[int, int] = field(default_factory=dict)
    """First byte of each tensor, by index in the plan."""
    ends: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """Indexes in the plan, in file order."""
    size_bytes: int = 0


def file_layout(wanted: Wanted, pinned: Pinned) -> FileLayout:
    plan = wanted.chosen.plan
    by_name: dict[str, int] = {}
    specs = []
    for index, tensor in enumerate(plan.tensors):
        name = wanted.names[wanted.chosen.names[index][0]]
        by_name[name] = index
        specs.append(TensorSpec(name=name, dtype=_dtype(tensor, wanted), shape=tensor.shape))
    ordered = file_order(specs)
    metadata = {
        **wanted.metadata,
        "paramd_incarnation": str(pinned.incarnation),
        "paramd_step": str(pinned.step),
    }
    found = FileLayout(header=encode_header(ordered, metadata))
    at = len(found.header)
    for spec in ordered:
        found.begins[by_name[spec.name]] = at
        found.order.append(by_name[spec.name])
        at += spec.size_bytes
        found.ends[by_name[spec.name]] = at
    found.size_bytes = at
    return found


def _dtype(tensor: ResultTensor, wanted: Wanted) -> str:
    return str(wanted.dtype).removeprefix("torch.") if wanted.dtype is not None else tensor.dtype


def covered(ranges: Ranges, begin: int, end: int) -> bool:
    """Whether ranges, which never cross tensors, cover [begin, end)."""
    have = sum(stop - start for start, stop in ranges if begin <= start and stop <= end)
    return have == end - begin


def batches(plan: ReadPlan, missing: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    size_bytes = 0
    for index in missing:
        more = plan.tensors[index].size_bytes
        if batch and size_bytes + more > BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(index)
        size_bytes += more
    if batch:
        yield batch


def request_key(
    job: str, digest: str, plan: ReadPlan, dtype: object, names: Mapping[str, str]
) -> str:
    """A digest that is equal for equal requests against equal layouts."""
    told = repr((job, digest, str(dtype), sorted(names.items()), plan.tensors, plan.ranks))
    return xxh3_128_hexdigest(told.encode())


def told_of(pinned: Pinned) -> dict[str, Any]:
    return {
        "incarnation": pinned.incarnation,
        "step": pinned.step,
        "edits": pinned.edits,
        "unsettled": pinned.unsettled,
        "pins": [[pin.rank, pin.snapshot_id, pin.size_bytes] for pin in pinned.pins.values()],
    }


def pinned_of(about: Mapping[str, Any]) -> Pinned | None:
    try:
        incarnation, step, edits = (
            int(about["incarnation"]),
            int(about["step"]),
            int(about["edits"]),
        )
        pins = {
            int(rank): RankPin(
                rank=int(rank),
                snapshot_id=str(snapshot_id),
                incarnation=incarnation,
                step=step,
                size_bytes=int(size_bytes),
                lease_s=DOWNLOAD_LEASE_S,
                edits=edits,
                unsettled=bool(about.get("unsettled", False)),
            )
            for rank, snapshot_id, size_bytes in about["pins"]
        }
    except (KeyError, TypeError, ValueError):
        return None
    if not pins:
        return None
    unsettled = any(pin.unsettled for pin in pins.values())
    return Pinned(incarnation=incarnation, step=step, pins=pins, edits=edits, unsettled=unsettled)


PATIENCE_S: Final = 60.0
"""How long an outage may last before the call fails."""
MAX_BEGINNINGS: Final = 3

_AGAIN_S: Final = 0.5

Moved = Callable[[int, int], object]
"""Called with bytes done and total bytes."""
Said = Callable[[str], object]
"""Called with a message when a download resumes, retries or starts over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloaded:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The requested contents; see `AsyncMesh.download`."""

    patterns: Sequence[str]
    dtype: torch.dtype | None
    buffers: bool
    name_map: NameMap

    async def wanted(self, reach: SidecarFinder, sidecars: Sidecars) -> Wanted:
        """Resolve the request against the current layout. Raises as `choose`."""
        chosen = await choose(reach, sidecars, self.patterns, buffers=self.buffers)
        names = self.name_map.apply(item[0] for item in chosen.names)
        aliases = {alias: names[item[0]] for item in chosen.names for alias in item[1:]}
        job, digest = sidecars.document.job, sidecars.document.layout_digest
        return Wanted(
            chosen=chosen,
            dtype=self.dtype,
            names=names,
            metadata={**aliases, "format": "pt", "paramd_job": job},
            key=request_key(job, digest, chosen.plan, self.dtype, names),
        )


async def _renewed(sidecars: Sidecars, pinned: Pinned) -> None:
    await asyncio.gather(*(sidecars.renew(pin, DOWNLOAD_LEASE_S) for pin in pinned.pins.values()))


class Download:
    """One download; `run` may be called once."""

    def __init__(
        self,
        reach: SidecarFinder,
        file: PartialFile,
        *,
        replace: bool,
        transport: Transport,
        moved: Moved,
        said: Said,
    ) -> None:
        self._transport = transport
        self._reach = reach
        self._file = file
        self._replace = replace
        self._moved = moved
        self._said = said
        self._resumed_bytes = 0

    async def run(self, content: Content, deadline_s: float) -> Downloaded:
        """Download `content` at one step.

        Raises:
            UnreachableError: a sidecar was unreachable for too long; call again to resume.
            ExhaustedError: not enough disk space. ConflictError: the file exists.
            ParamdError: as `AsyncMesh.summon`.
        """
        began_s = time.monotonic()
        with self._file.opened():
            for beginning in range(MAX_BEGINNINGS):
                try:
                    wanted, pinned, layout = await self._whole(content, deadline_s)
                except LeaseEndedError:
                    if beginning + 1 == MAX_BEGINNINGS:
                        raise
                    self._said("the snapshot has expired; starting over")
                    continue
                await asyncio.to_thread(self._file.publish, replace=self._replace)
                return Downloaded(
                    path=self._file.path,
                    job=self._reach.document.job,
                    incarnation=pinned.incarnation,
                    step=pinned.step,
                    name_count=sum(len(names) for names in wanted.chosen.names),
                    size_bytes=layout.size_bytes,
                    resumed_bytes=self._resumed_bytes,
                    seconds=time.monotonic() - began_s,
                    unsettled=pinned.unsettled,
                )
        raise AssertionError("the last beginning returns or raises")

    async def _whole(
        self, content: Content, deadline_s: float
    ) -> tuple[Wanted, Pinned, FileLayout]:
        async def attempt(sidecars: Sidecars) -> tuple[Wanted, Pinned, Ranges]:
            wanted = await content.wanted(self._reach, sidecars)
            pinned, ranges = await self._resumed(sidecars, wanted)
            if pinned is None:
                pinned = await self._pin(sidecars, wanted, deadline_s)
            return wanted, pinned, ranges

        wanted, pinned, ranges = await self._reach.attempts(attempt, deadline_s)
        layout = file_layout(wanted, pinned)
        keeping = asyncio.create_task(self._keep(pinned), name="paramd-download-leases")
        try:
            await self._read(wanted, pinned, layout, ranges, deadline_s)
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
        # Not on an error: the next attempt resumes from these snapshots.
        sidecars = await self._reach.sidecars()
        for pin in pinned.pins.values():
            sidecars.release(pin)
        return wanted, pinned, layout

    async def _resumed(self, sidecars: Sidecars, wanted: Wanted) -> tuple[Pinned | None, Ranges]:
        found = await asyncio.to_thread(self._file.found)
        if found is None:
            return None, {}
        about, ranges = found
        pinned = pinned_of(about)
        if pinned is None or about.get("key") != wanted.key:
            self._said("the partial file is of another download; starting over")
            return None, {}
        try:
            await _renewed(sidecars, pinned)
        except (NotFoundError, ConflictError, UnreachableError):
            self._said(f"the snapshot of step {pinned.step} has expired; starting over")
            return None, {}
        layout = file_layout(wanted, pinned)
        good = await asyncio.to_thread(self._file.checked, ranges, layout.size_bytes)
        await asyncio.to_thread(self._file.go_on, about, good)
        self._resumed_bytes = sum(end - begin for begin, end in good)
        self._said(
            f"resuming at step {pinned.step}: {self._resumed_bytes:,} of "
            f"{layout.size_bytes:,} bytes are already here"
        )
        return pinned, good

    async def _pin(self, sidecars: Sidecars, wanted: Wanted, deadline_s: float) -> Pinned:
        chosen = wanted.chosen
        spans: dict[int, Sequence[tuple[int, int]]] = {
            read.rank: read.spans for read in chosen.plan.ranks
        }
        pinned = await Pinner(sidecars, backoff=self._reach.backoff).pin(
            spans if spans else {min(sidecars.document.peers, default=0): ()},
            deadline_s=deadline_s,
            with_buffers=chosen.at_boundary,
        )
        await _renewed(sidecars, pinned)
        about = {"key": wanted.key, **told_of(pinned)}
        layout = file_layout(wanted, pinned)
        await asyncio.to_thread(self._file.begin, about, layout.size_bytes)
        self._resumed_bytes = 0
        return pinned

    async def _keep(self, pinned: Pinned) -> None:
        while True:
            await asyncio.sleep(DOWNLOAD_LEASE_S / 5)
            with suppress(UnreachableError):
                sidecars = await self._reach.sidecars()
                await asyncio.gather(
                    *(sidecars.renew(pin, DOWNLOAD_LEASE_S) for pin in pinned.pins.values()),
                    return_exceptions=True,
                )

    async def _read(
        self,
        wanted: Wanted,
        pinned: Pinned,
        layout: FileLayout,
        ranges: Ranges,
        deadline_s: float,
    ) -> None:
        done_bytes = sum(end - begin for begin, end in ranges)
        self._moved(done_bytes, layout.size_bytes)
        if not covered(ranges, 0, len(layout.header)):
            await asyncio.to_thread(self._file.write, 0, memoryview(layout.header))
            done_bytes += len(layout.header)
        plan = wanted.chosen.plan
        missing = [
            index
            for index in layout.order
            if not covered(ranges, layout.begins[index], layout.ends[index])
        ]
        for batch in batches(plan, missing):
            parts = await self._patiently(plan, batch, pinned, deadline_s)
            for index in batch:
                data = await asyncio.to_thread(
                    in_file, plan.tensors[index], parts[index], wanted.dtype
                )
                begin = layout.begins[index]
                await asyncio.to_thread(self._file.write, begin, memoryview(data))
                done_bytes += len(data)
            self._moved(min(done_bytes, layout.size_bytes), layout.size_bytes)

    async def _patiently(
        self, plan: ReadPlan, batch: Sequence[int], pinned: Pinned, deadline_s: float
    ) -> dict[int, bytearray]:
        began_s = time.monotonic()
        while True:
            try:
                return await read_batch(
                    await self._reach.sidecars(), plan, batch, pinned, deadline_s, self._transport
                )
            except UnreachableError as error:
                now_s = time.monotonic()
                if now_s > min(deadline_s, began_s + PATIENCE_S):
                    raise UnreachableError(
                        f"{error}; the bytes so far are kept: run the same command within "
                        f"{DOWNLOAD_LEASE_S:.0f} s to resume"
                    ) from error
                self._said(f"{error}; retrying")
                await asyncio.sleep(_AGAIN_S)
                try:
                    await self._reach.refresh()
                except (UnreachableError, DeadlineError):
                    continue
