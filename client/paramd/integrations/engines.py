"""Inference engines that follow a training: vLLM and SGLang, over their own HTTP routes.

Weights reach the engine as a safetensors file in a directory that it can read, never as a pickle.
The other routes of both need one: handles of CUDA memory (vLLM's "ipc", SGLang's
update_weights_from_tensor), or a process with a GPU that joins NCCL (paramd.integrations.vllm).

    frame -> DIR/VERSION/model.safetensors (whole, then renamed) -> the engine loads it -> VERSION

An engine that refuses, or dies half way, gets the last good weights again, and generates only once
it has loaded either version completely. Then the newest are tried again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit

import httpx2

from paramd.answers import NOT_PACKED, asked
from paramd.bounds import ENGINE_ANSWER, OverBoundError
from paramd.errors import ConflictError, ParamdError, UnreachableError, UsageError
from paramd.layout.exports.safetensors import TensorSpec, encode_header, file_order
from paramd.layout.exports.settings import NameMap
from paramd.mesh.frames.frames import ParamFrame
from paramd.mesh.peers.grpc import cancelled
from paramd.mesh.reading.stream import memory_at
from paramd.security.loopback import Acquaintance
from paramd.security.tls import is_loopback

if TYPE_CHECKING:
    import torch

Pause = Literal["wait", "abort", "keep"]
"""Treatment of running requests: they end first, are aborted, or continue with other weights."""

LOAD_S = 1800.0
"""Longest time that an engine may take to load."""

ANSWER_S = ENGINE_ANSWER.within_s

FILE = "model.safetensors"

CHUNK_BYTES = 16 << 20


class Engine:
    """One inference server, called by JSON over HTTP; errors name the route."""

    def __init__(self, url: str, *, token: str = "", pause: Pause = "wait") -> None:
        """No I/O yet. Raises UsageError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise UsageError(f"engine: {url!r}; expected a URL such as http://127.0.0.1:8000")
        if token and parts.scheme == "http" and not is_loopback(parts.hostname):
            raise UsageError(
                f"engine: {url} would get its key (PARAMD_ENGINE_TOKEN) in the clear; use https"
            )
        headers = NOT_PACKED | ({"authorization": f"Bearer {token}"} if token else {})
        self._url = url.rstrip("/")
        self._pause = pause
        self._extensions = {"trace": Acquaintance(self._url).trace} if token else {}
        """Of each request: who takes the port of an engine that ended gets no key."""
        # A connection for each call: vLLM drops the one on which it has reported a failure.
        self._client = httpx2.AsyncClient(
            base_url=self._url,
            headers=headers,
            trust_env=False,
            limits=httpx2.Limits(max_keepalive_connections=0),
        )

    async def serving(self) -> tuple[str, str]:
        """The version in force, and the path it was loaded from; UnreachableError: no answer."""
        raise NotImplementedError

    async def load(self, path: str, version: str) -> None:
        """Load weights, and generate with them. After a failure nothing is generated until it
        works.

        Raises UnreachableError without an answer, ConflictError with the engine's own words if it
        refused.
        """
        raise NotImplementedError

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> dict[str, Any]:
        try:
            answer = await asked(
                self._client,
                method,
                path,
                ENGINE_ANSWER,
                timeout_s=timeout_s,
                json=body,
                params=query,
                extensions=self._extensions,
            )
        except (httpx2.HTTPError, TimeoutError, OverBoundError) as error:
            why = str(error) or type(error).__name__
            raise UnreachableError(f"{self._url}{path} does not answer: {why}") from error
        try:
            found = answer.json() if answer.content else {}
        except ValueError:
            found = answer.text
        if answer.status_code != 200:
            raise ConflictError(
                f"{self._url}{path} refused ({answer.status_code}): {_words(found)}"
            )
        return found if isinstance(found, dict) else {}


