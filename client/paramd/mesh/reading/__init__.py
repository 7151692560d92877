"""Reading a job: pins, streams, assembled tensors, statistics."""
