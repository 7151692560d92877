"""Several cases at once, each a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.report import RESULTS, Report, goals_table
from benchmarks.verdicts import OF_CI, cases, one
from benchmarks.verdicts.one import AGENT_GRACE_S
from benchmarks.verdicts.table import RIGHT, Judged, judged, report

FOLDER = RESULTS / "verdicts"
"""Folders of the cases of the last campaign: outputs, outcome, and the recorded series."""

_STARTS_EVERY_S = 2.0
"""Between two starts, or control planes that begin would be the first load of all cases."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a case failed, was wrong, late or missed; 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks verdicts", description=__doc__)
    parser.add_argument("--cases", default="", help="names with commas, healthy, sick or ci")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each case, at least")
    parser.add_argument("--parallel", type=int, default=4, help="cases at once")
    parser.add_argument(
        "--saved", action="store_true", help="run nothing: judge what is in the cases' folders"
    )
    parser.add_argument(
        "--again", action="store_true", help="run those that are not right once more, one by one"
    )
    options = parser.parse_args(arguments)
    names = chosen(options.cases)
    unknown = [name for name in names if name not in cases()]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(cases())}")
    if options.saved:
        done = report([_judged(name) for name in names if _outcome(name) is not None])
    else:
        # So that cases end with it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        done = campaign(names, minutes=options.minutes, parallel=options.parallel)
        wrong = [str(one["case"]) for one in _found(done) if one["state"] not in RIGHT]
        if wrong and options.again:
            campaign(wrong, minutes=options.minutes, parallel=1)
            done = report([_judged(name) for name in names])
        done.save()
    print(done.markdown())
    print(goals_table([done]).markdown())
    return 0 if all(one["state"] in RIGHT for one in _found(done)) else 1


def _found(done: Report) -> list[dict[str, str]]:
    found = done.numbers["cases"]
    assert isinstance(found, list)
    return found


def chosen(text: str) -> list[str]:
    """Names of the cases that a text such as "ci" or "calm,killed" means; all when it is empty."""
    if text == "healthy":
        return [name for name, one in cases().items() if one.expected is None]
    if text == "sick":
        return [name for name, one in cases().items() if one.expected is not None]
    if text == "ci":
        return list(OF_CI)
    return [name.strip() for name in text.split(",")] if text else list(cases())


def campaign(names: Sequence[str], *, minutes: float, parallel: int) -> Report:
    """Run cases, `parallel` at a time, and judge them."""
    waiting, found = list(names), dict[str, Judged]()
    running: dict[str, tuple[BaseProcess, float]] = {}
    try:
        while waiting or running:
            if waiting and len(running) < parallel:
                name = waiting.pop(0)
                running[name] = _start(name, minutes), _patience_s(minutes)
                time.sleep(_STARTS_EVERY_S)
            for name, (process, until_s) in list(running.items()):
                if not process.is_alive() or time.monotonic() > until_s:
                    del running[name]
                    process.terminate()
                    process.join()
                    found[name] = _judged(name)
                    print(f"{name}: {found[name].state} {found[name].why}", file=sys.stderr)
            time.sleep(0.2)
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()
    return report([found[name] for name in names])


def _patience_s(minutes: float) -> float:
    return time.monotonic() + 60 * minutes * 5 + 120 + AGENT_GRACE_S


def _start(name: str, minutes: float) -> BaseProcess:
    folder = _folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Torch is here already: importing it once more for each case would be the first load of all.
    process = get_context("fork").Process(target=_one, args=(name, folder, minutes))
    process.start()
    return process


def _one(name: str, folder: Path, minutes: float) -> None:
    os.setsid()
    output = os.open(folder / "case.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    one.main([name, str(folder), str(minutes)])


def _judged(name: str) -> Judged:
    return judged(cases()[name], _outcome(name))


def _folder(name: str) -> Path:
    return FOLDER / name


def _outcome(name: str) -> dict[str, object] | None:
    path = _folder(name) / "outcome.json"
    if not path.exists():
        return None
    told: dict[str, object] = json.loads(path.read_text())
    return told
