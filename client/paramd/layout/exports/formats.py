"""The table of export formats, used by the CLI, REST and the wire."""

from __future__ import annotations

from collections.abc import Mapping

from paramd.layout.exports.dcp import DCP
from paramd.layout.exports.files import Format
from paramd.layout.exports.safetensors import SAFETENSORS

FORMATS: Mapping[str, Format] = {one.name: one for one in (SAFETENSORS, DCP)}
"""By name, the default first."""
