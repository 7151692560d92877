"""Edits of one rank: what is staged, checked and made ready in its sidecar."""
