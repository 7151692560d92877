"""Inputs by target, each a file: those that broke something once."""

from pathlib import Path

CORPUS = Path(__file__).parent
