"""A second control plane on another host: it copies the store, and may take over."""
