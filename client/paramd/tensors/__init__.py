"""Edit operations applied to torch tensors; shared by the trainer and the sidecar's preview."""
