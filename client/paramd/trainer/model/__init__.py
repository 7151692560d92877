"""The tensors of a model and their sharding, for each kind of wrapper."""
