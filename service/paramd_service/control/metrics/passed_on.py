"""A sidecar's metrics, as a control plane passes them on: its own series, and no other's.

A sidecar writes the text itself, so one that lies could write series of other jobs, or text
without end. Passed on are a sidecar's own names, with the labels of the job and rank asked for.
"""

from __future__ import annotations

import re

from paramd.bounds import METRICS_BYTES, METRICS_LINES

_COMMENT = re.compile(r"# (HELP|TYPE) paramd_sidecar_[a-z_]{1,64} [ -~]{1,200}")
_NUMBER = r"[-+]?(?:[0-9.]{1,32}(?:e[-+]?[0-9]{1,4})?|inf|nan)"


def own_series(text: str, *, job: str, rank: int) -> str:
    """The lines of `text` (Prometheus' format 0.0.4) that are about this rank of this job."""
    # A job's name needs no escapes: see `state_files.is_job_name`.
    labels = f'job="{re.escape(job)}",rank="{rank}"' + r'(?:,cause="[ !#-\[\]-~]{1,64}")?'
    sample = re.compile(rf"paramd_sidecar_[a-z_]{{1,64}}\{{{labels}\}} {_NUMBER}")
    lines = text[:METRICS_BYTES].split("\n")[:METRICS_LINES]
    kept = [line for line in lines if _COMMENT.fullmatch(line) or sample.fullmatch(line)]
    return "".join(f"{line}\n" for line in kept)
