"""What cgroups leave, as containers and schedulers lay them out; memory keeps its size."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paramd.memory.handover import Descriptors
from paramd.memory.left import memory_now

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
NOTHING = 9223372036854771712
"""As v1 says that there is no limit."""


HOST_BYTES = 1 << 30


def host(root: Path, own: str, limits: dict[str, tuple[Any, ...]]) -> Path:
    """A root with these files of the kernel."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own + "\n")
    (root / "proc/meminfo").write_text(
        f"MemTotal: {HOST_BYTES >> 10} kB\nMemFree: 7 kB\nMemAvailable: {HOST_BYTES >> 11} kB\n"
    )
    for folder, (files, *values) in limits.items():
        cgroup = root / "sys/fs/cgroup" / folder
        cgroup.mkdir(parents=True, exist_ok=True)
        for name, value in zip(files[:2], values[:2], strict=True):
            (cgroup / name).write_text(f"{value}\n")
        (cgroup / "memory.stat").write_text(f"cache 7\n{files[2]} {values[2]}\n")
    return root


@pytest.mark.parametrize(
    ("own", "limits", "left"),
    [
        ("0::/", {"": (V2, 300, 100, 0)}, 200),
        ("0::/slurm/job/step", {"slurm/job": (V2, 300, 290, 40), "slurm": (V2, 900, 300, 0)}, 50),
        ("0::/slurm/job", {"slurm": (V2, 300, 280, 0), "slurm/job": (V2, "max", 10, 0)}, 20),
        # A soft limit, above which the kernel stops tasks.
        ("0::/", {"": (("memory.high", *V2[1:]), 300, 170, 0)}, 130),
        ("4:memory:/", {"memory": (V1, 300, 260, 0)}, 40),
        ("5:cpu:/x\n4:memory:/a/b", {"memory/a": (V1, 90, 60, 0), "memory": (V1, NOTHING, 60, 0)}, 30),  # noqa: E501
        # A container's own is mounted at the root; the path is the host's.
        ("4:memory:/docker/0af1\n0::/init", {"memory": (V1, 300, 270, 10)}, 40),
        ("0::/", {}, HOST_BYTES // 2),
    ],
)  # fmt: skip
def test_every_limit_around_this_process_counts(
    tmp_path: Path, own: str, limits: dict[str, tuple[Any, ...]], left: int
) -> None:
    assert memory_now(host(tmp_path, own, limits)).left_bytes == left


def test_nobody_resizes_shared_memory_and_no_other_user_opens_it() -> None:
    with closing(Descriptors.create(1 << 16)) as made:
        for name in ("page", "arena", "edits", "gradients", "optimizer", "continuation"):
            descriptor = getattr(made, name)
            assert os.fstat(descriptor).st_mode & 0o777 == 0o600
            for size_bytes in (0, 1 << 40):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, size_bytes)
