"""Edit operations on torch tensors, for the trainer and the sidecar's dry runs."""
