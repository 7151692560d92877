"""What a sidecar sees of its host and its GPUs: why its rank may be slow."""
