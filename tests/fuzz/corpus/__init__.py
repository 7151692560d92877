"""Inputs by target, each a file: those that broke something once."""

from __future__ import annotations

from pathlib import Path

CORPUS = Path(__file__).parent
