"""The hosts of a job: which others one reaches, and what a sidecar sees of its own and its GPUs."""
