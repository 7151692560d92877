"""paramd's page in torch's own debug server, over a job that hangs."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from torch.distributed.debug import _frontend

from paramd.integrations.torch_debug import ParamdHandler
from tests.launch import start_ranks
from tests.multiprocess.truth import wait_until

JOB = "stuck"


class OnLoopback(_frontend._IPv6HTTPServer):
    """As torch's, which listens on all interfaces."""

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        super().__init__(("::1", address[1]), handler)


@contextmanager
def server(handler: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """torch's server with this handler alone; its URL."""
    monkeypatch.setattr(_frontend, "_IPv6HTTPServer", OnLoopback)
    frontend = _frontend.FrontendServer(0, [handler])
    try:
        yield f"http://[::1]:{frontend._server.server_port}"
    finally:
        frontend._server.shutdown()
        frontend._server.server_close()
        frontend.join()


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        found: str = answer.read().decode()
    return found


@pytest.mark.timeout(180)
def test_torchs_server_shows_which_rank_keeps_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_dir = tmp_path / "state"
    monkeypatch.setenv("PARAMD_STATE_DIR", str(state_dir))
    args = [str(tmp_path)]
    with start_ranks(
        "tests.multiprocess.workers.stuck", 2, args=args, state_dir=state_dir
    ) as ranks:
        try:
            ranks.wait_for_text("trains", rank=0)
            handler = ParamdHandler(job=JOB)
            # Or torch could not send it to its process, where that is spawned.
            assert ForkingPickler.dumps(handler)
            with server(handler, monkeypatch) as url:
                assert '<a href="/paramd">paramd</a>' in page(f"{url}/paramd")
                (tmp_path / "hang.1").touch()
                wait_until(
                    lambda: "for rank 1, which is" in page(f"{url}/paramd"), "it says who is stuck"
                )
                found = json.loads(page(f"{url}/paramd_json?rank=1"))
                assert [row["rank"] for row in found["ranks"]] == [1]
                assert found["ranks"][0]["log_lines"] == []
                assert "stuck.py" in page(f"{url}/paramd?rank=1")
                wrong = page(f"{url}/paramd?rank=%3Cscript%3E")
                assert "expected numbers of ranks" in wrong
                assert "<script>" not in wrong
                text = handler.dump()
                assert text is not None
                assert "rank 1, which is" in text.splitlines()[0]
            (tmp_path / "hang.1").unlink()
            (tmp_path / "end").touch()
            assert [one.returncode for one in ranks.wait(timeout_s=60.0)] == [0, 0]
        except BaseException:
            print(ranks.outputs())
            raise
