"""Measurements: ratios against a peer or a physical limit taken in the same run."""
