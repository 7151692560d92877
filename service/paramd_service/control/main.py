"""The control plane's process: parse, claim its addresses, load the rest, run, close."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from paramd import clock, gone, places
from paramd.errors import ParamdError, UsageError, codes_of
from paramd.helpers import be_first_victim
from paramd_service import core_dumps, logs
from paramd_service.control.base.config import Bootstrap, ControlConfig, read_bootstrap
from paramd_service.control.base.endpoint import (
    HANDOVER,
    Claim,
    Whereabouts,
    ask_for_ports,
    end_past,
)
from paramd_service.control.base.site import site_dir

if TYPE_CHECKING:
    from paramd_service.control.control_plane import ControlPlane

GC_YOUNG = 20_000
"""Net allocations that trigger a young collection; Python's default is 700."""

log = logging.getLogger("paramd.control")


def main(arguments: Sequence[str]) -> int:
    """Run one control plane until it has nothing left to do; return the exit code."""
    be_first_victim()
    core_dumps.forbid()
    try:
        formatter = logs.configure(level=_level(os.environ.get("PARAMD_LOG_LEVEL", "INFO")))
        config = ControlConfig.from_arguments(arguments)
        # An embedded one has its trainer's environment, and the trainer has warned.
        if not config.job:
            for warning in gone.variables(os.environ):
                log.warning("%s", warning)
        bootstrap = read_bootstrap(sys.stdin.buffer, job=config.job) if config.job else None
        if bootstrap is not None:
            formatter.hide(bootstrap.token, bootstrap.private_key.hex())
        if bootstrap is not None and not bootstrap.ended:
            end_past(bootstrap.job)
            ask_for_ports(bootstrap)
        folder = places.job_dir(config.job) if config.job else site_dir()
        with clock.kept(folder / "control.clock"), closing(Claim(config, bootstrap)) as claim:
            if bootstrap is not None and bootstrap.resumes:
                # Now: a training that continues from memory should wait as little as possible.
                claim.announce(bootstrap)
                _tell(claim.whereabouts())
            asyncio.run(_run(config, bootstrap, claim))
    except ParamdError as error:
        print(f"paramd control: {error}", file=sys.stderr)
        return codes_of(error).exit
    return 0


def _level(wanted: str) -> str:
    if wanted.upper() not in logging.getLevelNamesMapping():
        levels = "DEBUG, INFO, WARNING or ERROR"
        raise UsageError(f"PARAMD_LOG_LEVEL: {wanted!r}; expected {levels}")
    return wanted.upper()


def _tell(where: Whereabouts) -> None:
    print(json.dumps(asdict(where)), flush=True)


async def _run(config: ControlConfig, bootstrap: Bootstrap | None, claim: Claim) -> None:
    # Imported here, with gRPC, FastAPI and SQLAlchemy: the imports above take a tenth of the time.
    from paramd_service.admission import few_heaps, give_back_memory
    from paramd_service.aio import stopped
    from paramd_service.control.control_plane import ControlPlane

    few_heaps()
    control = ControlPlane(config, bootstrap, claim)
    _handle_signals(control)
    giving_back = asyncio.get_running_loop().create_task(give_back_memory())
    try:
        where = await control.start()
        _prepare_for_many()
        if bootstrap is None or not bootstrap.resumes:
            _tell(where)
        reason = await control.wait_until_done()
        log.info("stopping: %s", reason)
    finally:
        await stopped(giving_back)
        await control.stop()


def _prepare_for_many() -> None:
    """Tune for thousands of sidecars, each a descriptor and some hundred long-lived objects."""
    from paramd_service.admission import raise_descriptor_limit

    raise_descriptor_limit()
    # With 4,096 sidecars' objects to scan, p95 of GET ranks was 157 ms without this, 89 with it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG, 20, 100)


def _handle_signals(control: ControlPlane) -> None:
    """Drain on the first signal, exit at once on the second."""
    loop = asyncio.get_running_loop()

    def handle(number: int) -> None:
        if control.asked_to_stop:
            os._exit(128 + number)
        control.ask_to_stop(f"signal {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    loop.add_signal_handler(HANDOVER, control.hand_over)
