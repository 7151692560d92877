"""Thin clients: a sidecar that gathers from all ranks, and answers with whole tensors."""
