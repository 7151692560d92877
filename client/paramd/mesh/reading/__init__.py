"""From a pinned snapshot to assembled tensors and statistics."""
