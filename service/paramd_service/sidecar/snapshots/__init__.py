"""Snapshots and their pins, kept within a budget of bytes."""
