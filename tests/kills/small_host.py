"""A small host with a kernel of its own: User Mode Linux, a Linux that runs as a plain process.

It needs no privileges, no virtual machine and no memory group of this machine, and has memory of a
chosen size, its own out-of-memory killer and cgroup v2. Its files are this machine's; its programs
can write where this user can. Debian's package `user-mode-linux` brings `linux.uml` (6.16 or newer:
older ones do not start on processors with large vector registers).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.launch import ROOT

KERNEL = "PARAMD_TESTS_UML"
"""Names the program, where it is not `linux.uml` of the PATH."""

BOOT_S = 120.0
INIT = """#!/bin/bash
# The small host's only script; when it ends, so does the host.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t cgroup2 none /sys/fs/cgroup
# Nothing of the small host is left behind in this machine's folders.
mount -t tmpfs -o mode=1777 tmp /run
mkdir -p /dev/shm
mount -t tmpfs -o mode=1777 shm /dev/shm
ip link set lo up
hostname localhost
export TMPDIR=/dev/shm HOME=/run GLOO_SOCKET_IFNAME=lo PYTHONDONTWRITEBYTECODE=1
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
cd {root}
{command} >{folder}/output 2>&1 </dev/null
echo $? >{folder}/status
dmesg >{folder}/kernel
echo o >/proc/sysrq-trigger
sleep 60
"""


def run_in_small_host(
    command: Sequence[str], *, program: str, memory_mib: int, timeout_s: float
) -> int:
    """Run a command there, from the tests' root; print what it prints. Returns its status.

    Raises TimeoutExpired, and RuntimeError for a host that did not get to its end.
    """
    with tempfile.TemporaryDirectory(prefix="paramd-host-") as name:
        folder = Path(name)
        init = folder / "init"
        text = INIT.format(root=shlex.quote(str(ROOT)), command=shlex.join(command), folder=folder)
        init.write_text(text)
        init.chmod(0o700)
        (folder / "output").touch()
        host = subprocess.Popen(
            [
                program, f"mem={memory_mib}M", "rootfstype=hostfs", "rootflags=/", "rw",
                f"init={init}", f"uml_dir={folder}/uml", "seccomp=auto",
                "con=null", "con0=null,fd:1",
            ],
            # Its memory is a file of that folder's, without a name: on a disk, all of it would be
            # written there again and again.
            env=os.environ | {"TMPDIR": "/dev/shm"},
            stdin=subprocess.DEVNULL, stdout=(folder / "console").open("wb"),
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        follow = subprocess.Popen(
            ["tail", "-n", "+1", "-f", f"--pid={host.pid}", folder / "output"], stdout=sys.stdout
        )
        try:
            host.wait(timeout_s)
            follow.wait(BOOT_S)
        finally:
            for process in (host, follow):
                process.kill()
                process.wait()
        if not (folder / "status").exists():
            raise RuntimeError(
                f"the small host ended early\n{(folder / 'console').read_text()[-4000:]}"
            )
        killed = [x for x in (folder / "kernel").read_text().splitlines() if "Killed process" in x]
        print(f"the small host's kernel log has {len(killed)} kills; the last ones:")
        print("\n".join(killed[-4:]), flush=True)
        return int((folder / "status").read_text())
