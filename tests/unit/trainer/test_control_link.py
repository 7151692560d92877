"""The trainer's end of its control plane, as far as it needs none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paramd.errors import UnreachableError
from paramd.helpers import end
from paramd.trainer.helpers import control_link, sidecar_link
from paramd.trainer.helpers.control_link import ControlLink, Tracking
from paramd.trainer.helpers.sidecar_link import Identity, Patience
from paramd.trainer.settings import AttachSettings

READY = {"url": "http://127.0.0.1:1", "grpc_address": "", "listen": "", "grpc_listen": "", "exports": []}  # noqa: E501 # fmt: skip


def test_a_process_of_the_link_before_is_waited_for_as_long_as_a_new_one() -> None:
    patience = Patience("the sidecar of rank 0", 20.0)
    assert patience.wait_s < 21.0
    assert patience.may_stay()


def test_each_process_that_comes_up_late_is_kept_longer_and_its_log_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(sidecar_link, "time", SimpleNamespace(monotonic=lambda: now_s))
    patience, kept_s = Patience("the control plane", 20.0), list[float]()
    for _ in range(3):
        patience.begin()
        begun_s = now_s
        while patience.may_stay():
            now_s += 20.0
        kept_s.append(now_s - begun_s)
    assert kept_s == [160.0, 320.0, 640.0]
    log_path = tmp_path / "control.log"
    log_path.touch()
    for text in (str(patience.late(None, log_path)), log_path.read_text()):
        assert "the control plane is still starting after 640 s" in text
        assert "PARAMD_SIDECAR_START_TIMEOUT_S (now 20) allows at attach" in text


def test_trackers_that_were_closed_are_not_started_by_a_late_control_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(control_link, "spawn", lambda *args, **_: started.append(args))
    tracking = Tracking("j", AttachSettings(log="tensorboard"), tmp_path)
    tracking.close()
    tracking.open()
    assert not started


def link_to(
    process: subprocess.Popen[bytes], folder: Path, patch: pytest.MonkeyPatch
) -> ControlLink:
    """A link whose control plane is this process."""
    patch.setattr(control_link, "spawn", lambda *_, **__: process)
    identity = Identity(
        job="j", incarnation=1, rank=0, world_size=1, public_key=b"", rank_ticket="",
        private_key=b"k",
    )  # fmt: skip
    return ControlLink(identity, AttachSettings(), directory=folder, token="t")


def saying(text: str) -> subprocess.Popen[bytes]:
    """A process that prints a line, and lives."""
    script = f"import sys; print({text!r}, flush=True); sys.stdin.read()"
    return subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_a_control_plane_that_is_up_counts_as_started_whatever_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = saying(json.dumps(READY))
    link = link_to(process, tmp_path, monkeypatch)
    seen: list[str] = []

    def fail() -> None:
        raise ValueError("I/O operation on closed file")

    link.when_up(fail)
    link.when_up(lambda: seen.append(link.url))
    try:
        os.close(link._start())
        assert seen == [READY["url"]]
    finally:
        assert process.stdin is not None
        process.stdin.close()
        end(process, grace_s=5.0)
        link.close()


def test_a_process_that_says_something_else_is_ended_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = saying("this host is maintained on Mondays")
    link = link_to(process, tmp_path, monkeypatch)
    try:
        with pytest.raises(UnreachableError, match="maintained on Mondays"):
            link._start()
        assert process.poll() is not None
    finally:
        assert process.stdin is not None
        process.stdin.close()
        end(process, grace_s=0.0)
        link.close()
