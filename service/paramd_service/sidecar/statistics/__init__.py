"""Statistics of tensors, computed by torch."""
