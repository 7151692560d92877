"""Exports: what a sidecar writes, reads and checks of them."""
