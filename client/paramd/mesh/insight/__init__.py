"""Diagnosis of a run: stuck ranks, differences between states."""
