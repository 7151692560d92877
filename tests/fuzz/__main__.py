"""`python -m tests.fuzz [--runs N | --seconds S] [TARGET...]`: fuzzes targets, one after another.

Ends with 1 when a target raised, hung, or grew. What broke it is left in `corpus/<target>/`,
where `tests/unit/test_fuzz_corpus.py` tries it again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.corpus import CORPUS
from tests.fuzz.parsers import PARSERS
from tests.fuzz.seeds import SEEDS
from tests.fuzz.servers import SERVERS

TARGETS = (*PARSERS, *SERVERS)

MAX_INPUT_BYTES = {
    "filter": 256, "glob": 48, "selection": 96, "stream": 96, "stream_framing": 128, "ticket": 512,
}  # fmt: skip
"""Longest input; others: 2,048. Longer text is the same again, and slower."""
HANG_S = 10
MAX_GROWTH_MB = 48
"""Between the first tenth of the inputs and the last: what libFuzzer keeps is less."""

_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_SECONDS = re.compile(r"Done \d+ runs in (\d+) second")
_MEMORY = re.compile(r"^#(\d+)\s.* rss: (\d+)Mb", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What became of one target."""

    inputs: int
    seconds: int
    rss_mb: tuple[int, int]
    """After a tenth of the inputs, and at the end."""
    failure: str


def fuzz(name: str, *, runs: int, seconds: int) -> Run:
    """Runs one target until either bound; 0 is none."""
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for number, seed in enumerate(SEEDS.get(name, _any_bytes)()):
            (Path(work) / f"seed-{number}").write_bytes(seed)
        command = [sys.executable, "-m", "tests.fuzz.one", name, work, str(corpus)]
        command += [
            f"-max_len={MAX_INPUT_BYTES.get(name, 2048)}",
            f"-timeout={HANG_S}",
            "-print_final_stats=1",
        ]
        command += ["-rss_limit_mb=2048", f"-artifact_prefix={corpus}/", "-reload=0"]
        command += [f"-runs={runs}"] if runs else []
        command += [f"-max_total_time={seconds}"] if seconds else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return _read(done.returncode, done.stdout + done.stderr)


def _any_bytes() -> list[bytes]:
    return [bytes(range(256)) * 2]


def _read(code: int, text: str) -> Run:
    executed, took = _EXECUTED.search(text), _SECONDS.search(text)
    inputs = int(executed[1]) if executed is not None else 0
    memory = [(int(at), int(rss)) for at, rss in _MEMORY.findall(text)]
    early = [rss for at, rss in memory if at >= inputs // 10]
    rss_mb = (early[0], early[-1]) if early else (0, 0)
    failure = text[-4000:] if code else ""
    if rss_mb[1] - rss_mb[0] > MAX_GROWTH_MB:
        failure += f"\nmemory grew from {rss_mb[0]} to {rss_mb[1]} MiB"
    if not inputs:
        failure += "\nnothing was run"
    seconds = int(took[1]) if took is not None else 0
    return Run(inputs=inputs, seconds=seconds, rss_mb=rss_mb, failure=failure)


def main() -> int:
    """Prints a row for each target."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="TARGET")
    parser.add_argument("--runs", type=int, default=0, help="inputs for each target")
    parser.add_argument("--seconds", type=int, default=0, help="seconds for each target")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    if not options.runs and not options.seconds:
        parser.error("say --runs or --seconds")
    failed = False
    print("| target | inputs | seconds | MiB, early and last | |\n|---|---|---|---|---|")
    for name in options.targets:
        run = fuzz(name, runs=options.runs, seconds=options.seconds)
        failed |= bool(run.failure)
        verdict = "FAILED" if run.failure else "ok"
        early, last = run.rss_mb
        print(f"| {name} | {run.inputs:,} | {run.seconds} | {early}, {last} | {verdict} |")
        if run.failure:
            print(run.failure, file=sys.stderr)
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
