"""Generated stubs of the protos; `make protos` writes them."""
