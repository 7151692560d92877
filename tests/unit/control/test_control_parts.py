"""What the parts of a control plane ask of each other, and one that fails."""

import pytest

from paramd.errors import ConflictError
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.parts import ControlPart
from paramd_service.parts import CONTROL
from tests import control_services


class Failing(ControlPart):
    """Fails whatever it hears."""

    name = "failing"

    def began(self, mesh: Incarnation) -> None:
        raise ValueError("began")

    def ended(self, mesh: Incarnation) -> None:
        raise ValueError("ended")


async def test_a_packages_part_that_fails_ends_no_job_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"{__name__}:{Failing.__name__}"
    edits = next(part for part in CONTROL if ".edits." in part)
    host = control_services.host(names=(name, edits))
    mesh = host.jobs.get("run")
    host.parts.began(mesh)
    assert await host.parts.lost_marks("run") == [], "the next part has begun"
    host.parts.ended(mesh)
    await host.parts.closed()
    told = [one.getMessage() for one in caplog.records]
    assert told == [
        "part failing has failed in began",
        "part failing has failed in ended",
    ]


async def test_what_one_part_asks_of_another_that_is_not_there_is_refused() -> None:
    host = control_services.host(names=())
    mesh = host.jobs.get("run")
    with pytest.raises(ConflictError, match="pausing training is not served here"):
        await host.parts.pause("run", "an alert")
    with pytest.raises(ConflictError, match="an export is not served here"):
        await host.parts.exported("run", "abc")
    assert host.parts.look(mesh) is None
    assert host.parts.failed("run") is None
    assert await host.parts.lost_marks("run") == []
    assert await host.parts.checkpoints("run") == []
