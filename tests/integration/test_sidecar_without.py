"""A sidecar without the parts of a subject, or of all: it attaches, proves a step and is read."""

from pathlib import Path

import grpc
import pytest

from paramd.parts import TRACE, found
from paramd.security.tickets import Role
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.parts import SIDECAR
from paramd_service.sidecar.parts import SidecarPart
from tests.integration.fake_trainer import attached
from tests.integration.sidecar_process import Client, client_of, sidecar, values_of
from tests.integration.without import subjects

SUBJECTS = subjects(SIDECAR)
"""One of the calls of each subject, with a request that reaches it."""
CALLS = {
    "edits": ("GetEdit", pb.GetEditRequest()),
    "follow": ("DeltaSnapshot", pb.DeltaSnapshotRequest()),
    "gateway": ("Summon", pb.SummonRequest()),
    "hosts": ("ReachPeers", pb.ReachPeersRequest()),
    "insight": ("GetLogged", pb.GetLoggedRequest()),
    "resume": ("ListKeptStates", pb.ListKeptStatesRequest()),
    "statistics": ("ComputeStats", pb.ComputeStatsRequest()),
}


def read(client: Client) -> set[int]:
    """The words of a snapshot: one number, the step, if it is of one step."""
    pin = client.pin()
    found = values_of(client.read(pin.snapshot_id))
    assert found == {pin.header.step}
    return found


@pytest.mark.parametrize(
    "without",
    dict.fromkeys([(), *((one,) for one in SUBJECTS), SUBJECTS]),
    ids=lambda without: ",".join(without) or "nothing",
)
def test_what_is_left_attaches_and_is_read_and_says_what_is_missing(
    without: tuple[str, ...], tmp_path: Path
) -> None:
    with (
        sidecar(tmp_path, without=without) as process,
        attached(process.socket_path) as trainer,
        client_of(trainer, Role.EDITOR) as client,
    ):
        trainer.update()
        assert read(client) == {1}
        trainer.update()
        assert read(client) == {2}
        assert client.state().state.step == 2
        assert "paramd_sidecar_step" in client.call("GetMetrics", pb.GetMetricsRequest()).text
        for subject, (method, request) in CALLS.items():
            if subject in without or subject not in SUBJECTS:
                with pytest.raises(grpc.RpcError, match=f"{method} is not served here") as refused:
                    list(answers(client, method, request))
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert process.terminate() == 0


def answers(client: Client, method: str, request: object) -> list[object]:
    """Of a call with one answer, or a stream of them."""
    answer = client.call(method, request)
    return list(answer) if hasattr(answer, "__iter__") else [answer]


def test_the_calls_of_parts_are_logged_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE, "1")
    with sidecar(tmp_path) as process, attached(process.socket_path) as trainer:
        trainer.update()
        with client_of(trainer) as client:
            client.state()
        log = process.log
    assert '"event": "part-called"' in log
    for part, method in (("edits", "attached"), ("insight", "report"), ("resume", "copying")):
        assert f'"part": "{part}", "method": "{method}", "took_us"' in log


def test_what_is_no_part_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="pathlib:Path is no SidecarPart"):
        found(["pathlib:Path"], "sidecar", SidecarPart)
