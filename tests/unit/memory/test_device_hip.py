"""The claims about arenas on a device, of HIP's names; and what HIP does otherwise.

The simulated runtime has HIP's structures and calls (tests/gpu/driver); no HIP is involved.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from paramd.memory import device_arena, device_driver
from paramd.memory.device_arena import TrainerDevice, create, why_not
from paramd.memory.device_driver import HIP, DeviceError, Driver
from paramd.trainer.home import device as device_module
from paramd.trainer.home.device import DeviceHome
from paramd.trainer.home.mirrored import MirroredHome, home_of
from tests.gpu.driver import Standin, driver_in
from tests.needs import program
from tests.unit.memory.test_device_arena import (  # noqa: F401
    Both,
    both,
    made_and_mapped,
    test_a_copy_that_no_event_orders_is_seen,
    test_a_copy_waits_for_the_update_that_was_published,
    test_a_device_of_another_process_is_found_by_its_uuid,
    test_a_full_device_is_told_as_such,
    test_memory_lives_as_long_as_its_last_descriptor,
    test_state_is_read_across_allocations_once_the_event_behind_it_has_come,
    test_the_fence_tells_whether_the_device_finished_what_was_told,
)

BY_ADDRESS, BY_VALUE = 60_300_000, 70_100_000
"""Versions of HIP, by how they take a descriptor."""


@pytest.fixture(params=[BY_ADDRESS, BY_VALUE])
def loaded(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Driver, Standin]]:
    monkeypatch.setenv("PARAMD_STANDIN_LATE_US", "3000")
    monkeypatch.setenv("PARAMD_STANDIN_HIP_VERSION", str(request.param))
    with driver_in(tmp_path, HIP) as (driver, standin):
        for module in (device_arena, device_module):
            monkeypatch.setattr(module, "load", lambda *_: driver)
        yield driver, standin
        driver._call("hipSetDevice", 0)


def test_the_device_is_made_current_and_then_what_the_thread_had(
    both: Both,  # noqa: F811
) -> None:
    driver = both.driver
    driver._call("hipSetDevice", 1)  # on which nothing works
    os.close(create(driver, 0, 8))
    made_and_mapped(driver)
    both.trainer.publish()
    both.trainer.finish()
    TrainerDevice(driver, 0).close()
    assert driver._current() == 2
    both.reader.is_whole()  # on a thread of the sidecar's own
    assert driver._current() == 1


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("PARAMD_STANDIN_LIMITS", "vmm", "the device does not support virtual memory management"),
        ("PARAMD_STANDIN_FAIL", "cuIpcGetEventHandle=801", "refused hipIpcGetEventHandle with 801"),
        ("PARAMD_STANDIN_FAIL", "cuMemExportToShareableHandle=801", "refused hipMemExportTo"),
    ],
)
def test_a_device_that_lacks_something_has_its_parameters_mirrored_with_one_line(
    loaded: tuple[Driver, Standin],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    reason: str,
) -> None:
    assert why_not(loaded[0], 0) == ""
    home = home_of(nn.Linear(2, 2), "device")
    assert isinstance(home, DeviceHome)
    assert home.device.request.kind == HIP
    home.device.close()
    monkeypatch.setenv(variable, value)
    assert isinstance(home_of(nn.Linear(2, 2), "device"), MirroredHome)
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_a_runtime_that_lacks_a_function_says_which(tmp_path: Path) -> None:
    library = tmp_path / "libold.so"
    command = [program("cc"), "-shared", "-x", "c", "/dev/null", "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    with pytest.raises(DeviceError, match=r"HIP runtime .*hipInit.*PARAMD_HIP_RUNTIME"):
        device_driver.HipDriver(str(library))
