"""Captured gradients: slots in shared memory, frames, pins."""
