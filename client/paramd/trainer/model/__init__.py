"""Which tensors a model has and how they are sharded, for each kind of wrapper."""
