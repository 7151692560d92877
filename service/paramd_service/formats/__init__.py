"""File formats of exports: batches of bytes, casts, torch.distributed.checkpoint metadata."""
