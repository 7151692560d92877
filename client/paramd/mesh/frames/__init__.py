"""Streams of frames, one per update: gradients, followed parameters."""