class VllmEngine(Engine):
    """`vllm serve` with VLLM_SERVER_DEV_MODE=1; calls `reload_weights` of its workers.

    Source: vllm/entrypoints/rl/online/api_router.py and serve/dev/rpc/api_router.py of 0.33.
    """

    async def serving(self) -> tuple[str, str]:
        found = await self._call("GET", "/weight_info")
        served = (await self._call("GET", "/v1/models")).get("data") or [{}]
        return str(found.get("weight_version")), str(served[0].get("root", ""))

    async def load(self, path: str, version: str) -> None:
        call = self._call
        await call("POST", "/pause", query={"mode": self._pause}, timeout_s=LOAD_S)
        await call(
            "POST",
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": path}, "timeout": LOAD_S},
            timeout_s=LOAD_S,
        )
        if self._pause == "keep":
            # The other modes have emptied it: its content is of the old weights.
            await call("POST", "/reset_prefix_cache")
        await call("POST", "/update_weight_version", {"new_version": version})
        await call("POST", "/resume")


class SglangEngine(Engine):
    """An SGLang server. Source: sglang/srt/entrypoints/http_server.py of 0.5.23."""

    _MODES: Mapping[str, str] = {"abort": "abort", "keep": "retract"}

    async def serving(self) -> tuple[str, str]:
        found = await self._call("GET", "/model_info")
        return str(found.get("weight_version")), str(found.get("model_path"))

    async def load(self, path: str, version: str) -> None:
        # Unless it is paused, it waits for running requests by itself, and delays new ones.
        mode = self._MODES.get(self._pause)
        if mode is not None:
            await self._call("POST", "/pause_generation", {"mode": mode}, timeout_s=LOAD_S)
        body = {
            "model_path": path,
            "load_format": "auto",
            "weight_version": version,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        found = await self._call("POST", "/update_weights_from_disk", body, timeout_s=LOAD_S)
        if not found.get("success"):
            raise ConflictError(f"{self._url} refused: {_words(found)}")
        if mode is not None:
            await self._call("POST", "/continue_generation", {})


ENGINES: Mapping[str, type[Engine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


def open_engine(to: str, url: str, *, token: str = "", pause: str = "wait") -> Engine:
    """A client of an engine; no I/O yet. Raises UsageError."""
    if to not in ENGINES:
        raise UsageError(f"--to: {to!r}; expected one of {', '.join(ENGINES)}")
    if pause not in get_args(Pause):
        raise UsageError(f"--pause: {pause!r}; expected one of {', '.join(get_args(Pause))}")
    return ENGINES[to](url, token=token, pause=pause)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The outcome of one frame at the engine."""

    step: int
    version: str
    """The version that the engine should have."""
    ok: bool
    in_force: str
    """The version that it has; empty without an answer, or between two versions."""
    reason: str = ""
    """Why it has another version."""
    sent_bytes: int = 0
    """Bytes that came from the training."""
    changed_bytes: int | None = None
    took_s: float = 0.0
    """Seconds from the frame to the engine's answer."""


@dataclass(kw_only=True)
class EngineFollower:
    """Brings frames to an engine, one after the other, the newest when it falls behind."""

    engine: Engine
    directory: Path
    """A directory that the engine reads under the same path. Must exist."""
    names: NameMap = field(default_factory=NameMap)
    """From the training's names to those of the engine's checkpoint."""
    pauses_s: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)
    """Pauses before another attempt, in seconds; the last one repeats."""
    attempts: int = 10
    """Most consecutive attempts that may fail."""

    def __post_init__(self) -> None:
        if not self.directory.is_dir():
            raise UsageError(
                f"--dir: {self.directory} is not a directory; create one that the engine can read"
            )
        self.directory = self.directory.resolve()
        self._good: tuple[str, str] | None = None
        """Version in force, and where it was loaded from."""
        self._written: set[Path] = set()

    async def updates(self, frames: AsyncIterator[ParamFrame]) -> AsyncGenerator[Update, None]:
        """The outcome of each frame that was tried; ends with the frames.

        Raises UnreachableError if the engine does not answer at the beginning, ConflictError, with
        the version in force, if too many attempts in a row failed.
        """
        version, path = await self.engine.serving()
        self._good = version, path
        upcoming: asyncio.Task[ParamFrame | None] = asyncio.create_task(_next(frames))
        failed = 0
        try:
            while (frame := await upcoming) is not None:
                upcoming = asyncio.create_task(_next(frames))
                while True:
                    found = await self.update(frame)
                    yield found
                    if found.ok:
                        failed = 0
                        break
                    failed += 1
                    if failed >= self.attempts:
                        raise ConflictError(
                            f"{failed} attempts failed, the last one because: {found.reason}. The "
                            f"engine has version {found.in_force or 'unknown'}"
                        )
                    await asyncio.sleep(self.pauses_s[min(failed, len(self.pauses_s)) - 1])
                    if upcoming.done() and upcoming.result() is not None:
                        break  # a newer one, rather than this one again
        finally:
            await cancelled(upcoming)

    async def update(self, frame: ParamFrame) -> Update:
        """Give one frame to the engine; if that fails, restore its last good weights."""
        began_s = time.monotonic()
        version = version_of(frame)
        reason, in_force = "", version
        try:
            path = await asyncio.to_thread(self._write, frame, version)
        except (ParamdError, OSError) as error:
            # The engine has not been asked yet.
            reason, in_force = str(error), self._good[0] if self._good is not None else ""
        else:
            try:
                await self.engine.load(str(path), version)
                self._good = version, str(path)
            except ParamdError as error:
                reason, in_force = str(error), await self._put_back()
        return Update(
            step=frame.step,
            version=version,
            ok=not reason,
            in_force=in_force,
            reason=reason,
            sent_bytes=frame.sent_bytes,
            changed_bytes=frame.changed_bytes,
            took_s=time.monotonic() - began_s,
        )

    async def _put_back(self) -> str:
        """Have the engine load the last good weights again; return the version in force then."""
        if self._good is None:
            return ""
        version, path = self._good
        try:
            await self.engine.load(path, version)
        except ParamdError:
            return ""  # it generates nothing until a load succeeds
        return version

    def _write(self, frame: ParamFrame, version: str) -> Path:
        """Write the frame under its version: all of it, or nothing."""
        path = self.directory / version
        if path in self._written and path.is_dir():
            return path
        part = self.directory / f".{version}.{secrets.token_hex(4)}.part"
        part.mkdir(mode=0o755)
        try:
            _save(part / FILE, frame, self.names)
            # A directory that another job of this name left is not known to be this frame.
            shutil.rmtree(path, ignore_errors=True)
            os.rename(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        in_force = Path(self._good[1]) if self._good is not None else None
        for old in self._written - {in_force}:
            shutil.rmtree(old, ignore_errors=True)
        self._written = {old for old in self._written if old == in_force} | {path}
        return path


def named(frame: ParamFrame, names: NameMap) -> dict[str, torch.Tensor]:
    """Full tensors by the engine's names, always in one order; tied ones under their first name."""
    first: dict[int, str] = {}
    for name in frame:
        first.setdefault(id(frame[name]), name)
    renamed = names.apply(first.values())
    return {renamed[name]: frame[name] for name in first.values()}


def version_of(frame: ParamFrame) -> str:
    """JOB-RUN-STEP."""
    return f"{frame.job}-{frame.incarnation}-{frame.step}"


def _save(path: Path, frame: ParamFrame, names: NameMap) -> None:
    tensors = named(frame, names)
    specs = [
        TensorSpec(name=name, dtype=str(one.dtype).removeprefix("torch."), shape=tuple(one.shape))
        for name, one in tensors.items()
    ]
    metadata = {"format": "pt", "paramd_job": frame.job, "paramd_step": str(frame.step)}
    ordered = file_order(specs)
    with path.open("xb") as file:
        file.write(encode_header(ordered, metadata))
        for spec in ordered:
            tensor = tensors[spec.name].detach().contiguous()
            for begin in range(0, tensor.nbytes, CHUNK_BYTES):
                size_bytes = min(CHUNK_BYTES, tensor.nbytes - begin)
                file.write(memory_at(tensor.data_ptr() + begin, size_bytes))
        file.flush()
        os.fsync(file.fileno())


async def _next(frames: AsyncIterator[ParamFrame]) -> ParamFrame | None:
    with suppress(StopAsyncIteration):
        return await anext(frames)
    return None


def _words(found: object) -> str:
    """An engine's answer in one line."""
    if isinstance(found, dict):
        for key in ("message", "error", "detail"):
            if found.get(key):
                return _words(found[key])
    return " ".join(str(found).split())[:500]
